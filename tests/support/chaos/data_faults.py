"""Blows that take data away from the engine or set it back: what is lost must be said, and nothing may hang."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .server import in_thread

if TYPE_CHECKING:
    from .run import Run

_EVICTION_SECONDS = 0.7


async def flush_all(run: Run) -> str:
    await in_thread(run.server.ask, "FLUSHALL")
    return "FLUSHALL"


async def delete_streams(run: Run) -> str:
    """One kind of stream of one partition, or some channels."""
    keys = run.random.choice(run.stage.keys.partitions)
    kind = run.random.choice(["inbox", "results", "model", "tool", "channels"])
    names = {
        "inbox": [keys.inbox],
        "results": [keys.results],
        "model": [keys.model("default")],
        "tool": [keys.tool("default")],
        "channels": [run.stage.keys.of_turn(turn.id).events(turn.id) for turn in _some_turns(run)],
    }[kind]
    if names:
        await in_thread(run.server.ask, "DEL", *names)
    return f"DEL {kind}"


def _some_turns(run: Run) -> list[Any]:
    latest = list(run.turns.values())[-run.plan.in_flight :]
    return run.random.sample(latest, min(5, len(latest)))


async def evict(run: Run) -> str:
    """Keys go at random, those in use too, until a share of the memory is free."""
    policy = run.random.choice(["allkeys-random", "allkeys-lru"])
    information = await in_thread(run.server.information, "memory")
    dataset = information["used_memory_dataset"]
    limit = information["used_memory"] - int(dataset * run.random.uniform(0.05, 0.3))
    await in_thread(run.server.set, maxmemory_policy=policy, maxmemory=limit)
    await asyncio.sleep(_EVICTION_SECONDS)
    await in_thread(run.server.set, maxmemory=0, maxmemory_policy="noeviction")
    return policy


async def older_data(run: Run) -> str:
    """A backup of a moment ago is what the engine has after its crash."""
    backup = run.directory / "backup"
    await in_thread(run.server.copy_data, backup)
    await asyncio.sleep(run.random.uniform(0.2, 1.0))
    await in_thread(run.server.kill)
    await in_thread(run.server.restore_data, backup)
    await in_thread(run.server.start)
    return "older append-only file"


async def set_back(run: Run) -> str:
    """The groups of a partition begin again: what stands in the streams is delivered a second time."""
    keys = run.random.choice(run.stage.keys.partitions)
    streams = {
        keys.inbox: "coordinator",
        keys.results: "coordinator",
        keys.model("default"): "workers",
        keys.tool("default"): "workers",
    }
    for stream, group in streams.items():
        await in_thread(run.server.ask, "XGROUP", "SETID", stream, group, "0")
    return "XGROUP SETID 0"
