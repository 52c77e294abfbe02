"""Requests to Anthropic's Messages API: turns, calls and results, thinking, caching, structured answers, what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from turnmill.protocol.content import (
    BlobRef,
    FilePart,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.specs import Reasoning, ToolSpec
from turnmill.workers.providers.anthropic_content import build_messages
from turnmill.workers.providers.anthropic_models import model_named
from turnmill.workers.providers.anthropic_request import answer_tool, build_body
from turnmill.workers.providers.base import ProviderError, ProviderRequest

NEW, OLD = "claude-opus-4-8", "claude-sonnet-4-20250514"
USER = Message(role="user", content="Weather in Oslo and Rome?")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = ToolSpec(name="weather", description="Tells the weather.", schema=SCHEMA)
KEPT = {"cache_control": {"type": "ephemeral"}}
SIGNED = ReasoningPart(text="Let me \u2028 think", provider="anthropic", data={"signature": "c2ln/+=="})
REDACTED_BLOCK = {"type": "redacted_thinking", "data": "b3BhcXVl\u00e9=="}
REDACTED = ReasoningPart(provider="anthropic", data={"block": REDACTED_BLOCK})
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"encrypted_content": "abc=="}]}


def call(call_id: str, city: str, **fields: Any) -> ToolCallPart:
    return ToolCallPart(ToolCall(id=call_id, name="weather", arguments={"city": city}, **fields))


def result(call_id: str, value: Any, **fields: Any) -> ToolResultPart:
    return ToolResultPart(ToolResult(tool_call_id=call_id, tool_name="weather", result=value, **fields))


def assistant(*parts: Any) -> Message:
    return Message(role="assistant", content=list(parts))


def tool(*results: ToolResultPart) -> Message:
    return Message(role="tool", content=list(results))


def body(model: str = NEW, messages: list[Message] | None = None, **fields: Any) -> dict[str, Any]:
    return build_body(ProviderRequest(model=model, messages=messages or [USER], **fields), "anthropic")


def built(*messages: Message) -> list[dict[str, Any]]:
    return build_messages(messages, "anthropic")


def refusal_of(**fields: Any) -> str:
    with pytest.raises(ProviderError) as caught:
        body(**fields)
    assert (caught.value.info.kind, caught.value.info.retryable) == (ErrorKind.BAD_REQUEST, False)
    return caught.value.info.message


# --- turns


def test_parallel_calls_and_their_results_stand_in_two_messages_behind_each_other() -> None:
    """The results of one answer are one message of the user's side, first in it, and a message that follows joins them."""
    messages = built(
        USER,
        assistant(SIGNED, TextPart("I look."), call("a", "Oslo"), call("b", "Rome", error="not JSON")),
        tool(result("a", {"rain": True})),
        tool(result("b", "Error: not JSON", is_error=True)),
        Message(role="user", content="Hurry."),
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == [
        {"type": "thinking", "thinking": SIGNED.text, "signature": "c2ln/+=="},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
    ]
    assert messages[2]["content"] == [
        {"type": "tool_result", "tool_use_id": "a", "content": '{"rain":true}'},
        {"type": "tool_result", "tool_use_id": "b", "content": "Error: not JSON", "is_error": True},
        {"type": "text", "text": "Hurry."},
    ]


def test_results_come_before_what_a_hook_put_between() -> None:
    messages = built(assistant(call("a", "Oslo")), Message(role="user", content="note"), tool(result("a", "dry")))
    assert [block["type"] for block in messages[1]["content"]] == ["tool_result", "text"]


def test_blank_texts_and_empty_messages_are_left_out() -> None:
    messages = built(
        USER, Message(role="assistant", content=" \n"), assistant(TextPart("")), Message(role="user", content="And?")
    )
    assert [block["text"] for block in messages[0]["content"]] == [USER.content, "And?"] and len(messages) == 1
    (answered,) = built(tool(result("a", ""), result("b", None), result("c", " ", is_error=True)))
    contents = [block.get("content") for block in answered["content"]]
    assert contents == [None, "null", "(no message)"]


def test_an_answer_that_goes_on_does_not_end_in_white_space() -> None:
    assert built(USER, Message(role="assistant", content="So far \n"))[-1]["content"][0]["text"] == "So far"


def test_what_the_system_says_later_stays_in_its_place() -> None:
    sent = body(messages=[USER, Message(role="system", content="Be brief.")], system="You are kind.")
    assert [block["text"] for block in sent["system"]] == ["You are kind."]
    assert sent["messages"][0]["content"][1]["text"] == "<system>\nBe brief.\n</system>"


def test_names_and_ids_of_other_providers_are_made_fit_and_stay_apart() -> None:
    odd = ["functions.weather:0", "functions_weather_0", "functions.weather.0", "x" * 200]
    (answer,) = build_messages([assistant(*[call(each, "Oslo") for each in odd])], "anthropic")
    (results,) = build_messages([tool(*[result(each, "dry") for each in odd])], "anthropic")
    ids = [block["id"] for block in answer["content"]]
    assert ids == [block["tool_use_id"] for block in results["content"]]
    assert len(set(ids)) == 4 and ids[1] == odd[1]
    assert all(len(each) <= 128 and each.replace("_", "").replace("-", "").isalnum() for each in ids)


# --- what goes back unchanged


@pytest.mark.parametrize("wire", [msgspec.json, msgspec.msgpack])
def test_signed_and_redacted_thinking_and_server_tools_go_back_byte_equal_in_their_places(wire: Any) -> None:
    """AC-09, LC-11"""
    citations = [{"type": "web_search_result_location", "encrypted_index": "Eo8B"}]
    message = assistant(
        SIGNED,
        REDACTED,
        ReasoningPart(provider="anthropic", data={"block": SEARCH}),
        ReasoningPart(provider="anthropic", data={"block": FOUND}),
        TextPart("It rains"),
        ReasoningPart(provider="anthropic", data={"citations": citations}),
        call("a", "Oslo", metadata={"anthropic": {"caller": {"type": "code_execution_20260120", "tool_id": "s"}}}),
    )
    message = wire.decode(wire.encode(message), type=Message)
    (sent,) = built(message)
    assert sent["content"] == [
        {"type": "thinking", "thinking": "Let me \u2028 think", "signature": "c2ln/+=="},
        REDACTED_BLOCK,
        SEARCH,
        FOUND,
        {"type": "text", "text": "It rains", "citations": citations},
        {
            "type": "tool_use",
            "id": "a",
            "name": "weather",
            "input": {"city": "Oslo"},
            "caller": {"type": "code_execution_20260120", "tool_id": "s"},
        },
    ]


def test_all_of_it_is_left_out_for_another_provider() -> None:
    """LC-11: text, calls and results stay, and nothing of the other's state."""
    message = assistant(
        SIGNED,
        REDACTED,
        ReasoningPart(provider="anthropic", data={"block": SEARCH}),
        TextPart("It rains"),
        ReasoningPart(provider="anthropic", data={"citations": [{}]}),
        call("a", "Oslo", metadata={"anthropic": {"caller": {"type": "x"}}}),
    )
    (sent,) = build_messages([message], "relay")
    assert sent["content"] == [
        {"type": "text", "text": "It rains"},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
    ]


def test_thoughts_without_a_signature_are_not_sent() -> None:
    (sent,) = built(assistant(ReasoningPart(text="hm", provider="anthropic"), TextPart("Yes")))
    assert sent["content"] == [{"type": "text", "text": "Yes"}]


def test_the_place_where_code_runs_is_named_while_its_calls_are_answered() -> None:
    place = ReasoningPart(provider="anthropic", data={"container": "container_1"})
    answer = assistant(call("a", "Oslo"), place)
    assert body(messages=[USER, answer, tool(result("a", "dry"))])["container"] == "container_1"
    assert "container" not in body(messages=[USER, answer, tool(result("a", "dry")), USER])


# --- caching


def marks_of(sent: dict[str, Any]) -> list[str]:
    marked = [block["name"] for block in sent.get("tools", []) if "cache_control" in block]
    marked += ["system" for block in sent.get("system", []) if "cache_control" in block]
    for position, message in enumerate(sent["messages"]):
        marked += [f"{position}.{n}" for n, block in enumerate(message["content"]) if "cache_control" in block]
    return marked


def test_marks_stand_behind_what_stays_and_where_the_step_before_had_its_last() -> None:
    rounds = [USER]
    marks = []
    for number in range(4):
        marks.append(marks_of(body(messages=list(rounds), system="Be kind.", tools=[WEATHER])))
        rounds += [assistant(call(f"c{number}", "Oslo")), tool(result(f"c{number}", "dry"))]
    assert marks == [["system", "0.0"], ["system", "0.0", "2.0"], ["system", "2.0", "4.0"], ["system", "4.0", "6.0"]]
    assert marks_of(body(tools=[WEATHER])) == ["weather", "0.0"]


def test_a_step_begins_with_the_bytes_of_the_step_before() -> None:
    """Nothing that changes per step is put in front."""
    first = [USER, assistant(SIGNED, call("a", "Oslo")), tool(result("a", "dry"))]
    second = [*first, assistant(call("b", "Rome")), tool(result("b", "wet"))]

    def unmarked(messages: list[Message]) -> dict[str, Any]:
        return body(messages=messages, system="Be kind.", tools=[WEATHER], options={"cache_control": None})

    before, after = unmarked(first), unmarked(second)
    assert (
        json.dumps(after["messages"])[: len(json.dumps(before["messages"])) - 1] == json.dumps(before["messages"])[:-1]
    )
    assert (before["system"], before["tools"]) == (after["system"], after["tools"])


def test_the_option_takes_over() -> None:
    assert marks_of(body(system="x", options={"cache_control": None})) == []
    hour = {"type": "ephemeral", "ttl": "1h"}
    sent = body(system="x", options={"cache_control": hour})
    assert (sent["cache_control"], marks_of(sent)) == (hour, [])
    assert body(options={"system": "as a text"})["system"] == "as a text"


# --- tools


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ("weather", {"type": "tool", "name": "weather"}),
    ],
)
def test_tools_and_their_choice(choice: str | None, expected: Any) -> None:
    sent = body(tools=[WEATHER], tool_choice=choice, options={"cache_control": None})
    assert sent["tools"] == [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
    assert sent.get("tool_choice") == expected
    alone = body(tools=[WEATHER], tool_choice=choice, options={"parallel_tool_calls": False}).get("tool_choice")
    one = {"disable_parallel_tool_use": True}
    assert alone == ({"type": "none"} if choice == "none" else {**(expected or {"type": "auto"}), **one})


def test_tools_of_the_provider_join_the_agents() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    sent = body(tools=[WEATHER], options={"tools": [search], "cache_control": None})
    assert [each["name"] for each in sent["tools"]] == ["weather", "web_search"]
    assert body(options={"tools": [search], "cache_control": None})["tools"] == [search]


def test_a_conversation_with_calls_names_its_tools_where_none_may_be_called() -> None:
    sent = body(
        messages=[USER, assistant(call("a", "Oslo")), tool(result("a", "dry"))], options={"cache_control": None}
    )
    assert sent["tools"] == [{"name": "weather", "input_schema": {"type": "object"}}]
    assert sent["tool_choice"] == {"type": "none"}
    assert "tools" not in body() and "tool_choice" not in body(tool_choice="auto")


# --- thinking and length


@pytest.mark.parametrize(
    ("model", "reasoning", "thinking", "effort", "max_tokens"),
    [
        (NEW, Reasoning(effort="low"), {"type": "adaptive", "display": "summarized"}, "low", 32_000),
        (NEW, Reasoning(effort="minimal"), {"type": "adaptive", "display": "summarized"}, "low", 32_000),
        (NEW, Reasoning(effort="xhigh"), {"type": "adaptive", "display": "summarized"}, "xhigh", 32_000),
        ("claude-sonnet-5", Reasoning(effort="high"), {"type": "adaptive", "display": "summarized"}, "high", 32_000),
        ("claude-opus-4-6", Reasoning(effort="xhigh"), {"type": "adaptive"}, "max", 32_000),
        ("claude-opus-4-6", Reasoning(budget_tokens=9000), {"type": "enabled", "budget_tokens": 9000}, None, 32_000),
        (OLD, Reasoning(effort="high"), {"type": "enabled", "budget_tokens": 16_384}, None, 32_384),
        (OLD, Reasoning(budget_tokens=50_000), {"type": "enabled", "budget_tokens": 50_000}, None, 64_000),
        ("claude-opus-4-1", Reasoning(effort="xhigh"), {"type": "enabled", "budget_tokens": 27_904}, None, 32_000),
        ("kimi-k3", Reasoning(effort="low"), {"type": "enabled", "budget_tokens": 2048}, None, 18_048),
        (NEW, Reasoning(effort="none"), {"type": "disabled"}, None, 32_000),
        (NEW, None, None, None, 32_000),
        ("claude-3-haiku-20240307", None, None, None, 4096),
        ("claude-3-5-sonnet-20241022", None, None, None, 8192),
        ("some-local-model", None, None, None, 8192),
    ],
)
def test_reasoning_is_said_as_the_model_takes_it(
    model: str, reasoning: Reasoning | None, thinking: Any, effort: str | None, max_tokens: int
) -> None:
    sent = body(model, reasoning=reasoning)
    assert sent.get("thinking") == thinking
    assert sent.get("output_config") == ({"effort": effort} if effort else None)
    assert sent["max_tokens"] == max_tokens


def test_a_limit_of_ones_own_leaves_room_for_the_answer() -> None:
    sent = body(OLD, reasoning=Reasoning(effort="high"), options={"max_tokens": 8000})
    assert (sent["max_tokens"], sent["thinking"]["budget_tokens"]) == (8000, 3904)


def test_a_budget_is_refused_where_the_model_takes_an_effort() -> None:
    assert "takes an effort" in refusal_of(model=NEW, reasoning=Reasoning(budget_tokens=2000))


@pytest.mark.parametrize("options", [{"thinking": {"type": "adaptive"}}, {"output_config": {"effort": "low"}}])
def test_reasoning_that_is_set_twice_is_refused(options: dict[str, Any]) -> None:
    assert "set twice" in refusal_of(reasoning=Reasoning(effort="high"), options=options)


def test_thinking_does_not_begin_in_the_middle_of_anothers_round() -> None:
    theirs = [USER, assistant(call("a", "Oslo")), tool(result("a", "dry"))]
    assert "thinking" not in body(OLD, theirs, reasoning=Reasoning(effort="low"))
    own = [USER, assistant(SIGNED, call("a", "Oslo")), tool(result("a", "dry"))]
    assert body(OLD, own, reasoning=Reasoning(effort="low"))["thinking"]["type"] == "enabled"
    assert body(NEW, theirs, reasoning=Reasoning(effort="low"))["thinking"]["type"] == "adaptive"


@pytest.mark.parametrize(
    ("name", "family", "version"),
    [
        ("claude-opus-4-8", "opus", (4, 8)),
        ("claude-sonnet-4-20250514", "sonnet", (4, 0)),
        ("claude-haiku-4-5-20251001", "haiku", (4, 5)),
        ("claude-3-7-sonnet-latest", "sonnet", (3, 7)),
        ("claude-3-haiku-20240307", "haiku", (3, 0)),
        ("us.anthropic.claude-opus-4.6", "opus", (4, 6)),
        ("claude-fable-5-1", "fable", (5, 1)),
        ("claude-opus-11-12", "opus", (11, 12)),
        ("glm-4.6", "", (0, 0)),
    ],
)
def test_models_are_known_by_family_and_version(name: str, family: str, version: tuple[int, int]) -> None:
    found = model_named(name)
    assert (found.family, found.version) == (family, version)


# --- structured answers

ANSWER = {"type": "object", "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/Near"}}}
NESTED = {**ANSWER, "$defs": {"Near": {"type": "object", "properties": {"km": {"type": "number"}}}}}


