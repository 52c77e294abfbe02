"""Processes die, freeze and leave at every point of a turn; no turn is lost, and nothing takes effect more often than told.

Points are held open by gates that a test opens, and by coordinators that stop at a named point: nothing here is timed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from support import crash_app
from support.processes import Process
from support.stage import APP, PATIENCE_SECONDS, Stage, call, open_stage, told
from support.waiting import wait_until_async
from turnmill.runtime.turn import Turn

RECOVERY_SECONDS = 40.0
"""In how much time work must go on after a loss: usually twice the lease of 1.5 s, and far more on a loaded machine."""


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


async def ask(stage: Stage, message: str, session: str = "session", agent: Any = crash_app.worker) -> Turn:
    return await stage.client.turn(agent, message, session=session)


async def assert_answer(stage: Stage, turn: Turn, answer: str = "all done") -> list[Any]:
    result = await asyncio.wait_for(turn.result(), RECOVERY_SECONDS)
    assert result.answer == answer
    return await stage.assert_sound(turn.id)


async def everybody_is_there(stage: Stage) -> None:
    """A turn has passed through every role: start timeouts of later calls do not count the processes' own start."""
    await assert_answer(stage, await ask(stage, told([call("again")]), "before"))


async def assert_session_is_usable(stage: Stage, session: str = "session") -> None:
    """The strict model accepts whatever the crash has left in the history."""
    await stage.assert_history(session)
    turn = await ask(stage, told([call("again")], answer="still here"), session)
    await assert_answer(stage, turn, "still here")
    await stage.assert_history(session)


async def gone(process: Process) -> None:
    await wait_until_async(lambda: not process.is_alive, PATIENCE_SECONDS)


# ---- AC-18, AC-27: the coordinator dies at each point of a turn

COMMITS = ("start", "call", "result", "answer")
"""What each of the four commits of a turn with one tool call brings in."""


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize("number", range(1, len(COMMITS) + 1), ids=COMMITS)
async def test_a_coordinator_dies_around_a_commit(stage: Stage, point: str, number: int) -> None:
    """AC-18, AC-27: before its commit a message is decided again, after it nothing is missing."""
    processes = stage.processes
    held = processes.coordinator(hold=f"{point}:{number}")
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    turn = await ask(stage, told([call("once")]))
    await wait_until_async(held.is_held, PATIENCE_SECONDS)
    held.kill()
    processes.coordinator()
    await assert_answer(stage, turn)
    assert await stage.effects(turn) == {"1.0|1": 1}
    await stage.assert_idle()


@pytest.mark.parametrize("point", ["before_take", "after_take"])
async def test_a_coordinator_dies_while_it_takes_a_lost_call(stage: Stage, point: str) -> None:
    """AC-22: the next owner finds the loss, or the message that tells it; the call is repeated once."""
    processes = stage.processes
    held = processes.coordinator(hold=point)
    processes.llm(APP)
    victim = processes.tools(APP, queues=["default"])
    turn = await ask(stage, told([call("again", gate="take")]))
    await stage.reached("take:1")
    victim.kill()
    await wait_until_async(held.is_held, PATIENCE_SECONDS)
    held.kill()
    await stage.open("take:1")
    await stage.open("take:2")
    processes.coordinator()
    processes.tools(APP, queues=["default"])
    await assert_answer(stage, turn)
    assert await stage.effects(turn) == {"1.0|1": 1, "1.0|2": 1}
    await stage.assert_idle()


async def test_a_coordinator_dies_with_what_it_claimed_from_a_dead_one(stage: Stage) -> None:
    """AC-22: a message that was claimed by a coordinator that died too is claimed once more."""
    processes = stage.processes
    first = processes.coordinator(hold="before_commit:1")
    turn = await ask(stage, told(answer="claimed twice"))
    await wait_until_async(first.is_held, PATIENCE_SECONDS)
    first.kill()
    second = processes.coordinator(hold="after_claim:1")
    await wait_until_async(second.is_held, PATIENCE_SECONDS)
    second.kill()
    processes.coordinator()
    processes.llm(APP)
    await assert_answer(stage, turn, "claimed twice")
    await stage.assert_idle()


