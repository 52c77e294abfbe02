"""Messages that nobody can decide on: they stop no queue, whoever waits for them is told, and operators have them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.commands import CommandLine, json_lines
from support.crash_app import worker
from support.stage import APP, PATIENCE_SECONDS, SHORT, Stage, call, open_stage, told
from support.waiting import wait_until_async
from turnmill.protocol.codec import encode_body
from turnmill.protocol.dead_letters import bury
from turnmill.protocol.errors import CommandRefusedError, TurnAbortedError, TurnFailedError
from turnmill.protocol.keys import COORDINATOR_GROUP, PartitionKeys, new_turn_id
from turnmill.protocol.messages import AbortTurn, StartTurn
from turnmill.protocol.streams import Delivery, create_groups
from turnmill.runtime import connect_sync
from turnmill.runtime.client import Client
from turnmill.runtime.dead_letters import DeadLetter

SESSION = "session"
POISON: list[dict[str, bytes]] = [
    {"t": b"tool_task", "d": b"{\xff\xfe"},
    {"t": b"abort_turn", "d": b'{"a":1}', "v": b"2", "extra": b"\x00\xff"},
    {"t": b"\xfetomorrow", "d": b"\x81\xa1a\x01"},
    {"hello": b"world"},
]


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


@pytest.fixture
def turnmill(valkey_url: str, namespace: str, short_directory: Path) -> CommandLine:
    settings = {name: str(value) for name, value in SHORT.items()}
    return CommandLine(short_directory, redis_url=valkey_url, namespace=namespace, **settings)


async def run(turnmill: CommandLine, *arguments: str, code: int = 0) -> str:
    done = await asyncio.to_thread(turnmill, *arguments)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


async def letters(client: Client, count: int, **wanted: Any) -> list[DeadLetter]:
    """The dead letters, when there are so many."""

    async def there() -> list[DeadLetter] | None:
        found = await client.dead_letters(**wanted)
        return found if len(found) >= count else None

    found = await wait_until_async(there, PATIENCE_SECONDS)
    assert found is not None and len(found) == count
    return found


def start_fleet(stage: Stage) -> None:
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default"])


async def assert_works(stage: Stage) -> None:
    turn = await stage.client.turn(worker, told([call("once")]), session=SESSION)
    assert (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer == "all done"
    await stage.assert_idle()


# ---- every queue


async def test_poison_on_every_queue_is_kept_and_stops_nothing(stage: Stage, turnmill: CommandLine) -> None:
    """AC-26: malformed, of another version, of an unknown type, on each of the four kinds of queue: a letter with reason,
    origin and the original bytes, as the command line shows them; the queue moves on."""
    start_fleet(stage)
    keys = stage.keys.of_session(SESSION)
    names = ["inbox", "results", "model:default", "tool:default"]
    for name in names:
        for fields in POISON:
            await stage.redis.xadd(keys.base + name, fields)
    await assert_works(stage)
    await letters(stage.client, len(names) * len(POISON))
    listed = json_lines(await run(turnmill, "dead", "ls", "--limit", "100", "--json"))
    assert sorted(letter["queue"] for letter in listed) == sorted(names * len(POISON))
    assert all(letter["reason"] and letter["entry_id"] and letter["attempts"] == 1 for letter in listed)
    assert {letter["body"] for letter in listed if "body" in letter} == {'{"a":1}', ""}
    table = await run(turnmill, "dead", "ls")
    assert "protocol version 2, this process speaks 1" in table
    for letter in await stage.client.dead_letters(*[letter["id"] for letter in listed]):
        kept = {"d": letter.body, **letter.fields} if letter.body else letter.fields
        original = [{name: value for name, value in fields.items() if name != "t"} for fields in POISON]
        assert kept in original
    newest = listed[0]["id"]
    shown = await run(turnmill, "dead", "show", newest)
    for part in (newest, listed[0]["reason"], f"`turnmill dead replay {newest}`"):
        assert part in shown


async def test_a_letter_is_shown_as_well_as_it_can_be(stage: Stage, turnmill: CommandLine) -> None:
    stage.processes.coordinator()
    bodies = {
        b'{"a":[1,2]}': '"a": [',
        b"\x81\xa1a\x01": '"a": 1',
        b"plain words": "plain words",
        b"\xff\xfe{": "ff fe 7b",
    }
    for body in bodies:
        await stage.redis.xadd(stage.keys.partitions[2].inbox, {"t": "nonsense", "d": body})
    for letter in await letters(stage.client, len(bodies)):
        shown = await run(turnmill, "dead", "show", letter.id)
        assert bodies[letter.body] in shown
    raw = await asyncio.to_thread(turnmill, "dead", "show", letter.id, "--raw")
    assert raw.stdout.encode("utf-8", "surrogateescape") == letter.body


@pytest.mark.parametrize("name", ["inbox", "results", "model:default", "tool:default", "feed", "dead", "timers"])
async def test_a_key_of_another_type_in_place_of_a_stream_is_moved_away(stage: Stage, name: str) -> None:
    """AC-26: all that stood there is kept, work goes on, and other partitions are not held up."""
    start_fleet(stage)
    await assert_works(stage)
    keys = stage.keys.of_session(SESSION)
    async with stage.redis.pipeline(transaction=True) as pipe:
        await pipe.delete(keys.base + name).rpush(keys.base + name, "gar", "bage").execute()
    if name == "dead":
        await stage.redis.xadd(keys.inbox, {"t": "nonsense", "d": "{}"})

    async def starts() -> bool:
        try:
            await assert_works(stage)
        except Exception as error:
            if "WRONGTYPE" not in str(error):
                raise
            return False
        return True

    await wait_until_async(starts, PATIENCE_SECONDS)
    letter = next(each for each in await stage.client.dead_letters() if each.displaced)
    assert (letter.queue, letter.type, letter.partition) == (name, "list", keys.partition)
    assert letter.displaced is not None
    assert await stage.redis.lrange(letter.displaced, 0, -1) == [b"gar", b"bage"]
    outcome = await stage.client.replay_dead_letters(letter.id)
    assert f"kept as {letter.displaced}" in outcome[letter.id]
    assert await stage.client.drop_dead_letters(letter.id) == {letter.id: "dropped"}
    assert not await stage.redis.exists(letter.displaced)


async def test_a_worker_is_not_stopped_by_a_key_in_a_queue_that_was_never_used(stage: Stage) -> None:
    """It reads all its queues at once: the one that is broken must not keep it from the others."""
    broken = stage.keys.partitions[0].tool("late")
    stage.processes.coordinator(feed_ttl=2)
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default", "late"])
    await assert_works(stage)
    async with stage.redis.pipeline(transaction=True) as pipe:
        await pipe.delete(broken).set(broken, "garbage").execute()
    await assert_works(stage)
    assert [(each.queue, each.body) for each in await letters(stage.client, 1)] == [("tool:late", b"garbage")]
    assert await stage.redis.xinfo_groups(broken)


# ---- who waits is told


async def test_the_sender_of_a_command_that_cannot_be_decided_is_told_at_once(stage: Stage) -> None:
    """The session's record is broken: nobody could ever decide on it. The answer names the letter."""
    stage.processes.coordinator()
    keys = stage.keys.of_session("broken")
    await stage.redis.set(keys.session("broken"), "garbage")
    command = AbortTurn(session_id="broken", turn_id=new_turn_id(keys.partition), request_id="request-1")
    with pytest.raises(CommandRefusedError) as refused:
        await stage.client.request(command, command.request_id, timeout=PATIENCE_SECONDS)
    (letter,) = await stage.client.dead_letters()
    assert letter.id in str(refused.value)
    assert (letter.queue, letter.type, letter.body) == ("inbox", "abort_turn", encode_body(command))
    assert "WRONGTYPE" in letter.reason
    assert refused.value.kind == "internal"


