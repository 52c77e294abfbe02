"""Answers of Anthropic's Messages API: blocks of all kinds, usage, errors, and the format over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from support.providers import http_provider
from support.recordings import load_cases
from support.replay_server import Answer, ReplayServer
from turnmill.protocol.content import Message, ReasoningPart, TextPart, ToolCallPart, Usage
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta
from turnmill.workers.providers.anthropic import AnthropicMessages
from turnmill.workers.providers.anthropic_content import build_messages
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.decoding import read_events, split_body
from turnmill.workers.providers.format import Endpoint
from turnmill.workers.providers.http_client import HttpClient

USER = Message(role="user", content="Hello")
REQUEST = ProviderRequest(model="claude-opus-4-8", messages=[USER], turn_id="turn", step_number=3)
FORMAT = AnthropicMessages(Endpoint(name="anthropic", base_url="http://localhost"))


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
    )


def start(**usage: int) -> dict[str, Any]:
    return {"type": "message_start", "message": {"model": "claude-real", "usage": {"input_tokens": 5, **usage}}}


def end(reason: str | None = "end_turn", **usage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 7, **usage}},
        {"type": "message_stop"},
    )


def block(index: int, begun: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": begun},
        *[{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas],
        {"type": "content_block_stop", "index": index},
    ]


def text(index: int, *pieces: str) -> list[dict[str, Any]]:
    return block(index, {"type": "text", "text": ""}, *[{"type": "text_delta", "text": piece} for piece in pieces])


def use(index: int, call_id: str, name: str, *pieces: str, **fields: Any) -> list[dict[str, Any]]:
    deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    return block(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}, **fields}, *deltas)


def read(*events: dict[str, Any], request: ProviderRequest = REQUEST) -> tuple[list[Any], Completed]:
    reply = FORMAT.begin_reply(request)
    live = list(read_events(reply, [sse(*events)]))
    return live, reply.completed()


def failure_of(*events: dict[str, Any]) -> Any:
    with pytest.raises(ProviderError) as caught:
        read(*events)
    return caught.value.info


# --- blocks


def test_parts_stand_in_the_order_they_began_and_watchers_see_each() -> None:
    """LC-08, LC-09: also where deltas of several blocks come in between each other."""
    thinking = block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": "c2ln"},
        {"type": "signature_delta", "signature": "bmF0"},
    )
    first, second = use(2, "a", "add", '{"x":', "1}"), use(3, "b", "add", '{"x"', ":2}")
    mixed = [first[0], second[0], first[1], second[1], second[2], first[2], first[3], second[3]]
    live, completed = read(start(), *thinking, *text(1, "Let ", "me."), *mixed, *end("tool_use"))
    parts = completed.message.content
    assert parts[:2] == [
        ReasoningPart(text="hm", provider="anthropic", data={"signature": "c2lnbmF0"}),
        TextPart("Let me."),
    ]
    calls = [(part.tool_call.id, part.tool_call.arguments) for part in parts if isinstance(part, ToolCallPart)]
    assert calls == [("a", {"x": 1}), ("b", {"x": 2})]
    assert completed.finish_reason == "tool_calls"
    assert (completed.message.model, completed.message.step, completed.message.turn_id) == ("claude-real", 3, "turn")
    assert [event.text for event in live if isinstance(event, TextDelta)] == ["Let ", "me."]
    states = [event for event in live if isinstance(event, ReasoningDelta) and event.kind == "signature"]
    assert [event.data for event in states] == [{"signature": "c2lnbmF0"}]
    second_deltas = [event.arguments_delta for event in live if isinstance(event, ToolCallDelta) and event.index == 1]
    assert second_deltas == ['{"x"', ":2}"]


@pytest.mark.parametrize("case", load_cases("anthropic-messages"), ids=lambda case: case.name)
def test_what_came_goes_back_as_it_came(case: Any) -> None:
    """LC-11, AC-09: blocks that are not ours and signed ones are in the next request, byte for byte, in their places."""
    if case.expected["finish"] == "error":
        return
    reply = FORMAT.begin_reply(REQUEST)
    list(read_events(reply, split_body(case.body, "random:1")))
    message = msgspec.json.decode(msgspec.json.encode(reply.completed().message), type=Message)
    sent = build_messages([message, USER], "anthropic")
    blocks = sent[0]["content"] if sent[0]["role"] == "assistant" else []
    assert [block["type"] for block in blocks] == [kind for kind in items_of(case) if kind]
    kept = [block for block in blocks if block["type"] not in ("text", "tool_use", "thinking")]
    for block_sent, expected in zip(kept, case.expected.get("server_items", []), strict=False):
        assert block_sent["type"] == expected["type"]
        assert block_sent.get("input") == expected.get("input")
    for wanted in case.expected.get("replay", {}).get("content", []):
        assert wanted in blocks


def items_of(case: Any) -> list[str]:
    """The kinds of an answer's blocks, but for thoughts that nobody has signed and texts that are blank."""
    told: list[str] = case.expected.get("items") or [each["type"] for each in kinds_in_body(case.body)]
    bodies = kinds_in_body(case.body)
    return [kind for kind, each in zip(told, bodies, strict=True) if not each["is_blank"]]