# ---- AC-33/34: the LLM worker dies


async def test_an_llm_worker_dies_while_it_speaks(stage: Stage) -> None:
    """AC-33, AC-34: the reset is told, and the text is that of the accepted attempt, for every kind of reader."""
    processes = stage.processes
    processes.coordinator()
    victim = processes.llm(APP)
    turn = await ask(stage, "word", agent=crash_app.speaker)
    shown: list[str] = []

    async def watch() -> None:
        async for piece in turn.text_stream():
            shown.append(piece)

    watching = asyncio.create_task(watch())
    await stage.reached("word:1")
    await wait_until_async(lambda: "1.19" in "".join(shown), PATIENCE_SECONDS)
    victim.kill()
    killed_at = time.monotonic()
    processes.llm(APP)
    await stage.event(turn, "step.reset", attempt=2)
    print(f"an LLM worker's death was answered after {time.monotonic() - killed_at:.1f} s")
    await stage.open("word:2")
    expected = "".join(f"2.{number} " for number in range(20)) + "and the end"
    events = await assert_answer(stage, turn, expected)
    await asyncio.wait_for(watching, PATIENCE_SECONDS)
    assert [event.type for event in events].count("step.reset") == 1
    assert text_after_resets(events) == expected
    assert "".join(shown).endswith("and the end") and "".join(shown).count("and the end") == 1
    await stage.assert_idle()


def text_after_resets(events: list[Any]) -> str:
    """What a reader shows that starts a step's text anew where it is told so."""
    text = ""
    for event in events:
        if event.type == "step.reset":
            text = ""
        elif event.type == "text.delta":
            text += event.text
    return text


# ---- AC-01, AC-03: the tool worker dies in mid-call


@pytest.mark.parametrize("name", ["once", "again"])
async def test_a_tool_worker_dies_between_two_results(stage: Stage, name: str) -> None:
    """AC-01, AC-03: what may be repeated is, else the model is told that the outcome is unknown; the session goes on."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    victim = processes.tools(APP, queues=["default"])
    turn = await ask(stage, told([call("nap", seconds=0.0), call(name, gate="mid")]))
    await stage.reached("mid:1")
    await stage.event(turn, "tool_execution.finished", index=0)
    victim.kill()
    killed_at = time.monotonic()
    await stage.open("mid:2")
    processes.tools(APP, queues=["default"])
    events = await assert_answer(stage, turn)
    print(f"a tool worker's death was answered after {time.monotonic() - killed_at:.1f} s")
    results = [event.tool_result for event in events if event.type == "tool_result"]
    assert [result.tool_name for result in results] == ["nap", name]
    effects = await stage.effects(turn)
    if name == "again":
        assert effects == {"1.0|1": 1, "1.1|1": 1, "1.1|2": 1}
        assert results[1].result == "again done"
    else:
        assert effects == {"1.0|1": 1, "1.1|1": 1}
        assert results[1].is_error and "is unknown" in results[1].result
    await assert_session_is_usable(stage)
    await stage.assert_idle()


async def test_a_coordinator_dies_between_two_results(stage: Stage) -> None:
    """AC-01: the half-finished step is taken over as it stands; neither call runs again."""
    processes = stage.processes
    victim = processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    turn = await ask(stage, told([call("nap", seconds=0.0), call("once", gate="mid")]))
    await stage.reached("mid:1")
    await stage.event(turn, "tool_execution.finished", index=0)
    victim.kill()
    await stage.open("mid:1")
    processes.coordinator()
    await assert_answer(stage, turn)
    assert await stage.effects(turn) == {"1.0|1": 1, "1.1|1": 1}
    await assert_session_is_usable(stage)
    await stage.assert_idle()


async def test_everything_dies_at_once(stage: Stage) -> None:
    """AC-18: turns in each of their phases go on when the processes come back, without anybody's repair."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    speaking = await ask(stage, "all", "speaking", crash_app.speaker)
    repeatable = await ask(stage, told([call("again", gate="both")]), "repeatable")
    unknown = await ask(stage, told([call("once", gate="both")]), "unknown")
    waiting = await ask(stage, told([call("awaited")]), "waiting")
    queued = await ask(stage, told(answer="its turn has come"), "repeatable")
    await asyncio.gather(
        stage.reached("all:1"), stage.reached("both:1", 2), stage.event(waiting, "tool_execution.waiting")
    )
    processes.end_all()
    submitted = await ask(stage, told(answer="nobody was there"), "submitted")
    for gate in ("all:2", "both:2"):
        await stage.open(gate)
    processes.coordinator()
    processes.llm(APP)
    processes.tools(APP)
    await assert_answer(stage, repeatable)
    await assert_answer(stage, unknown)
    await assert_answer(stage, waiting)
    await assert_answer(stage, queued, "its turn has come")
    await assert_answer(stage, submitted, "nobody was there")
    assert (await asyncio.wait_for(speaking.result(), RECOVERY_SECONDS)).answer.startswith("2.0 2.1 ")
    await stage.assert_sound(speaking.id)
    assert await stage.effects(repeatable) == {"1.0|1": 1, "1.0|2": 1}
    assert await stage.effects(unknown) == {"1.0|1": 1}
    for session in ("repeatable", "unknown", "waiting"):
        await assert_session_is_usable(stage, session)
    await stage.assert_idle()


