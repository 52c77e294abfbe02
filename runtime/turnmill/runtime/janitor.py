"""Takes turns out of the partition's index when their records have expired, and killed workers out of the registry;
everything else expires by itself."""

from __future__ import annotations

import asyncio
import math

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.keys import Keys, PartitionKeys

_TURNS_MAX = 500
_WORKER_SILENT_SECONDS = 3600.0


async def forget_workers(engine: Engine, keys: Keys) -> int:
    """Remove workers from the registry that were killed and have been silent for an hour; the number removed."""
    fields = pairs(await engine.call("HGETALL", keys.workers))
    seconds, _microseconds = await engine.call("TIME")
    gone = [name for name, body in fields.items() if _seen_at(body) < int(seconds) - _WORKER_SILENT_SECONDS]
    if gone:
        await engine.call("HDEL", keys.workers, *gone)
    return len(gone)


def _seen_at(body: bytes) -> float:
    """What a worker of another language writes there is its own affair: without a time it stays."""
    try:
        seen_at = msgspec.json.decode(body)["seen_at"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return math.inf
    return float(seen_at) if isinstance(seen_at, int | float) else math.inf


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
