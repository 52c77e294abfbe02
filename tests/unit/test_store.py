"""The scripts that write: what lands together, and what each fence keeps out.

Everything runs on fakeredis and on a real server, with the same outcome. For each fence there is a test that does the
same with the fence taken out of the script, and meets the damage.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fakeredis import TcpFakeServer

from support.scripts import Altered
from turnmill.protocol.codec import MESSAGE_CODEC, TASK_CODEC, decode_message, event_from_wire
from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.content import Message
from turnmill.protocol.events import StepStarted, TextDelta, TurnFailed
from turnmill.protocol.keys import COORDINATOR_GROUP, WORKER_GROUP, Keys
from turnmill.protocol.messages import ModelTask, TimerFired, ToolTask
from turnmill.protocol.namespace import make_token
from turnmill.protocol.streams import (
    APPEND_DELTAS,
    COMMIT_TURNS,
    DISPATCH_BACKLOG,
    FIRE_TIMERS,
    RENEW_LEASE,
    TAKE_LOST_DELIVERY,
    create_groups,
    parse_publication,
)
from turnmill.runtime import store as store_module
from turnmill.runtime.dispatch import Lane, Place
from turnmill.runtime.effects import (
    Append,
    Count,
    DispatchModel,
    DispatchTool,
    Feed,
    Index,
    Publish,
    Record,
    SetTimer,
)
from turnmill.runtime.state import SessionState
from turnmill.runtime.store import (
    INBOX,
    RESULTS,
    STALE,
    TURN_EXISTS,
    AdmitModelTask,
    Retention,
    SessionCommit,
    Source,
    Store,
    Versioned,
)

SECRET = b"secret"
RETENTION = Retention(events_ms=60_000, record_ms=600_000, feed_length=100)
NOW_MS = 1_700_000_000_000
EMPTY = SessionState(length=1)
TURN = "t0-01h0000000000000000000000x"
OTHER = "t0-01h0000000000000000000000y"


@pytest.fixture(scope="module")
def fake_url() -> Iterator[str]:
    server = TcpFakeServer(("127.0.0.1", 0), server_type="valkey", server_version=(8,))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["fakeredis", "valkey"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    url = request.getfixturevalue("fake_url" if request.param == "fakeredis" else "valkey_url")
    engine = await Engine(url).connect()
    yield engine
    await engine.close()


@pytest.fixture
def keys(namespace: str) -> Any:
    return Keys(namespace, 1).partitions[0]


@pytest.fixture
async def store(engine: Engine, keys: Any) -> Store:
    await create_groups(engine, [keys.inbox, keys.results], COORDINATOR_GROUP)
    return Store(engine, keys, SECRET, RETENTION, "json")


def admit_all(pool: str, _provider: str) -> Place:
    return Place(Lane(pool), waits=False)


def admit_none(pool: str, _provider: str) -> Place:
    return Place(Lane(pool), waits=True)


def commit(
    *effects: Any,
    version: int = 0,
    session: str = "s",
    state: SessionState | None = EMPTY,
    sources: list[Source] | None = None,
    live: str | None = None,
    new_turn: str | None = None,
) -> SessionCommit:
    return SessionCommit(session, version, state, sources or [], list(effects), live, new_turn)


async def run(store: Store, *commits: SessionCommit, admit: AdmitModelTask = admit_all) -> list[int]:
    return await store.commit(commits, NOW_MS, admit)


async def deliver(engine: Engine, stream: str, *, kind: str = "x", body: str = "{}") -> bytes:
    """An entry that the coordinator has read and not acknowledged."""
    entry_id: bytes = await engine.call("XADD", stream, "*", "t", kind, "d", body)
    await engine.call("XREADGROUP", "GROUP", COORDINATOR_GROUP, "c", "STREAMS", stream, ">")
    return entry_id


async def contents(engine: Engine, keys: Any) -> dict[bytes, Any]:
    """All of the namespace, to compare before and after."""
    commands: dict[bytes, tuple[Any, ...]] = {
        b"stream": ("XRANGE", "-", "+"),
        b"hash": ("HGETALL",),
        b"list": ("LRANGE", 0, -1),
        b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
        b"string": ("GET",),
    }
    found = {}
    for key in sorted(await engine.call("KEYS", keys.base + "*")):
        name, *arguments = commands[await engine.call("TYPE", key)]
        found[key] = await engine.call(name, key, *arguments)
    return found


async def events_of(engine: Engine, keys: Any, turn_id: str = TURN) -> list[tuple[bytes, Any]]:
    entries = await engine.call("XRANGE", keys.events(turn_id), "-", "+")
    return [(entry_id, event_from_wire(pairs(f)[b"t"], pairs(f)[b"d"])) for entry_id, f in entries]


def opening(turn_id: str = TURN, step: int = 1) -> Publish:
    return Publish(turn_id, StepStarted(step_number=step), opens=True)


def step(number: int, turn_id: str = TURN) -> Publish:
    return Publish(turn_id, StepStarted(step_number=number))


def model_task(call: str = "1", turn_id: str = TURN) -> ModelTask:
    return ModelTask(
        session_id="s", turn_id=turn_id, call=call, attempt=1, agent_id="a", plan="p", step_number=1, messages=1,
        deadline_ms=5,
    )  # fmt: skip


# --- a commit lands whole


async def test_all_effects_of_a_commit_land_together(engine: Engine, keys: Any, store: Store) -> None:
    command = await deliver(engine, keys.inbox)
    result = await deliver(engine, keys.results)
    tool_task = ToolTask(
        session_id="s", turn_id=TURN, call="1.0", attempt=2, tool="add", tool_call_id="c", arguments={"a": 1},
        agent_id="a", step_number=1, idempotency_key="k", timeout_seconds=1, start_by_ms=2, deadline_ms=3,
    )  # fmt: skip
    messages = [Message(role="user", content="Hé"), Message(role="assistant", content="ho")]
    state = SessionState(length=2, timer_ms=NOW_MS + 5)
    versions = await run(
        store,
        commit(
            opening(),
            *[Append(message) for message in messages],
            DispatchModel(model_task(), "default", "", 0),
            DispatchTool(tool_task, "gpu"),
            step(2),
            Record(TURN, {"status": "running", "session": "s"}),
            Index(TURN, 42),
            Feed(TURN, "s", "a", "turn.started"),
            SetTimer(NOW_MS + 5),
            Count("odd"),
            Count("odd"),
            state=state,
            sources=[Source(INBOX, command), Source(RESULTS, result)],
            live=f"{TURN}/1/1",
            new_turn=TURN,
        ),
    )
    assert versions == [1]
    assert await store.load(["s", "new"]) == {"s": Versioned(1, state), "new": Versioned(0, SessionState())}
    assert await events_of(engine, keys) == [
        (b"0-1", StepStarted(step_number=1)),
        (b"0-2", StepStarted(step_number=2)),
    ]
    entries = await engine.call("XRANGE", keys.events(TURN), "-", "+")
    assert {pairs(fields)[b"at"] for _, fields in entries} == {str(NOW_MS).encode()}
    stored = await engine.call("LRANGE", keys.transcript("s"), 0, -1)
    assert [decode_message(entry) for entry in stored] == messages
    for stream, expected in ((keys.model("default"), model_task()), (keys.tool("gpu"), tool_task)):
        ((_, fields),) = await engine.call("XRANGE", stream, "-", "+")
        task = TASK_CODEC.decode_fields(pairs(fields))
        assert task.token == make_token(SECRET, TURN, expected.call, expected.attempt)
        assert (task.call, task.attempt, getattr(task, "arguments", None)) == (
            expected.call,
            expected.attempt,
            getattr(expected, "arguments", None),
        )
    assert pairs(await engine.call("HGETALL", keys.turn(TURN))) == {b"status": b"running", b"session": b"s"}
    assert await engine.call("ZRANGE", keys.turns, 0, -1, "WITHSCORES") == [TURN.encode(), b"42"]
    assert await engine.call("ZSCORE", keys.timers, "s") == str(NOW_MS + 5).encode()
    assert await engine.call("HGET", keys.stats, "odd") == b"2"
    assert await engine.call("XLEN", keys.feed) == 1
    assert await engine.call("HGET", keys.session("s"), "live") == f"{TURN}/1/1".encode()
    for stream in (keys.inbox, keys.results):  # acknowledged, and deleted
        assert await engine.call("XLEN", stream) == 0
        assert (await engine.call("XPENDING", stream, COORDINATOR_GROUP))[0] == 0


async def test_events_go_on_where_they_were(engine: Engine, keys: Any, store: Store) -> None:
    for version in range(3):
        publish = opening() if version == 0 else step(version + 1)
        assert await run(store, commit(publish, version=version)) == [version + 1]
    assert [entry_id for entry_id, _ in await events_of(engine, keys)] == [b"0-1", b"0-2", b"0-3"]


async def test_the_end_starts_the_expiry_of_channel_and_record(engine: Engine, keys: Any, store: Store) -> None:
    await run(store, commit(opening(), Record(TURN, {"status": "running"})))
    assert await engine.call("PTTL", keys.events(TURN)) == -1
    assert await engine.call("PTTL", keys.turn(TURN)) == -1
    failed = Publish(TURN, TurnFailed(error="?", error_type="internal"), closes=True)
    await run(store, commit(failed, Record(TURN, {"status": "failed"}, ends=True), version=1))
    assert 50_000 < await engine.call("PTTL", keys.events(TURN)) <= 60_000
    assert 500_000 < await engine.call("PTTL", keys.turn(TURN)) <= 600_000


async def test_a_turn_that_ends_while_the_next_begins_closes_only_its_own_channel(
    engine: Engine, keys: Any, store: Store
) -> None:
    failed = Publish(TURN, TurnFailed(error="?", error_type="internal"), closes=True)
    await run(store, commit(opening(), failed, opening(OTHER)))
    assert await engine.call("PTTL", keys.events(TURN)) > 0
    assert await engine.call("PTTL", keys.events(OTHER)) == -1
    assert len(await events_of(engine, keys)) == 2


async def test_a_timer_is_cleared_and_moved(engine: Engine, keys: Any, store: Store) -> None:
    await run(store, commit(SetTimer(10)))
    await run(store, commit(SetTimer(7), version=1))
    assert await engine.call("ZRANGE", keys.timers, 0, -1, "WITHSCORES") == [b"s", b"7"]
    await run(store, commit(SetTimer(None), version=2))
    assert await engine.call("EXISTS", keys.timers) == 0


async def test_a_long_history_is_appended_in_order(engine: Engine, keys: Any, store: Store) -> None:
    messages = [Message(role="user", content=str(number)) for number in range(2500)]
    await run(store, commit(*[Append(message) for message in messages]))
    stored = await engine.call("LRANGE", keys.transcript("s"), 0, -1)
    assert [decode_message(entry).content for entry in stored] == [str(number) for number in range(2500)]


@pytest.mark.parametrize("wire", ["json", "msgpack"])
async def test_what_is_written_is_published_whole(engine: Engine, keys: Any, store: Store, wire: Any) -> None:
    store = Store(engine, keys, SECRET, RETENTION, wire)
    received: asyncio.Queue[list[Any]] = asyncio.Queue()
    subscriber = await engine.open_subscriber(received.put_nowait)
    subscriber.send("SSUBSCRIBE", keys.events(TURN))
    assert (await received.get())[0] == b"ssubscribe"
    texts = ["é\n漢", "", "0 1 text.delta 5\n"]
    await run(store, commit(opening()))
    await run(store, commit(*[Publish(TURN, TextDelta(text=text)) for text in texts], version=1, live=f"{TURN}/1/1"))
    arguments = _deltas(0, "live")
    assert await APPEND_DELTAS.run(engine, [keys.session("s"), keys.events(TURN)], arguments) == 1
    published = [parse_publication((await received.get())[2]) for _ in range(3)]
    subscriber.close()
    await subscriber.closed
    assert [number for events in published for number, *_ in events] == [1, 2, 3, 4, 5]
    assert [at_ms for events in published for _, _, at_ms, _ in events] == [NOW_MS] * 5
    events = [event_from_wire(kind, body) for events in published for _, kind, _, body in events]
    assert events == [event for _, event in await events_of(engine, keys)]
    assert [event.text for event in events[1:]] == [*texts, "live"]  # type: ignore[union-attr]


# --- the version


async def test_a_commit_on_another_version_writes_nothing(engine: Engine, keys: Any, store: Store) -> None:
    await run(store, commit(opening()))
    entry = await deliver(engine, keys.results)
    before = await contents(engine, keys)
    effects = [step(2), Append(Message(role="user", content="x")), SetTimer(1), Count("n"), Index(TURN, 1)]
    for version in (0, 2):
        assert await run(store, commit(*effects, version=version, sources=[Source(RESULTS, entry)])) == [STALE]
    assert await contents(engine, keys) == before
    assert (await engine.call("XPENDING", keys.results, COORDINATOR_GROUP))[0] == 1


async def test_also_a_message_that_is_discarded_is_discarded_under_the_version(
    engine: Engine, keys: Any, store: Store
) -> None:
    """A stale cache might not recognise a live result; it must not drop it."""
    await run(store, commit(opening()))
    entry = await deliver(engine, keys.results)
    discard = commit(Count("late"), state=None, sources=[Source(RESULTS, entry)])
    assert await run(store, discard) == [STALE]
    assert await engine.call("XLEN", keys.results) == 1
    assert await run(store, discard._replace(expected_version=1)) == [2]
    assert await engine.call("XLEN", keys.results) == 0
    assert (await store.load(["s"]))["s"] == Versioned(2, EMPTY)


async def test_a_version_of_another_writer_is_another_version(engine: Engine, keys: Any, store: Store) -> None:
    """A decision may be made on one that is still on its way. If that one is refused because another owner committed,
    the version alone would fit, and the other owner's state would be overwritten."""
    first, second = commit(opening()), commit(version=1)
    other = Store(engine, keys, SECRET, RETENTION, "json", "other")
    assert await run(other, first) == [1]
    assert await run(store, first, second) == [STALE, STALE]
    loaded = (await store.load(["s"]))["s"]
    assert loaded == Versioned(1, EMPTY, "other")
    assert await run(store, second._replace(expected_writer=loaded.writer)) == [2]