def test_a_newer_model_enforces_the_schema_which_is_closed_for_it() -> None:
    sent = body(NEW, output_schema=NESTED, reasoning=Reasoning(effort="low"))
    schema = sent["output_config"]["format"]["schema"]
    assert sent["output_config"]["effort"] == "low" and sent["output_config"]["format"]["type"] == "json_schema"
    assert schema["additionalProperties"] is False and schema["$defs"]["Near"]["additionalProperties"] is False
    assert "tools" not in sent and answer_tool(ProviderRequest(model=NEW, messages=[], output_schema=NESTED)) is None
    assert "additionalProperties" not in NESTED


@pytest.mark.parametrize(
    "schema",
    [
        {**ANSWER, "properties": {"city": {"type": "string", "maxLength": 3}}},
        {**ANSWER, "properties": {}},
        {"type": "object", "properties": {"any": {"type": "object", "additionalProperties": {"type": "string"}}}},
        {**NESTED, "$defs": {"Near": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Near"}}}}},
    ],
    ids=["keyword", "no-properties", "map", "endless"],
)
def test_what_cannot_be_enforced_becomes_a_tool(schema: dict[str, Any]) -> None:
    request = ProviderRequest(model=NEW, messages=[USER], output_schema=schema, output_name="report")
    sent = build_body(request, "anthropic")
    assert [each["name"] for each in sent["tools"]] == ["report"] == [answer_tool(request)]
    assert sent["tools"][0]["input_schema"] == schema
    assert sent["tool_choice"] == {"type": "tool", "name": "report"}
    assert "output_config" not in sent


def test_an_older_model_uses_the_tool_beside_the_agents_tools() -> None:
    sent = body(OLD, output_schema=SCHEMA, output_name="report", tools=[WEATHER])
    assert [each["name"] for each in sent["tools"]] == ["weather", "report"]
    assert sent["tool_choice"] == {"type": "any"}
    forbidden = body(OLD, output_schema=SCHEMA, output_name="report", tools=[WEATHER], tool_choice="none")
    assert forbidden["tool_choice"] == {"type": "tool", "name": "report"}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": OLD, "output_schema": SCHEMA, "reasoning": Reasoning(effort="low")},
        {"model": OLD, "output_schema": {"type": "array", "items": {"type": "string"}}},
        {"model": "claude-mythos-4", "output_schema": SCHEMA},
    ],
    ids=["thinks-with-a-budget", "no-object", "cannot-be-forced"],
)
def test_what_cannot_be_forced_is_asked_for_in_words_behind_the_system_prompt(fields: dict[str, Any]) -> None:
    sent = body(system="Be kind.", **fields)
    assert sent["system"][0]["text"] == "Be kind." and "JSON Schema" in sent["system"][1]["text"]
    assert "tools" not in sent and "tool_choice" not in sent


