"""What a namespace holds by kinds of keys; and, as a program, 100,000 short turns through real processes, after which
memory and the number of keys must come back to what they were.

    python -m support.retention_run [--turns N] [--clients N]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio

from turnmill.protocol.keys import Keys
from turnmill.runtime import Agent, TurnOptions
from turnmill.runtime.client import Client
from turnmill.runtime.embedded import ensure_server

from .stage import Stage, open_stage, told
from .waiting import wait_until_async

SHORT_TIMES = {
    "event_ttl": 4,
    "record_ttl": 5,
    "session_ttl": 6,
    "answer_ttl": 3,
    "cancel_ttl": 6,
    "blob_ttl": 4,
    "plan_ttl": 10,
    "dead_letter_ttl": 3,
    "feed_ttl": 3,
}
"""As short as a loaded machine allows: a caller must still find what it waits for."""
APP = "support.crash_app"
PLAIN = Agent("plain", "scripted:plan")
"""Its model works without the engine: nothing but the turns themselves takes memory."""
MEMORY_RATIO_MAX = 1.10
STANDING = frozenset((
    "namespace", "secret", "tools", "agents", "agent-uses", "workers", "coordinators", "directives", "limits",
    "{p}:inbox", "{p}:results", "{p}:lease", "{p}:queues", "{p}:stats", "{p}:feed", "{p}:dead", "{p}:alive:*",
    "{p}:model:*", "{p}:tool:*", "provider:{*}:*",
))  # fmt: skip
"""The kinds of keys that a namespace at rest has: their number follows its processes, queues and names."""


class Footprint(NamedTuple):
    """What a namespace takes: keys by kind, and bytes of the whole engine."""

    keys: dict[str, int]
    unbounded: dict[str, int]
    """Those without an expiry."""
    memory_bytes: int

    @property
    def passing(self) -> dict[str, int]:
        """The keys that should be gone once everything has had its time."""
        return {kind: count for kind, count in self.keys.items() if kind not in STANDING}


def kind_of(name: str, prefix: str) -> str:
    """`tm:{3}:turn:t3-01k...:events` is a `{p}:turn:*:events`."""
    short = re.sub(r"^\{\d+\}", "{p}", name.removeprefix(f"{prefix}:"))
    if short.startswith("provider:"):
        return "provider:{*}:*"
    head, separator, rest = short.removeprefix("{p}:").partition(":")
    end = ":events" if rest.endswith(":events") else ""
    return ("{p}:" if short.startswith("{p}:") else "") + head + (":*" + end if separator else "")


async def footprint(client: redis.asyncio.Redis, prefix: str) -> Footprint:
    keys: Counter[str] = Counter()
    unbounded: Counter[str] = Counter()
    async for name in client.scan_iter(match=f"{prefix}:*", count=1000):
        kind = kind_of(name.decode(), prefix)
        keys[kind] += 1
        if kind not in STANDING:
            unbounded[kind] += await client.ttl(name) == -1
    info = await client.info("memory")
    return Footprint(dict(keys), dict(+unbounded), int(info["used_memory"]))


async def entries(client: redis.asyncio.Redis, keys: Keys) -> dict[str, int]:
    """How many members the keys have that stand for a whole partition or namespace."""
    found: dict[str, int] = {}
    for part in keys.partitions:
        for name, count in (
            ("turns", client.zcard(part.turns)),
            ("timers", client.zcard(part.timers)),
            ("feed", client.xlen(part.feed)),
            ("dead", client.xlen(part.dead)),
            ("removals", client.scard(part.removals)),
            ("inbox", client.xlen(part.inbox)),
            ("results", client.xlen(part.results)),
        ):
            reply: Any = await count
            found[name] = found.get(name, 0) + int(reply)
    return found


async def at_rest(stage: Stage, patience_seconds: float) -> Footprint:
    """Wait until everything has had its time, and give what is left. The assertion says what never went."""
    prefix = stage.keys.prefix

    async def is_clean() -> bool:
        left = await footprint(stage.redis, prefix)
        return not left.passing and not any((await entries(stage.redis, stage.keys)).values())

    try:
        await wait_until_async(is_clean, patience_seconds)
    except AssertionError:
        left = await footprint(stage.redis, prefix)
        raise AssertionError(f"left: {left.passing}, {await entries(stage.redis, stage.keys)}") from None
    return await footprint(stage.redis, prefix)


async def short_turns(client: Client, count: int, at_a_time: int) -> None:
    """Plain turns with sessions of their own, so many at a time; each is waited for."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            options = TurnOptions(tenant=f"tenant-{number % 50}")
            message = told(answer=f"number {number}")
            turn = await client.turn(PLAIN, message, options=options, idempotency_key=f"key-{number}")
            assert (await turn.result()).text == f"number {number}"

    await asyncio.gather(*[some() for _ in range(at_a_time)])


async def start_processes(stage: Stage, app: str, agent: Agent) -> None:
    """One of each role; returns when a turn with the agent has gone through."""
    stage.processes.coordinator()
    stage.processes.llm(app)
    stage.processes.tools(app)
    await (await stage.client.turn(agent, told())).result()


async def run(url: str, directory: Path, turns: int, at_a_time: int) -> bool:
    """Print what the engine held before, at its peak and after; whether it came back."""
    async with open_stage(url, "retention", directory, **SHORT_TIMES) as stage:
        await stage.redis.config_set("slowlog-log-slower-than", -1)  # the engine's own log would be counted as ours
        await start_processes(stage, APP, PLAIN)
        await short_turns(stage.client, 500, at_a_time)  # what is made once is made: scripts, buffers, tables
        before = await at_rest(stage, 120)
        report("before", before)
        peak = before
        started = time.monotonic()
        running = asyncio.create_task(short_turns(stage.client, turns, at_a_time))
        while not running.done():
            await asyncio.wait({running}, timeout=5)
            size = int((await stage.redis.info("memory"))["used_memory"])
            if size > peak.memory_bytes:
                peak = await footprint(stage.redis, stage.keys.prefix)
        await running
        seconds = time.monotonic() - started
        report("peak", peak)
        after = await at_rest(stage, 300)
        report("after", after)
    came_back = after.memory_bytes <= MEMORY_RATIO_MAX * before.memory_bytes and after.keys == before.keys
    print(
        f"{turns} turns in {seconds:.0f} s ({turns / seconds:.0f}/s); {'as before' if came_back else 'NOT as before'}"
    )
    return came_back


def report(when: str, found: Footprint) -> None:
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.keys.items()))
    print(f"{when}: {found.memory_bytes / 1e6:.2f} MB, {sum(found.keys.values())} keys: {kinds}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="retention", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=64, help="turns at a time")
    options = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    server = ensure_server(directory)
    try:
        return 0 if asyncio.run(run(server.url, directory, options.turns, options.clients)) else 1
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