async def test_a_commit_whose_answer_was_lost_may_be_sent_again(engine: Engine, keys: Any, store: Store) -> None:
    one = commit(opening(), Append(Message(role="user", content="x")), Count("n"))
    assert await run(store, one) == [1]
    before = await contents(engine, keys)
    assert await run(store, one) == [STALE]
    assert await contents(engine, keys) == before


async def test_without_the_version_two_owners_both_write(
    engine: Engine, keys: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = "if (current[1] or '0') ~= version or (current[2] or '') ~= A[a + 3] then"
    monkeypatch.setattr(store_module, "COMMIT_TURNS", Altered(COMMIT_TURNS, (fence, "if false then")))
    await run(store, commit(opening()))
    answer = Append(Message(role="assistant", content="the answer"))
    results = [await run(store, commit(step(2), answer, version=1)) for _ in range(2)]
    assert results == [[2], [2]]
    assert await engine.call("LLEN", keys.transcript("s")) == 2
    assert len(await events_of(engine, keys)) == 3


# --- the guard: turn ids are used once


async def test_a_turn_that_is_known_is_not_started_again(engine: Engine, keys: Any, store: Store) -> None:
    start = commit(opening(), Record(TURN, {"status": "running"}), new_turn=TURN)
    assert await run(store, start) == [1]
    before = await contents(engine, keys)
    assert await run(store, start._replace(expected_version=1)) == [TURN_EXISTS]
    assert await run(store, start._replace(session_id="another")) == [TURN_EXISTS]
    assert await contents(engine, keys) == before


async def test_without_the_guard_a_repeated_command_runs_twice(
    engine: Engine, keys: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = "elseif guard > 0 and call('EXISTS', K[guard]) == 1 then"
    monkeypatch.setattr(store_module, "COMMIT_TURNS", Altered(COMMIT_TURNS, (fence, "elseif false then")))
    start = commit(
        opening(), Record(TURN, {"status": "running"}), DispatchModel(model_task(), "default", "", 0), new_turn=TURN
    )
    await run(store, start)
    assert await run(store, start._replace(expected_version=1)) == [2]
    assert await engine.call("XLEN", keys.model("default")) == 2


# --- a batch


async def test_a_refused_item_does_not_touch_its_neighbours(engine: Engine, keys: Any, store: Store) -> None:
    entries = [await deliver(engine, keys.results) for _ in range(4)]
    await run(store, commit(Record(OTHER, {"status": "running"}), session="known"))

    def item(number: int, **fields: Any) -> SessionCommit:
        message = Append(Message(role="user", content=f"é{number}"))
        source = Source(RESULTS, entries[number])
        return commit(message, Count(f"n{number}"), session=f"s{number}", sources=[source], **fields)

    results = await run(store, item(0), item(1, version=7), item(2, new_turn=OTHER), item(3))
    assert results == [1, STALE, TURN_EXISTS, 1]
    assert sorted(pairs(await engine.call("HGETALL", keys.stats))) == [b"n0", b"n3"]
    left = [entry_id for entry_id, _ in await engine.call("XRANGE", keys.results, "-", "+")]
    assert left == entries[1:3]


async def test_a_session_may_stand_in_a_batch_once_for_each_version(engine: Engine, keys: Any, store: Store) -> None:
    assert await run(store, commit(opening()), commit(step(2)), commit(step(3), version=1)) == [1, STALE, 2]
    assert [event.step_number for _, event in await events_of(engine, keys)] == [1, 3]


# --- the channel


async def test_a_channel_that_is_gone_stays_gone(engine: Engine, keys: Any, store: Store) -> None:  # AC-21
    await run(store, commit(opening(), live=f"{TURN}/1/1"))
    await engine.call("DEL", keys.events(TURN))
    assert await run(store, commit(step(2), Append(Message(role="user", content="x")), version=1)) == [2]
    assert await append(engine, keys) == 1  # the turn goes on without watchers
    assert await engine.call("EXISTS", keys.events(TURN)) == 0
    assert await engine.call("LLEN", keys.transcript("s")) == 1


async def test_without_that_its_numbers_would_begin_again(
    engine: Engine, keys: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = "first = call('XADD', key, 'NOMKSTREAM', '0-*'"
    altered = Altered(COMMIT_TURNS, (fence, "first = call('XADD', key, '0-*'"))
    monkeypatch.setattr(store_module, "COMMIT_TURNS", altered)
    await run(store, commit(opening(), step(2)))
    await engine.call("DEL", keys.events(TURN))
    await run(store, commit(step(3), version=1))
    assert await events_of(engine, keys) == [(b"0-1", StepStarted(step_number=3))]


async def test_without_that_live_text_would_begin_again_at_1(engine: Engine, keys: Any, speaking: Store) -> None:
    await append(engine, keys, 0, "a", "b")
    await engine.call("DEL", keys.events(TURN))
    await append(engine, keys, 2, "c", script=Altered(APPEND_DELTAS, ("'NOMKSTREAM', ", "")))
    assert await events_of(engine, keys) == [(b"0-1", TextDelta(text="c"))]


# --- live deltas


def _deltas(offset: int, *texts: str, live: str = f"{TURN}/1/1", bytes_max: int = 1_000_000) -> list[Any]:
    bodies = ['{"text":"%s"}' % text for text in texts]  # noqa: UP031  # braces
    header = " ".join(f"text.delta {len(body.encode())}" for body in bodies)
    return [live, offset, NOW_MS, bytes_max, len(texts), header, *["text.delta"] * len(texts), *bodies]


async def append(
    engine: Engine, keys: Any, offset: int = 0, *texts: str, script: Any = APPEND_DELTAS, **fields: Any
) -> Any:
    return await script.run(
        engine, [keys.session("s"), keys.events(TURN)], _deltas(offset, *(texts or ("x",)), **fields)
    )


async def text_of(engine: Engine, keys: Any) -> str:
    return "".join(event.text for _, event in await events_of(engine, keys) if isinstance(event, TextDelta))


@pytest.fixture
async def speaking(store: Store) -> Store:
    """A turn whose first attempt may speak."""
    await run(store, commit(opening(), live=f"{TURN}/1/1"))
    return store


async def test_deltas_are_appended_in_order_and_counted(engine: Engine, keys: Any, speaking: Store) -> None:
    assert await append(engine, keys, 0, "a", "b") == 2
    assert await append(engine, keys, 2, "c") == 3
    assert await text_of(engine, keys) == "abc"
    assert [entry_id for entry_id, _ in await events_of(engine, keys)] == [b"0-1", b"0-2", b"0-3", b"0-4"]


async def test_a_batch_that_is_sent_again_does_not_double_the_text(engine: Engine, keys: Any, speaking: Store) -> None:
    for _ in range(3):
        assert await append(engine, keys, 0, "a", "b") == 2
    assert await append(engine, keys, 2, "c") == 3
    assert await append(engine, keys, 0, "a", "b") == -2  # late by more than one: nothing of it is written
    assert await text_of(engine, keys) == "abc"


async def test_without_the_offset_it_is_doubled(engine: Engine, keys: Any, speaking: Store) -> None:
    resend, gap = (
        "if offset == tonumber(A[2]) + count then return offset end",
        "if offset ~= tonumber(A[2]) then return -2 end",
    )
    for _ in range(2):
        await append(engine, keys, 0, "a", "b", script=Altered(APPEND_DELTAS, (resend, ""), (gap, "")))
    assert await text_of(engine, keys) == "abab"


async def test_without_the_answer_to_a_repetition_a_live_attempt_would_give_up(
    engine: Engine, keys: Any, speaking: Store
) -> None:
    resend = "if offset == tonumber(A[2]) + count then return offset end"
    altered = Altered(APPEND_DELTAS, (resend, ""))
    assert await append(engine, keys, 0, "a", script=altered) == 1
    assert await append(engine, keys, 0, "a", script=altered) == -2


async def test_a_gap_is_refused(engine: Engine, keys: Any, speaking: Store) -> None:
    assert await append(engine, keys, 3, "late") == -2
    assert await text_of(engine, keys) == ""


async def test_without_the_offset_a_gap_is_not_seen(engine: Engine, keys: Any, speaking: Store) -> None:
    gap = "if offset ~= tonumber(A[2]) then return -2 end"
    assert await append(engine, keys, 3, "late", script=Altered(APPEND_DELTAS, (gap, ""))) == 1
    assert await text_of(engine, keys) == "late"


@pytest.mark.parametrize("live", ["", f"{TURN}/1/2", f"{TURN}/2/1", f"{OTHER}/1/1"])
async def test_an_attempt_that_was_superseded_is_silent(
    engine: Engine, keys: Any, speaking: Store, live: str
) -> None:  # AC-10 AC-33
    await append(engine, keys, 0, "old ")
    await run(speaking, commit(version=1, live=live))
    assert await append(engine, keys, 1, "too late") == -1
    assert await text_of(engine, keys) == "old "


async def test_without_the_attempt_two_workers_speak_at_once(engine: Engine, keys: Any, speaking: Store) -> None:
    fence = "if record[1] ~= A[1] then return -1 end"
    altered = Altered(APPEND_DELTAS, (fence, ""))
    await run(speaking, commit(version=1, live=f"{TURN}/1/2"))
    await append(engine, keys, 0, "stale ", script=altered)  # attempt 1
    await append(engine, keys, 1, "and new", script=altered, live=f"{TURN}/1/2")
    assert await text_of(engine, keys) == "stale and new"


async def test_a_new_attempt_counts_from_nothing(engine: Engine, keys: Any, speaking: Store) -> None:
    await append(engine, keys, 0, "a", "b")
    await run(speaking, commit(version=1, live=f"{TURN}/1/2"))
    assert await append(engine, keys, 0, "c", live=f"{TURN}/1/2") == 1


async def test_a_commit_that_leaves_the_attempt_alone_leaves_its_offset_alone(
    engine: Engine, keys: Any, speaking: Store
) -> None:
    await append(engine, keys, 0, "a")
    await run(speaking, commit(version=1))
    assert await append(engine, keys, 1, "b") == 2


async def test_an_attempt_may_not_publish_without_end(engine: Engine, keys: Any, speaking: Store) -> None:
    size = len('{"text":"x"}')
    assert await append(engine, keys, 0, "x", bytes_max=2 * size) == 1
    assert await append(engine, keys, 1, "x", bytes_max=2 * size) == 2
    assert await append(engine, keys, 2, "x", bytes_max=2 * size) == -3
    assert await text_of(engine, keys) == "xx"
    await run(speaking, commit(version=1, live=f"{TURN}/1/2"))
    assert await append(engine, keys, 0, "x", live=f"{TURN}/1/2", bytes_max=2 * size) == 1  # for each attempt


# --- lost deliveries


class Queue:
    """A task stream with a consumer that has read, a second ago."""

    def __init__(self, engine: Engine, keys: Any) -> None:
        self.engine = engine
        self.keys = keys
        self.stream = keys.tool("default")

    async def read(self, *bodies: str, consumer: str = "gone") -> list[bytes]:
        if not await self.engine.call("EXISTS", self.stream):
            await create_groups(self.engine, [self.stream], WORKER_GROUP)
        ids = [await self.engine.call("XADD", self.stream, "*", "t", "tool_task", "d", body) for body in bodies]
        await self.engine.call("XREADGROUP", "GROUP", WORKER_GROUP, consumer, "STREAMS", self.stream, ">")
        await self.engine.call("XCLAIM", self.stream, WORKER_GROUP, consumer, 0, *ids, "IDLE", 1000, "JUSTID")
        return ids

    async def take(
        self,
        *,
        consumer: str = "gone",
        idle_ms: int = 500,
        most: int = 10,
        forget: int = 0,
        script: Any = TAKE_LOST_DELIVERY,
    ) -> int:
        keys = [self.stream, self.keys.results, self.keys.alive(consumer)]
        taken: int = await script.run(self.engine, keys, [WORKER_GROUP, consumer, idle_ms, most, forget])
        return taken

    async def found(self) -> list[bytes]:
        """The bodies of what was told lost."""
        entries = await self.engine.call("XRANGE", self.keys.results, "-", "+")
        assert {pairs(fields)[b"t"] for _, fields in entries} <= {b"delivery_lost"}
        return [pairs(fields)[b"d"] for _, fields in entries]

    async def pending(self) -> int:
        count: int = (await self.engine.call("XPENDING", self.stream, WORKER_GROUP))[0]
        return count

    async def consumers(self) -> int:
        return len(await self.engine.call("XINFO", "CONSUMERS", self.stream, WORKER_GROUP))


@pytest.fixture
def queue(engine: Engine, keys: Any) -> Queue:
    return Queue(engine, keys)


async def test_what_a_dead_worker_held_is_taken_away_and_told(queue: Queue) -> None:
    await queue.read('{"call":"1.0"}', "é")
    assert await queue.take() == 2
    assert await queue.found() == [b'{"call":"1.0"}', "é".encode()]
    assert await queue.pending() == 0
    assert await queue.engine.call("XLEN", queue.stream) == 0
    assert await queue.take() == 0
    assert len(await queue.found()) == 2


async def test_what_a_live_worker_holds_is_left_alone_however_long(queue: Queue) -> None:  # AC-11
    await queue.read("{}")
    await queue.engine.call("SET", queue.keys.alive("gone"), 1)
    assert await queue.take() == -1
    assert await queue.found() == []
    assert await queue.pending() == 1


async def test_without_the_look_at_its_liveness_work_runs_twice(queue: Queue) -> None:
    fence = "if call('EXISTS', KEYS[3]) == 1 then return -1 end"
    await queue.read("{}")
    await queue.engine.call("SET", queue.keys.alive("gone"), 1)
    assert await queue.take(script=Altered(TAKE_LOST_DELIVERY, (fence, ""))) == 1
    assert await queue.found() == [b"{}"]


async def test_what_was_just_delivered_is_not_lost_yet(queue: Queue) -> None:
    """A worker whose key has just run out may be about to write it again."""
    await queue.read("{}")
    assert await queue.take(idle_ms=3_600_000) == 0
    assert await queue.pending() == 1


async def test_without_the_idle_time_it_would_be(queue: Queue) -> None:
    await queue.read("{}")
    assert await queue.take(idle_ms=3_600_000, script=Altered(TAKE_LOST_DELIVERY, ("'IDLE', ARGV[3], ", ""))) == 1


async def test_others_keep_what_they_hold(queue: Queue) -> None:
    await queue.read('{"of":"gone"}')
    await queue.read('{"of":"other"}', consumer="other")
    assert await queue.take() == 1
    assert await queue.found() == [b'{"of":"gone"}']
    assert await queue.pending() == 1


async def test_a_bounded_number_is_taken_at_a_time(queue: Queue) -> None:
    await queue.read(*[str(number) for number in range(5)])
    assert [await queue.take(most=2) for _ in range(4)] == [2, 2, 1, 0]
    assert await queue.found() == [b"0", b"1", b"2", b"3", b"4"]


async def test_an_entry_that_was_deleted_while_pending_is_forgotten(queue: Queue) -> None:
    first, _ = await queue.read("a", "b")
    await queue.engine.call("XDEL", queue.stream, first)
    assert await queue.take() == 1
    assert await queue.found() == [b"b"]
    assert await queue.pending() == 0


async def test_an_empty_consumer_is_forgotten_on_request(queue: Queue) -> None:
    await queue.read("{}")
    await queue.take(forget=0)
    assert await queue.consumers() == 1
    await queue.take(forget=1)
    assert await queue.consumers() == 0


async def test_a_consumer_that_holds_something_is_not_forgotten(queue: Queue) -> None:
    await queue.read("{}")
    assert await queue.take(idle_ms=3_600_000, forget=1) == 0
    assert (await queue.consumers(), await queue.pending()) == (1, 1)


async def test_without_that_look_its_work_would_vanish(queue: Queue) -> None:
    fence = " and #call('XPENDING', queue, group, '-', '+', 1, consumer) == 0"
    await queue.read("{}")
    await queue.take(idle_ms=3_600_000, forget=1, script=Altered(TAKE_LOST_DELIVERY, (fence, "")))
    assert (await queue.consumers(), await queue.pending(), await queue.found()) == (0, 0, [])


# --- timers


async def fire(engine: Engine, keys: Any, most: int = 100, script: Any = FIRE_TIMERS) -> int:
    fired, now_ms = await script.run(engine, [keys.timers, keys.results], [most])
    assert now_ms > NOW_MS
    return fired  # type: ignore[no-any-return]


async def fired_sessions(engine: Engine, keys: Any) -> list[str]:
    entries = await engine.call("XRANGE", keys.results, "-", "+")
    messages = [MESSAGE_CODEC.decode_fields(pairs(fields)) for _, fields in entries]
    assert all(isinstance(message, TimerFired) for message in messages)
    return [message.session_id for message in messages]


async def test_due_timers_are_moved_once_and_in_order(engine: Engine, keys: Any) -> None:
    names = ['quote"d', "ünï/✓", "back\\slash"]
    for score, name in enumerate(names):
        await engine.call("ZADD", keys.timers, score + 1, name)
    await engine.call("ZADD", keys.timers, 10**15, "later")
    assert await fire(engine, keys) == 3
    assert await fire(engine, keys) == 0
    assert await fired_sessions(engine, keys) == names
    assert await engine.call("ZRANGE", keys.timers, 0, -1) == [b"later"]


async def test_a_bounded_number_of_timers_fires_at_a_time(engine: Engine, keys: Any) -> None:
    for number in range(5):
        await engine.call("ZADD", keys.timers, number, f"s{number}")
    assert [await fire(engine, keys, 2) for _ in range(4)] == [2, 2, 1, 0]


async def test_a_timer_that_stayed_would_fire_again(engine: Engine, keys: Any) -> None:
    await engine.call("ZADD", keys.timers, 1, "s")
    altered = Altered(FIRE_TIMERS, ("call('ZREM', KEYS[1], session)", ""))
    assert [await fire(engine, keys, script=altered) for _ in range(2)] == [1, 1]


# --- the dispatch window


async def waiting(store: Store, *tasks: tuple[str, int, str]) -> None:
    """Put model tasks into the backlog: (tenant, priority, call)."""
    effects = [DispatchModel(model_task(call), "default", tenant, priority) for tenant, priority, call in tasks]
    version = (await store.load(["s"]))["s"].version
    assert await run(store, commit(*effects, version=version), admit=admit_none) == [version + 1]


async def dispatch(engine: Engine, keys: Any, window: int = 100, most: int = 100) -> list[int]:
    names = [keys.backlog("default"), keys.backlog_clock("default"), keys.model("default")]
    moved: list[int] = await DISPATCH_BACKLOG.run(engine, names, [window, most])
    return moved


async def dispatched(engine: Engine, keys: Any) -> list[str]:
    entries = await engine.call("XRANGE", keys.model("default"), "-", "+")
    return [TASK_CODEC.decode_fields(pairs(fields)).call for _, fields in entries]


async def test_tenants_take_turns_whoever_came_first(engine: Engine, keys: Any, store: Store) -> None:  # AC-55
    await waiting(store, *[("a", 0, f"a{number}") for number in range(3)], ("b", 0, "b0"), ("b", 0, "b1"))
    assert await engine.call("XLEN", keys.model("default")) == 0
    assert await dispatch(engine, keys) == [5, 0]
    calls = await dispatched(engine, keys)
    assert [sorted(calls[0:2]), sorted(calls[2:4]), calls[4:]] == [["a0", "b0"], ["a1", "b1"], ["a2"]]


async def test_who_comes_late_does_not_wait_behind_all_others_nor_overtake_for_its_absence(
    engine: Engine, keys: Any, store: Store
) -> None:  # AC-55
    await waiting(store, *[("a", 0, f"a{number}") for number in range(6)])
    assert await dispatch(engine, keys, window=3) == [3, 3]
    await waiting(store, *[("b", 0, f"b{number}") for number in range(3)])
    assert await dispatch(engine, keys) == [6, 0]
    calls = (await dispatched(engine, keys))[3:]
    assert [set(calls[0:2]), set(calls[2:4]), set(calls[4:6])] == [{"a3", "b0"}, {"a4", "b1"}, {"a5", "b2"}]


async def test_a_higher_priority_goes_first(engine: Engine, keys: Any, store: Store) -> None:
    await waiting(store, ("a", 0, "low"), ("a", 5, "middle"), ("b", 9, "high"))
    await dispatch(engine, keys)
    assert await dispatched(engine, keys) == ["high", "middle", "low"]


async def test_the_window_bounds_what_stands_in_the_stream(engine: Engine, keys: Any, store: Store) -> None:
    await waiting(store, *[("a", 0, str(number)) for number in range(5)])
    assert await dispatch(engine, keys, window=2) == [2, 3]
    assert await dispatch(engine, keys, window=2) == [0, 3]
    ((first, _), *_) = await engine.call("XRANGE", keys.model("default"), "-", "+")
    await engine.call("XDEL", keys.model("default"), first)
    assert await dispatch(engine, keys, window=2) == [1, 2]
    assert await dispatch(engine, keys, window=100) == [2, 0]
    assert await engine.call("EXISTS", keys.backlog_clock("default"), keys.backlog("default")) == 0


# --- leases


async def renew(engine: Engine, keys: Any, owner: str, ttl_ms: int, script: Any = RENEW_LEASE) -> int:
    renewed: int = await script.run(engine, [keys.lease], [owner, ttl_ms])
    return renewed


async def test_only_its_owner_renews_or_gives_back_a_lease(engine: Engine, keys: Any) -> None:
    await engine.call("SET", keys.lease, "me", "PX", 1000)
    assert await renew(engine, keys, "me", 60_000) == 1
    assert await engine.call("PTTL", keys.lease) > 50_000
    assert await renew(engine, keys, "you", 1) == 0
    assert await renew(engine, keys, "you", 0) == 0
    assert await engine.call("GET", keys.lease) == b"me"
    assert await renew(engine, keys, "me", 0) == 1
    assert await renew(engine, keys, "me", 60_000) == 0
    assert await engine.call("EXISTS", keys.lease) == 0


async def test_without_the_owner_one_gives_back_what_is_anothers(engine: Engine, keys: Any) -> None:
    await engine.call("SET", keys.lease, "new owner", "PX", 60_000)
    fence = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end"
    assert await renew(engine, keys, "former owner", 0, Altered(RENEW_LEASE, (fence, ""))) == 1
    assert await engine.call("EXISTS", keys.lease) == 0


async def test_a_refused_turns_idempotency_key_is_free_again(engine: Engine, keys: Any, store: Store) -> None:
    """Only if it still stands for that turn, and whatever else has taken its place."""
    mine, others, list_key = (keys.idempotency("s", name) for name in ("mine", "others", "list"))
    await engine.call("SET", mine, f"{TURN} body")
    await engine.call("SET", others, f"{OTHER} body")
    await engine.call("RPUSH", list_key, TURN)
    releasing = [
        Record(TURN, {"status": "failed"}, ends=True, releases=key.removeprefix(keys.base))
        for key in (mine, others, list_key, keys.idempotency("s", "gone"))
    ]
    assert await run(store, commit(*releasing, Count("odd"), state=None)) == [1]
    assert [await engine.call("EXISTS", key) for key in (mine, others, list_key)] == [0, 1, 1]
    assert await engine.call("HGET", keys.stats, "odd") == b"1"  # what comes behind it is done
