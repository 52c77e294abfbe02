"""Follow one turn to its end or its rest, show what happens, and say what is missing when nothing does."""

from __future__ import annotations

import asyncio
import shlex
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from turnmill.protocol.errors import CommandRefusedError
from turnmill.protocol.events import (
    Event,
    SubTurnFinished,
    SubTurnStarted,
    TurnFailed,
    TurnFinished,
    TurnResumed,
    TurnSuspended,
)
from turnmill.protocol.streams import read_channel

from ..client import Client
from ..sub_turns import SubTurnEvent, with_sub_turns
from ..turn import Turn
from .exits import Exit, say
from .hints import Hints
from .lookup import live_turn_of
from .next_commands import after_refusal, after_suspension
from .rendering import EventView, JsonLines, Transcript

_GOES_ON = frozenset(kind.type.encode() for kind in (TurnResumed, TurnFinished, TurnFailed))
_LOOK_AHEAD = 1000


async def last_number(client: Client, turn: Turn) -> int:
    """The newest event so far: what comes behind it is what a command brings about."""
    channel = client.keys.of_turn(turn.id).events(turn.id)
    last = await client.engine.call("XREVRANGE", channel, "+", "-", "COUNT", 1)
    return int(last[0][0].partition(b"-")[2]) if last else 0


async def watch_on(
    client: Client, turn: Turn, before: int, *, as_json: bool, timeout: float | None, app: str | None
) -> Exit:
    """Watch what a command has brought about behind event `before`, to the turn's end or next rest."""
    # A command that repeats another one changes nothing: what the turn waits for was said before.
    says_again = await last_number(client, turn) == before and await turn.status() == "suspended"
    watch = Watch(client, turn, view_for(as_json), max(0, before - 1) if says_again else before, app=app)
    try:
        async with asyncio.timeout(timeout):
            return await watch.follow()
    except TimeoutError:
        say(f"no end after {timeout:g} s; the turn goes on: {watch.how_to_go_on()}")
        return Exit.TIMEOUT
    except asyncio.CancelledError:
        say(f"detached; watch it again: {watch.how_to_go_on()}")
        raise


def view_for(as_json: bool) -> EventView:
    return JsonLines() if as_json else Transcript()


class Watch:
    """One turn as this command watches it. `cursor` is the last event shown: where to go on later."""

    def __init__(
        self,
        client: Client,
        turn: Turn,
        view: EventView,
        after: int = 0,
        *,
        sub_turns: bool = False,
        app: str | None = None,
        pool: str | None = None,
    ) -> None:
        """`app` is the application that this process brings along, which the next command must bring again; `pool` is
        where the turn's model calls wait."""
        self._client = client
        self._turn = turn
        self._view = view
        self._sub_turns = sub_turns
        self._more = f" --app {shlex.quote(app)}" if app is not None else ""
        self._hints = Hints(client, pool)
        self.cursor = after

    async def follow(self) -> Exit:
        """Show the events behind the cursor until the turn ends or is suspended. With sub-turns, to their ends too."""
        code = Exit.OK
        try:
            async with self._hints, aclosing(self._events()) as events:
                async for number, event in events:
                    self._note(event)
                    self._view.show(number, event)
                    if isinstance(event, SubTurnEvent):
                        continue
                    self.cursor = number
                    if isinstance(event, TurnSuspended) and await self._rests():
                        return self._suspended(event)
                    if isinstance(event, TurnFinished | TurnFailed):
                        code = await self._conclude(event)
                        if not self._sub_turns:
                            break
        finally:
            self._view.close()
        return code

    def _suspended(self, event: TurnSuspended) -> Exit:
        self._view.close()
        for line in after_suspension(self._turn.id, event.pending, event.approvals, event.error, self._more):
            say(line)
        return Exit.SUSPENDED

    async def _conclude(self, event: TurnFinished | TurnFailed) -> Exit:
        if isinstance(event, TurnFinished):
            return Exit.OK
        if event.pending and event.result is None:
            # It never started: the session waits for its host, or for a person, and takes no other turn.
            await self._turn.status()
            live = await live_turn_of(self._client, self._turn.session_id or "")
            refused = CommandRefusedError(
                event.error, kind=event.error_type, turn_id=live or "", pending=tuple(event.pending)
            )
            self._view.close()
            say(f"refused; go on with `{after_refusal(refused) or f'turnmill show {self._turn.id}'}`")
            return Exit.USAGE
        return Exit.USAGE if event.aborted else Exit.FAILED

    def how_to_go_on(self) -> str:
        return f"`turnmill tail {self._turn.id} --from {self.cursor + 1}`"

    async def _events(self) -> AsyncGenerator[tuple[int, Event | SubTurnEvent]]:
        """The turn's numbered events; with those of its sub-turns between them, which count as 0."""
        if not self._sub_turns:
            async with aclosing(self._turn.numbered_events(self.cursor)) as numbered_events:  # type: ignore[type-var]
                async for numbered in numbered_events:
                    yield numbered
            return
        numbers: deque[int] = deque()

        async def own() -> AsyncIterator[Event]:
            async for number, event in self._turn.numbered_events(self.cursor):
                numbers.append(number)
                yield event

        async with aclosing(with_sub_turns(self._client.attach, own())) as events:  # type: ignore[type-var]
            async for event in events:
                yield (0 if isinstance(event, SubTurnEvent) else numbers.popleft()), event

    async def _rests(self) -> bool:
        """Whether the suspension that was just read is the present one, and not one of the past."""
        channel = self._client.keys.of_turn(self._turn.id).events(self._turn.id)
        behind = await read_channel(self._client.engine, channel, self.cursor, _LOOK_AHEAD)
        return not any(raw.kind in _GOES_ON for raw in behind)

    def _note(self, event: Event | SubTurnEvent) -> None:
        self._hints.heard()
        inner = event.event if isinstance(event, SubTurnEvent) else event
        if isinstance(inner, SubTurnStarted):
            self._hints.sub_turns.add(inner.turn_id)
        elif isinstance(inner, SubTurnFinished):
            self._hints.sub_turns.discard(inner.turn_id)
