"""Sessions as hosts use them: read, fork at any place, try a turn again, values, delete; with separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from apps import lifecycle as app
from support.fleet import Fleet
from support.waiting import wait_until_async
from turnmill.protocol.content import ImagePart, Message, TextPart
from turnmill.protocol.errors import CommandRefusedError, DefinitionError, SessionBusyError, TurnLostError
from turnmill.runtime import Turn
from turnmill.runtime.client import Client
from turnmill.runtime.sessions import Session
from turnmill.workers.providers.scripted import Call, Reply

PATIENCE_SECONDS = 20.0
LARGE = "0123456789" * 10_000


@pytest.fixture(scope="module")
def deployment(valkey_url: str) -> Iterator[Fleet]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    with Fleet(valkey_url, f"test-{uuid.uuid4().hex[:12]}", directory, "apps.lifecycle") as fleet:
        fleet.start()
        yield fleet
    shutil.rmtree(directory)


@pytest.fixture
def fleet(deployment: Fleet, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    deployment.new_log_lines()
    failed = request.session.testsfailed
    yield deployment
    if request.session.testsfailed > failed:
        for name, lines in deployment.new_log_lines().items():
            print(f"--- {name}", *lines[-60:], sep="\n")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with fleet.client() as client:
        yield client


@pytest.fixture
def session(client: Client) -> Session:
    return client.session(f"user-{uuid.uuid4().hex[:8]}")


def told(*replies: Reply) -> str:
    """A message for the model `scripted:told`."""
    return msgspec.json.encode(replies).decode()


def adding(expression: str, answer: str) -> str:
    """A step that adds, then the answer."""
    return told(Reply(tool_calls=[Call("calculator", {"expression": expression})]), Reply(text=answer))


async def run(client: Client, session: Session, message: Any, agent: Any = app.worker) -> Turn:
    turn = await client.turn(agent, message, session=session.id)
    await done(turn)
    return turn


async def done(turn: Turn) -> str:
    return (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).text


def brief(messages: list[Message]) -> list[tuple[str, Any]]:
    return [
        (message.role, [result.result for result in message.tool_results] or message.text or "call")
        for message in messages
    ]


async def asked(redis_client: redis.asyncio.Redis, fleet: Fleet, session: Session) -> list[Any]:
    """What the model `host:house` was shown last on a session."""
    entries: Any = redis_client.lrange(f"{fleet.keys.prefix}-play:asked:{session.id}", -1, -1)
    (last,) = await entries
    shown: list[Any] = json.loads(last)["messages"]
    return shown


async def keys_of(redis_client: redis.asyncio.Redis, session: Session, client: Client) -> list[bytes]:
    """All keys that belong to a session: those with its name, and the blobs that it keeps."""
    keys = client.keys.of_session(session.id)
    suffix = f":{session.id}".encode()
    names = [name async for name in redis_client.scan_iter(match=f"{keys.base}*", count=1000)]
    kept: Any = redis_client.smembers(keys.blobs(session.id))
    blobs = [keys.base.encode() + name for name in await kept]
    return sorted([name for name in names if name.endswith(suffix)] + blobs)


async def existing(redis_client: redis.asyncio.Redis, names: list[bytes]) -> list[bytes]:
    return [name for name in names if await redis_client.exists(name)]


# --- reading


async def test_messages_and_turns(client: Client, session: Session) -> None:
    assert await session.messages() == []
    assert await session.turns() == []
    first, second = await run(client, session, "hi"), await run(client, session, adding("2 + 3", "five"))
    everything = await session.messages()
    assert brief(everything) == [
        ("user", "hi"),
        ("assistant", "You said: hi"),
        ("user", everything[2].text),
        ("assistant", "call"),
        ("tool", ["5"]),
        ("assistant", "five"),
    ]
    for start in range(8):
        assert await session.messages(start) == everything[start:]
        for end in range(start, 8):
            assert await session.messages(start, end) == everything[start:end]
    assert [record.turn_id for record in await session.turns()] == [second.id, first.id]
    assert [record.turn_id for record in await session.turns(limit=1)] == [second.id]
    for start, end in ((-1, None), (2, 1)):
        with pytest.raises(ValueError, match="is no part of a transcript"):
            await session.messages(start, end)


async def test_a_long_transcript_is_read_in_pages(
    client: Client, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnmill.runtime.sessions._PAGE", 2)
    given = [Message(role="user", content=str(number)) for number in range(5)]
    await run(client, session, given)
    assert [message.text for message in await session.messages()] == ["0", "1", "2", "3", "4", "You said: 4"]
    assert [message.text for message in await session.messages(1, 4)] == ["1", "2", "3"]
    assert [message.text for message in await session.messages(3, 99)] == ["3", "4", "You said: 4"]


async def test_large_values_are_in_their_places(client: Client, session: Session) -> None:  # AC-39
    image = ImagePart(data=bytes(100_000), media_type="image/png")
    message = Message(role="user", content=[TextPart("look"), image])
    await run(client, session, message)
    (read, _) = await session.messages()
    assert read.content == message.content


@pytest.mark.parametrize("name", ["", "a b", "{x}", "s" * 257, 5, None])
def test_a_name_that_cannot_be_a_session(client: Client, name: Any) -> None:
    with pytest.raises(DefinitionError, match="is no session id"):
        client.session(name)


# --- fork


async def test_a_fork_goes_its_own_way(
    client: Client, session: Session, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:
    await run(client, session, "hi", app.housekeeper)
    await session.values.set("mood", "fine")
    fork = await session.fork()
    assert fork.id.startswith(f"{session.id}/fork-")
    assert client.keys.of_session(fork.id) is client.keys.of_session(session.id)
    assert await fork.messages() == await session.messages()
    assert await fork.values.all() == {"mood": "fine"}

    await run(client, fork, "there", app.housekeeper)
    await run(client, session, "here", app.housekeeper)
    await fork.values.set("mood", "better")
    assert [message.text for message in await fork.messages()] == ["hi", "house: hi", "there", "house: there"]
    assert [message.text for message in await session.messages()] == ["hi", "house: hi", "here", "house: here"]
    assert await asked(redis_client, fleet, fork) == [
        ["user", "hi"], ["assistant", "house: hi"], ["user", "there"]
    ]  # fmt: skip
    assert await session.values.get("mood") == "fine"


async def test_a_fork_at_every_step(client: Client, session: Session) -> None:  # AC-07
    first = await run(client, session, adding("1 + 1", "two"))
    second = await run(client, session, adding("2 + 2", "four"))
    everything = await session.messages()
    lengths = {}
    for turn in (first, second):
        for step in (1, 2, None):
            fork = await session.fork(turn=turn.id, step=step)
            messages = await fork.messages()
            assert messages == everything[: len(messages)]
            lengths[turn.id, step] = len(messages)
            # What is forked can be answered: the model of these tests refuses a history that a provider would refuse.
            assert await done(await client.turn(app.worker, "go on", session=fork.id)) == "You said: go on"
    assert list(lengths.values()) == [3, 4, 4, 7, 8, 8]


async def test_a_fork_leaves_out_what_is_under_way(client: Client, session: Session, fleet: Fleet) -> None:
    gate = uuid.uuid4().hex[:8]
    await run(client, session, "hi")
    turn = await client.turn(
        app.worker, told(Reply(tool_calls=[Call("gated", {"gate": gate})]), Reply(text="done")), session=session.id
    )
    await wait_until_async(lambda: fleet.is_reached(gate))
    fork = await session.fork()
    assert brief(await fork.messages())[:2] == [("user", "hi"), ("assistant", "You said: hi")]
    assert [message.role for message in await fork.messages()] == ["user", "assistant", "user"]
    fleet.open_gate(gate)
    await done(turn)
    assert await done(await client.turn(app.worker, "go on", session=fork.id)) == "You said: go on"


async def test_a_fork_can_be_named(client: Client, session: Session) -> None:
    await run(client, session, "hi")
    assert (await session.fork(new_id="try-1")).id == f"{session.id}/try-1"
    fork = await session.fork(new_id=f"{session.id}/try-2")
    assert fork.id == f"{session.id}/try-2"
    assert (await fork.fork(new_id="try-3")).id == f"{session.id}/try-3"
    before = await client.session(f"{session.id}/try-1").messages()
    with pytest.raises(CommandRefusedError, match="try-1 exists already") as caught:
        await session.fork(new_id="try-1")
    assert caught.value.kind == "session_exists"
    assert await client.session(f"{session.id}/try-1").messages() == before
    with pytest.raises(DefinitionError, match="is no session id"):
        await session.fork(new_id="a b")


async def test_two_forks_to_one_name_give_one(client: Client, session: Session) -> None:
    await run(client, session, "hi")
    answers = await asyncio.gather(*[session.fork(new_id="x") for _ in range(5)], return_exceptions=True)
    assert sum(isinstance(answer, Session) for answer in answers) == 1
    assert sum(isinstance(answer, CommandRefusedError) for answer in answers) == 4
    assert len(await client.session(f"{session.id}/x").messages()) == 2


async def test_a_fork_from_nowhere_is_refused(client: Client, session: Session) -> None:
    with pytest.raises(ValueError, match="has no messages to fork"):
        await session.fork()
    turn = await run(client, session, "hi")
    with pytest.raises(ValueError, match="no messages in the session's conversation"):
        await session.fork(turn="t0-nonsense")
    with pytest.raises(ValueError, match=r"has no step 7; its steps: \[1\]"):
        await session.fork(turn=turn.id, step=7)


async def test_a_fork_and_its_source_have_blobs_of_their_own(
    client: Client, session: Session, redis_client: redis.asyncio.Redis
) -> None:  # AC-39
    image = ImagePart(data=bytes(100_000), media_type="image/png")
    await run(client, session, Message(role="user", content=[TextPart("look"), image]))
    fork = await session.fork()
    here, there = [await keys_of(redis_client, which, client) for which in (session, fork)]
    assert [await existing(redis_client, names) for names in (here, there)] == [here, there]
    blobs = [name for name in here + there if b"}:blob:" in name]
    assert len(set(blobs)) == 2
    assert [await redis_client.pttl(name) for name in blobs] == [-1, -1]
    await session.delete()
    assert await existing(redis_client, here) == []
    assert (await fork.messages())[0].content == [TextPart("look"), image]
    await fork.delete()
    assert await existing(redis_client, there) == []


# --- retry


async def test_a_turn_is_tried_again(
    client: Client, session: Session, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:
    first = await run(client, session, "one", app.housekeeper)
    second = await run(client, session, "two", app.housekeeper)
    again = await session.retry()
    assert await done(again) == "house: two"
    assert len({first.id, second.id, again.id}) == 3
    conversation = [["user", "one"], ["assistant", "house: one"], ["user", "two"]]
    assert await asked(redis_client, fleet, session) == conversation

    edited = await session.retry(message="three")
    assert await done(edited) == "house: three"
    assert await asked(redis_client, fleet, session) == [*conversation[:2], ["user", "three"]]
    assert [message.text for message in await session.messages()] == [
        "one", "house: one", "two", "house: two", "two", "house: two", "three", "house: three"
    ]  # fmt: skip
    await run(client, session, "four", app.housekeeper)
    assert await asked(redis_client, fleet, session) == [
        *conversation[:2], ["user", "three"], ["assistant", "house: three"], ["user", "four"]
    ]  # fmt: skip


async def test_an_earlier_turn_takes_what_followed_along(
    client: Client, session: Session, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:
    turns = [await run(client, session, text, app.housekeeper) for text in ("one", "two", "three")]
    await done(await session.retry(turns[1].id, "deux"))
    shown = [["user", "one"], ["assistant", "house: one"], ["user", "deux"]]
    assert await asked(redis_client, fleet, session) == shown
    for turn in turns[1:]:
        with pytest.raises(ValueError, match=f"turn {turn.id} of session {session.id} was replaced by another one"):
            await session.retry(turn.id)
    fork = await session.fork()
    assert [message.text for message in await fork.messages()] == ["one", "house: one", "deux", "house: deux"]
    await run(client, fork, "trois", app.housekeeper)
    assert await asked(redis_client, fleet, fork) == [*shown, ["assistant", "house: deux"], ["user", "trois"]]
    await done(await fork.retry(turns[0].id, "un"))  # a fork's turns can be tried again under their old names
    assert await asked(redis_client, fleet, fork) == [["user", "un"]]
    await done(await session.retry(turns[0].id, "un"))
    assert await asked(redis_client, fleet, session) == [["user", "un"]]


async def test_another_agent_tries(client: Client, session: Session) -> None:
    turn = await run(client, session, "one", app.housekeeper)
    assert await done(await session.retry(turn.id, agent=app.worker)) == "You said: one"


async def test_an_agents_prefix_goes_before_a_text_once(client: Client, session: Session) -> None:
    await run(client, session, "one", app.prefixed)
    assert await done(await session.retry()) == "You said: Politely: one"
    assert await done(await session.retry(message="two")) == "You said: Politely: two"


async def test_a_live_turn_is_not_tried_again(client: Client, session: Session, fleet: Fleet) -> None:
    gate = uuid.uuid4().hex[:8]
    first = await run(client, session, "one")
    live = await client.turn(
        app.worker, told(Reply(tool_calls=[Call("gated", {"gate": gate})]), Reply(text="done")), session=session.id
    )
    await wait_until_async(lambda: fleet.is_reached(gate))
    with pytest.raises(SessionBusyError, match=f"turn {live.id} is running: wait for its end"):
        await session.retry()
    with pytest.raises(SessionBusyError):
        await session.retry(first.id)
    fleet.open_gate(gate)
    await done(live)
    assert await done(await session.retry(first.id)) == "You said: one"


async def test_what_cannot_be_tried_again(client: Client, session: Session, redis_client: redis.asyncio.Redis) -> None:
    with pytest.raises(ValueError, match="has no messages of any turn"):
        await session.retry()
    turn = await run(client, session, "one")
    with pytest.raises(ValueError, match="has no messages of turn t0-nonsense"):
        await session.retry("t0-nonsense")
    await redis_client.delete(client.keys.of_turn(turn.id).turn(turn.id))  # as when its time is over
    with pytest.raises(ValueError, match=f"the record of turn {turn.id} has expired: say which agent"):
        await session.retry()
    assert await done(await session.retry(agent="worker")) == "You said: one"


# --- values and the end


async def test_values_belong_to_their_session(client: Client, session: Session) -> None:
    other = client.session(session.id + "-other")
    await session.values.set("n", 1)
    assert await session.values.increment("n") == 2
    assert await client.session(session.id).values.all() == {"n": 2}
    assert await other.values.all() == {}


async def test_a_deleted_session_leaves_nothing(
    client: Client, session: Session, redis_client: redis.asyncio.Redis
) -> None:
    await run(client, session, Message(role="user", content=[ImagePart(data=bytes(100_000)), TextPart("hi")]))
    await session.values.set("mood", "fine")
    names = await keys_of(redis_client, session, client)
    assert (
        len(await existing(redis_client, names)) == 6
    )  # record, transcript, values, a blob, their list, what else it owns
    await session.delete()
    assert await existing(redis_client, names) == []
    assert (await session.messages(), await session.values.all()) == ([], {})
    await session.delete()  # nothing is left to delete
    await run(client, session, "hi again")
    assert [message.text for message in await session.messages()] == ["hi again", "You said: hi again"]


async def test_a_live_turn_ends_with_its_session(
    client: Client, session: Session, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:
    gate = uuid.uuid4().hex[:8]
    turn = await client.turn(
        app.worker, told(Reply(tool_calls=[Call("gated", {"gate": gate})]), Reply(text="done")), session=session.id
    )
    await wait_until_async(lambda: fleet.is_reached(gate))
    await asyncio.wait_for(session.delete(), PATIENCE_SECONDS)
    assert await turn.status() == "aborted"
    assert await session.messages() == []
    assert await existing(redis_client, await keys_of(redis_client, session, client)) == []


async def test_a_session_can_begin_anew_behind_its_deletion(client: Client, session: Session) -> None:
    """The new turn may be decided in one batch with the deletion, and with what came before that."""
    for _ in range(20):
        first = await client.turn(app.worker, "before", session=session.id)
        ended = asyncio.create_task(session.delete())
        await asyncio.sleep(0)
        second = await client.turn(app.worker, "behind", session=session.id)
        await ended
        assert await done(second) == "You said: behind"
        with contextlib.suppress(TurnLostError):  # it had ended before, and went with its session
            assert await first.status() in ("finished", "aborted")
        assert [message.text for message in await session.messages()] == ["behind", "You said: behind"]
        assert await done(await client.turn(app.worker, "more", session=session.id)) == "You said: more"
        assert len(await session.messages()) == 4
        await session.delete()
