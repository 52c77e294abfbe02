"""A turn's own hooks beside its agent's, run by workers: what they change, and what becomes of them when processes die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps import offices as app
from apps.offices import APP, clerk, guided, told
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.errors import TurnAbortedError, TurnFailedError
from turnmill.runtime import AgentHooks, Turn, TurnOptions
from turnmill.workers.hooks import StepStartEvent, hook


@hook(queue="nobody", start_timeout=1)
async def unserved(event: StepStartEvent) -> None:
    """Stands in a queue that no worker serves."""


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


def fetch(value: str) -> tuple[str, dict[str, Any]]:
    return "fetch", {"value": value}


def with_hooks(**hooks: Any) -> TurnOptions:
    return TurnOptions(hooks=AgentHooks(**hooks))


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


def injected(request: dict[str, Any]) -> list[str]:
    return [text for role, text in request["messages"] if role == "system"]


async def test_a_turns_hooks_are_merged_over_its_agents(office: Stage, session: str) -> None:
    """TH-10, TH-12: point by point; the agent's others stay, and the next turn has the agent's again."""
    before = len(await office.noted())
    options = TurnOptions(hooks=AgentHooks(after_step=app.turn_after_step), metadata={"user": 7})
    turn = await office.client.turn(guided, told([fetch("x")]), session=session, options=options)
    await end(turn)
    assert (await office.noted())[before:] == [
        ["agent.before_step", {"step": 1}],
        ["turn.after_step", {"step": 1, "metadata": {"user": 7}}],
        ["agent.before_step", {"step": 2}],
        ["turn.after_step", {"step": 2, "metadata": {"user": 7}}],
    ]
    assert [injected(request) for request in await office.asked(session)] == [["this is step 1"], ["this is step 2"]]
    assert all(message.role != "system" for message in await office.assert_history(session)), "injections are not kept"
    await end(await office.client.turn(guided, told(), session=session))
    assert [name for name, _ in (await office.noted())[before + 4 :]] == ["agent.before_step", "agent.after_step"]
    await office.assert_sound(turn.id)


async def test_a_hook_before_each_call_of_a_step(office: Stage, session: str) -> None:
    """TH-12: one is denied, one answered in its tool's place, one changed, one left alone; only two of them run."""
    calls = [fetch("blocked"), fetch("answered"), fetch("changed"), fetch("plain")]
    options = with_hooks(before_tool_call=app.before_call)
    turn = await office.client.turn(clerk, told(calls), session=session, options=options)
    result = await end(turn)
    results = [call.result for call in result.function_calls]
    assert results == [
        "Error: not executed (not this one)",
        {"from": "the hook"},
        "other fetched",
        "plain fetched",
    ]
    assert [call.is_error for call in result.function_calls] == [True, False, False, False]
    assert await office.effects(turn) == {"1.2|1": 1, "1.3|1": 1}
    assert (await office.asked(session))[1]["results"] == results
    assert [call.arguments["value"] for call in result.function_calls][2] == "changed", (
        "the history has the model's words"
    )
    await office.assert_sound(turn.id)
    await office.assert_history(session)


async def test_a_hook_behind_a_call_ends_the_turn(office: Stage, session: str) -> None:
    """TH-12: behind its step, when all results stand in the history."""
    options = with_hooks(after_tool_call=app.after_call)
    turn = await office.client.turn(
        clerk, told([fetch("last"), fetch("x")], answer="never"), session=session, options=options
    )
    result = await end(turn)
    assert (result.status, result.termination.kind) == ("finished", "tool_terminated")
    assert (result.termination.tool_name, result.termination.reason) == ("fetch", "this was the last one")
    assert [call.result for call in result.function_calls] == ["last fetched", "x fetched"]
    assert len(await office.asked(session)) == 1
    assert (await end(await office.client.turn(clerk, told(), session=session))).answer == "done"
    await office.assert_history(session)


async def test_a_hook_that_nobody_runs_fails_its_turn(office: Stage, session: str) -> None:
    """TH-12: at its start timeout, by name, and with what to start."""
    turn = await office.client.turn(clerk, told(), session=session, options=with_hooks(before_step=unserved))
    with pytest.raises(TurnFailedError, match=r"unserved.*nobody") as failed:
        await end(turn)
    assert failed.value.error_type == "hook_failed"
    assert await office.asked(session) == []


async def test_stopping_a_turn_whose_hook_runs(office: Stage, session: str) -> None:
    turn = await office.client.turn(clerk, told(), session=session, options=with_hooks(before_step=app.gated))
    await office.reached(f"{session}:hook")
    assert await turn.abort("enough")
    with pytest.raises(TurnAbortedError):
        await end(turn)
    await office.open(f"{session}:hook")
    assert await office.asked(session) == []
    assert (await end(await office.client.turn(clerk, told(), session=session))).answer == "done"


async def test_a_coordinator_dies_while_a_hook_runs(stage: Stage) -> None:
    """TH-12, AC-18: what the hook has decided counts once."""
    victim = stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)
    turn = await stage.client.turn(clerk, told(), session="s", options=with_hooks(before_step=app.gated))
    await stage.reached("s:hook")
    victim.kill()
    await stage.open("s:hook")
    stage.processes.coordinator()
    assert (await end(turn)).answer == "done"
    assert [injected(request) for request in await stage.asked("s")] == [["once"]]
    await stage.assert_sound(turn.id)
    await stage.assert_idle()


@pytest.mark.parametrize("gate", ["signals", "condition", "policy"])
async def test_other_code_of_an_agent_outlives_its_worker(stage: Stage, gate: str) -> None:
    """TH-12, TH-11, AE-08: an extractor, a condition and an approval policy, each with its worker killed while it runs."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    victim = stage.processes.tools(APP)
    options = TurnOptions(
        extract_signals=app.gated_signals if gate == "signals" else None,
        stop_when=[app.gated_condition] if gate == "condition" else [],
        approvals={"fetch": app.gated_policy} if gate == "policy" else {},
    )
    turn = await stage.client.turn(clerk, told([fetch("x")]), session="s", options=options)
    await stage.reached(gate)
    victim.kill()
    stage.processes.tools(APP)
    await stage.reached(gate, 2)
    await stage.open(gate)
    result = await end(turn)
    assert result.signals == (["done"] if gate == "signals" else [])
    assert result.termination.kind == ("stop_condition" if gate == "condition" else "completed")
    assert await stage.effects(turn) == {"1.0|1": 1}
    events = await stage.assert_sound(turn.id)
    assert len([event for event in events if event.type == "hook.finished"]) == 1
    await stage.assert_idle()


async def test_a_sub_turn_has_its_own_agents_hooks_and_not_the_parents(office: Stage, session: str) -> None:
    """TH-10: options are the turn's alone; metadata holds below."""
    options = TurnOptions(hooks=AgentHooks(before_step=app.gated), metadata={"user": 7})
    message = told([("helper", {"message": told([("about_me", {})], answer="below")})])
    turn = await office.client.turn(app.manager, message, session=session, options=options)
    await office.open(f"{session}:hook")
    assert (await end(turn)).function_calls[0].result == "below"
    started = await office.event(turn, "sub_turn.started")
    child = office.client.attach(started.turn_id)
    assert (await end(child)).function_calls[0].result["metadata"] == {"user": 7}
    assert all(injected(request) == ["once"] for request in await office.asked(session))
    assert all(injected(request) == [] for request in await office.asked(started.session_id))

    async def no_hook() -> bool:
        return not [event for event in await office.assert_sound(child.id) if event.type == "hook.finished"]

    await wait_until_async(no_hook)