# ---- AC-10: frozen, taken for dead, and back


async def test_a_frozen_llm_worker_comes_back(stage: Stage) -> None:
    """AC-10: another one has answered; what the first one still says is refused, and counted."""
    processes = stage.processes
    processes.coordinator()
    frozen = processes.llm(APP)
    turn = await ask(stage, "ice", agent=crash_app.speaker)
    await stage.reached("ice:1")
    frozen.freeze()
    processes.llm(APP)
    await stage.reached("ice:2")
    await stage.open("ice:2")
    events = await assert_answer(stage, turn, "".join(f"2.{number} " for number in range(20)) + "and the end")
    assert [event.type for event in events].count("turn.finished") == 1
    await stage.open("ice:1")
    frozen.thaw()
    frozen.terminate()
    await gone(frozen)
    # Its words were refused, or its reply; or its heartbeat found first that the task is not its own any more.
    refused = [name for name in ("superseded=1", "abandoned=1") if name in frozen.log()]
    assert refused or await stage.counter("stale_model_reply") == 1, frozen.log()
    assert await stage.assert_sound(turn.id) == events, "a stale write came through"
    await stage.assert_idle()


async def test_a_frozen_tool_worker_comes_back(stage: Stage) -> None:
    """AC-10 for tools: the late result of the first attempt is counted, and is not the call's."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    frozen = processes.tools(APP, queues=["default"])
    turn = await ask(stage, told([call("again", gate="ice")], answer="one answer"))
    await stage.reached("ice:1")
    frozen.freeze()
    processes.tools(APP, queues=["default"])
    await stage.reached("ice:2")
    await stage.open("ice:1")
    frozen.thaw()
    frozen.terminate()
    await gone(frozen)
    assert await stage.event(turn, "tool_execution.started", attempt=2)
    await stage.open("ice:2")
    await assert_answer(stage, turn, "one answer")
    assert await stage.effects(turn) == {"1.0|1": 1, "1.0|2": 1}
    assert await stage.counter("stale_tool_reply") == 1 or "abandoned=" in frozen.log()
    await stage.assert_idle()


async def test_a_frozen_coordinator_comes_back(stage: Stage) -> None:
    """AC-10 for coordinators: what it had read is decided by the next owner; its own commit is refused by the version."""
    processes = stage.processes
    frozen = processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    first = await ask(stage, told([call("once", gate="ice")]))
    await stage.reached("ice:1")
    frozen.freeze()
    await stage.open("ice:1")
    processes.coordinator()
    await assert_answer(stage, first)
    second = await ask(stage, told([call("once", gate="thaw")]))
    await stage.reached("thaw:1")
    frozen.thaw()
    await stage.open("thaw:1")
    await assert_answer(stage, second)
    third = await ask(stage, told([call("once")]))
    await assert_answer(stage, third)
    for turn in (first, second, third):
        await stage.assert_sound(turn.id)
        assert await stage.effects(turn) == {"1.0|1": 1}
    await stage.assert_idle()


# ---- AC-11, AC-12: slow is not dead


@pytest.mark.parametrize(("name", "times"), [("nap", 5), ("block", 3), ("burn", 3)])
async def test_a_slow_tool_runs_once(stage: Stage, name: str, times: int) -> None:
    """AC-11, AC-12: asleep, or blocking the event loop, or busy in Python code for longer than the liveness time."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    processes.tools(APP, queues=["default"])
    turn = await ask(stage, told([call(name, seconds=1.5 * times)]))
    result = await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    assert result.answer == "all done"
    assert await stage.effects(turn) == {"1.0|1": 1}
    events = await stage.assert_sound(turn.id)
    assert [event.attempt for event in events if event.type == "tool_execution.started"] == [1]
    await stage.assert_idle()


