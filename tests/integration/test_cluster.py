"""Everything on a real cluster: three primaries, three replicas, 16 partitions, real processes.

The tests share one cluster and what earlier ones did to it: a slot may be anywhere.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chaos import app
from support.chaos.effects import EFFECTS_VARIABLE
from support.chaos.report import Plan
from support.chaos.run import SETTINGS, Run
from support.chaos.server import in_thread
from support.cluster import Cluster
from support.cluster_load import PARTITIONS, ClusterFaults, load, open_cluster_stage
from support.stage import PATIENCE_SECONDS, Stage, call, told
from support.waiting import wait_until, wait_until_async
from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import ConfigurationError, EngineError, EngineReplyError, TurnAbortedError
from turnmill.protocol.keys import Keys
from turnmill.protocol.namespace import open_namespace
from turnmill.protocol.slots import slot_of
from turnmill.protocol.streams import COMMIT_TURNS, append_message
from turnmill.protocol.subscription import subscription
from turnmill.runtime.feed import feed_ends, follow_feed

APP = "support.chaos.app"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    with Cluster(directory) as cluster:
        yield cluster
    shutil.rmtree(directory)


@pytest.fixture
async def engine(cluster: Cluster) -> AsyncIterator[Engine]:
    engine = await Engine(cluster.urls, response_timeout_seconds=5).connect()
    yield engine
    await engine.close()


@pytest.fixture
async def stage(
    cluster: Cluster, namespace: str, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setenv(EFFECTS_VARIABLE, str(short_directory / "effects"))
    async with open_cluster_stage(cluster, namespace, short_directory, **SETTINGS) as stage:
        yield stage


def other_primary(cluster: Cluster, slot: int) -> Any:
    source = cluster.owner_of(slot)
    return next(node for node in cluster.primaries() if node is not source)


# ---- the engine


async def test_one_url_of_any_node_is_enough(cluster: Cluster) -> None:
    """The server says that it is of a cluster: nobody has to be told."""
    for node in cluster.nodes:  # a replica, too
        engine = await Engine(f"redis://127.0.0.1:{node.port}").connect()
        assert engine.is_cluster
        assert len(await engine.call_each("PING")) == 3
        await engine.close()


async def test_a_command_is_executed_once_while_its_slot_moves(
    cluster: Cluster, engine: Engine, namespace: str
) -> None:
    """AC-24: single commands, transactions and scripts go to where their keys are; none is lost or made twice."""
    keys = Keys(namespace, PARTITIONS).partitions[5]
    done: Counter[str] = Counter()
    stop = asyncio.Event()

    async def count(name: str, command: Any) -> None:
        while not stop.is_set():
            await command()
            done[name] += 1

    async def commit() -> None:
        arguments = ["g", 1, 1, "w", 14, 3, done["script"], "w" if done["script"] else "", 0, "-", "state", 0, 0]
        assert await COMMIT_TURNS.run(engine, [keys.inbox, keys.results, keys.session("s")], arguments) == [
            done["script"] + 1
        ]

    async def transact() -> None:
        commands = [("INCR", keys.plan("a")), ("XADD", keys.dead, "*", "f", "v"), ("INCR", keys.plan("b"))]
        assert len(await engine.transact(commands)) == 3

    workers = [
        asyncio.create_task(count("single", lambda: engine.call("INCR", keys.lease))),
        asyncio.create_task(count("script", commit)),
        asyncio.create_task(count("transaction", transact)),
    ]
    await engine.transact([("XADD", keys.inbox, "*", "f", "v"), ("XADD", keys.results, "*", "f", "v")])
    slot = slot_of(keys.base)
    for _ in range(3):
        before = done.copy()
        await wait_until_async(lambda before=before: all(done[name] > before[name] for name in before), 5)  # type: ignore[misc]
        await in_thread(cluster.move_slot, slot, other_primary(cluster, slot), keys_at_once=2)
    stop.set()
    await asyncio.gather(*workers)
    assert min(done["single"], done["script"], done["transaction"]) > 10
    assert int(await engine.call("GET", keys.lease)) == done["single"]
    assert [int(value) for value in await engine.call("MGET", keys.plan("a"), keys.plan("b"))] == [
        done["transaction"]
    ] * 2
    assert await engine.call("XLEN", keys.dead) == done["transaction"]
    assert int(await engine.call("HGET", keys.session("s"), "v")) == done["script"]


async def test_keys_of_two_partitions_are_refused_by_the_server(engine: Engine, namespace: str) -> None:
    """What a single engine would let pass is told here."""
    one, other = Keys(namespace, PARTITIONS).partitions[:2]
    with pytest.raises(EngineReplyError, match="CROSSSLOT"):
        await engine.call("MGET", one.lease, other.lease)


async def test_commands_of_one_tick_leave_in_one_write_per_node(engine: Engine, namespace: str) -> None:
    parts = Keys(namespace, PARTITIONS).partitions
    writes: Counter[int] = Counter()
    for part in parts:
        link: Any = engine.node_of(part.base)._shared
        link._transport = _Counting(link._transport, writes)
    await asyncio.gather(*[engine.call("SET", part.lease, 1) for part in parts for _ in range(10)])
    assert set(writes.values()) == {1} and len(writes) == 3


class _Counting:
    """A transport that counts its writes."""

    def __init__(self, transport: Any, writes: Counter[int]) -> None:
        self._transport = transport._transport if isinstance(transport, _Counting) else transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes[id(self._transport)] += b"SET" in data  # and not a look at the map of slots
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_the_number_of_partitions_is_checked(cluster: Cluster, namespace: str) -> None:
    """Fixed by the first process, checked by every other one, and told with what to set."""
    engine = await Engine(cluster.url).connect()
    try:
        await open_namespace(engine, namespace, PARTITIONS)
        with pytest.raises(ConfigurationError, match=r"created with 16 partitions.*TURNMILL_PARTITIONS=16"):
            await open_namespace(engine, namespace, 4)
    finally:
        await engine.close()


async def test_subscribers_go_where_their_slot_goes(cluster: Cluster, engine: Engine, namespace: str) -> None:
    """The server takes a subscription away when its slot leaves; the messages behind that are heard all the same."""
    channels = [part.cancellations.encode() for part in Keys(namespace, PARTITIONS).partitions]
    heard: list[bytes] = []
    confirmed: set[bytes] = set()
    opened: list[int] = []

    def on_open() -> list[bytes]:
        opened.append(1)
        confirmed.clear()
        return channels

    def on_push(push: list[Any]) -> None:
        if push[0] == b"smessage":
            heard.append(push[2])
        elif push[0] == b"ssubscribe":
            confirmed.add(push[1])

    subscribed = subscription(engine, on_open=on_open, on_push=on_push)
    subscribed.start()
    try:
        await wait_until_async(lambda: confirmed == set(channels))
        assert subscribed.is_open and all(map(subscribed.serves, channels))
        slot, times = slot_of(channels[3]), len(opened)
        await in_thread(cluster.move_slot, slot, other_primary(cluster, slot))
        await wait_until_async(lambda: len(opened) > times and confirmed == set(channels))
        for channel in channels:
            await engine.call("SPUBLISH", channel, channel)
        await wait_until_async(lambda: sorted(heard) == sorted(channels))
    finally:
        await subscribed.close()
    assert not subscribed.is_open


# ---- turns


async def test_turns_are_run_steered_stopped_and_followed(stage: Stage) -> None:
    """AC-24: with processes of every role, over all partitions and shards."""
    stage.processes.coordinator(), stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP, queues=["default"])
    client = stage.client
    ends = await feed_ends(client.engine, client.keys)
    feed = follow_feed(client.engine, client.keys, ends)
    started: set[str] = set()

    async def follow() -> None:
        async for entry in feed:
            started.add(entry.turn_id)

    following = asyncio.create_task(follow())
    message = told([call("again"), call("once")], [call("again", value="it is")], answer="${results[0]}")
    turns = [await client.turn(app.worker, message, session=f"s{number}") for number in range(40)]
    assert {turn.id.split("-")[0] for turn in turns} == {f"t{number}" for number in range(PARTITIONS)}
    assert {(await turn.result()).answer for turn in turns} == {"it is done"}
    steered = await client.turn(app.worker, told([call("again", seconds=1.0)], answer="no"), session="steered")
    await stage.event(steered, "tool_execution.started")
    await steered.steer(told(answer="steered"))
    assert (await steered.result()).answer == "steered"
    aborted = await client.turn(app.worker, told([call("again", seconds=60.0)]), session="aborted")
    await stage.event(aborted, "tool_execution.started")
    assert await aborted.abort("enough")
    with pytest.raises(TurnAbortedError):
        await asyncio.wait_for(aborted.result(), 5)
    for turn in (*turns, steered, aborted):
        numbers = [number async for number, _ in client.attach(turn.id).numbered_events()]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 5
        await stage.assert_sound(turn.id)
    await wait_until_async(lambda: started >= {turn.id for turn in turns})
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await stage.assert_idle()
    assert await stage.dead_letters() == []


# ---- who reads what


def blocked_reads(cluster: Cluster, pid: int) -> list[str]:
    """The reads of a process that are blocked now, by the engine's own account."""
    found = []
    for node in cluster.primaries():
        for line in node.ask("CLIENT", "LIST").decode().splitlines():
            fields = dict(word.split("=", 1) for word in line.split(" "))
            if (
                "b" in fields["flags"]
                and fields["cmd"].startswith("xreadgroup")
                and int(fields["addr"].rpartition(":")[2]) in _ports(pid)
            ):
                found.append(fields["id"])
    return found


