"""How a consumer reads on a cluster, where one command reads one partition.

A worker has a blocked connection for each partition that is assigned to it (`assignment`), and no other. Together they
read no more than there are free slots: those of a read are reserved while it is under way. A worker with fewer slots than
assigned streams blocks nowhere: it looks at one partition after the other, as long as it has a slot.

Members of a queue say so in a sorted set of the namespace, with every beat. Whoever was not heard of for the liveness time
is no member any more, and its partitions go to others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from turnmill.protocol.acknowledgement import Acknowledgement
from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import EngineError
from turnmill.protocol.keys import WORKER_GROUP, Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import GroupReader, poll_group

from .assignment import Member, assign
from .shared_reads import READ_COUNT_MAX, Intake

_log = get_logger(__name__)
_STARVED_BLOCK_MS = 100
"""How long a read blocks, and keeps its slots, while another one waits for some."""
_SWEEP_SECONDS = (0.02, 0.25)
"""The pause between two looks at all partitions, when they found nothing."""


class PartitionReads:
    """The reads of one consumer."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        settings: Settings,
        intake: Intake,
        queues: Sequence[str],
        slots: int,
        block_ms: int,
        slot_free: asyncio.Event,
        now_ms: Callable[[], int],
    ) -> None:
        """`now_ms` is the engine's time. `slot_free` is set by the consumer whenever it has a slot to give, or something else has changed."""
        self._engine = engine
        self._keys = keys
        self._intake = intake
        self._queues = list(queues)
        self._slots = slots
        self._block_ms = block_ms
        self._slot_free = slot_free
        self._now_ms = now_ms
        self._beat_seconds = settings.heartbeat_seconds
        self._acknowledgement = Acknowledgement.of(settings)
        self._liveness_ms = int(settings.liveness_seconds * 1000)
        self._capacity = max(1, slots // max(1, len(self._queues)))
        self._members: dict[str, list[Member]] = {}
        self._assigned: dict[int, list[str]] = {}
        self._readers: dict[int, GroupReader] = {}
        self._reserved = 0
        self._turn = asyncio.Lock()
        self._is_starved = False
        self._stop = asyncio.Event()

    @property
    def assigned(self) -> dict[int, list[str]]:
        """The queues that this worker reads, by partition."""
        return self._assigned

    async def run(self) -> None:
        """Until `stop`."""
        assigning = asyncio.create_task(self._assign_on())
        reading: dict[int, asyncio.Task[None]] = {}
        try:
            while not self._stop.is_set():
                if assigning.done():
                    assigning.result()
                for partition in self._assigned if self._is_blocking else ():
                    if partition not in reading or reading[partition].done():
                        if partition in reading:
                            reading[partition].result()
                        reading[partition] = asyncio.create_task(self._read_partition(partition))
                if self._is_blocking or not self._assigned:
                    await self._pause(0.1)
                else:
                    await self._sweep()
        finally:
            self.stop()
            await asyncio.gather(assigning, *reading.values(), return_exceptions=True)
            await self._leave()

    def stop(self) -> None:
        self._stop.set()
        self._slot_free.set()

    async def interrupt(self) -> None:
        """End reads that are blocked: they return what they have."""
        await asyncio.gather(*[reader.interrupt() for reader in self._readers.values()])

    # ---- who reads what

    async def _assign_on(self) -> None:
        while not self._stop.is_set():
            try:
                await self._assign()
            except EngineError as error:
                # What was assigned last holds: a shard that is down must not stop the reads of the others.
                _log.warning("members not read", worker=self._intake.worker_id, error=str(error))
            await self._pause(self._beat_seconds)

    async def _assign(self) -> None:
        now_ms = self._now_ms()
        replies = await asyncio.gather(*[self._join(queue, now_ms) for queue in self._queues])
        members = dict(zip(self._queues, replies, strict=True))
        if members == self._members:
            return
        self._members = members
        assigned: dict[int, list[str]] = {}
        for queue, present in members.items():
            for partition in assign(present, len(self._keys.partitions))[self._intake.worker_id]:
                assigned.setdefault(partition, []).append(queue)
        self._assigned = assigned
        _log.info("partitions assigned", worker=self._intake.worker_id, partitions=sorted(assigned))
        await self.interrupt()

    async def _join(self, queue: str, now_ms: int) -> list[Member]:
        """Say that this worker reads a queue; everybody who does."""
        key, name = self._keys.readers(queue), f"{self._intake.worker_id} {self._capacity}"
        self._engine.call("ZADD", key, now_ms, name)
        self._engine.call("PEXPIRE", key, 10 * self._liveness_ms)
        self._engine.call("ZREMRANGEBYSCORE", key, "-inf", now_ms - self._liveness_ms)
        names = await self._engine.call("ZRANGE", key, 0, -1)
        words = [entry.decode().split(" ") for entry in sorted({*names, name.encode()})]
        return [Member(worker_id, int(capacity)) for worker_id, capacity in words]

    async def _leave(self) -> None:
        for queue in self._queues:
            with contextlib.suppress(EngineError):  # else it is forgotten when the liveness time is over
                name = f"{self._intake.worker_id} {self._capacity}"
                await self._engine.call("ZREM", self._keys.readers(queue), name)

    # ---- blocked reads

    @property
    def _is_blocking(self) -> bool:
        """Whether there is a slot for each stream, so that all can be waited for at a time."""
        return 0 < sum(map(len, self._assigned.values())) <= self._slots

    async def _read_partition(self, partition: int) -> None:
        """Until it is assigned no more."""
        reader = GroupReader(
            self._engine,
            WORKER_GROUP,
            self._intake.worker_id,
            self._keys.partitions[partition].results,
            self._acknowledgement,
        )
        self._readers[partition] = reader
        try:
            while not self._stop.is_set() and partition in self._assigned and self._is_blocking:
                streams = self._streams(partition)
                if not streams:
                    await self._pause(0.1)
                    continue
                count = await self._reserve(len(streams))
                try:
                    if count:
                        block_ms = _STARVED_BLOCK_MS if self._is_starved else self._block_ms
                        await self._intake.receive(partition, reader.read(streams, count, block_ms))
                finally:
                    self._reserved -= count * len(streams)
                    self._slot_free.set()
        finally:
            del self._readers[partition]
            reader.close()

    def _streams(self, partition: int) -> list[str]:
        is_open = set(self._intake.open_queues())
        base = self._keys.partitions[partition].base
        return [base + queue for queue in self._assigned.get(partition, ()) if queue in is_open]

    async def _reserve(self, streams: int) -> int:
        """Wait for slots, one read after the other; how many per stream, and 0 at the end.

        Half of what is free is left for reads that return with something and come again.
        """
        async with self._turn:
            while not self._stop.is_set():
                available = self._intake.free_slots() - self._reserved
                if available >= streams:
                    self._is_starved = False
                    count = max(1, min(READ_COUNT_MAX, available // (2 * streams * max(1, len(self._assigned)))))
                    self._reserved += count * streams
                    return count
                self._is_starved = True
                self._slot_free.clear()
                await self._slot_free.wait()
        return 0

    # ---- fewer slots than streams

    async def _sweep(self) -> None:
        """Look at one partition after the other, until the assignment is another one."""
        pause, longest = _SWEEP_SECONDS
        order = list(self._assigned)
        assigned = self._assigned
        while not self._stop.is_set() and self._assigned is assigned:
            found = 0
            for partition in order:
                found += await self._poll(partition)
            order = order[1:] + order[:1]
            pause = _SWEEP_SECONDS[0] if found else min(2 * pause, longest)
            if not found:
                await self._pause(pause)

    async def _poll(self, partition: int) -> int:
        found = 0
        for stream in self._streams(partition):
            while self._intake.free_slots() <= self._reserved and not self._stop.is_set():
                self._slot_free.clear()
                await self._slot_free.wait()
            if self._stop.is_set():
                break
            reading = poll_group(self._engine, WORKER_GROUP, self._intake.worker_id, stream, 1)
            found += await self._intake.receive(partition, reading)
        return found

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
