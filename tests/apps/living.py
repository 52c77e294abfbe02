"""An application for tests of turns that are spoken to while they live: host tools, approvals, hooks, another agent.

The model does what the last message says: `ask NAME` calls a tool, `both` a host tool and a worker's, anything else is
echoed. Behind results it tells them. What it was asked is recorded outside the namespace, under `{namespace}-seen`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio

from support.crash_app import come_to, take_effect
from turnmill.protocol.events import ReasoningDelta
from turnmill.protocol.values import pack_value
from turnmill.runtime import Agent, AgentHooks, HostTool
from turnmill.workers import ModelRequest, ToolContext, model, tool
from turnmill.workers.hooks import AfterToolCallResult, BeforeToolCallResult, StepControl, StopDecision
from turnmill.workers.models import tool_call
from turnmill.workers.providers.scripted import Call, Reply, Script

SEEN = f"{os.environ.get('TURNMILL_NAMESPACE', 'tm')}-seen"


async def record(request: ModelRequest) -> None:
    client = redis.asyncio.Redis.from_url(os.environ["TURNMILL_REDIS_URL"])
    seen = {
        "system": request.system,
        "tools": [spec.name for spec in request.tools],
        "messages": [[message.role, message.text] for message in request.messages],
    }
    await client.rpush(SEEN, json.dumps(pack_value(seen)))
    await client.aclose()


@tool(idempotent=True)
async def fetch(value: str, context: ToolContext, gate: str = "") -> str:
    """Takes effect, and waits at a gate."""
    await take_effect(context)
    if gate:
        await come_to(gate)
    return f"{value} fetched"


@tool(approval="always", approval_timeout=60)
async def pay(amount: int, context: ToolContext) -> str:
    """Takes effect once a person has agreed."""
    await take_effect(context)
    return f"paid {amount}"


@tool(idle_timeout=1.0, timeout=10)
async def chatty(words: int, context: ToolContext) -> str:
    """Says something every 0.2 s, then nothing any more."""
    for number in range(words):
        await asyncio.sleep(0.2)
        await context.progress(f"word {number}")
    if words < 10:
        await asyncio.sleep(30)
    return "all said"


@tool
async def spawn(path: str, context: ToolContext) -> str:
    """Starts a process that never ends by itself, and notes its id in a file."""
    await context.run_process("/bin/sh", "-c", f"echo $$ > {path}; exec sleep 600")
    return "ended"


async def note_hook(name: str, **what: Any) -> None:
    client = redis.asyncio.Redis.from_url(os.environ["TURNMILL_REDIS_URL"])
    await client.rpush(f"{SEEN}:hooks", json.dumps([name, what]))
    await client.aclose()


async def before_step(event: Any) -> StepControl | None:
    await note_hook("before_step", step=event.step_number, messages=len(event.messages), tools=event.tools)
    last = event.messages[-1].text
    if last.startswith("held"):
        await come_to("hook")
    if last.startswith("hook stop"):
        return StepControl(stop=True, stop_reason="the hook says so")
    if last.startswith("hook break"):
        raise ValueError("broken hook")
    return None


async def after_step(event: Any) -> None:
    await note_hook("after_step", step=event.step_number, text=event.step.text)


async def before_tool_call(event: Any) -> BeforeToolCallResult:
    await note_hook("before_tool_call", arguments=event.tool_call.arguments)
    return BeforeToolCallResult(arguments={**event.tool_call.arguments, "value": "another"})


async def after_tool_call(event: Any) -> AfterToolCallResult:
    await note_hook("after_tool_call", result=event.tool_result.result)
    return AfterToolCallResult(result=f"{event.tool_result.result}, seen by a hook")


async def on_reasoning_event(event: Any) -> None:
    await note_hook("on_reasoning_event", text=event.text)


async def enough(steps: list[Any]) -> StopDecision:
    return StopDecision(len(steps) >= 3, "enough", "three steps are enough")


def signals(text: str) -> list[str]:
    return [word for word in text.split() if word.startswith("!")]


@model("thinker")
async def thinker(request: ModelRequest) -> AsyncIterator[Any]:
    """Thinks with a signature, calls a tool, and tells what came back of its thoughts."""
    last = request.messages[-1]
    if last.role == "tool":
        parts = [part for message in request.messages for part in message.reasoning]
        yield json.dumps(pack_value([[part.text, part.provider, part.data] for part in parts]))
        return
    yield ReasoningDelta(kind="delta", text="let me think", provider="host")
    yield ReasoningDelta(kind="signature", provider="host", data={"signature": SIGNATURE})
    yield tool_call("fetch", value="it")


SIGNATURE = "c2lnbmF0dXJlLw==\u00e9\u2028"


@model("living")
async def living(request: ModelRequest) -> AsyncIterator[Any]:
    await record(request)
    last = request.messages[-1]
    if last.role == "tool":
        yield "told: " + ", ".join(str(result.result) for result in _newest_results(request))
        return
    words = last.text.split()
    match words:
        case ["ask", *_]:
            yield tool_call("ask_user", question=" ".join(words[1:]))
        case ["both", *_]:
            yield tool_call("ask_user", question="which?")
            yield tool_call("fetch", value="it", gate=words[1] if len(words) > 1 else "")
        case ["fetch", *_]:
            yield tool_call("fetch", value="it", gate=words[1] if len(words) > 1 else "")
        case ["pay", *_]:
            for amount in words[1:]:
                yield tool_call("pay", amount=int(amount))
        case ["both_hosts", *_]:
            yield tool_call("ask_user", question="one?")
            yield tool_call("ask_user", question="two?")
        case ["fetches", count, *_]:
            for number in range(int(count)):
                yield tool_call("fetch", value=str(number), gate=words[2] if len(words) > 2 else "")
        case ["chatty", count]:
            yield tool_call("chatty", words=int(count))
        case ["spawn", path]:
            yield tool_call("spawn", path=path)
        case ["nest", path]:
            yield tool_call("middle", message=f"nest2 {path}")
        case ["nest2", path]:
            yield tool_call("inner", message=f"spawn {path}")
        case ["slowly", *_]:
            for number in range(200):
                yield f"{number} "
                await asyncio.sleep(0.02)
        case ["delegate", *_]:
            yield tool_call("helper", message="fetch")
        case ["fail", *_]:
            raise RuntimeError("the model is out of order")
        case _:
            yield f"echo {last.text}"


def _newest_results(request: ModelRequest) -> list[Any]:
    results: list[Any] = []
    for message in reversed(request.messages):
        if message.role != "tool":
            break
        results = message.tool_results + results
    return results


repeating_script = Script("repeating", lambda request: Reply(tool_calls=[Call("fetch", {"value": "x"})]))
ask_user = HostTool(
    "ask_user", "Ask whoever runs this agent", {"type": "object", "properties": {"question": {"type": "string"}}}
)
helper = Agent("helper", "host:living", tools=[fetch])
assistant = Agent("living", "host:living", system="Be kind.", tools=[ask_user, fetch, pay, helper])
inner = Agent("inner", "host:living", tools=[spawn])
middle = Agent("middle", "host:living", tools=[inner])
outer = Agent("outer", "host:living", tools=[middle, chatty, fetch])
hooks = AgentHooks(
    before_step=before_step,
    after_step=after_step,
    before_tool_call=before_tool_call,
    after_tool_call=after_tool_call,
    on_reasoning_event=on_reasoning_event,
)
hooked = Agent("hooked", "host:living", tools=[fetch], hooks=hooks, extract_signals=signals)
repeating = Agent("repeating", "scripted:repeating", tools=[fetch], stop_when=[enough])
thinking = Agent("thinking", "host:thinker", tools=[fetch], hooks=AgentHooks(on_reasoning_event=on_reasoning_event))
APP = "apps.living"
