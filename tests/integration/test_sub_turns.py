"""Agents as tools of others, and handoffs: with their own turns, limits and rests, and with coordinators that die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps.offices import APP, USAGE, desk, manager, told
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.errors import TurnAbortedError, TurnFailedError
from turnmill.runtime import SubTurnEvent, Turn, TurnOptions


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


def delegate(*steps: Any, tool: str = "helper", **fields: Any) -> tuple[str, dict[str, Any]]:
    """A call of another agent, with what that one is to do."""
    return tool, {"message": told(*steps, **fields)}


def fetch(value: str = "x", gate: str = "") -> tuple[str, dict[str, Any]]:
    return "fetch", {"value": value, "gate": gate}


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def child_of(stage: Stage, turn: Turn, index: int = 0) -> Turn:
    started = await stage.event(turn, "sub_turn.started", index=index)
    return stage.client.attach(started.turn_id)


async def at_rest(turn: Turn) -> None:
    async def suspended() -> bool:
        return await turn.status() == "suspended"

    await wait_until_async(suspended, PATIENCE_SECONDS)


async def test_a_sub_turn_is_a_turn_of_its_own(office: Stage, session: str) -> None:
    """Its own session, instructions, usage and channel; linked to its parent's by both ids. Two of them run at once."""
    options = TurnOptions(metadata={"user": 7})
    calls = [delegate([fetch("one", session), ("about_me", {})], answer="first"), delegate([fetch("two", session)])]
    turn = await office.client.turn(manager, told(calls, answer="all in"), session=session, options=options)
    await office.reached(session, 2)
    await office.open(session)
    merged = [event async for event in turn.events(sub_turns=True)]
    result = await end(turn)
    assert [call.result for call in result.function_calls] == ["first", "done"]
    assert (result.answer, result.usage, len(result.steps)) == ("all in", USAGE + USAGE, 2)
    started = [event for event in merged if event.type == "sub_turn.started" and not isinstance(event, SubTurnEvent)]
    finished = {event.turn_id: event for event in merged if event.type == "sub_turn.finished"}
    for index, (began, call) in enumerate(zip(started, result.function_calls, strict=True)):
        assert (began.index, began.tool_call_id, began.agent_id) == (index, call.id, "helper")
        assert began.session_id.startswith(f"{session}/")
        assert finished[began.turn_id].status == "finished"
        child = office.client.attach(began.turn_id)
        below = await end(child)
        assert (below.agent_id, below.usage, child.session_id) == ("helper", USAGE + USAGE, began.session_id)
        own = await office.assert_sound(began.turn_id)
        assert own[0].parent_turn_id == turn.id
        seen = [each.event for each in merged if isinstance(each, SubTurnEvent) and each.turn_id == began.turn_id]
        assert [each.type for each in seen] == [each.type for each in own]
        assert {request["system"] for request in await office.asked(began.session_id)} == {"You are the helper."}
        await office.assert_history(began.session_id)
    about = (await end(office.client.attach(started[0].turn_id))).function_calls[1].result
    assert about["metadata"] == {"user": 7}
    assert len(await office.asked(session)) == 2
    await office.assert_sound(turn.id)
    await office.assert_history(session)


async def test_a_failure_below_is_the_calls_result(office: Stage, session: str) -> None:
    """The model is told why, the sibling's answer stands, and the turn goes on."""
    calls = [delegate(fails_at=[1]), delegate([("nothing", {})], answer="fine")]
    result = await end(await office.client.turn(manager, told(calls), session=session))
    failed, fine = result.function_calls
    assert failed.is_error and "the agent's turn failed: model function 'played' failed" in failed.result
    assert "out of order" in failed.result
    assert (fine.is_error, fine.result) == (False, "fine")
    assert result.answer == "done"
    await office.assert_history(session)


