"""How a consumer reads on a single engine: one command, over one connection, for all partitions of its queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol

from turnmill.protocol.acknowledgement import NO_REPLICA, Acknowledgement
from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import WORKER_GROUP, Keys
from turnmill.protocol.streams import Delivery, GroupReader

READ_COUNT_MAX = 32


class Intake(Protocol):
    """A consumer, as its reads know it."""

    worker_id: str

    def free_slots(self) -> int: ...

    def open_queues(self) -> Sequence[str]:
        """Those that are not paused."""

    async def receive(self, partition: int, reading: Awaitable[list[Delivery]]) -> int:
        """Take what a read gives; how much that was. On a single engine it may be of any partition."""


class SharedReads:
    """The reads of one consumer."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        intake: Intake,
        queues: Sequence[str],
        block_ms: int,
        slot_free: asyncio.Event,
        acknowledgement: Acknowledgement = NO_REPLICA,
    ) -> None:
        """`slot_free` is set by the consumer whenever it has a slot to give, or something else has changed."""
        self._intake = intake
        self._block_ms = block_ms
        self._slot_free = slot_free
        self._order = [(partition.base + queue, queue) for queue in queues for partition in keys.partitions]
        self._reader = GroupReader(engine, WORKER_GROUP, intake.worker_id, acknowledgement=acknowledgement)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._stop.is_set():
                free, streams = self._intake.free_slots(), self._open_streams()
                if free <= 0 or not streams:
                    self._slot_free.clear()
                    await self._slot_free.wait()
                    continue
                streams, count = self._share(streams, free)
                await self._intake.receive(0, self._reader.read(streams, count, self._block_ms))
        finally:
            self._reader.close()

    def stop(self) -> None:
        self._stop.set()
        self._slot_free.set()

    async def interrupt(self) -> None:
        """End a read that is blocked: it returns what it has."""
        await self._reader.interrupt()

    def _share(self, streams: list[str], free: int) -> tuple[list[str], int]:
        """COUNT counts per stream: divide the free slots, and rotate where there are fewer slots than streams."""
        if free >= len(streams):
            return streams, min(free // len(streams), READ_COUNT_MAX)
        now = set(streams[:free])
        self._order.sort(key=lambda each: each[0] in now)  # stable: those that are read now go to the end
        return streams[:free], 1

    def _open_streams(self) -> list[str]:
        """The streams of the queues that are not paused, in the order of this read."""
        is_open = set(self._intake.open_queues())
        return [stream for stream, queue in self._order if queue in is_open]