@pytest.mark.parametrize("packed", [False, True])
async def test_the_sender_of_an_unreadable_command_is_told_if_its_id_can_be_read(stage: Stage, packed: bool) -> None:
    """Another language sent it, with a field of another type."""
    stage.processes.coordinator()
    keys = stage.keys.partitions[1]
    body = {"session_id": 7, "turn_id": new_turn_id(1), "steering_id": "steering-1", "message": {}}
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    await stage.redis.xadd(keys.inbox, {"t": "steer_turn", "d": encode(body)})

    async def answered() -> Any:
        return await stage.redis.xrange(keys.answer("steering-1"))

    entries = await wait_until_async(answered, PATIENCE_SECONDS)
    answer = json.loads(entries[0][1][b"d"])
    (letter,) = await stage.client.dead_letters()
    assert answer["error"]["kind"] == "bad_request"
    assert letter.id in answer["error"]["message"]


async def test_a_turn_whose_command_cannot_be_read_fails(stage: Stage) -> None:
    """Whoever waits for the turn need not wait for ever."""
    start_fleet(stage)
    keys = stage.keys.of_session(SESSION)
    body = {"turn_id": new_turn_id(keys.partition), "session_id": SESSION, "agent": "worker", "messages": "hello"}
    await stage.redis.xadd(keys.inbox, {"t": "start_turn", "d": json.dumps(body)})
    await letters(stage.client, 1)
    with pytest.raises(TurnFailedError, match="could not be read"):
        await asyncio.wait_for(stage.client.attach(body["turn_id"]).result(), PATIENCE_SECONDS)
    await assert_works(stage)


