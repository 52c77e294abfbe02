"""Removes what is past its time and does not expire by itself: index entries, lifecycle events, dead letters, what deleted
sessions have left; and in the registries, processes that were killed and agents' old versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.errors import EngineReplyError
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.settings import Settings

from .agent_versions import forget_versions, note_uses
from .directives import forget_process, read_directives
from .pinned_plans import keep_pinned_plans
from .removals import remove_some

_log = get_logger(__name__)
_TURNS_MAX = 500
_WORKER_SILENT_SECONDS = 3600.0
REGISTERED_MAX = 10_000
_ENTRY_BYTES_MAX = 64 * 1024
_LOOK_SECONDS = (0.5, 30.0)
REMOVE_SECONDS = 1.0
"""How often removals are looked for."""
_REMOVE_CALLS_MAX = 100


class Janitor:
    """The janitor of one coordinator: `look` and `remove` go through the partitions that it holds."""

    def __init__(self, engine: Engine, keys: Keys, settings: Settings, clock: ServerClock) -> None:
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._clock = clock
        self._pins_due: dict[int, float] = {}
        pins_seconds = min(settings.plan_ttl, settings.agent_ttl) / 2
        shortest = min(settings.record_ttl, settings.feed_ttl, settings.dead_letter_ttl, pins_seconds)
        self.interval_seconds = min(max(shortest / 4, _LOOK_SECONDS[0]), _LOOK_SECONDS[1])
        """How often to look: what has a short time is removed soon behind it."""

    async def look(self, partitions: Iterable[int]) -> None:
        """Remove what is past its time; the owner of partition 0 looks at the registries."""
        for number in partitions:
            try:
                await self._look(self._keys.partitions[number])
                await self._keep_pinned(self._keys.partitions[number])
                if number == 0:
                    await forget_workers(self._engine, self._keys)
                    older_than_ms = self._older_than_ms(self._settings.agent_ttl)
                    await forget_versions(self._engine, self._keys, older_than_ms, self._clock.now_ms())
            except EngineReplyError as error:  # one partition's trouble is not the others'
                _log.warning("partition not cleaned up", partition=number, error=str(error))

    async def remove(self, partitions: Iterable[int]) -> None:
        """Go on with what deleted sessions have left, for a moment in each partition."""
        for number in partitions:
            try:
                await remove_some(self._engine, self._keys.partitions[number], _REMOVE_CALLS_MAX)
            except EngineReplyError as error:
                _log.warning("deleted sessions not removed yet", partition=number, error=str(error))

    async def _look(self, keys: PartitionKeys) -> None:
        settings = self._settings
        await trim_index(self._engine, keys, self._older_than_ms(settings.record_ttl))
        await self._engine.call("XTRIM", keys.feed, "MINID", self._older_than_ms(settings.feed_ttl))
        await self._engine.call("XTRIM", keys.dead, "MINID", self._older_than_ms(settings.dead_letter_ttl))
        await trim_to_bytes(self._engine, keys.dead, settings.dead_letter_bytes_max)

    async def _keep_pinned(self, keys: PartitionKeys) -> None:
        """Several times within the life of a plan, and of an agent's version."""
        seconds = min(self._settings.plan_ttl, self._settings.agent_ttl)
        if self._pins_due.get(keys.partition, 0.0) > time.monotonic():
            return
        older_than_ms, plan_ttl_ms = self._older_than_ms(seconds // 2), self._settings.plan_ttl * 1000
        versions = await keep_pinned_plans(self._engine, keys, older_than_ms, plan_ttl_ms)
        await note_uses(self._engine, self._keys, versions, self._clock.now_ms())
        self._pins_due[keys.partition] = time.monotonic() + seconds / 8

    def _older_than_ms(self, seconds: int) -> int:
        return max(0, self._clock.now_ms() - seconds * 1000)


async def trim_to_bytes(engine: Engine, stream: str, bytes_max: int) -> None:
    """Remove the oldest entries of a stream that takes more memory, all but the newest entry if need be."""
    while True:
        size = await engine.call("MEMORY", "USAGE", stream, "SAMPLES", 0) or 0
        length = await engine.call("XLEN", stream)
        if size <= bytes_max or length <= 1:
            return
        kept = min(length - 1, max(1, length * bytes_max // size))
        await engine.call("XTRIM", stream, "MAXLEN", kept)


async def trim_index(engine: Engine, keys: PartitionKeys, older_than_ms: int) -> int:
    """Remove entries made before a time whose records are gone; a turn that still runs has its record. The number
    removed."""
    removed = kept = 0
    while True:
        names = await engine.call("ZRANGEBYSCORE", keys.turns, "-inf", older_than_ms, "LIMIT", kept, _TURNS_MAX)
        if not names:
            return removed
        exist = await asyncio.gather(*[engine.call("EXISTS", keys.turn(name.decode())) for name in names])
        gone = [name for name, exists in zip(names, exist, strict=True) if not exists]
        if gone:
            await engine.call("ZREM", keys.turns, *gone)
        removed += len(gone)
        kept += len(names) - len(gone)


async def forget_workers(engine: Engine, keys: Keys) -> int:
    """Remove from the registry who is gone; the number removed.

    That is who has been silent for an hour, by the time that it wrote there itself. Who wrote none that can be is gone
    without a sign of life. Anybody may write here who is a worker: beyond a size everybody is removed, and who lives
    writes itself again with its next beat.
    """
    count: int = await engine.call("HLEN", keys.workers)
    if count > REGISTERED_MAX:
        _log.error("too many processes are registered: all are forgotten, the living ones come back", count=count)
        await engine.call("UNLINK", keys.workers)
        return count
    fields = pairs(await engine.call("HGETALL", keys.workers))
    seconds, _microseconds = await engine.call("TIME")
    now = int(seconds)
    seen_at = {name: None if len(body) > _ENTRY_BYTES_MAX else _seen_at(body) for name, body in fields.items()}
    unclear = [name for name, at in seen_at.items() if at is None or at > now + _WORKER_SILENT_SECONDS]
    sign = keys.partitions[0].alive("").encode()
    alive = await asyncio.gather(*[engine.call("EXISTS", sign + name) for name in unclear])
    gone = [name for name, is_alive in zip(unclear, alive, strict=True) if not is_alive]
    gone += [name for name, at in seen_at.items() if at is not None and at < now - _WORKER_SILENT_SECONDS]
    if gone:
        await engine.call("HDEL", keys.workers, *gone)
    left = {name.decode(errors="replace") for name in fields.keys() - set(gone)}
    for process_id in (await read_directives(engine, keys)).draining:
        if process_id not in left:  # one that was killed while it drained
            await forget_process(engine, keys, process_id)
    return len(gone)


def _seen_at(body: bytes) -> float | None:
    """When a worker was there last; None where it did not say. What one of another language writes is its own affair."""
    try:
        seen_at = msgspec.json.decode(body)["seen_at"]
        return float(seen_at) if isinstance(seen_at, int | float) else None
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
