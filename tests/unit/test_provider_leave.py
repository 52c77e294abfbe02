"""Leave to call a provider: what all workers together may ask of it, whose turn it is, and when nobody may ask.

On a real server, because the scripts go by its clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from support.waiting import wait_until_async
from turnmill.protocol import provider_leave
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.keys import Keys, ProviderKeys
from turnmill.protocol.provider_leave import Leave, ProviderLimit, enter_provider, leave_provider, renew_leave

FIVE = ProviderLimit(concurrency=5)
ERROR = msgspec.json.encode(ErrorInfo(kind="overloaded", message="too busy", retryable=True))
GO = Leave(granted=True)


class Door:
    """One provider's door."""

    def __init__(self, engine: Engine, keys: ProviderKeys) -> None:
        self.engine = engine
        self.keys = keys

    async def enter(self, call: str, limit: ProviderLimit = FIVE, tenant: str = "", tokens: int = 0) -> Leave:
        return await enter_provider(self.engine, self.keys, limit, call, tenant, tokens)

    async def leave(self, call: str, outcome: str = "ok", tenant: str = "", **told: Any) -> int:
        return await leave_provider(self.engine, self.keys, call, tenant, outcome=outcome, **told)

    async def fail(self, call: str, **told: Any) -> int:
        """One call that meets an outage."""
        await self.enter(call)
        return await self.leave(call, "outage", error=ERROR, **told)


@pytest.fixture
async def door(valkey_url: str, namespace: str) -> AsyncIterator[Door]:
    engine = await Engine(valkey_url).connect()
    yield Door(engine, Keys(namespace).provider("openai"))
    await engine.close()


async def test_no_more_calls_than_may_be_at_once(door: Door) -> None:
    """AC-54."""
    assert [await door.enter(f"call{number}") for number in range(5)] == [GO] * 5
    assert (await door.enter("sixth")).wait_ms > 0
    await door.leave("call2")
    assert await door.enter("sixth") == GO
    assert not (await door.enter("seventh")).granted


async def test_who_has_waited_longest_comes_first(door: Door) -> None:
    one = ProviderLimit(concurrency=1)
    await door.enter("running", one)
    for name in ("first", "second"):
        assert not (await door.enter(name, one)).granted
    await door.leave("running")
    assert not (await door.enter("second", one)).granted
    assert await door.enter("first", one) == GO


async def test_a_tenant_with_fewer_calls_comes_before_one_with_many(door: Door) -> None:
    """AC-55: however many of the other tenant wait longer."""
    for number in range(5):
        assert await door.enter(f"a{number}", tenant="a") == GO
    for number in range(5, 20):
        assert not (await door.enter(f"a{number}", tenant="a")).granted
    assert not (await door.enter("b", tenant="b")).granted
    await door.leave("a0", tenant="a")
    assert not (await door.enter("a5", tenant="a")).granted
    assert await door.enter("b", tenant="b") == GO


async def test_one_free_place_among_tenants_with_nothing_running(door: Door) -> None:
    """Those of one tenant count as running for its others: the second tenant is not behind all of the first."""
    two = ProviderLimit(concurrency=2)
    await door.enter("x", two, "x")
    await door.enter("y", two, "y")
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        assert not (await door.enter(name, two, tenant)).granted
    await door.leave("x", tenant="x")
    await door.leave("y", tenant="y")
    assert not (await door.enter("a2", two, "a")).granted
    assert await door.enter("a1", two, "a") == GO
    assert await door.enter("b1", two, "b") == GO


async def test_whoever_stops_asking_keeps_nobody_waiting(door: Door) -> None:
    one = ProviderLimit(concurrency=1)
    await door.enter("running", one)
    await door.enter("killed", one)
    await door.enter("patient", one)
    await door.leave("running")
    assert not (await door.enter("patient", one)).granted

    async def goes() -> bool:
        return (await door.enter("patient", one)).granted

    await wait_until_async(goes, 10)