async def test_a_message_that_every_coordinator_is_lost_with_is_given_up(stage: Stage) -> None:
    """AC-26: it may be why they die. Its turn is told; what was read together with it is not counted for it."""
    keys = stage.keys.of_session(SESSION)
    await create_groups(stage.client.engine, [keys.inbox, keys.results], COORDINATOR_GROUP)
    deadly = await stage.client.turn(worker, told(), session=SESSION)
    harmless = await stage.client.turn(worker, told(), session=SESSION)
    await stage.redis.xreadgroup(COORDINATOR_GROUP, "lost", {keys.inbox: ">"})
    (first, _), (second, _) = await stage.redis.xrange(keys.inbox)
    for entry_id, deliveries in ((first, 5), (second, 4)):
        await stage.redis.execute_command(
            "XCLAIM", keys.inbox, COORDINATOR_GROUP, "lost", 0, entry_id, "RETRYCOUNT", deliveries
        )
    start_fleet(stage)
    with pytest.raises(TurnFailedError, match="5 coordinators were lost"):
        await asyncio.wait_for(deadly.result(), PATIENCE_SECONDS)
    assert (await asyncio.wait_for(harmless.result(), PATIENCE_SECONDS)).answer == "all done"
    (letter,) = await stage.client.dead_letters()
    assert (letter.type, letter.entry_id, letter.attempts >= 5) == ("start_turn", first.decode(), True)


# ---- replay and drop


async def fill(keys: PartitionKeys, stage: Stage, count: int) -> None:
    """Messages of a version that nobody here speaks, in the inbox; nobody has read them."""
    for number in range(count):
        await stage.redis.xadd(keys.inbox, {"t": "abort_turn", "d": b"{%d}" % number, "v": "2", "more": b"\xff"})


async def test_a_letter_goes_back_as_it_came_and_counts_its_attempts(stage: Stage, turnmill: CommandLine) -> None:
    keys = stage.keys.partitions[3]
    await stage.redis.xadd(keys.tool("default"), {"t": "tool_task", "d": b"\xc1", "v": "7"})
    stage.processes.coordinator()
    worker_process = stage.processes.tools(APP, queues=["default"])
    (letter,) = await letters(stage.client, 1)
    worker_process.kill()
    assert f"{letter.id} replayed" in await run(turnmill, "dead", "replay", letter.id)
    assert f"{letter.id} gone" in await run(turnmill, "dead", "replay", letter.id, code=2)
    ((_, fields),) = await stage.redis.xrange(keys.tool("default"))
    assert fields == {b"t": b"tool_task", b"d": b"\xc1", b"v": b"7", b"attempts": b"1"}
    assert await stage.client.dead_letters() == []
    stage.processes.tools(APP, queues=["default"])
    (again,) = await letters(stage.client, 1)
    assert (again.attempts, again.body, again.fields) == (2, b"\xc1", {"v": b"7"})
    assert again.queue == letter.queue == "tool:default"


async def test_a_command_is_carried_out_when_what_broke_it_is_repaired(stage: Stage, turnmill: CommandLine) -> None:
    start_fleet(stage)
    keys = stage.keys.of_session(SESSION)
    turn = await stage.client.turn(worker, told([call("once", gate="g")]), session=SESSION)
    await stage.reached("g:1")
    aside = f"{stage.keys.prefix}-play:aside"
    await stage.redis.rename(keys.session(SESSION), aside)
    await stage.redis.set(keys.session(SESSION), "garbage")
    with pytest.raises(CommandRefusedError):
        await turn.abort("enough")
    await stage.redis.rename(aside, keys.session(SESSION))
    text = await run(turnmill, "dead", "replay", "--all", "--reason", "WRONGTYPE")
    assert "1 replayed" in text
    with pytest.raises(TurnAbortedError, match="enough"):
        await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    await stage.open("g:1")


