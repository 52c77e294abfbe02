"""What operators do with a live fleet, by the command line: look at queues and processes, pause, resume, drain, watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.commands import CommandLine, json_lines
from support.crash_app import worker
from support.processes import Process
from support.stage import APP, PATIENCE_SECONDS, SHORT, Stage, call, open_stage, told
from support.waiting import wait_until_async
from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import WORKER_GROUP
from turnmill.runtime.activity import ActivityMonitor
from turnmill.runtime.directives import pause_queue, resume_queue
from turnmill.runtime.fleet import WorkerEntry, list_processes
from turnmill.runtime.queues import read_queues
from turnmill.runtime.turn import Turn

SESSION = "session"


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


@pytest.fixture
def turnmill(valkey_url: str, namespace: str, short_directory: Path) -> CommandLine:
    settings = {name: str(value) for name, value in SHORT.items()}
    return CommandLine(short_directory, redis_url=valkey_url, namespace=namespace, **settings)


async def run(turnmill: CommandLine, *arguments: str, code: int = 0) -> str:
    """What a command prints, while the test's own loop goes on."""
    done = await asyncio.to_thread(turnmill, *arguments)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


async def listed(turnmill: CommandLine, *arguments: str) -> dict[str, dict[str, Any]]:
    """The objects of a listing, by their first field."""
    return {next(iter(line.values())): line for line in json_lines(await run(turnmill, *arguments, "--json"))}


async def registered(stage: Stage, process: Process, **fields: Any) -> WorkerEntry:
    """The entry of a process in the registry, when it has these fields."""

    async def found() -> WorkerEntry | None:
        entries = await list_processes(stage.client.engine, stage.keys, stage.client.settings)
        mine = (entry for entry in entries if entry.pid == process.popen.pid)
        return next((e for e in mine if all(getattr(e, name) == value for name, value in fields.items())), None)

    entry = await wait_until_async(found, PATIENCE_SECONDS)
    assert entry is not None
    return entry


async def in_stream(stage: Stage, queue: str) -> int:
    return sum([await stage.redis.xlen(keys.base + queue) for keys in stage.keys.partitions])


