"""`turnmill tail`: watch a turn, a session, or the lifecycle of all turns."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..client import Client
    from ..feed import Cursors, FeedEntry
    from ..turn import Turn

TurnId = Annotated[str | None, typer.Argument(metavar="TURN", help="A turn's id.", show_default=False)]
Session = Annotated[
    str | None,
    typer.Option("--session", envvar="TURNMILL_SESSION", metavar="S", help="A session's turn, and those to come."),
]
All = Annotated[bool, typer.Option("--all", envvar="TURNMILL_ALL", help="Starts and ends of all turns.")]
From = Annotated[
    int | None,
    typer.Option(
        "--from",
        envvar="TURNMILL_FROM",
        min=0,
        metavar="SEQ",
        help="The first event to show; --all: 0 for all that is kept.",
    ),
]


def tail(
    turn: TurnId = None,
    session: Session = None,
    everything: All = False,
    start: From = None,
    sub_turns: options.SubTurns = False,
    as_json: options.Json = False,
    timeout: options.Timeout = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    if [turn is not None, session is not None and turn is None, everything].count(True) != 1:
        raise CommandError("tail follows one of TURN, --session S and --all")
    if everything and sub_turns:
        raise CommandError("tail --all shows the starts and ends of sub-turns anyway: leave --sub-turns out")
    settings = command_settings(redis_url, namespace)
    if turn is not None:
        return run_command(_limited(_tail_turn(settings, turn, start or 1, sub_turns, as_json), timeout))
    if session is not None:
        return run_command(_limited(_tail_session(settings, session, sub_turns, as_json), timeout))
    return run_command(_limited(_tail_all(settings, start, as_json), timeout))


async def _limited(work: object, timeout: float | None) -> int:
    try:
        async with asyncio.timeout(timeout):
            return await work  # type: ignore[misc, no-any-return]
    except TimeoutError:
        say(f"no end after {timeout:g} s")
        return Exit.TIMEOUT


async def _tail_turn(settings: Settings, turn_id: str, start: int, sub_turns: bool, as_json: bool) -> int:
    from .attachment import attached_client
    from .watching import Watch, view_for

    async with attached_client(settings) as client:
        turn = await _attach(client, turn_id)
        watch = Watch(client, turn, view_for(as_json), after=max(0, start - 1), sub_turns=sub_turns)
        try:
            return await watch.follow()
        except asyncio.CancelledError:
            say(f"go on with {watch.how_to_go_on()}")
            raise


async def _attach(client: Client, turn_id: str) -> Turn:
    """The turn's handle. One that is not known yet, while its inbox holds messages, may still be accepted."""
    from ..turn import Turn
    from .lookup import checked_keys

    keys = checked_keys(client.keys, turn_id)
    known = await client.engine.call("EXISTS", keys.turn(turn_id))
    waiting = await client.engine.call("XLEN", keys.inbox)
    return Turn(client, turn_id, is_new=not known and waiting > 0)


async def _tail_session(settings: Settings, session_id: str, sub_turns: bool, as_json: bool) -> int:
    """The session's running turn, or its latest one; then every turn that it starts."""
    from turnmill.protocol.events import ENDED_STATUSES

    from ..feed import feed_ends, follow_feed
    from ..inspection import turns_of_session
    from .attachment import attached_client
    from .lookup import checked_session

    checked_session(session_id)
    async with attached_client(settings) as client:
        keys = client.keys.of_session(session_id)
        cursors = await feed_ends(client.engine, client.keys)
        records = await turns_of_session(client.engine, client.keys, session_id)
        running = [record for record in records if record.state not in ENDED_STATUSES | {"queued"}]
        shown: set[str] = set()
        for record in (running or records)[:1]:
            await _show_one(client, record.turn_id, shown, sub_turns, as_json)
        if not records and not as_json:
            say(f"session {session_id!r} has no turn yet; waiting")
        own: Cursors = {keys.partition: cursors[keys.partition]}
        async for entry in follow_feed(client.engine, client.keys, own):
            if entry.session_id == session_id:
                await _show_one(client, entry.turn_id, shown, sub_turns, as_json)
    return Exit.OK


async def _show_one(client: Client, turn_id: str, shown: set[str], sub_turns: bool, as_json: bool) -> None:
    """The whole turn: a suspended one goes on when it is resumed."""
    from .watching import Watch, view_for

    if turn_id not in shown:
        shown.add(turn_id)
        watch = Watch(client, client.attach(turn_id), view_for(as_json), sub_turns=sub_turns)
        while await watch.follow() is Exit.SUSPENDED:
            continue


async def _tail_all(settings: Settings, start: int | None, as_json: bool) -> int:
    from ..feed import feed_ends, follow_feed
    from .attachment import attached_client

    async with attached_client(settings) as client:
        cursors = await feed_ends(client.engine, client.keys)
        if start is not None:
            cursors = dict.fromkeys(cursors, f"{max(0, start - 1)}".encode())
        elif not as_json:
            say(f"watching all turns of the namespace {client.keys.prefix!r} (--from 0 shows earlier ones)")
        async for entry in follow_feed(client.engine, client.keys, cursors):
            sys.stdout.write(_feed_line(entry, as_json) + "\n")
            sys.stdout.flush()
    return Exit.OK


def _feed_line(entry: FeedEntry, as_json: bool) -> str:
    import msgspec

    from .lookup import clock_text

    if as_json:
        return msgspec.json.encode(entry).decode()
    at = clock_text(int(entry.id.partition("-")[0]) / 1000)
    detail = f"  {entry.detail}" if entry.detail else ""
    return f"{at}  {entry.type:14} {entry.turn_id}  {entry.agent_id}  session {entry.session_id}{detail}"
