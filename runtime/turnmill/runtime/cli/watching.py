"""Follow one turn to its end or its rest, show what happens, and say what is missing when nothing does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from turnmill.protocol.errors import EngineError
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
from ..fleet import read_fleet
from ..inspection import read_record
from ..sub_turns import SubTurnEvent, with_sub_turns
from ..turn import Turn
from .exits import Exit, say
from .next_commands import after_suspension
from .rendering import EventView, JsonLines, Transcript

SILENCE_SECONDS = 3.0
_GOES_ON = frozenset(kind.type.encode() for kind in (TurnResumed, TurnFinished, TurnFailed))
_LOOK_AHEAD = 1000


def view_for(as_json: bool) -> EventView:
    return JsonLines() if as_json else Transcript()


class Watch:
    """One turn as this command watches it. `cursor` is the last event shown: where to go on later."""

    def __init__(self, client: Client, turn: Turn, view: EventView, after: int = 0, *, sub_turns: bool = False) -> None:
        self._client = client
        self._turn = turn
        self._view = view
        self._sub_turns = sub_turns
        self._running_sub_turns: set[str] = set()
        self._last_event_at = time.monotonic()
        self.cursor = after

    async def follow(self) -> Exit:
        """Show the events behind the cursor until the turn ends or is suspended. With sub-turns, to their ends too."""
        code = Exit.OK
        hinting = asyncio.create_task(self._hint())
        events = self._events()
        try:
            async for number, event in events:
                self._last_event_at = time.monotonic()
                self._view.show(number, event)
                self._note_sub_turn(event)
                if isinstance(event, SubTurnEvent):
                    continue
                self.cursor = number
                if isinstance(event, TurnSuspended) and await self._rests():
                    self._view.close()
                    for line in after_suspension(self._turn.id, event.pending, event.approvals, event.error):
                        say(line)
                    return Exit.SUSPENDED
                if isinstance(event, TurnFinished | TurnFailed):
                    code = _exit_code(event)
                    if not self._sub_turns:
                        break
        finally:
            self._view.close()
            hinting.cancel()
            await asyncio.gather(hinting, return_exceptions=True)
            await events.aclose()
        return code

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

    # ---- while nothing happens

    def _note_sub_turn(self, event: Event | SubTurnEvent) -> None:
        inner = event.event if isinstance(event, SubTurnEvent) else event
        if isinstance(inner, SubTurnStarted):
            self._running_sub_turns.add(inner.turn_id)
        elif isinstance(inner, SubTurnFinished):
            self._running_sub_turns.discard(inner.turn_id)

    async def _hint(self) -> None:
        """While nothing happens, look whether anyone is there to do it; say each thing once."""
        said: set[str] = set()
        while True:
            silent = time.monotonic() - self._last_event_at
            if silent < SILENCE_SECONDS:
                await asyncio.sleep(SILENCE_SECONDS - silent)
                continue
            for line in await self._lacking():
                if line not in said:
                    said.add(line)
                    say(f"still waiting: {line}")
            await asyncio.sleep(SILENCE_SECONDS)

    async def _lacking(self) -> list[str]:
        try:
            fleet = await read_fleet(self._client.engine, self._client.keys, self._client.settings)
            lacking = list(fleet.missing())
            for turn_id in sorted(self._running_sub_turns):
                record = await read_record(self._client.engine, self._client.keys, turn_id)
                if record is None or record.state != "suspended" or record.summary is None:
                    continue
                summary = record.summary
                for line in after_suspension(turn_id, summary.pending, summary.approvals, summary.error):
                    lacking.append(f"its sub-turn {turn_id} is suspended; {line}")
            return lacking
        except EngineError as error:
            return [f"the engine does not answer: {error}"]


def _exit_code(event: TurnFinished | TurnFailed) -> Exit:
    if isinstance(event, TurnFinished):
        return Exit.OK
    return Exit.USAGE if event.aborted else Exit.FAILED