# ---- AC-22/23: many busy entries, few dead ones


async def test_dead_entries_are_found_behind_thousands_of_busy_ones(stage: Stage) -> None:
    """AC-23: they are looked for by their owner, so the busy ones cost nothing; no command takes long."""
    busy_count, dead_count, slow_ms = 5000, 5, 50
    plain = stage.redis
    keys = stage.keys.of_session("session")
    queue = keys.tool("late")
    await plain.xgroup_create(queue, "workers", "0", mkstream=True)
    await plain.set(keys.alive("busy"), 1, px=120_000)
    pipeline = plain.pipeline(transaction=False)
    for number in range(busy_count):
        pipeline.xadd(queue, {"t": "tool_task", "d": f'{{"number":{number}}}'})
    await pipeline.execute()
    await plain.xreadgroup("workers", "busy", {queue: ">"}, count=busy_count)
    assert (await plain.xpending(queue, "workers"))["pending"] == busy_count
    stage.processes.llm(APP)
    stage.processes.coordinator()
    turns = [await ask(stage, told([call("awaited")]), f"session/{number}") for number in range(dead_count)]

    async def dispatched() -> bool:
        return await plain.xlen(queue) == busy_count + dead_count

    await wait_until_async(dispatched, PATIENCE_SECONDS)
    await plain.xreadgroup("workers", "dead", {queue: ">"}, count=100)
    since = time.monotonic()
    before = await slow_commands(plain, stage.keys.prefix, slow_ms)
    for turn in turns:
        events = await assert_answer(stage, turn)
        results = [event.tool_result for event in events if event.type == "tool_result"]
        assert "is unknown" in results[0].result
    print(f"{dead_count} dead entries among {busy_count} busy ones were found in {time.monotonic() - since:.1f} s")
    assert (await plain.xpending(queue, "workers"))["pending"] == busy_count
    assert await slow_commands(plain, stage.keys.prefix, slow_ms) == before


async def slow_commands(plain: redis.asyncio.Redis, prefix: str, slow_ms: int) -> list[bytes]:
    """Commands of this namespace that took longer. The first call starts the count."""
    await plain.config_set("slowlog-log-slower-than", slow_ms * 1000)
    return [entry["command"] for entry in await plain.slowlog_get(100) if prefix.encode() in entry["command"]]


