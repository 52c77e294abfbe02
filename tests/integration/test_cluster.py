"""Everything on a real cluster: three primaries, three replicas, 16 partitions, real processes.

The tests share one cluster and what earlier ones did to it: a slot may be anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.chaos import app
from support.chaos.effects import EFFECTS_VARIABLE
from support.chaos.report import Plan
from support.chaos.run import Run
from support.chaos.server import in_thread
from support.cluster import Cluster
from support.cluster_load import PARTITIONS, TIMES, ClusterFaults, load, open_cluster_stage
from support.stage import PATIENCE_SECONDS, Stage, call, told
from support.waiting import wait_until_async
from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.codec import encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import ConfigurationError, EngineError, EngineReplyError, TurnAbortedError
from turnmill.protocol.keys import WORKER_GROUP, Keys, PartitionKeys
from turnmill.protocol.messages import ToolReply, ToolTask
from turnmill.protocol.namespace import open_namespace
from turnmill.protocol.settings import load_settings
from turnmill.protocol.slots import slot_of
from turnmill.protocol.streams import COMMIT_TURNS, append_message
from turnmill.protocol.subscription import subscription
from turnmill.runtime.feed import feed_ends, follow_feed
from turnmill.workers.assignment import READERS
from turnmill.workers.consumer import Consumer
from turnmill.workers.partition_reads import PartitionReads

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
    async with open_cluster_stage(cluster, namespace, short_directory, **TIMES) as stage:
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
    stage.processes.coordinator()
    stage.processes.coordinator()
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


class Bench:
    """Consumers of one queue on the cluster, without a coordinator: tasks go in, and are noted when they run."""

    queue = "tool:default"

    def __init__(self, engine: Engine, namespace: str) -> None:
        self.engine = engine
        self.keys = Keys(namespace, PARTITIONS)
        self.settings = load_settings(
            namespace=namespace, partitions=PARTITIONS, liveness_seconds=2.0, heartbeat_seconds=0.2
        )
        self.ran: list[str] = []

    def consumer(self, slots: int) -> Consumer:
        return Consumer(
            self.engine, self.keys, self.settings, role="tools", queues=[self.queue], concurrency=slots, takes=ToolTask,
            handler=self._run,
        )  # fmt: skip

    async def _run(self, task: ToolTask, _partition: int, _cancelled: AbortSignal) -> ToolReply:
        self.ran.append(task.call)
        await asyncio.sleep(0.02)
        return task.answer(ToolReply)

    @asynccontextmanager
    async def running(self, *consumers: Consumer) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(consumer.run()) for consumer in consumers]
        try:
            yield
        finally:
            for consumer in consumers:
                consumer.stop()
            await asyncio.wait_for(asyncio.gather(*tasks), 30)

    async def add(self, part: PartitionKeys, call: str) -> None:
        task = ToolTask(
            session_id="s", turn_id="t0-x", call=call, attempt=1, tool="t", tool_call_id="c", arguments={},
            agent_id="a", step_number=1, idempotency_key="", timeout_seconds=60, start_by_ms=2**52, deadline_ms=2**52,
        )  # fmt: skip
        await append_message(self.engine, part.tool("default"), task.type, encode_body(task))

    async def pending(self) -> Counter[str]:
        """What is pending for each consumer, over all partitions."""
        replies = await asyncio.gather(
            *[self.engine.call("XPENDING", part.tool("default"), WORKER_GROUP) for part in self.keys.partitions]
        )
        found: Counter[str] = Counter()
        for _count, _first, _last, consumers in replies:
            for name, count in consumers or []:
                found[name.decode()] += int(count)
        return found


@pytest.fixture
def bench(engine: Engine, namespace: str) -> Bench:
    return Bench(engine, namespace)


def assigned(consumer: Consumer) -> list[int]:
    reads = consumer._reads
    assert isinstance(reads, PartitionReads)
    return sorted(reads.assigned)


def blocked_reads(cluster: Cluster) -> int:
    """The reads of this process that are blocked now, by the engine's own account."""
    lines = [line for node in cluster.primaries() for line in node.ask("CLIENT", "LIST").decode().splitlines()]
    clients = [dict(word.split("=", 1) for word in line.split(" ")) for line in lines]
    ports = _own_ports()
    return sum(
        "b" in client["flags"]
        and client["cmd"].startswith("xreadgroup")
        and int(client["addr"].rpartition(":")[2]) in ports
        for client in clients
    )


