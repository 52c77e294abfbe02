"""More work than there is room for: limits that all workers share, fair shares, providers that fail, refusals at the door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps.crowd import APP, chained, crowd, patient, single
from support.replay_server import Answer, ReplayServer
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.errors import CommandRefusedError, TurnFailedError
from turnmill.runtime import TurnOptions
from turnmill.runtime.results import TurnResult
from turnmill.runtime.turn import Turn

Opened = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def stage_of(valkey_url: str, namespace: str, short_directory: Path) -> Opened:
    """Opens a deployment whose processes read a `turnmill.toml` with the given text."""

    def opened(toml: str = "", workers: int = 1, **settings: Any) -> AbstractAsyncContextManager[Stage]:
        (short_directory / "turnmill.toml").write_text(toml)
        return _deployment(valkey_url, namespace, short_directory, workers, settings)

    return opened


@asynccontextmanager
async def _deployment(
    url: str, namespace: str, directory: Path, workers: int, settings: dict[str, Any]
) -> AsyncIterator[Stage]:
    async with open_stage(url, namespace, directory, **settings) as stage:
        stage.processes.coordinator()
        for _ in range(workers):
            stage.processes.llm(APP)
        yield stage


async def end(turn: Turn) -> TurnResult:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def limits_are_known(stage: Stage) -> None:
    """The coordinator gives a provider with limits a lane of its own once it has read them; workers have read the file."""
    await wait_until_async(lambda: stage.redis.exists(stage.keys.limits), PATIENCE_SECONDS)


# ---- limits of a provider


async def test_a_providers_limit_holds_over_all_workers_and_tenants_take_turns(stage_of: Opened) -> None:
    """AC-54, AC-55: five calls at once, whichever of the four workers makes them; who comes last of all, but of another
    tenant, starts with the next free places."""
    async with stage_of("[limits.host]\nconcurrency = 5\n", workers=4) as stage:
        await limits_are_known(stage)
        first = [await ask(stage, f"a{number}", "a") for number in range(60)]
        await stage.reached("crowd", 5)
        last = await ask(stage, "b", "b")
        await wait_until_async(lambda: waits(stage, "b"), PATIENCE_SECONDS)
        before = await started(stage)
        await stage.open("crowd")
        results = await asyncio.gather(*[end(turn) for turn in [*first, last]])
        assert {result.status for result in results} == {"finished"}
        order = await started(stage)
        assert len(order) == len(set(order)) == 61, "each call was made once"
        # Five ran, at most 12 stood in the streams of the four partitions: with the places behind those it has begun.
        assert len(before) == 5 and order.index("b") < 12 + 5, order
        assert await stage.redis.zscore(played(stage, "most"), "most") == 5


async def ask(stage: Stage, text: str, tenant: str = "", **options: Any) -> Turn:
    return await stage.client.turn(crowd, text, options=TurnOptions(tenant=tenant, **options))


async def waits(stage: Stage, tenant: str) -> bool:
    """A call of the tenant waits at the provider, or in the backlog of its partition."""
    calls = await stage.redis.zrange(stage.keys.provider("host").waiting, 0, -1)
    for keys in stage.keys.partitions:
        calls += await stage.redis.zrange(keys.backlog("host.crowded|host"), 0, -1)
    ends = (f"|{tenant}".encode(), f'"tenant":"{tenant}"'.encode())
    return any(call.endswith(ends[0]) or ends[1] in call for call in calls)


async def started(stage: Stage) -> list[str]:
    return [text.decode() for text in await stage.redis.lrange(played(stage, "started"), 0, -1)]


def played(stage: Stage, name: str) -> str:
    """A key of the application's, as its processes have it."""
    return f"{stage.keys.prefix}-play:{name}"


async def test_a_tenant_does_not_wait_behind_all_of_another_one(stage_of: Opened) -> None:
    """AC-55 without any limit but the workers' slots: what is in the stream is about what they can do at once."""
    async with stage_of(workers=2, llm_concurrency=4) as stage:
        first = [await ask(stage, f"a{number}", "a") for number in range(100)]
        await stage.reached("crowd", 8)
        last = await ask(stage, "b", "b")
        await stage.event(last, "step.started")
        await stage.open("crowd")
        results = await asyncio.gather(*[end(turn) for turn in [*first, last]])
        assert {result.status for result in results} == {"finished"}
        order = await started(stage)
        # Eight ran; four waited in the stream of each of the four partitions, and as many may have followed by then.
        assert order.index("b") < 8 + 16 + 16, order


