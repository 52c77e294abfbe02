"""The dispatch window of a partition: how many model tasks may stand in a pool's stream.

What is beyond the window waits in the partition's backlog, where tenants take turns and priorities count. A provider with
limits has a lane of its own in each pool, with a backlog of its own: what it cannot take waits here, and not in the slots
of workers, where other providers' calls would wait behind it. While a provider is held back its lane moves nothing.

The counts kept here are the owner's estimate and bound nothing but queues: they are taken from the stream when the
partition is taken over, and again at every look.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import NamedTuple

import msgspec

from turnmill.protocol.codec import TASK_CODEC
from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.messages import ModelTask
from turnmill.protocol.provider_leave import ProviderLimit
from turnmill.protocol.streams import DISPATCH_BACKLOG

from .fleet import PoolSlots

_RATE_SECONDS = 30.0
_COMPLETIONS_MAX = 2000
_RETRY_AFTER_SECONDS = (1.0, 60.0)
_WINDOWS_OF_SLOTS = 2
_WINDOW_MIN = 4
_decode_limit = msgspec.json.Decoder(ProviderLimit).decode


class Lane(NamedTuple):
    """The tasks of one pool that have a window of their own: those of one provider with limits, or all others."""

    pool: str
    provider: str = ""

    @property
    def name(self) -> str:
        """Of its backlog. No pool may be called so: `|` is in no name."""
        return f"{self.pool}|{self.provider}" if self.provider else self.pool


class Place(NamedTuple):
    """Where a task goes: into its pool's stream, or into the backlog of its lane."""

    lane: Lane
    waits: bool