async def test_each_letter_is_replayed_once_whoever_does_it(stage: Stage) -> None:
    """Several operators at the same time, some of them twice: the stream has each message once."""
    keys = stage.keys.partitions[0]
    await fill(keys, stage, 120)
    coordinator = stage.processes.coordinator()
    found = await letters(stage.client, 120, limit=None)
    coordinator.kill()
    ids = [letter.id for letter in found]
    outcomes = await asyncio.gather(
        stage.client.replay_dead_letters(every=True),
        stage.client.replay_dead_letters(*ids),
        stage.client.replay_dead_letters(*reversed(ids)),
        stage.client.replay_dead_letters(every=True, reason="version 2"),
    )
    replayed = [name for outcome in outcomes for name, what in outcome.items() if what == "replayed"]
    assert sorted(replayed) == sorted(ids)
    entries = await stage.redis.xrange(keys.inbox)
    assert sorted(fields[b"d"] for _, fields in entries) == sorted(b"{%d}" % number for number in range(120))
    assert all((fields[b"v"], fields[b"more"]) == (b"2", b"\xff") for _, fields in entries)
    assert await stage.client.dead_letters() == []


async def test_replaying_all_does_not_chase_what_comes_back(stage: Stage, turnmill: CommandLine) -> None:
    """What is given up again while it runs is not sent again by the same command."""
    await fill(stage.keys.partitions[0], stage, 60)
    stage.processes.coordinator()
    await letters(stage.client, 60, limit=None)
    assert "60 replayed" in await run(turnmill, "dead", "replay", "--all")
    found = await letters(stage.client, 60, limit=None)
    assert {letter.attempts for letter in found} == {2}


async def test_letters_are_dropped_one_by_one_or_by_reason(stage: Stage, turnmill: CommandLine) -> None:
    await fill(stage.keys.partitions[1], stage, 3)
    await stage.redis.xadd(stage.keys.partitions[2].inbox, {"t": "nonsense", "d": "{}"})
    stage.processes.coordinator()
    found = await letters(stage.client, 4)
    one = next(letter for letter in found if "version" in letter.reason)
    assert await run(turnmill, "dead", "drop", one.id) == f"{one.id} dropped\n"
    assert "2 dropped" in await run(turnmill, "dead", "drop", "--all", "--reason", "version")
    (left,) = await stage.client.dead_letters()
    assert left.type == "nonsense"
    for arguments in (("drop",), ("replay", one.id, "--all"), ("drop", one.id, "--reason", "x"), ("show", "12")):
        done = await asyncio.to_thread(turnmill, "dead", *arguments)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    gone = await asyncio.to_thread(turnmill, "dead", "show", one.id)
    assert (gone.returncode, "was replayed or dropped" in gone.stderr) == (2, True)


async def test_the_blocking_client_does_the_same(stage: Stage, valkey_url: str, namespace: str) -> None:
    await fill(stage.keys.partitions[0], stage, 2)
    stage.processes.coordinator()
    first, second = await letters(stage.client, 2)

    def handle() -> None:
        with connect_sync(valkey_url, namespace=namespace) as client:
            assert [letter.id for letter in client.dead_letters(reason="version")] == [first.id, second.id]
            assert client.dead_letters(first.id)[0].is_whole
            assert client.drop_dead_letters(first.id) == {first.id: "dropped"}
            assert client.replay_dead_letters(first.id, second.id) == {first.id: "gone", second.id: "replayed"}
            with pytest.raises(ValueError, match="every=True"):
                client.drop_dead_letters()
            with pytest.raises(ValueError, match="no dead letter's id"):
                client.dead_letters("nonsense")

    await asyncio.to_thread(handle)
    assert [letter.attempts for letter in await letters(stage.client, 1)] == [2]


async def test_two_owners_bury_a_message_once(stage: Stage) -> None:
    """Two coordinators that both believe to own the partition: one letter, so that a replay sends one message."""
    keys, engine = stage.keys.partitions[0], stage.client.engine
    await create_groups(engine, [keys.inbox], COORDINATOR_GROUP)
    body = encode_body(StartTurn(turn_id=new_turn_id(0), session_id="s", agent="a", messages=[]))
    await stage.redis.xadd(keys.inbox, {"t": "start_turn", "d": body})
    await stage.redis.xreadgroup(COORDINATOR_GROUP, "one", {keys.inbox: ">"})
    ((entry_id, fields),) = await stage.redis.xrange(keys.inbox)
    delivery = Delivery(keys.inbox, entry_id, fields)
    await asyncio.gather(*[bury(engine, keys, delivery, "broken") for _ in range(5)])
    assert len(await stage.client.dead_letters()) == 1
    assert await stage.redis.xlen(keys.inbox) == 0
