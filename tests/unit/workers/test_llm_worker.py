"""The LLM worker on a real engine: stopped and failed calls, costs, structured output, what the conversation is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

from support.llm_bench import LLMBench, agent_plan
from support.providers import openai_chat
from support.replay_server import Answer, ReplayServer
from support.waiting import wait_until_async
from turnmill.protocol.blobs import with_blobs
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
from turnmill.protocol.settings import ModelCapabilities, ModelPrice
from turnmill.protocol.specs import OutputSpec, Reasoning, ToolSpec
from turnmill.workers.providers.base import ProviderError, ProviderRequest, Streamed
from turnmill.workers.providers.http_client import HttpClient
from turnmill.workers.providers.scripted import Call, Reply, Script

USER = Message(role="user", content="Weather?")
USAGE = Usage(input_tokens=1_000, output_tokens=50, total_tokens=1_050)
PRICED = {"scripted:test": ModelPrice(input=Decimal(2), output=Decimal(10))}
COST = Cost(input=Decimal("0.002"), output=Decimal("0.0005"), total=Decimal("0.0025"), source="settings")


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
def bench(engine: Engine, namespace: str) -> LLMBench:
    return LLMBench(engine, namespace, prices=PRICED)


class Talker:
    """A provider that says the given things, then waits for ever; `closed` is set when its stream is closed."""

    def __init__(self, *said: Any) -> None:
        self.said = said
        self.waits = asyncio.Event()
        self.closed = asyncio.Event()

    async def stream(self, request: ProviderRequest) -> AsyncIterator[Streamed]:
        try:
            for item in self.said:
                if isinstance(item, ProviderError):
                    raise item
                yield item
            self.waits.set()
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def close(self) -> None:
        pass


# --- stopped calls


async def test_a_stopped_call_tells_what_had_come_and_what_it_cost(bench: LLMBench) -> None:  # AC-42, AC-53
    reply = Reply(
        reasoning="hm",
        chunks=[f"{number} " for number in range(2000)],
        tool_calls=[Call("weather")],
        usage=USAGE,
        usage_after_chunks=20,
        delay_seconds=0.005,
    )
    await bench.write(USER)
    async with bench.models(Script("test", [reply])):
        await bench.ask()

        async def spoken() -> bool:
            return "49 " in "".join(getattr(event, "text", None) or "" for event in await bench.published())

        await wait_until_async(spoken)
        began = time.monotonic()
        await bench.stop_turn(bench.turn_id, "enough")
        answer = await bench.answer()
        took = time.monotonic() - began
        (recorded,) = bench.scripted.requests
    assert answer.error == ErrorInfo(kind=ErrorKind.ABORTED, message="enough")
    assert answer.message is not None
    assert answer.message.text.startswith("0 1 2 ")
    assert (answer.message.tool_calls, answer.message.reasoning) == ([], [])
    assert (answer.usage, answer.cost, answer.model) == (USAGE, COST, "scripted:test")
    assert recorded.outcome in ("cancelled", "closed")
    assert took < 1.0


async def test_stopping_closes_the_providers_connection(bench: LLMBench) -> None:  # AC-03, AC-42
    chunk = b'data: {"choices":[{"delta":{"content":"Hello"}}],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
    client = HttpClient()
    await bench.write(USER)
    async with ReplayServer() as server, bench.models(openai=openai_chat(server.url, None, client)):
        server.reply(Answer(chunks=[chunk], ending="stay_open"))
        await bench.ask(agent_plan("openai:mine"))
        await wait_until_async(bench.published)
        await bench.stop_turn(bench.turn_id)
        await asyncio.wait_for(server.requests[0].closed.wait(), 5)
        answer = await bench.answer()
    await client.close()
    assert answer.message is not None
    assert answer.message.content == "Hello"
    assert answer.usage == Usage(input_tokens=7, output_tokens=1, total_tokens=8)
    assert answer.cost is None


async def test_a_call_that_was_stopped_before_a_word_has_no_message(bench: LLMBench) -> None:  # AC-53
    talker = Talker()
    await bench.write(USER)
    async with bench.models(slow=talker):
        await bench.ask(agent_plan("slow:x"))
        await talker.waits.wait()
        await bench.stop_turn(bench.turn_id)
        answer = await bench.answer()
    assert talker.closed.is_set()
    assert (answer.message, answer.usage, answer.cost, answer.model) == (None, None, None, "slow:x")


# --- failed calls, costs


async def test_a_failed_attempt_tells_what_it_used(bench: LLMBench) -> None:  # AC-53, LC-14
    error = ErrorInfo(kind=ErrorKind.OVERLOADED, message="busy", retryable=True)
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text="half", usage=USAGE, error=error, error_after_chunks=1)])):
        await bench.ask()
        answer = await bench.answer()
    assert (answer.error, answer.message) == (error, None)
    assert (answer.usage, answer.cost, answer.model) == (USAGE, COST, "scripted:test")


async def test_what_was_told_in_mid_stream_is_kept_where_the_error_says_nothing(bench: LLMBench) -> None:  # AC-53
    error = ProviderError(ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message="gone", retryable=True))
    cost = Cost(total=Decimal("0.5"), source="provider")
    await bench.write(USER)
    async with bench.models(odd=Talker(Usage(input_tokens=1), USAGE, cost, error)):
        await bench.ask(agent_plan("odd:x"))
        answer = await bench.answer()
    assert (answer.error, answer.usage, answer.cost) == (error.info, USAGE, cost)


async def test_a_call_past_its_deadline_tells_what_it_used(bench: LLMBench) -> None:
    talker = Talker(USAGE)
    await bench.write(USER)
    async with bench.models(slow=talker) as worker:
        await bench.ask(agent_plan("slow:x"), deadline_ms=worker.consumer.clock.now_ms() + 300)
        answer = await bench.answer()
    assert answer.error is not None
    assert (answer.error.kind, answer.error.retryable, answer.usage) == (ErrorKind.TIMEOUT, True, USAGE)
    assert answer.message is None
    assert talker.closed.is_set()


async def test_the_providers_own_cost_wins(bench: LLMBench) -> None:  # LC-14
    told = Cost(total=Decimal("0.01"), source="provider")
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text="a", usage=USAGE, cost=told)])):
        await bench.ask()
        answer = await bench.answer()
    assert (answer.cost, answer.usage) == (told, USAGE)


async def test_cost_by_price_or_none(bench: LLMBench) -> None:  # LC-14
    scripts = [Script("test", [Reply(text="a", usage=USAGE)]), Script("free", [Reply(text="a", usage=USAGE)])]
    await bench.write(USER)
    async with bench.models(*scripts):
        await bench.ask()
        assert (await bench.answer()).cost == COST
        await bench.ask(agent_plan("scripted:free"), call="2")
        assert (await bench.answer("2")).cost is None


async def test_a_model_without_a_provider_says_what_there_is(bench: LLMBench) -> None:
    await bench.write(USER)
    async with bench.models():
        await bench.ask(agent_plan("openai:x"))
        answer = await bench.answer()
    assert answer.error is not None
    assert answer.error.kind == ErrorKind.BAD_REQUEST
    assert "no provider for the model 'openai:x'; it has: scripted" in answer.error.message


# --- what a model is asked


async def test_the_conversation_is_the_view_the_rest_and_what_hooks_put_between(bench: LLMBench) -> None:
    transcript = [Message(role="user", content=f"entry {number}") for number in range(6)]
    await bench.write(*transcript)
    await bench.replace(Message(role="user", content="old"), Message(role="user", content="summary"))
    injected = [Message(role="system", content="hint")]
    async with bench.models(Script("test", [Reply(text="a")])):
        await bench.ask(view=[(1, 1, 2), (0, 2, 3)], view_end=4, injected=injected, inject_at=5)
        await bench.answer()
        (recorded,) = bench.scripted.requests
    assert [message.content for message in recorded.request.messages] == [
        "summary", "entry 2", "entry 4", "hint", "entry 5",
    ]  # fmt: skip


async def test_large_values_are_in_their_places(bench: LLMBench) -> None:  # AC-39
    call = ToolCall(id="a", name="tool")
    result = ToolResult(tool_call_id="a", tool_name="tool", result="x" * 5000)
    message = Message(role="tool", content=[ToolResultPart(result)])
    stored = await with_blobs(bench.engine, bench.names, message, 1000)
    assert stored.tool_results[0].blob is not None
    await bench.write(USER, Message(role="assistant", content=[ToolCallPart(call)]), stored)
    async with bench.models(Script("test", [Reply(text="a")], strict=True)):
        await bench.ask()
        await bench.answer()
        assert bench.scripted.requests[0].request.messages[-1] == message


async def test_reasoning_comes_back_byte_equal_after_a_restart(bench: LLMBench) -> None:  # AC-09, LC-11
    parts: list[Any] = [
        ReasoningPart(text="hm", provider="scripted", data={"signature": "c2ln/+=="}),
        ReasoningPart(provider="scripted", data={"type": "redacted_thinking", "data": "b3BhcXVl"}),
        ReasoningPart(provider="scripted", data={"signature": "alone"}),
    ]
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text="first", reasoning=parts)])):
        await bench.ask()
        answer = await bench.answer()
    assert answer.message is not None
    assert answer.message.content == [*parts, TextPart("first")]
    await bench.write(answer.message, USER)
    async with bench.models(Script("test", [Reply(text="second")])):
        await bench.ask(call="2")
        await bench.answer("2")
        assert bench.scripted.requests[0].request.messages[1] == answer.message


async def test_reasoning_and_output_are_asked_for(bench: LLMBench) -> None:  # LC-16
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    reasoning = Reasoning(effort="high")
    plan = agent_plan(reasoning=reasoning, output=OutputSpec(schema=schema, name="place"))
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text='{"city": "Oslo"}')])):
        await bench.ask(plan)
        answer = await bench.answer()
        request = bench.scripted.requests[0].request
    assert (request.reasoning, request.output_schema, request.output_name) == (reasoning, schema, "place")
    assert (answer.error, answer.output_error) == (None, None)


async def test_an_answer_that_does_not_fit_is_told_and_calls_are_none(bench: LLMBench) -> None:  # LC-16
    schema = {"type": "object", "required": ["city"]}
    plan = agent_plan(tools=[ToolSpec(name="weather")], output=OutputSpec(schema=schema))
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text="Oslo")])):
        await bench.ask(plan)
        answer = await bench.answer()
    assert answer.message == Message(role="assistant", content="Oslo")
    assert (answer.output_error or "").startswith("not JSON")
    async with bench.models(Script("test", [Reply(text="wait", tool_calls=[Call("weather")])])):
        await bench.ask(plan, call="2")
        assert (await bench.answer("2")).output_error is None


async def test_a_schema_that_is_none_fails_the_call(bench: LLMBench) -> None:
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text="a")])):
        await bench.ask(agent_plan(output=OutputSpec(schema={"type": "nonsense"})))
        answer = await bench.answer()
    assert answer.error is not None
    assert answer.error.kind == ErrorKind.BAD_REQUEST


async def test_a_plain_call_reads_its_conversation_at_once(bench: LLMBench) -> None:
    """One read of the transcript, and nothing else, once the plan is known."""
    await bench.write(USER)
    async with bench.models(Script("test", [Reply(text="a", usage=USAGE)])):
        await bench.ask()
        await bench.answer()
        asked: list[str] = []
        call = bench.engine.call

        def watched(*arguments: Any, **options: Any) -> Any:
            asked.append(str(arguments[0]))
            return call(*arguments, **options)

        bench.engine.call = watched  # type: ignore[method-assign]
        task = await bench.ask(call="2")
        await bench.answer("2")
        bench.engine.call = call  # type: ignore[method-assign]
    assert task.plan
    assert asked.count("LRANGE") == 1
    assert not {"GET", "MGET"} & set(asked)


async def test_an_image_is_not_sent_to_a_model_that_takes_none(engine: Engine, namespace: str) -> None:
    """The provider is not asked, and the error says which setting says so."""
    bench = LLMBench(engine, namespace, models={"scripted:test": ModelCapabilities(images=False)})
    await bench.write(Message(role="user", content=[TextPart("What is this?"), ImagePart(url="https://x.example/1")]))
    async with bench.models(Script("test", [Reply(text="A cat.")])):
        await bench.ask()
        answer = await bench.answer()
        assert answer.error is not None
        assert (answer.error.kind, answer.error.retryable) == (ErrorKind.BAD_REQUEST, False)
        assert "takes no images" in answer.error.message
        assert not bench.scripted.requests
