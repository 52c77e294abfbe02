"""What keeps stale, forged and broken messages out, each fence with it and without it.

Coordinator and LLM worker run in the test's process; the test itself is the tool worker, and sends what it likes.
A fence is shown twice: the bad message bounces, and with the fence taken out the same message does its harm.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support import crash_app
from support.stage import APP, PATIENCE_SECONDS, Stage, call, open_stage, told
from support.waiting import wait_until_async
from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.codec import encode_body
from turnmill.protocol.content import ToolCall, ToolResult
from turnmill.protocol.keys import WORKER_GROUP, partition_of_session
from turnmill.protocol.messages import ToolReply, ToolTask
from turnmill.protocol.namespace import make_token, read_secret
from turnmill.protocol.specs import AgentSpec, Plan, ToolSpec
from turnmill.protocol.streams import TAKE_LOST_DELIVERY, Delivery
from turnmill.runtime import Agent, door
from turnmill.runtime import state as states
from turnmill.runtime.coordinator import Coordinator
from turnmill.runtime.machine import advance
from turnmill.runtime.roles import build_llm_worker
from turnmill.runtime.state import CallState, CallStatus, SessionState, TurnPhase, TurnState
from turnmill.runtime.turn import Turn
from turnmill.workers.app import collect
from turnmill.workers.consumer import Consumer

SESSION = "session"
QUEUE = "by-hand"
TOOLS = ["lever", "crank"]


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened, in_process(opened):
        yield opened


@asynccontextmanager
async def in_process(stage: Stage) -> AsyncIterator[Coordinator]:
    """A coordinator and an LLM worker in this process, so that tests can take fences out of them."""
    client = stage.client
    app = collect("test", [crash_app.plan])
    coordinator = await Coordinator.create(client.engine, client.keys, client.settings)
    llm = build_llm_worker(client.engine, client.keys, client.settings, app, [], None)
    running = [asyncio.create_task(role.run()) for role in (coordinator, llm)]
    try:
        yield coordinator
    finally:
        coordinator.stop()
        llm.stop()
        await asyncio.gather(*running)


class ToolByHand:
    """A tool worker whose every message is written by the test."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.keys = stage.keys.of_session(SESSION)
        self.stream = self.keys.tool(QUEUE)

    async def start(self, *calls: str, options: dict[str, Any] | None = None) -> Turn:
        for name in TOOLS:
            spec = ToolSpec(name=name, queue=QUEUE, **(options or {}))
            await self.stage.redis.hset(self.stage.keys.tools, name, msgspec.json.encode(spec))
        agent = Agent("by-hand", "scripted:plan", tools=TOOLS)
        steps = [[{"name": name, "arguments": {}} for name in calls]]
        message = json.dumps({"steps": steps, "answer": "${results[0]}"})
        return await self.stage.client.turn(agent, message, session=SESSION)

    async def take(self, consumer: str = "hand") -> tuple[bytes, dict[str, Any]]:
        await self.stage.redis.set(self.keys.alive(consumer), 1, px=60_000)

        async def read() -> Any:
            try:
                return await self.stage.redis.xreadgroup(WORKER_GROUP, consumer, {self.stream: ">"}, count=1)
            except Exception as error:
                assert "NOGROUP" in str(error)
                await self.stage.redis.xgroup_create(self.stream, WORKER_GROUP, "0", mkstream=True)
                return None

        reply = await wait_until_async(read, PATIENCE_SECONDS)
        entry_id, fields = reply[0][1][0]
        return entry_id, json.loads(fields[b"d"])

    async def answer(self, task: dict[str, Any], value: str, **changed: Any) -> None:
        """A result without acknowledgement: a repetition, a late or a forged one."""
        names = ("session_id", "turn_id", "call", "attempt", "token")
        result = {"tool_call_id": task["tool_call_id"], "tool_name": task["tool"], "result": value}
        body = {**{name: task[name] for name in names}, "result": result, **changed}
        await self.stage.redis.xadd(self.keys.results, {"t": "tool_reply", "d": json.dumps(body)})

    async def complete(self, entry_id: bytes, task: dict[str, Any], value: str) -> None:
        await self.answer(task, value)
        await self.stage.redis.xack(self.stream, WORKER_GROUP, entry_id)
        await self.stage.redis.xdel(self.stream, entry_id)