def kinds_in_body(body: bytes) -> list[dict[str, Any]]:
    if body.lstrip().startswith(b"{"):
        blocks = msgspec.json.decode(body)["content"]
        return [{"type": each["type"], "is_blank": each.get("text") == ""} for each in blocks]
    found: dict[int, dict[str, Any]] = {}
    for line in body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = msgspec.json.decode(line[6:].strip())
        if event["type"] == "content_block_start":
            kind = event["content_block"]["type"]
            found[event["index"]] = {"type": kind, "is_blank": kind in ("text", "thinking")}
        elif event["type"] == "content_block_delta":
            told = found[event["index"]]
            fields = ("signature",) if told["type"] == "thinking" else ("text",)
            if any((event["delta"].get(field) or "").strip() for field in fields):
                told["is_blank"] = False
    return list(found.values())


def test_a_block_of_a_kind_that_is_not_known_grows_and_goes_back() -> None:
    grown = block(0, {"type": "compaction", "content": ""}, {"type": "compaction_delta", "content": "So "})
    more = [{"type": "content_block_delta", "index": 0, "delta": {"type": "compaction_delta", "content": "far."}}]
    _, completed = read(start(), *grown[:2], *more, grown[2], *text(1, "Yes"), *end())
    (sent,) = build_messages([completed.message], "anthropic")
    assert sent["content"][0] == {"type": "compaction", "content": "So far."}


def test_citations_follow_their_text() -> None:
    cited = [{"type": "char_location", "cited_text": "sky"}]
    _, completed = read(
        start(), *block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Blue"},
                        {"type": "citations_delta", "citation": cited[0]}), *text(1, "!"), *end()
    )  # fmt: skip
    (sent,) = build_messages([completed.message], "anthropic")
    assert sent["content"] == [{"type": "text", "text": "Blue", "citations": cited}, {"type": "text", "text": "!"}]
    assert completed.message.text == "Blue!"


@pytest.mark.parametrize(
    ("pieces", "begun", "arguments"),
    [
        ([], {}, {}),
        ([""], {}, {}),
        ([], {"input": {"x": 1}}, {"x": 1}),
        (['{"x":1}'], {"input": None}, {"x": 1}),
        (["null"], {}, {}),
    ],
)
def test_arguments_may_be_missing_or_come_at_once(
    pieces: list[str], begun: dict[str, Any], arguments: dict[str, Any]
) -> None:
    _, completed = read(start(), *use(0, "a", "add", *pieces, **begun), *end("tool_use"))
    (call,) = completed.message.tool_calls
    assert (call.arguments, call.error) == (arguments, None)


def test_calls_without_ids_or_with_one_twice_get_their_own() -> None:
    """AC-51"""
    _, completed = read(start(), *use(0, "", "add"), *use(1, "a", "add"), *use(2, "a", "add"), *end("end_turn"))
    ids = [call.id for call in completed.message.tool_calls]
    assert ids == ["call_1_0", "a", "a_2"] and completed.finish_reason == "tool_calls"


def test_a_call_that_the_limit_cut_off_is_not_valid() -> None:
    _, completed = read(start(), *use(0, "a", "add", '{"x": "hel'), *end("max_tokens"))
    (call,) = completed.message.tool_calls
    assert completed.finish_reason == "length" and call.error is not None and call.arguments == {}


@pytest.mark.parametrize(
    ("word", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("pause_turn", "pause"),
        ("refusal", "refusal"),
        ("something_new", "other"),
    ],
)
def test_words_for_the_end(word: str, finish: str) -> None:
    assert read(start(), *text(0, "Hi"), *end(word))[1].finish_reason == finish