class DispatchWindow:
    """The window of one partition over all pools."""

    def __init__(self, engine: Engine, keys: Keys, partition: PartitionKeys, window_max: int, slots: PoolSlots) -> None:
        self._engine = engine
        self._names = keys
        self._keys = partition
        self._window_max = window_max
        self._slots = slots
        self._known: list[str] = []
        self._shares: dict[str, int] = {}
        """By provider with limits: how many of its tasks may stand in a stream of this partition."""
        self._held_until_ms: dict[str, int] = {}
        self._in_stream: dict[str, int] = {}
        self._in_lane: dict[Lane, int] = {}
        self._waiting: dict[Lane, int] = {}
        self._put_back: dict[Lane, int] = {}
        self._completions: dict[str, deque[float]] = {}

    def admit(self, pool: str, provider: str) -> Place:
        """Where the next task of a pool goes. Nothing overtakes what waits already."""
        lane = self._lane(pool, provider)
        if lane in self._waiting or self._room(lane) <= 0:
            self._waiting[lane] = self._waiting.get(lane, 0) + 1
            self._put_back[lane] = self._put_back.get(lane, 0) + 1
            return Place(lane, waits=True)
        self._move(lane, 1)
        return Place(lane, waits=False)

    def completed(self, pool: str, provider: str) -> None:
        """A model task of the pool has left its stream."""
        lane = self._lane(pool, provider)
        self._in_stream[pool] = max(0, self._in_stream.get(pool, 0) - 1)
        if lane.provider:
            self._in_lane[lane] = max(0, self._in_lane.get(lane, 0) - 1)
        times = self._completions.setdefault(pool, deque(maxlen=_COMPLETIONS_MAX))
        times.append(time.monotonic())

    def depth(self, pool: str) -> int:
        """How many of its tasks were dispatched or wait."""
        return self._in_stream.get(pool, 0) + sum(count for lane, count in self._waiting.items() if lane.pool == pool)

    def drain_seconds(self, pool: str) -> float:
        """In about what time half of them will be done, at the rate of the last half minute."""
        least, most = _RETRY_AFTER_SECONDS
        times = self._completions.get(pool)
        if not times:
            return most
        now = time.monotonic()
        recent = sum(1 for at in times if at > now - _RATE_SECONDS)
        seconds = min(_RATE_SECONDS, max(1.0, now - times[0]))
        return min(most, max(least, self.depth(pool) / 2 * seconds / recent)) if recent else most

    @property
    def has_backlog(self) -> bool:
        return bool(self._waiting)

    async def refill(self) -> None:
        """Move waiting tasks into the streams that have room."""
        for lane in list(self._waiting):
            if self._room(lane) > 0 or not lane.provider:
                await self._refill(lane)

    async def look(self, pools: set[str], now_ms: int) -> None:
        """Correct the counts, and find what an earlier owner left waiting."""
        await self._slots.look()
        await self._look_at_limits(now_ms)
        for pool in pools:
            self._in_stream[pool] = await self._engine.call("XLEN", self._keys.model(pool))
            # Also of providers whose limits were taken away: something may wait there.
            lanes = [Lane(pool), *(Lane(pool, provider) for provider in self._known)]
            if self._shares:
                await self._count_lanes(pool)
            backlogs = [self._engine.call("ZCARD", self._keys.backlog(lane.name)) for lane in lanes]
            for lane, waiting in zip(lanes, await asyncio.gather(*backlogs), strict=True):
                if waiting:
                    self._waiting[lane] = waiting
        await self.refill()

    # ---- providers with limits

    async def _look_at_limits(self, now_ms: int) -> None:
        published = pairs(await self._engine.call("HGETALL", self._names.limits))
        limits = {name.decode(): _limit(body) for name, body in published.items()}
        parts, self._known = len(self._names.partitions), sorted(limits)
        self._shares = {name: limit.share(parts) for name, limit in limits.items() if limit.is_limited}
        held = [self._engine.call("HGET", self._names.provider(name).state, "held_until") for name in self._shares]
        until = zip(self._shares, await asyncio.gather(*held), strict=True)
        self._held_until_ms = {name: int(at) for name, at in until if at is not None and int(at) > now_ms}

    async def _count_lanes(self, pool: str) -> None:
        """From the stream itself: a task says which limited provider it is for."""
        counts: dict[Lane, int] = {}
        entries = await self._engine.call("XRANGE", self._keys.model(pool), "-", "+", "COUNT", self._window_max)
        for _, fields in entries:
            task = TASK_CODEC.decode_fields(pairs(fields))
            if isinstance(task, ModelTask) and task.provider in self._shares:
                lane = Lane(pool, task.provider)
                counts[lane] = counts.get(lane, 0) + 1
        for lane in [lane for lane in self._in_lane if lane.pool == pool]:
            del self._in_lane[lane]
        self._in_lane.update(counts)

    def _lane(self, pool: str, provider: str) -> Lane:
        return Lane(pool, provider) if provider in self._shares else Lane(pool)

    def _room(self, lane: Lane) -> int:
        """How many more tasks the stream may take from a lane."""
        room = self._window(lane.pool) - self._in_stream.get(lane.pool, 0)
        if not lane.provider:
            return room
        if lane.provider in self._held_until_ms:
            return 0
        return min(room, self._shares.get(lane.provider, self._window_max) - self._in_lane.get(lane, 0))

    # ---- small things

    def _window(self, pool: str) -> int:
        """Twice what the pool's workers can do at once: what is in the stream is out of tenants' turns. A pool whose
        workers are not known yet begins small."""
        share = math.ceil(_WINDOWS_OF_SLOTS * self._slots.of(pool) / len(self._names.partitions))
        return min(self._window_max, max(share, _WINDOW_MIN))

    def _move(self, lane: Lane, count: int) -> None:
        self._in_stream[lane.pool] = self._in_stream.get(lane.pool, 0) + count
        if lane.provider:
            self._in_lane[lane] = self._in_lane.get(lane, 0) + count

    async def _refill(self, lane: Lane) -> None:
        names = [self._keys.backlog(lane.name), self._keys.backlog_clock(lane.name), self._keys.model(lane.pool)]
        put_back = self._put_back.get(lane, 0)
        window = self._window(lane.pool)
        most = self._room(lane) if lane.provider else window
        moved, waiting = await DISPATCH_BACKLOG.run(self._engine, names, [window, most])
        self._move(lane, moved)
        joined = self._put_back.get(lane, 0) - put_back  # since the look
        if waiting + joined:
            self._waiting[lane] = waiting + joined
        else:
            self._waiting.pop(lane, None)


def _limit(body: bytes) -> ProviderLimit:
    """What somebody has written there; what nobody can read limits nothing."""
    try:
        return _decode_limit(body)
    except msgspec.DecodeError:
        return ProviderLimit()
