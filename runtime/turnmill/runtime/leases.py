"""Who coordinates which partition.

A partition has one coordinator at a time, by a lease that expires. Each coordinator holds at most its share,
ceil(partitions / live coordinators), and gives the rest back. Correctness does not rest on this: commits are fenced by
version. Order of acceptance and the cache do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from turnmill.protocol.connection import Argument, Engine
from turnmill.protocol.errors import EngineError, EngineUnavailable
from turnmill.protocol.keys import Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.streams import RENEW_LEASE

_log = get_logger(__name__)


class PartitionLeases:
    """The leases of one coordinator. `readable` are the partitions that it holds and is ready to read."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        owner: str,
        lease_seconds: float,
        clock: ServerClock,
        take_over: Callable[[int], Awaitable[None]],
        hand_back: Callable[[int], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._take_over = take_over
        self._hand_back = hand_back
        self._share = len(keys.partitions)
        self._trouble: EngineError | None = None
        self._is_slow = False
        self._valid_until: dict[int, float] = {}
        self._ready: set[int] = set()
        self._taking: dict[int, asyncio.Task[None]] = {}

    def readable(self, for_seconds: float) -> list[int]:
        """Partitions whose lease holds for the given time at least, by the clock of before its request."""
        horizon = asyncio.get_running_loop().time() + for_seconds
        return [number for number in sorted(self._ready) if self._valid_until.get(number, 0.0) > horizon]

    async def beat(self) -> None:
        """Renew what is held, take what is free up to the share, give back what is beyond it.

        On a cluster one shard may be away: the leases in others are looked after all the same. Raises the last trouble.
        """
        self._trouble, self._is_slow = None, False
        async with self._noting_trouble():
            await self._clock.synchronize()
            self._share = await self._read_share()
        await asyncio.gather(*[self._renew(number) for number in list(self._valid_until)])
        for number in sorted(self._ready)[self._share :]:
            await self._give_back(number)
        # Every coordinator starts its search elsewhere, so that two that start together meet less often.
        start = hash(self._owner) % len(self._keys.partitions)
        for offset in range(len(self._keys.partitions)):
            if len(self._valid_until) >= self._share or self._is_slow:
                break
            async with self._noting_trouble():
                await self._acquire((start + offset) % len(self._keys.partitions))
        if self._trouble is not None:
            raise self._trouble

    async def give_back_all(self) -> None:
        """At drain: others may take over at once."""
        await asyncio.gather(*self._taking.values(), return_exceptions=True)
        for number in list(self._valid_until):
            await self._give_back(number)
        await self._engine.call("ZREM", self._keys.coordinators, self._owner)

    @asynccontextmanager
    async def _noting_trouble(self) -> AsyncIterator[None]:
        """What one engine or shard does not answer in time must not cost the other leases."""
        seconds = self._lease_seconds / 3
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._trouble, self._is_slow = EngineUnavailable(f"no answer within {seconds:g} s"), True
        except EngineError as error:
            self._trouble = error

    async def _read_share(self) -> int:
        now_ms = self._clock.now_ms()
        self._engine.call("ZADD", self._keys.coordinators, now_ms, self._owner)
        self._engine.call("ZREMRANGEBYSCORE", self._keys.coordinators, 0, now_ms - int(self._lease_seconds * 1000))
        live: int = await self._engine.call("ZCARD", self._keys.coordinators)
        return math.ceil(len(self._keys.partitions) / max(1, live))

    async def _renew(self, number: int) -> None:
        asked_at = asyncio.get_running_loop().time()
        async with self._noting_trouble():
            arguments: list[Argument] = [self._owner, int(self._lease_seconds * 1000)]
            renewed = await RENEW_LEASE.run(self._engine, [self._lease_key(number)], arguments)
            if number not in self._valid_until:
                return  # taken over in vain meanwhile: without a reader it must not be renewed for ever
            if renewed:
                self._valid_until[number] = asked_at + self._lease_seconds
            else:
                _log.warning("lease lost", partition=number)
                self._drop(number)

    async def _acquire(self, number: int) -> None:
        if number in self._valid_until or number in self._taking:
            return
        asked_at = asyncio.get_running_loop().time()
        milliseconds = int(self._lease_seconds * 1000)
        taken = await self._engine.call("SET", self._lease_key(number), self._owner, "NX", "PX", milliseconds)
        if not taken:
            return
        self._valid_until[number] = asked_at + self._lease_seconds
        # What a former owner left may take longer than a lease: the beat goes on meanwhile.
        self._taking[number] = asyncio.create_task(self._take(number))

    async def _take(self, number: int) -> None:
        try:
            await self._take_over(number)
        except Exception as error:  # whatever it is: a lease without a reader would hold the partition for ever
            _log.warning("partition not taken over", partition=number, error=repr(error))
            self._drop(number)
            return
        finally:
            del self._taking[number]
        if number in self._valid_until:
            self._ready.add(number)
            _log.info("partition taken over", partition=number)

    async def _give_back(self, number: int) -> None:
        self._ready.discard(number)
        await self._hand_back(number)
        self._valid_until.pop(number, None)
        await RENEW_LEASE.run(self._engine, [self._lease_key(number)], [self._owner, 0])
        _log.info("partition given back", partition=number)

    def _drop(self, number: int) -> None:
        self._valid_until.pop(number, None)
        self._ready.discard(number)

    def _lease_key(self, number: int) -> str:
        return self._keys.partitions[number].lease
