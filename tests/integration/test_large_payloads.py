"""Large results, images and histories: they travel by reference, or a clear size error is the result.

Everything runs on the embedded runtime, with a server of the test's own, so that its count of bytes is the test's alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from turnmill.protocol.content import FilePart, ImagePart, Message, TextPart
from turnmill.protocol.errors import MessageTooLarge
from turnmill.runtime import Agent, TurnOptions, connect
from turnmill.runtime.client import Client
from turnmill.workers import ModelRequest, ToolOutput, model, tool
from turnmill.workers.models import tool_call
from turnmill.workers.providers.base import ProviderRequest
from turnmill.workers.providers.scripted import Call, Reply, Script, reply_number

MEBIBYTE = 1024 * 1024
PATIENCE_SECONDS = 60.0
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 1000
DELTAS = 1000
STEPS = 50


@tool
def produce(size: int) -> str:
    """A result of so many characters."""
    return "0123456789abcdef" * (size // 16)


@tool
def draw() -> ToolOutput:
    """A picture, with a caption and a document."""
    parts = [TextPart("a picture"), ImagePart(data=PNG, media_type="image/png"), FilePart(data=PNG[::-1])]
    return ToolOutput(content=list(parts))


@model("reader")
async def reader(request: ModelRequest) -> AsyncIterator[Any]:
    """Calls the tool that it is told to, and says what it got; else how much it was shown."""
    last = request.messages[-1]
    if last.role == "user" and last.text.startswith("call "):
        name, *sizes = last.text.split()[1:]
        yield tool_call(name, size=int(sizes[0])) if sizes else tool_call(name)
    elif last.tool_results:
        (result,) = last.tool_results
        for part in result.content or []:
            yield f"{part.text if isinstance(part, TextPart) else part.data == (PNG if isinstance(part, ImagePart) else PNG[::-1])}; "
        if result.content is None:
            yield f"{len(result.result)} characters" if not result.is_error else str(result.result)
    else:
        shown = sum(len(message.text) for message in request.messages)
        yield f"{len(request.messages)} messages, {shown} characters"


class Meter:
    """How many bytes the server has received when a tool was called."""

    def __init__(self) -> None:
        self.url = ""
        self.readings: list[int] = []

    def read(self) -> int:
        with redis.Redis.from_url(self.url) as client:
            stats: Any = client.info("stats")
        return int(stats["total_net_input_bytes"])


METER = Meter()


@tool
def mark(step: int) -> str:
    """Reads the meter. A step of its own for each call: a call that is repeated makes the runtime warn."""
    METER.readings.append(METER.read())
    return "marked"


def long_work(request: ProviderRequest) -> Reply:
    """One large result, an answer in many pieces, and then step after step."""
    match reply_number(request.messages):
        case 0:
            return Reply(tool_calls=[Call("produce", {"size": 2 * MEBIBYTE})])
        case 1:
            return Reply(chunks=[f"word{number} " for number in range(DELTAS)], tool_calls=[Call("mark", {"step": 2})])
        case number if number <= STEPS + 1:
            return Reply(tool_calls=[Call("mark", {"step": number + 1})])
        case _:
            return Reply(text="done")


AGENT = Agent("reader", "host:reader", tools=[produce, draw])
WORKER = Agent("worker", "scripted:long-work", tools=[produce, mark], max_steps=STEPS + 5)
APP = [reader, produce, draw, mark, Script("long-work", long_work, strict=True)]


@pytest.fixture
async def client(short_directory: Path) -> AsyncIterator[Client]:
    async with connect(app=APP, data_dir=short_directory) as client:
        yield client


@pytest.fixture
def engine(client: Client) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(client.engine.url) as engine:
        yield engine


async def result_of(client: Client, message: Any, agent: Agent = AGENT, session: str = "s") -> Any:
    turn = await client.turn(agent, message, session=session, options=TurnOptions())
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


def largest_entry(client: Client, engine: redis.Redis, session: str = "s") -> int:
    entries: Any = engine.lrange(client.keys.of_session(session).transcript(session), 0, -1)
    return max(map(len, entries))


async def test_a_result_of_a_mebibyte_goes_by_reference(client: Client, engine: redis.Redis) -> None:  # AC-39
    result = await result_of(client, f"call produce {MEBIBYTE}")
    assert result.answer == f"{MEBIBYTE} characters"
    assert result.function_calls[0].result == produce.function(MEBIBYTE)
    assert (await client.session("s").messages())[2].tool_results[0].result == produce.function(MEBIBYTE)
    assert largest_entry(client, engine) < 2_000


@pytest.mark.parametrize("size", [12 * MEBIBYTE, 64 * MEBIBYTE])
async def test_a_result_above_the_limit_is_a_clear_error(
    client: Client, engine: redis.Redis, size: int
) -> None:  # AC-39
    """The model is told, the turn goes on, and nothing of the result is in the engine."""
    before = engine.info("memory")["used_memory"]
    result = await result_of(client, f"call produce {size}")
    assert result.status == "finished"
    assert result.function_calls[0].is_error
    assert f"{size} bytes is above the limit of {8 * MEBIBYTE} (TURNMILL_PAYLOAD_BYTES_MAX)" in result.answer
    assert engine.info("memory")["used_memory"] - before < 4 * MEBIBYTE


async def test_a_higher_limit_lets_twelve_mebibytes_through(short_directory: Path) -> None:  # AC-39
    async with connect(app=APP, data_dir=short_directory, payload_bytes_max=16 * MEBIBYTE) as client:
        result = await result_of(client, f"call produce {12 * MEBIBYTE}")
        assert result.answer == f"{12 * MEBIBYTE} characters"
        assert len(result.function_calls[0].result) == 12 * MEBIBYTE


async def test_an_image_goes_by_reference(client: Client, engine: redis.Redis) -> None:  # AC-39
    result = await result_of(client, "call draw")
    assert result.answer == "a picture; True; True; "
    (drawn,) = (await client.session("s").messages())[2].tool_results
    assert drawn.content == draw.function().content
    assert largest_entry(client, engine) < 2_000


async def test_a_large_message_goes_by_reference(client: Client, engine: redis.Redis) -> None:  # AC-39
    text = "é" * MEBIBYTE
    assert (await result_of(client, text)).answer == f"1 messages, {MEBIBYTE} characters"
    assert (await client.session("s").messages())[0].content == text
    assert largest_entry(client, engine) < 2_000


@pytest.mark.parametrize("size", [50_000, 100_000], ids=["inline", "by reference"])
async def test_a_history_of_20_megabytes(client: Client, size: int) -> None:  # AC-39
    for _ in range(10):
        messages = [Message(role="user", content="x" * size) for _ in range(2_000_000 // size)]
        await result_of(client, messages)
    count = 20_000_000 // size
    last = await result_of(client, "how much?")
    shown, characters = [int(word) for word in last.answer.replace(",", "").split() if word.isdigit()]
    assert shown == count + 10 + 1  # with the answers, and the question
    assert 20_000_000 < characters < 20_010_000
    assert len(await client.session("s").messages()) == count + 10 + 2


async def test_a_message_above_the_limit_is_refused_where_it_is_sent(client: Client) -> None:  # AC-39
    """Many messages that are small each: there is nothing to store apart."""
    with pytest.raises(MessageTooLarge, match=rf"a start_turn of \d+ bytes is above the limit of {8 * MEBIBYTE}"):
        await result_of(client, [Message(role="user", content="x" * 50_000)] * 400)
    assert await client.session("s").messages() == []


async def test_what_is_written_grows_with_the_work_and_not_with_the_result(client: Client) -> None:  # AC-38
    METER.url, METER.readings = client.engine.url, []
    before = METER.read()
    result = await result_of(client, "go", WORKER)
    written = METER.read() - before
    assert (len(result.steps), result.answer) == (STEPS + 3, "done")
    assert len(result.steps[1].text.split()) == DELTAS
    assert len(METER.readings) == STEPS + 1
    assert written <= 4 * 2 * MEBIBYTE
    # The steps behind the result cost the same each, and none of them carries it.
    first, last = METER.readings[20] - METER.readings[1], METER.readings[-1] - METER.readings[-20]
    assert last < 1.5 * first
    assert last < 2 * MEBIBYTE / 4