@pytest.mark.parametrize(
    ("limits", "text"),
    [({"max_depth": 1}, "max_depth=1"), ({"max_depth": 0}, "max_depth=0"), ({"max_sub_turns": 0}, "max_sub_turns=0")],
    ids=str,
)
async def test_the_limits_of_a_turn_hold_below_it(
    office: Stage, session: str, limits: dict[str, int], text: str
) -> None:
    """TH-10: the call beyond a limit has an error for its result, which says which one."""
    below = delegate([delegate(tool="leaf", answer="from the leaf")], answer="from the helper")
    turn = await office.client.turn(manager, told([below]), session=session, options=TurnOptions(**limits))
    result = await end(turn)
    if limits == {"max_depth": 1}:
        child = await child_of(office, turn)
        assert result.function_calls[0].result == "from the helper"
        result = await end(child)
    [refused] = result.function_calls
    assert refused.is_error
    assert refused.result == f"Error: not executed (sub_turn_limit: {text})"


async def test_three_levels(office: Stage, session: str) -> None:
    below = delegate([delegate([fetch("deep")], tool="leaf", answer="from the leaf")], answer="from the helper")
    turn = await office.client.turn(manager, told([below]), session=session)
    assert (await end(turn)).function_calls[0].result == "from the helper"
    events = [event async for event in turn.events(sub_turns=True)]
    ends = [event for event in events if event.type == "turn.finished"]
    assert {getattr(event, "agent_id", "manager") for event in ends} == {"leaf", "helper", "manager"}
    sessions = {event.session_id for event in events if isinstance(event, SubTurnEvent)}
    assert len(sessions) == 2 and all(each.count("/") == 1 for each in sessions), "all lie below the uppermost session"


async def test_a_sub_turn_rests_and_is_resumed_under_its_own_id(stage: Stage) -> None:
    """AE-06, AC-05: for its host, with all processes killed, then for a person. The parent waits for it."""
    start_all(stage)
    question = ("ask_user", {"question": "?"})
    below = delegate([question], [("pay", {"amount": 5}), fetch()], answer="asked and paid")
    turn = await stage.client.turn(manager, told([below]), session="s")
    child = await child_of(stage, turn)
    await at_rest(child)
    stage.processes.end_all()
    start_all(stage)
    rest = await end(child)
    assert (rest.status, await turn.status()) == ("suspended", "running")
    await child.resume(tool_results={rest.pending[0].id: "yes"})
    await stage.event(child, "approval.requested")
    await at_rest(child)
    await child.approve(*[call.id for call in (await end(child)).approvals])
    assert (await end(turn)).function_calls[0].result == "asked and paid"
    assert await stage.effects(child) == {"2.0|1": 1, "2.1|1": 1}
    for each in (turn, child):
        await stage.assert_sound(each.id)
        await stage.assert_history(each.session_id or "s")
    await stage.assert_idle()


async def test_a_sub_turn_may_be_stopped_alone(office: Stage, session: str) -> None:
    turn = await office.client.turn(manager, told([delegate([fetch("x", session)])]), session=session)
    child = await child_of(office, turn)
    await office.reached(session)
    assert await child.abort("not this one")
    await office.open(session)
    result = await end(turn)
    assert result.status == "finished"
    assert result.function_calls[0].result == "Error: execution failed (the agent's turn aborted: not this one)"
    with pytest.raises(TurnAbortedError):
        await end(child)
    await office.assert_history(session)


async def test_a_sub_turn_that_takes_too_long_is_stopped(office: Stage, session: str) -> None:
    """The tool's own timeout; the parent goes on at once."""
    calls = [delegate([("ask_user", {"question": "?"})], tool="brief"), delegate(answer="in time")]
    turn = await office.client.turn(manager, told(calls), session=session)
    result = await end(turn)
    late, timely = result.function_calls
    assert late.is_error and late.result == "Error: execution failed (timeout after 1 s)"
    assert timely.result == "in time"
    with pytest.raises((TurnAbortedError, TurnFailedError)):
        await end(await child_of(office, turn))


# ---- coordinators that die

COMMITS = {"starts": 3, "answers": 4}
"""Of parent and child: 1 and 2 are the parent's start and call, 5 and 6 its step and answer."""


