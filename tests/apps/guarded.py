"""An application whose processes have engine users of their own: nothing in it touches Redis but through Turnmill."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.crash_app import as_told
from turnmill.runtime import Agent, AgentHooks
from turnmill.workers import ToolContext, hook, tool
from turnmill.workers.hooks import StepControl, StepStartEvent
from turnmill.workers.providers.scripted import Script

APP = "apps.guarded"
plan = Script("plan", as_told, strict=True)


@tool(queue="mail", timeout=20)
async def send(value: str, context: ToolContext, until: str = "") -> str:
    """Tells its progress; with `until` it waits for a file of that name."""
    await context.progress(f"sending {value}")
    while until and not await asyncio.to_thread(Path(until).exists):
        await asyncio.sleep(0.01)
    return f"{value} sent"


@tool(queue="honest", timeout=10)
async def keep(value: str, until: str = "") -> str:
    """Of another queue than the others; with `until` it waits for a file of that name."""
    while until and not await asyncio.to_thread(Path(until).exists):
        await asyncio.sleep(0.01)
    return f"{value} kept"


@tool(queue="mail")
async def tally(value: str, context: ToolContext) -> int:
    """Counts in the session's values, by compare and swap."""
    count: int = await context.state.update("count", lambda before: before + 1, default=0)
    return count


@tool(queue="mail")
async def bulk(value: str, size: int) -> str:
    """A large result."""
    return value * size


@hook(queue="looks")
async def look(event: StepStartEvent) -> StepControl | None:
    """Sees the conversation, so that it must be read."""
    return StepControl(stop=True, stop_reason="empty") if not event.messages else None


guarded = Agent("guarded", "scripted:plan", tools=[send, tally, bulk, keep])
watched = Agent(
    "watched", "scripted:plan", tools=[send, tally, bulk, "count_letters"], hooks=AgentHooks(before_step=look)
)