async def test_what_a_minute_may_use_is_kept(stage_of: Opened) -> None:
    """AC-54: tokens are reserved by estimate and settled by what the model says; it says nothing here, so the estimate
    stands: of calls of 500 tokens and a few only two fit into the tenth of 10,000 that may be used at once."""
    async with stage_of("[limits.host]\ntokens_per_minute = 10_000\n", workers=2) as stage:
        await limits_are_known(stage)
        await stage.open("crowd")
        turns = [await ask(stage, f"a{number}") for number in range(4)]
        state = stage.keys.provider("host").state

        async def two_wait() -> bool:
            return int(await stage.redis.zcard(stage.keys.provider("host").waiting)) == 2

        await wait_until_async(two_wait, PATIENCE_SECONDS)

        async def two_began() -> bool:
            return len(await started(stage)) >= 2

        await wait_until_async(two_began, PATIENCE_SECONDS)
        assert len(await started(stage)) == 2
        assert float(await stage.redis.hget(state, "tokens")) < 500
        await stage.redis.hset(state, "tokens", 1000)  # half a minute later, as it were
        await asyncio.gather(*[end(turn) for turn in turns])


# ---- providers that fail


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def said(text: str) -> Answer:
    delta = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return Answer(chunks=[sse(delta)])


def refused(status: int, message: str, **headers: str) -> Answer:
    body = msgspec.json.encode({"error": {"message": message}})
    return Answer(chunks=[body], status=status, headers={"content-type": "application/json", **headers})


def endpoints(**servers: ReplayServer) -> str:
    return "".join(
        f'[providers.{name}]\napi = "openai"\nbase_url = "{server.url}/v1"\n' for name, server in servers.items()
    )


async def held_until(stage: Stage, provider: str) -> int:
    return int(await stage.redis.hget(stage.keys.provider(provider).state, "held_until") or 0)


async def test_the_second_provider_answers_when_the_first_fails(stage_of: Opened) -> None:
    """LC-15: and the first one is asked by no worker while it is held back."""
    async with ReplayServer() as one, ReplayServer() as two:
        one.reply(refused(503, "closed for today"))
        two.reply(said("from two"))
        async with stage_of(endpoints(one=one, two=two), workers=2) as stage:
            turn = await stage.client.turn(chained, "hello", session="s")
            result = await end(turn)
            assert result.answer == "from two"
            retrying = [event for event in await stage.assert_sound(turn.id) if event.type == "step.retrying"]
            assert [(event.delay, "closed for today" in event.error) for event in retrying] == [(0.0, True)]
            assert await held_until(stage, "one") > 0
            # For longer than the test takes, so that it does not go by the clock.
            await stage.redis.hset(stage.keys.provider("one").state, "held_until", 2**50)
            more = [await end(await stage.client.turn(chained, "hello", session=f"s{number}")) for number in range(4)]
            assert {result.answer for result in more} == {"from two"}
            assert (len(one.requests), len(two.requests)) == (1, 5)


async def test_a_refused_request_is_no_outage(stage_of: Opened) -> None:
    """LC-15: 400 and 401 lead to the next provider, and hold nobody back."""
    async with ReplayServer() as one, ReplayServer() as two:
        one.reply(refused(401, "who are you?"), refused(400, "what is that?"))
        two.reply(said("from two"))
        async with stage_of(endpoints(one=one, two=two)) as stage:
            for number in range(2):
                turn = await stage.client.turn(chained, "hello", session=f"s{number}")
                assert (await end(turn)).answer == "from two"
            assert await held_until(stage, "one") == 0
            assert (len(one.requests), len(two.requests)) == (2, 2)


async def test_the_last_real_error_is_reported_when_all_fail(stage_of: Opened) -> None:
    """LC-15: also when the last attempt found all of them held back."""
    async with ReplayServer() as one, ReplayServer() as two:
        one.reply(refused(503, "one is closed"))
        two.reply(refused(503, "two is closed"))
        async with stage_of(endpoints(one=one, two=two)) as stage:
            turn = await stage.client.turn(chained, "hello", session="s")
            with pytest.raises(TurnFailedError, match="is closed") as failed:
                await end(turn)
            assert failed.value.error_type == "overloaded"
            assert await stage.client.turn(chained, "again", session="s")  # the session is usable


