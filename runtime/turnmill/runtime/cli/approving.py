"""`turnmill approve` and `turnmill deny`: decide on calls that wait for a person, one by one or all together.

With an app they bring the runtime along, as `turnmill run` and `turnmill resume` do, and watch the turn go on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

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


class Request(NamedTuple):
    """What was asked for on the command line."""

    approved: bool
    turn_id: str
    ids: list[str]
    everything: bool
    reason: str | None
    app: str | None
    as_json: bool
    timeout: float | None


def approve(
    turn: options.TurnArgument,
    calls: CallIds = None,
    everything: All = False,
    reason: options.Reason = None,
    app: options.AppOption = None,
    as_json: options.Json = False,
    timeout: options.Timeout = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    request = Request(True, turn, calls or [], everything, reason, app, as_json, timeout)
    return _decide(request, redis_url, namespace)


def deny(
    turn: options.TurnArgument,
    calls: CallIds = None,
    everything: All = False,
    reason: options.Reason = None,
    app: options.AppOption = None,
    as_json: options.Json = False,
    timeout: options.Timeout = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    request = Request(False, turn, calls or [], everything, reason, app, as_json, timeout)
    return _decide(request, redis_url, namespace)


def _decide(request: Request, redis_url: str | None, namespace: str | None) -> int:
    from .attachment import command_settings, run_command

    if bool(request.ids) == request.everything:
        raise CommandError("name the calls (CALL_ID ...), or say --all; `turnmill show TURN` lists them")
    return run_command(_send(request, command_settings(redis_url, namespace)))


async def _send(request: Request, settings: Settings) -> int:
    from .attachment import commanding_client
    from .hints import Hints
    from .lookup import attached_turn
    from .watching import last_number, watch_on

    async with commanding_client(settings, request.app, takes_app=True) as client:
        turn = attached_turn(client, request.turn_id)
        ids = request.ids or await _waiting(client, request.turn_id)
        before = await last_number(client, turn)
        async with Hints(client):
            left = await (turn.approve if request.approved else turn.deny)(*ids, reason=request.reason)
        _write_decision(request, ids, left)
        if request.app is None:
            return Exit.OK
        app = None if settings.redis_url else request.app
        return await watch_on(client, turn, before, as_json=request.as_json, timeout=request.timeout, app=app)


def _write_decision(request: Request, ids: Sequence[str], left: Sequence[str]) -> None:
    import msgspec

    from .next_commands import decide_command

    word = "approved" if request.approved else "denied"
    if request.as_json:
        fields = {"turn_id": request.turn_id, word: ids, "pending": list(left)}
        sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
        return
    sys.stdout.write(f"{word}: {', '.join(ids)}\n")
    if request.app is not None:
        return
    if left:
        say(f"still to decide: `{decide_command('approve' if request.approved else 'deny', request.turn_id, left)}`")
    else:
        say(f"watch it: `turnmill tail {request.turn_id}`")


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
