"""OpenAI-compatible chat: structured output and reasoning in the request; usage, cost and provider state in the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict

from support.providers import openai_chat
from support.replay_server import Answer, ReplayServer
from turnmill.protocol.content import (
    Cost,
    Message,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import TextDelta
from turnmill.protocol.specs import Reasoning
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.body_reader import BodyReader
from turnmill.workers.providers.format import Endpoint
from turnmill.workers.providers.http_client import HttpClient
from turnmill.workers.providers.http_provider import HttpProvider
from turnmill.workers.providers.openai_chat import OpenAIChat
from turnmill.workers.providers.openai_chat_chunks import read_cost
from turnmill.workers.providers.openai_chat_dialects import dialect_of
from turnmill.workers.providers.openai_chat_reply import Reply
from turnmill.workers.providers.openai_chat_request import build_body, build_messages, is_enforceable

USER = Message(role="user", content="Hello")
USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


def request(**fields: Any) -> ProviderRequest:
    return ProviderRequest(**{"model": "m", "messages": [USER], **fields})


def body(**fields: Any) -> dict[str, Any]:
    return build_body(request(**fields), "openai")


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str
    degrees: list[int] | None


class Loose(BaseModel):
    city: str = "Oslo"


# --- structured output


def test_the_schema_of_an_answer_is_asked_for() -> None:  # LC-16
    schema = Loose.model_json_schema()
    assert body(output_schema=schema, output_name="Loose")["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "Loose", "schema": schema},
    }
    assert "response_format" not in body()


def test_it_is_enforced_where_the_schema_allows_it() -> None:  # LC-16
    schema = Weather.model_json_schema()
    assert body(output_schema=schema)["response_format"]["json_schema"] == {
        "name": "response", "schema": schema, "strict": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "enforceable"),
    [
        (Weather.model_json_schema(), True),
        (Loose.model_json_schema(), False),
        ({"type": "object", "properties": {}, "additionalProperties": False}, True),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}, False),
        ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"], "additionalProperties": False}, False),
        ({"type": "array", "items": {"type": "object"}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"type": "object"}, False),
    ],
)
def test_which_schemas_can_be_enforced(schema: dict[str, Any], enforceable: bool) -> None:
    assert is_enforceable(schema) is enforceable


def test_an_option_replaces_the_response_format() -> None:
    """For servers that know nothing but `json_object`; the answer is validated all the same."""
    options = {"response_format": {"type": "json_object"}}
    assert body(output_schema={"type": "object"}, options=options)["response_format"] == {"type": "json_object"}


# --- reasoning


def test_an_effort_is_asked_for() -> None:
    assert body(reasoning=Reasoning(effort="minimal"))["reasoning_effort"] == "minimal"
    assert body(reasoning=Reasoning(effort="low", budget_tokens=100))["reasoning_effort"] == "low"
    assert "reasoning_effort" not in body()


@pytest.mark.parametrize("option", [{"reasoning_effort": "low"}, {"reasoning": {"max_tokens": 100}}])
def test_reasoning_that_is_set_twice_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ProviderError, match=f"set twice.*provider_options.*{next(iter(option))}") as caught:
        body(reasoning=Reasoning(effort="high"), options=option)
    assert (caught.value.info.kind, caught.value.info.retryable) == (ErrorKind.BAD_REQUEST, False)
    assert body(reasoning=Reasoning(effort="high"), options={"reasoning": None})["reasoning_effort"] == "high"


def test_a_budget_of_tokens_is_refused_with_what_to_do() -> None:
    with pytest.raises(ProviderError, match="takes an effort") as caught:
        body(reasoning=Reasoning(budget_tokens=2000))
    assert caught.value.info.kind == ErrorKind.BAD_REQUEST


# --- usage and cost


@pytest.fixture
async def provider() -> AsyncIterator[tuple[ReplayServer, HttpProvider]]:
    client = HttpClient()
    async with ReplayServer() as server:
        yield server, openai_chat(server.url, None, client)
    await client.close()


def chunk(**fields: Any) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def delta(text: str, finish: str | None = None, **fields: Any) -> bytes:
    return chunk(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **fields)


async def test_usage_in_mid_stream_is_told_at_once(provider: tuple[ReplayServer, HttpProvider]) -> None:  # AC-53
    server, model = provider
    chunks = [
        delta("a", usage=USAGE),
        delta("b", usage={**USAGE, "completion_tokens": 3, "cost": 0.25}),
        delta("", "stop"),
        chunk(choices=[], usage={**USAGE, "completion_tokens": 4}),
        b"data: [DONE]\n\n",
    ]
    gates = {1: asyncio.Event(), 2: asyncio.Event()}  # or several chunks may be read as one
    server.reply(Answer(chunks=[chunks[0], chunks[1], b"".join(chunks[2:])], gates=gates))
    cost = Cost(total=Decimal("0.25"), source="provider")
    events: list[Any] = []
    async for event in model.stream(request()):
        events.append(event)
        if isinstance(event, Usage):
            gates[sum(isinstance(each, Usage) for each in events)].set()
    assert events[:5] == [
        TextDelta(text="a", step_number=1),
        Usage(input_tokens=7, output_tokens=2, total_tokens=9),
        TextDelta(text="b", step_number=1),
        Usage(input_tokens=7, output_tokens=3, total_tokens=10),
        cost,
    ]
    assert isinstance(events[5], Completed)
    assert (events[5].usage, events[5].cost, len(events)) == (
        Usage(input_tokens=7, output_tokens=4, total_tokens=11), cost, 6,
    )  # fmt: skip


async def test_usage_is_told_before_an_error(provider: tuple[ReplayServer, HttpProvider]) -> None:  # AC-53
    server, model = provider
    server.reply(Answer(chunks=[delta("a", "error", usage=USAGE)]))
    events: list[Any] = []
    with pytest.raises(ProviderError):
        async for event in model.stream(request()):
            events.append(event)
    assert events[1:] == [Usage(input_tokens=7, output_tokens=2, total_tokens=9)]


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"cost": 0.00014}, Cost(total=Decimal("0.00014"), source="provider")),
        ({"cost": 0}, Cost(total=Decimal(0), source="provider")),
        ({"cost": "1e-7"}, Cost(total=Decimal("1e-7"), source="provider")),
        (
            {"cost": {"input_tokens_cost": 0.1, "output_tokens_cost": 0.2, "total_cost": 0.3}},
            Cost(input=Decimal("0.1"), output=Decimal("0.2"), total=Decimal("0.3"), source="provider"),
        ),
        ({}, None),
        ({"cost": None}, None),
        ({"cost": "free"}, None),
        ({"cost": -1}, None),
        ({"cost": "9e999999"}, None),
        ({"cost": "nan"}, None),
        ({"cost": True}, None),
        ({"cost": {"input_tokens_cost": 0.1}}, None),
    ],
)
def test_what_a_provider_says_of_its_cost(usage: dict[str, Any], cost: Cost | None) -> None:  # LC-14
    assert read_cost(usage) == cost


# --- provider state

DETAILS = [
    {"type": "reasoning.text", "text": "Let me \u2028 think", "signature": "c2ln/+==", "index": 0, "format": "x"},
    {"type": "reasoning.encrypted", "data": "b3BhcXVl", "id": "r1", "index": 1},
    {"type": "reasoning.text", "signature": "YWxvbmU=", "index": 2},
]


def answer_of(*details: dict[str, Any], calls: bool = False) -> Message:
    reply = Reply(request(), "openrouter")
    reader = BodyReader(reply)
    for detail in details:
        reader.feed(chunk(choices=[{"index": 0, "delta": {"reasoning_details": [detail]}}]))
    told: dict[str, Any] = {"content": "Hi"}
    if calls:
        function = {"name": "add", "arguments": "{}"}
        call = {"index": 0, "id": "a", "function": function, "extra_content": {"google": {"thought_signature": "Cs=="}}}
        told = {"tool_calls": [call]}
    reader.feed(chunk(choices=[{"index": 0, "delta": told, "finish_reason": "stop"}]) + b"data: [DONE]\n\n")
    return reply.completed().message


@pytest.mark.parametrize("details", [DETAILS, DETAILS[1:2], DETAILS[2:]])
@pytest.mark.parametrize("wire", [msgspec.json, msgspec.msgpack])
def test_signed_redacted_and_signature_only_reasoning_goes_back_byte_equal(
    details: list[dict[str, Any]], wire: Any
) -> None:  # AC-09, LC-11
    message = wire.decode(wire.encode(answer_of(*details)), type=Message)
    (sent,) = build_messages(None, [message], "openrouter")
    assert msgspec.json.encode(sent["reasoning_details"]) == msgspec.json.encode(details)


def test_all_of_it_is_left_out_for_another_provider() -> None:  # LC-11
    message = answer_of(*DETAILS, calls=True)
    kept, dropped = (build_messages(None, [message], name)[0] for name in ("openrouter", "openai"))
    assert kept["reasoning_details"] == DETAILS
    assert kept["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "Cs=="}}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert dropped == {"role": "assistant", "content": None, "tool_calls": [call]}


def test_reasoning_of_a_model_function_stays_with_it() -> None:  # LC-11
    parts: list[Any] = [
        ReasoningPart(text="hm", provider="host", data={"signature": "s"}),
        ToolCallPart(ToolCall(id="a", name="add", metadata={"host": {"x": 1}})),
    ]
    (sent,) = build_messages(None, [Message(role="assistant", content=parts)], "openai")
    assert sent.keys() == {"role", "content", "tool_calls"}
    assert sent["tool_calls"][0].keys() == {"id", "type", "function"}


# --- dialects


def sent_to(base_url: str, **fields: Any) -> dict[str, Any]:
    wire_format = OpenAIChat(Endpoint(name="mine", base_url=base_url))
    sent: dict[str, Any] = msgspec.json.decode(wire_format.build_call(request(**fields)).body)
    return sent


def test_an_endpoint_is_not_asked_for_usage_where_that_is_refused() -> None:
    assert sent_to("http://localhost/v1")["stream_options"] == {"include_usage": True}
    assert "stream_options" not in sent_to("https://api.mistral.ai/v1")


@pytest.mark.parametrize(
    ("base_url", "call_id", "length"),
    [
        ("https://api.mistral.ai/v1", "call_1", 9),
        ("https://api.mistral.ai/v1", "abcDEF123", None),
        ("https://api.openai.com/v1", "x" * 41, 32),
        ("https://mine.openai.azure.com/openai/v1", "x" * 41, 32),
        ("https://api.openai.com/v1", "functions.add:0", None),
        ("http://localhost/v1", "x" * 200, None),
    ],
)
def test_ids_of_another_providers_calls_are_made_fit(base_url: str, call_id: str, length: int | None) -> None:
    call = ToolCallPart(ToolCall(id=call_id, name="add", arguments={}))
    answer = ToolResultPart(ToolResult(tool_call_id=call_id, tool_name="add", result=3))
    messages = [Message(role="assistant", content=[call]), Message(role="tool", content=[answer])]
    sent = sent_to(base_url, messages=messages)["messages"]
    used = sent[0]["tool_calls"][0]["id"]
    assert used == sent[1]["tool_call_id"]
    assert used == call_id if length is None else len(used) == length and used.isalnum()


def test_openrouter_takes_a_budget_and_is_told_to_keep_prompts_of_anthropics_models() -> None:
    sent = sent_to(
        "https://openrouter.ai/api/v1", model="anthropic/claude-opus-5", reasoning=Reasoning(budget_tokens=9)
    )
    assert (sent["reasoning"], sent["cache_control"]) == ({"max_tokens": 9}, {"type": "ephemeral"})
    assert "cache_control" not in sent_to("https://openrouter.ai/api/v1", model="openai/gpt-6")
    routing = {"provider": {"order": ["anthropic"]}, "cache_control": None}
    routed = sent_to("https://openrouter.ai/api/v1", model="anthropic/claude-opus-5", options=routing)
    assert routed["provider"] == {"order": ["anthropic"]} and "cache_control" not in routed
    with pytest.raises(ProviderError, match="set twice"):
        sent_to(
            "https://openrouter.ai/api/v1",
            reasoning=Reasoning(budget_tokens=9),
            options={"reasoning": {"effort": "low"}},
        )


@pytest.mark.parametrize(
    ("base_url", "content"),
    [
        ("http://127.0.0.1:8000/v1", ""),
        ("http://localhost:8000/v1", ""),
        ("http://[::1]:8000/v1", ""),
        ("https://gateway.example/v1", None),
        ("https://api.openai.com/v1", None),
    ],
)
def test_a_message_that_only_calls_has_the_content_that_its_server_takes(base_url: str, content: str | None) -> None:
    """Servers on one's own machine refuse null; gateways to Bedrock and Anthropic refuse an empty text."""
    messages = [Message(role="user", content="Hi"), answer_of(calls=True)]
    request = ProviderRequest(model="small", messages=messages)
    body = build_body(request, "mine", dialect_of(base_url))
    assert [message["content"] for message in body["messages"]] == ["Hi", content]
