"""How long things are kept: everything has its time, and a deleted session takes everything along; real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps import living as app
from support.retention_run import SHORT_TIMES, STANDING, at_rest, footprint, kind_of, run, start_processes
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.content import ImagePart, Message, TextPart
from turnmill.protocol.errors import CommandRefusedError, TurnError, TurnLostError
from turnmill.protocol.messages import AbortTurn, DeleteSession, ToolReply
from turnmill.protocol.streams import REMOVE_SESSION
from turnmill.runtime import Agent, Turn
from turnmill.runtime.embedded import ensure_server
from turnmill.runtime.removals import finish_removals, remove_some

PLAIN = Agent("plain", "host:living")
TURNS = 1500
"""AC-37 asks for 100,000: `scripts/chaos retention`."""
OF_SESSIONS = {
    "{p}:session:*", "{p}:transcript:*", "{p}:values:*", "{p}:blobs:*", "{p}:blob:*", "{p}:turns", "{p}:timers",
    "{p}:load", "{p}:turn:*", "{p}:turn:*:events",
}  # fmt: skip
"""What may have no expiry while a turn lives: its session's keys, its record and channel, and the partition's indexes."""


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    """Sessions stay until they are deleted; other times are the defaults."""
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        await start_processes(opened, app.APP, PLAIN)
        yield opened


async def done(turn: Turn) -> str:
    return (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).text


async def rests(turn: Turn) -> Any:
    result = await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    assert result.status == "suspended"
    return result


async def fails(turn: Turn) -> str:
    with pytest.raises(TurnError) as failed:
        await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    return str(failed.value.error_type)


async def live(stage: Stage, session: str, **options: Any) -> Turn:
    """A turn that stands in a tool call."""
    gate = uuid.uuid4().hex[:8]
    turn = await stage.client.turn(app.assistant, f"fetch {gate}", session=session, **options)
    await stage.reached(gate)
    return turn


def large(text: str = "look") -> Message:
    return Message(role="user", content=[TextPart(text), ImagePart(data=bytes(100_000), media_type="image/png")])


async def names_of(stage: Stage) -> set[str]:
    return {name.decode() async for name in stage.redis.scan_iter(match=f"{stage.keys.prefix}:*", count=1000)}


async def every_kind_of_turn(stage: Stage, session: str) -> list[str]:
    """Turns of every kind, ended; the last of them stopped. Returns their ids."""
    client, turns = stage.client, []

    async def ended(agent: Agent, message: str | Message, **options: Any) -> None:
        turn = await client.turn(agent, message, session=session, **options)
        turns.append(turn.id)
        await done(turn)

    await ended(app.assistant, "hello", idempotency_key="one")
    await ended(app.assistant, large())
    await ended(app.assistant, "fetch")
    await ended(app.assistant, "delegate")
    await ended(app.repeating, "again and again")
    asked = await client.turn(app.assistant, "ask name?", session=session)
    await asked.resume(tool_results={(await rests(asked)).pending[0].id: "Ada"})
    paying = await client.turn(app.assistant, "pay 5", session=session)
    while (await asyncio.wait_for(paying.result(), PATIENCE_SECONDS)).status == "suspended":
        with contextlib.suppress(CommandRefusedError):
            await paying.approve(*[call.id for call in (await paying.result()).approvals])
    await done(asked)
    failed = await client.turn(app.assistant, "fail", session=session)
    await fails(failed)
    refused = await client.turn("nobody", "hello", session=session)
    assert await fails(refused) == "unknown_agent"
    stopped = await live(stage, session, idempotency_key="two")
    steering = await stopped.steer("and this")
    joined = await client.turn(app.assistant, "and that", session=session, on_busy="steer", idempotency_key="three")
    assert joined.id == stopped.id
    await stopped.cancel_steering(steering.id)
    waiting = await client.turn(app.assistant, "behind", session=session)
    dropped = await client.turn(app.assistant, "far behind", session=session)
    assert await dropped.abort("changed my mind")
    assert await fails(dropped) == "aborted"
    await stopped.abort("enough")
    assert await fails(stopped) == "aborted"
    await done(waiting)
    await client.session(session).values.set("mood", "fine")
    return [*turns, asked.id, paying.id, failed.id, refused.id, stopped.id, waiting.id, dropped.id]


# --- everything has its time


async def test_short_turns_leave_nothing_behind(short_directory: Path) -> None:
    """AC-37, scaled: the kinds of keys and their number come back exactly, memory within 10 %."""
    server = ensure_server(short_directory)
    try:
        assert await run(server.url, short_directory, TURNS, 32)
    finally:
        server.stop()


async def test_turns_of_every_kind_leave_nothing_behind(valkey_url: str, namespace: str, short_directory: Path) -> None:
    """AC-37: what has no expiry is a session's or a live turn's, a rest keeps its session, and in the end all is gone."""
    async with open_stage(valkey_url, namespace, short_directory, **SHORT_TIMES) as stage:
        await start_processes(stage, app.APP, PLAIN)
        before = await at_rest(stage, PATIENCE_SECONDS)
        resting = await stage.client.turn(app.assistant, "ask name?", session="patient")
        pending = (await rests(resting)).pending[0].id
        await every_kind_of_turn(stage, "busy")
        fork = await stage.client.session("busy").fork()
        await done(await stage.client.session("busy").retry(message="once more"))
        await done(await stage.client.turn(PLAIN, "to the fork", session=fork.id))
        await stage.client.session("busy").fork(new_id="never-used")
        await stage.redis.xadd(stage.keys.partitions[0].inbox, {"t": "start_turn", "d": b"\xff"})
        found = await footprint(stage.redis, namespace)
        assert set(found.unbounded) <= OF_SESSIONS, found.unbounded
        assert {"{p}:idempotency:*", "{p}:answer:*", "{p}:cancel:*", "{p}:owned:*", "{p}:plan:*"} <= set(found.keys)

        async def only_the_patient() -> bool:
            sessions = [name for name in await names_of(stage) if ":session:" in name]
            return len(sessions) == 1

        await wait_until_async(only_the_patient, PATIENCE_SECONDS)
        assert await resting.status() == "suspended"
        await resting.resume(tool_results={pending: "Ada"})
        assert await done(resting) == "told: Ada"
        after = await at_rest(stage, PATIENCE_SECONDS)
        assert set(after.keys) <= set(before.keys) | {"{p}:dead", "{p}:stats"}


async def test_commands_to_nobody_leave_nothing(stage: Stage) -> None:
    """A session that does not exist goes on not to exist, whatever is said to it."""
    before = await names_of(stage)
    turn = await stage.client.turn("nobody", "hello", session="refused")
    assert await fails(turn) == "unknown_agent"
    keys = stage.keys.of_session("void")
    answer = await stage.client.request(AbortTurn(session_id="void", turn_id=turn.id, request_id="r1"), "r1")
    assert answer.done is False
    late = ToolReply(session_id="void", turn_id=turn.id, call="1.0", attempt=1, token="forged")
    await stage.redis.xadd(keys.results, {"t": late.type, "d": json.dumps({"session_id": "void"})})
    await stage.client.session("void").delete()
    await stage.assert_idle()
    left = {kind_of(name, stage.keys.prefix) for name in await names_of(stage) - before}
    assert left <= {
        "{p}:answer:*", "{p}:owned:*", "{p}:turn:*", "{p}:turn:*:events", "{p}:turns"
    } | STANDING  # fmt: skip


async def test_dead_letters_have_a_time_and_a_bound(valkey_url: str, namespace: str, short_directory: Path) -> None:
    """The oldest go first where they take too much memory; what is left goes by its age."""
    times = {"dead_letter_ttl": 4, "dead_letter_bytes_max": 100_000}
    async with open_stage(valkey_url, namespace, short_directory, **times) as stage:
        await start_processes(stage, app.APP, PLAIN)
        keys = stage.keys.partitions[0]
        for number in range(100):
            await stage.redis.xadd(keys.inbox, {"t": "poison", "d": str(number) * 5_000})

        async def is_bounded() -> bool:
            return await stage.redis.xlen(keys.dead) > 0 and await stage.redis.memory_usage(keys.dead) < 100_000

        await wait_until_async(is_bounded, PATIENCE_SECONDS)
        newest = (await stage.redis.xrevrange(keys.dead, count=1))[0][1]
        assert newest[b"d"] == b"99" * 5_000

        async def is_empty() -> bool:
            return await stage.redis.xlen(keys.dead) == 0

        await wait_until_async(is_empty, PATIENCE_SECONDS)


async def test_a_plan_stays_for_as_long_as_a_turn_rests(valkey_url: str, namespace: str, short_directory: Path) -> None:
    """Also the versions of other agents that it may call; both go when nothing needs them any more."""
    async with open_stage(valkey_url, namespace, short_directory, plan_ttl=4, agent_ttl=4) as stage:
        await start_processes(stage, app.APP, PLAIN)
        # Not of the app, whose agents its tool workers publish again and again.
        agent = Agent("caller", "host:living", tools=[app.ask_user, Agent("called", "host:living")])
        turn = await stage.client.turn(agent, "ask name?", session="s")
        pending = (await rests(turn)).pending[0].id
        called = next(tool.agent for tool in agent.agent_spec().own_tools if tool.agent is not None)
        await stage.client.publish(Agent("called", "host:living", system="newer"))
        start = await stage.redis.time()

        async def three_lives_have_passed() -> bool:
            return (await stage.redis.time())[0] > start[0] + 12

        await wait_until_async(three_lives_have_passed, PATIENCE_SECONDS)
        assert await stage.redis.hexists(stage.keys.agents, called)
        await turn.resume(tool_results={pending: "Ada"})
        assert await done(turn) == "told: Ada"

        async def gone() -> bool:
            plans = [name for name in await names_of(stage) if ":plan:" in name]
            return not plans and not await stage.redis.hexists(stage.keys.agents, called)

        await wait_until_async(gone, PATIENCE_SECONDS)


async def test_old_versions_of_an_agent_go_unless_somebody_uses_them(
    valkey_url: str, namespace: str, short_directory: Path
) -> None:
    """A version stays while turns are started with it; the newest stays anyway."""
    async with open_stage(valkey_url, namespace, short_directory, agent_ttl=3) as stage:
        await start_processes(stage, app.APP, PLAIN)
        versions = [Agent("clerk", "host:living", system=f"version {number}") for number in range(4)]
        await stage.client.publish(*versions)
        pinned = versions[0]
        resting = await stage.client.turn(
            Agent("host", "host:living", tools=[app.ask_user]), "ask name?", session="resting"
        )
        pending = (await rests(resting)).pending[0].id
        await stage.client.publish(Agent("host", "host:living", system="newer", tools=[app.ask_user]))

        async def published(name: str) -> int:
            fields = await stage.redis.hkeys(stage.keys.agents)
            return sum(field.decode().startswith(f"{name}@") for field in fields)

        async def two_are_left() -> bool:
            assert await done(await stage.client.turn(pinned, "hello")) == "echo hello"
            return await published("clerk") == 2

        await wait_until_async(two_are_left, PATIENCE_SECONDS)
        fields = {field.decode() for field in await stage.redis.hkeys(stage.keys.agents)}
        newest = (await stage.redis.hget(stage.keys.agents, "clerk")).decode()
        assert f"clerk@{newest}" in fields

        async def one_is_left() -> bool:
            return await published("host") == 1

        await wait_until_async(one_is_left, PATIENCE_SECONDS)
        fields = {field.decode() for field in await stage.redis.hkeys(stage.keys.agents)}
        uses = await stage.redis.zrange(stage.keys.agent_uses, 0, -1)
        assert {use.decode() for use in uses} <= fields
        await resting.resume(tool_results={pending: "Ada"})
        assert await done(resting) == "told: Ada"
        assert await done(await stage.client.turn(versions[1], "back again")) == "echo back again"


# --- a session's deletion


async def test_a_deleted_session_takes_everything_along(stage: Stage) -> None:
    """Records, channels, results, keys, answers, values, large values, sub-turns: gone when the call returns."""
    await done(await stage.client.turn(app.assistant, "hello", session="before"))
    before = await names_of(stage)
    turns = await every_kind_of_turn(stage, "s")
    assert len(await names_of(stage)) > len(before) + 3 * len(turns)
    await stage.client.session("s").delete()
    left = await names_of(stage) - before
    kinds = {kind_of(name, stage.keys.prefix) for name in left}
    assert kinds <= {"{p}:answer:*", "{p}:cancel:*", "{p}:plan:*", "{p}:turns"} | STANDING, left
    answers = [name for name in left if ":answer:" in name]
    assert len(answers) == 1, "only the deletion's own answer"
    for name in left:
        if ":cancel:" in name:
            assert await stage.redis.get(name) == b"the session was deleted"
            assert 0 < await stage.redis.ttl(name) <= 86_400
    keys = stage.keys.of_session("s")
    assert not {name.decode() for name in await stage.redis.zrange(keys.turns, 0, -1)} & set(turns)
    assert await stage.redis.exists(keys.removals) == 0
    assert await stage.client.session("s").turns() == []
    with pytest.raises(TurnLostError):
        await stage.client.attach(turns[0]).result()
    assert await done(await stage.client.turn(app.assistant, "hello", session="s", idempotency_key="one"))
    assert len(await stage.client.session("s").messages()) == 2


async def test_a_turn_that_the_deletion_stops_is_told_for_a_moment(stage: Stage) -> None:
    turn = await live(stage, "s")
    waiting = await stage.client.turn(app.assistant, "behind", session="s")
    watching = asyncio.create_task(fails(turn))
    await stage.client.session("s").delete()
    assert await watching == "aborted"
    assert await turn.status() == "aborted"
    keys = stage.keys.of_turn(turn.id)
    for name in (keys.turn(turn.id), keys.events(turn.id)):
        assert 0 < await stage.redis.ttl(name) <= 60
    assert await stage.redis.exists(keys.turn(waiting.id), keys.events(waiting.id)) == 0
    assert await stage.redis.zcard(keys.turns) <= 1, "only the first turn of these tests"


async def test_sub_turns_that_run_follow_their_parent(stage: Stage) -> None:
    """What is not idle, or not there yet, is asked to go by a command of its own."""
    before = {name for name in await names_of(stage) if ":session:" in name}
    turn = await stage.client.turn(app.outer, "nest /dev/null", session="s")
    child = await stage.event(turn, "sub_turn.started")
    await stage.client.session("s").delete()
    keys = stage.keys.of_session("s")

    async def gone() -> bool:
        return not {name for name in await names_of(stage) if ":session:" in name} - before

    await wait_until_async(gone, PATIENCE_SECONDS)
    await stage.assert_idle()
    assert child.session_id.startswith("s/")
    # A session that lives although its parent is gone: it is stopped first.
    orphan = await live(stage, "s/orphan")
    await stage.redis.sadd(keys.removal("x:s"), "session:s/orphan", "session:s/never-was")
    await stage.redis.sadd(keys.removals, "removed:x:s")
    assert await fails(orphan) == "aborted"
    await wait_until_async(gone, PATIENCE_SECONDS)
    await stage.assert_idle()


async def test_a_session_with_very_much_is_removed_while_a_new_one_lives(stage: Stage) -> None:
    """The coordinator goes on where the caller went away, in parts, also after a kill; a new session of the same name,
    begun in between with the same idempotency key, is not touched."""
    keys = stage.keys.of_session("s")
    old = await stage.client.turn(app.assistant, large(), session="s", idempotency_key="k")
    await done(old)
    many = 60_000
    async with stage.redis.pipeline(transaction=False) as pipeline:
        for number in range(many):
            pipeline.zadd(keys.owned("s"), {f"turn:t{keys.partition}-{number:026}": 1e15 + number})
            pipeline.set(keys.turn(f"t{keys.partition}-{number:026}"), "x") if number % 100 == 0 else None
        await pipeline.execute()
    await stage.client.request(DeleteSession(session_id="s", request_id="r"), "r")
    assert await stage.redis.exists(keys.session("s"), keys.transcript("s"), keys.blobs("s"), keys.owned("s")) == 0
    new = await stage.client.turn(app.assistant, "hello again", session="s", idempotency_key="another")
    stage.processes.all[0].kill()
    stage.processes.coordinator()
    assert await done(new) == "echo hello again"

    async def is_done() -> bool:
        return not await stage.redis.exists(keys.removals)

    await wait_until_async(is_done, PATIENCE_SECONDS)
    left = {name for name in await names_of(stage) if ":removed:" in name or f":turn:t{keys.partition}-0000" in name}
    assert left == set()
    with pytest.raises(TurnLostError):
        await old.status()
    assert await new.status() == "finished"
    assert [message.text for message in await stage.client.session("s").messages()] == [
        "hello again",
        "echo hello again",
    ]
    assert await stage.redis.zrange(keys.owned("s"), 0, -1) == [f"turn:{new.id}".encode()]
    again = await stage.client.turn(app.assistant, "hello again", session="s", idempotency_key="another")
    assert again.id == new.id


async def test_a_part_of_a_removal_is_bounded_and_any_order_ends(stage: Stage) -> None:
    """Each call takes few names; containers in containers come to their end as well."""
    keys = stage.keys.of_session("s")
    stage.processes.end_all()  # only this test removes
    blobs = {f"blob:{number}" for number in range(30)}
    for name in blobs:
        await stage.redis.set(keys.base + name, "x")
    for level in range(8):
        child = f"s/{level}"
        await stage.redis.hset(keys.session(child), mapping={"v": 1, "s": b"\x93\x00\xc0\x90"})
        await stage.redis.set(keys.transcript(child), "x")
        await stage.redis.sadd(keys.blobs(child), f"session:s/{level + 1}", *sorted(blobs)[level * 3 : level * 3 + 3])
        await stage.redis.zadd(keys.timers, {child: 1})
    await stage.redis.sadd(keys.removal("x:s"), "session:s/0", *sorted(blobs)[24:])
    await stage.redis.sadd(keys.removals, "removed:x:s")
    assert await remove_some(stage.client.engine, keys, 0) == 0
    base = keys.base
    arguments = [base, 2, ":events", "cancel:", "transcript:", "replacements:", "values:"]
    names = [keys.removals, keys.removal("x:s"), keys.inbox, keys.turns, keys.timers]
    calls, left = 0, 1
    while left:
        count = await stage.redis.dbsize()
        left = await REMOVE_SESSION.run(stage.client.engine, names, arguments)
        assert count - await stage.redis.dbsize() <= 3 + 2 * 2, "one call took too much"
        calls += 1
        assert calls < 200, "no end"
    commands = await stage.redis.xrange(keys.inbox)
    assert [json.loads(fields[b"d"])["session_id"] for _, fields in commands] == ["s/8"], "it may be on its way"
    assert await stage.redis.exists(*[base + name for name in blobs], keys.removals, keys.session("s/7")) == 0
    assert await stage.redis.zcard(keys.timers) == 0
    await finish_removals(stage.client.engine, keys, "s")  # nothing is left to do


async def test_sessions_end_and_begin_at_the_edge_of_their_time(
    valkey_url: str, namespace: str, short_directory: Path
) -> None:
    """A turn that comes when the session expires is the old session's or a new one's, whole, and never lost."""
    async with open_stage(valkey_url, namespace, short_directory, session_ttl=1) as stage:
        await start_processes(stage, app.APP, PLAIN)

        async def talk(name: str, pause_seconds: float) -> list[int]:
            """Where each turn began in its session's transcript."""
            begins = []
            for _ in range(8):
                turn = await stage.client.turn(app.assistant, "hello", session=name)
                events = [event async for event in turn.events()]
                assert events[-1].type == "turn.finished"
                begins.append(events[-1].result.first_message)
                await asyncio.sleep(pause_seconds)
            return begins

        # Pauses around the time at which the timer is fired.
        pauses = [0.8 + 0.03 * number for number in range(20)]
        talks = await asyncio.gather(*[talk(f"edge-{number}", pause) for number, pause in enumerate(pauses)])
        for begins in talks:
            assert begins[0] == 0
            assert all(later in (0, earlier + 2) for earlier, later in itertools.pairwise(begins))
        assert {begin > 0 for begins in talks for begin in begins[1:]} == {True, False}
        await stage.assert_idle()
