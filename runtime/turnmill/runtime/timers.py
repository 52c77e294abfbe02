"""Timers: a session's earliest deadline stands in its partition's sorted set, and is moved into the results when due.

The move is one script under the engine's clock, so a timer fires once, late or not, whoever moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.streams import FIRE_TIMERS

_FIRE_MAX = 100


async def fire_due(engine: Engine, partitions: Iterable[PartitionKeys]) -> int:
    """Fire what is due in each partition, up to a batch each; the number fired."""
    calls = [FIRE_TIMERS.run(engine, [keys.timers, keys.results], [_FIRE_MAX]) for keys in partitions]
    return sum(fired for fired, _now_ms in await asyncio.gather(*calls))
