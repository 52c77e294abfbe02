"""A partition decides a batch while the one before is being committed; the order of arrival holds all the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import pytest

from turnmill.protocol.codec import encode_body
from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.content import Message
from turnmill.protocol.keys import COORDINATOR_GROUP, Keys, new_turn_id
from turnmill.protocol.messages import StartTurn
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.settings import load_settings
from turnmill.protocol.specs import AgentSpec
from turnmill.protocol.streams import Delivery, create_groups
from turnmill.runtime.partition import Partition
from turnmill.runtime.registry import publish

Make = Callable[[], Partition]


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
async def keys(engine: Engine, namespace: str) -> Keys:
    keys = Keys(namespace, 1)
    await create_groups(engine, [keys.partitions[0].inbox, keys.partitions[0].results], COORDINATOR_GROUP)
    await publish(engine, keys, [AgentSpec(name="a", model="scripted:a")], [])
    return keys


@pytest.fixture
async def make(engine: Engine, keys: Keys, namespace: str) -> Make:
    clock = ServerClock(engine)
    await clock.synchronize()
    settings = load_settings(namespace=namespace, partitions=1)
    return lambda: Partition(engine, keys, 0, settings, b"s" * 64, clock)


async def deliver(engine: Engine, keys: Keys, *texts: str, body: bytes | None = None) -> list[Delivery]:
    """Starts of turns on one session, read by the coordinator."""
    inbox = keys.partitions[0].inbox
    for text in texts:
        message = Message(role="user", content=text)
        command = StartTurn(turn_id=new_turn_id(0), session_id="s", agent="a", messages=[message])
        await engine.call("XADD", inbox, "*", "t", command.type, "d", body or encode_body(command))
    reply = await engine.call(
        "XREADGROUP", "GROUP", COORDINATOR_GROUP, "test", "COUNT", len(texts), "STREAMS", inbox, ">"
    )
    return [Delivery(inbox, entry_id, pairs(fields)) for entry_id, fields in reply[0][1]]


async def order(partition: Partition) -> list[str]:
    """What the session has accepted, in its order."""
    (loaded,) = (await partition._store.load(["s"])).values()
    queued = [queued.command.messages[0].text for queued in loaded.state.queue]
    entries = await partition._engine.call("LRANGE", partition.keys.transcript("s"), 0, -1)
    return [entry.split(b'"content":"')[1].split(b'"')[0].decode() for entry in entries] + queued


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1, 1), (3, 2, 1), (1, 4)], ids=str)
async def test_batches_do_not_overtake_each_other(  # AC-47
    engine: Engine, keys: Keys, make: Make, sizes: tuple[int, ...]
) -> None:
    names = iter("abcdefgh")
    batches = [await deliver(engine, keys, *itertools.islice(names, size)) for size in sizes]
    partition = make()
    await asyncio.wait_for(asyncio.gather(*[partition.handle(batch) for batch in batches]), 10)
    assert await order(partition) == list("abcdefgh"[: sum(sizes)])


async def test_an_entry_that_is_turned_away_does_not_let_a_later_batch_pass(
    engine: Engine, keys: Keys, make: Make
) -> None:
    bad = await deliver(engine, keys, "x", body=b"{")
    batches = [bad + await deliver(engine, keys, "a"), await deliver(engine, keys, "b")]
    partition = make()
    await asyncio.wait_for(asyncio.gather(*[partition.handle(batch) for batch in batches]), 10)
    assert await order(partition) == ["a", "b"]
    assert await engine.call("XLEN", keys.partitions[0].dead) == 1


async def test_what_was_decided_on_a_refused_state_is_decided_again_in_order(
    engine: Engine, keys: Keys, make: Make
) -> None:
    """Another owner has committed meanwhile: every batch under way is refused, and the order still holds."""
    stale, other = make(), make()
    await stale.handle(await deliver(engine, keys, "a"))
    await other.handle(await deliver(engine, keys, "b"))
    batches = [
        await deliver(engine, keys, "c", "d"),
        await deliver(engine, keys, "e"),
        await deliver(engine, keys, "f"),
    ]
    await asyncio.wait_for(asyncio.gather(*[stale.handle(batch) for batch in batches]), 10)
    assert await order(stale) == list("abcdef")
    assert stale.counters["stale_commits"] >= 1
