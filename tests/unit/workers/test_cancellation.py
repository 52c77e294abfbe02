"""Stopped turns, as a worker hears of them: by word, by marker, after a lost connection, and at no cost for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.waiting import wait_until_async
from support.worker_bench import WorkerBench
from turnmill.protocol import subscription
from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, ToolResult
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.messages import ToolReply, ToolTask
from turnmill.workers import consumer as consumer_module
from turnmill.workers import held as held_module
from turnmill.workers.cancellation import Cancellations
from turnmill.workers.consumer import Consumer
from turnmill.workers.held import aborted_error


class Recorder:
    """A handler that waits at a gate and looks at its signal, as a worker's does."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.signals: dict[str, AbortSignal] = {}
        self.open = asyncio.Event()
        self.heeds = True

    async def __call__(self, task: ToolTask, _partition: int, cancelled: AbortSignal) -> ToolReply:
        self.started.append(task.call)
        self.signals[task.call] = cancelled
        opened = asyncio.create_task(self.open.wait())
        stopped = asyncio.create_task(cancelled.wait() if self.heeds else asyncio.Event().wait())
        await asyncio.wait({opened, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for waiter in (opened, stopped):
            waiter.cancel()
        if cancelled.is_set() and not self.open.is_set():
            return task.answer(ToolReply, error=aborted_error(cancelled))
        return task.answer(ToolReply, result=ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result=1))


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
def bench(engine: Engine, namespace: str) -> WorkerBench:
    return WorkerBench(engine, namespace)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def consumer_of(bench: WorkerBench, recorder: Recorder, **options: Any) -> Consumer:
    return Consumer(
        bench.engine,
        bench.keys,
        bench.settings,
        role="tools",
        queues=["tool:default"],
        concurrency=8,
        takes=ToolTask,
        handler=recorder,
        **options,
    )


def aborted(reason: str) -> ErrorInfo:
    return ErrorInfo(kind=ErrorKind.ABORTED, message=reason)


async def test_a_running_task_is_told_and_the_others_are_not(bench: WorkerBench, recorder: Recorder) -> None:  # AC-42
    async with bench.running(consumer_of(bench, recorder)):
        await bench.listening()
        await bench.add("any", "1.0")
        await bench.add("any", "1.1", turn_id=bench.new_turn())
        await wait_until_async(lambda: len(recorder.started) == 2)
        await bench.stop_turn(bench.turn_id, "the user left")
        assert (await bench.reply("1.0")).error == aborted("the user left")
        assert not recorder.signals["1.1"].is_set()
        recorder.open.set()
        reply = await bench.reply("1.1")
        assert reply.result is not None and reply.error is None


async def test_a_task_of_a_stopped_turn_is_answered_and_not_run(
    bench: WorkerBench, recorder: Recorder
) -> None:  # AC-43
    await bench.stop_turn(bench.turn_id, "too late")
    await bench.add("any")
    consumer = consumer_of(bench, recorder)
    async with bench.running(consumer):
        assert (await bench.reply()).error == aborted("too late")
    assert recorder.started == []
    assert consumer.counters["stopped_before_start"] == 1


async def test_a_task_that_comes_after_the_word_is_not_run(bench: WorkerBench, recorder: Recorder) -> None:  # AC-43
    async with bench.running(consumer_of(bench, recorder)):
        await bench.listening()
        await bench.stop_turn(bench.turn_id)
        await bench.engine.call("DEL", bench.names.cancel(bench.turn_id))  # only what was heard can tell
        await bench.add("any")
        assert (await bench.reply()).error == aborted("stop")
    assert recorder.started == []


async def test_a_plain_task_costs_no_command(
    engine: Engine, namespace: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = WorkerBench(engine, namespace, lease_seconds=20, liveness_seconds=60, heartbeat_seconds=20)
    recorder.open.set()
    cancellations = Cancellations(bench.engine, bench.keys)
    consumer = consumer_of(bench, recorder, cancellations=cancellations)
    looked: list[Any] = []

    async def look(*arguments: Any) -> dict[str, str]:
        looked.append(arguments)
        return {}

    monkeypatch.setattr(consumer_module, "stop_reasons", look)
    await bench.add("early", "0.0")
    async with bench.running(consumer):
        await bench.reply("0.0")
        assert looked  # it was there before this process listened
        await wait_until_async(lambda: cancellations._since_ms is not None)
        await wait_until_async(lambda: consumer.clock.now_ms() > (cancellations._since_ms or 0) + 5)
        looked.clear()
        for number in range(20):
            await bench.add("any", f"1.{number}")
        await bench.reply("1.19")
    assert looked == []


async def test_a_word_that_was_missed_is_found_with_the_heartbeat(bench: WorkerBench, recorder: Recorder) -> None:
    async with bench.running(consumer_of(bench, recorder)):
        await bench.listening()
        await bench.add("any")
        await wait_until_async(lambda: recorder.started)
        await bench.stop_turn(bench.turn_id, "unheard", told=False)
        assert (await bench.reply()).error == aborted("unheard")


async def test_what_was_stopped_while_the_connection_was_lost_is_looked_up_at_once(
    engine: Engine, namespace: str, recorder: Recorder
) -> None:
    bench = WorkerBench(engine, namespace, lease_seconds=20, liveness_seconds=60, heartbeat_seconds=20)
    async with bench.running(consumer_of(bench, recorder)):
        await bench.listening()
        await bench.add("any")
        await wait_until_async(lambda: recorder.started)
        await bench.stop_turn(bench.turn_id, "unheard", told=False)
        assert await engine.call("CLIENT", "KILL", "TYPE", "pubsub") >= 1
        assert (await bench.reply()).error == aborted("unheard")


async def test_a_handler_that_does_not_heed_is_answered_for(
    bench: WorkerBench, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "STOP_GRACE_SECONDS", 0.05)
    recorder.heeds = False
    consumer = consumer_of(bench, recorder)
    async with bench.running(consumer):
        await bench.listening()
        await bench.add("any")
        await wait_until_async(lambda: recorder.started)
        await bench.stop_turn(bench.turn_id)
        assert (await bench.reply()).error == aborted("stop")
        recorder.open.set()
        await bench.add("next", "2.0", turn_id=bench.new_turn())
        assert (await bench.reply("2.0")).result is not None
    assert consumer.counters["stopped_after_grace"] == 1


async def test_a_connection_that_says_nothing_is_given_up(bench: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "SILENCE_SECONDS", 0.02)
    heard: list[Any] = []
    opened: list[int] = []

    def on_open() -> list[bytes]:
        opened.append(1)
        return [b"some-channel"]

    kept = subscription.Subscription(bench.engine, on_open=on_open, on_push=heard.append)
    kept.start()
    await wait_until_async(lambda: [b"pong", b""] in heard)  # a word is asked for, and comes
    assert len(opened) == 1
    link = kept._link
    assert link is not None
    monkeypatch.setattr(type(link), "silent_seconds", 1.0)  # as if the answers were lost on the way
    await wait_until_async(lambda: len(opened) > 1)
    await kept.close()
    assert not kept.is_open


async def test_consumers_of_a_process_share_a_connection(bench: WorkerBench, recorder: Recorder) -> None:
    shared = Cancellations(bench.engine, bench.keys)
    one, other = (consumer_of(bench, recorder, cancellations=shared) for _ in range(2))
    async with bench.running(one):
        async with bench.running(other):
            await bench.listening()
            reply = await bench.engine.call("PUBSUB", "SHARDNUMSUB", bench.names.cancellations)
            assert reply[1] == 1
        await bench.add("any")
        await wait_until_async(lambda: recorder.started)
        await bench.stop_turn(bench.turn_id)
        assert (await bench.reply()).error == aborted("stop")
    assert not shared._subscription.is_open
