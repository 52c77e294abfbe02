"""Model functions of the application, and the provider that serves them."""

import asyncio
import re
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

from turnmill.protocol.content import (
    Cost,
    ErrorInfo,
    FilePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    Usage,
)
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from turnmill.protocol.specs import ToolSpec
from turnmill.workers.models import HostModel, ModelRequest, model, reasoning, tool_call
from turnmill.workers.providers.base import Completed, ProviderError
from turnmill.workers.providers.host import HostProvider

REQUEST = ModelRequest(
    model="test", messages=[Message(role="user", content="Oslo")], tools=[ToolSpec(name="weather")], step_number=2
)


async def stream(made: HostModel, request: ModelRequest = REQUEST) -> list[Any]:
    return [event async for event in HostProvider([made]).stream(request)]


async def failure(made: HostModel) -> ErrorInfo:
    with pytest.raises(ProviderError) as caught:
        await stream(made)
    return caught.value.info


def returning(value: Any) -> HostModel:
    @model("test")
    async def answer(request: ModelRequest) -> Any:
        return value

    return answer


async def test_a_generator_of_text_is_streamed_as_it_comes() -> None:  # AE-14
    @model("test")
    async def echo(request: ModelRequest) -> AsyncIterator[str]:
        yield "You said: "
        yield ""
        yield request.messages[-1].text

    assert await stream(echo) == [
        TextDelta(text="You said: ", step_number=2),
        TextDelta(text="Oslo", step_number=2),
        Completed(message=Message(role="assistant", content="You said: Oslo"), finish_reason="stop"),
    ]


async def test_the_function_is_called_once_with_transcript_and_tools() -> None:  # AE-14
    seen: list[ModelRequest] = []

    @model("test")
    async def watch(request: ModelRequest) -> str:
        seen.append(request)
        return ""

    assert await stream(watch) == [Completed(message=Message(role="assistant", content=""), finish_reason="stop")]
    assert seen == [REQUEST]


async def test_reasoning_text_and_calls_keep_the_order_in_which_they_began() -> None:
    @model("test")
    async def think(request: ModelRequest) -> AsyncIterator[Any]:
        yield reasoning("Look ")
        yield reasoning("it up.")
        yield ReasoningDelta(kind="signature", data={"signature": "s"})
        yield "One moment"
        yield "."
        yield tool_call("weather", city="Oslo")
        yield ToolCall(id="mine", name="weather", arguments={"city": "Bergen"})
        yield Usage(input_tokens=3)

    events = await stream(think)
    assert events[2] == ReasoningDelta(kind="signature", data={"signature": "s"}, step_number=2)
    assert events[-2] == Usage(input_tokens=3)
    assert events[-6:-2] == [
        ToolCallStarted(step_number=2, index=0, tool_call_id="call_1_0", name="weather"),
        ToolCallDelta(step_number=2, index=0, tool_call_id="call_1_0", arguments_delta='{"city":"Oslo"}'),
        ToolCallStarted(step_number=2, index=1, tool_call_id="mine", name="weather"),
        ToolCallDelta(step_number=2, index=1, tool_call_id="mine", arguments_delta='{"city":"Bergen"}'),
    ]
    assert events[-1] == Completed(
        message=Message(
            role="assistant",
            content=[
                ReasoningPart(text="Look it up.", data={"signature": "s"}),
                TextPart("One moment."),
                ToolCallPart(ToolCall(id="call_1_0", name="weather", arguments={"city": "Oslo"})),
                ToolCallPart(ToolCall(id="mine", name="weather", arguments={"city": "Bergen"})),
            ],
        ),
        finish_reason="tool_calls",
        usage=Usage(input_tokens=3),
    )


async def test_a_function_may_return_its_answer_at_once() -> None:
    call = ToolCall(id="a", name="weather")
    assert (await stream(returning("4 degrees")))[-1].message.content == "4 degrees"
    assert (await stream(returning(call)))[-1].message.tool_calls == [call]
    assert (await stream(returning(["Wait.", call])))[-1].message.content == [TextPart("Wait."), ToolCallPart(call)]


async def test_a_returned_message_is_kept_whole() -> None:
    message = Message(
        role="assistant",
        content=[ReasoningPart(text="hm", provider="x", data={"s": 1}), FilePart(url="file:///a"), TextPart("done")],
        metadata={"id": 7},
    )
    given = Message(
        role="assistant",
        content=message.content,
        metadata=message.metadata,
        usage=Usage(output_tokens=1),
        finish_reason="length",
    )
    events = await stream(returning(given))
    assert events == [
        ReasoningDelta(kind="delta", text="hm", provider="x", data={"s": 1}, step_number=2),
        TextDelta(text="done", step_number=2),
        Completed(message=message, finish_reason="length", usage=Usage(output_tokens=1)),
    ]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no idea"), "no idea"),
        (ValueError(), "ValueError"),
        (SystemExit(1), "1"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
async def test_what_a_function_raises_is_a_provider_error(error: BaseException, text: str) -> None:  # AE-14
    @model("test")
    async def plain(request: ModelRequest) -> str:
        raise error

    @model("test")
    async def streaming(request: ModelRequest) -> AsyncIterator[str]:
        yield "a"
        raise error

    for made in (plain, streaming):
        assert await failure(made) == ErrorInfo(
            kind="provider_error", message=f"model function 'test' failed: {text}", retryable=False
        )


async def test_a_function_may_raise_a_provider_error_of_its_own() -> None:
    info = ErrorInfo(kind="rate_limited", message="slow down", retryable=True, retry_after_seconds=1.0)

    @model("test")
    async def busy(request: ModelRequest) -> str:
        raise ProviderError(info)

    assert await failure(busy) == info


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "it gave a int"),
        ([None], "it gave a NoneType"),
        (Message(role="user", content="x"), "role 'user'"),
    ],
)
async def test_an_answer_of_another_kind_is_a_provider_error(value: Any, text: str) -> None:
    assert text in (await failure(returning(value))).message