@pytest.mark.parametrize("model", ["claude-sonnet-4-20250514"])
def test_the_input_of_the_answers_tool_is_the_answer(model: str) -> None:
    """What the model says around it is no part of the answer, and the tool is nobody's call."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    request = ProviderRequest(model=model, messages=[USER], output_schema=schema, output_name="report")
    events = [*text(0, "Here:"), *use(1, "a", "report", '{"city":', '"Oslo"}')]
    live, completed = read(start(), *events, *end("tool_use"), request=request)
    assert (completed.message.content, completed.finish_reason) == ('{"city":"Oslo"}', "stop")
    assert [type(event) for event in live] == [TextDelta, TextDelta, TextDelta]
    _, with_call = read(start(), *events, *use(2, "b", "add", "{}"), *end("tool_use"), request=request)
    assert with_call.finish_reason == "tool_calls" and [call.name for call in with_call.message.tool_calls] == ["add"]


# --- usage


def test_the_last_usage_counts_field_by_field() -> None:
    _, completed = read(
        start(cache_read_input_tokens=100, cache_creation_input_tokens=20, output_tokens=1), *text(0, "Hi"), *end()
    )
    assert completed.usage == Usage(
        input_tokens=125, output_tokens=7, cached_tokens=100, cache_write_tokens=20, total_tokens=132
    )
    assert read(start(), *text(0, "Hi"), *end(input_tokens=0))[1].usage == Usage(
        input_tokens=5, output_tokens=7, total_tokens=12
    )
    relay = read(start(), *text(0, "Hi"), *end(input_tokens=0, cache_read_input_tokens=9))[1].usage
    assert relay is not None and (relay.input_tokens, relay.cached_tokens) == (9, 9)


# --- errors


@pytest.mark.parametrize(
    ("kind", "message", "expected", "retryable"),
    [
        ("overloaded_error", "Overloaded", ErrorKind.OVERLOADED, True),
        ("rate_limit_error", "slow down", ErrorKind.RATE_LIMITED, True),
        ("api_error", "Internal server error", ErrorKind.PROVIDER_ERROR, True),
        ("authentication_error", "invalid x-api-key", ErrorKind.AUTHENTICATION, False),
        ("permission_error", "no", ErrorKind.AUTHENTICATION, False),
        ("invalid_request_error", "messages: at least one", ErrorKind.BAD_REQUEST, False),
        ("invalid_request_error", "prompt is too long: 2 tokens > 1 maximum", ErrorKind.CONTEXT_OVERFLOW, False),
        ("invalid_request_error", "input length and `max_tokens` exceed context limit", ErrorKind.CONTEXT_OVERFLOW, False),
        ("invalid_request_error", "Your credit balance is too low", ErrorKind.BAD_REQUEST, False),
        ("timeout_error", "Request timed out", ErrorKind.TIMEOUT, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("middle", [False, True])
def test_errors_in_the_stream_have_their_kind(
    kind: str, message: str, expected: ErrorKind, retryable: bool, middle: bool
) -> None:
    """LC-10, AC-49"""
    error = {"type": "error", "error": {"type": kind, "message": message}}
    info = failure_of(start(), *(text(0, "Hel")[:2] if middle else []), error)
    assert (info.kind, info.retryable) == (expected, retryable) and message in info.message


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    """LC-10: in mid-text, in mid-call, before anything."""
    for events in ([], [start()], [start(), *text(0, "Hel")], [start(), *use(0, "a", "add", "{}")]):
        info = failure_of(*events)
        assert (info.kind, info.retryable) == (ErrorKind.STREAM_BROKEN, True)
    info = failure_of(start(), {"type": "message_delta", "delta": None})
    assert info.kind == ErrorKind.STREAM_BROKEN


def test_an_event_that_is_no_json_breaks_the_answer_and_noise_does_not() -> None:
    reply = FORMAT.begin_reply(REQUEST)
    noise = b"event: ping\ndata: {}\n\n: hi\n\ndata: null\n\ndata: [DONE]\n\n" + sse(
        {"type": "later_kind", "index": "x"}
    )
    body = sse(start()) + noise + sse(*text(0, "Hi")) + sse(*end()) + b"data: {broken\n\n"
    assert [event.text for event in read_events(reply, [body]) if isinstance(event, TextDelta)] == ["Hi"]
    assert reply.completed().message.text == "Hi"
    broken = FORMAT.begin_reply(REQUEST)
    with pytest.raises(ProviderError, match="cannot be read"):
        list(read_events(broken, [sse(start()) + b"data: {broken\n\n"]))


def test_raw_control_characters_and_half_surrogates_are_read() -> None:
    reply = FORMAT.begin_reply(REQUEST)
    odd = b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a\tb\\ud83d"}}\n\n'
    body = sse(start()) + sse(text(0)[0]) + odd + sse(*end())
    assert "".join(event.text for event in read_events(reply, [body]) if isinstance(event, TextDelta)) == "a\tb\ufffd"


# --- over HTTP


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


@pytest.fixture
async def server() -> AsyncIterator[ReplayServer]:
    async with ReplayServer() as server:
        yield server


async def ask(server: ReplayServer, client: HttpClient, request: ProviderRequest = REQUEST, suffix: str = "") -> Any:
    provider = http_provider("anthropic-messages", server.url + suffix, "sk-ant-secret", client, "anthropic")
    told = [item async for item in provider.stream(request)]
    assert isinstance(told[-1], Completed)
    return told


HI = sse(start(), *text(0, "Hi"), *end())


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_request_as_the_server_sees_it(server: ReplayServer, client: HttpClient, suffix: str) -> None:
    server.reply(Answer(chunks=[HI]))
    request = msgspec.structs.replace(REQUEST, options={"betas": ["a-1", "b-2"]})
    told = await ask(server, client, request, suffix)
    (seen,) = server.requests
    assert (seen.method, seen.path) == ("POST", "/v1/messages")
    assert seen.headers["x-api-key"] == "sk-ant-secret" and "authorization" not in seen.headers
    assert (seen.headers["anthropic-version"], seen.headers["anthropic-beta"]) == ("2023-06-01", "a-1,b-2")
    assert seen.json["messages"][0]["content"][0]["text"] == "Hello" and seen.json["stream"] is True
    assert told[-1].message.text == "Hi"


async def test_an_answer_that_is_not_streamed(server: ReplayServer, client: HttpClient) -> None:
    whole = {"type": "message", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"}
    server.reply(Answer(chunks=[msgspec.json.encode(whole)], headers={"content-type": "application/json"}))
    told = await ask(server, client, msgspec.structs.replace(REQUEST, options={"stream": False}))
    assert (told[-1].message.text, server.requests[0].json["stream"]) == ("Hi", False)


@pytest.mark.parametrize("case", load_cases("anthropic-messages"), ids=lambda case: case.name)
async def test_recorded_answers_over_http(case: Any, server: ReplayServer, client: HttpClient) -> None:
    """LC-08, LC-09, LC-10, AC-40"""
    pieces = split_body(case.body, "1") if len(case.body) < 2000 else split_body(case.body, "random:2")
    server.reply(
        Answer(
            chunks=pieces if len(pieces) < 2000 else [case.body], status=case.meta["http_status"], headers=case.headers
        )
    )
    if case.expected["finish"] == "error":
        with pytest.raises(ProviderError):
            await ask(server, client)
        return
    told = await ask(server, client)
    assert told[-1].message.text == case.expected["text"]
    assert told[-1].finish_reason == case.expected["finish"]


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "retryable", "wait"),
    [
        (529, {}, {"type": "overloaded_error", "message": "Overloaded"}, ErrorKind.OVERLOADED, True, None),
        (429, {"retry-after": "7"}, {"type": "rate_limit_error", "message": "m"}, ErrorKind.RATE_LIMITED, True, 7.0),
        (401, {}, {"type": "authentication_error", "message": "key sk-ant-secret"}, ErrorKind.AUTHENTICATION, False, None),
        (400, {}, {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}, ErrorKind.CONTEXT_OVERFLOW, False, None),
        (400, {}, {"type": "invalid_request_error", "message": "bad"}, ErrorKind.BAD_REQUEST, False, None),
        (500, {}, {"type": "api_error", "message": "oops"}, ErrorKind.PROVIDER_ERROR, True, None),
        (500, {"x-should-retry": "false"}, {"type": "api_error", "message": "oops"}, ErrorKind.PROVIDER_ERROR, False, None),
        (400, {"x-should-retry": "true"}, {"type": "invalid_request_error", "message": "m"}, ErrorKind.BAD_REQUEST, True, None),
    ],
)  # fmt: skip
async def test_refusals(
    server: ReplayServer, client: HttpClient, status: int, headers: dict[str, str], body: Any, kind: str,
    retryable: bool, wait: float | None,
) -> None:  # fmt: skip
    """AC-49"""
    error = msgspec.json.encode({"type": "error", "error": body})
    server.reply(Answer(chunks=[error], status=status, headers={"content-type": "application/json", **headers}))
    with pytest.raises(ProviderError) as caught:
        await ask(server, client)
    info = caught.value.info
    assert (info.kind, info.retryable, info.retry_after_seconds, info.status) == (kind, retryable, wait, status)
    assert "sk-ant-secret" not in info.message


async def test_usage_is_told_before_the_end_and_leaving_closes_the_connection(
    server: ReplayServer, client: HttpClient
) -> None:
    """AC-53: a call that is stopped has cost its prompt."""
    server.reply(Answer(chunks=[sse(start(output_tokens=1), *text(0, "Hel")[:2])], ending="stay_open"))
    provider = http_provider("anthropic-messages", server.url, None, client)
    told: list[Any] = []
    async with aclosing(provider.stream(REQUEST)) as stream:
        async for item in stream:
            told.append(item)
            if len(told) == 2:
                break
    assert {type(item) for item in told} == {TextDelta, Usage}
    await asyncio.wait_for(server.requests[0].closed.wait(), 5)
