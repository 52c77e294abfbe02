"""The application of the crash tests: tools and models that stop where a test wants them to.

What they do is recorded outside the namespace, under `{namespace}-play:`: `effects` counts what each attempt at each call
did, `reached:<gate>` says that a gate was come to, and a gate is passed once its key `open:<gate>` exists. So a test
holds a point open for as long as it takes, and no test depends on timing.

The model `scripted:plan` does what the user's message says, as JSON: `{"steps": [[{"name", "arguments"}, ...], ...],
"answer": "...", "delay": <seconds between two events>}`. It is strict: a history that a real provider would refuse fails the turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator

import redis.asyncio

from turnmill.runtime import Agent
from turnmill.workers import ModelRequest, ToolContext, model, tool
from turnmill.workers.providers.base import ProviderRequest
from turnmill.workers.providers.scripted import Call, Reply, Script, reply_number

PLAY = f"{os.environ.get('TURNMILL_NAMESPACE', 'tm')}-play:"
POLL_SECONDS = 0.01
_client: redis.asyncio.Redis | None = None


def play() -> redis.asyncio.Redis:
    global _client
    if _client is None:
        _client = redis.asyncio.Redis.from_url(os.environ["TURNMILL_REDIS_URL"])
    return _client


async def come_to(gate: str) -> None:
    """Say that the gate was reached, and wait until it is open."""
    await play().incr(f"{PLAY}reached:{gate}")
    polling = asyncio.create_task(_opened(gate))
    try:
        await asyncio.wait({polling})
        polling.result()
    finally:
        polling.cancel()


async def _opened(gate: str) -> None:
    """In a task of its own, because redis-py loses some cancellations that hit a command under way."""
    while not await play().exists(f"{PLAY}open:{gate}"):
        await asyncio.sleep(POLL_SECONDS)


async def take_effect(context: ToolContext) -> None:
    await play().hincrby(f"{PLAY}effects", f"{context.idempotency_key}|{context.attempt}", 1)


async def work(context: ToolContext, value: str, gate: str) -> str:
    await take_effect(context)
    if gate:
        await come_to(f"{gate}:{context.attempt}")
    return f"{value} done"


@tool(on_lost="fail")
async def once(value: str, context: ToolContext, gate: str = "") -> str:
    """Takes effect; may not be repeated when its worker is lost."""
    return await work(context, value, gate)


@tool(idempotent=True)
async def again(value: str, context: ToolContext, gate: str = "", seconds: float = 0.0) -> str:
    """Takes effect, and some time; may be repeated."""
    result = await work(context, value, gate)
    await asyncio.sleep(seconds)
    return result


@tool
async def nap(value: str, seconds: float, context: ToolContext) -> str:
    """Sleeps, and leaves the event loop alone."""
    await take_effect(context)
    await asyncio.sleep(seconds)
    return f"{value} done"


@tool
async def block(value: str, seconds: float, context: ToolContext) -> str:
    """Sleeps on the event loop."""
    await take_effect(context)
    time.sleep(seconds)  # noqa: ASYNC251  # the point of this tool
    return f"{value} done"


@tool
async def burn(value: str, seconds: float, context: ToolContext) -> str:
    """Holds the CPU in Python code, on the event loop."""
    await take_effect(context)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
    return f"{value} done"


@tool(timeout=1.5, start_timeout=2)
async def hang(value: str, context: ToolContext, gate: str = "never") -> str:
    """Waits for a gate, but not longer than its timeout."""
    return await work(context, value, gate)


@tool(queue="late", start_timeout=60)
async def awaited(value: str, context: ToolContext) -> str:
    """Stands in a queue that no worker serves at first."""
    return await work(context, value, "")


@tool(queue="nobody", start_timeout=3)
async def unserved(value: str, context: ToolContext) -> str:
    """Stands in a queue that no worker ever serves."""
    return await work(context, value, "")


@tool(on_lost="fail")
async def deaf(value: str, context: ToolContext, gate: str) -> str:
    """Lets nobody stop it: neither its task nor the thread that it waits for ends before its time."""
    await play().incr(f"{PLAY}reached:{gate}")
    hung = asyncio.to_thread(time.sleep, 3600)
    waiting = asyncio.ensure_future(hung)
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(waiting)
    return f"{value} done"


def as_told(request: ProviderRequest) -> Reply:
    told = json.loads(next(message.text for message in reversed(request.messages) if message.role == "user"))
    steps = told.get("steps", [])
    number = reply_number(request.messages)
    if number >= len(steps):
        return Reply(text=told["answer"], chunks=4, delay_seconds=told.get("delay", 0.0))
    calls = [Call(**call) for call in steps[number]]
    return Reply(text="calling. ", chunks=3, tool_calls=calls, delay_seconds=told.get("delay", 0.0))


plan = Script("plan", as_told, strict=True)


@model("talker")
async def talker(request: ModelRequest) -> AsyncIterator[str]:
    """Says twenty words, comes to the gate of its attempt, and says the rest."""
    label = request.messages[-1].text
    for number in range(20):
        yield f"{request.attempt}.{number} "
        await asyncio.sleep(0)
    await come_to(f"{label}:{request.attempt}")
    for word in ("and ", "the ", "end"):
        yield word
        await asyncio.sleep(0.02)  # lets every word leave in a flush of its own


worker = Agent("worker", "scripted:plan", tools=[once, again, nap, block, burn, hang, awaited, unserved, deaf])
speaker = Agent("speaker", "host:talker")