async def test_an_unknown_model_is_named_with_those_there_are() -> None:
    with pytest.raises(ProviderError, match=r"no model function 'test' .* Available: none"):
        await anext(aiter(HostProvider([]).stream(REQUEST)))


async def test_closing_the_stream_closes_the_function() -> None:
    closed: list[bool] = []

    @model("test")
    async def endless(request: ModelRequest) -> AsyncIterator[str]:
        try:
            while True:
                yield "more"
        finally:
            closed.append(True)

    opened: Any = HostProvider([endless]).stream(REQUEST)
    assert await anext(opened) == TextDelta(text="more", step_number=2)
    await opened.aclose()
    assert closed == [True]


async def test_a_cancellation_from_outside_passes_through() -> None:
    running = asyncio.Event()

    @model("test")
    async def wait(request: ModelRequest) -> str:
        running.set()
        await asyncio.Event().wait()
        return ""

    task = asyncio.create_task(stream(wait))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_model_can_be_called_as_its_function() -> None:
    assert await returning("4 degrees")(REQUEST) == "4 degrees"


async def async_function(request: ModelRequest) -> str:
    return ""


async def without_parameter() -> str:
    return ""


def sync_function(request: ModelRequest) -> str:
    return ""


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("two words", async_function, "no name for a model"),
        (async_function, async_function, "needs a name"),
        ("test", sync_function, "must be an `async def`"),
        ("test", without_parameter, "must take one argument"),
    ],
)
def test_a_function_that_cannot_be_a_model_is_refused(name: Any, function: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        model(name)(function)


async def test_a_function_may_answer_with_a_dict() -> None:  # AE-14
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    answer = {"content": "Wait.", "tool_calls": [call, {"id": "mine", "name": "weather"}], "usage": {"input_tokens": 3}}
    completed = (await stream(returning(answer)))[-1]
    assert completed == Completed(
        message=Message(
            role="assistant",
            content=[
                TextPart("Wait."),
                ToolCallPart(ToolCall(id="call_1_0", name="weather", arguments={"city": "Oslo"})),
                ToolCallPart(ToolCall(id="mine", name="weather")),
            ],
        ),
        finish_reason="tool_calls",
        usage=Usage(input_tokens=3),
    )
    text = (await stream(returning({"content": "4 degrees", "tool_calls": None})))[-1]
    assert (text.message.content, text.finish_reason) == ("4 degrees", "stop")
    nothing = (await stream(returning({"content": None, "tool_calls": []})))[-1]
    assert nothing.message.content == ""


async def test_a_generator_may_yield_a_dict_and_calls_as_the_api_has_them() -> None:  # AE-14
    @model("test")
    async def answer(request: ModelRequest) -> AsyncIterator[Any]:
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        yield {"content": "Wait.", "tool_calls": [{"id": "a", "type": "function", "function": function}]}

    completed = (await stream(answer))[-1]
    assert completed.message.tool_calls == [ToolCall(id="a", name="weather", arguments={"city": "Oslo"})]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"text": "x"}, "unknown field `text`"),
        ({"content": 5}, r"\$\.content"),
        ({"tool_calls": [{"arguments": {}}]}, "a tool call without a name"),
        ({"role": "user", "content": "x"}, r"\$\.role"),
    ],
)
async def test_a_dict_that_is_no_answer_is_refused(answer: dict[str, Any], said: str) -> None:
    info = await failure(returning(answer))
    assert info.kind == "provider_error"
    assert re.search(said, info.message), info.message


async def test_arguments_that_are_no_object_are_told_to_the_model() -> None:
    calls = [{"name": "weather", "arguments": "{"}, {"name": "weather", "arguments": [1]}]
    (first, second) = (await stream(returning({"tool_calls": calls})))[-1].message.tool_calls
    assert (first.error or "").startswith("the arguments are no JSON object")
    assert second.error == "the arguments are no JSON object"


async def test_usage_and_cost_are_told_as_they_come() -> None:  # LC-14
    cost = Cost(total=Decimal("0.1"), source="provider")

    @model("test")
    async def answer(request: ModelRequest) -> AsyncIterator[Any]:
        yield Usage(input_tokens=3)
        yield "hi"
        yield cost

    *events, completed = await stream(answer)
    assert events == [Usage(input_tokens=3), TextDelta(text="hi", step_number=2), cost]
    assert (completed.usage, completed.cost) == (Usage(input_tokens=3), cost)