# ---- AC-24, AC-25: hung tools, and tools that nobody runs


async def test_one_of_three_tools_hangs(stage: Stage) -> None:
    """AC-24: its siblings' results are there at once, it ends by its timeout, and its slot is free again."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"], concurrency=3)
    await everybody_is_there(stage)
    turn = await ask(stage, told([call("once"), call("hang"), call("again")]))
    await asyncio.gather(*[stage.event(turn, "tool_execution.finished", index=index) for index in (0, 2)])
    events = await assert_answer(stage, turn)
    finished = [event.name for event in events if event.type == "tool_execution.finished"]
    assert finished[-1] == "hang" and sorted(finished[:2]) == ["again", "once"]
    results = {event.index: event.tool_result for event in events if event.type == "tool_result"}
    assert results[1].result == "Error: execution failed (timeout after 1.5 s)"
    assert not results[0].is_error and not results[2].is_error
    again = await ask(stage, told([call("once"), call("again"), call("nap", seconds=0.0)]))
    await assert_answer(stage, again)
    await stage.assert_idle()


async def test_a_worker_that_hangs_as_a_whole(stage: Stage) -> None:
    """AC-24: its thread still beats, so it does not count as lost; the machine's own deadline ends the call."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"], concurrency=8)
    await everybody_is_there(stage)
    turn = await ask(stage, told([call("block", seconds=12.0), call("hang")]))
    events = await assert_answer(stage, turn)
    results = {event.index: event.tool_result for event in events if event.type == "tool_result"}
    assert "timeout after 1.5 s" in results[1].result
    await assert_session_is_usable(stage)


async def test_a_worker_for_a_tool_comes_late(stage: Stage) -> None:
    """AC-25: watchers are told that the call waits, and it runs when its worker comes."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    turn = await ask(stage, told([call("awaited")]))
    waiting = await stage.event(turn, "tool_execution.waiting")
    assert (waiting.name, waiting.queue) == ("awaited", "late")
    processes.tools(APP, queues=["late"])
    events = await assert_answer(stage, turn)
    assert [event.type for event in events].count("tool_execution.waiting") == 1
    assert await stage.effects(turn) == {"1.0|1": 1}
    await stage.assert_idle()


async def test_a_worker_for_a_tool_never_comes(stage: Stage) -> None:
    """AC-25: the call ends at its start timeout; a worker that comes after that reads and drops it."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    turn = await ask(stage, told([call("unserved")]))
    events = await assert_answer(stage, turn)
    kinds = [event.type for event in events]
    assert kinds.count("tool_execution.waiting") == 1
    result = next(event.tool_result for event in events if event.type == "tool_result")
    assert result.is_error and "no worker took the call within 3 s" in result.result
    processes.tools(APP, queues=["nobody"])
    await stage.assert_idle()
    assert await stage.effects(turn) == {}
    await stage.assert_sound(turn.id)


# ---- AC-58: leaving in order


async def test_a_tool_worker_drains(stage: Stage) -> None:
    """AC-58: it finishes what it holds and takes nothing new; everything runs once."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    leaving = processes.tools(APP, queues=["default"])
    held = await ask(stage, told([call("once", gate="leave")]), "held")
    await stage.reached("leave:1")
    leaving.terminate()
    processes.tools(APP, queues=["default"])
    later = await ask(stage, told([call("once")]), "later")
    await assert_answer(stage, later)
    assert leaving.is_alive
    await stage.open("leave:1")
    await gone(leaving)
    assert leaving.popen.returncode == 0
    await assert_answer(stage, held)
    for turn in (held, later):
        assert await stage.effects(turn) == {"1.0|1": 1}
    await stage.assert_idle()


@pytest.mark.parametrize("name", ["once", "again"])
async def test_a_tool_worker_hands_back(stage: Stage, name: str) -> None:
    """AC-58: what is not finished within the drain timeout is given up, and the tool's policy decides."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    leaving = processes.tools(APP, queues=["default"], drain_timeout=0.3)
    turn = await ask(stage, told([call(name, gate="leave")]))
    await stage.reached("leave:1")
    await stage.open("leave:2")
    leaving.terminate()
    processes.tools(APP, queues=["default"])
    await gone(leaving)
    assert leaving.popen.returncode == 0 and "handed_back=1" in leaving.log()
    await assert_answer(stage, turn)
    expected = {"1.0|1": 1, "1.0|2": 1} if name == "again" else {"1.0|1": 1}
    assert await stage.effects(turn) == expected
    await assert_session_is_usable(stage)
    await stage.assert_idle()