def start_all(stage: Stage) -> None:
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize("moment", COMMITS)
async def test_a_coordinator_dies_at_either_end_of_a_sub_turn(stage: Stage, point: str, moment: str) -> None:
    """AC-18: the sub-turn is started once, and its end is told once."""
    held = stage.processes.coordinator(hold=f"{point}:{COMMITS[moment]}")
    stage.processes.llm(APP)
    stage.processes.tools(APP)
    turn = await stage.client.turn(manager, told([delegate(answer="below")], answer="above"), session="s")
    await wait_until_async(held.is_held, PATIENCE_SECONDS)
    held.kill()
    stage.processes.coordinator()
    result = await end(turn)
    assert (result.answer, result.function_calls[0].result) == ("above", "below")
    events = await stage.assert_sound(turn.id)
    [started] = [event for event in events if event.type == "sub_turn.started"]
    [finished] = [event for event in events if event.type == "sub_turn.finished"]
    assert started.turn_id == finished.turn_id
    assert [len(await stage.asked(each)) for each in ("s", started.session_id)] == [2, 1]
    await stage.assert_sound(started.turn_id)
    await stage.assert_history("s")
    await stage.assert_idle()


async def test_a_coordinator_dies_while_a_sub_turn_runs(stage: Stage) -> None:
    """AC-18: both of them go on; no call runs again."""
    victim = stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)
    turn = await stage.client.turn(manager, told([delegate([fetch("x", "mid")])]), session="s")
    await stage.reached("mid")
    victim.kill()
    await stage.open("mid")
    stage.processes.coordinator()
    assert (await end(turn)).function_calls[0].result == "done"
    assert await stage.effects(await child_of(stage, turn)) == {"1.0|1": 1}
    await stage.assert_sound(turn.id)
    await stage.assert_idle()


# ---- handoffs

TO_BILLING = ("transfer_to_billing", {})
TO_DESK = ("transfer_to_desk", {})


async def test_two_agents_hand_a_turn_over_and_back(office: Stage, session: str) -> None:
    """By name and by object: one conversation, and with each step the instructions and tools of whoever has it."""
    play = told([TO_BILLING], [fetch("bill"), TO_DESK], [("about_me", {})], answer="settled")
    turn = await office.client.turn(desk, play, session=session, options=TurnOptions(metadata={"user": 7}))
    result = await end(turn)
    assert (result.answer, result.agent_id, len(result.steps)) == ("settled", "desk", 4)
    asked = await office.asked(session)
    assert [request["system"][8:] for request in asked] == ["the desk.", "billing.", "the desk.", "the desk."]
    assert [request["tools"][0] for request in asked] == ["about_me", "fetch", "about_me", "about_me"]
    assert [len(request["messages"]) for request in asked] == [1, 3, 6, 8]
    events = await office.assert_sound(turn.id)
    changes = [(event.from_agent_id, event.agent_id) for event in events if event.type == "agent.changed"]
    assert changes == [("desk", "billing"), ("billing", "desk")]
    calls = {call.name: call for call in result.function_calls}
    assert calls["fetch"].result == "bill fetched"
    assert calls["about_me"].result["agent"] == "desk" and calls["about_me"].result["metadata"] == {"user": 7}
    assert result.usage == USAGE + USAGE + USAGE + USAGE
    await office.assert_history(session)


async def test_a_turn_that_was_handed_over_may_end_with_the_other_agent(office: Stage, session: str) -> None:
    """The session's next turn is whatever agent it names, on the same conversation."""
    first = await end(await office.client.turn(desk, told([TO_BILLING], answer="paid"), session=session))
    assert (first.agent_id, first.answer) == ("billing", "paid")
    second = await end(await office.client.turn(desk, told(answer="hello again"), session=session))
    assert second.agent_id == "desk"
    assert (await office.asked(session))[-1]["system"] == "You are the desk."
    await office.assert_history(session)


async def test_a_coordinator_dies_while_it_hands_over(stage: Stage) -> None:
    """AC-18."""
    held = stage.processes.coordinator(hold="before_commit:3")
    stage.processes.llm(APP)
    stage.processes.tools(APP)
    turn = await stage.client.turn(desk, told([TO_BILLING], answer="paid"), session="s")
    await wait_until_async(held.is_held, PATIENCE_SECONDS)
    held.kill()
    stage.processes.coordinator()
    result = await end(turn)
    assert (result.agent_id, result.answer) == ("billing", "paid")
    events = await stage.assert_sound(turn.id)
    assert [event.type for event in events].count("agent.changed") == 1
    assert len(await stage.asked("s")) == 2
    await stage.assert_history("s")
    await stage.assert_idle()
