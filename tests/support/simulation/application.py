"""The application of the simulated turns: agents, tools, hooks and a model that do what the turn's message says.

A message is a play: the calls of each step, then the answer. What a tool does is noted outside the engine, with the attempt
that did it; texts and results name their attempt too, so that a mix-up shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo
from turnmill.runtime import Agent, AgentHooks, HostTool, RetryPolicy
from turnmill.workers import ToolContext, ToolRetry, tool
from turnmill.workers.app import collect
from turnmill.workers.hooks import BeforeToolCallEvent, BeforeToolCallResult
from turnmill.workers.providers.base import ProviderRequest
from turnmill.workers.providers.scripted import Call, Reply, Script

Note = Callable[[str, ToolContext], None]
TIMEOUT_SECONDS = 20.0
"""Of a call's start, and of its run: longer than a turn may take to end, so that a lost call is seen as a stuck turn."""


class Play(msgspec.Struct, omit_defaults=True):
    """What a turn does. `fails` are attempts at the first step's model call that fail; `delay` is seconds between events."""

    steps: list[list[tuple[str, dict[str, Any]]]] = []
    answer: str = "done"
    chunks: int = 3
    delay: float = 0.0
    fails: int = 0


def told(play: Play) -> str:
    return msgspec.json.encode(play).decode()


_note: Note | None = None


def note_with(note: Note | None) -> None:
    """Where tools note what they do: the world that runs."""
    global _note
    _note = note


def _noted(event: str, context: ToolContext) -> None:
    if _note is not None:
        _note(event, context)


async def _work(context: ToolContext, value: str, seconds: float) -> str:
    _noted("started", context)
    try:
        if seconds:
            await asyncio.sleep(seconds / 2)
            await context.progress("half done")
            await asyncio.sleep(seconds / 2)
    finally:
        _noted("ended", context)
    return f"{value}#{context.attempt}"


@tool(idempotent=True, timeout=TIMEOUT_SECONDS, start_timeout=TIMEOUT_SECONDS)
async def again(value: str, context: ToolContext, seconds: float = 0.0) -> str:
    """May be repeated when its worker is lost."""
    return await _work(context, value, seconds)


@tool(on_lost="fail", timeout=TIMEOUT_SECONDS, start_timeout=TIMEOUT_SECONDS)
async def once(value: str, context: ToolContext, seconds: float = 0.0) -> str:
    """May not be repeated."""
    return await _work(context, value, seconds)


@tool(retries=2, on_lost="retry", timeout=TIMEOUT_SECONDS, start_timeout=TIMEOUT_SECONDS)
async def flaky(value: str, context: ToolContext, seconds: float = 0.0) -> str:
    """Asks for another attempt at first."""
    result = await _work(context, value, seconds)
    if context.attempt == 1:
        raise ToolRetry("not this time", retry_after_seconds=0.1)
    return result


@tool(approval="always", approval_timeout=600, idempotent=True, timeout=TIMEOUT_SECONDS, start_timeout=TIMEOUT_SECONDS)
async def careful(value: str, context: ToolContext, seconds: float = 0.0) -> str:
    """Needs a person's word."""
    return await _work(context, value, seconds)


async def mark(event: BeforeToolCallEvent) -> BeforeToolCallResult:
    """Lets every call run, marked."""
    arguments = event.tool_call.arguments
    if "value" not in arguments:
        return BeforeToolCallResult(arguments=arguments)
    return BeforeToolCallResult(arguments={**arguments, "value": f"{arguments['value']}*"})


def as_told(request: ProviderRequest) -> Reply:
    """The step of the newest play; its text names the attempt."""
    position, play = _newest_play(request)
    step = sum(message.role == "assistant" for message in request.messages[position:])
    name = f"[{step}/{request.step_number}/{request.attempt}]"
    if step == 0 and request.attempt <= play.fails:
        error = ErrorInfo(kind="provider_error", message="out of order", retryable=True)
        return Reply(
            text=f"{name} broken off", chunks=play.chunks, delay_seconds=play.delay, error=error, error_after_chunks=1
        )
    if step >= len(play.steps):
        return Reply(text=f"{name} {play.answer}", chunks=play.chunks, delay_seconds=play.delay)
    calls = [Call(call, arguments) for call, arguments in play.steps[step]]
    return Reply(text=f"{name} calling", chunks=play.chunks, tool_calls=calls, delay_seconds=play.delay)


def _newest_play(request: ProviderRequest) -> tuple[int, Play]:
    for position in range(len(request.messages) - 1, -1, -1):
        message = request.messages[position]
        if message.turn_id == request.turn_id and message.role == "user" and message.text.startswith("{"):
            return position, msgspec.json.decode(message.text, type=Play)
    return 0, Play()


SCRIPT = Script("play", as_told, strict=True)
_RETRY = RetryPolicy(max_attempts=6, initial_delay_seconds=0.05)
_TOOLS = [again, once, flaky, careful, HostTool("ask", "Asks the host.")]
helper = Agent("helper", "scripted:play", tools=[again, once], retry=_RETRY, warn_repeated_calls=False)
worker = Agent(
    "worker",
    "scripted:play",
    tools=[*_TOOLS, helper.as_tool(timeout=120)],
    retry=_RETRY,
    warn_repeated_calls=False,
)
marked = Agent(
    "marked",
    "scripted:play",
    tools=_TOOLS,
    hooks=AgentHooks(before_tool_call=mark),
    retry=_RETRY,
    warn_repeated_calls=False,
)
APP = collect("simulation", [helper, worker, marked, SCRIPT, again, once, flaky, careful])
