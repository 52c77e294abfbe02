"""Readers that never read, while turns produce many megabytes of events: `scripts/chaos slow-readers --megabytes 100`.

Readers of two kinds: iterators that nobody advances, in the process that also reads well, and clients of a process that
is stopped, whose sockets nobody empties. What is measured: memory of the reading process and of the engine, and the time
that the turns take, with and without them. Behind it the stopped readers go on, and must see every event.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from support.processes import Process, Processes
from support.waiting import wait_until_async
from turnmill.protocol.settings import load_settings
from turnmill.runtime.client import Client, open_client
from turnmill.runtime.turn import Turn

from . import flood_app
from .deployment import SETTINGS
from .server import Server, in_thread

FLOOD = "support.chaos.flood_app"
TURN_KILOBYTES = 4096
"""A turn's text must fit its reply (TURNMILL_PAYLOAD_BYTES_MAX)."""
MEGABYTE = 1024 * 1024
PATIENCE_SECONDS = 120.0
DONE = "seen "


@dataclass
class Findings:
    """What one run took. Memory is in megabytes; `events` are those that each reader had to see."""

    seconds: float = 0.0
    process_megabytes: float = 0.0
    """How much the reading process grew at the most."""
    engine_megabytes: float = 0.0
    dropped: int = 0
    """Connections that the engine closed because nobody read from them."""
    events: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.events} events in {self.seconds:.1f} s; the reading process grew by {self.process_megabytes:.0f} MB, the "
            f"engine held {self.engine_megabytes:.0f} MB at the most and dropped {self.dropped} connections; wrong: {self.wrong}"
        )


class Flood:
    """One run in a namespace of its own: the turns are submitted, then watched, and only then a coordinator comes."""

    def __init__(self, server: Server, client: Client, processes: Processes, megabytes: float, readers: int) -> None:
        self._server = server
        self._client = client
        self._processes = processes
        self._turns = max(1, round(megabytes * 1024 / TURN_KILOBYTES))
        self._kilobytes = min(TURN_KILOBYTES, int(megabytes * 1024))
        self._readers = readers
        self._idle: list[AsyncIterator[Any]] = []
        self._stopped: Process | None = None
        self.findings = Findings()

    async def __call__(self) -> Findings:
        turns = [
            await self._client.turn(flood_app.speaker, str(self._kilobytes), session="flood")
            for _ in range(self._turns)
        ]
        beginning = [asyncio.create_task(self._begin(turn)) for turn in turns for _ in range(self._readers)]
        if self._readers:
            await self._start_stopped_readers(turns)
        self._processes.llm(FLOOD)
        watching = asyncio.create_task(self._watch_memory())
        self._processes.coordinator()
        await self._read_well(turns)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await self._go_on(turns)
        await asyncio.gather(*beginning)
        for iterator in self._idle:
            await iterator.aclose()  # type: ignore[attr-defined]
        return self.findings

    async def _begin(self, turn: Turn) -> None:
        """One step of an iterator that then stands still."""
        iterator = self._client.attach(turn.id).numbered_events()
        self._idle.append(iterator)
        await anext(iterator)

    async def _start_stopped_readers(self, turns: list[Turn]) -> None:
        names = [turn.id for turn in turns]
        command = [sys.executable, "-m", "support.chaos.slow_readers", "read", str(self._readers), *names]
        self._stopped = self._processes.start("reader", command)
        channels = [self._client.keys.of_turn(name).events(name) for name in names]

        async def subscribed() -> bool:
            assert self._stopped is not None and self._stopped.is_alive, self._stopped and self._stopped.log()
            counts = await in_thread(self._server.ask, "PUBSUB", "SHARDNUMSUB", *channels)
            return all(int(count) > self._readers for count in counts[1::2])

        await wait_until_async(subscribed, PATIENCE_SECONDS)
        self._stopped.freeze()

    async def _read_well(self, turns: list[Turn]) -> None:
        begun = 0.0
        for turn in turns:
            last = 0
            async with aclosing(self._client.attach(turn.id).numbered_events()) as events:  # type: ignore[type-var]
                async for number, event in events:
                    begun = begun or time.monotonic()
                    if number != last + 1:
                        self.findings.wrong.append(f"event {number} behind {last}")
                    last = number
                    if event.type == "turn.failed":
                        self.findings.wrong.append(str(event))
            self.findings.events += last
        self.findings.seconds = time.monotonic() - begun

    async def _watch_memory(self) -> None:
        process = psutil.Process()
        before = process.memory_info().rss
        while True:
            grown = (process.memory_info().rss - before) / MEGABYTE
            self.findings.process_megabytes = max(self.findings.process_megabytes, grown)
            used = (await in_thread(self._server.information, "memory"))["used_memory"] / MEGABYTE
            self.findings.engine_megabytes = max(self.findings.engine_megabytes, used)
            await asyncio.sleep(0.05)

    async def _go_on(self, turns: list[Turn]) -> None:
        """The stopped readers wake up: those that were dropped read on from their cursors."""
        if self._stopped is None:
            return
        statistics = await in_thread(self._server.information, "stats")
        self.findings.dropped = statistics.get("client_output_buffer_limit_disconnections", 0)
        self._stopped.thaw()
        await wait_until_async(lambda: self._stopped is None or not self._stopped.is_alive, PATIENCE_SECONDS)
        line = next((line for line in self._stopped.log().splitlines() if line.startswith(DONE)), None)
        if line is None:
            self.findings.wrong.append(f"the stopped readers ended with {self._stopped.log()[-500:]}")
            return
        told = json.loads(line.removeprefix(DONE))
        if told != {"events": self.findings.events * self._readers, "gaps": 0}:
            self.findings.wrong.append(f"the stopped readers saw {told}")


