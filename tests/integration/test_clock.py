"""Processes whose own clocks are wrong by hours, each in another direction: every deadline is the engine's time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps.offices import APP, clerk, told
from support.processes import ROOTS
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from turnmill.protocol.errors import TurnFailedError
from turnmill.runtime import RetryPolicy, Turn, TurnOptions

HOUR_SECONDS = 3600
SKEW = """
import os, time
real = time.time
time.time = lambda: real() + {seconds} * os.path.exists({switch!r})
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.fixture
async def skewed(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[tuple[Stage, Path]]:
    """The coordinator is two hours ahead once the file is there, the LLM worker as much behind, the tools an hour ahead."""
    switch = short_directory / "jumped"
    async with open_stage(valkey_url, namespace, short_directory) as stage:
        for role, target, hours in (("coordinator", None, 2), ("llm", APP, -2), ("tools", APP, 1)):
            site = short_directory / role
            site.mkdir()
            code = SKEW.format(seconds=hours * HOUR_SECONDS, switch=str(switch))
            (site / "sitecustomize.py").write_text(code)
            what = json.dumps({"role": role, "target": target, "names": [], "concurrency": None})
            path = ":".join([str(site), *map(str, ROOTS)])
            stage.processes.start(role, [sys.executable, "-m", "support.processes", what], {"PYTHONPATH": path})
        yield stage, switch


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


@pytest.mark.parametrize("jumps_back", [False, True], ids=["jumps", "jumps_back"])
async def test_deadlines_neither_pass_nor_vanish(skewed: tuple[Stage, Path], jumps_back: bool) -> None:
    """AC-19: work under way at the jump goes on, and whatever has a deadline behind it ends at that, neither at once nor
    never: an approval, a tool's timeout, a model call's, a retry's delay, a turn's."""
    stage, switch = skewed
    if jumps_back:
        switch.touch()
    held = await stage.client.turn(clerk, told([("fetch", {"value": "x", "gate": "held"})]), session="held")
    await stage.reached("held")
    hasty = await stage.client.turn(clerk, told([("hasty", {})]), session="hasty")
    asked = await stage.event(hasty, "approval.requested")
    if jumps_back:
        switch.unlink()
    else:
        switch.touch()
    seconds, microseconds = await stage.redis.time()
    assert asked.expires_at - (seconds + microseconds / 1e6) < 2, "the expiry is the engine's time"
    paying = await stage.client.turn(clerk, told([("pay", {"amount": 5})]), session="paying")
    quickly = RetryPolicy(max_attempts=2, initial_delay_seconds=0.2)
    slow = told([("sleepy", {"seconds": 30})])
    late = [
        await stage.client.turn(clerk, slow, session="tool", options=TurnOptions(tool_timeout=1)),
        await stage.client.turn(
            clerk, told(gate="never"), session="model", options=TurnOptions(model_timeout=0.5, retry=quickly)
        ),
        await stage.client.turn(clerk, slow, session="turn", options=TurnOptions(turn_timeout=1)),
    ]
    assert not (await stage.event(hasty, "approval.decided")).approved
    assert "approval expired" in (await end(hasty)).function_calls[0].result
    assert (await end(late[0])).function_calls[0].result == "Error: execution failed (timeout after 1 s)"
    for turn, kind in ((late[1], "timeout"), (late[2], "deadline_exceeded")):
        with pytest.raises(TurnFailedError) as failed:
            await end(turn)
        assert failed.value.error_type == kind
        result = failed.value.result
        assert 0.9 <= result.ended_at - result.started_at < PATIENCE_SECONDS
    assert await held.status() == "running"
    await stage.open("held")
    assert (await end(held)).function_calls[0].result == "x fetched"
    approvals = (await end(paying)).approvals
    assert len(approvals) == 1, "a minute has not passed"
    await paying.approve(approvals[0].id)
    assert (await end(paying)).function_calls[0].result == "paid 5"
    for turn in (held, paying):
        assert await stage.effects(turn) == {"1.0|1": 1}
        events = await stage.assert_sound(turn.id)
        assert not {"step.reset", "step.retrying"} & {event.type for event in events}
    assert await stage.counter("lost_deliveries") == 0
    await stage.assert_idle()
