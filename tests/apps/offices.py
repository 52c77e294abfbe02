"""An application for tests of turns that rest, ask, hand over and delegate: its agents do what the test's message says.

The model `host:played` plays the newest message that is a `Play` as JSON: a list of calls for each step, then the answer.
It is strict, records what it was asked, and fails at the requests of its session that the play names (counted from 1).
Messages for agents below are plays too, so that one message tells the whole tree what to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from support.crash_app import PLAY, come_to, play, take_effect
from turnmill.protocol.content import Usage
from turnmill.protocol.values import pack_value
from turnmill.runtime import Agent, AgentHooks, HostTool, handoff_to
from turnmill.workers import ModelRequest, ToolContext, hook, model, tool
from turnmill.workers.hooks import (
    AfterToolCallEvent,
    AfterToolCallResult,
    ApprovalEvent,
    BeforeToolCallEvent,
    BeforeToolCallResult,
    StepControl,
    StepFinishEvent,
    StepResult,
    StepStartEvent,
    StopDecision,
)
from turnmill.workers.models import tool_call
from turnmill.workers.providers.scripted import history_fault

APP = "apps.offices"
ASKED = f"{PLAY}asked:"
NOTED = f"{PLAY}noted"
USAGE = Usage(input_tokens=10, output_tokens=5, total_tokens=15)


class Play(msgspec.Struct, omit_defaults=True):
    """What the model says: the calls of each step as `[name, arguments]`, then the answer. It comes to the gate first."""

    steps: list[list[tuple[str, dict[str, Any]]]] = []
    answer: str = "done"
    fails_at: list[int] = []
    gate: str = ""


def told(*steps: list[tuple[str, dict[str, Any]]], **fields: Any) -> str:
    return msgspec.json.encode(Play(steps=list(steps), **fields)).decode()


@model("played")
async def played(request: ModelRequest) -> AsyncIterator[Any]:
    """Plays the newest play."""
    number = await _record(request)
    fault = history_fault(request.messages)
    if fault is not None:
        raise ValueError(f"a provider would refuse this history: {fault}")
    position, told_play = _newest_play(request)
    if number in told_play.fails_at:
        raise RuntimeError(f"the model is out of order ({number})")
    step = sum(message.role == "assistant" for message in request.messages[position:])
    if told_play.gate:
        await come_to(told_play.gate)
    if step < len(told_play.steps):
        for name, arguments in told_play.steps[step]:
            yield tool_call(name, **arguments)
    else:
        yield told_play.answer
    yield USAGE


async def _record(request: ModelRequest) -> int:
    """The number of this request in its session."""
    asked = {
        "system": request.system,
        "tools": [spec.name for spec in request.tools],
        "tool_choice": request.tool_choice,
        "options": request.options,
        "reasoning": msgspec.to_builtins(request.reasoning),
        "output_schema": request.output_schema,
        "messages": [[message.role, message.text] for message in request.messages],
        "results": [result.result for message in request.messages for result in message.tool_results],
    }
    return int(await play().rpush(ASKED + request.session_id, json.dumps(pack_value(asked))))


def _newest_play(request: ModelRequest) -> tuple[int, Play]:
    for position in range(len(request.messages) - 1, -1, -1):
        message = request.messages[position]
        if message.role == "user" and message.text.startswith("{"):
            return position, msgspec.json.decode(message.text, type=Play)
    return 0, Play(answer=f"echo {request.messages[-1].text}")


# --- tools


@tool(idempotent=True)
async def fetch(value: str, context: ToolContext, gate: str = "") -> str:
    """Takes effect, and waits at a gate."""
    await take_effect(context)
    if gate:
        await come_to(gate)
    return f"{value} fetched"


@tool
async def about_me(context: ToolContext) -> dict[str, Any]:
    """Tells what it knows of its turn."""
    return {"metadata": dict(context.metadata), "timeout": context.timeout_seconds, "agent": context.agent_id}


@tool
async def broken(number: int = 0) -> str:
    """Never works."""
    raise ValueError("it is broken")


@tool
async def sleepy(seconds: float, context: ToolContext) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "awake"


@tool(approval="always", approval_timeout=60)
async def pay(amount: int, context: ToolContext) -> str:
    """Takes effect once a person has agreed."""
    await take_effect(context)
    return f"paid {amount}"


@tool(approval="always", approval_timeout=1.5)
async def hasty(context: ToolContext) -> str:
    """Waits for nobody for long."""
    await take_effect(context)
    return "done in haste"


def is_large(event: ApprovalEvent) -> bool:
    if event.metadata.get("broken"):
        raise LookupError("the policy is broken")
    return event.tool_call.arguments["amount"] > event.metadata.get("limit", 100)


@hook
def any_amount(event: ApprovalEvent) -> bool:
    """For a turn's own options, whose functions are found by their names."""
    return False


