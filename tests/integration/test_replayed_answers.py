"""Recorded answers of providers, byte for byte, through the whole runtime.

A server replays each case; an LLM worker in a process of its own reads it as OpenAI's. What the turn made of it is
compared with what the case expects. An answer that asks for tools, or fails in a way that another attempt may help, is
followed by a plain one, so that every turn shows how it goes on.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps import lifecycle as app
from support.fleet import Fleet
from support.recordings import Case, load_cases
from support.replay_server import Answer, ReplayServer, replaying
from turnmill.protocol.content import Usage
from turnmill.runtime import RetryPolicy, Turn, TurnFailedError, TurnOptions
from turnmill.runtime.client import Client

PATIENCE_SECONDS = 20.0
CASES = load_cases("openai-chat")
BYTEWISE_MAX = 3000
"""Bodies up to this length are written one byte at a time; it takes its time with the larger ones."""


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def choice(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


PLAIN = Answer(chunks=[sse(choice("stop", content="the plain one"))])


@pytest.fixture(scope="module")
def server() -> Iterator[ReplayServer]:
    with replaying() as server:
        yield server


@pytest.fixture(scope="module")
def deployment(valkey_url: str, server: ReplayServer) -> Iterator[Fleet]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENAI_BASE_URL", server.url + "/v1")
        environment.setenv("OPENAI_API_KEY", "sk-test")
        with Fleet(valkey_url, f"test-{uuid.uuid4().hex[:12]}", directory, "apps.lifecycle") as fleet:
            fleet.start()
            yield fleet
    shutil.rmtree(directory)


@pytest.fixture
async def client(deployment: Fleet) -> AsyncIterator[Client]:
    async with deployment.client() as client:
        yield client


def answer_of(case: Case) -> Answer:
    body = case.body
    chunks = [bytes([byte]) for byte in body] if len(body) <= BYTEWISE_MAX else case.chunks
    return Answer(
        chunks=chunks if len(chunks) <= BYTEWISE_MAX else [body], status=case.meta["http_status"], headers=case.headers
    )


async def play(client: Client, server: ReplayServer, *answers: Answer, **options: Any) -> Turn:
    server.reply_only(*answers)
    return await client.turn(app.replayed, "Hello", options=TurnOptions(**options) if options else None)


async def result_of(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def events_of(turn: Turn, *types: str) -> list[Any]:
    return [event async for event in turn.events(types=types) if event.type in types]


def reads(error: str | None) -> str:
    return " ".join((error or "").split())


# LC-08 LC-09 LC-10 AC-40 AC-50 AC-51
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_turn_makes_of_an_answer_what_it_says(case: Case, client: Client, server: ReplayServer) -> None:
    turn = await play(client, server, answer_of(case), PLAIN)
    if case.expected["finish"] == "error":
        await check_failure(case.expected["error"], turn, is_in_body=case.meta["http_status"] == 200)
    else:
        await check_answer(case.expected, turn)


async def check_answer(expected: dict[str, Any], turn: Turn) -> None:
    result = await result_of(turn)
    step = result.steps[0]
    text = (expected.get("text") or "") + (expected.get("refusal") or "")
    calls = expected["tool_calls"]
    assert step.text == text
    assert "".join(part.text for part in step.reasoning_parts) == (expected.get("reasoning") or "")
    assert step.finish_reason == expected["finish"]
    check_usage(expected.get("usage"), step.usage)
    assert len(result.steps) == (2 if calls else 1)
    assert result.text == text + ("the plain one" if calls else "")
    assert [(call.id, call.name) for call in step.tool_calls] == [(call["id"], call["name"]) for call in calls]
    for call, wanted in zip(result.function_calls, calls, strict=True):
        check_call(call, wanted)
    assert "".join([event.text for event in await events_of(turn, "text.delta")]) == result.text


def check_call(call: Any, wanted: dict[str, Any]) -> None:
    if not wanted.get("valid", True):
        assert call.arguments == {}
        assert call.result.startswith(("Error: invalid arguments for", "Error: unknown tool"))
        return
    arguments = wanted["arguments"]
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    assert call.arguments == ({} if arguments is None else arguments)
    if call.name != "get_weather":
        assert call.result == f"Error: unknown tool '{call.name}'. Available: get_weather"
    elif set(call.arguments) <= {"city"}:
        assert call.result == f"rain in {call.arguments.get('city', '')}"
    else:
        assert call.result.startswith("Error: invalid arguments for 'get_weather'")


def check_usage(expected: dict[str, Any] | None, usage: Usage | None) -> None:
    if expected is None:
        assert usage is None
        return
    assert usage is not None
    assert usage.input_tokens == expected.get("input_total", expected["input"])
    assert usage.output_tokens == expected.get("output_total", expected["output"])
    assert usage.cached_tokens == (expected.get("cached") or 0)
    assert usage.reasoning_tokens == (expected.get("reasoning") or 0)


async def check_failure(expected: dict[str, Any], turn: Turn, *, is_in_body: bool) -> None:
    """Either another attempt is made, and its answer is the turn's, or the turn fails; in both cases with the reason."""
    said = expected.get("body_message") or (expected.get("message") if is_in_body else None)
    message = reads(said)[:300]
    try:
        result = await result_of(turn)
    except TurnFailedError as error:
        assert not expected.get("retryable", False)
        assert message in reads(str(error))
        assert error.result.text == ""
        return
    assert expected.get("retryable", True)
    assert result.text == "the plain one"
    (retrying,) = await events_of(turn, "step.retrying")
    assert message in reads(retrying.error)
    assert retrying.delay >= (expected.get("retry_after_s") or 0)
    (reset,) = await events_of(turn, "step.reset")
    assert reset.attempt == 2


