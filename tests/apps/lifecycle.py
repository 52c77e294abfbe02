"""The application of the lifecycle tests: its tools and models do what the test's message tells them.

The model `scripted:told` plays the replies that the user's message holds as JSON, a list of `Reply`; a message that is no
JSON is answered with `You said: ...`. It is strict: a history that a real provider would refuse fails the turn.

What takes long waits for a gate, which the test opens: `reached:<gate>` and `open:<gate>` are keys beside the namespace.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import redis.asyncio

from turnmill.protocol.content import ImagePart, TextPart, Usage
from turnmill.runtime import Agent, RetryPolicy
from turnmill.workers import ModelRequest, ToolContext, ToolOutput, ToolRetry, model, tool
from turnmill.workers.models import reasoning, tool_call
from turnmill.workers.providers.base import ProviderRequest
from turnmill.workers.providers.scripted import Reply, Script, reply_number

PNG = b"\x89PNG\r\n\x1a\n\x00\xff"
POLL_SECONDS = 0.01
_client: redis.asyncio.Redis | None = None


def play() -> redis.asyncio.Redis:
    global _client
    if _client is None:
        _client = redis.asyncio.Redis.from_url(os.environ["TURNMILL_REDIS_URL"])
    return _client


def play_key(name: str) -> str:
    return f"{os.environ['TURNMILL_NAMESPACE']}-play:{name}"


async def come_to(gate: str) -> None:
    """Say that the gate was reached, and wait until it is open."""
    await play().incr(play_key(f"reached:{gate}"))
    while not await play().exists(play_key(f"open:{gate}")):
        await asyncio.sleep(POLL_SECONDS)


# --- tools


@tool
def calculator(expression: str) -> str:
    """Adds numbers.

    Args:
        expression: such as `2 + 3`
    """
    return str(sum(int(part) for part in expression.split("+")))


@tool
async def gated(gate: str, ctx: ToolContext, note: str = "") -> str:
    """Says a note, and ends when its gate is opened."""
    if note:
        await ctx.progress(note, {"gate": gate})
    await come_to(gate)
    return f"through {gate}"


@tool
async def chatty(times: int, ctx: ToolContext) -> int:
    """Tells its progress many times."""
    for number in range(times):
        await ctx.progress(f"{number}")
    return times


@tool(timeout=0.3)
async def hangs() -> str:
    """Never ends by itself."""
    await asyncio.Event().wait()
    return "late"


@tool(timeout=0.3)
def hangs_in_a_thread(seconds: float) -> str:
    """Blocks its thread for longer than its timeout."""
    import time

    time.sleep(seconds)
    return "late"


@tool
def kaboom() -> str:
    """Always fails."""
    raise ValueError("kaboom")


@tool(retries=2)
def flaky(fails: int, ctx: ToolContext) -> str:
    """Asks for another attempt a few times."""
    if ctx.attempt <= fails:
        raise ToolRetry(f"attempt {ctx.attempt} failed", retry_after_seconds=0.01)
    return f"attempt {ctx.attempt}, {ctx.idempotency_key}"


@tool
def about_me(ctx: ToolContext) -> dict[str, Any]:
    """What a tool knows of its call."""
    return {
        "turn_id": ctx.turn_id,
        "session_id": ctx.session_id,
        "agent_id": ctx.agent_id,
        "tool_call_id": ctx.tool_call_id,
        "tool_name": ctx.tool_name,
        "step_number": ctx.step_number,
        "attempt": ctx.attempt,
        "idempotency_key": ctx.idempotency_key,
        "timeout_seconds": ctx.timeout_seconds,
        "remaining_seconds": ctx.remaining_seconds,
        "deadline": ctx.deadline.timestamp(),
        "cancelled": ctx.cancelled.is_set(),
        "metadata": dict(ctx.metadata),
    }


@tool
def snapshot(caption: str) -> ToolOutput:
    """A picture with a caption."""
    return ToolOutput(content=[TextPart(caption), ImagePart(data=PNG, media_type="image/png")])


@tool
def raw(size: int) -> dict[str, Any]:
    """Bytes inside of a plain value."""
    return {"payload": bytes(range(size))}


@tool
def get_weather(city: str = "") -> str:
    """Current weather in a city."""
    return f"rain in {city}"


# --- models


def as_told(request: ProviderRequest) -> Reply:
    said = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
    if not said.startswith("["):
        return Reply(text=f"You said: {said}", chunks=2)
    replies = msgspec.json.decode(said, type=list[Reply])
    return replies[min(reply_number(request.messages), len(replies) - 1)]


told = Script("told", as_told, strict=True)


@model("narrator")
async def narrator(request: ModelRequest) -> AsyncIterator[str]:
    """Says twenty words in every attempt, comes to the gate of the attempt, and ends with the attempt's number."""
    for number in range(20):
        yield f"w{number} "
        await asyncio.sleep(0.002)  # a word for each flush, as a provider would
    await come_to(f"{request.messages[-1].text}:{request.attempt}")
    yield f"attempt {request.attempt}"


@model("house")
async def house(request: ModelRequest) -> AsyncIterator[Any]:
    """Writes down what it was asked. Fails when told to, calls a tool when told to, else repeats what was said."""
    asked = {
        "messages": [[message.role, message.text] for message in request.messages],
        "results": [result.result for message in request.messages for result in message.tool_results],
        "system": request.system,
        "tools": [[spec.name, spec.description] for spec in request.tools],
    }
    await play().rpush(play_key(f"asked:{request.session_id}"), msgspec.json.encode(asked))
    said = request.messages[-1].text
    if said == "fail":
        raise RuntimeError("the house is closed")
    if said == "call":
        yield tool_call("calculator", expression="1 + 1")
        return
    yield reasoning("let me see")
    yield f"house: {said or request.messages[-1].tool_results[0].result}"
    yield Usage(input_tokens=3, output_tokens=2, total_tokens=5)


# --- agents

TOOLS = [
    calculator, gated, chatty, hangs, hangs_in_a_thread, kaboom, flaky, about_me, snapshot, raw, get_weather,
]  # fmt: skip
QUICKLY = RetryPolicy(max_attempts=3, initial_delay_seconds=0.01, max_delay_seconds=0.05)

worker = Agent("worker", "scripted:told", tools=TOOLS, retry=QUICKLY)
prefixed = Agent("prefixed", "scripted:told", user_prompt_prefix="Politely: ")
storyteller = Agent("storyteller", "host:narrator")
housekeeper = Agent("housekeeper", "host:house", system="Be at home.", tools=[calculator])
replayed = Agent("replayed", "openai:some-model", tools=[get_weather], retry=QUICKLY, max_steps=3)
