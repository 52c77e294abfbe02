"""Takes turns out of the partition's index when their records have expired; everything else expires by itself."""

from __future__ import annotations

import asyncio

from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import PartitionKeys

_TURNS_MAX = 500


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
