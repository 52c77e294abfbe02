"""What a tool says about itself holds in the workers that run it: how many at once, whether again, how long in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps.offices import APP, clerk, told
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.runtime import Turn


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


async def end(turn: Turn, timeout_seconds: float = PATIENCE_SECONDS) -> Any:
    return await asyncio.wait_for(turn.result(), timeout_seconds)


async def test_no_more_calls_at_once_than_a_tool_allows(office: Stage, session: str) -> None:
    """Of five calls of a narrow tool two run; a sibling of another tool does not wait for them."""
    narrow = [("narrow", {"gate": f"{session}:{number}"}) for number in range(5)]
    turn = await office.client.turn(clerk, told([*narrow, ("fetch", {"value": "x"})]), session=session)
    await office.event(turn, "tool_execution.finished", index=5)
    open_gates = set()
    for done in range(5):

        async def waiting() -> set[int]:
            keys = [f"{office.keys.prefix}-play:reached:{session}:{number}" for number in range(5)]
            reached = await office.redis.mget(keys)
            return {number for number, count in enumerate(reached) if count and number not in open_gates}

        async def two_or_the_last(left: int = min(2, 5 - done)) -> bool:
            return len(await waiting()) == left

        await wait_until_async(two_or_the_last, PATIENCE_SECONDS)
        first = min(await waiting())
        open_gates.add(first)
        await office.open(f"{session}:{first}")
    result = await end(turn)
    assert max(call.result for call in result.function_calls[:5]) == 2
    await office.assert_sound(turn.id)


@pytest.mark.parametrize("name", ["repeatable", "unrepeatable"])
async def test_on_lost_goes_before_idempotent(stage: Stage, name: str) -> None:
    """AC-03: whether a call runs again when its worker is killed."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    victim = stage.processes.tools(APP)
    turn = await stage.client.turn(clerk, told([(name, {"gate": "mid"})]), session="s")
    await stage.reached("mid:1")
    victim.kill()
    await stage.open("mid:2")
    stage.processes.tools(APP)
    [call] = (await end(turn)).function_calls
    if name == "repeatable":
        assert (call.result, await stage.effects(turn)) == ("attempt 2", {"1.0|1": 1, "1.0|2": 1})
    else:
        assert call.is_error and "is unknown" in call.result
        assert await stage.effects(turn) == {"1.0|1": 1}
    await stage.assert_sound(turn.id)
    await stage.assert_history("s")
    await stage.assert_idle()


@pytest.mark.chaos
async def test_progress_each_second_for_a_minute(office: Stage, session: str) -> None:
    """AC-28 with its own numbers: an idle timeout of 5 s, 120 s in all; in silence the call ends 5 s after its last word."""
    calls = [("progressing", {"seconds": 60}), ("progressing", {"seconds": 2})]
    turn = await office.client.turn(clerk, told(calls), session=session)
    arrived, silent = (await end(turn, 100)).function_calls
    assert arrived.result == "arrived"
    assert silent.result == "Error: execution failed (no progress for 5 s)"
    events = await office.assert_sound(turn.id)
    ends = {event.index: event.duration for event in events if event.type == "tool_execution.finished"}
    assert 60 <= ends[0] < 75
    assert 7 <= ends[1] < 12
    assert len([event for event in events if event.type == "tool_execution.progress"]) == 62