async def counted(stage: Stage, name: str, count: int = 1) -> None:
    async def reached() -> bool:
        return await stage.counter(name) >= count

    await wait_until_async(reached, PATIENCE_SECONDS)
    assert await stage.counter(name) == count


async def answer_of(turn: Turn) -> str:
    return (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer


# ---- the token, at the door


async def test_a_forged_token_is_dropped_and_counted(stage: Stage) -> None:
    """AC-15/16: whoever can write into the results stream, but was not given the task, cannot answer it."""
    hand = ToolByHand(stage)
    turn = await hand.start("lever")
    entry_id, task = await hand.take()
    await hand.answer(task, "forged", token="0" * 24)
    await hand.answer(task, "forged", token="")
    await hand.answer(task, "forged", attempt=2)
    await counted(stage, "bad_token", 3)
    await hand.complete(entry_id, task, "true")
    assert await answer_of(turn) == "true"
    await stage.assert_sound(turn.id)
    await stage.assert_idle()


async def test_without_the_token_a_forged_result_is_believed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "make_token", lambda *_: Anything())
    hand = ToolByHand(stage)
    turn = await hand.start("lever")
    await hand.take()
    await hand.answer({"tool_call_id": "x", "tool": "lever", **forged_address(turn)}, "forged", token="0" * 24)
    assert await answer_of(turn) == "forged"


def forged_address(turn: Turn) -> dict[str, Any]:
    return {"session_id": SESSION, "turn_id": turn.id, "call": "1.0", "attempt": 1, "token": ""}


class Anything:
    """Equal to everything: a fence that compares with it is no fence."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]  # never a key


# ---- the attempt, in the machine


class AnyAttempt(int):
    """An attempt that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@pytest.mark.parametrize(("attempt", "accepted"), [(2, False), (AnyAttempt(2), True)], ids=["fence", "no fence"])
def test_a_result_of_an_earlier_attempt(attempt: int, accepted: bool) -> None:
    """AC-15: attempt 1 was given up and attempt 2 runs; what attempt 1 says now must not become the call's result."""
    plan = Plan(agent=AgentSpec(name="a", model="scripted:plan"), tools={"lever": ToolSpec(name="lever")})
    running = CallState(0, ToolCall(id="c", name="lever"), status=CallStatus.RUNNING, attempt=attempt, due_ms=10**9)
    other = CallState(1, ToolCall(id="d", name="lever"), status=CallStatus.RUNNING, due_ms=10**9)
    turn = TurnState(
        "t0-x", "a", "plan", TurnPhase.TOOLS, 0, 0, step=1, calls=[running, other], stage=states.Stage.TOOLS
    )
    late = ToolReply(
        session_id=SESSION,
        turn_id="t0-x",
        call="1.0",
        attempt=1,
        result=ToolResult(tool_call_id="c", tool_name="lever", result="late"),
    )
    decision = advance(SessionState(turn=turn), late, 0, SESSION, {"plan": plan})
    assert decision.state.turn is not None
    settled = decision.state.turn.calls[0].result
    assert (settled is not None) is accepted
    assert decision.discarded == (None if accepted else "stale_tool_reply")


# ---- liveness: a frozen reader wakes up


