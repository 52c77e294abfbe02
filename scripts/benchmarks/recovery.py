"""How long work stands still: from a kill to progress, from a stop to the closed provider connection, from an engine's
restart to progress. Lease, liveness and heartbeat are the defaults unless told otherwise.

A process that is killed has a second one of its role beside it, and its turn is under way; progress is the next event that
needed the replacement. The engine has its append-only file, `everysec`, and is started again at once. The provider is
an HTTP server in this process that streams and notes when its connection is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from model_server import HEAD
from model_server import event as chunk

from support.chaos import app
from support.chaos.deployment import Deployment, deployment
from support.chaos.server import in_thread
from support.processes import Process
from support.stage import call, told
from support.waiting import wait_until_async
from turnmill.runtime import Agent
from turnmill.runtime.turn import Turn

PATIENCE_SECONDS = 60.0
STEPS = 400
stepper = Agent("stepper", "scripted:plan", tools=[app.again], max_steps=1000)


class Provider:
    """Streams a delta every 20 ms until it is left; knows when each conversation's connection was closed."""

    def __init__(self) -> None:
        self.closed_at: dict[str, float] = {}
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> Provider:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        request = json.loads(await reader.readexactly(length))
        label = request["messages"][-1]["content"]
        writing = asyncio.create_task(self._stream(writer))
        await reader.read()  # until the peer closes
        self.closed_at[label] = time.monotonic()
        writing.cancel()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk({"role": "assistant", "content": ""}))
        while True:
            writer.write(chunk({"content": "word "}))
            await asyncio.sleep(0.02)


def show(name: str, seconds: list[float], unit: str = "s") -> None:
    scale = 1000 if unit == "ms" else 1
    values = sorted(value * scale for value in seconds)
    p95 = values[min(len(values) - 1, round(0.95 * (len(values) - 1)))]
    print(
        f"{name}: median {statistics.median(values):.2f} {unit}, p95 {p95:.2f} {unit}, most {values[-1]:.2f} {unit} "
        f"({len(values)} times)",
        flush=True,
    )


@asynccontextmanager
async def running(settings: dict[str, float], **variables: Any) -> AsyncIterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as directory:
        async with deployment(Path(directory), response_timeout=10.0, **settings, **variables) as deployed:
            yield deployed


async def next_event(events: AsyncIterator[Any], wanted: Callable[[Any], bool]) -> float:
    """When the next such event came."""
    async for event in events:
        if event.type in ("turn.finished", "turn.failed"):
            raise SystemExit(f"the turn ended before its time: {event}")
        if wanted(event):
            return time.monotonic()
    raise SystemExit("the channel ended")


async def is_registered(deployed: Deployment, process: Process) -> bool:
    workers = await deployed.stage.redis.hvals(deployed.stage.keys.workers)
    return any(json.loads(worker).get("pid") == process.popen.pid for worker in workers)


async def after_kill(deployed: Deployment, role: str, repeat: int) -> None:
    """A worker dies with a call of the turn; another one of its role has nothing to do."""
    taken = []
    holder = deployed.start(role)
    await wait_until_async(lambda: is_registered(deployed, holder), PATIENCE_SECONDS)
    for number in range(repeat):
        if role == "llm":
            turn = await deployed.ask(told(answer="word " * 400, delay=5.0), f"{role}-{number}")
        else:
            turn = await deployed.ask(told([call("again", seconds=30.0)]), f"{role}-{number}")
        async with aclosing(turn.events()) as events:
            began = "text.delta" if role == "llm" else "tool_execution.started"
            await next_event(events, lambda event, began=began: event.type == began)
            await wait_until_async(lambda turn=turn: is_held(deployed, role, turn), PATIENCE_SECONDS)
            spare = deployed.start(role)
            await wait_until_async(lambda spare=spare: is_registered(deployed, spare), PATIENCE_SECONDS)
            killed_at = time.monotonic()
            holder.kill()
            if role == "llm":
                await next_event(events, lambda event: event.type == "step.reset")
                taken.append(await next_event(events, lambda event: event.type == "text.delta") - killed_at)
            else:
                again = lambda event: event.type == "tool_execution.started" and event.attempt == 2  # noqa: E731
                taken.append(await next_event(events, again) - killed_at)
        await turn.abort("measured")
        holder = spare
    holder.kill()
    show(f"kill -9 of the {role} worker with the call, to progress", taken)


async def is_held(deployed: Deployment, role: str, turn: Turn) -> bool:
    if role == "llm":
        return True
    return any(key.startswith(turn.id) for key in deployed.effects().of_call)


