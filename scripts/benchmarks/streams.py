"""Live streams: what the runtime adds to a provider's first token, and how many streams one LLM worker carries.

The same server is read directly, by httpx on the transport that the LLM worker uses, and through the runtime. Times are
differences on the system's monotonic clock: the server writes the time into its first delta.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import httpx
import psutil
from fleet import Fleet, fleet
from httpx_aiohttp import AiohttpTransport

from turnmill.protocol.events import TextDelta
from turnmill.runtime import Agent, connect
from turnmill.runtime.roles import run_async

PACE_PER_SECOND = 20


def direct_client() -> httpx.AsyncClient:
    """Without aiohttp's default limit of 100 connections."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return httpx.AsyncClient(transport=AiohttpTransport(client=session), timeout=None)


async def direct(client: httpx.AsyncClient, url: str, model: str) -> tuple[float, float]:
    """(age of the first delta at arrival, seconds of the whole stream)."""
    began = time.perf_counter()
    age = None
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "go"}]}
    async with client.stream("POST", url + "/chat/completions", json=body) as response:
        buffer = b""
        async for chunk in response.aiter_bytes():
            buffer += chunk
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    content = json.loads(event[6:])["choices"][0]["delta"].get("content")
                    if content and age is None:
                        age = time.monotonic() - float(content)
    return age or 0.0, time.perf_counter() - began


async def through(client, model: str, number: int) -> tuple[float, float]:
    """The same through the runtime, as the submitting client sees it."""
    agent = Agent("paced", model=f"openai:{model}", model_timeout=600)
    began = time.perf_counter()
    age = None
    length = 0
    turn = await client.turn(agent, "go", session=f"p{number}")
    async for event in turn.events():
        if isinstance(event, TextDelta):
            if age is None:
                age = time.monotonic() - float(event.text.split()[0])
            length += event.text.count(" ")
    wanted = int(model.split("-")[1])
    if length != wanted:
        raise SystemExit(f"turn {number} got {length} deltas' text of {wanted}")
    return age or 0.0, time.perf_counter() - began


def show(name: str, results: list[tuple[float, float]]) -> tuple[float, float]:
    ages = statistics.median(age for age, _ in results)
    total = max(seconds for _, seconds in results)
    print(f"   {name}: first delta {ages * 1e3:.2f} ms old (median), slowest stream {total:.2f} s", flush=True)
    return ages, total


async def latency(url: str, running: Fleet, rounds: int) -> None:
    print(f"added latency, one stream at a time, {rounds} rounds:")
    async with direct_client() as http:
        await direct(http, url, "paced-5-50")
        alone = [await direct(http, url, "paced-5-50") for _ in range(rounds)]
    async with connect(running.url, partitions=running.partitions) as client:
        await through(client, "paced-5-50", 0)
        ours = [await through(client, "paced-5-50", number) for number in range(rounds)]
    difference = show("runtime", ours)[0] - show("direct", alone)[0]
    print(f"=> added to the first token: {difference * 1e3:.2f} ms (median)")


async def many(url: str, running: Fleet, count: int, deltas: int) -> None:
    model = f"paced-{deltas}-{PACE_PER_SECOND}"
    print(f"{count} streams of {deltas} deltas at {PACE_PER_SECOND}/s ({deltas / PACE_PER_SECOND:.1f} s of stream):")
    async with direct_client() as http:
        alone = show("direct", await asyncio.gather(*[direct(http, url, model) for _ in range(count)]))
    worker = psutil.Process(running.processes["llm"].pid)
    before = worker.memory_info().rss
    cpu = running.cpu_seconds()
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, worker.memory_info().rss)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    async with connect(running.url, partitions=running.partitions) as client:
        results = await asyncio.gather(*[through(client, model, number) for number in range(count)])
    watching.cancel()
    ours = show("runtime", results)
    spent = {name: after - cpu[name] for name, after in running.cpu_seconds().items()}
    print(
        f"=> {count} streams: {ours[1] / alone[1]:.2f} times the direct client's time, "
        f"{(peak - before) / count / 1e3:.0f} KB of the LLM worker per stream, LLM worker's CPU per delta "
        f"{spent['llm'] / count / deltas * 1e6:.0f} us, all {sum(spent.values()) / count / deltas * 1e6:.0f} us",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--streams", type=int, nargs="*", default=[300, 500])
    parser.add_argument("--deltas", type=int, default=80)
    options = parser.parse_args()
    server_file = Path(__file__).with_name("model_server.py")
    server = subprocess.Popen([sys.executable, str(server_file)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
    try:
        with fleet(1, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}) as running:
            run_async(latency(url, running, options.rounds))
            for count in options.streams:
                run_async(many(url, running, count, options.deltas))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