@pytest.mark.parametrize("fenced", [True, False], ids=["fence", "no fence"])
async def test_a_frozen_reader_starts_only_what_is_still_its_own(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """AC-10: its read was answered while it was frozen, and the entry has been given to a retry since."""
    started: list[str] = []

    async def handler(task: ToolTask, _partition: int, _cancelled: AbortSignal) -> ToolReply:
        started.append(task.call)
        return ToolReply(session_id=task.session_id, turn_id=task.turn_id, call=task.call, attempt=task.attempt)

    client = stage.client
    consumer = Consumer(
        client.engine,
        client.keys,
        client.settings,
        role="tools",
        queues=["tool:frozen"],
        concurrency=8,
        takes=ToolTask,
        handler=handler,
    )
    frozen = Frozen(stage, consumer, monkeypatch)
    if not fenced:
        monkeypatch.setattr(consumer, "_still_owned", frozen.believe)
    running = asyncio.create_task(consumer.run())
    try:
        await asyncio.wait_for(frozen.thawed.wait(), PATIENCE_SECONDS)
        await stage.redis.xadd(frozen.stream, {"t": "tool_task", "d": encode_body(frozen.task("fresh"))})
        await wait_until_async(lambda: "fresh" in started, PATIENCE_SECONDS)
    finally:
        consumer.stop()
        await running
    assert started == (["fresh"] if fenced else ["taken", "fresh"])
    assert not fenced or consumer.counters["doubted_reads"] == 1


class Frozen:
    """Freezes a consumer between the engine's answer to its first read and the moment it sees it."""

    def __init__(self, stage: Stage, consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage = stage
        self.consumer = consumer
        self.keys = stage.keys.of_session(SESSION)
        self.stream = self.keys.tool("frozen")
        self.thawed = asyncio.Event()
        from turnmill.protocol import streams as module

        original = module.GroupReader.read

        async def read(reader: Any, streams: Any, count: int, block_ms: int) -> list[Delivery]:
            if reader._consumer != consumer.worker_id:
                return await original(reader, streams, count, block_ms)
            if not self.thawed.is_set():
                await stage.redis.xadd(self.stream, {"t": "tool_task", "d": encode_body(self.task("taken"))})
            deliveries = await original(reader, streams, count, block_ms)
            if deliveries and not self.thawed.is_set():
                await self.sleep()
            return deliveries

        monkeypatch.setattr(module.GroupReader, "read", read)

    def task(self, name: str) -> ToolTask:
        return ToolTask(
            session_id=SESSION, turn_id="t0-x", call=name, attempt=1, tool="t", tool_call_id="c", arguments={},
            agent_id="a", step_number=1, idempotency_key="", timeout_seconds=1, start_by_ms=0, deadline_ms=0,
        )  # fmt: skip

    async def sleep(self) -> None:
        """What happens to a worker that is frozen for longer than its liveness: the key expires, its entries go."""
        liveness: Any = self.consumer._liveness
        liveness._valid_until = 1e-9
        alive = self.keys.alive(self.consumer.worker_id)

        async def taken() -> bool:
            await self.stage.redis.delete(alive)
            names = [self.stream, f"{self.stage.keys.prefix}-elsewhere:{{0}}", alive]
            arguments: list[Any] = [WORKER_GROUP, self.consumer.worker_id, 0, 10, 0]
            return bool(await TAKE_LOST_DELIVERY.run(self.stage.client.engine, names, arguments) == 1)

        await wait_until_async(taken, PATIENCE_SECONDS)
        self.thawed.set()

    async def believe(self, deliveries: list[Delivery]) -> list[Delivery]:
        return deliveries


# ---- AC-15/16: late, twice, changed


async def test_a_result_counts_once(stage: Stage) -> None:
    """AC-16: the same result again, and a changed one with the right token: counted, never appended."""
    hand = ToolByHand(stage)
    turn = await hand.start("lever", "crank")
    first_id, first = await hand.take()
    second_id, second = await hand.take()
    if first["call"] != "1.0":
        (first_id, first), (second_id, second) = (second_id, second), (first_id, first)
    await hand.complete(first_id, first, "first")
    await hand.answer(first, "first")
    await hand.answer(first, "changed")
    await counted(stage, "late_tool_reply", 2)
    await hand.complete(second_id, second, "second")
    assert await answer_of(turn) == "first"
    await hand.answer(second, "after the end")
    await counted(stage, "stale_tool_reply", 1)
    messages = await stage.assert_history(SESSION)
    results = [result.result for message in messages for result in message.tool_results]
    assert results == ["first", "second"]
    await stage.assert_sound(turn.id)
    await stage.assert_idle()


async def test_a_result_after_its_timeout_is_late(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """AC-15: the worker never answers within the call's time; the machine's own deadline ends the call."""
    monkeypatch.setattr("turnmill.runtime.calls.GRACE_SECONDS", 0.2)
    hand = ToolByHand(stage)
    turn = await hand.start("lever", options={"timeout_seconds": 0.5, "start_timeout_seconds": 0.5})
    entry_id, task = await hand.take()
    assert await answer_of(turn) == "Error: execution failed (timeout after 0.5 s)"
    await hand.complete(entry_id, task, "too late")
    await counted(stage, "stale_tool_reply")
    messages = await stage.assert_history(SESSION)
    assert len([result for message in messages for result in message.tool_results]) == 1
    await stage.assert_idle()


async def test_progress_counts_once(stage: Stage) -> None:
    """AC-16 for progress: a repetition is seen by its number, and what comes after the result reaches nobody."""
    hand = ToolByHand(stage)
    turn = await hand.start("lever")
    entry_id, task = await hand.take()
    names = ("session_id", "turn_id", "call", "attempt", "token")

    async def report(sequence: int) -> None:
        body = {**{name: task[name] for name in names}, "sequence": sequence, "message": str(sequence)}
        await stage.redis.xadd(hand.keys.results, {"t": "tool_progress", "d": json.dumps(body)})

    for sequence in (1, 1, 2, 1):
        await report(sequence)
    await hand.complete(entry_id, task, "done")
    await report(3)
    await counted(stage, "stale_progress", 3)
    assert await answer_of(turn) == "done"
    events = await stage.assert_sound(turn.id)
    assert [event.message for event in events if event.type == "tool_execution.progress"] == ["1", "2"]
    await stage.assert_idle()


# ---- AC-26: what nobody can read

BROKEN = {
    "malformed": {"t": "{type}", "d": b"{\xff\x00"},
    "no object": {"t": "{type}", "d": b"[]"},
    "fields missing": {"t": "{type}", "d": b"{}"},
    "a version of tomorrow": {"t": "{type}", "d": b"{}", "v": "2"},
    "an unknown type": {"t": "tomorrow", "d": b"{}"},
    "no type": {"d": b"{}"},
    "no body": {"t": "{type}"},
    "foreign fields": {"hello": "world"},
    "broken MessagePack": {"t": "{type}", "d": b"\x81\xa1"},
}


async def test_broken_messages_become_dead_letters(valkey_url: str, namespace: str, short_directory: Path) -> None:
    """AC-26: on every queue, with the reason and the original bytes; the queue moves on."""
    async with open_stage(valkey_url, namespace, short_directory) as stage:
        stage.processes.coordinator()
        stage.processes.llm(APP)
        stage.processes.tools(APP, queues=["default"])
        keys = stage.keys.of_session(SESSION)
        streams = {
            keys.inbox: "start_turn",
            keys.results: "tool_reply",
            keys.model("default"): "model_task",
            keys.tool("default"): "tool_task",
        }
        sent = []
        for stream, kind in streams.items():
            for fields in BROKEN.values():
                entry = {name: kind if value == "{type}" else value for name, value in fields.items()}
                await stage.redis.xadd(stream, entry)
                sent.append((stream.encode(), entry.get("d", b"")))
        secret = await read_secret(stage.client.engine, stage.keys)
        for stream, body, kind in misplaced(stage, secret):
            await stage.redis.xadd(stream, {"t": kind, "d": body})
            sent.append((stream.encode(), body))

        async def buried() -> bool:
            return await stage.redis.xlen(keys.dead) >= len(sent)

        await wait_until_async(buried, PATIENCE_SECONDS)
        letters = await stage.dead_letters()
        assert sorted((letter[b"from"], letter[b"d"]) for letter in letters) == sorted(sent)
        assert all(letter[b"reason"] and letter[b"id"] and letter[b"attempts"] == b"1" for letter in letters)
        print(*sorted({letter[b"reason"].decode() for letter in letters}), sep="\n")
        turn = await stage.client.turn(crash_app.worker, told([call("once")]), session=SESSION)
        assert await answer_of(turn) == "all done"
        await stage.assert_idle()


def misplaced(stage: Stage, secret: bytes) -> list[tuple[str, bytes, str]]:
    """Messages that are whole, in streams where they do not belong."""
    keys = stage.keys.of_session(SESSION)
    other = next(partition_ for partition_ in stage.keys.partitions if partition_ is not keys)
    turn_id = f"t{keys.partition}-{'0' * 26}"
    address = {"session_id": SESSION, "turn_id": turn_id, "call": "1", "attempt": 1}
    address["token"] = make_token(secret, turn_id, "1", 1)
    model_task = {**address, "agent_id": "a", "plan": "p", "step_number": 1, "messages": 1, "deadline_ms": 1}
    tool_task = {
        **address, "call": "1.0", "token": make_token(secret, turn_id, "1.0", 1), "tool": "once",
        "tool_call_id": "c", "arguments": {}, "agent_id": "a",
        "step_number": 1, "idempotency_key": "k", "timeout_seconds": 1, "start_by_ms": 2**50, "deadline_ms": 2**50,
    }  # fmt: skip
    start = {"turn_id": f"t{keys.partition}-{'1' * 26}", "session_id": SESSION, "agent": "worker", "messages": []}
    elsewhere = {**start, "turn_id": f"t{other.partition}-{'1' * 26}"}
    return [
        (keys.tool("default"), json.dumps(model_task).encode(), "model_task"),
        (keys.model("default"), json.dumps(tool_task).encode(), "tool_task"),
        (keys.inbox, json.dumps(tool_task).encode(), "tool_task"),
        (keys.inbox, json.dumps(address).encode(), "tool_reply"),
        (keys.results, json.dumps(start).encode(), "start_turn"),
        (keys.inbox, json.dumps(elsewhere).encode(), "start_turn"),
    ]


async def test_arguments_that_look_like_packed_bytes(valkey_url: str, namespace: str, short_directory: Path) -> None:
    """A model may write anything; what only looks like our packed bytes must not stop a worker or a watcher."""
    async with open_stage(valkey_url, namespace, short_directory) as stage:
        stage.processes.coordinator()
        stage.processes.llm(APP)
        stage.processes.tools(APP, queues=["default"])
        odd = {"name": "once", "arguments": {"value": {"$bytes": "abcde"}}}
        turn = await stage.client.turn(crash_app.worker, told([odd], [call("once")]), session=SESSION)
        events = [event async for event in turn.events()]
        assert events[-1].type == "turn.finished"
        await stage.assert_idle()


async def test_a_deleted_queue_does_not_stop_the_reclaimer(
    valkey_url: str, namespace: str, short_directory: Path
) -> None:
    """AC-21: its stream is gone and no worker makes it again; lost calls of other queues are found all the same."""
    async with open_stage(valkey_url, namespace, short_directory) as stage:
        processes = stage.processes
        processes.coordinator()
        processes.llm(APP)
        first, last = session_of(0), session_of(3)  # partitions are looked after in this order
        waiting = await stage.client.turn(crash_app.worker, told([call("awaited")]), session=first)
        await stage.event(waiting, "tool_execution.waiting")
        await stage.redis.delete(stage.keys.of_session(first).tool("late"))
        victim = processes.tools(APP, queues=["default"])
        turn = await stage.client.turn(crash_app.worker, told([call("again", gate="gone")]), session=last)
        await stage.reached("gone:1")
        victim.kill()
        await stage.open("gone:2")
        processes.tools(APP, queues=["default"])
        assert await answer_of(turn) == "all done"


def session_of(number: int) -> str:
    return next(name for name in map(str, range(100)) if partition_of_session(name, 4) == number)


# ---- AC-60: settings that contradict each other


HEARTBEAT_RULE = "heartbeat_seconds (1.0) must be at most a third of liveness_seconds (1.5)"


@pytest.mark.parametrize(
    ("role", "settings", "rule"),
    [
        ("coordinator", {"heartbeat_seconds": 1}, HEARTBEAT_RULE),
        ("llm", {"heartbeat_seconds": 1}, HEARTBEAT_RULE),
        ("tools", {"heartbeat_seconds": 1}, HEARTBEAT_RULE),
        (
            "coordinator",
            {"heartbeat_seconds": 3, "liveness_seconds": 10, "lease_seconds": 2},
            "heartbeat_seconds (3.0) must be at most lease_seconds (2.0)",
        ),
        ("coordinator", {"lease_seconds": 0.1}, "TURNMILL_LEASE_SECONDS"),
        ("tools", {"drain_timeout": 7200}, "TURNMILL_DRAIN_TIMEOUT"),
        ("llm", {"partitions": 8}, "was created with 4 partitions"),
    ],
)
async def test_contradictory_settings_are_refused(
    valkey_url: str, namespace: str, short_directory: Path, role: str, settings: dict[str, Any], rule: str
) -> None:
    """AC-60: the process ends at once, and its last words name the rule and the settings."""
    async with open_stage(valkey_url, namespace, short_directory) as stage:
        process = stage.processes.role(role, settings, target=APP, names=[], concurrency=None)
        await wait_until_async(lambda: not process.is_alive, PATIENCE_SECONDS)
        assert process.popen.returncode != 0
        assert rule in process.log().splitlines()[-1]
