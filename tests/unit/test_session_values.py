"""The values of a session: what is set comes back, and no change is lost, from however many connections they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import redis.asyncio

from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import EngineReplyError, MessageTooLarge
from turnmill.protocol.keys import Keys
from turnmill.protocol.session_values import KEY_LENGTH_MAX, VALUE_BYTES_MAX, SessionValues

SESSION = "user-42"


@pytest.fixture
async def pair(valkey_url: str, namespace: str) -> AsyncIterator[tuple[SessionValues, SessionValues]]:
    """The values of one session, over two connections."""
    engines = [await Engine(valkey_url).connect() for _ in range(2)]
    keys = Keys(namespace).of_session(SESSION)
    yield SessionValues(engines[0], keys, SESSION), SessionValues(engines[1], keys, SESSION)
    for engine in engines:
        await engine.close()


@pytest.fixture
def values(pair: tuple[SessionValues, SessionValues]) -> SessionValues:
    return pair[0]


VALUES = [
    None,
    True,
    7,
    2**70,
    -1.5,
    "",
    "é😀",
    b"\x00\xff",
    [1, [b"a"]],
    {"a": {"$bytes": "x"}, "b": None},
    {"$escaped": {}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_a_value_comes_back_as_it_was(pair: tuple[SessionValues, SessionValues], value: Any) -> None:
    here, there = pair
    await here.set("key", value)
    assert await there.get("key", "default") == value
    assert await there.all() == {"key": value}


async def test_a_value_that_is_not_there(values: SessionValues) -> None:
    assert await values.get("key") is None
    assert await values.get("key", 5) == 5
    assert await values.all() == {}
    assert not await values.delete("key")
    await values.set("key", None)
    assert await values.get("key", 5) is None
    assert await values.delete("key")
    assert await values.get("key", 5) == 5


async def test_whole_numbers_stay_whole(values: SessionValues) -> None:
    sums = [await values.increment("n"), await values.increment("n", 41), await values.increment("n", -50)]
    assert sums == [1, 42, -8]
    assert all(isinstance(number, int) for number in sums)
    assert await values.get("n") == -8
    assert await values.increment("n", 0.5) == -7.5
    assert await values.increment("n", 2) == -5.5
    assert await values.get("n") == -5.5
    await values.set("f", 1.0)
    assert await values.increment("f") == 2.0


@pytest.mark.parametrize("value", ["5", None, True, [1]], ids=repr)
@pytest.mark.parametrize("by", [1, 0.5])
async def test_only_numbers_can_be_added_to(values: SessionValues, value: Any, by: float) -> None:
    await values.set("key", value)
    with pytest.raises(TypeError, match=f"the session value 'key' is no number: {by} cannot be added to it"):
        await values.increment("key", by)
    assert await values.get("key") == value


@pytest.mark.parametrize("by", [True, "1", None, float("nan"), float("inf")], ids=repr)
async def test_only_numbers_can_be_added(values: SessionValues, by: Any) -> None:
    with pytest.raises(TypeError, match="is no number to add to 'key'"):
        await values.increment("key", by)


async def test_a_sum_beyond_64_bits_is_refused(values: SessionValues) -> None:
    await values.set("key", 2**63 - 1)
    for by in (1, 2**64):
        with pytest.raises(ValueError, match="the sum is out of range"):
            await values.increment("key", by)
    assert await values.get("key") == 2**63 - 1


async def test_an_update_sees_the_value_or_the_default(values: SessionValues) -> None:
    default: list[int] = []

    def append(items: list[int]) -> list[int]:
        items.append(len(items))
        return items

    assert await values.update("key", append, default) == [0]
    assert await values.update("key", append, default) == [0, 1]
    assert default == []
    assert await values.get("key") == [0, 1]
    assert await values.update("other", lambda value: value) is None
    assert await values.all() == {"key": [0, 1], "other": None}


async def test_an_update_that_raises_changes_nothing(values: SessionValues) -> None:
    await values.set("key", 1)
    with pytest.raises(ZeroDivisionError):
        await values.update("key", lambda value: value / 0)
    assert await values.get("key") == 1


async def test_concurrent_updates_lose_nothing(pair: tuple[SessionValues, SessionValues]) -> None:
    calls = 0

    def added(number: int) -> Any:
        def add(items: dict[str, int]) -> dict[str, int]:
            nonlocal calls
            calls += 1
            return {**items, str(number): len(items)}

        return add

    await asyncio.gather(*[pair[number % 2].update("key", added(number), {}) for number in range(50)])
    value = await pair[0].get("key")
    assert sorted(value) == sorted(str(number) for number in range(50))
    assert sorted(value.values()) == list(range(50))
    assert calls > 50  # they did meet


@pytest.mark.parametrize(("first", "meanwhile"), [(None, b"7"), (b"1", b"7"), (b"1", None)])
async def test_an_update_notices_every_change(
    values: SessionValues, valkey_url: str, namespace: str, first: bytes | None, meanwhile: bytes | None
) -> None:
    """Somebody sets, changes or removes the value between the look and the swap."""
    seen = []
    name = Keys(namespace).of_session(SESSION).values(SESSION)
    with redis.Redis.from_url(valkey_url) as other:
        if first is not None:
            other.hset(name, "key", first)

        def add(value: int) -> int:
            seen.append(value)
            if len(seen) == 1:
                other.hdel(name, "key") if meanwhile is None else other.hset(name, "key", meanwhile)
            return value + 1

        assert await values.update("key", add, 100) == (101 if meanwhile is None else 8)
    assert seen == [100 if first is None else 1, 100 if meanwhile is None else 7]


@pytest.mark.parametrize("key", ["", "k" * (KEY_LENGTH_MAX + 1), 5, None, "\ud800"], ids=lambda key: repr(key)[:10])
async def test_a_key_that_cannot_be_used_is_refused(values: SessionValues, key: Any) -> None:
    for call in (values.get, values.delete, values.increment):
        with pytest.raises(ValueError):
            await call(key)
    with pytest.raises(ValueError):
        await values.set(key, 1)
    with pytest.raises(ValueError):
        await values.update(key, lambda value: value)
    assert await values.all() == {}


async def test_what_cannot_be_stored_is_refused_by_name(values: SessionValues) -> None:
    with pytest.raises(TypeError, match="session value 'key' cannot be stored: a object has no JSON form"):
        await values.set("key", object())
    for value in (float("nan"), "\ud800"):
        with pytest.raises(ValueError, match="session value 'key' cannot be stored"):
            await values.set("key", value)
    with pytest.raises(MessageTooLarge, match=f"'key' has {VALUE_BYTES_MAX + 1} bytes, above the limit"):
        await values.set("key", "x" * (VALUE_BYTES_MAX - 1))
    await values.set("key", "x" * (VALUE_BYTES_MAX - 2))
    assert await values.increment("n") == 1  # the connection is as it was


async def test_an_error_of_the_engine_is_not_taken_for_a_wrong_value(
    values: SessionValues, namespace: str, redis_client: redis.asyncio.Redis
) -> None:
    await redis_client.set(Keys(namespace).of_session(SESSION).values(SESSION), "no hash")
    with pytest.raises(EngineReplyError, match="WRONGTYPE"):
        await values.increment("key")
