"""A few entries of a dead worker among very many of a busy one: `scripts/chaos pending --entries 50000`.

The dead ones must be found soon, and no command may take long, however many entries are pending.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support.stage import call, told
from support.waiting import wait_until_async

from .deployment import Deployment, deployment
from .server import in_thread

SLOW_MS = 50
PATIENCE_SECONDS = 60.0
_BATCH = 1000


@dataclass
class Found:
    """How long the dead entries were not found, in seconds, and which commands took longer than `SLOW_MS`."""

    entries: int
    dead: int
    seconds: float
    slow: list[str]
    slowest_ms: float

    def __str__(self) -> str:
        return (
            f"{self.dead} dead entries among {self.entries} busy ones were found in {self.seconds:.1f} s; the slowest command "
            f"took {self.slowest_ms:.1f} ms, {len(self.slow)} above {SLOW_MS} ms {self.slow[:5]}"
        )


async def find_dead(deployed: Deployment, entries: int, dead: int = 5) -> Found:
    """A deployment without tool workers: this function plays them."""
    plain, keys = deployed.stage.redis, deployed.stage.keys.of_session("session")
    queue = keys.tool("default")
    await plain.xgroup_create(queue, "workers", "0", mkstream=True)
    await plain.set(keys.alive("busy"), 1, px=600_000)
    for first in range(0, entries, _BATCH):
        pipeline = plain.pipeline(transaction=False)
        for number in range(first, min(entries, first + _BATCH)):
            pipeline.xadd(queue, {"t": "tool_task", "d": f'{{"number":{number}}}'})
        await pipeline.execute()
        await plain.xreadgroup("workers", "busy", {queue: ">"}, count=_BATCH)
    assert (await plain.xpending(queue, "workers"))["pending"] == entries
    await in_thread(deployed.server.set, slowlog_log_slower_than=100, slowlog_max_len=10_000)
    await in_thread(deployed.server.ask, "SLOWLOG", "RESET")
    deployed.start("llm")
    deployed.start("coordinator")
    turns = [await deployed.ask(told([call("once")]), f"session/{number}") for number in range(dead)]

    async def dispatched() -> bool:
        return int(await plain.xlen(queue)) == entries + dead

    await wait_until_async(dispatched, PATIENCE_SECONDS)
    await plain.xreadgroup("workers", "dead", {queue: ">"}, count=100)
    since = time.monotonic()
    for turn in turns:
        result = await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
        assert "is unknown" in str(result.messages), result.messages
    seconds = time.monotonic() - since
    assert (await plain.xpending(queue, "workers"))["pending"] == entries
    commands = [(entry["duration"] / 1000, entry["command"]) for entry in await plain.slowlog_get(10_000)]
    ours = [(took, command) for took, command in commands if b"chaos-" in command]
    slow = [f"{took:.0f} ms: {command[:80].decode(errors='replace')}" for took, command in ours if took > SLOW_MS]
    return Found(entries, dead, seconds, slow, max((took for took, _ in ours), default=0.0))


async def _main(entries: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as directory:
        async with deployment(Path(directory), fsync="no", lease_seconds=5.0, liveness_seconds=5.0) as deployed:
            return await find_dead(deployed, entries)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos pending", description="Few dead entries among many busy ones.")
    parser.add_argument("--entries", type=int, default=50_000)
    found = asyncio.run(_main(parser.parse_args(arguments).entries))
    print(found)
    return 1 if found.slow else 0
