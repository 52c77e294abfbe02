"""What a long conversation costs: CPU of the coordinator per turn on sessions of 10 and of 5,000 messages of 1 kB."""

from __future__ import annotations

import argparse
import asyncio
import time

from app import agent
from fleet import Fleet, fleet

from turnmill.protocol.content import Message
from turnmill.runtime import connect
from turnmill.runtime.roles import run_async

_PACE_SECONDS = 0.4


def idle_share(running: Fleet, seconds: float = 5.0) -> float:
    """The coordinator's CPU while nothing happens, per second: long conversations take longer at the LLM worker, and
    what the coordinator spends on waiting meanwhile is not a cost of the turn."""
    before = running.cpu_seconds()["coordinator"]
    time.sleep(seconds)
    return (running.cpu_seconds()["coordinator"] - before) / seconds


async def measure(running: Fleet, length: int, sessions: int, turns: int, idle: float) -> float:
    """Milliseconds of the coordinator's CPU per turn, without its idle share."""
    async with connect(running.url, partitions=running.partitions) as client:
        names = [f"h{length}-{number}" for number in range(sessions)]
        for name in names:
            filler = [
                Message(role="user" if number % 2 else "assistant", content="x" * 1000) for number in range(length - 1)
            ]
            turn = await client.turn(agent, [*filler, Message(role="user", content="1 2")], session=name)
            await turn.result()
        before, began = running.cpu_seconds()["coordinator"], time.perf_counter()

        async def talk(name: str) -> None:
            for number in range(turns):
                # The same pace for both: a busy coordinator is cheaper per turn, as it works in batches.
                await asyncio.sleep(max(0.0, began + number * _PACE_SECONDS - time.perf_counter()))
                result = await (await client.turn(agent, f"{number} 5", session=name)).result()
                if result.answer != str(number + 5):
                    raise SystemExit(f"{name} answered {result.answer!r}")

        await asyncio.gather(*[talk(name) for name in names])
        seconds = time.perf_counter() - began
        spent = running.cpu_seconds()["coordinator"] - before - idle * seconds
    rate = sessions * turns / seconds
    print(
        f"   {length} messages: {spent / sessions / turns * 1e3:.3f} ms of the coordinator per turn, {rate:.0f} turns/s",
        flush=True,
    )
    return spent / sessions / turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs=2, default=[10, 5000])
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with fleet(1) as running:
        run_async(measure(running, 3, options.sessions, options.turns, 0.0))  # warm
        idle = idle_share(running)
        print(f"   idle: {idle * 1e2:.1f} % of a core")
        ratios = []
        for _ in range(options.repeat):
            short, long = [
                run_async(measure(running, length, options.sessions, options.turns, idle)) for length in options.lengths
            ]
            ratios.append(long / short)
    print(
        f"=> the coordinator's cost with {options.lengths[1]} messages: {sorted(ratios)[len(ratios) // 2]:.2f} times that with {options.lengths[0]}"
    )


if __name__ == "__main__":
    main()