async def test_a_rate_limit_holds_the_whole_pool_back(stage_of: Opened) -> None:
    """AC-49: nobody asks before the provider's own time is over, and no attempt is used up."""
    async with ReplayServer() as one:
        one.reply(refused(429, "slow down", **{"retry-after": "3"}), said("at last"))
        async with stage_of(endpoints(one=one), workers=2) as stage:
            first = await stage.client.turn(single, "hello", session="s1")
            waiting = await stage.event(first, "step.retrying")
            assert waiting.delay >= 3
            others = [await stage.client.turn(single, "hello", session=f"o{number}") for number in range(3)]
            for turn in others:
                told = await stage.event(turn, "step.retrying")
                assert "slow down" in told.error
            assert len(one.requests) == 1
            results = await asyncio.gather(*[end(turn) for turn in [first, *others]])
            assert {result.answer for result in results} == {"at last"}
            assert len(one.requests) == 1 + 4


async def test_failures_in_a_row_open_the_circuit_for_all(stage_of: Opened) -> None:
    """A provider that is down is not asked by every turn three times."""
    async with ReplayServer() as one:
        one.reply(refused(500, "it is down"))
        toml = endpoints(one=one) + "[limits.one]\nbreaker_failures = 2\n"
        async with stage_of(toml, workers=2) as stage:
            turns = [await stage.client.turn(single, "hello", session=f"s{number}") for number in range(2)]
            await wait_until_async(lambda: held_until(stage, "one"), PATIENCE_SECONDS)
            await stage.redis.hset(stage.keys.provider("one").state, "held_until", 2**50)
            asked = len(one.requests)
            late = await stage.client.turn(single, "hello", session="late")
            told = await stage.event(late, "step.retrying")
            assert "it is down" in told.error and len(one.requests) == asked
            one.reply_only(said("up again"))
            await stage.redis.hset(stage.keys.provider("one").state, "held_until", 1)
            for turn in [*turns, late]:
                await turn.abort("enough")
            after = await end(await stage.client.turn(single, "hello", session="after"))
            assert after.answer == "up again"


# ---- admission


async def refusal_of(turn: Turn) -> TurnFailedError:
    with pytest.raises(TurnFailedError) as refused:
        await end(turn)
    assert refused.value.error_type == "too_many_turns"
    assert refused.value.retry_after_seconds is not None and refused.value.retry_after_seconds >= 1
    return refused.value


async def test_a_tenant_with_too_many_turns_is_refused_and_others_are_not(stage_of: Opened) -> None:
    """AC-55: running and waiting ones count; one that has ended, or rests, does not."""
    async with stage_of(tenant_turns_max=2, partitions=1) as stage:
        resting = await stage.client.turn(patient, "hello", session="rest", options=TurnOptions(tenant="a"))
        assert (await end(resting)).status == "suspended"
        running = [await ask(stage, f"a{number}", "a") for number in range(2)]
        for turn in running:
            await stage.event(turn, "step.started")
        error = await refusal_of(await ask(stage, "a2", "a"))
        assert "tenant 'a' has 2 turns" in str(error) and "TURNMILL_TENANT_TURNS_MAX" in str(error)
        with pytest.raises(CommandRefusedError) as told:
            await stage.client.turn(crowd, "x", session="new", on_busy="reject", options=TurnOptions(tenant="a"))
        assert (told.value.kind, told.value.retry_after_seconds is not None) == ("too_many_turns", True)
        await stage.open("crowd")
        assert (await end(await ask(stage, "b", "b"))).status == "finished"
        assert (await end(await ask(stage, "nobody"))).status == "finished"
        for turn in running:
            await end(turn)
        assert (await end(await ask(stage, "a3", "a"))).status == "finished"
        await resting.resume(tool_results={(await resting.result()).pending[0].id: "yes"})
        assert (await end(resting)).status == "finished"
        assert await stage.redis.hgetall(stage.keys.partitions[0].load) == {}


async def test_a_pool_with_too_much_waiting_refuses(stage_of: Opened) -> None:
    async with stage_of(pool_depth_max=3, partitions=1) as stage:
        running = [await ask(stage, f"a{number}") for number in range(3)]
        for turn in running:
            await stage.event(turn, "step.started")
        error = await refusal_of(await ask(stage, "more"))
        assert "3 model calls of pool 'host.crowded'" in str(error) and "TURNMILL_POOL_DEPTH_MAX" in str(error)
        await stage.open("crowd")
        for turn in running:
            assert (await end(turn)).status == "finished", "nothing that was accepted is dropped"
        assert (await end(await ask(stage, "later"))).status == "finished"
