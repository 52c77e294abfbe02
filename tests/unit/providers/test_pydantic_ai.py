"""Models of pydantic-ai: its own test models stand for a provider, so all of its path runs, and no network is touched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("pydantic_ai", reason="the extra pydantic-ai is not installed")

from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ThinkingPart
from pydantic_ai.models.function import AgentInfo, DeltaThinkingPart, DeltaToolCall, FunctionModel

from turnmill.protocol.content import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from turnmill.protocol.specs import Reasoning, ToolSpec
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.pydantic_ai_model import PydanticAIProvider

WEATHER = ToolSpec(
    name="weather", schema={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
TALK = [
    Message(role="user", content=[TextPart("Weather?"), ImagePart(data=b"img", media_type="image/png")]),
    Message(role="assistant", content=[ToolCallPart(ToolCall(id="c1", name="weather", arguments={"city": "Oslo"}))]),
    Message(
        role="tool",
        content=[ToolResultPart(ToolResult(tool_call_id="c1", tool_name="weather", result={"degrees": 4}))],
    ),
]


async def run(provider: PydanticAIProvider, **fields: Any) -> tuple[list[Any], Completed]:
    request = ProviderRequest(**{"model": "test", "messages": [Message(role="user", content="hi")], **fields})
    items = [item async for item in provider.stream(request)]
    assert isinstance(items[-1], Completed)
    return items[:-1], items[-1]


def playing(function: Any) -> PydanticAIProvider:
    provider = PydanticAIProvider()
    provider._models["test"] = FunctionModel(stream_function=function)
    return provider


async def test_a_model_by_its_name_answers_and_calls() -> None:
    live, completed = await run(PydanticAIProvider(), tools=[WEATHER])
    assert [type(item) for item in live] == [ToolCallStarted, ToolCallDelta]
    (call,) = completed.message.tool_calls
    assert (call.name, completed.finish_reason) == ("weather", "tool_calls") and "city" in call.arguments
    live, completed = await run(PydanticAIProvider())
    assert "".join(item.text for item in live if isinstance(item, TextDelta)) == completed.message.text != ""
    assert completed.usage is not None and completed.usage.input_tokens > 0
    assert completed.finish_reason == "stop"


async def test_the_conversation_reaches_the_model() -> None:
    seen: list[list[ModelMessage]] = []

    async def play(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        seen.append(messages)
        yield "4 "
        yield "degrees"

    live, completed = await run(playing(play), messages=TALK, system="Be brief.")
    assert [item.text for item in live] == ["4 ", "degrees"] and completed.message.text == "4 degrees"
    kinds = [part.part_kind for message in seen[0] for part in message.parts]
    assert kinds == ["system-prompt", "user-prompt", "tool-call", "tool-return"]
    assert seen[0][2].parts[0].content == {"degrees": 4}  # type: ignore[union-attr]


async def test_thoughts_are_kept_and_sent_back() -> None:
    """LC-11, AC-09."""
    seen: list[Any] = []

    async def play(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        seen.extend(part for message in messages for part in message.parts if isinstance(part, ThinkingPart))
        yield {0: DeltaThinkingPart(content="hm ", signature="sig")}
        yield {1: DeltaToolCall(name="weather", json_args='{"city":', tool_call_id="c9")}
        yield {1: DeltaToolCall(json_args='"Rome"}')}

    provider = playing(play)
    live, completed = await run(provider, tools=[WEATHER])
    assert [item.text for item in live if isinstance(item, ReasoningDelta)] == ["hm "]
    assert "".join(item.arguments_delta or "" for item in live if isinstance(item, ToolCallDelta)) == '{"city":"Rome"}'
    assert completed.message.tool_calls[0].arguments == {"city": "Rome"}
    assert seen == []
    asked = [*TALK[:1], completed.message, Message(role="user", content="again")]
    await run(provider, messages=asked, tools=[WEATHER])
    assert [(part.content, part.signature) for part in seen] == [("hm ", "sig")]


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (429, {"error": {"message": "slow down"}}, "rate_limited", True),
        (503, "closed", "overloaded", True),
        (401, {"error": {"message": "who?"}}, "authentication", False),
    ],
)
async def test_errors_have_our_words(status: int, body: Any, kind: str, retryable: bool) -> None:
    async def play(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        if messages:
            raise ModelHTTPError(status, "test", body)
        yield ""

    with pytest.raises(ProviderError) as failed:
        await run(playing(play))
    assert (failed.value.info.kind, failed.value.info.retryable) == (kind, retryable)


async def test_a_model_that_it_does_not_know() -> None:
    with pytest.raises(ProviderError) as failed:
        await run(PydanticAIProvider(), model="nobody:nothing")
    assert failed.value.info.kind == "bad_request" and not failed.value.info.retryable


async def test_an_effort_and_no_budget() -> None:
    with pytest.raises(ProviderError, match="effort"):
        await run(PydanticAIProvider(), reasoning=Reasoning(budget_tokens=5))
