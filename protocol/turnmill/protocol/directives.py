"""What operators ask of running processes: leave a paused queue alone, and drain.

Directives stand in one hash of the namespace (`Keys.directives`). A process looks only at the fields that concern it, at
its start and every half second after that: one short command, whatever the size of the fleet. What it heard last holds
while the engine is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from .connection import Engine
from .errors import EngineError, EngineReplyError
from .keys import Keys, drain_field, pause_field
from .logs import get_logger

_log = get_logger(__name__)
LOOK_SECONDS = 0.5


class Directives:
    """The directives for one process."""

    def __init__(
        self, engine: Engine, keys: Keys, process_id: str, queues: Sequence[str], on_change: Callable[[], None]
    ) -> None:
        """`queues` are names behind the partition, such as `tool:default`. `on_change` is called after every look that
        found something else than the one before."""
        self._engine = engine
        self._key = keys.directives
        self._process_id = process_id
        self._queues = list(queues)
        self._on_change = on_change
        self._is_allowed = True
        self.paused: frozenset[str] = frozenset()
        """The queues that must not be read."""
        self.draining = False

    async def look(self) -> None:
        """Read what holds now. Raises `EngineError` where that cannot be known."""
        fields = [drain_field(self._process_id), *map(pause_field, self._queues)]
        drain, *paused = await self._engine.call("HMGET", self._key, *fields)
        before = self.paused, self.draining
        self.draining = drain is not None
        self.paused = frozenset(name for name, value in zip(self._queues, paused, strict=True) if value is not None)
        if before != (self.paused, self.draining):
            _log.info("directives", process=self._process_id, paused=sorted(self.paused), draining=self.draining)
            self._on_change()

    async def follow(self) -> None:
        """Look again and again, without an end."""
        while self._is_allowed:
            try:
                await self.look()
            except EngineReplyError as error:
                self._is_allowed = not str(error).startswith("NOPERM")
                _log.warning("directives cannot be read", process=self._process_id, error=str(error))
            except EngineError:
                pass  # away: what was heard last holds
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.Event().wait()

    async def leave(self) -> None:
        """The process is gone: nobody asks anything of it any more."""
        if self.draining:
            await self._engine.call("HDEL", self._key, drain_field(self._process_id))