async def test_a_tool_that_cannot_be_stopped_does_not_keep_its_worker(stage: Stage) -> None:
    """AC-58: the call is handed back, and the process ends although a task and a thread of it do not."""
    processes = stage.processes
    processes.coordinator()
    processes.llm(APP)
    leaving = processes.tools(APP, queues=["default"], drain_timeout=0.3)
    turn = await ask(stage, told([call("deaf", gate="deaf")]))
    await stage.reached("deaf")
    leaving.terminate()
    await gone(leaving)
    assert leaving.popen.returncode == 0
    assert "handed_back=1" in leaving.log() and "could not be stopped" in leaving.log()
    processes.tools(APP, queues=["default"])
    await assert_answer(stage, turn)
    await assert_session_is_usable(stage)


async def test_an_llm_worker_drains_and_hands_back(stage: Stage) -> None:
    """AC-58: a stream that ends within the drain timeout is the answer; one that does not is attempted elsewhere."""
    processes = stage.processes
    processes.coordinator()
    leaving = processes.llm(APP, drain_timeout=60, stop_grace=90)
    finished = await ask(stage, "soon", "finished", crash_app.speaker)
    await stage.reached("soon:1")
    leaving.terminate()
    await stage.open("soon:1")
    await gone(leaving)
    assert leaving.popen.returncode == 0
    assert "step.reset" not in [event.type for event in await settled(stage, finished)]
    hasty = processes.llm(APP, drain_timeout=0.3)
    handed = await ask(stage, "never", "handed", crash_app.speaker)
    await stage.reached("never:1")
    hasty.terminate()
    await gone(hasty)
    assert "handed_back=1" in hasty.log()
    processes.llm(APP)
    await stage.open("never:2")
    assert [event.type for event in await settled(stage, handed)].count("step.reset") == 1
    await stage.assert_idle()


async def settled(stage: Stage, turn: Turn) -> list[Any]:
    await asyncio.wait_for(turn.result(), RECOVERY_SECONDS)
    return await stage.assert_sound(turn.id)


async def test_coordinators_leave_one_after_the_other(stage: Stage) -> None:
    """AC-58: with turns in flight all the time; each turn ends once, each call runs once."""
    processes = stage.processes
    current = processes.coordinator()
    await at_work(stage, current)
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    turns: list[Turn] = []
    for number in range(4):
        for session in range(5):
            turns.append(await ask(stage, told([call("once")], [call("again")]), f"s{number}-{session}"))
        successor = processes.coordinator()
        await at_work(stage, successor)
        current.terminate()
        await gone(current)
        assert current.popen.returncode == 0
        current = successor
    for turn in turns:
        await assert_answer(stage, turn)
        assert await stage.effects(turn) == {"1.0|1": 1, "2.0|1": 1}
    await stage.assert_idle()


async def at_work(stage: Stage, coordinator: Process) -> None:
    """Wait until a coordinator takes part in sharing out the partitions."""

    async def known() -> bool:
        names = await stage.redis.zrange(stage.keys.coordinators, 0, -1)
        return any(f"-{coordinator.popen.pid}-" in name.decode() for name in names)

    await wait_until_async(known, PATIENCE_SECONDS)
