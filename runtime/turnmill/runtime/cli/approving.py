"""`turnmill approve` and `turnmill deny`: decide on calls that wait for a person, one by one or all together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..client import Client

CallIds = Annotated[
    list[str] | None, typer.Argument(metavar="CALL_ID...", help="The calls to decide on.", show_default=False)
]
All = Annotated[bool, typer.Option("--all", envvar="TURNMILL_ALL", help="All calls of the turn that wait.")]


def approve(
    turn: options.TurnArgument,
    calls: CallIds = None,
    everything: All = False,
    reason: options.Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    return _decide(True, turn, calls or [], everything, reason, as_json, redis_url, namespace)


def deny(
    turn: options.TurnArgument,
    calls: CallIds = None,
    everything: All = False,
    reason: options.Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    return _decide(False, turn, calls or [], everything, reason, as_json, redis_url, namespace)


def _decide(
    approved: bool,
    turn_id: str,
    ids: list[str],
    everything: bool,
    reason: str | None,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
) -> int:
    from .attachment import command_settings, run_command

    if bool(ids) == everything:
        raise CommandError("name the calls (CALL_ID ...), or say --all; `turnmill show TURN` lists them")
    settings = command_settings(redis_url, namespace)
    return run_command(_send(settings, approved, turn_id, ids, reason, as_json))


async def _send(
    settings: Settings, approved: bool, turn_id: str, ids: list[str], reason: str | None, as_json: bool
) -> int:
    import msgspec

    from .attachment import attached_client
    from .hints import Hints
    from .lookup import attached_turn
    from .next_commands import decide_command

    async with attached_client(settings) as client:
        turn = attached_turn(client, turn_id)
        ids = ids or await _waiting(client, turn_id)
        async with Hints(client):
            left = await (turn.approve if approved else turn.deny)(*ids, reason=reason)
    word = "approved" if approved else "denied"
    if as_json:
        sys.stdout.write(msgspec.json.encode({"turn_id": turn_id, word: ids, "pending": list(left)}).decode() + "\n")
        return Exit.OK
    sys.stdout.write(f"{word}: {', '.join(ids)}\n")
    if left:
        say(f"still to decide: `{decide_command('approve' if approved else 'deny', turn_id, left)}`")
    else:
        say(f"watch it: `turnmill tail {turn_id}`")
    return Exit.OK


async def _waiting(client: Client, turn_id: str) -> list[str]:
    """The ids of the calls that wait, also of a turn in which others still run: asked for, and not decided."""
    from turnmill.protocol.codec import event_from_wire
    from turnmill.protocol.events import ApprovalDecided, ApprovalRequested

    from ..inspection import read_events

    waiting: dict[tuple[int, int], str] = {}
    for raw in await read_events(client.engine, client.keys, turn_id):
        event = event_from_wire(raw.kind, raw.body)
        if isinstance(event, ApprovalRequested):
            waiting[event.step_number, event.index] = event.tool_call.id
        elif isinstance(event, ApprovalDecided):
            waiting.pop((event.step_number, event.index), None)
    if not waiting:
        raise CommandError(f"no call of turn {turn_id} waits for approval; `turnmill show {turn_id}`")
    return list(waiting.values())