async def test_a_place_that_is_not_kept_is_free_again(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker was killed. One that is renewed stays taken."""
    one = ProviderLimit(concurrency=1)
    monkeypatch.setattr(provider_leave, "LEAVE_SECONDS", 0.2)
    await door.enter("killed", one)
    seconds, _ = await door.engine.call("TIME")
    await renew_leave(door.engine, door.keys, {"killed": "", "unknown": ""}, (int(seconds) + 60) * 1000)
    monkeypatch.setattr(provider_leave, "LEAVE_SECONDS", 15.0)
    assert await door.engine.call("ZCARD", door.keys.calls) == 1, "only who has a place keeps it"
    assert not (await door.enter("next", one)).granted
    await door.engine.call("ZADD", door.keys.calls, "XX", int(seconds) * 1000 - 1, "killed|")
    assert await door.enter("next", one) == GO


async def test_requests_of_a_minute(door: Door) -> None:
    """AC-54: a tenth at once, the rest over the minute, so that no minute has more."""
    hundred = ProviderLimit(requests_per_minute=100)
    assert [await door.enter(f"call{number}", hundred) for number in range(10)] == [GO] * 10
    answer = await door.enter("next", hundred)
    assert not answer.granted and not answer.held_back
    assert 300 < answer.wait_ms <= 60_000 / 90 + 1, "90 more in a minute"


async def test_tokens_are_reserved_and_settled(door: Door) -> None:
    """AC-54: what a call did not use is there for the next one; what it used above its estimate is a debt."""
    limit = ProviderLimit(tokens_per_minute=60_000)
    assert await door.enter("one", limit, tokens=6000) == GO
    assert not (await door.enter("two", limit, tokens=3000)).granted
    await door.leave("one", unused_tokens=5000)
    assert await door.enter("two", limit, tokens=3000) == GO
    await door.leave("two", unused_tokens=-20_000)
    assert (await door.enter("three", limit, tokens=1000)).wait_ms > 15_000


async def test_a_call_larger_than_the_bucket_waits_for_a_full_one(door: Door) -> None:
    limit = ProviderLimit(tokens_per_minute=1000)
    assert await door.enter("huge", limit, tokens=50_000) == GO
    assert not (await door.enter("next", limit, tokens=1)).granted


async def test_a_rate_limit_holds_everybody_back(door: Door) -> None:
    """AC-49: for as long as the provider says, and with its words."""
    await door.enter("one")
    await door.leave("one", "limited", wait_seconds=0.3, error=ERROR)
    answer = await door.enter("two")
    assert answer.held_back and 0 < answer.wait_ms <= 300 and answer.error == ERROR

    async def goes() -> bool:
        return (await door.enter("two")).granted

    await wait_until_async(goes, 5)


async def test_a_rate_limit_without_a_time_holds_back_longer_each_time(door: Door) -> None:
    await door.enter("one")
    until = await door.leave("one", "limited", error=ERROR)
    seconds, _ = await door.engine.call("TIME")
    assert 0 < until - int(seconds) * 1000 <= 2001
    await door.engine.call("HSET", door.keys.state, "held_until", 1)
    await door.enter("two")
    again = await door.leave("two", "limited", error=ERROR)
    assert again - until >= 900, "two seconds now"


async def test_failures_in_a_row_open_the_circuit(door: Door) -> None:
    """AC-54, LC-15: the fifth one; an answer in between starts the count again."""
    for number in range(4):
        assert await door.fail(f"f{number}") == 0
    await door.enter("well")
    await door.leave("well", "ok")
    for number in range(4):
        assert await door.fail(f"g{number}") == 0
    assert await door.fail("fifth") > 0
    assert (await door.enter("next")).held_back


async def test_behind_an_outage_one_call_goes_first(door: Door) -> None:
    """It decides for all: an answer opens the door, another failure closes it for twice as long."""
    await door.fail("one", breaker_failures=1)
    await door.engine.call("HSET", door.keys.state, "held_until", 1)
    assert await door.enter("probe") == GO
    other = await door.enter("other")
    assert not other.granted and not other.held_back
    first = await door.leave("probe", "outage", error=ERROR, breaker_failures=1)
    seconds, _ = await door.engine.call("TIME")
    assert 1000 <= first - int(seconds) * 1000 <= 3001
    await door.engine.call("HSET", door.keys.state, "held_until", 1)
    assert await door.enter("probe2") == GO
    await door.leave("probe2", "ok")
    assert [await door.enter(name) for name in ("other", "third")] == [GO, GO]


async def test_a_probe_that_is_stopped_lets_the_next_one_try(door: Door) -> None:
    await door.fail("one", breaker_failures=1)
    await door.engine.call("HSET", door.keys.state, "held_until", 1)
    assert await door.enter("probe") == GO
    await door.leave("probe", "unknown")
    assert await door.enter("other") == GO


async def test_calls_under_way_at_an_outage_do_not_make_it_longer(door: Door) -> None:
    for number in range(3):
        await door.enter(f"call{number}")
    first = await door.leave("call0", "outage", error=ERROR, breaker_failures=1)
    rest = [await door.leave(f"call{number}", "outage", error=ERROR, breaker_failures=1) for number in (1, 2)]
    assert first > 0 and rest == [first, first]
    await door.leave("late", "ok")
    assert (await door.enter("next")).held_back, "an answer to an older call does not open the door"


def test_a_partitions_share() -> None:
    assert [FIVE.share(parts) for parts in (1, 4, 64)] == [10, 3, 1]
    assert ProviderLimit(requests_per_minute=60).share(4) == 5
    assert ProviderLimit(tokens_per_minute=1).share(4) == 8
    assert not ProviderLimit().is_limited and ProviderLimit(tokens_per_minute=1).is_limited
