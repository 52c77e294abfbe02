"""What no message can carry ends a call with words, whoever said it: nothing that a worker holds is left unanswered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.llm_bench import LLMBench, agent_plan
from support.waiting import wait_until_async
from support.worker_bench import WorkerBench
from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, Message, ReasoningPart, TextPart, ToolCall, ToolCallPart, ToolResult
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import TextDelta, ToolCallDelta
from turnmill.protocol.keys import WORKER_GROUP
from turnmill.protocol.messages import ToolReply, ToolTask
from turnmill.protocol.specs import ToolSpec
from turnmill.protocol.streams import pending_ids
from turnmill.workers.consumer import Consumer
from turnmill.workers.models import HostModel, model, tool_call
from turnmill.workers.providers.base import ProviderError
from turnmill.workers.providers.host import HostProvider
from turnmill.workers.providers.scripted import Call, Reply, Script
from turnmill.workers.sendable import sendable, sendable_call, sendable_message

LONE = "a\ud800b"
MENDED = "a\ufffdb"
USER = Message(role="user", content="go")


def nest(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return {"value": value}


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


# --- values


def test_lone_surrogates_are_replaced_wherever_they_stand() -> None:
    call = ToolCall(id=LONE, name=LONE, arguments={LONE: [LONE, {"x": LONE}]}, metadata={"x": LONE})
    parts = [TextPart(LONE), ReasoningPart(text=LONE, data={"x": LONE}), ToolCallPart(call)]
    mended = sendable_message(Message(role="assistant", content=parts, model=LONE))
    assert mended.text == mended.reasoning[0].text == mended.model == MENDED
    assert mended.reasoning[0].data == {"x": MENDED}
    assert mended.tool_calls == [
        ToolCall(id=MENDED, name=MENDED, arguments={MENDED: [MENDED, {"x": MENDED}]}, metadata={"x": MENDED})
    ]
    delta = ToolCallDelta(step_number=1, index=0, arguments_delta=LONE, name_delta=LONE, tool_call_id=LONE)
    assert sendable(delta) == ToolCallDelta(
        step_number=1, index=0, arguments_delta=MENDED, name_delta=MENDED, tool_call_id=MENDED
    )


@pytest.mark.parametrize("text", ["plain", "größe 😀", ""])
def test_what_can_be_sent_stays_the_same_object(text: str) -> None:
    delta, message = TextDelta(text=text), Message(role="assistant", content=text)
    assert sendable(delta) is delta
    assert sendable_message(message) is message


def test_arguments_that_nobody_could_read_give_way_to_an_error() -> None:
    for levels, fault in (
        (199, None),
        (200, "nested deeper than 200 levels"),
        (50_000, "nested deeper than 200 levels"),
    ):
        call = sendable_call(ToolCall(id="a", name="tool", arguments=nest(levels)))
        assert (call.error, bool(call.arguments)) == (fault, fault is None)
    assert (
        sendable_call(ToolCall(id="a", name="tool", arguments={"x": [2**64]})).error
        == "an integer of more than 64 bits"
    )


# --- model calls


def told(events: list[Any], name: str) -> str:
    return "".join(getattr(event, name, None) or "" for event in events)


async def test_a_scripted_answer_with_a_lone_surrogate_is_an_answer(engine: Engine, namespace: str) -> None:
    bench = LLMBench(engine, namespace)
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text=LONE * 100, reasoning=LONE, chunks=3)])):
        await bench.ask()
        answer = await bench.answer()
    assert (answer.error, answer.message and answer.message.text) == (None, MENDED * 100)
    assert answer.message is not None
    assert answer.message.reasoning[0].text == MENDED
    assert told(await bench.published(), "text") + told_tail(answer.tail) in (MENDED * 101, MENDED + MENDED * 100)


def told_tail(tail: list[dict[str, Any]]) -> str:
    return "".join(event.get("text") or "" for event in tail)


def host(function: Any) -> HostProvider:
    assert isinstance(function, HostModel)
    return HostProvider([function])


@model("odd")
async def odd(request: Any) -> Any:
    yield LONE
    yield tool_call("look", **{LONE: LONE})
    yield tool_call("look", value=nest(300))
    yield tool_call(LONE)


@model("broken")
async def broken(request: Any) -> Any:
    raise RuntimeError(LONE)
    yield ""


async def test_a_model_function_may_say_anything(engine: Engine, namespace: str) -> None:
    bench = LLMBench(engine, namespace)
    await bench.write(USER)
    look = ToolSpec(name="look", schema={"type": "object"})
    async with bench.models(host=host(odd)):
        await bench.ask(agent_plan("host:odd", [look]))
        answer = await bench.answer()
    assert answer.message is not None, answer.error
    first, deep, strange = answer.message.tool_calls
    assert (answer.message.text, first.arguments, first.error) == (MENDED, {MENDED: MENDED}, None)
    assert (deep.arguments, deep.error) == ({}, "nested deeper than 200 levels")
    assert strange.name == MENDED


async def test_what_a_failed_model_says_is_sendable_too(engine: Engine, namespace: str) -> None:
    bench = LLMBench(engine, namespace)
    await bench.write(USER)
    async with bench.models(host=host(broken)):
        await bench.ask(agent_plan("host:broken"))
        answer = await bench.answer()
    assert answer.error is not None
    assert answer.error.kind == ErrorKind.PROVIDER_ERROR
    assert answer.error.message.endswith(MENDED)


@pytest.mark.parametrize("arguments", [nest(300), '{"value": ' + '{"a": ' * 300 + "1" + "}" * 301, '{"a":' * 9000])
async def test_a_deep_call_is_an_error_of_the_model(engine: Engine, namespace: str, arguments: Any) -> None:
    bench = LLMBench(engine, namespace)
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(tool_calls=[Call("look", arguments)])])):
        await bench.ask()
        answer = await bench.answer()
    assert answer.message is not None, answer.error
    (call,) = answer.message.tool_calls
    assert call.arguments == {}
    assert "nested deeper than 200 levels" in (call.error or "") or "no JSON object" in (call.error or "")


# --- any task


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def reply_with(result: Any) -> Any:
    def make(task: ToolTask) -> Any:
        tool_result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result=result)
        return task.answer(ToolReply, result=tool_result)

    return make


async def run_once(bench: WorkerBench, make: Any) -> int:
    """Run one task and wait until nothing of it is pending; how often it ran."""
    runs = 0

    async def handler(task: ToolTask, partition: int, cancelled: AbortSignal) -> Any:
        nonlocal runs
        runs += 1
        return make(task)

    consumer = Consumer(
        bench.engine, bench.keys, bench.settings, role="tools", queues=["tool:default"], concurrency=1, takes=ToolTask,
        handler=handler,
    )  # fmt: skip
    stream = bench.names.tool("default")
    async with bench.running(consumer):
        await bench.add("any")

        async def done() -> bool:
            pending = await pending_ids(bench.engine, stream, WORKER_GROUP, consumer.worker_id, 1)
            return runs > 0 and not pending and not consumer._held

        await wait_until_async(done)
    return runs


@pytest.mark.parametrize("value", [LONE, object(), nest(5000)], ids=["surrogate", "object", "deep"])
async def test_a_result_that_cannot_be_encoded_is_an_error_reply(engine: Engine, namespace: str, value: Any) -> None:
    bench = WorkerBench(engine, namespace)
    assert await run_once(bench, reply_with(value)) == 1
    reply = await bench.reply()
    assert reply.error is not None
    assert (reply.error.kind, reply.result) == (ErrorKind.INTERNAL, None)
    assert "cannot be sent" in reply.error.message


async def test_an_error_that_cannot_be_encoded_is_one_that_can(engine: Engine, namespace: str) -> None:
    def fail(task: ToolTask) -> Any:
        raise ProviderError(ErrorInfo(kind="x", message=LONE))

    bench = WorkerBench(engine, namespace)
    assert await run_once(bench, fail) == 1
    reply = await bench.reply()
    assert reply.error is not None
    assert reply.error.message.endswith(MENDED)


async def test_a_task_that_cannot_be_answered_at_all_does_not_run_for_ever(engine: Engine, namespace: str) -> None:
    def fail(task: ToolTask) -> Any:
        raise Unprintable

    bench = WorkerBench(engine, namespace)
    assert await run_once(bench, fail) == 1
    assert await engine.call("XPENDING", bench.names.tool("default"), WORKER_GROUP) == [0, None, None, None]


async def test_an_entry_that_is_no_task_and_too_large_to_report_is_reported_without_its_content(
    engine: Engine, namespace: str
) -> None:
    bench = WorkerBench(engine, namespace, payload_bytes_max=100_000)

    async def handler(task: ToolTask, partition: int, cancelled: AbortSignal) -> Any:
        raise AssertionError("nothing can be run")

    consumer = Consumer(
        bench.engine, bench.keys, bench.settings, role="tools", queues=["tool:default"], concurrency=1, takes=ToolTask,
        handler=handler,
    )  # fmt: skip
    async with bench.running(consumer):
        await engine.call("XADD", bench.names.tool("default"), "*", "t", "tool_task", "d", b"x" * 100_000)
        (report,) = await wait_until_async(bench.replies)
    assert report.type == "unreadable_task"
    assert (report.entry_body, "above the limit" in report.reason) == (b"", True)
