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

from turnmill.protocol.acknowledgement import Acknowledgement
from turnmill.protocol.connection import Engine
from turnmill.protocol.dead_letters import is_wrong_type
from turnmill.protocol.directives import LOOK_SECONDS, Directives
from turnmill.protocol.errors import EngineError, EngineReplyError, EngineUnavailable
from turnmill.protocol.keys import COORDINATOR_GROUP, WORKER_GROUP, Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.namespace import ServerClock, evicting_policy, read_secret
from turnmill.protocol.processes import new_process_id
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import Delivery, GroupReader, create_groups, load_scripts

from .fleet import PoolSlots, Registration
from .janitor import REMOVE_SECONDS, Janitor
from .leases import PartitionLeases
from .partition import Partition
from .queues import registered_queues
from .reclaimer import Reclaimer
from .timers import fire_due

_log = get_logger(__name__)
_READ_COUNT = 32
"""Per stream and read. Large batches cost less each, but engine and processes then wait for each other in turns: with 64
turns in flight, 128 here and 64 at the workers made a third fewer turns per second."""
_BATCHES_MAX = 2
"""Batches under way at a time, on a cluster per partition: one is decided while the engine commits the other."""
_IDLE_SECONDS = 0.02
_SCRIPTS_SECONDS = 2.0
"""A server that was started again has no scripts: so long do users wait who may not send them."""


