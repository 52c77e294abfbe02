"""OpenAI-compatible chat: recorded answers and byte-level oddities, replayed; requests, limits and closing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from support.providers import openai_chat
from support.recordings import Case, load_cases
from support.replay_server import Answer, ReplayServer
from turnmill.protocol.content import (
    FilePart,
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
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from turnmill.protocol.specs import ToolSpec
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.body_reader import BodyReader
from turnmill.workers.providers.http_client import HttpClient, HttpSettings, StreamTimeouts
from turnmill.workers.providers.http_provider import HttpProvider
from turnmill.workers.providers.openai_chat_reply import Reply
from turnmill.workers.providers.openai_chat_request import build_body, build_messages

CASES = load_cases("openai-chat")
ANSWERED = [case for case in CASES if case.meta["http_status"] == 200]
USER = Message(role="user", content="Hello")
REQUEST = ProviderRequest(model="some-model", messages=[USER], turn_id="turn", step_number=3)
NEVER = asyncio.Event


class Outcome(msgspec.Struct):
    """All that an adapter gave for one request."""

    live: list[Any] = []
    completed: Completed | None = None
    error: ProviderError | None = None


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


@pytest.fixture
async def server() -> AsyncIterator[ReplayServer]:
    async with ReplayServer() as server:
        yield server


async def ask(provider: HttpProvider, request: ProviderRequest = REQUEST) -> Outcome:
    outcome = Outcome(live=[])
    try:
        async for event in provider.stream(request):
            if isinstance(event, Completed):
                assert outcome.completed is None
                outcome.completed = event
            else:
                assert outcome.completed is None
                outcome.live.append(event)
    except ProviderError as error:
        outcome.error = error
    return outcome


def read(chunks: list[bytes], request: ProviderRequest = REQUEST, provider_name: str = "openai") -> Outcome:
    """The same without a server: bytes in exactly these pieces."""
    reply = Reply(request, provider_name)
    reader = BodyReader(reply)
    outcome = Outcome(live=[])
    for chunk in chunks:
        outcome.live += reader.feed(chunk)
    outcome.live += reader.close()
    try:
        if reply.failure is not None:
            raise reply.failure
        outcome.completed = reply.completed()
    except ProviderError as error:
        outcome.error = error
    return outcome


def sse(*chunks: dict[str, Any], done: bool = True) -> bytes:
    lines = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def fragment(**fields: Any) -> dict[str, Any]:
    """A chunk with one fragment of a call: `index`, `id`; `name` and `arguments` of its function."""
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return delta(tool_calls=[{**fields, "function": function}])


def completed_of(*chunks: dict[str, Any], **options: Any) -> Completed:
    outcome = read([sse(*chunks)], **options)
    assert outcome.completed is not None, outcome.error
    return outcome.completed


def calls_of(*chunks: dict[str, Any]) -> list[tuple[str, str, Any]]:
    calls = completed_of(*chunks).message.tool_calls
    return [(call.id, call.name, call.error or call.arguments) for call in calls]


def failure_of(outcome: Outcome) -> Any:
    assert outcome.error is not None
    assert outcome.completed is None
    return outcome.error.info


# --- recordings and quirks -------------------------------------------------------------------------------------------


def check(case: Case, outcome: Outcome) -> None:
    """Compares an outcome with what the case expects."""
    expected = case.expected
    texts = [event.text for event in outcome.live if isinstance(event, TextDelta)]
    reasoning = [event.text or "" for event in outcome.live if isinstance(event, ReasoningDelta)]
    assert "".join(texts) == (expected.get("text") or "") + (expected.get("refusal") or "")
    assert "".join(reasoning) == (expected.get("reasoning") or "")
    if expected["finish"] == "error":
        check_error(case, outcome)
        return
    assert outcome.completed is not None, outcome.error
    check_completed(expected, outcome.completed)
    check_live_calls(outcome)


def check_completed(expected: dict[str, Any], completed: Completed) -> None:
    message = completed.message
    assert message.text == (expected.get("text") or "") + (expected.get("refusal") or "")
    assert "".join(part.text for part in message.reasoning) == (expected.get("reasoning") or "")
    assert completed.finish_reason == message.finish_reason == expected["finish"]
    assert completed.usage == message.usage
    assert [(call.id, call.name) for call in message.tool_calls] == [
        (call["id"], call["name"]) for call in expected["tool_calls"]
    ]
    for call, wanted in zip(message.tool_calls, expected["tool_calls"], strict=True):
        assert (call.error is None) == wanted.get("valid", True)
        if call.error is None:
            assert call.arguments == parse_arguments(wanted["arguments"])
        else:
            assert call.arguments == {} and wanted["arguments"] in call.error
    check_usage(expected.get("usage"), completed.usage)


def check_usage(expected: dict[str, Any] | None, usage: Usage | None) -> None:
    if expected is None:
        assert usage is None
        return
    assert usage is not None
    assert usage.input_tokens == expected.get("input_total", expected["input"])
    assert usage.output_tokens == expected.get("output_total", expected["output"])
    assert usage.cached_tokens == (expected.get("cached") or 0)
    assert usage.cache_write_tokens == (expected.get("cache_write") or 0)
    assert usage.reasoning_tokens == (expected.get("reasoning") or 0)
    assert usage.total_tokens >= usage.input_tokens + usage.output_tokens


def check_live_calls(outcome: Outcome) -> None:
    """What watchers saw of the calls is what the message says of them."""
    assert outcome.completed is not None
    calls = outcome.completed.message.tool_calls
    started = [event for event in outcome.live if isinstance(event, ToolCallStarted)]
    assert [(event.index, event.tool_call_id) for event in started] == [(n, call.id) for n, call in enumerate(calls)]
    for position, call in enumerate(calls):
        deltas = [e for e in outcome.live if isinstance(e, ToolCallDelta) and e.index == position]
        assert {event.tool_call_id for event in deltas} <= {call.id}
        if call.error is None:
            assert parse_arguments("".join(event.arguments_delta or "" for event in deltas)) == call.arguments


def check_error(case: Case, outcome: Outcome) -> None:
    info = failure_of(outcome)
    expected = case.expected["error"]
    assert case.meta["http_status"] == 200 or info.status == case.meta["http_status"]
    message = expected.get("body_message") or expected.get("message") or ""
    if case.meta["http_status"] == 200 or "body_message" in expected:
        assert " ".join(message.split())[:300] in info.message
    if "retryable" in expected:
        assert info.retryable is expected["retryable"]
        assert info.retry_after_seconds == expected.get("retry_after_s")
        assert str(expected["code"]) in f"{info.message} {info.status}" or info.kind == "stream_broken"
    assert len(info.message) < 600


def parse_arguments(arguments: Any) -> Any:
    parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return {} if parsed is None else parsed


def test_there_are_recordings() -> None:
    assert len(CASES) > 100


# LC-08, LC-09, LC-10, AC-40, AC-50, AC-51
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_recorded_answers_over_http(case: Case, client: HttpClient, server: ReplayServer) -> None:
    server.reply(
        Answer(
            chunks=case.chunks if len(case.chunks) < 500 else [case.body],
            status=case.meta["http_status"],
            headers=case.headers,
        )
    )
    check(case, await ask(openai_chat(server.url, "key", client)))


# LC-08, LC-09, LC-10, AC-40, AC-50, AC-51
@pytest.mark.parametrize("case", ANSWERED, ids=lambda case: case.name)
def test_recorded_answers_in_any_pieces(case: Case) -> None:
    """Whole, as they were read, and byte by byte: the same events, not only the same end."""
    whole = read([case.body])
    check(case, whole)
    in_chunks, in_bytes = read(case.chunks), read([bytes([byte]) for byte in case.body])
    assert whole.live == in_chunks.live == in_bytes.live
    assert whole.completed == in_chunks.completed == in_bytes.completed


def test_the_details_of_reasoning_are_kept_and_sent_back() -> None:
    """The text counts once, and the signature that came alone belongs to it."""
    (case,) = [case for case in CASES if case.name == "47-reasoning-twice-openrouter"]
    outcome = read([case.body], provider_name="openrouter")
    assert outcome.completed is not None
    (part,) = outcome.completed.message.reasoning
    assert part.data["reasoning_details"] == case.expected["replay"]["reasoning_details"]
    (replayed,) = build_messages(None, [outcome.completed.message], "openrouter")
    assert replayed["reasoning_details"] == case.expected["replay"]["reasoning_details"]
    assert "reasoning" not in replayed
    signatures = [event for event in outcome.live if isinstance(event, ReasoningDelta) and event.kind == "signature"]
    assert [event.data["reasoning_details"][0]["signature"] for event in signatures] == ["c2ln"]


# --- calls -----------------------------------------------------------------------------------------------------------


# AC-50
def test_a_call_without_id_gets_the_same_one_in_every_attempt() -> None:
    chunks = [fragment(index=0, name="add", arguments='{"a":1}'), fragment(index=1, name="add", arguments='{"a":2}')]
    assert calls_of(*chunks) == calls_of(*chunks) == [("call_1_0", "add", {"a": 1}), ("call_1_1", "add", {"a": 2})]


# AC-50
def test_two_objects_under_one_index_without_ids_are_two_calls() -> None:
    assert calls_of(
        fragment(index=0, name="add", arguments='{"a":'),
        fragment(index=0, arguments="1}"),
        fragment(index=0, name="add", arguments='{"a":2}'),
    ) == [("call_1_0", "add", {"a": 1}), ("call_1_1", "add", {"a": 2})]


# AC-50
def test_calls_without_index_and_id_begin_with_a_name() -> None:
    assert calls_of(
        fragment(name="add", arguments='{"a":1}'),
        fragment(name="sub", arguments='{"a":'),
        fragment(arguments="2}"),
    ) == [("call_1_0", "add", {"a": 1}), ("call_1_1", "sub", {"a": 2})]


# AC-50
def test_fragments_of_calls_that_share_an_index_go_by_their_id() -> None:
    assert calls_of(
        fragment(index=0, id="a", name="add", arguments='{"n":'),
        fragment(index=0, id="b", name="sub", arguments='{"n":'),
        fragment(index=0, id="a", arguments="1}"),
        fragment(index=0, id="b", arguments="2}"),
    ) == [("a", "add", {"n": 1}), ("b", "sub", {"n": 2})]


def test_an_id_that_comes_twice_is_made_unique() -> None:
    calls = calls_of(
        fragment(index=0, id="same", name="add", arguments='{"n":1}'),
        fragment(index=1, id="same", name="add", arguments='{"n":1}'),
    )
    assert calls == [("same", "add", {"n": 1}), ("same_1", "add", {"n": 1})]


def test_a_call_that_is_sent_whole_once_more_is_one_call() -> None:
    whole = fragment(index=0, id="a", name="add", arguments='{"n":1}')
    assert calls_of(
        fragment(index=0, id="a", name="add", arguments='{"n":'), fragment(index=0, arguments="1}"), whole
    ) == [("a", "add", {"n": 1})]


def test_an_id_that_comes_later_is_no_other_call() -> None:
    assert calls_of(fragment(index=0, name="add", arguments='{"n":'), fragment(index=0, id="late", arguments="1}")) == [
        ("call_1_0", "add", {"n": 1})
    ]


def test_a_name_that_comes_later_is_told_to_watchers() -> None:
    outcome = read([sse(fragment(index=0, id="a"), fragment(index=0, name="add", arguments="{}"))])
    assert outcome.live == [
        ToolCallStarted(step_number=3, index=0, tool_call_id="a"),
        ToolCallDelta(step_number=3, index=0, tool_call_id="a", name_delta="add", arguments_delta="{}"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (None, {}),
        ("null", {}),
        ({}, {}),
        ({"a": [1]}, {"a": [1]}),
        ('{"a":"line\nbreak"}', {"a": "line\nbreak"}),
        ('{"a":"half \\ud83d pair"}', {"a": "half \ufffd pair"}),
    ],
)
def test_arguments_come_in_many_forms(arguments: Any, expected: dict[str, Any]) -> None:
    assert calls_of(fragment(index=0, id="a", name="add", arguments=arguments)) == [("a", "add", expected)]


@pytest.mark.parametrize("arguments", ["[1]", [1], "7", '{"a":1', '{"a":1}{"a":2}', '{"a":NaN}', "[" * 5000])
def test_arguments_that_are_no_object_make_the_call_invalid(arguments: Any) -> None:
    (call,) = completed_of(fragment(index=0, id="a", name="add", arguments=arguments)).message.tool_calls
    assert call.error is not None and call.arguments == {}


def test_a_call_without_a_name_is_invalid_and_its_sibling_is_not() -> None:
    first, second = completed_of(
        fragment(index=0, id="a", arguments="{}"), fragment(index=1, id="b", name="add", arguments="{}")
    ).message.tool_calls
    assert first.error == "the call names no tool" and second.error is None


def test_the_old_function_call_is_no_call() -> None:
    """It answers `functions`, which we never send: nobody could be given its result."""
    body = {
        "choices": [
            {"message": {"function_call": {"name": "add", "arguments": "{}"}}, "finish_reason": "function_call"}
        ]
    }
    outcome = read([msgspec.json.encode(body)])
    assert outcome.completed is not None and outcome.completed.finish_reason == "tool_calls"
    assert outcome.completed.message.tool_calls == []


def test_state_on_a_call_goes_back_to_the_provider_that_wrote_it() -> None:
    state = {"google": {"thought_signature": "c2ln"}}
    message = completed_of(fragment(index=0, id="a", name="add", extra_content=state), provider_name="gemini").message
    assert build_messages(None, [message], "gemini")[0]["tool_calls"][0]["extra_content"] == state
    assert "extra_content" not in build_messages(None, [message], "openai")[0]["tool_calls"][0]


# --- the answer ------------------------------------------------------------------------------------------------------


# LC-09
def test_nothing_is_lost_on_the_chunk_with_the_finish_reason() -> None:
    last = delta(
        "stop",
        content="Hi",
        reasoning_content="Hm",
        tool_calls=[{"index": 0, "id": "a", "function": {"name": "add", "arguments": "{}"}}],
    )
    completed = completed_of({**last, "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})
    assert completed.message.content == [
        ReasoningPart(text="Hm", provider="openai", data={"field": "reasoning_content"}),
        TextPart("Hi"),
        ToolCallPart(ToolCall(id="a", name="add")),
    ]
    assert completed.finish_reason == "tool_calls"
    assert completed.usage == Usage(input_tokens=1, output_tokens=2, total_tokens=3)


def test_parts_stand_in_the_order_they_began() -> None:
    message = completed_of(
        delta(content="a"), fragment(index=0, id="x", name="add"), delta(reasoning="r"), delta(content="b")
    ).message
    assert [type(part) for part in message.content] == [TextPart, ToolCallPart, ReasoningPart]
    assert message.text == "ab"


def test_text_alone_is_a_string_and_the_message_says_where_it_comes_from() -> None:
    message = completed_of({"model": "some-model-7", **delta("stop", content="Hi")}).message
    assert message == Message(
        role="assistant", content="Hi", turn_id="turn", step=3, finish_reason="stop", model="some-model-7"
    )


def test_the_last_usage_counts() -> None:
    first, last = {"prompt_tokens": 5, "completion_tokens": 1}, {"prompt_tokens": 5, "completion_tokens": 2}
    completed = completed_of({**delta(content="a"), "usage": first}, {**delta("stop"), "usage": last})
    assert completed.usage == Usage(input_tokens=5, output_tokens=2, total_tokens=7)


def test_a_second_candidate_is_left_out() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "length"}]}
    completed = completed_of(delta(content="a"), other, delta("stop"))
    assert (completed.message.content, completed.finish_reason) == ("a", "stop")


def test_a_whole_message_at_the_end_of_a_stream_is_not_counted_again() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    assert completed_of(delta(content="a"), delta(content="b"), whole).message.content == "ab"


@pytest.mark.parametrize(
    "noise", [b"7", b'"ping"', b"[]", b"{}", b"null", b"", b'{"choices":[null]}', b'{"surprise":[{}]}']
)
def test_events_that_say_nothing_do_no_harm(noise: bytes) -> None:
    outcome = read([b"data: " + noise + b"\n\n" + sse(delta("stop", content="Hi"))])
    assert outcome.completed is not None and outcome.completed.message.content == "Hi"


def test_half_a_surrogate_pair_costs_a_character_not_the_answer() -> None:
    outcome = read([b'data: {"choices":[{"delta":{"content":"a\\ud83d"},"finish_reason":"stop"}]}\n\n'])
    assert outcome.completed is not None and outcome.completed.message.content == "a\ufffd"


# LC-10
@pytest.mark.parametrize("end", [b"", b'data: {"choices":[{"delta":{"content":"cut', b": only a comment\n\n"])
def test_an_end_without_a_finish_reason_is_a_broken_stream(end: bytes) -> None:
    info = failure_of(read([sse(delta(content="Hi"), done=False) + end]))
    assert (info.kind, info.retryable) == ("stream_broken", True)


def test_half_a_chunk_after_the_end_of_the_answer_does_not_break_it() -> None:
    outcome = read([sse(delta("stop", content="Hi"), done=False) + b'data: {"usa'])
    assert outcome.completed is not None and outcome.completed.message.content == "Hi"


# LC-10
def test_what_came_before_an_error_was_told() -> None:
    error = {"error": {"message": "upstream went away", "code": "server_error"}}
    outcome = read([sse({**delta("stop", content="Hi"), **error})])
    assert outcome.live == [TextDelta(text="Hi", step_number=3)]
    assert failure_of(outcome).retryable is True


# LC-10
@pytest.mark.parametrize(
    ("event", "kind", "retryable"),
    [
        ({"error": {"message": "busy", "type": "overloaded_error"}}, "overloaded", True),
        ({"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, "rate_limited", True),
        ({"error": {"message": "no", "type": "invalid_request_error"}}, "bad_request", False),
        ({"error": {"message": "no", "code": "invalid_api_key"}}, "authentication", False),
        ({"error": "something"}, "provider_error", True),
        (
            {"object": "error", "message": "too long: maximum context length is 8", "code": 400},
            "context_overflow",
            False,
        ),
        (delta("error"), "provider_error", True),
    ],
)
def test_errors_inside_a_stream(event: dict[str, Any], kind: str, retryable: bool) -> None:
    info = failure_of(read([sse(delta(content="Hi"), event)]))
    assert (info.kind, info.retryable) == (kind, retryable)


def test_an_error_event_of_plain_text_is_an_error() -> None:
    info = failure_of(read([b"event: error\ndata: out of memory\n\n"]))
    assert (info.kind, info.message) == ("provider_error", "out of memory")


# --- errors over HTTP ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error", "kind", "retryable"),
    [
        (400, {"code": "context_length_exceeded", "message": "too much"}, "context_overflow", False),
        (400, {"message": "This model's maximum context length is 8192 tokens"}, "context_overflow", False),
        (
            400,
            {"message": "This model's maximum prompt length is 8 but the request contains 9"},
            "context_overflow",
            False,
        ),
        (422, {"message": "`inputs` tokens + `max_new_tokens` must be <= 4096"}, "context_overflow", False),
        (400, {"message": "prompt is too long: 208310 tokens > 200000 maximum"}, "context_overflow", False),
        (400, {"message": "the request exceeds the available context size"}, "context_overflow", False),
        (
            413,
            {"code": "rate_limit_exceeded", "message": "Request too large on tokens per minute"},
            "bad_request",
            False,
        ),
        (400, {"code": "content_filter", "message": "filtered"}, "content_filter", False),
        (403, {"message": "Your input was flagged"}, "content_filter", False),
        (400, {"message": "no such parameter"}, "bad_request", False),
        (401, {"message": "no key"}, "authentication", False),
        (403, {"message": "not yours"}, "authentication", False),
        (404, {"message": "no such model"}, "bad_request", False),
        (408, {}, "timeout", True),
        (409, {}, "provider_error", True),
        (425, {}, "provider_error", True),
        (429, {"message": "tokens per minute"}, "rate_limited", True),
        (429, {"code": "insufficient_quota", "message": "pay first"}, "rate_limited", False),
        (500, {}, "provider_error", True),
        (503, {}, "overloaded", True),
        (529, {}, "overloaded", True),
    ],
)
async def test_the_meaning_of_a_status(
    status: int, error: dict[str, Any], kind: str, retryable: bool, client: HttpClient, server: ReplayServer
) -> None:
    server.reply(Answer(chunks=[msgspec.json.encode({"error": error})], status=status))
    info = failure_of(await ask(openai_chat(server.url, "key", client)))
    assert (info.kind, info.retryable, info.status) == (kind, retryable, status)


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"retry-after": "2"}, 2, 2),
        ({"Retry-After": "1.5"}, 1.5, 1.5),
        ({"retry-after": "9", "retry-after-ms": "1200"}, 1.2, 1.2),
        ({"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"}, 1e8, 1e10),
        ({"retry-after": "Fri, 01 Jan 1999 00:00:00 GMT"}, 0, 0),
        ({"retry-after": "-4"}, 0, 0),
    ],
)
async def test_how_long_to_wait(
    headers: dict[str, str], low: float, high: float, client: HttpClient, server: ReplayServer
) -> None:
    server.reply(Answer(status=429, headers=headers))
    seconds = failure_of(await ask(openai_chat(server.url, "key", client))).retry_after_seconds
    assert low <= seconds <= high


@pytest.mark.parametrize("value", ["soon", "inf", "nan", "Fri, 99 Jan 2100 99:00:00 GMT"])
async def test_a_time_to_wait_that_is_none(value: str, client: HttpClient, server: ReplayServer) -> None:
    server.reply(Answer(status=429, headers={"retry-after": value}))
    assert failure_of(await ask(openai_chat(server.url, "key", client))).retry_after_seconds is None


async def test_an_error_page_is_told_in_a_line(client: HttpClient, server: ReplayServer) -> None:
    page = b"<!DOCTYPE html><html><style>p{}</style><body><h1>Bad gateway</h1>" + b"<p>more</p>" * 50_000
    server.reply(Answer(chunks=[page], status=502, headers={"content-type": "text/html"}))
    info = failure_of(await ask(openai_chat(server.url, "key", client)))
    assert info.message.startswith("502: Bad gateway more") and len(info.message) < 600 and "\n" not in info.message


# --- the connection --------------------------------------------------------------------------------------------------


async def test_the_connection_is_used_again_after_a_whole_answer(client: HttpClient, server: ReplayServer) -> None:
    server.reply(Answer(chunks=[sse(delta("stop", content="Hi"))]))
    for _ in range(3):
        assert (await ask(openai_chat(server.url, "key", client))).completed is not None
    assert server.connections == 1


async def test_a_kept_connection_that_was_closed_costs_no_attempt(client: HttpClient, server: ReplayServer) -> None:
    whole = Answer(chunks=[sse(delta("stop", content="Hi"))])
    server.reply(whole, Answer(is_silent=True), whole)
    for _ in range(2):
        assert (await ask(openai_chat(server.url, "key", client))).completed is not None
    assert [request.connection for request in server.requests] == [0, 0, 1]
    assert server.requests[1].body == server.requests[2].body


async def test_a_new_connection_that_is_closed_is_an_error(client: HttpClient, server: ReplayServer) -> None:
    server.reply(Answer(is_silent=True))
    info = failure_of(await ask(openai_chat(server.url, "key", client)))
    assert (info.kind, info.retryable, len(server.requests)) == ("provider_error", True, 1)


# LC-10
async def test_an_answer_that_began_is_not_asked_for_again(client: HttpClient, server: ReplayServer) -> None:
    part = [sse(delta(content="Hi"), done=False)]
    server.reply(Answer(chunks=[sse(delta("stop"))]), Answer(chunks=part, ending="cut"))
    await ask(openai_chat(server.url, "key", client))
    outcome = await ask(openai_chat(server.url, "key", client))
    assert outcome.live == [TextDelta(text="Hi", step_number=3)]
    assert failure_of(outcome).kind == "stream_broken" and len(server.requests) == 2


async def test_a_cut_after_the_finish_reason_loses_only_what_may_follow(
    client: HttpClient, server: ReplayServer
) -> None:
    server.reply(Answer(chunks=[sse(delta("stop", content="Hi"), done=False)], ending="cut"))
    assert (await ask(openai_chat(server.url, "key", client))).completed is not None


async def test_a_refused_connection_is_told_without_the_path(client: HttpClient, server: ReplayServer) -> None:
    url = server.url
    await server.__aexit__(None, None, None)
    info = failure_of(await ask(openai_chat(f"{url}/secret", "key", client)))
    assert (info.kind, info.retryable) == ("provider_error", True)
    assert "127.0.0.1" in info.message and "secret" not in info.message


async def test_leaving_the_iterator_closes_the_socket(client: HttpClient, server: ReplayServer) -> None:
    server.reply(Answer(chunks=[sse(delta(content="Hi"), done=False)], ending="stay_open"))
    async with aclosing(openai_chat(server.url, "key", client).stream(REQUEST)) as stream:
        assert await anext(stream) == TextDelta(text="Hi", step_number=3)
        assert not server.requests[0].closed.is_set()
    await asyncio.wait_for(server.requests[0].closed.wait(), 1)


@pytest.mark.parametrize("chunks", [[], [sse(delta(content="Hi"), done=False)]], ids=["before text", "after text"])
async def test_cancelling_the_reader_closes_the_socket(
    chunks: list[bytes], client: HttpClient, server: ReplayServer
) -> None:
    server.reply(Answer(chunks=chunks, ending="stay_open"))
    seen = asyncio.Event()

    async def consume() -> None:
        async for _ in openai_chat(server.url, "key", client).stream(REQUEST):
            seen.set()

    task = asyncio.create_task(consume())
    while not server.requests:
        await asyncio.sleep(0)
    if chunks:
        await asyncio.wait_for(seen.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.requests[0].closed.wait(), 1)


@pytest.mark.parametrize(
    ("timeouts", "gates", "named"),
    [
        (StreamTimeouts(first_token_seconds=0.05), {0: NEVER()}, "first_token_seconds"),
        (StreamTimeouts(first_token_seconds=0.05), {1: NEVER()}, "first_token_seconds"),
        (StreamTimeouts(idle_seconds=0.05), {2: NEVER()}, "idle_seconds"),
        (StreamTimeouts(idle_seconds=0.05), {3: NEVER()}, "idle_seconds"),
        (StreamTimeouts(total_seconds=0.05), {2: NEVER()}, "total_seconds"),
    ],
    ids=["no answer", "comments only", "stall", "stall with comments", "total"],
)
async def test_three_limits_of_time(
    timeouts: StreamTimeouts, gates: dict[int, asyncio.Event], named: str, client: HttpClient, server: ReplayServer
) -> None:
    ping = b": ping\n\n"
    server.reply(Answer(chunks=[ping, sse(delta(content="Hi"), done=False), ping, ping], gates=gates))
    info = failure_of(await ask(openai_chat(server.url, "key", client, timeouts=timeouts)))
    assert (info.kind, info.retryable) == ("timeout", True)
    assert named in info.message
    await asyncio.wait_for(server.requests[0].closed.wait(), 1)


async def test_comments_do_not_extend_the_limits(client: HttpClient, server: ReplayServer) -> None:
    """A server that sends comments for ever says nothing."""
    server.reply(Answer(chunks=[b": ping\n\n"] * 1_000_000))
    timeouts = StreamTimeouts(first_token_seconds=0.05)
    info = failure_of(await ask(openai_chat(server.url, "key", client, timeouts=timeouts)))
    assert "first_token_seconds" in info.message


async def test_a_server_that_stays_open_after_done_does_not_hold_the_answer(server: ReplayServer) -> None:
    client = HttpClient(HttpSettings(timeouts=StreamTimeouts(idle_seconds=60)))
    server.reply(Answer(chunks=[sse(delta("stop", content="Hi"))], ending="stay_open"))
    outcome = await asyncio.wait_for(ask(openai_chat(server.url, "key", client)), 5)
    assert outcome.completed is not None
    await asyncio.wait_for(server.requests[0].closed.wait(), 1)
    await client.close()


async def test_no_more_connections_than_the_settings_allow(server: ReplayServer) -> None:
    client = HttpClient(HttpSettings(connections_max=1))
    server.reply(Answer(chunks=[sse(delta(content="Hi"), done=False)], ending="stay_open"))
    waiting = openai_chat(server.url, "key", client, timeouts=StreamTimeouts(first_token_seconds=0.05))
    async with aclosing(openai_chat(server.url, "key", client).stream(REQUEST)) as stream:
        await anext(stream)
        assert failure_of(await ask(waiting)).kind == "timeout"
    assert len(server.requests) == server.connections == 1
    await client.close()


async def test_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, client: HttpClient, server: ReplayServer
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.reply(Answer(chunks=[sse(delta("stop", content="Hi"))]))
    for base_url in ("http://provider.invalid/v1", server.url):
        assert (await ask(openai_chat(base_url, "key", client))).completed is not None
    paths = [request.path for request in server.requests]
    assert paths == ["http://provider.invalid/v1/chat/completions", "/chat/completions"]


# --- the request -----------------------------------------------------------------------------------------------------


async def test_the_request_on_the_wire(client: HttpClient, server: ReplayServer) -> None:
    server.reply(Answer(chunks=[sse(delta("stop"))]))
    request = ProviderRequest(
        model="m",
        system="Be brief.",
        messages=[USER],
        tools=[ToolSpec(name="add", description="Adds.", schema={"type": "object"})],
        tool_choice="add",
        options={"temperature": 0, "model": "other", "stream_options": None},
    )
    await ask(openai_chat(f"{server.url}/v1/", "key", client, headers={"x-title": "Turnmill"}), request)
    (recorded,) = server.requests
    assert (recorded.method, recorded.path) == ("POST", "/v1/chat/completions")
    assert recorded.headers["authorization"] == "Bearer key"
    assert recorded.headers["content-type"] == "application/json"
    assert recorded.headers["x-title"] == "Turnmill"
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert recorded.json == {
        "model": "other",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stream": True,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0,
    }


def test_usage_is_asked_for_in_streams_only() -> None:
    assert build_body(REQUEST, "openai")["stream_options"] == {"include_usage": True}
    whole = ProviderRequest(model="m", messages=[USER], options={"stream": False})
    assert build_body(whole, "openai") == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": False,
    }


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_the_apis_own_tool_choices(choice: str) -> None:
    request = ProviderRequest(model="m", messages=[], tools=[ToolSpec(name="add")], tool_choice=choice)
    assert build_body(request, "openai")["tool_choice"] == choice
    assert "tool_choice" not in build_body(ProviderRequest(model="m", messages=[], tool_choice=choice), "openai")


def test_images_and_files() -> None:
    parts = [
        TextPart("Look"),
        ImagePart(url="https://example.com/a.png"),
        ImagePart(data=b"abc", media_type="image/jpeg"),
        FilePart(data=b"abc", media_type="image/gif"),
        FilePart(data=b"abc", media_type="application/pdf", filename="a.pdf"),
        FilePart(data=b"abc", media_type="audio/mpeg"),
    ]
    (message,) = build_messages(None, [Message(role="user", content=[*parts])], "openai")
    assert message["content"] == [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,YWJj"}},
        {"type": "image_url", "image_url": {"url": "data:image/gif;base64,YWJj"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,YWJj"}},
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "mp3"}},
    ]


def test_an_image_that_was_not_loaded_is_an_error() -> None:
    with pytest.raises(ProviderError) as caught:
        build_messages(None, [Message(role="user", content=[ImagePart()])], "openai")
    assert (caught.value.info.kind, caught.value.info.retryable) == ("bad_request", False)


def results(*given: ToolResult) -> Message:
    return Message(role="tool", content=[ToolResultPart(result) for result in given])


def test_calls_and_their_results() -> None:
    calls = [
        ToolCall(id="a", name="add", arguments={"text": "ü", "n": 1}),
        ToolCall(id="b", name="sub", error="cut: {"),
    ]
    messages = [
        Message(role="assistant", content=[*map(ToolCallPart, calls)]),
        results(ToolResult(tool_call_id="a", tool_name="add", result={"sum": [1, "ü"]})),
        results(ToolResult(tool_call_id="b", tool_name="sub", result="not JSON: {", is_error=True)),
    ]
    assert build_messages(None, messages, "openai") == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"text":"ü","n":1}'}},
                {"id": "b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": '{"sum":[1,"ü"]}'},
        {"role": "tool", "tool_call_id": "b", "content": "not JSON: {"},
    ]


def test_images_of_results_follow_all_results() -> None:
    """Nothing may stand between a call and its answers."""
    image = ImagePart(url="https://example.com/a.png")
    messages = [
        results(ToolResult(tool_call_id="a", tool_name="draw", content=[TextPart("Done"), image])),
        results(ToolResult(tool_call_id="b", tool_name="add", result=3)),
        USER,
    ]
    assert build_messages(None, messages, "openai") == [
        {"role": "tool", "tool_call_id": "a", "content": "Done"},
        {"role": "tool", "tool_call_id": "b", "content": "3"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
        {"role": "user", "content": "Hello"},
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_to_the_provider_that_wrote_it(field: str) -> None:
    chunks = [delta(**{field: "Let me"}), delta(**{field: " think"}), delta("stop", content="Hi")]
    message = completed_of(*chunks, provider_name="deepseek").message
    assert build_messages(None, [message], "deepseek") == [
        {"role": "assistant", "content": "Hi", field: "Let me think"}
    ]
    assert build_messages(None, [message], "openai") == [{"role": "assistant", "content": "Hi"}]


def test_thinking_among_the_content_goes_back_as_it_came() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}
    text = {"type": "text", "text": "Hi"}
    message = completed_of(delta(content=[thinking]), delta("stop", content=[text]), provider_name="mistral").message
    assert build_messages(None, [message], "mistral") == [{"role": "assistant", "content": [thinking, text]}]
    assert build_messages(None, [message], "openai") == [{"role": "assistant", "content": "Hi"}]