def _ports(pid: int) -> set[int]:
    """The local ports of a process's TCP connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[9] in inodes}


async def readers(stage: Stage, queue: str) -> int:
    return int(await stage.redis.zcard(stage.keys.readers(queue)))


async def test_a_worker_has_one_connection_for_each_partition_that_is_assigned_to_it(
    stage: Stage, cluster: Cluster
) -> None:
    """And one with fewer slots than partitions has none, and still does its work; who leaves leaves nothing unread."""
    queue = "tool:default"
    stage.processes.coordinator()
    stage.processes.llm(APP, concurrency=16)
    alone = stage.processes.tools(APP, queues=["default"], concurrency=64)
    await wait_until_async(lambda: len(blocked_reads(cluster, alone.popen.pid)) == PARTITIONS, PATIENCE_SECONDS)
    others = [stage.processes.tools(APP, queues=["default"], concurrency=64) for _ in range(5)]

    async def shared() -> bool:
        counts = [len(blocked_reads(cluster, each.popen.pid)) for each in (alone, *others)]
        return await readers(stage, queue) == 6 and max(counts) < PARTITIONS and sum(counts) == 4 * PARTITIONS

    await wait_until_async(shared, PATIENCE_SECONDS)
    for each in (alone, *others[:3]):
        each.kill()  # nobody says goodbye
    for each in others[3:]:
        each.terminate()
    small = stage.processes.tools(APP, queues=["default"], concurrency=3)
    message = told([call("again", value=str(number)) for number in range(8)], answer="done")
    turns = [await stage.client.turn(app.worker, message, session=f"s{number}") for number in range(32)]
    assert {(await turn.result()).answer for turn in turns} == {"done"}
    wait_until(lambda: not any(each.is_alive for each in others), PATIENCE_SECONDS)

    async def left() -> bool:
        return await readers(stage, queue) == 1

    await wait_until_async(left, PATIENCE_SECONDS)
    assert blocked_reads(cluster, small.popen.pid) == []


async def test_reads_hold_no_more_than_the_free_slots(stage: Stage) -> None:
    """What is pending for a worker never exceeds its slots, whichever partitions the tasks are in."""
    stage.processes.coordinator()
    stage.processes.llm(APP)
    workers = [stage.processes.tools(APP, queues=["default"], concurrency=slots) for slots in (20, 3)]
    message = told([call("again", seconds=0.05) for _ in range(4)], answer="done")
    turns = [await stage.client.turn(app.worker, message, session=f"s{number}") for number in range(60)]
    results = asyncio.gather(*[turn.result() for turn in turns])
    most: Counter[str] = Counter()
    while not results.done():
        pending: Counter[str] = Counter()
        for part in stage.keys.partitions:
            for consumer in await _consumers(stage, part.tool("default")):
                pending[consumer["name"].decode()] += consumer["pending"]
        most |= pending
        await asyncio.sleep(0.01)
    await results
    slots = {str(worker.popen.pid): limit for worker, limit in zip(workers, (20, 3), strict=True)}
    held = {name.split("-")[1]: count for name, count in most.items()}
    assert held.keys() == slots.keys() and all(0 < held[pid] <= slots[pid] for pid in slots)


async def _consumers(stage: Stage, stream: str) -> list[dict[str, Any]]:
    if not await stage.redis.exists(stream):
        return []
    return list(await stage.redis.xinfo_consumers(stream, "workers"))


# ---- while the cluster changes


async def test_turns_survive_moved_slots_failovers_and_dead_primaries(cluster: Cluster, short_directory: Path) -> None:
    """AC-24, AC-26: 0 lost, 0 duplicated, 0 stuck."""
    faults = ClusterFaults(cluster)
    blows = [faults.move_slot, faults.fail_over, faults.move_slot, faults.kill_primary]
    made = 0

    async def strike(run: Run) -> str:
        nonlocal made
        made += 1
        return await blows[(made - 1) % len(blows)](run)

    report = await load(faults, short_directory, Plan("cluster", turns=250, in_flight=24), strike, every=0.7)
    print(report)
    assert report.is_sound and report.finished == report.turns
    assert len(report.blows) == 3


async def test_a_message_reaches_a_partition_whose_primary_was_killed(
    cluster: Cluster, engine: Engine, namespace: str
) -> None:
    """What was written before is there, and what is written next waits for the replica to take over."""
    inbox = Keys(namespace, PARTITIONS).partitions[0].inbox
    await append_message(engine, inbox, "t", b"before")
    assert await engine.call("WAIT", 1, 1000) is not None
    dead = cluster.owner_of(slot_of(inbox))
    await in_thread(cluster.kill, dead)

    async def written() -> bool:
        try:
            await append_message(engine, inbox, "t", b"behind")
        except EngineError as error:
            print(error)
            await engine.ready()
            return False
        return True

    await wait_until_async(written, PATIENCE_SECONDS)
    assert next(fields[3] for _, fields in await engine.call("XRANGE", inbox, "-", "+")) == b"before"
    await in_thread(cluster.restart, dead)
    await in_thread(cluster.await_whole, replicated=True)
