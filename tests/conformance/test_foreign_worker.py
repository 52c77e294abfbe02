"""A worker that was written from the protocol's prose alone does its duties: it runs as a process, Turnmill watches."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support import crash_app
from support.processes import REPOSITORY, Process
from support.stage import APP, PATIENCE_SECONDS, Stage, call, open_stage, told
from support.waiting import wait_until_async
from turnmill.protocol.errors import TurnAbortedError
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.specs import ToolSpec
from turnmill.runtime import Agent
from turnmill.runtime.turn import Turn

FOREIGN = Path(__file__).parent / "foreign_worker.py"
README = REPOSITORY / "protocol/README.md"
agent = Agent("foreigner", "scripted:plan", tools=["count_letters", "refuse"])


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        opened.processes.coordinator()
        opened.processes.llm(APP)
        yield opened


async def foreign_workers(stage: Stage) -> int:
    """How many have registered."""
    registered = await stage.redis.hvals(stage.keys.workers)
    return sum(json.loads(body).get("language") == "any" for body in registered)


async def start_worker(stage: Stage) -> Process:
    before = await foreign_workers(stage)
    process = stage.processes.start("foreign", [sys.executable, str(FOREIGN)])

    async def registered() -> bool:
        return bool(await stage.redis.hexists(stage.keys.tools, "refuse") and await foreign_workers(stage) > before)

    await wait_until_async(registered, PATIENCE_SECONDS)
    return process


async def count(stage: Stage, text: str, gate: str = "") -> Turn:
    arguments = {"text": text, **({"gate": gate} if gate else {})}
    step = [{"name": "count_letters", "arguments": arguments}]
    return await stage.client.turn(agent, told(step), session="session")


async def finish(stage: Stage, turn: Turn) -> list[Any]:
    result = await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    assert result.answer == "all done"
    await stage.assert_history("session")
    return await stage.assert_sound(turn.id)


def result_of(events: list[Any]) -> Any:
    return next(event.tool_result for event in events if event.type == "tool_result")


async def taken(stage: Stage, count: int = 1) -> None:
    """Wait until a worker holds so many calls."""
    streams = [keys.tool("foreign") for keys in stage.keys.partitions]

    async def pending() -> bool:
        summaries = [await stage.redis.xpending(stream, "workers") for stream in streams]
        return sum(summary["pending"] for summary in summaries) == count

    await wait_until_async(pending, PATIENCE_SECONDS)


def test_it_imports_nothing_of_turnmill() -> None:
    tree = ast.parse(FOREIGN.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {alias.name for node in imports for alias in node.names} | {
        node.module for node in imports if isinstance(node, ast.ImportFrom)
    }
    assert not [name for name in named if name and name.startswith(("turnmill", "support"))]


def test_the_prose_shows_this_worker() -> None:
    assert FOREIGN.read_text(encoding="utf-8") in README.read_text(encoding="utf-8")


async def test_it_registers_its_tools_and_its_life(stage: Stage) -> None:
    await start_worker(stage)
    spec = json.loads(await stage.redis.hget(stage.keys.tools, "count_letters"))
    assert ToolSpec(**spec).queue == "foreign" and ToolSpec(**spec).retry_when_lost
    registered = await stage.redis.hgetall(stage.keys.workers)
    (worker_id,) = [name for name, body in registered.items() if json.loads(body).get("language") == "any"]
    for keys in stage.keys.partitions:
        assert 0 < await stage.redis.pttl(keys.alive(worker_id.decode())) <= 1500


async def test_it_answers_with_progress(stage: Stage) -> None:
    await start_worker(stage)
    turn = await count(stage, "four words of text")
    events = await finish(stage, turn)
    assert result_of(events).result == 15
    progress = [event.message for event in events if event.type == "tool_execution.progress"]
    assert progress == ["counted four", "counted words", "counted of", "counted text"]
    await stage.assert_idle()


async def test_its_failure_is_an_answer(stage: Stage) -> None:
    await start_worker(stage)
    step = [{"name": "refuse", "arguments": {"reason": "kaboom"}}, {"name": "refuse", "arguments": {}}]
    turn = await stage.client.turn(agent, told(step), session="session")
    events = await finish(stage, turn)
    results = [event.tool_result for event in events if event.type == "tool_result"]
    assert results[0].is_error and results[0].result == "Error: execution failed (kaboom)"
    assert results[1].is_error and "reason" in results[1].result
    await stage.assert_idle()


async def test_it_dies_in_mid_call(stage: Stage) -> None:
    """The tool says it is idempotent: another instance makes the second attempt."""
    victim = await start_worker(stage)
    gate = f"{stage.keys.prefix}-gate"
    turn = await count(stage, "kill me", gate)
    await stage.event(turn, "tool_execution.progress")
    await taken(stage)
    victim.kill()
    await stage.redis.set(gate, 1)
    await start_worker(stage)
    events = await finish(stage, turn)
    assert result_of(events).result == 6
    assert [event.attempt for event in events if event.type == "tool_execution.started"] == [1, 2]
    await stage.assert_idle()


async def test_it_is_frozen_past_its_liveness(stage: Stage) -> None:
    """AC-10: what the first one answers when it wakes up is late, and counted."""
    frozen = await start_worker(stage)
    gate = f"{stage.keys.prefix}-gate"
    turn = await count(stage, "freeze me", gate)
    await stage.event(turn, "tool_execution.progress")
    await taken(stage)
    frozen.freeze()
    await start_worker(stage)
    await stage.event(turn, "tool_execution.started", attempt=2)
    await stage.redis.set(gate, 1)
    events = await finish(stage, turn)
    frozen.thaw()

    async def counted() -> bool:
        return await stage.counter("stale_tool_reply") == 1

    await wait_until_async(counted, PATIENCE_SECONDS)
    assert await stage.assert_sound(turn.id) == events
    await stage.assert_idle()


async def test_it_reports_what_it_cannot_read(stage: Stage) -> None:
    """AC-26: the original bytes are among the dead letters, and the queue moves on."""
    await start_worker(stage)
    keys: PartitionKeys = stage.keys.partitions[1]
    await stage.redis.xadd(keys.tool("foreign"), {"t": "tool_task", "d": b"{\xff"})
    await stage.redis.xadd(keys.tool("foreign"), {"t": "tool_task", "d": b"{}", "v": "2"})

    async def buried() -> bool:
        return await stage.redis.xlen(keys.dead) == 2

    await wait_until_async(buried, PATIENCE_SECONDS)
    letters = await stage.dead_letters()
    assert sorted(letter[b"d"] for letter in letters) == [b"{}", b"{\xff"]
    assert {letter[b"from"] for letter in letters} == {keys.tool("foreign").encode()}
    assert all(letter[b"reason"] for letter in letters)
    turn = await count(stage, "still here")
    assert result_of(await finish(stage, turn)).result == 9
    await stage.assert_idle()


async def test_it_serves_next_to_others(stage: Stage) -> None:
    """One step's calls go to workers of two languages, and come back in call order."""
    stage.processes.tools(APP, queues=["default"])
    await start_worker(stage)
    both = Agent("both", "scripted:plan", tools=["count_letters", crash_app.once])
    step = [{"name": "count_letters", "arguments": {"text": "ab"}}, call("once")]
    turn = await stage.client.turn(both, told(step), session="session")
    events = await finish(stage, turn)
    results = [event.tool_result for event in events if event.type == "tool_result"]
    assert [result.result for result in results] == [2, "once done"]


async def test_it_stops_when_its_turn_is_stopped(stage: Stage) -> None:
    """AC-45, TH-09: the marker reaches a worker of any language; one task was never read, the other runs."""
    await start_worker(stage)
    turn = await count(stage, "one two", gate="never-opened")
    await stage.event(turn, "tool_execution.progress", message="counted two")
    assert await turn.abort("enough")
    with pytest.raises(TurnAbortedError, match="enough") as stopped:
        await turn.result()
    [counted] = stopped.value.result.function_calls
    assert counted.is_error and "stopped (enough)" in counted.result
    await stage.assert_sound(turn.id)
    await stage.assert_history("session")
    await finish(stage, await count(stage, "three"))
