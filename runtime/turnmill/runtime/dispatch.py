"""The dispatch window of a partition: how many model tasks may stand in a pool's stream.

What is beyond the window waits in the partition's backlog, where tenants take turns and priorities count. The count kept
here is the owner's estimate and bounds nothing but queues: it is taken from the stream's length when the partition is
taken over, and again at every look.
"""

from __future__ import annotations

from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.streams import DISPATCH_BACKLOG


class DispatchWindow:
    """The window of one partition over all pools."""

    def __init__(self, engine: Engine, keys: PartitionKeys, window: int) -> None:
        self._engine = engine
        self._keys = keys
        self._window = window
        self._in_stream: dict[str, int] = {}
        self._backlogged: set[str] = set()
        self._put_back: dict[str, int] = {}

    def admit(self, pool: str) -> bool:
        """Whether the next task of a pool goes into its stream. Nothing overtakes what waits already."""
        count = self._in_stream.get(pool, 0)
        if pool in self._backlogged or count >= self._window:
            self._backlogged.add(pool)
            self._put_back[pool] = self._put_back.get(pool, 0) + 1
            return False
        self._in_stream[pool] = count + 1
        return True

    def completed(self, pool: str) -> None:
        """A model task of the pool has left its stream."""
        self._in_stream[pool] = max(0, self._in_stream.get(pool, 0) - 1)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlogged)

    async def refill(self) -> None:
        """Move waiting tasks into the streams that have room."""
        for pool in list(self._backlogged):
            await self._refill(pool)

    async def look(self, pools: set[str]) -> None:
        """Correct the counts, and find what an earlier owner left waiting."""
        for pool in pools:
            self._in_stream[pool] = await self._engine.call("XLEN", self._keys.model(pool))
            if await self._engine.call("ZCARD", self._keys.backlog(pool)):
                self._backlogged.add(pool)
        await self.refill()

    async def _refill(self, pool: str) -> None:
        names = [self._keys.backlog(pool), self._keys.backlog_clock(pool), self._keys.model(pool)]
        put_back = self._put_back.get(pool, 0)
        moved, waiting = await DISPATCH_BACKLOG.run(self._engine, names, [self._window])
        self._in_stream[pool] = self._in_stream.get(pool, 0) + moved
        if waiting == 0 and self._put_back.get(pool, 0) == put_back:  # nothing joined since the look
            self._backlogged.discard(pool)
