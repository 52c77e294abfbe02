"""The coordinator: reads the inbox and the results of the partitions it holds, has them decided, and nothing else.

It reads the next batch while the last one is being committed. Around this loop run three others, each in its own file:
leases, timers and the reclaimer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable

from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import EngineError, EngineReplyError
from turnmill.protocol.keys import COORDINATOR_GROUP, WORKER_GROUP, Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.namespace import ServerClock, evicting_policy, read_secret
from turnmill.protocol.processes import new_process_id
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import Delivery, GroupReader, create_groups

from .janitor import forget_workers, trim_index
from .leases import PartitionLeases
from .partition import Partition
from .reclaimer import Reclaimer
from .timers import fire_due

_log = get_logger(__name__)
_READ_COUNT = 32
"""Per stream and read. Large batches cost less each, but engine and processes then wait for each other in turns: with 64
turns in flight, 128 here and 64 at the workers made a third fewer turns per second."""
_BATCHES_MAX = 2
"""Batches under way at a time: one is decided while the engine commits the other."""
_IDLE_SECONDS = 0.02
_TRIM_SECONDS = 30.0


class Coordinator:
    """One coordinator process, or the coordinator of an embedded runtime."""

    def __init__(self, engine: Engine, keys: Keys, settings: Settings, secret: bytes, name: str | None = None) -> None:
        self.name = name or new_process_id("coordinator")
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._clock = ServerClock(engine)
        self._partitions = {
            number: Partition(engine, keys, number, settings, secret, self._clock)
            for number in range(len(keys.partitions))
        }
        self._reclaimer = Reclaimer(engine, self.name, settings.liveness_seconds, self._clock)
        self._leases = PartitionLeases(
            engine, keys, self.name, settings.lease_seconds, self._clock, self._take_over, self._hand_back
        )
        self._stop = asyncio.Event()
        # A blocked read must end well before the lease does: an owner that wakes up late must not read what is another's.
        self._block_ms = max(50, min(250, int(settings.lease_seconds * 1000 / 4)))

    @classmethod
    async def create(cls, engine: Engine, keys: Keys, settings: Settings) -> Coordinator:
        policy = await evicting_policy(engine)
        if policy is not None:
            _log.error(
                "the engine may evict work: set maxmemory-policy to noeviction", policy=policy, address=engine.address
            )
        return cls(engine, keys, settings, await read_secret(engine, keys))

    def stop(self) -> None:
        """Drain: stop reading, finish what was read, give the partitions back."""
        self._stop.set()

    async def run(self) -> None:
        """Until `stop`."""
        await self._create_groups()
        loops = [
            asyncio.create_task(self._every(self._settings.lease_seconds / 5, self._leases.beat)),
            asyncio.create_task(self._every(0.1, self._fire_timers)),
            asyncio.create_task(self._every(self._settings.liveness_seconds / 4, self._reclaim)),
            asyncio.create_task(self._every(_TRIM_SECONDS, self._trim)),
        ]
        reading = asyncio.create_task(self._read())
        try:
            await self._wait(reading, *loops)
        finally:
            self._stop.set()
            await asyncio.gather(reading, *loops, return_exceptions=True)
            with contextlib.suppress(EngineError):
                await self._leases.give_back_all()

    @property
    def counters(self) -> dict[str, int]:
        """What was refused, dropped and retried since the start, over all partitions."""
        total: dict[str, int] = {}
        for partition in self._partitions.values():
            for name, count in partition.counters.items():
                total[name] = total.get(name, 0) + count
        return total

    async def _wait(self, *tasks: asyncio.Task[None]) -> None:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _read(self) -> None:
        reader = GroupReader(self._engine, COORDINATOR_GROUP, self.name)
        handling: deque[asyncio.Future[list[None]]] = deque()
        try:
            while not self._stop.is_set():
                readable = self._leases.readable(self._block_ms / 1000 + 0.2)
                if not readable:
                    await asyncio.sleep(_IDLE_SECONDS)
                    continue
                deliveries = await reader.read(self._sources(readable), _READ_COUNT, self._block_ms)
                while len(handling) >= _BATCHES_MAX or (handling and handling[0].done()):
                    await handling.popleft()
                if deliveries:
                    handling.append(asyncio.gather(*self._handle(deliveries)))
        finally:
            await asyncio.gather(*handling)
            reader.close()

    def _sources(self, readable: list[int]) -> list[str]:
        return [
            name
            for number in readable
            for name in (self._keys.partitions[number].inbox, self._keys.partitions[number].results)
        ]

    def _handle(self, deliveries: list[Delivery]) -> list[Awaitable[None]]:
        batches: dict[int, list[Delivery]] = {}
        for delivery in deliveries:
            number = int(delivery.stream.partition("{")[2].partition("}")[0])
            batches.setdefault(number, []).append(delivery)
        return [self._partitions[number].handle(batch) for number, batch in batches.items()]

    async def _take_over(self, number: int) -> None:
        partition = self._partitions[number]
        await partition.take_over()
        await self._reclaimer.adopt(partition)

    async def _hand_back(self, number: int) -> None:
        await self._partitions[number].settled()

    async def _fire_timers(self) -> None:
        await fire_due(self._engine, [self._keys.partitions[number] for number in self._leases.readable(0.0)])

    async def _reclaim(self) -> None:
        for number in self._leases.readable(0.0):
            try:
                await self._reclaimer.look(self._partitions[number])
                await self._partitions[number].look_at_window()
            except EngineReplyError as error:  # one partition's trouble is not the others'
                _log.warning("partition not looked after", partition=number, error=str(error))

    async def _trim(self) -> None:
        older_than_ms = self._clock.now_ms() - self._settings.record_ttl * 1000
        for number in self._leases.readable(0.0):
            await trim_index(self._engine, self._keys.partitions[number], older_than_ms)
        if 0 in self._leases.readable(0.0):
            await forget_workers(self._engine, self._keys)

    async def _create_groups(self) -> None:
        await create_groups(self._engine, self._sources(list(self._partitions)), COORDINATOR_GROUP)
        await create_groups(self._engine, [keys.model("default") for keys in self._keys.partitions], WORKER_GROUP)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        """Run an action again and again; an engine that is away is waited for, and said once per loss."""
        while not self._stop.is_set():
            try:
                await action()
            except EngineError as error:
                _log.warning("engine trouble", loop=getattr(action, "__name__", "?"), error=str(error))
                await asyncio.sleep(0.2)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), seconds * random.uniform(0.8, 1.2))
