"""An application for tests of turns that are spoken to while they live: host tools, approvals, hooks, another agent.

The model does what the last message says: `ask NAME` calls a tool, `both` a host tool and a worker's, anything else is
echoed. Behind results it tells them. What it was asked is recorded outside the namespace, under `{namespace}-seen`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio

from support.crash_app import come_to, take_effect
from turnmill.protocol.values import pack_value
from turnmill.runtime import Agent, HostTool
from turnmill.workers import ModelRequest, ToolContext, model, tool
from turnmill.workers.models import tool_call

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


@model("living")
async def living(request: ModelRequest) -> AsyncIterator[Any]:
    await record(request)
    last = request.messages[-1]
    if last.role == "tool":
        yield "told: " + ", ".join(str(result.result) for result in _newest_results(request))
        return
    words = last.text.split()
    match words[:1]:
        case ["ask"]:
            yield tool_call("ask_user", question=" ".join(words[1:]))
        case ["both"]:
            yield tool_call("ask_user", question="which?")
            yield tool_call("fetch", value="it", gate=words[1] if len(words) > 1 else "")
        case ["fetch"]:
            yield tool_call("fetch", value="it", gate=words[1] if len(words) > 1 else "")
        case ["pay"]:
            for amount in words[1:]:
                yield tool_call("pay", amount=int(amount))
        case ["delegate"]:
            yield tool_call("helper", message="fetch")
        case ["fail"]:
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


ask_user = HostTool(
    "ask_user", "Ask whoever runs this agent", {"type": "object", "properties": {"question": {"type": "string"}}}
)
helper = Agent("helper", "host:living", tools=[fetch])
assistant = Agent("living", "host:living", system="Be kind.", tools=[ask_user, fetch, pay, helper])
APP = "apps.living"
