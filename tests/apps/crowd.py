"""An application for tests of overload: a model that tells how many of its calls run at once and in which order they began,
and agents whose models are HTTP endpoints that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from support.crash_app import PLAY, come_to, play
from turnmill.protocol.specs import RetryPolicy
from turnmill.runtime import Agent, HostTool
from turnmill.workers import ModelRequest, model
from turnmill.workers.models import tool_call

APP = "apps.crowd"
STARTED = f"{PLAY}started"
RUNNING = f"{PLAY}running"
MOST = f"{PLAY}most"
WORK_SECONDS = 0.05
HASTY = RetryPolicy(max_attempts=3, initial_delay_seconds=0.05, max_delay_seconds=0.1)


@model("crowded")
async def crowded(request: ModelRequest) -> AsyncIterator[str]:
    """Comes to the gate `crowd`, then works a little while. `wait` asks for the host's tool first."""
    text = request.messages[-1].text
    async with play().pipeline(transaction=True) as pipeline:
        pipeline.rpush(STARTED, text)
        pipeline.incr(RUNNING)
        _, running = await pipeline.execute()
    await play().zadd(MOST, {"most": running}, gt=True)
    try:
        await come_to("crowd")
        await asyncio.sleep(WORK_SECONDS)
    finally:
        await play().decr(RUNNING)
    yield f"done {text}"


@model("asking")
async def asking(request: ModelRequest) -> AsyncIterator[object]:
    """Asks its host, and is content with any answer."""
    if request.messages[-1].role == "tool":
        yield "thanks"
    else:
        yield tool_call("ask_user", question="?")


ask_user = HostTool(
    "ask_user",
    "Asks the user.",
    {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
)

crowd = Agent("crowd", model="host:crowded")
patient = Agent("patient", model="host:asking", tools=[ask_user])
chained = Agent("chained", model="one:small", fallbacks=["two:large"], retry=HASTY)
single = Agent("single", model="one:small", retry=HASTY)