async def flood(directory: Path, megabytes: float, readers: int, **options: str) -> Findings:
    """`options` are the engine's."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(Server(directory / f"engine-{readers}", fsync="no", **options))
        await in_thread(server.start)
        await in_thread(_count_all_output, server)
        settings: dict[str, Any] = {**SETTINGS, "response_timeout": 10.0, "partitions": 1}
        namespace = f"flood-{uuid.uuid4().hex[:8]}"
        loaded = load_settings(redis_url=server.url, namespace=namespace, **settings)
        client = await stack.enter_async_context(open_client(server.url, loaded))
        processes = stack.enter_context(Processes(server.url, namespace, directory, settings))
        return await Flood(server, client, processes, megabytes, readers)()


def _count_all_output(server: Server) -> None:
    """Valkey 9 does not count published messages above 16 KB towards its limit of a client's output, because clients share
    them; so a reader that stands still would be kept for ever. Other servers do not know the setting."""
    with contextlib.suppress(redis.ResponseError):
        server.set(min_string_size_avoid_copy_reply=0)


async def read(readers: int, turn_ids: list[str]) -> None:
    """The main program of the process that is stopped: so many clients, each with a connection of its own."""
    settings = load_settings()
    seen = {"events": 0, "gaps": 0}

    async def follow(client: Client, turn_id: str) -> None:
        last = 0
        async for number, _event in client.attach(turn_id).numbered_events():
            seen["events"] += 1
            seen["gaps"] += number != last + 1
            last = number

    async with AsyncExitStack() as stack:
        url = os.environ["TURNMILL_REDIS_URL"]
        clients = [await stack.enter_async_context(open_client(url, settings)) for _ in range(readers)]
        await asyncio.gather(*[follow(client, turn_id) for client in clients for turn_id in turn_ids])
    print(DONE + json.dumps(seen), flush=True)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["read"]:
        asyncio.run(read(int(arguments[1]), arguments[2:]))
        return 0
    parser = argparse.ArgumentParser(prog="scripts/chaos slow-readers", description="Readers that never read.")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument(
        "--pubsub-limit", default="8mb 2mb 10", help="the engine's client-output-buffer-limit for pubsub"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as directory:
        limit = {"client_output_buffer_limit": f"pubsub {options.pubsub_limit}"}
        alone = asyncio.run(flood(Path(directory), options.megabytes, 0, **limit))
        print(f"nobody slow: {alone}", flush=True)
        slow = asyncio.run(flood(Path(directory), options.megabytes, options.readers, **limit))
        print(f"{options.readers} iterators that stand still and {options.readers} stopped clients: {slow}")
    return 1 if alone.wrong or slow.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