@tool(approval=is_large)
async def transfer(amount: int, context: ToolContext) -> str:
    """Takes effect; a large amount once a person has agreed."""
    await take_effect(context)
    return f"transferred {amount}"


@tool(concurrency=2)
async def narrow(context: ToolContext, gate: str) -> int:
    """How many of these were running when the gate was opened."""
    running = await play().incr(f"{PLAY}narrow")
    await play().set(f"{PLAY}narrow:max", max(running, int(await play().get(f"{PLAY}narrow:max") or 0)))
    await come_to(gate)
    await play().decr(f"{PLAY}narrow")
    return int(running)


@tool(on_lost="retry")
async def repeatable(context: ToolContext, gate: str) -> str:
    """Not idempotent, but its author says that it may run again."""
    await take_effect(context)
    await come_to(f"{gate}:{context.attempt}")
    return f"attempt {context.attempt}"


@tool(idempotent=True, on_lost="fail")
async def unrepeatable(context: ToolContext, gate: str) -> str:
    """Idempotent, but its author does not want it to run again."""
    await take_effect(context)
    await come_to(f"{gate}:{context.attempt}")
    return f"attempt {context.attempt}"


@tool(idle_timeout=5, timeout=120)
async def progressing(seconds: int, context: ToolContext) -> str:
    """Tells its progress each second for a time, and then hangs where it was not a whole minute."""
    for number in range(seconds):
        await asyncio.sleep(1)
        await context.progress(f"second {number + 1}")
    if seconds < 60:
        await asyncio.Event().wait()
    return "arrived"


# --- code of agents


async def note(name: str, **what: Any) -> None:
    await play().rpush(NOTED, json.dumps([name, what]))


async def before_step(event: StepStartEvent) -> StepControl:
    await note("agent.before_step", step=event.step_number)
    return StepControl(inject_messages=[{"role": "system", "content": f"this is step {event.step_number}"}])


async def after_step(event: StepFinishEvent) -> None:
    await note("agent.after_step", step=event.step_number)


@hook
async def turn_after_step(event: StepFinishEvent) -> None:
    await note("turn.after_step", step=event.step_number, metadata=event.metadata)


@hook
async def before_call(event: BeforeToolCallEvent) -> BeforeToolCallResult | None:
    arguments = event.tool_call.arguments
    if arguments.get("value") == "blocked":
        return BeforeToolCallResult(block=True, reason="not this one")
    if arguments.get("value") == "answered":
        return BeforeToolCallResult(result={"from": "the hook"})
    return (
        BeforeToolCallResult(arguments={**arguments, "value": "other"}) if arguments.get("value") == "changed" else None
    )


@hook
async def after_call(event: AfterToolCallEvent) -> AfterToolCallResult | None:
    if event.tool_call.arguments.get("value") == "last":
        return AfterToolCallResult(terminate=True, terminate_reason="this was the last one")
    return None


@hook
async def gated(event: StepStartEvent) -> StepControl:
    await come_to(f"{event.session_id}:hook")
    return StepControl(inject_messages=[{"role": "system", "content": "once"}])


@hook
async def enough(steps: list[StepResult]) -> StopDecision:
    """Stops behind the step that fetched `enough`."""
    fetched = [call.arguments.get("value") for step in steps for call in step.tool_calls]
    return StopDecision("enough" in fetched, reason=f"{len(fetched)} calls")


@hook
async def gated_signals(text: str) -> list[str]:
    await come_to("signals")
    return [text]


@hook
async def gated_condition(steps: list[StepResult]) -> bool:
    await come_to("condition")
    return True


@hook
async def gated_policy(event: ApprovalEvent) -> bool:
    await come_to("policy")
    return False


@hook
def shouted(text: str) -> list[str]:
    return [word for word in text.split() if word.isupper()]


# --- agents

ask_user = HostTool(
    "ask_user", "Ask whoever runs this agent", {"type": "object", "properties": {"question": {"type": "string"}}}
)
MODEL = "host:played"
TOOLS = [
    ask_user, fetch, about_me, broken, sleepy, pay, hasty, transfer, narrow, repeatable, unrepeatable, progressing,
]  # fmt: skip

clerk = Agent("clerk", MODEL, system="You are the clerk.", tools=TOOLS)
guided = Agent("guided", MODEL, tools=[fetch], hooks=AgentHooks(before_step=before_step, after_step=after_step))
leaf = Agent("leaf", MODEL, tools=[fetch])
helper = Agent("helper", MODEL, system="You are the helper.", tools=[ask_user, fetch, pay, about_me, leaf])
manager = Agent(
    "manager", MODEL, system="You are the manager.", tools=[helper, helper.as_tool(name="brief", timeout=1)]
)
billing = Agent("billing", MODEL, system="You are billing.", tools=[fetch, handoff_to("desk")])
desk = Agent("desk", MODEL, system="You are the desk.", tools=[about_me, handoff_to(billing)])