async def test_all_in_one_chunk(client: Client, server: ReplayServer) -> None:  # LC-09
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city":"Ōtsu"}'}}
    everything = choice("tool_calls", content="Let me see. ", reasoning_content="hm", tool_calls=[call])
    everything["usage"] = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    turn = await play(client, server, Answer(chunks=[sse(everything)]), PLAIN)
    result = await result_of(turn)
    first = result.steps[0]
    assert (first.text, [part.text for part in first.reasoning_parts]) == ("Let me see. ", ["hm"])
    assert first.usage == Usage(input_tokens=3, output_tokens=4, total_tokens=7)
    assert [call.result for call in result.function_calls] == ["rain in Ōtsu"]
    assert result.answer == "the plain one"
    second = server.requests[-1].json["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "tool"]
    assert second[2]["tool_call_id"] == second[1]["tool_calls"][0]["id"] == "call_1"
    assert second[2]["content"] == "rain in Ōtsu"


@pytest.mark.parametrize(
    "text", ["漢字とかな交じり文", "👩‍🚀🏳️‍🌈é", 'tab\tquote" back\\slash'], ids=["cjk", "emoji", "escapes"]
)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
async def test_text_is_the_same_byte_for_byte_however_it_is_cut(
    client: Client, server: ReplayServer, text: str, line_end: bytes
) -> None:  # AC-40
    chunks = [choice(content=character) for character in text] + [choice("stop")]
    lines = [
        b": comment",
        b"",
        *[line for chunk in chunks for line in (b"data:" + json.dumps(chunk, ensure_ascii=False).encode(), b"")],
    ]
    body = line_end.join(lines).rstrip(line_end)  # no final blank line either
    turn = await play(client, server, Answer(chunks=[bytes([byte]) for byte in body]))
    pieces = [piece async for piece in turn.text_stream()]
    assert "".join(pieces) == (await result_of(turn)).text == text


async def test_a_rate_limit_is_waited_for_and_costs_no_attempt(client: Client, server: ReplayServer) -> None:  # AC-49
    refused = Answer(
        chunks=[b'{"error": {"message": "slow down", "type": "requests", "code": "rate_limit_exceeded"}}'],
        status=429,
        headers={"content-type": "application/json", "retry-after-ms": "70"},
    )
    policy = RetryPolicy(max_attempts=1, initial_delay_seconds=0.01)
    turn = await play(client, server, refused, refused, PLAIN, retry=policy)
    assert (await result_of(turn)).text == "the plain one"
    retrying = await events_of(turn, "step.retrying")
    assert [(event.attempt, event.delay) for event in retrying] == [(2, 0.07), (3, 0.07)]
    assert all("slow down" in event.error for event in retrying)


async def test_an_overloaded_provider_uses_up_the_attempts(client: Client, server: ReplayServer) -> None:  # AC-49
    refused = Answer(chunks=[b"busy"], status=503, headers={"content-type": "text/plain"})
    before = len(server.requests)
    turn = await play(client, server, refused)
    with pytest.raises(TurnFailedError) as caught:
        await result_of(turn)
    assert caught.value.error_type in ("overloaded", "provider_error")
    assert len(server.requests) - before == app.replayed.retry.max_attempts


async def test_a_connection_that_breaks_in_mid_stream_is_tried_again(
    client: Client, server: ReplayServer
) -> None:  # LC-10 AC-49
    broken = Answer(chunks=[sse(choice(content="half an ans"))[:-14]], ending="cut")
    turn = await play(client, server, broken, PLAIN)
    pieces = [piece async for piece in turn.text_stream()]
    result = await result_of(turn)
    assert result.text == "the plain one"
    assert [event.type for event in await events_of(turn, "step.retrying", "step.reset")] == [
        "step.retrying",
        "step.reset",
    ]
    assert "".join(pieces).endswith("the plain one")