async def answer_of(turn: Turn) -> str:
    return (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer


# ---- queues


async def test_a_paused_queue_is_not_read_until_it_is_resumed(stage: Stage, turnmill: CommandLine) -> None:
    """What runs goes on, what comes waits, and nothing is lost; other queues of the same worker are read."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default", "late"])
    running = await stage.client.turn(worker, told([call("once", gate="g")]))
    await stage.reached("g:1")
    assert "tool:late is paused" in await run(turnmill, "queue", "pause", "tool:late", "--reason", "too hot")
    await asyncio.sleep(1.0)  # the time that a worker may take to hear of it
    waiting = await stage.client.turn(worker, told([call("awaited")]), session=SESSION)
    event = await stage.event(waiting, "tool_execution.waiting")
    assert (event.queue, event.paused) == ("late", "too hot")
    reports = await listed(turnmill, "queue", "ls")
    late, default = reports["tool:late"], reports["tool:default"]
    assert (late["waiting"], late["in_work"], late["paused"], late["paused_reason"]) == (1, 0, True, "too hot")
    assert late["oldest_waiting_seconds"] >= 2 and late["workers"] == 1
    assert (default["waiting"], default["in_work"], default["paused"]) == (0, 1, False)
    await stage.open("g:1")
    assert await answer_of(running) == "all done"
    other = await stage.client.turn(worker, told([call("once")]))
    assert await answer_of(other) == "all done"
    assert await in_stream(stage, "tool:late") == 1
    assert "paused" in await run(turnmill, "queue", "ls")
    assert "open again" in await run(turnmill, "queue", "resume", "tool:late")
    assert await answer_of(waiting) == "all done"
    assert await stage.effects(waiting) == {"1.0|1": 1}
    await stage.assert_idle()


async def test_a_pause_outlasts_the_workers(stage: Stage, turnmill: CommandLine) -> None:
    """It stands in the engine: a worker that is started later does not read the queue either."""
    await run(turnmill, "queue", "pause", "tool:late")
    await run(turnmill, "queue", "pause", "model:default")
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["late"])
    turn = await stage.client.turn(worker, told([call("awaited")]))

    async def served() -> bool:
        reports = await read_queues(stage.client.engine, stage.keys, stage.client.settings)
        return all(report.workers for report in reports if report.paused) and any(report.waiting for report in reports)

    await wait_until_async(served, PATIENCE_SECONDS)
    assert await in_stream(stage, "model:default") == 1
    findings = json_lines(await run(turnmill, "doctor", "--json"))
    assert any("model:default is paused" in each["text"] for each in findings if each["level"] == "warn")
    await run(turnmill, "queue", "resume", "model:default")
    await stage.event(turn, "tool_execution.waiting")
    assert await in_stream(stage, "tool:late") == 1
    await run(turnmill, "queue", "resume", "tool:late")
    assert await answer_of(turn) == "all done"


async def test_a_call_that_a_pause_outlasts_ends_and_says_why(stage: Stage) -> None:
    """A pause does not stop the clock of calls: the model is told at the start timeout, as with any queue."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    await pause_queue(stage.client.engine, stage.keys, "tool:nobody", "being moved")
    turn = await stage.client.turn(worker, told([call("unserved")]))
    assert await answer_of(turn) == "all done"
    results = [
        message.tool_results[0]
        for message in await stage.client.transcript(turn.session_id or "")
        if message.tool_results
    ]
    assert "the tool's queue is paused (being moved)" in str(results[0].result)


async def test_pauses_that_make_no_sense_are_refused(turnmill: CommandLine) -> None:
    for name in ("late", "tool:", "tool:a b", "inbox"):
        done = await asyncio.to_thread(turnmill, "queue", "pause", name)
        assert (done.returncode, "is no task queue" in done.stderr) == (2, True)
    done = await asyncio.to_thread(turnmill, "queue", "pause", "tool:unheard")
    assert (done.returncode, "known to nobody" in done.stderr) == (0, True)
    assert "was not paused" in await run(turnmill, "queue", "resume", "tool:other")


# ---- workers and coordinators


async def test_processes_are_listed_with_what_they_hold(stage: Stage, turnmill: CommandLine) -> None:
    coordinator = stage.processes.coordinator()
    stage.processes.llm(APP, pools=["default", "big"])
    tools = stage.processes.tools(APP, queues=["default"], concurrency=3)
    await stage.client.turn(worker, told([call("once", gate="g")]))
    await stage.reached("g:1")
    held = (await registered(stage, tools, used=1)).id
    await registered(stage, coordinator, partitions=[0, 1, 2, 3])
    entries = await listed(turnmill, "worker", "ls")
    by_pid = {entry["pid"]: entry for entry in entries.values()}
    assert by_pid[coordinator.popen.pid]["partitions"] == [0, 1, 2, 3]
    assert [entry["role"] for entry in entries.values()] == ["coordinator", "llm", "tools"]
    assert by_pid[tools.popen.pid]["slots"] == 3
    assert [entry["state"] for entry in entries.values()] == ["running"] * 3
    assert entries[held]["seen_seconds_ago"] < 5
    tools.kill()
    await registered(stage, tools, state="lost")
    assert held in await run(turnmill, "worker", "ls")


async def test_a_worker_that_is_drained_finishes_and_leaves(stage: Stage, turnmill: CommandLine) -> None:
    """AC-58: as SIGTERM, from anywhere: it reads nothing more, completes what it holds, and ends with 0."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    leaving = stage.processes.tools(APP, queues=["default"])
    turn = await stage.client.turn(worker, told([call("once", gate="g")]))
    await stage.reached("g:1")
    leaving_id = (await registered(stage, leaving)).id
    waiting = asyncio.create_task(run(turnmill, "worker", "drain", leaving_id[:-3], "--wait"))
    await registered(stage, leaving, state="draining")
    next_turn = await stage.client.turn(worker, told([call("once")]))
    await stage.open("g:1")
    assert await answer_of(turn) == "all done"
    assert await waiting == f"{leaving_id} gone\n"
    assert await asyncio.to_thread(leaving.popen.wait, PATIENCE_SECONDS) == 0
    assert not await stage.redis.hkeys(stage.keys.directives)
    stage.processes.tools(APP, queues=["default"])
    assert await answer_of(next_turn) == "all done"
    assert await stage.effects(turn) == {"1.0|1": 1}
    assert await stage.effects(next_turn) == {"1.0|1": 1}


async def test_a_coordinator_that_is_drained_hands_its_partitions_on(stage: Stage, turnmill: CommandLine) -> None:
    first = stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default"])
    turn = await stage.client.turn(worker, told([call("once", gate="g")]))
    await stage.reached("g:1")
    stage.processes.coordinator()
    first_id = (await registered(stage, first)).id
    assert f"{first_id} gone" in await run(turnmill, "worker", "drain", first_id, "--wait")
    assert await asyncio.to_thread(first.popen.wait, PATIENCE_SECONDS) == 0
    await stage.open("g:1")
    assert await answer_of(turn) == "all done"
    entries = await listed(turnmill, "worker", "ls")
    assert [entry["role"] for entry in entries.values()].count("coordinator") == 1


async def test_who_is_not_there_cannot_be_drained(
    valkey_url: str, namespace: str, short_directory: Path, turnmill: CommandLine
) -> None:
    done = await asyncio.to_thread(turnmill, "worker", "drain", "nobody")
    assert (done.returncode, "`turnmill worker ls`" in done.stderr) == (2, True)
    # A command takes longer to start than the short liveness of the other tests.
    async with open_stage(valkey_url, namespace, short_directory, liveness_seconds=8) as stage:
        frozen = stage.processes.tools(APP, queues=["default"])
        frozen_id = (await registered(stage, frozen)).id
        frozen.freeze()
        await run(turnmill, "worker", "drain", frozen_id, "--wait", "--timeout", "0.3", code=3)
        frozen.kill()
        assert await run(turnmill, "worker", "drain", frozen_id, "--wait") == f"{frozen_id} killed\n"
        assert not await stage.redis.hkeys(stage.keys.directives)


# ---- config and top


async def test_config_tells_where_each_value_comes_from(turnmill: CommandLine) -> None:
    (turnmill.directory / "turnmill.toml").write_text(
        'session_queue_max = 7\n[providers.mine]\napi = "openai"\nbase_url = "http://me:hidden@127.0.0.1/v1"\n'
    )
    text = await run(turnmill, "config", "--json", "--redis-url", "redis://:hidden@127.0.0.1:1/0")
    settings = {line["setting"]: line for line in json_lines(text)}
    assert "hidden" not in text
    assert (settings["redis_url"]["value"], settings["redis_url"]["source"]) == ("redis://:***@127.0.0.1:1/0", "option")
    assert (settings["session_queue_max"]["value"], settings["session_queue_max"]["source"]) == (7, "turnmill.toml")
    assert settings["lease_seconds"]["source"] == "TURNMILL_LEASE_SECONDS"
    assert settings["partitions"]["source"] == "default"


async def test_processes_refuse_settings_that_contradict_each_other(stage: Stage) -> None:
    """AC-60: before they join the namespace, with the rule."""
    contradictions = {
        "heartbeat_seconds (2.0) must be at most lease_seconds (1.0)": {
            "lease_seconds": 1, "heartbeat_seconds": 2, "liveness_seconds": 9
        },
        "drain_timeout (40.0) must be at least 3 seconds below stop_grace (30.0)": {"drain_timeout": 40},
    }  # fmt: skip
    for rule, settings in contradictions.items():
        for role in (stage.processes.coordinator, lambda **more: stage.processes.tools(APP, **more)):
            process = role(**settings)
            assert await asyncio.to_thread(process.popen.wait, PATIENCE_SECONDS) != 0
            assert rule in process.log()
    assert not await stage.redis.exists(stage.keys.workers, stage.keys.coordinators)


async def test_top_shows_what_happens(stage: Stage, turnmill: CommandLine) -> None:
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default"])
    done = await stage.client.turn(worker, told([call("once")]))
    assert await answer_of(done) == "all done"
    live = await stage.client.turn(worker, told([call("once", gate="g")]), session=SESSION)
    await stage.reached("g:1")
    await stage.redis.xadd(stage.keys.partitions[0].inbox, {"t": "nonsense", "d": "{}"})

    async def seen() -> dict[str, Any] | None:
        look: dict[str, Any] = json.loads(await run(turnmill, "top", "--once", "--json"))
        return look if look["dead_letters"] == 1 and len(look["processes"]) == 3 else None

    look = await wait_until_async(seen, PATIENCE_SECONDS)
    assert look is not None
    assert (look["live_turns"], look["live_turns_is_exact"]) == (1, True)
    assert [(turn["turn_id"], turn["doing"]) for turn in look["slowest"]] == [(live.id, ["once"])]
    assert look["started_per_second"] > look["finished_per_second"] > 0 == look["failed_per_second"]
    assert {queue["queue"]: queue["in_work"] for queue in look["queues"]}["tool:default"] == 1
    assert look["engine"]["memory_bytes"] > 0
    screen = await run(turnmill, "top")
    for part in ("1 coordinator, 2 workers", "1 dead letters: `turnmill dead ls`", "1 live", "tool:default", live.id):
        assert part in screen
    await stage.open("g:1")
    assert await answer_of(live) == "all done"


async def test_top_goes_on_until_it_is_stopped(stage: Stage, turnmill: CommandLine) -> None:
    with turnmill.started("top", "--json", "--interval", "0.2") as top:
        await asyncio.to_thread(top.wait_for, '"live_turns"', 3)
        assert await asyncio.to_thread(top.stop, 2) == 0
    assert [look["live_turns"] for look in json_lines(top.output())][:3] == [0, 0, 0]


async def test_a_look_costs_the_engine_little_whatever_waits(stage: Stage) -> None:
    """No command whose cost grows with what waits, at 100,000 entries; the limit leaves room for a busy machine."""
    keys, engine = stage.keys.partitions[0], stage.client.engine
    await engine.call("SADD", keys.queues, "tool:big")
    await engine.call("XGROUP", "CREATE", keys.tool("big"), WORKER_GROUP, "0", "MKSTREAM")
    await fill(engine, keys.tool("big"), 60_000)
    await engine.call("XREADGROUP", "GROUP", WORKER_GROUP, "w", "COUNT", 20_000, "STREAMS", keys.tool("big"), ">")
    await fill(engine, keys.dead, 40_000)
    for start in range(0, 100_000, 5000):
        members = [item for number in range(start, start + 5000) for item in (number, f"session-{number}")]
        await engine.call("ZADD", keys.timers, *members)
    monitor = ActivityMonitor(engine, stage.keys, stage.client.settings)
    await engine.call("CONFIG", "SET", "slowlog-log-slower-than", 30_000)
    await engine.call("SLOWLOG", "RESET")
    try:
        look = await monitor.look()
        await monitor.look()
        slow = await engine.call("SLOWLOG", "GET", 10)
    finally:
        await engine.call("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
    report = next(queue for queue in look.queues if queue.queue == "tool:big")
    assert (report.waiting, report.in_work, look.dead_letters) == (40_000, 20_000, 40_000)
    assert look.live_turns == 100_000 and not look.live_turns_is_exact
    assert [(entry[2], entry[3]) for entry in slow] == []


async def fill(engine: Engine, stream: str, count: int) -> None:
    for start in range(0, count, 5000):
        await asyncio.gather(
            *[engine.call("XADD", stream, "*", "t", "tool_task", "d", "x" * 200) for _ in range(start, start + 5000)]
        )


async def test_a_queue_of_another_type_is_told_and_stops_no_look(stage: Stage, turnmill: CommandLine) -> None:
    await stage.redis.set(stage.keys.partitions[1].tool("late"), "garbage")
    await pause_queue(stage.client.engine, stage.keys, "tool:late")
    await resume_queue(stage.client.engine, stage.keys, "tool:late")
    await stage.redis.sadd(stage.keys.partitions[1].queues, "tool:late")
    reports = await read_queues(stage.client.engine, stage.keys, stage.client.settings)
    assert [report.queue for report in reports if report.faults] == ["tool:late"]
    assert "broken" in await run(turnmill, "queue", "ls")
