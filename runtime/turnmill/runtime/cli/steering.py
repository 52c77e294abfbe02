"""`turnmill steer` and `turnmill abort`: say something to a live turn, or stop it, from any terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import options
from .exits import Exit

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

Text = Annotated[str, typer.Argument(metavar="TEXT", help="The message; - reads it from stdin.", show_default=False)]
Mode = Annotated[
    Literal["steer", "queue"],
    typer.Option("--mode", envvar="TURNMILL_MODE", help="steer: before the next model call; queue: as the next turn."),
]
Role = Annotated[Literal["user", "system"], typer.Option("--role", envvar="TURNMILL_ROLE", help="Who says it.")]


def steer(
    turn: options.TurnArgument,
    text: Text,
    mode: Mode = "steer",
    role: Role = "user",
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    text = sys.stdin.read() if text == "-" else text
    return run_command(_steer(command_settings(redis_url, namespace), turn, text, mode, role, as_json))


async def _steer(
    settings: Settings,
    turn_id: str,
    text: str,
    mode: Literal["steer", "queue"],
    role: Literal["user", "system"],
    as_json: bool,
) -> int:
    import msgspec

    from .attachment import commanding_client
    from .hints import Hints
    from .lookup import attached_turn

    async with commanding_client(settings) as client:
        turn = attached_turn(client, turn_id)
        async with Hints(client):
            entry = await turn.steer(text, role=role, mode=mode)
    line = {"turn_id": turn_id, "steering_id": entry.id, "mode": mode, "created_at": entry.created_at}
    sys.stdout.write((msgspec.json.encode(line).decode() if as_json else entry.id) + "\n")
    return Exit.OK


def abort(
    turn: options.TurnArgument,
    reason: options.Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_abort(command_settings(redis_url, namespace), turn, reason, as_json))


async def _abort(settings: Settings, turn_id: str, reason: str | None, as_json: bool) -> int:
    import msgspec

    from .attachment import commanding_client
    from .hints import Hints
    from .lookup import attached_turn

    async with commanding_client(settings) as client:
        turn = attached_turn(client, turn_id)
        async with Hints(client):
            is_stopped = await turn.abort(reason)
        status = await turn.status()
    if as_json:
        line = msgspec.json.encode({"turn_id": turn_id, "stopped": is_stopped, "status": status}).decode()
    elif not is_stopped:
        line = f"turn {turn_id} was not live: it has {status} already"
    elif status == "aborted":
        line = f"turn {turn_id} is aborted"
    else:
        line = f"turn {turn_id} is being stopped; its end: `turnmill tail {turn_id}`"
    sys.stdout.write(line + "\n")
    return Exit.OK
