"""Turns per second of a closed loop: a model step, a tool call, a model step, the answer at the client.

Every turn has its own answer, which is checked. Prints turns/s, latencies, CPU per turn and process, and what the engine
was asked per turn.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import time
from pathlib import Path

from app import agent
from fleet import Fleet, fleet

from turnmill.protocol.events import TextDelta, TurnFinished
from turnmill.runtime import connect
from turnmill.runtime.roles import run_async

RUN = secrets.token_hex(3)
"""Sessions of this run: with those of an earlier one its conversations would be longer."""


async def one_turn(client, number: int) -> float:
    """Run one turn and check its answer; the time to the first text."""
    text = ""
    first = 0.0
    turn = await client.turn(agent, f"{number} {number % 97}", session=f"{RUN}-{number % 5000}")
    async for event in turn.events():
        if isinstance(event, TextDelta):
            first = first or time.perf_counter()
            text += event.text
        elif isinstance(event, TurnFinished):
            break
    expected = str(number + number % 97)
    if not text.endswith(expected):
        raise SystemExit(f"turn {number} answered {text[-40:]!r} instead of {expected}")
    return first


async def load(url: str, partitions: int, in_flight: int, seconds: float, warm: int = 200):
    latencies: list[float] = []
    firsts: list[float] = []
    async with connect(url, partitions=partitions) as client:
        await asyncio.gather(*[one_turn(client, number) for number in range(min(warm, in_flight * 4))])
        number = 1000
        started = time.perf_counter()
        deadline = started + seconds

        async def loop() -> None:
            nonlocal number
            while time.perf_counter() < deadline:
                number += 1
                begun = time.perf_counter()
                first = await one_turn(client, number)
                latencies.append(time.perf_counter() - begun)
                firsts.append(first - begun)

        await asyncio.gather(*[loop() for _ in range(in_flight)])
        return len(latencies) / (time.perf_counter() - started), latencies, firsts


def measure(running: Fleet, in_flight: int, seconds: float) -> float:
    cpu, counters = running.cpu_seconds(), running.engine_counters()
    rate, latencies, firsts = run_async(load(running.url, running.partitions, in_flight, seconds))
    turns = len(latencies) + min(200, in_flight * 4)
    spent = {name: (after - cpu[name]) / turns * 1e3 for name, after in running.cpu_seconds().items()}
    asked = {name: (after - counters.get(name, 0)) / turns for name, after in running.engine_counters().items()}
    quantiles = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    print(
        f"K={in_flight} P={running.partitions}: {rate:.0f} turns/s  p50 {quantiles[49] * 1e3:.1f} ms  "
        f"p99 {quantiles[98] * 1e3:.1f} ms  first text p50 {statistics.median(firsts) * 1e3:.1f} ms  "
        f"CPU {sum(spent.values()):.2f} ms/turn ("
        + ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in spent.items())
        + ")",
        flush=True,
    )
    scripts = asked.get("evalsha", 0) + asked.get("eval", 0)
    transport = {"bytes", "bytes_in", "evalsha", "eval", "info", "multi", "exec"}
    microseconds = {name[3:]: value for name, value in asked.items() if name.startswith("us:")}
    asked = {name: value for name, value in asked.items() if not name.startswith("us:")}
    inner = sum(count for name, count in asked.items() if name not in transport)
    print(
        f"   per turn: {scripts:.2f} script calls, {inner:.1f} commands, {asked['bytes'] / 1e3:.1f} kB "
        f"({asked['bytes_in'] / 1e3:.1f} in): "
        + ", ".join(
            f"{name} {count:.2f} ({microseconds[name]:.0f} us)"
            for name, count in sorted(asked.items(), key=lambda item: -item[1])
            if count >= 0.05 and name not in ("bytes", "bytes_in")
        ),
        flush=True,
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--deltas", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write a CPU profile of each process into this directory")
    options = parser.parse_args()
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    with fleet(options.partitions, {"BENCH_DELTAS": str(options.deltas)}, options.profile) as running:
        for in_flight in options.in_flight:
            rates = [measure(running, in_flight, options.seconds) for _ in range(options.repeat)]
            print(
                f"=> K={in_flight} P={options.partitions} deltas={options.deltas}: median {statistics.median(rates):.0f} turns/s"
            )


if __name__ == "__main__":
    main()
