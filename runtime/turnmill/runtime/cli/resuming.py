"""`turnmill resume`: the results that a suspended turn waits for, from files or from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

Results = Annotated[
    list[str] | None,
    typer.Option(
        "--result",
        envvar="TURNMILL_RESULT",
        metavar="CALL_ID=VALUE",
        help="A call's result: JSON or text, or @FILE with it (@- is stdin); may be repeated.",
    ),
]
MessageText = Annotated[
    str | None,
    typer.Option("--message", envvar="TURNMILL_MESSAGE", metavar="TEXT", help="A message behind the results."),
]
WatchIt = Annotated[
    bool, typer.Option("--watch/--detach", envvar="TURNMILL_WATCH", help="Watch the turn to its end or next rest.")
]


class Request(NamedTuple):
    """What was asked for on the command line."""

    turn_id: str
    results: dict[str, Any]
    message: str | None
    watch: bool
    as_json: bool
    timeout: float | None
    app: str | None


def resume(
    turn: options.TurnArgument,
    result: Results = None,
    message: MessageText = None,
    watch: WatchIt = True,
    app: options.AppOption = None,
    as_json: options.Json = False,
    timeout: options.Timeout = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    request = Request(turn, parse_results(result or []), message, watch, as_json, timeout, app)
    return run_command(_resume(request, command_settings(redis_url, namespace)))


def parse_results(given: Sequence[str]) -> dict[str, Any]:
    """`CALL_ID=VALUE` by call id. A value is JSON if it can be read as such, else text; with `@` it stands in a file."""
    results: dict[str, Any] = {}
    for item in given:
        call_id, equals, value = item.partition("=")
        if not equals or not call_id:
            raise CommandError(f"--result {item!r}: write CALL_ID=VALUE or CALL_ID=@FILE")
        if call_id in results:
            raise CommandError(f"--result {call_id} is given twice: a call has one result")
        results[call_id] = _value(_file_text(value[1:]) if value.startswith("@") else value)
    return results


def _value(text: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return text


def _file_text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--result: cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--result: {name} is no text in UTF-8") from error


async def _resume(request: Request, settings: Settings) -> int:
    from .attachment import commanding_client
    from .hints import Hints
    from .lookup import attached_turn
    from .watching import last_number, watch_on

    # With an app it is as with `run`: this process runs what nothing else would.
    async with commanding_client(settings, request.app, serve=request.watch, takes_app=True) as client:
        turn = attached_turn(client, request.turn_id)
        before = await last_number(client, turn)
        async with Hints(client):
            pending = await turn.resume(tool_results=request.results, message=request.message)
        if not request.watch:
            _write_pending(turn.id, pending, request.as_json)
            return Exit.OK
        app = None if settings.redis_url else request.app
        return await watch_on(client, turn, before, as_json=request.as_json, timeout=request.timeout, app=app)


def _write_pending(turn_id: str, pending: Sequence[str], as_json: bool) -> None:
    import msgspec

    from .next_commands import resume_command

    if as_json:
        sys.stdout.write(msgspec.json.encode({"turn_id": turn_id, "pending": list(pending)}).decode() + "\n")
    elif pending:
        sys.stdout.write(f"still pending: {', '.join(pending)}\n")
        say(f"go on: `{resume_command(turn_id, pending)}`")
    else:
        sys.stdout.write(f"turn {turn_id} goes on\n")
