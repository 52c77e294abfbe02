"""The engine refuses, forgets or comes back with older data, under a deployment that all these tests share."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.chaos import app
from support.chaos.deployment import Deployment, Engine, attached, engine, processes_of
from support.chaos.engine_faults import refuse_writes, save_again_on
from support.chaos.server import Server, in_thread
from support.processes import Processes
from support.stage import call, told
from support.waiting import wait_until_async
from turnmill.protocol.errors import EngineReplyError, EngineUnavailable, TurnLostError
from turnmill.runtime.turn import Turn

pytestmark = pytest.mark.chaos
ROLES = ("coordinator", "llm", "tools")
PATIENCE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears nothing looks after half a second, not after five."""
    monkeypatch.setattr("turnmill.protocol.subscription.SILENCE_SECONDS", 0.5)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Engine, Processes]]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    with engine(directory, options={"enable_protected_configs": "yes"}) as started, processes_of(started) as processes:
        for role in ROLES:
            started.start(processes, role)
        yield started, processes
    shutil.rmtree(directory)


@pytest.fixture
async def deployed(running: tuple[Engine, Processes]) -> AsyncIterator[Deployment]:
    async with attached(*running) as deployment:
        await deployment.everybody_is_there()
        yield deployment


async def answer(turn: Turn) -> str:
    return (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer


def effects_of(deployed: Deployment, turn: Turn) -> dict[str, dict[int, int]]:
    """The attempts of each call that took effect, and how often."""
    found = deployed.effects().of_call
    return {key.partition("/")[2]: dict(attempts) for key, attempts in found.items() if key.startswith(turn.id)}


async def began(deployed: Deployment, turn: Turn, calls: int = 1) -> None:
    await wait_until_async(lambda: len(effects_of(deployed, turn)) == calls, PATIENCE_SECONDS)


REFUSALS = {
    "memory": "its memory is full; raise its maxmemory",
    "saving": "it cannot save its data; look at its disk",
    "replica": "it is a replica; TURNMILL_REDIS_URL must lead to the primary",
}


async def break_engine(server: Server, fault: str) -> None:
    match fault:
        case "memory":
            await in_thread(server.set, maxmemory=1_000_000)
        case "saving":
            await refuse_writes(server)
        case _:
            await in_thread(server.ask, "REPLICAOF", "127.0.0.1", 1)


async def mend(server: Server) -> None:
    await in_thread(server.set, maxmemory=0)
    await save_again_on(server)
    await in_thread(server.promote)


@pytest.mark.parametrize("fault", REFUSALS)
async def test_an_engine_that_takes_nothing_new(deployed: Deployment, fault: str) -> None:
    """AC-59: new turns are refused with what helps; running ones wait and go on, and nothing is done twice, although
    workers could not renew their signs of life in the usual way."""
    server = deployed.server
    running = await deployed.ask(told([call("once", seconds=0.5)], answer="went on: ${results[0]}"), f"{fault}-1")
    await began(deployed, running)
    await break_engine(server, fault)
    with pytest.raises(EngineReplyError, match=f"the engine takes no start_turn now: {REFUSALS[fault]}"):
        await deployed.ask(told(answer="never"), f"{fault}-2")
    waiting = asyncio.create_task(running.result())
    done, _ = await asyncio.wait({waiting}, timeout=2.5)  # longer than the liveness
    assert not done
    await mend(server)
    assert (await asyncio.wait_for(waiting, PATIENCE_SECONDS)).answer == "went on: once done"
    assert effects_of(deployed, running) == {"1.0": {1: 1}}
    again = await deployed.ask(told([call("again")], answer="as before"), f"{fault}-2")
    assert await answer(again) == "as before"
    await deployed.stage.assert_idle()


async def test_a_submission_that_no_replica_confirms(deployed: Deployment) -> None:
    """It is in the inbox and does not count; the same idempotency key finds it there."""
    settings = {**deployed.engine.settings, "acknowledged_replicas": 1, "acknowledge_timeout": 0.1}
    cautious = deployed.engine._replace(settings=settings)
    async with attached(cautious, deployed.stage.processes) as other:
        with pytest.raises(EngineUnavailable, match=r"1 of 1 replicas did not confirm it within 0\.1 s"):
            await other.client.turn(app.worker, told(answer="once"), session="unconfirmed", idempotency_key="key")
    turn = await deployed.client.turn(app.worker, told(answer="once"), session="unconfirmed", idempotency_key="key")
    assert await answer(turn) == "once"
    assert len(await deployed.client.session("unconfirmed").turns()) == 1


async def test_groups_are_set_back(deployed: Deployment) -> None:
    """AC-17: what was handed out before is handed out again; it takes no second effect, and nothing is answered twice."""
    ended = await deployed.ask(told([call("once")], answer="ended"), "ended")
    assert await answer(ended) == "ended"
    running = await deployed.ask(
        told([call("once", seconds=1.0), call("again", seconds=1.0)], answer="both"), "set-back"
    )
    await began(deployed, running, calls=2)
    for keys in deployed.stage.keys.partitions:
        for stream, group in (
            (keys.inbox, "coordinator"),
            (keys.results, "coordinator"),
            (keys.model("default"), "workers"),
            (keys.tool("default"), "workers"),
        ):
            await in_thread(deployed.server.ask, "XGROUP", "SETID", stream, group, "0")
    assert await answer(running) == "both"
    assert effects_of(deployed, running) == {"1.0": {1: 1}, "1.1": {1: 1}}
    assert effects_of(deployed, ended) == {"1.0": {1: 1}}
    await deployed.stage.assert_sound(running.id)
    await deployed.stage.assert_sound(ended.id)
    await deployed.stage.assert_idle()


async def test_the_engine_comes_back_with_older_data(deployed: Deployment) -> None:
    """AC-17: what the older file knows has not happened again, and what it does not know is said to be lost."""
    server, backup = deployed.server, deployed.engine.directory / "backup"
    known = await deployed.ask(told([call("once")], answer="known"), "known")
    assert await answer(known) == "known"
    await in_thread(server.copy_data, backup)
    forgotten = await deployed.ask(told([call("once")], answer="forgotten"), "forgotten")
    assert await answer(forgotten) == "forgotten"
    await in_thread(server.kill)
    await in_thread(server.restore_data, backup)
    await in_thread(server.start)
    assert await answer(known) == "known"
    with pytest.raises(TurnLostError) as lost:
        await answer(forgotten)
    assert lost.value.error_type == "state_lost"
    for session in ("known", "forgotten"):
        assert await answer(await deployed.ask(told([call("again")], answer="works"), session)) == "works"
    assert effects_of(deployed, known) == {"1.0": {1: 1}} == effects_of(deployed, forgotten)
    await deployed.stage.assert_idle()


async def test_an_evicting_engine_is_told_loudly(deployed: Deployment) -> None:
    """AC-36: a coordinator says at its start, as an error, that work may be lost, and which setting helps."""
    await in_thread(deployed.server.set, maxmemory_policy="allkeys-lru")
    coordinator = deployed.start("coordinator")
    await wait_until_async(lambda: "evict" in coordinator.log(), PATIENCE_SECONDS)
    await in_thread(deployed.server.set, maxmemory_policy="noeviction")
    coordinator.kill()
    line = next(line for line in coordinator.log().splitlines() if "evict" in line)
    assert "error" in line and "maxmemory-policy to noeviction" in line and "allkeys-lru" in line


async def test_a_session_whose_record_was_evicted_begins_anew(deployed: Deployment) -> None:
    """AC-21: a transcript without its record belongs to nobody; a new conversation is not mixed up with it."""
    assert await answer(await deployed.ask(told([call("again")], answer="first"), "anew")) == "first"
    keys = deployed.stage.keys.of_session("anew")
    await deployed.stage.redis.delete(keys.session("anew"), keys.lease)  # the partition's next owner remembers nothing
    assert await answer(await deployed.ask(told([call("again")], answer="second"), "anew")) == "second"
    messages = await deployed.stage.assert_history("anew")
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]


async def test_a_turn_whose_session_was_evicted_says_so(deployed: Deployment) -> None:
    """AC-21: its record still says that it runs; whoever waits for it is told that its state is lost."""
    turn = await deployed.ask(told([call("again", seconds=1.0)], answer="never"), "evicted")
    await began(deployed, turn)
    keys = deployed.stage.keys.of_session("evicted")
    await deployed.stage.redis.delete(keys.session("evicted"), keys.transcript("evicted"))
    with pytest.raises(TurnLostError, match="its session does not have it") as lost:
        await answer(turn)
    assert lost.value.error_type == "state_lost"
    assert await answer(await deployed.ask(told([call("again")], answer="usable"), "evicted")) == "usable"