async def after_coordinator_kill(deployed: Deployment, holder: Process, repeat: int) -> None:
    taken = []
    for number in range(repeat):
        spare = deployed.start("coordinator")
        await wait_until_async(lambda spare=spare: shares(deployed, spare), PATIENCE_SECONDS)
        turn = await deployed.client.turn(stepper, steps(), session=f"coordinator-{number}")
        async with aclosing(turn.events()) as events:
            await next_event(events, is_step)
            owner = await deployed.stage.redis.get(deployed.stage.keys.of_turn(turn.id).lease)
            victim, other = (holder, spare) if is_of(owner, holder) else (spare, holder)
            killed_at = time.monotonic()
            victim.kill()
            # What was published before the kill comes first.
            at = await next_event(events, lambda event, at=killed_at: is_step(event) and time.monotonic() > at + 0.2)
            taken.append(at - killed_at)
        await turn.abort("measured")
        holder = other
    show("kill -9 of the coordinator that holds the partition, to progress", taken)


async def shares(deployed: Deployment, process: Process) -> bool:
    """Whether a coordinator holds its half of the partitions."""
    owners = [await deployed.stage.redis.get(keys.lease) for keys in deployed.stage.keys.partitions]
    return sum(is_of(owner, process) for owner in owners) == len(owners) // 2


def is_of(owner: bytes | None, process: Process) -> bool:
    return owner is not None and f"-{process.popen.pid}-".encode() in owner


def is_step(event: Any) -> bool:
    return bool(event.type == "step.finished")


def steps() -> str:
    return told(*[[call("again", value=str(number), seconds=0.03)] for number in range(STEPS)])


async def after_engine_restart(deployed: Deployment, repeat: int) -> None:
    from_kill, from_start = [], []
    for number in range(repeat):
        turn = await deployed.client.turn(stepper, steps(), session=f"engine-{number}")
        async with aclosing(turn.events()) as events:
            await next_event(events, is_step)
            await in_thread(deployed.server.kill)
            killed_at = time.monotonic()
            await in_thread(deployed.server.start)
            ready_at = time.monotonic()
            # What had left the engine before the kill is read first: progress is a step that ended behind the restart.
            at = await next_event(
                events, lambda event, ready_at=ready_at: is_step(event) and time.monotonic() > ready_at
            )
            from_kill.append(at - killed_at)
            from_start.append(at - ready_at)
        await turn.abort("measured")
    show("kill -9 of the engine, to progress", from_kill)
    show("  of that behind the engine's first answer", from_start)


async def abort_to_close(deployed: Deployment, provider: Provider, repeat: int) -> None:
    speaker = Agent("speaker", "openai:paced")
    from_call, from_event = [], []
    for number in range(repeat):
        turn = await deployed.client.turn(speaker, f"conversation {number}", session=f"abort-{number}")
        async with aclosing(turn.events()) as events:
            await next_event(events, lambda event: event.type == "text.delta")
            asked_at = time.monotonic()
            await turn.abort("measured")
            from_event.append(time.monotonic() - asked_at)
        label = f"conversation {number}"
        await wait_until_async(lambda label=label: label in provider.closed_at, PATIENCE_SECONDS)
        from_call.append(provider.closed_at[label] - asked_at)
    show("abort of a turn to the closed provider connection", from_call, "ms")
    show("  abort() itself returned after", from_event, "ms")


async def measure(options: argparse.Namespace) -> None:
    settings = {
        "lease_seconds": options.lease,
        "liveness_seconds": options.lease,
        "heartbeat_seconds": min(1.5, options.lease / 3),
    }
    async with running(settings) as deployed:
        holder = deployed.start("coordinator")
        first = deployed.start("llm")
        tools = deployed.start("tools")
        await deployed.everybody_is_there()
        await after_engine_restart(deployed, options.repeat)
        await after_coordinator_kill(deployed, holder, options.repeat)
        first.kill()
        await after_kill(deployed, "llm", options.repeat)
        tools.kill()
        deployed.start("llm")
        await after_kill(deployed, "tools", options.repeat)
    provider = await Provider().start()
    os.environ.update(OPENAI_BASE_URL=f"http://127.0.0.1:{provider.port}/v1", OPENAI_API_KEY="none")
    async with running(settings) as deployed:
        deployed.start("coordinator")
        deployed.start("llm")
        await abort_to_close(deployed, provider, options.aborts)
    await provider.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench recovery", description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="kills of each kind")
    parser.add_argument("--aborts", type=int, default=50)
    parser.add_argument("--lease", type=float, default=5.0, help="TURNMILL_LEASE_SECONDS and TURNMILL_LIVENESS_SECONDS")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
