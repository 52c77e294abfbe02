"""The application of the chaos runs: two tools that leave a mark in a file, and a strict model that does what it is told."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from support.chaos.effects import Effect, take_effect
from support.crash_app import as_told
from turnmill.runtime import Agent
from turnmill.runtime.definitions import RetryPolicy
from turnmill.workers import ToolContext, tool
from turnmill.workers.providers.scripted import Script

DEADLINE_VARIABLE = "CHAOS_DEADLINE_SECONDS"


async def _work(context: ToolContext, name: str, value: str, seconds: float) -> str:
    take_effect(Effect(context.idempotency_key, context.attempt, name, value))
    await asyncio.sleep(seconds)
    return f"{value} done"


def make_tools(deadline_seconds: float) -> list[Any]:
    """A call whose task was lost without a trace is waited for as long as the deadline says."""

    @tool(idempotent=True, timeout=deadline_seconds, start_timeout=deadline_seconds)
    async def again(value: str, context: ToolContext, seconds: float = 0.0) -> str:
        """Takes effect, and some time; may be repeated when its worker is lost."""
        return await _work(context, "again", value, seconds)

    @tool(on_lost="fail", timeout=deadline_seconds, start_timeout=deadline_seconds)
    async def once(value: str, context: ToolContext, seconds: float = 0.0) -> str:
        """Takes effect, and some time; may not be repeated."""
        return await _work(context, "once", value, seconds)

    return [again, once]


def make_agent(deadline_seconds: float, tools: list[Any]) -> Agent:
    return Agent(
        "worker",
        "scripted:plan",
        tools=tools,
        model_timeout=deadline_seconds,
        retry=RetryPolicy(max_attempts=8, initial_delay_seconds=0.1, max_delay_seconds=1.0),
    )


plan = Script("plan", as_told, strict=True)
_seconds = float(os.environ.get(DEADLINE_VARIABLE, "60"))
again, once = make_tools(_seconds)
worker = make_agent(_seconds, [again, once])
