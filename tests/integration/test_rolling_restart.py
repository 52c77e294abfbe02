"""AC-57, AC-58: old and new processes side by side, one restarted after the other, and all of them at once."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps import tomorrow
from support import crash_app
from support.commands import CommandLine
from support.new_version import NOTE
from support.processes import Process
from support.stage import APP, PATIENCE_SECONDS, Stage, call, open_stage, told
from support.waiting import wait_until, wait_until_async
from turnmill.protocol.codec import encode_body
from turnmill.protocol.content import Message, ToolCall
from turnmill.protocol.keys import new_turn_id
from turnmill.protocol.messages import StartTurn
from turnmill.runtime import Turn
from turnmill.runtime.state import CallState, SessionState, TurnPhase, TurnState, decode_state, encode_state

TURNS = 50
TOMORROW = [{"t": "tool_task", "d": '{"shape": "of tomorrow"}', "v": "2"}, {"t": "wonder", "d": "{}"}]


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


def start_new(stage: Stage, role: str, target: str | None = None, version: str = "fields") -> Process:
    what = {
        "role": role,
        "target": target,
        "names": ["default"] if target else [],
        "concurrency": None,
        "version": version,
    }
    return stage.processes.start(f"new-{role}", [sys.executable, "-m", "support.new_version", json.dumps(what)])


async def ready(stage: Stage, *processes: Process) -> None:
    """Until they take part: a coordinator in sharing out the partitions, a worker in its queues."""

    async def known() -> bool:
        names = [
            *await stage.redis.zrange(stage.keys.coordinators, 0, -1),
            *await stage.redis.hkeys(stage.keys.workers),
        ]
        for process in processes:
            assert process.is_alive, process.log()
        return all(any(f"-{process.popen.pid}-".encode() in name for name in names) for process in processes)

    await wait_until_async(known, PATIENCE_SECONDS)


async def gone(*processes: Process) -> None:
    await wait_until_async(lambda: not any(process.is_alive for process in processes), PATIENCE_SECONDS)
    assert [process.popen.returncode for process in processes] == [0] * len(processes)


async def with_notes(stage: Stage, found: Counter[str]) -> None:
    """Counts the messages with the field of tomorrow, by stream, as they come by."""
    names = {
        key.base + name: name for key in stage.keys.partitions for name in ("results", "tool:default", "model:default")
    }
    seen: dict[str, Any] = dict.fromkeys(names, "$")
    while not found["stop"]:
        for stream, entries in await stage.redis.xread(seen, block=100) or []:
            seen[stream.decode()] = entries[-1][0]
            found[names[stream.decode()]] += sum(NOTE.encode() in fields.get(b"d", b"") for _, fields in entries)


async def throw(stage: Stage) -> int:
    """Messages of tomorrow into every queue; their number."""
    count = 0
    for keys in stage.keys.partitions:
        start = StartTurn(
            turn_id=new_turn_id(keys.partition), session_id="x", agent="a", messages=[Message(role="user", content="x")]
        )
        for stream in (keys.inbox, keys.results, keys.model("default"), keys.tool("default")):
            for fields in TOMORROW:
                await stage.redis.xadd(stream, fields)  # type: ignore[arg-type]
                count += 1
        await stage.redis.xadd(keys.results, {"t": "start_turn", "d": encode_body(start), "v": "2"})
        count += 1
    return count


async def test_a_rolling_restart_loses_nothing(stage: Stage) -> None:
    """AC-57: 50 turns in flight while each role is replaced by a version with a new field and without a tool, and messages
    of a later protocol come by: all turns finish, those are dead letters, each call took effect once."""
    processes = stage.processes
    old = [processes.coordinator(), processes.llm(APP), processes.tools(APP, queues=["default"])]
    await ready(stage, *old)
    found: Counter[str] = Counter()
    watching = asyncio.create_task(with_notes(stage, found))
    text = told(
        [call("again", gate="first"), call("nap", seconds=0.2)],
        [call("again", gate="second")],
        [call("nap", seconds=0.0)],
        delay=0.05,
    )
    turns = [await stage.client.turn(crash_app.worker, text, session=f"s{number}") for number in range(TURNS)]
    await stage.reached("first:1", TURNS)
    new = [
        start_new(stage, "coordinator"),
        start_new(stage, "llm", tomorrow.APP),
        start_new(stage, "tools", tomorrow.APP),
    ]
    await ready(stage, *new)
    thrown = await throw(stage)
    await stage.open("first:1")
    for process in old:  # one after the other, each with work in flight
        process.terminate()
        if process.role == "tools":
            await stage.reached("second:1", 1)
            await stage.open("second:1")
        await gone(process)
        thrown += await throw(stage)
    await asyncio.gather(*[assert_ended(stage, turn, f"s{number}") for number, turn in enumerate(turns)])
    found["stop"] = 1
    await watching
    assert all(found[name] for name in ("results", "tool:default", "model:default")), found
    after = await stage.client.turn(tomorrow.worker, told([call("again")]), session="after")
    assert (await asyncio.wait_for(after.result(), PATIENCE_SECONDS)).answer == "all done"
    await stage.assert_idle()
    letters = Counter(letter[b"reason"].split(b",")[0] for letter in await stage.dead_letters())
    assert sum(letters.values()) == thrown, letters
    for process in new:
        process.terminate()
    await gone(*new)


async def assert_ended(stage: Stage, turn: Turn, session: str) -> None:
    result = await asyncio.wait_for(turn.result(), 90)
    assert result.answer == "all done"
    await stage.assert_sound(turn.id)
    messages = await stage.assert_history(session)
    told_of = [each.result for message in messages for each in message.tool_results if each.tool_name == "nap"]
    assert len(told_of) == 2
    assert all(text == "nap done" or "does not have it" in text for text in told_of), told_of
    effects = await stage.effects(turn)
    assert all(count == 1 for count in effects.values()), effects
    assert {"1.0|1", "1.1|1", "2.0|1"} <= set(effects) <= {"1.0|1", "1.1|1", "2.0|1", "3.0|1"}, effects


async def test_results_of_a_later_protocol_end_their_calls(stage: Stage) -> None:
    """AC-57: a worker that speaks the next version gets its calls an answer that says so, at once; the turns finish."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    await ready(stage, start_new(stage, "tools", tomorrow.APP, version="protocol"))
    turns = [
        await stage.client.turn(tomorrow.worker, told([call("again")]), session=f"s{number}") for number in range(10)
    ]
    for number, turn in enumerate(turns):
        assert (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer == "all done"
        (message,) = [message for message in await stage.assert_history(f"s{number}") if message.tool_results]
        assert "protocol version 2, this process speaks 1" in message.tool_results[0].result
    letters = await stage.dead_letters()
    assert len(letters) == 10
    assert all(letter[b"field:v"] == b"2" and letter[b"t"] == b"tool_reply" for letter in letters)
    await stage.assert_idle()


def test_a_record_of_tomorrow_is_read() -> None:
    """AC-57: a coordinator of today takes over what one of tomorrow has written, with more fields at the end of each part."""
    call_state = CallState(index=0, tool_call=ToolCall(id="c", name="again", arguments={}))
    turn = TurnState("t0-x", "a", "p", TurnPhase.TOOLS, 1, 0, calls=[call_state])
    state = SessionState(length=3, turn=turn)
    record = msgspec.msgpack.decode(encode_state(state))
    place = TurnState.__struct_fields__.index("calls")
    record[1][place][0].append("of tomorrow")
    record[1].append({"of": "tomorrow"})
    record.append(["of tomorrow"])
    read = decode_state(msgspec.msgpack.encode(record))
    assert encode_state(read) == encode_state(decode_state(encode_state(state)))


# ---- AC-58


async def test_a_whole_deployment_restarts_under_load(stage: Stage) -> None:
    """AC-58: SIGTERM to every process at the same moment, with work in flight in each of them; the next ones go on."""
    processes = stage.processes
    first = [
        processes.coordinator(),
        processes.coordinator(),
        processes.llm(APP),
        processes.tools(APP, queues=["default"]),
    ]
    await ready(stage, *first)
    text = told([call("once"), call("again", seconds=0.3)], [call("again", seconds=0.2)], delay=0.05)
    turns = [await stage.client.turn(crash_app.worker, text, session=f"s{number}") for number in range(40)]

    async def under_way() -> bool:
        return len(await stage.redis.hkeys(f"{stage.keys.prefix}-play:effects")) >= 40

    await wait_until_async(under_way, PATIENCE_SECONDS)
    for process in first:
        process.terminate()
    await gone(*first)
    processes.coordinator()
    processes.llm(APP)
    processes.tools(APP, queues=["default"])
    for number, turn in enumerate(turns):
        assert (await asyncio.wait_for(turn.result(), 90)).answer == "all done"
        await stage.assert_sound(turn.id)
        await stage.assert_history(f"s{number}")
        assert await stage.effects(turn) == {"1.0|1": 1, "1.1|1": 1, "2.0|1": 1}
    await stage.assert_idle()


async def test_whoever_watches_may_be_ended(stage: Stage, short_directory: Path) -> None:
    """AC-58: SIGTERM to `turnmill run` ends what shows the turn, and not the turn."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default"])
    await stage.client.publish(crash_app.worker)
    command = CommandLine(short_directory, redis_url=stage.client.engine.url, namespace=stage.keys.prefix)
    with command.started("run", "worker", told([call("once", gate="held")]), "--session", "s", "--json") as started:
        await asyncio.to_thread(started.wait_for, "tool_execution.started")
        started.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: started.process.poll() is not None, PATIENCE_SECONDS)
        assert "Traceback" not in started.output()
    await stage.open("held:1")
    (record,) = [line async for line in _records(stage)]
    result = await asyncio.wait_for(stage.client.attach(record).result(), PATIENCE_SECONDS)
    assert result.answer == "all done"


async def _records(stage: Stage) -> AsyncIterator[str]:
    for keys in stage.keys.partitions:
        for name in await stage.redis.zrange(keys.turns, 0, -1):
            yield name.decode()
