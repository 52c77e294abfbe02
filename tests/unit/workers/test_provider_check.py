"""What `turnmill provider check` tries of a live endpoint, and what it makes of each answer; over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from support.providers import openai_chat
from support.replay_server import Answer, ReplayServer
from turnmill.workers.provider_check import Tried, check_provider
from turnmill.workers.providers.http_client import HttpClient
from turnmill.workers.providers.http_provider import HttpProvider
from turnmill.workers.providers.scripted import ScriptedProvider

FEATURES = ["text", "not streamed", "stream", "tool", "parallel tools", "structured output", "abort"]


@pytest.fixture
async def server() -> AsyncIterator[ReplayServer]:
    async with ReplayServer() as server:
        yield server


@pytest.fixture
async def provider(server: ReplayServer) -> AsyncIterator[HttpProvider]:
    client = HttpClient()
    yield openai_chat(server.url, "sk-0123456789", client)
    await client.close()


async def tried(provider: Any, seconds_max: float = 10.0, **options: Any) -> dict[str, Tried]:
    return {each.feature: each async for each in check_provider(provider, "model", options, seconds_max)}


def streamed(*deltas: dict[str, Any], finish: str = "stop") -> Answer:
    """An answer of these pieces."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return Answer(chunks=[*(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"])


def text(*pieces: str) -> Answer:
    return streamed(*({"content": piece} for piece in pieces))


def calls(*arguments: str, name: str = "get_weather") -> Answer:
    made = [
        {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": each}}
        for index, each in enumerate(arguments)
    ]
    return streamed({"tool_calls": made}, finish="tool_calls")


def whole(content: str) -> Answer:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}
    return Answer(chunks=[msgspec.json.encode(body)], headers={"content-type": "application/json"})


def refused(status: int, message: str = "no") -> Answer:
    body = msgspec.json.encode({"error": {"message": message}})
    return Answer(chunks=[body], status=status, headers={"content-type": "application/json"})


PARIS = '{"city": "Paris"}'
PONG = text("pong")
NUMBERS = text("one ", "two ", "three")


async def test_an_endpoint_that_can_do_everything(server: ReplayServer, provider: HttpProvider) -> None:
    server.reply(
        PONG,
        whole("pong"),
        NUMBERS,
        calls(PARIS),
        text("It is sunny."),
        calls(PARIS, '{"city": "Rome"}'),
        text('{"name": "Paris", "country": "France"}'),
        Answer(chunks=NUMBERS.chunks[:2], ending="stay_open"),
        PONG,
    )
    found = await tried(provider, temperature=0)
    assert list(found) == FEATURES
    assert {each.status for each in found.values()} == {"ok"}, found
    assert found["text"].seen == "'pong'"
    assert found["stream"].seen.startswith("3 pieces, the first after ")
    assert found["tool"].seen == "get_weather(city='Paris'), and with its result: 'It is sunny.'"
    assert found["parallel tools"].seen == "2 calls at once: get_weather(city='Paris'), get_weather(city='Rome')"
    assert found["abort"].seen.startswith("left in ")
    asked = [request.json for request in server.requests]
    assert all(each["model"] == "model" and each["temperature"] == 0 for each in asked)
    assert [each.get("stream", False) for each in asked] == [True, False, *[True] * 7]
    assert asked[3]["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert [message["role"] for message in asked[4]["messages"]] == ["user", "assistant", "tool"]
    assert asked[6]["response_format"]["json_schema"]["name"] == "city"
    # The connection of the answer that was left is closed, not kept for another call.
    assert server.requests[7].closed.is_set()
    assert server.requests[8].connection != server.requests[7].connection


async def test_one_that_can_only_talk(server: ReplayServer, provider: HttpProvider) -> None:
    """Refused requests, and answers of another kind than was asked for, are no failures of the endpoint."""
    server.reply(
        PONG,
        refused(400, "stream is required"),
        text("one two three four five six seven eight"),
        refused(400, "tools are not supported"),
        text("I cannot look."),
        calls(PARIS),
        text("Paris is in France."),
        text("one two"),
    )
    found = await tried(provider)
    assert [each.status for each in found.values()] == ["ok", *["unsupported"] * 6], found
    assert "stream is required" in found["not streamed"].seen
    assert found["stream"].seen == "39 characters came in one piece"
    assert found["tool"].seen == "no call, but 'I cannot look.'"
    assert found["parallel tools"].seen == "one call at a time: get_weather(city='Paris')"
    assert "not JSON" in found["structured output"].seen
    assert found["structured output"].seen.endswith("'Paris is in France.'")
    assert "nothing to leave" in found["abort"].seen


async def test_one_whose_answers_are_broken(server: ReplayServer, provider: HttpProvider) -> None:
    server.reply(
        refused(500, "out of memory"),
        whole(""),
        Answer(chunks=NUMBERS.chunks[:2], ending="close_after"),
        calls('{"town": "Paris"}'),
        calls(PARIS, name="get_time"),
        refused(503),
        Answer(chunks=NUMBERS.chunks[:2], ending="stay_open"),
        refused(500, "still busy"),
    )
    found = await tried(provider)
    assert {each.status for each in found.values()} == {"failed"}, found
    assert "out of memory" in found["text"].seen
    assert found["not streamed"].seen == "an answer without text (finish reason stop)"
    assert found["stream"].seen.startswith("stream_broken: ")
    assert found["tool"].seen.startswith("a call that cannot be run: ")
    assert found["parallel tools"].seen == "a call of 'get_time', which is no tool of this request"
    assert found["structured output"].seen.startswith("overloaded: ")
    assert "still busy" in found["abort"].seen


async def test_a_forced_call_that_is_refused_is_tried_unforced(server: ReplayServer, provider: HttpProvider) -> None:
    others = [PONG, whole("pong"), NUMBERS]
    server.reply(*others, refused(400, "tool_choice must be auto"), calls(PARIS), text("Sunny."), refused(500))
    tool = (await tried(provider))["tool"]
    assert tool.status == "ok"
    assert tool.seen.startswith(
        "get_weather(city='Paris'), and with its result: 'Sunny.'; not when the call is forced:"
    )
    assert [request.json.get("tool_choice") for request in server.requests[4:6]] == [None, None]


async def test_what_every_call_would_meet_is_met_once(server: ReplayServer, provider: HttpProvider) -> None:
    """A wrong key, or an endpoint that does not answer, is not tried seven times; and the key is not shown."""
    server.reply(refused(401, "the key sk-0123456789 is wrong"))
    found = await tried(provider)
    assert [each.status for each in found.values()] == ["failed"] * 7
    assert found["abort"].seen == "not tried, as text failed: authentication"
    assert "sk-0123456789" not in str(found)
    assert len(server.requests) == 1

    server.reply_only(Answer(chunks=NUMBERS.chunks[:1], ending="stay_open"))
    found = await tried(provider, seconds_max=0.3)
    assert found["text"].seen == "no end within 0.3 s"
    assert 0.3 <= found["text"].seconds < 5
    assert len(server.requests) == 2
    await asyncio.wait_for(server.requests[1].closed.wait(), 5)


async def test_a_model_that_refuses_is_not_there(server: ReplayServer, provider: HttpProvider) -> None:
    """Text itself cannot be unsupported."""
    server.reply(refused(404, "no such model"))
    found = await tried(provider)
    assert (found["text"].status, found["stream"].status) == ("failed", "unsupported")


async def test_providers_without_a_connection_are_tried_too() -> None:
    found = await tried(ScriptedProvider())
    assert found["text"].status == "failed"
    assert "model" in found["text"].seen
