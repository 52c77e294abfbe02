"""Tasks that ask for a shorter conversation: what the worker replies, what the summarizer is given, what failures leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

from support.llm_bench import LLMBench, agent_plan
from support.worker_bench import SESSION
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import (
    Cost,
    ErrorInfo,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.messages import ModelReply
from turnmill.protocol.settings import ModelPrice
from turnmill.protocol.specs import Compaction, Plan, RetryPolicy
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.scripted import Reply, Script, history_fault
from turnmill.workers.summary import INSTRUCTIONS, Summarizer

USAGE = Usage(input_tokens=100, output_tokens=10, total_tokens=110)
OVERFLOW = ErrorInfo(kind=ErrorKind.CONTEXT_OVERFLOW, message="too long")
BUSY = ErrorInfo(kind=ErrorKind.OVERLOADED, message="busy", retryable=True)
REPLIES = {"scripted:short": ModelPrice(input=Decimal(1), output=Decimal(10))}


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
def bench(engine: Engine, namespace: str) -> LLMBench:
    return LLMBench(engine, namespace, prices=REPLIES)


def said(role: Any, text: str, **fields: Any) -> Message:
    return Message(role=role, content=text, **fields)


def step(*ids: str, size: int, **fields: Any) -> list[Message]:
    calls = [ToolCallPart(ToolCall(id=name, name="dump")) for name in ids]
    results = [ToolResult(tool_call_id=name, tool_name="dump", result=name * size) for name in ids]
    return [
        Message(role="assistant", content=[*calls], **fields),
        *(Message(role="tool", content=[ToolResultPart(result)], **fields) for result in results),
    ]


def plan(**policy: Any) -> Plan:
    retry = RetryPolicy(initial_delay_seconds=0.001)
    return agent_plan(compaction=Compaction(tool_output_bytes=200, keep_steps=1, **policy), retry=retry)


async def shown(bench: LLMBench, reply: ModelReply) -> list[Message]:
    """What a next call would be asked, once the reply is committed."""
    assert reply.view is not None
    first = int(await bench.engine.call("LLEN", bench.names.replacements(SESSION)))
    if reply.replacements:
        await bench.replace(*reply.replacements)
    view = [(1, start + first, end + first) if kind == 2 else (kind, start, end) for kind, start, end in reply.view]
    length = int(await bench.engine.call("LLEN", bench.names.transcript(SESSION)))
    await bench.ask(call="next", view=view, view_end=length)
    await bench.answer("next")
    return bench.scripted.requests[-1].request.messages


# --- through the worker


async def test_three_large_results_fit_after_one_shortening(bench: LLMBench) -> None:  # AC-08
    test = Script("test", [Reply(text="done")], strict=True, window=32_000)
    turn = bench.turn_id
    await bench.write(said("user", "dump it", turn_id=turn), *step("a", "b", "c", size=200_000, turn_id=turn, step=1))
    async with bench.models(test):
        await bench.ask(plan())
        refused = await bench.answer()
        assert refused.error is not None
        assert (refused.error.kind, refused.error.retryable) == (ErrorKind.CONTEXT_OVERFLOW, False)
        await bench.ask(plan(), call="2", compact=True, overflow=True)
        reply = await bench.answer("2")
        assert (reply.error, reply.view) == (None, [(0, 0, 2), (2, 0, 3)])
        messages = await shown(bench, reply)
    assert [len(message.tool_results[0].result) for message in messages[2:]] == [200] * 3
    assert history_fault(messages) is None


async def test_a_refused_view_is_summed_up_with_usage_and_cost(bench: LLMBench) -> None:
    turn = bench.turn_id
    history = [said("user", "u" * 5000, turn_id="old"), said("assistant", "a" * 5000, turn_id="old")]
    asked = said("user", "the task", turn_id=turn)
    await bench.write(*history, asked, *step("a", size=50, turn_id=turn, step=1))
    summarizer = Script("short", [Reply(text=" they spoke ", usage=USAGE)])
    async with bench.models(Script("test", [Reply(text="done")], strict=True), summarizer):
        await bench.ask(plan(summarizer="scripted:short"), compact=True, overflow=True)
        reply = await bench.answer()
        request = bench.scripted.requests[0].request
        messages = await shown(bench, reply)
    assert (reply.error, reply.view) == (None, [(2, 0, 1), (0, 2, 5)])
    assert (reply.usage, reply.model) == (USAGE, "scripted:short")
    assert reply.cost == Cost(
        input=Decimal("0.0001"), output=Decimal("0.0001"), total=Decimal("0.0002"), source="settings"
    )
    assert (request.system, request.tools, len(request.messages)) == (INSTRUCTIONS, [], 1)
    assert request.messages[0].content == f"[user]\n{'u' * 5000}\n\n[assistant]\n{'a' * 5000}"
    assert messages[0].text.endswith("\n\nthey spoke")
    assert messages[1] == asked
    assert history_fault(messages) is None


async def test_a_second_shortening_keeps_what_the_first_left(bench: LLMBench) -> None:
    await bench.write(*[said("user", "u"), *step("a", size=9000), *step("b", size=50), said("user", "now")])
    old = Message(role="tool", content=[ToolResultPart(ToolResult(tool_call_id="a", tool_name="dump", result="short"))])
    await bench.replace(said("user", "gone"), old)
    await bench.write(*step("c", size=9000), *step("d", size=50))
    async with bench.models(Script("test", [Reply(text="done")], strict=True)):
        await bench.ask(plan(), compact=True, overflow=True, view=[(0, 0, 2), (1, 1, 2), (0, 3, 6)], view_end=6)
        reply = await bench.answer()
        messages = await shown(bench, reply)
    assert reply.view == [(0, 0, 2), (1, 1, 2), (0, 3, 7), (2, 0, 1), (0, 8, 10)]
    assert messages[2] == old
    assert [len(str(message.tool_results[0].result)) for message in messages if message.role == "tool"] == [
        5, 50, 200, 50,
    ]  # fmt: skip


async def test_nothing_left_to_shorten_is_an_overflow_that_says_so(bench: LLMBench) -> None:  # AC-08
    await bench.write(said("user", "x" * 5000, turn_id=bench.turn_id))
    async with bench.models(Script("short", [Reply(text="never")])):
        await bench.ask(plan(summarizer="scripted:short"), compact=True, overflow=True)
        reply = await bench.answer()
    assert reply.error is not None
    assert reply.error.kind == ErrorKind.CONTEXT_OVERFLOW
    assert "nothing is left to shorten" in reply.error.message
    assert (reply.view, reply.usage, len(bench.scripted.requests)) == (None, None, 0)


async def test_a_summary_that_is_no_shorter_is_none(bench: LLMBench) -> None:
    await bench.write(said("user", "u" * 100), said("assistant", "a" * 100), said("user", "now", turn_id=bench.turn_id))
    async with bench.models(Script("short", [Reply(text="s" * 5000, usage=USAGE)])):
        await bench.ask(plan(summarizer="scripted:short"), compact=True, overflow=True)
        reply = await bench.answer()
    assert reply.error is not None
    assert (reply.error.kind, reply.view, reply.usage) == (ErrorKind.CONTEXT_OVERFLOW, None, USAGE)


async def test_a_summarizer_that_fails_leaves_what_trimming_did(bench: LLMBench) -> None:
    error = ErrorInfo(kind=ErrorKind.AUTHENTICATION, message="no key")
    history = [said("user", "u" * 9000), *step("a", size=2000), said("assistant", "x"), said("user", "now")]
    summarizer = Script("short", [Reply(error=error)])
    policy = plan(summarizer="scripted:short")
    await bench.write(*history)
    async with bench.models(Script("test", [Reply(text="done")]), summarizer):
        await bench.ask(policy, compact=True, overflow=True)
        reply = await bench.answer()
        assert (reply.error, reply.view) == (None, [(0, 0, 2), (2, 0, 1), (0, 3, 5)])
    await bench.engine.call("DEL", bench.names.transcript(SESSION))
    await bench.write(said("user", "u" * 9000), said("assistant", "x"), said("user", "now"))
    async with bench.models(summarizer):
        await bench.ask(policy, call="2", compact=True, overflow=True)
        assert (await bench.answer("2")).error == error
    async with bench.models():
        await bench.ask(plan(summarizer="openai:small"), call="3", compact=True, overflow=True)
        missing = (await bench.answer("3")).error
    assert missing is not None
    assert "no provider for the model 'openai:small'" in missing.message


async def test_a_stopped_summary_tells_what_it_cost_so_far(bench: LLMBench) -> None:  # AC-53
    """The window of the summarizer makes halves of the conversation: the first is summed up, then the turn is stopped."""
    reached = asyncio.Event()

    async def reply(request: ProviderRequest) -> Reply:
        if "[summary of what came before]" in request.messages[0].text:
            reached.set()
            await asyncio.Event().wait()
        return Reply(text="half", usage=USAGE)

    await bench.write(said("user", "u" * 5000), said("assistant", "a" * 5000), said("user", "now"))
    async with bench.models(Script("short", reply, window=8000)):
        await bench.ask(plan(summarizer="scripted:short"), compact=True, overflow=True)
        await reached.wait()
        await bench.stop_turn(bench.turn_id, "enough")
        answer = await bench.answer()
    assert answer.error == ErrorInfo(kind=ErrorKind.ABORTED, message="enough")
    assert (answer.usage, answer.model, answer.message) == (USAGE, "scripted:short", None)


# --- the summarizer alone


class Model:
    """Gives its answers in order: texts, or errors; refuses what is longer than `window`."""

    def __init__(self, *answers: Any, window: int = 10**9) -> None:
        self.answers = list(answers)
        self.window = window
        self.asked: list[str] = []

    async def __call__(self, request: ProviderRequest) -> Completed:
        text = request.messages[0].text
        if len(text) > self.window:
            raise ProviderError(OVERFLOW)
        self.asked.append(text)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ErrorInfo):
            raise ProviderError(answer)
        return Completed(message=Message(role="assistant", content=answer), finish_reason="stop")

    def summarizer(self, **options: Any) -> Summarizer:
        return Summarizer(
            self, ProviderRequest(model="short", messages=[]), RetryPolicy(initial_delay_seconds=0), **options
        )


async def test_everything_is_told_as_text() -> None:
    call = ToolCall(id="a", name="dump", arguments={"day": 1})
    result = ToolResult(
        tool_call_id="a", tool_name="dump", content=[TextPart("t" * 500), ImagePart(media_type="image/png", url="x")]
    )
    model = Model("short")
    messages = [
        said("user", "older", metadata={"turnmill": "summary"}),
        Message(role="user", content=[TextPart("look"), ImagePart(url="https://example.com/a.png")]),
        Message(role="assistant", content=[ReasoningPart(text="secret"), TextPart("I dump."), ToolCallPart(call)]),
        Message(role="tool", content=[ToolResultPart(result)]),
        Message(
            role="tool",
            content=[ToolResultPart(ToolResult(tool_call_id="b", tool_name="x", result={"a": 1}, is_error=True))],
        ),
    ]
    assert await model.summarizer().sum_up(messages, 100) == "short"
    (text,) = model.asked
    assert text.startswith(
        "[summary of what came before]\nolder\n\n[user]\nlook\n(an image)\n\n"
        '[assistant]\nI dump.\ncalls dump({"day":1})\n\n[tool]\nresult of dump: ttt'
    )
    assert "bytes left out" in text
    assert text.endswith('[tool]\nerror of x: {"a":1}')
    assert "secret" not in text


async def test_what_is_too_long_for_the_summarizer_is_summed_up_in_parts() -> None:
    model = Model("first", "second", "third", "fourth", window=1200)
    messages = [said("user", letter * 900) for letter in "abc"] + [said("user", "d" * 5000)]
    summary = await model.summarizer().sum_up(messages, 100)
    assert summary == "fourth"
    assert [text[-3:] for text in model.asked] == ["aaa", "bbb", "ccc", "ddd"]
    assert [text.split("\n")[1] for text in model.asked[1:]] == ["first", "second", "third"]


async def test_what_is_too_long_even_alone_is_an_overflow() -> None:
    with pytest.raises(ProviderError) as caught:
        await Model("x", window=100).summarizer().sum_up([said("user", "x" * 5000)], 100)
    assert caught.value.info == OVERFLOW


async def test_a_summarizer_is_asked_again_where_that_helps() -> None:
    model = Model(BUSY, BUSY, "at last")
    assert await model.summarizer().sum_up([said("user", "x")], 100) == "at last"
    model = Model(BUSY)
    with pytest.raises(ProviderError):
        await model.summarizer().sum_up([said("user", "x")], 100)
    assert len(model.asked) == 3
    with pytest.raises(ProviderError, match="empty summary"):
        await Model(" ").summarizer().sum_up([said("user", "x")], 100)
