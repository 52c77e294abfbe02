"""While a command waits and nothing happens: who is missing, and what a sub-turn waits for. Each thing is said once."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from turnmill.protocol.errors import EngineError
from turnmill.protocol.keys import pool_of_queue

from ..client import Client
from ..directives import Directive, read_directives
from ..fleet import read_fleet
from ..inspection import read_record
from .exits import say
from .next_commands import after_suspension

SILENCE_SECONDS = 3.0


class Hints:
    """Looks at the namespace after every `SILENCE_SECONDS` in which nothing was heard, as long as it is entered."""

    def __init__(self, client: Client, pool: str | None = None) -> None:
        """`pool` is where the turn's model calls wait, if that is known."""
        self._client = client
        self._pool = pool
        self._heard_at = time.monotonic()
        self._said: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.sub_turns: set[str] = set()
        """Turns that the watched one waits for."""

    def heard(self) -> None:
        """Something happens: there is nothing to say."""
        self._heard_at = time.monotonic()

    async def __aenter__(self) -> Hints:
        self._heard_at = time.monotonic()
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            silent = time.monotonic() - self._heard_at
            if silent < SILENCE_SECONDS:
                await asyncio.sleep(SILENCE_SECONDS - silent)
                continue
            for line in await self._lacking():
                if line not in self._said:
                    self._said.add(line)
                    say(f"still waiting: {line}")
            await asyncio.sleep(SILENCE_SECONDS)

    async def _lacking(self) -> list[str]:
        try:
            fleet = await read_fleet(self._client.engine, self._client.keys, self._client.settings)
            paused = (await read_directives(self._client.engine, self._client.keys)).paused
            return [
                *fleet.missing(self._pool),
                *[_paused(queue, paused[queue]) for queue in sorted(paused) if pool_of_queue(queue) is not None],
                *[line for turn_id in sorted(self.sub_turns) for line in await self._rests(turn_id)],
            ]
        except EngineError as error:
            return [f"the engine does not answer: {error}"]

    async def _rests(self, turn_id: str) -> list[str]:
        """What a suspended sub-turn waits for."""
        record = await read_record(self._client.engine, self._client.keys, turn_id)
        summary = record.summary if record is not None and record.state == "suspended" else None
        if summary is None:
            return []
        lines = after_suspension(turn_id, summary.pending, summary.approvals, summary.error)
        return [f"its sub-turn {turn_id} is suspended; {line}" for line in lines]


def _paused(queue: str, pause: Directive) -> str:
    """Of tools' queues the turn itself tells, when a call of its own waits there."""
    return f"{queue} is paused ({pause.text}); `turnmill queue resume {queue}` lets its model calls go on"
