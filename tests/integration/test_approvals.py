"""Calls that wait for a person: decided in any order, expired, left to a function, and overridden by the turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps.offices import APP, any_amount, clerk, told
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from turnmill.protocol.errors import CommandRefusedError, TurnAbortedError, TurnFailedError
from turnmill.protocol.specs import Approval
from turnmill.runtime import Turn, TurnOptions
from turnmill.runtime.client import open_client


def pay(amount: int) -> tuple[str, dict[str, Any]]:
    return "pay", {"amount": amount}


def transfer(amount: int) -> tuple[str, dict[str, Any]]:
    return "transfer", {"amount": amount}


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def approvals_of(turn: Turn) -> list[str]:
    result = await end(turn)
    assert result.status == "suspended"
    return [call.id for call in result.approvals]


async def events_of(stage: Stage, turn: Turn, kind: str) -> list[Any]:
    return [event for _, event in await stage.told_events(turn.id) if event.type == kind]


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


async def test_four_decisions_in_reverse_of_which_one_never_comes(stage: Stage) -> None:
    """AC-04: yes, no, expired, yes; by two clients, and with another coordinator than the one that asked."""
    victim = stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)
    turn = await stage.client.turn(clerk, told([pay(1), ("hasty", {}), pay(3), pay(4)]), session="s")
    first, second, third, fourth = await approvals_of(turn)
    assert len(await stage.client.transcript("s")) == 2, "no result stands in the history before all are there"
    assert await turn.approve(fourth) == (first, second, third)
    await stage.event(turn, "tool_execution.finished", index=3)
    async with open_client(stage.client.engine.url, stage.client.settings) as other:
        same = other.attach(turn.id)
        assert set(await same.deny(third, reason="too much")) <= {first, second}
        victim.kill()
        stage.processes.coordinator()
        expired = await stage.event(turn, "approval.decided", index=1)
        assert not expired.approved
        with pytest.raises(CommandRefusedError) as refused:
            await same.approve("nobody")
        assert (refused.value.kind, refused.value.pending) == ("no_pending_approval", (first,))
        assert len(await stage.client.transcript("s")) == 2
        with pytest.raises(CommandRefusedError, match=f"{second} has expired already") as refused:
            await same.approve(second, first)
        assert (refused.value.kind, refused.value.pending) == ("already_decided", (first,))
        assert await same.approve(first) == ()
        result = await end(same)
    texts = [call.result for call in result.function_calls]
    assert [texts[0], texts[3]] == ["paid 1", "paid 4"]
    assert texts[1] == "Error: not executed (the approval expired)"
    assert texts[2] == "Error: not executed (a person denied the call: too much)"
    assert [call.is_error for call in result.function_calls] == [False, True, True, False]
    assert await stage.effects(turn) == {"1.0|1": 1, "1.3|1": 1}
    history = await stage.assert_history("s")
    assert [message.role for message in history] == ["user", "assistant", *["tool"] * 4, "assistant"]
    assert len(await stage.asked("s")) == 2
    await stage.assert_sound(turn.id)
    await stage.assert_idle()


async def test_an_approval_expires_while_nobody_coordinates(stage: Stage) -> None:
    """AC-04, AC-18: the next coordinator finds that the time is over."""
    victim = stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)
    turn = await stage.client.turn(clerk, told([("hasty", {})]), session="s")
    [call_id] = await approvals_of(turn)
    [asked] = await events_of(stage, turn, "approval.requested")
    victim.kill()

    async def left() -> float:
        seconds, microseconds = await stage.redis.time()
        return float(asked.expires_at - seconds - microseconds / 1e6)

    while (seconds := await left()) > 0:
        await asyncio.sleep(seconds)
    stage.processes.coordinator()
    assert not (await stage.event(turn, "approval.decided")).approved
    result = await end(turn)
    assert result.function_calls[0].result == "Error: not executed (the approval expired)"
    with pytest.raises(CommandRefusedError, match=r"waits for no approval|has ended"):
        await turn.approve(call_id)
    assert await stage.effects(turn) == {}
    await stage.assert_sound(turn.id)


async def test_approving_one_of_three_leaves_the_others(office: Stage, session: str) -> None:
    """AC-48: they keep their ids, are not asked for again, and the model is not asked either."""
    turn = await office.client.turn(clerk, told([pay(1), pay(2), pay(3)]), session=session)
    ids = await approvals_of(turn)
    assert await turn.approve(ids[1]) == (ids[0], ids[2])
    await office.event(turn, "tool_execution.finished", index=1)
    assert await approvals_of(turn) == [ids[0], ids[2]]
    assert [event.tool_call.id for event in await events_of(office, turn, "approval.requested")] == ids
    assert await office.effects(turn) == {"1.1|1": 1}
    assert len(await office.asked(session)) == 1
    with pytest.raises(TurnFailedError) as refused:
        await end(await office.client.turn(clerk, told(), session=session))
    assert (refused.value.error_type, refused.value.pending) == ("approval_required", (ids[0], ids[2]))
    with pytest.raises(CommandRefusedError, match=f"{ids[1]} has been approved already"):
        await turn.deny(ids[1])
    assert await turn.approve(*ids) == ()
    assert [call.result for call in (await end(turn)).function_calls] == ["paid 1", "paid 2", "paid 3"]
    assert await office.effects(turn) == {"1.0|1": 1, "1.1|1": 1, "1.2|1": 1}
    assert len(await events_of(office, turn, "approval.requested")) == 3
    await office.assert_sound(turn.id)


async def test_a_function_says_which_calls_wait(office: Stage, session: str) -> None:
    """It is asked about every call, in a worker, and sees arguments and metadata; calls below its limit run meanwhile."""
    options = TurnOptions(metadata={"limit": 200})
    turn = await office.client.turn(
        clerk, told([transfer(150), transfer(500), transfer(10)]), session=session, options=options
    )
    await office.event(turn, "tool_execution.finished", index=0)
    await office.event(turn, "tool_execution.finished", index=2)
    [call_id] = await approvals_of(turn)
    assert await office.effects(turn) == {"1.0|1": 1, "1.2|1": 1}
    assert [event.point for event in await events_of(office, turn, "hook.finished")] == ["approval"] * 3
    assert await turn.approve(call_id) == ()
    results = [call.result for call in (await end(turn)).function_calls]
    assert results == ["transferred 150", "transferred 500", "transferred 10"]
    await office.assert_sound(turn.id)


async def test_a_function_that_fails_fails_its_turn_by_name(office: Stage, session: str) -> None:
    options = TurnOptions(metadata={"broken": True})
    turn = await office.client.turn(clerk, told([transfer(1), pay(1)]), session=session, options=options)
    with pytest.raises(TurnFailedError, match=r"transfer\.approval.*the policy is broken") as failed:
        await end(turn)
    assert failed.value.error_type == "hook_failed"
    assert await office.effects(turn) == {}
    assert (await end(await office.client.turn(clerk, told(), session=session))).answer == "done"
    await office.assert_history(session)


@pytest.mark.parametrize(
    ("approvals", "waiting"),
    [
        ({"pay": "never"}, ["transfer"]),
        ({"transfer": False, "fetch": True}, ["pay", "fetch"]),
        ({"transfer": "never", "pay": any_amount}, []),
        ({"transfer": "never", "pay": "never", "ask_user": "always"}, ["ask_user"]),
        ({"pay": Approval(mode="always", timeout_seconds=5), "transfer": "never"}, ["pay"]),
    ],
    ids=["never", "bools", "function", "host", "struct"],
)
async def test_a_turns_own_word_stands_above_the_tools(
    office: Stage, session: str, approvals: dict[str, Any], waiting: list[str]
) -> None:
    """TH-10: also for a tool of the host, whose call is approved first and answered then."""
    calls = [pay(5), transfer(500), ("fetch", {"value": "x"}), ("ask_user", {"question": "?"})]
    turn = await office.client.turn(clerk, told(calls), session=session, options=TurnOptions(approvals=approvals))
    result = await end(turn)
    assert [call.name for call in result.approvals] == waiting
    if waiting:
        await turn.approve(*[call.id for call in result.approvals])
    while (result := await end(turn)).status == "suspended":
        await turn.resume(tool_results={call.id: "me" for call in result.pending})
    assert [call.result for call in result.function_calls] == ["paid 5", "transferred 500", "x fetched", "me"]
    await office.assert_sound(turn.id)


async def test_stopping_a_turn_that_waits_for_a_person_runs_nothing(office: Stage, session: str) -> None:
    """AC-13: a decision behind the stop is refused, and no call runs for it."""
    turn = await office.client.turn(clerk, told([pay(1), pay(2)]), session=session)
    ids = await approvals_of(turn)
    outcomes = await asyncio.gather(
        turn.abort("no"), turn.approve(ids[0]), turn.approve(ids[1]), return_exceptions=True
    )
    assert outcomes[0] is True
    with pytest.raises(TurnAbortedError) as stopped:
        await end(turn)
    approved = {event.tool_call_id for event in await events_of(office, turn, "approval.decided")}
    refused = [error for error in outcomes[1:] if isinstance(error, CommandRefusedError)]
    assert len(approved) + len(refused) == 2
    assert len(await office.effects(turn)) <= len(approved)
    assert all(call.is_error for call in stopped.value.result.function_calls if call.id not in approved)
    await office.assert_history(session)