class Coordinator:
    """One coordinator process, or the coordinator of an embedded runtime."""

    def __init__(self, engine: Engine, keys: Keys, settings: Settings, secret: bytes, name: str | None = None) -> None:
        self.name = name or new_process_id("coordinator", engine.url)
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._clock = ServerClock(engine)
        slots = PoolSlots(engine, keys)
        self._partitions = {
            number: Partition(engine, keys, number, settings, secret, self._clock, slots)
            for number in range(len(keys.partitions))
        }
        self._reclaimer = Reclaimer(
            engine, keys, self.name, settings.liveness_seconds, self._clock, settings.max_attempts
        )
        self._leases = PartitionLeases(
            engine, keys, self.name, settings.lease_seconds, self._clock, self._take_over, self._hand_back
        )
        self._janitor = Janitor(engine, keys, settings, self._clock)
        self._acknowledgement = Acknowledgement.of(settings)
        self._secret = secret
        self._trouble_at = 0.0
        self._stop = asyncio.Event()
        self._directives = Directives(engine, keys, self.name, [], self._directed)
        self._registration = Registration(engine, keys, self.name)
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
            asyncio.create_task(self._every(self._settings.lease_seconds / 5, self._beat)),
            asyncio.create_task(self._every(0.1, self._fire_timers)),
            asyncio.create_task(self._every(self._settings.liveness_seconds / 4, self._reclaim)),
            asyncio.create_task(self._every(self._janitor.interval_seconds, self._trim)),
            asyncio.create_task(self._every(REMOVE_SECONDS, self._remove)),
            asyncio.create_task(self._every(LOOK_SECONDS, self._look_at_directives)),
            asyncio.create_task(self._every(_SCRIPTS_SECONDS, self._load_scripts)),
        ]
        reading = asyncio.create_task(self._read())
        try:
            await self._wait(reading, *loops)
        finally:
            self._stop.set()
            await asyncio.gather(reading, *loops, return_exceptions=True)
            with contextlib.suppress(EngineError):
                await self._registration.remove()
                await self._leases.give_back_all()
                await self._directives.leave()

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
        if self._engine.is_cluster:
            await self._read_apart()
            return
        reader = GroupReader(self._engine, COORDINATOR_GROUP, self.name, acknowledgement=self._acknowledgement)
        handling: deque[asyncio.Future[list[None]]] = deque()
        try:
            while not self._stop.is_set():
                readable = self._readable()
                if readable:
                    await self._read_once(reader, readable, handling)
                else:
                    await asyncio.sleep(_IDLE_SECONDS)
        finally:
            await asyncio.gather(*handling)
            reader.close()

    async def _read_apart(self) -> None:
        """On a cluster a read is about one partition: a task and a connection for each that is held."""
        reading: dict[int, asyncio.Task[None]] = {}
        try:
            while not self._stop.is_set():
                for number in self._readable():
                    if number not in reading or reading[number].done():
                        if number in reading:
                            reading[number].result()
                        reading[number] = asyncio.create_task(self._read_partition(number))
                await asyncio.sleep(_IDLE_SECONDS)
        finally:
            await asyncio.gather(*reading.values())

    async def _read_partition(self, number: int) -> None:
        """As long as it is held."""
        inbox = self._keys.partitions[number].inbox
        reader = GroupReader(self._engine, COORDINATOR_GROUP, self.name, inbox, self._acknowledgement)
        handling: deque[asyncio.Future[list[None]]] = deque()
        try:
            while not self._stop.is_set() and number in self._readable():
                await self._read_once(reader, [number], handling)
        finally:
            await asyncio.gather(*handling)
            reader.close()

    def _readable(self) -> list[int]:
        """The partitions whose lease outlasts a read."""
        return self._leases.readable(self._block_ms / 1000 + 0.2)

    async def _read_once(
        self, reader: GroupReader, readable: list[int], handling: deque[asyncio.Future[list[None]]]
    ) -> None:
        deliveries = await reader.read(self._sources(readable), _READ_COUNT, self._block_ms)
        while len(handling) >= _BATCHES_MAX or (handling and handling[0].done()):
            await handling.popleft()
        if deliveries:
            handling.append(asyncio.gather(*self._handle(deliveries)))

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
        await create_groups(self._engine, self._sources([number]), COORDINATOR_GROUP)  # they may have been flushed
        await partition.take_over()
        await self._reclaimer.adopt(partition)

    async def _hand_back(self, number: int) -> None:
        await self._partitions[number].settled()

    async def _beat(self) -> None:
        """The leases, and what an engine that lost its data must be told again."""
        secret = await read_secret(self._engine, self._keys, self._secret)
        if secret != self._secret:
            _log.error("the namespace has another secret: the engine lost data; tasks under way will not be answered")
            self._secret = secret
            for partition in self._partitions.values():
                partition.use_secret(secret)
        await self._leases.beat()

    async def _fire_timers(self) -> None:
        await fire_due(self._engine, [self._keys.partitions[number] for number in self._leases.readable(0.0)])

    async def _reclaim(self) -> None:
        # Behind trouble of the engine, workers that live have had no chance to say so.
        calm = asyncio.get_running_loop().time() - self._trouble_at > self._settings.liveness_seconds
        for number in self._leases.readable(0.0):
            try:
                await self._reclaimer.look(self._partitions[number], tasks=calm)
                await self._partitions[number].look_at_window()
                await self._partitions[number].put_back()
            except EngineReplyError as error:  # one partition's trouble is not the others'
                if not is_wrong_type(error) or not await self._partitions[number].displace_wrong_keys():
                    _log.warning("partition not looked after", partition=number, error=str(error))
            except EngineUnavailable as error:
                if not self._engine.is_cluster:
                    raise
                _log.warning("partition not looked after", partition=number, error=str(error))

    async def _look_at_directives(self) -> None:
        await self._registration.write(self._leases.readable(0.0), is_draining=self._stop.is_set())
        await self._directives.look()

    def _directed(self) -> None:
        if self._directives.draining:
            self.stop()

    async def _displace(self) -> None:
        """Also in the queues that nothing was dispatched to: their workers read them with others, and could read none."""
        queues = await registered_queues(self._engine, self._keys)
        for number in self._leases.readable(0.0):
            await self._partitions[number].displace_wrong_keys(queues)

    async def _trim(self) -> None:
        await self._displace()
        await self._janitor.look(self._leases.readable(0.0))

    async def _remove(self) -> None:
        await self._janitor.remove(self._leases.readable(0.0))

    async def _load_scripts(self) -> None:
        await load_scripts(self._engine)

    async def _create_groups(self) -> None:
        await create_groups(self._engine, self._sources(list(self._partitions)), COORDINATOR_GROUP)
        await create_groups(self._engine, [keys.model("default") for keys in self._keys.partitions], WORKER_GROUP)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        """Run an action again and again; an engine that is away is waited for, and said once per loss."""
        while not self._stop.is_set():
            try:
                await action()
            except EngineError as error:
                self._trouble_at = asyncio.get_running_loop().time()
                _log.warning("engine trouble", loop=getattr(action, "__name__", "?"), error=str(error))
                if is_wrong_type(error):
                    with contextlib.suppress(EngineError):
                        await self._displace()
                await asyncio.sleep(0.2)
            except Exception:  # what anybody wrote somewhere must not end what all depend on
                _log.exception("a loop has failed, and goes on", loop=getattr(action, "__name__", "?"))
                await asyncio.sleep(0.2)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), seconds * random.uniform(0.8, 1.2))