def _own_ports() -> set[int]:
    """The local ports of this process's TCP connections."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[9] in inodes}


async def test_a_worker_has_one_connection_for_each_partition_that_is_assigned_to_it(
    cluster: Cluster, bench: Bench
) -> None:
    """Partitions are shared out when workers come, and taken over when they leave or die."""
    first, *others = [bench.consumer(64) for _ in range(6)]

    async def are_shared() -> bool:
        shares = [assigned(consumer) for consumer in (first, *others)]
        readers = Counter(number for share in shares for number in share)
        return max(map(len, shares)) < PARTITIONS and readers == dict.fromkeys(range(PARTITIONS), READERS)

    async with bench.running(first):
        await wait_until_async(lambda: blocked_reads(cluster) == PARTITIONS)
        assert assigned(first) == list(range(PARTITIONS))
        async with bench.running(*others):
            await wait_until_async(are_shared)
            await wait_until_async(lambda: blocked_reads(cluster) == READERS * PARTITIONS)
        await wait_until_async(lambda: len(assigned(first)) == PARTITIONS)
        # Workers that died without a word: they are members until the liveness time is over.
        now_ms = first.clock.now_ms()
        for number in range(6):
            await bench.engine.call("ZADD", bench.keys.readers(bench.queue), now_ms, f"dead-{number} 64")
        await wait_until_async(lambda: len(assigned(first)) < PARTITIONS)
        await wait_until_async(lambda: len(assigned(first)) == PARTITIONS)
    assert await bench.engine.call("EXISTS", bench.keys.readers(bench.queue)) == 0


async def test_a_worker_with_few_slots_holds_no_connections_and_reads_every_partition(
    cluster: Cluster, bench: Bench
) -> None:
    small = bench.consumer(2)
    async with bench.running(small):
        for number, part in enumerate(bench.keys.partitions):
            await bench.add(part, f"{number}")
        await wait_until_async(lambda: len(bench.ran) == PARTITIONS)
        assert blocked_reads(cluster) == 0
        assert assigned(small) == list(range(PARTITIONS))
        large = bench.consumer(64)
        async with bench.running(large):  # now it is needed for no more than it has slots for
            await wait_until_async(lambda: len(assigned(small)) == 2 and len(assigned(large)) == PARTITIONS)
            await wait_until_async(lambda: blocked_reads(cluster) == PARTITIONS + 2)


@pytest.mark.parametrize("slots", [(3,), (17,), (20, 3)])
async def test_reads_hold_no_more_than_the_free_slots(bench: Bench, slots: tuple[int, ...]) -> None:
    """What is pending for a worker never exceeds its slots, however the tasks are spread; each runs once, and soon."""
    consumers = [bench.consumer(count) for count in slots]
    expected = [f"{number}.{part.partition}" for number in range(10) for part in bench.keys.partitions]
    expected += [f"hot.{number}" for number in range(60)]
    async with bench.running(*consumers):
        await wait_until_async(lambda: all(map(assigned, consumers)))
        adding = [bench.add(bench.keys.partitions[hash(call) % PARTITIONS], call) for call in expected[:160]]
        adding += [bench.add(bench.keys.partitions[7], call) for call in expected[160:]]
        await asyncio.gather(*adding)
        most: Counter[str] = Counter()
        while len(bench.ran) < len(expected):
            most |= await bench.pending()
    assert sorted(bench.ran) == sorted(expected)
    limits = {consumer.worker_id: count for consumer, count in zip(consumers, slots, strict=True)}
    assert most.keys() == limits.keys() and all(most[name] <= limits[name] for name in limits)


# ---- while the cluster changes


async def test_turns_survive_moved_slots_failovers_and_dead_primaries(cluster: Cluster, short_directory: Path) -> None:
    """AC-24, AC-26: 0 lost, 0 duplicated, 0 stuck. `scripts/cluster load` is the same for longer."""
    faults = ClusterFaults(cluster)
    blows = [faults.move_slot, faults.kill_primary, faults.move_slot, faults.fail_over]
    made = 0

    async def strike(run: Run) -> str:
        nonlocal made
        made += 1
        return await blows[(made - 1) % len(blows)](run)

    plan = Plan("cluster", turns=150, in_flight=16, roles=("coordinator", "llm", "tools"))
    report = await load(faults, short_directory, plan, strike, every=0.5)
    print(report)
    assert report.is_sound and report.finished == report.turns
    assert set(report.blows) >= {"slot moved", "kill -9 of a primary"}


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
