"""Options that several commands share. Each is also a variable `TURNMILL_<NAME>`.

Options that are settings have no variable here: the settings read it themselves, and then errors name the variable.
"""

from __future__ import annotations

from typing import Annotated

import typer

APP_HELP = "module, module:attribute or path.py"

RedisUrl = Annotated[
    str | None,
    typer.Option("--redis-url", metavar="URL", help="Redis or Valkey; unset: embedded. [env var: TURNMILL_REDIS_URL]"),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="PREFIX", help="Prefix of all keys. [env var: TURNMILL_NAMESPACE]"),
]
Json = Annotated[bool, typer.Option("--json", envvar="TURNMILL_JSON", help="One JSON object per line.")]
AppOption = Annotated[str | None, typer.Option("--app", envvar="TURNMILL_APP", metavar="APP", help=APP_HELP)]
AppArgument = Annotated[str, typer.Argument(envvar="TURNMILL_APP", metavar="APP", help=APP_HELP)]
OptionalAppArgument = Annotated[
    str | None, typer.Argument(envvar="TURNMILL_APP", metavar="APP", help=APP_HELP, show_default=False)
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", envvar="TURNMILL_CONCURRENCY", min=1, metavar="N", help="Calls at a time."),
]
TurnArgument = Annotated[str, typer.Argument(metavar="TURN", help="A turn's id.", show_default=False)]
Reason = Annotated[
    str | None, typer.Option("--reason", envvar="TURNMILL_REASON", metavar="R", help="What is told as the reason.")
]
SubTurns = Annotated[
    bool, typer.Option("--sub-turns", envvar="TURNMILL_SUB_TURNS", help="Also the events of turns that it starts.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", envvar="TURNMILL_TIMEOUT", min=0, metavar="SECONDS", help="Wait no longer (exit code 3)."
    ),
]
