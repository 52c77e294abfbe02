"""Follow one turn to its end, show what happens, and say what is missing when nothing does."""

from __future__ import annotations

import asyncio
import time

from turnmill.protocol.errors import EngineError
from turnmill.protocol.events import Event, TurnFailed, TurnFinished, TurnSuspended

from ..client import Client
from ..fleet import read_fleet
from ..turn import Turn
from .exits import Exit, say
from .rendering import EventView, JsonLines, Transcript

SILENCE_SECONDS = 3.0


def view_for(as_json: bool) -> EventView:
    return JsonLines() if as_json else Transcript()


class Watch:
    """One turn as this command watches it. `cursor` is the last event shown: where to go on later."""

    def __init__(self, client: Client, turn: Turn, view: EventView, after: int = 0) -> None:
        self._client = client
        self._turn = turn
        self._view = view
        self._last_event_at = time.monotonic()
        self.cursor = after

    async def follow(self) -> Exit:
        """Show the events behind the cursor until the turn ends or is suspended."""
        hinting = asyncio.create_task(self._hint())
        events = self._turn.numbered_events(self.cursor)
        try:
            async for number, event in events:
                self._last_event_at = time.monotonic()
                self._view.show(number, event)
                self.cursor = number
                code = _exit_code(event)
                if code is not None:
                    return code
        finally:
            self._view.close()
            hinting.cancel()
            await asyncio.gather(hinting, return_exceptions=True)
            await events.aclose()  # type: ignore[attr-defined]  # an async generator, typed as an iterator
        return Exit.OK

    def how_to_go_on(self) -> str:
        return f"`turnmill tail {self._turn.id} --from {self.cursor + 1}`"

    async def _hint(self) -> None:
        """While nothing happens, look whether anyone is there to do it; say each thing once."""
        said: set[str] = set()
        while True:
            silent = time.monotonic() - self._last_event_at
            if silent < SILENCE_SECONDS:
                await asyncio.sleep(SILENCE_SECONDS - silent)
                continue
            try:
                fleet = await read_fleet(self._client.engine, self._client.keys, self._client.settings)
                lacking = list(fleet.missing())
            except EngineError as error:
                lacking = [f"the engine does not answer: {error}"]
            for line in lacking:
                if line not in said:
                    said.add(line)
                    say(f"still waiting: {line}")
            await asyncio.sleep(SILENCE_SECONDS)


def _exit_code(event: Event) -> Exit | None:
    match event:
        case TurnFinished():
            return Exit.OK
        case TurnFailed():
            return Exit.USAGE if event.aborted else Exit.FAILED
        case TurnSuspended():
            return Exit.SUSPENDED
        case _:
            return None
