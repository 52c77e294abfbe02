"""Values that some process cannot carry end as errors that say so; nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from support.waiting import wait_until_async
from turnmill.protocol.codec import encode_body
from turnmill.protocol.content import Message
from turnmill.protocol.errors import ConfigurationError, DefinitionError, TurnFailedError
from turnmill.protocol.keys import new_turn_id, partition_of_session
from turnmill.protocol.messages import StartTurn
from turnmill.protocol.settings import load_settings
from turnmill.runtime import Agent, TurnOptions
from turnmill.runtime.local import LocalClient, local_runtime
from turnmill.workers import tool
from turnmill.workers.providers.scripted import Call, Reply, Script

BIG = 2**70


@tool
def add(a: int) -> int:
    """Add one."""
    return a + 1


SCRIPTS = [Script("big", [Reply(tool_calls=[Call("add", {"a": BIG})]), Reply(text="${result}")])]
SCRIPTS += [Script("plain", [Reply(text="yes")])]
AGENT = Agent("hard", model="scripted:big", tools=[add])
PLAIN = Agent("plain", model="scripted:plain")


@pytest.fixture
async def client(valkey_url: str, namespace: str) -> AsyncIterator[LocalClient]:
    async with local_runtime(load_settings(redis_url=valkey_url, namespace=namespace), app=SCRIPTS) as client:
        yield client


async def test_an_integer_beyond_64_bits_in_a_call_is_an_error_result(client: LocalClient) -> None:
    result = await asyncio.wait_for((await client.turn(AGENT, "go")).result(), 20)
    assert "more than 64 bits" in result.answer


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ([Message(role="bogus", content="x")], None),  # type: ignore[arg-type]
        ("x", TurnOptions(metadata={"i": BIG})),
        ("\ud800", None),
        (None, None),
        ("x", {"max_steps": 1}),
    ],
    ids=["role", "integer", "surrogate", "nothing", "options"],
)
async def test_what_no_reader_could_read_is_refused_where_it_is_written(
    client: LocalClient, message: Any, options: Any
) -> None:
    with pytest.raises(DefinitionError):
        await client.turn(PLAIN, message, options=options)


async def test_a_command_that_cannot_be_decided_on_fails_its_turn(client: LocalClient) -> None:
    """It comes from another client, which checks nothing: the turn that waits is told, and the letter is kept."""
    partition = partition_of_session("s", len(client.keys.partitions))
    command = StartTurn(turn_id=new_turn_id(partition), session_id="s", agent="plain", messages=[])
    body = b'{"metadata":{"i":%d},' % BIG
    await client.publish(PLAIN)
    encoded = body + encode_body(command)[1:]
    keys = client.keys.partitions[partition]
    await client.engine.call("XADD", keys.inbox, "*", "t", command.type, "d", encoded)
    with pytest.raises(TurnFailedError, match="could not be handled"):
        await asyncio.wait_for(client.attach(command.turn_id).result(), 20)
    assert await client.engine.call("XLEN", keys.dead) == 1
    assert (await (await client.turn(PLAIN, "again", session="s")).result()).answer == "yes"


async def test_cursors_at_and_behind_the_end(client: LocalClient) -> None:
    turn = await client.turn(PLAIN, "go")
    numbers = [number async for number, _ in turn.numbered_events()]
    same = client.attach(turn.id)
    assert await asyncio.wait_for(_collect(same, numbers[-1]), 10) == []
    for after in (
        numbers[-1] + 1,
        10**9,
    ):  # of an engine that knew more than this one: the reader is told the end again
        assert [event.type for event in await asyncio.wait_for(_collect(same, after), 10)] == ["turn.finished"]
    assert len(await _collect(same, numbers[-2])) == 1
    for nonsense in (-1, 1.5, None, "x"):
        with pytest.raises(ValueError, match="after"):
            await _collect(same, nonsense)
    for types in ("turn.finished", {"bogus"}):
        with pytest.raises(ValueError, match="types"):
            async for _ in same.events(types=types):
                pass


async def test_a_model_function_that_nobody_serves_here_is_said(client: LocalClient) -> None:
    with pytest.raises(DefinitionError, match="no model function 'mine' is served here"):
        await client.turn(Agent("host", model="host:mine"), "x")


async def test_an_app_that_brings_nothing_is_refused(valkey_url: str, namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="brings no tool"):
        async with local_runtime(load_settings(redis_url=valkey_url, namespace=namespace), app=42):
            pass


async def _collect(turn: Any, after: Any) -> list[Any]:
    return [event async for event in turn.events(after=after)]


async def test_a_reply_that_cannot_be_read_ends_its_call_at_once(client: LocalClient) -> None:  # AC-26
    """A worker of another language wrote it; its address and token are right, so the call need not wait for its end."""
    await client.engine.call("HSET", client.keys.tools, "foreign", b'{"name": "foreign", "queue": "foreign"}')
    script = Script("foreign", [Reply(tool_calls=[Call("foreign")]), Reply(text="${result}")])
    client._llm._providers.get("scripted").scripts["foreign"] = script  # type: ignore[attr-defined]
    turn = await client.turn(Agent("foreign", model="scripted:foreign", tools=["foreign"]), "go")
    keys = client.keys.of_turn(turn.id)

    async def task() -> dict[str, Any]:
        while not (entries := await client.engine.call("XRANGE", keys.tool("foreign"), "-", "+")):
            await asyncio.sleep(0)
        decoded: dict[str, Any] = msgspec.json.decode(entries[0][1][3])
        return decoded

    asked = await asyncio.wait_for(task(), 20)
    address = {name: asked[name] for name in ("session_id", "turn_id", "call", "attempt", "token")}
    forged = {**address, "token": "no", "duration_seconds": "soon"}
    for reply in (forged, {**address, "duration_seconds": "soon"}):
        await client.engine.call("XADD", keys.results, "*", "t", "tool_reply", "d", msgspec.json.encode(reply))
    result = await asyncio.wait_for(turn.result(), 20)
    assert "the worker's answer could not be read" in result.answer
    await wait_until_async(lambda: _has_length(client, keys.dead, 2))


async def _has_length(client: LocalClient, stream: str, length: int) -> bool:
    return bool(await client.engine.call("XLEN", stream) == length)