# --- content


def test_images_documents_and_texts() -> None:
    encoded = base64.b64encode(b"data").decode()
    content = [
        TextPart("Look:"),
        ImagePart(data=b"data", media_type="image/jpg"),
        ImagePart(url="https://example.com/a.png"),
        FilePart(data=b"data", media_type="application/pdf", filename="a.pdf"),
        FilePart(url="https://example.com/a.pdf", media_type="application/pdf"),
        FilePart(data="é".encode(), media_type="text/csv"),
    ]
    (sent,) = built(Message(role="user", content=content))
    assert sent["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": encoded}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": encoded},
            "title": "a.pdf",
        },
        {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "é"}},
    ]


def test_a_tools_images_stand_in_its_result_and_what_cannot_be_carried_is_named() -> None:
    parts = [
        TextPart("a plot"),
        ImagePart(data=b"x", media_type="image/png"),
        FilePart(data=b"x", media_type="audio/wav"),
    ]
    (sent,) = built(tool(ToolResultPart(ToolResult(tool_call_id="a", tool_name="plot", content=parts))))
    (block,) = sent["content"]
    assert [part["type"] for part in block["content"]] == ["text", "image", "text"]
    assert "audio/wav" in block["content"][2]["text"]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (FilePart(data=b"x", media_type="audio/wav"), "audio/wav"),
        (ImagePart(data=b"x", media_type="image/tiff"), "image/tiff"),
        (ImagePart(blob=BlobRef(key="k", bytes=1), media_type="image/png"), "not loaded"),
    ],
)
def test_what_the_api_cannot_carry_is_refused_with_what_it_takes(part: Any, reason: str) -> None:
    assert reason in refusal_of(messages=[Message(role="user", content=[part])])


def test_options_come_last_and_none_leaves_a_field_out() -> None:
    sent = body(options={"max_tokens": 7, "temperature": 0.5, "stream": None, "betas": ["x"]})
    assert (sent["max_tokens"], sent["temperature"]) == (7, 0.5)
    assert "stream" not in sent and "betas" not in sent
