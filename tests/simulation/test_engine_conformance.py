"""The in-memory engine answers as the real one does: the simulator speaks of the real thing.

The same commands go to both, and the replies are compared, errors and scripts included. What follows from the clock (ids
that the server makes, idle times) is compared by its place. Covers AC-13 and AC-25 in so far as their simulation rests on
this.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulation.faults import Profile
from support.simulation.loop import VirtualLoop
from support.simulation.recorder import Recorded, recorded
from support.simulation.replies import encode
from support.simulation.server import Server, Session
from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import EngineReplyError
from turnmill.protocol.streams import APPEND_DELTAS, FIRE_TIMERS, RENEW_LEASE, SWAP_VALUE, TAKE_LOST_DELIVERY
from turnmill.runtime.embedded import ensure_server

MADE_ID = re.compile(rb"\d{12,14}-\d+\Z")
Command = tuple[Any, ...]


class InMemory:
    """The in-memory engine, spoken to at once."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.server = Server(self.loop)
        self.sessions: dict[int, Session] = {}
        self.replies: dict[int, list[Any]] = {}

    def send(self, connection: int, command: Command) -> None:
        if connection not in self.sessions:
            self.replies[connection] = []
            self.sessions[connection] = self.server.connect(self.replies[connection].append)
        words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
        self.server.receive(self.sessions[connection], words)

    def reply(self, connection: int) -> Any:
        """The next reply, as a client reads it; time passes until there is one."""
        while not self.replies[connection]:
            self.loop._pass_time()
            while self.loop._ready:  # type: ignore[attr-defined]
                handle = self.loop._ready.popleft()  # type: ignore[attr-defined]
                handle._context.run(handle._callback, *handle._args)
        reader = hiredis.Reader(replyError=EngineReplyError)
        reader.feed(encode(self.replies[connection].pop(0)))
        return reader.gets()


def shown(reply: Any, command: Command) -> Any:
    """A reply without what follows from the clock."""
    if isinstance(reply, EngineReplyError):
        return "error", str(reply)
    name = str(command[0]).upper()
    if name == "EVAL" and command[1] == FIRE_TIMERS.source:
        return reply[0]
    if name == "TIME":
        return "time"
    if name == "XINFO" and isinstance(reply, list):
        return [_told(item) for item in reply]
    if name == "XPENDING" and len(command) > 3 and isinstance(reply, list):
        return [[_plain(entry_id), consumer, count] for entry_id, consumer, _idle, count in reply]
    return _plain(reply)


def _told(item: list[Any]) -> dict[bytes, Any]:
    fields = dict(zip(item[::2], item[1::2], strict=True))
    return {
        name: _plain(value)
        for name, value in fields.items()
        if name not in (b"idle", b"inactive", b"entries-read", b"lag")
    }


def _plain(reply: Any) -> Any:
    if isinstance(reply, EngineReplyError):
        return "error", str(reply)
    if isinstance(reply, list):
        return [_plain(item) for item in reply]
    return b"made" if isinstance(reply, bytes) and MADE_ID.match(reply) else reply


async def both(valkey_url: str, commands: list[Command]) -> tuple[list[Any], list[Any]]:
    """The replies of both engines to commands on one connection."""
    memory = InMemory()
    engine = await Engine(valkey_url).connect()
    try:
        told, real = [], []
        for command in commands:
            memory.send(1, command)
            told.append(shown(memory.reply(1), command))
            try:
                reply = await engine.call(*command)
            except EngineReplyError as error:
                reply = error
            real.append(shown(reply, command))
    finally:
        await engine.close()
    return told, real


async def assert_equal(valkey_url: str, commands: list[Command]) -> list[Any]:
    told, real = await both(valkey_url, commands)
    for command, one, other in zip(commands, told, real, strict=True):
        assert one == other, command
    return real


# ---- what is easily got wrong


async def test_strings_hashes_lists_and_sets(valkey_url: str, namespace: str) -> None:
    k = f"{namespace}:{{x}}:"
    await assert_equal(
        valkey_url,
        [
            ("SET", k + "s", "1", "NX", "PX", 100_000), ("SET", k + "s", "2", "NX"), ("SET", k + "s", "2", "NX", "GET"),
            ("GET", k + "s"), ("SET", k + "s", "3", "XX"), ("PTTL", k + "s"), ("INCR", k + "s"), ("GETRANGE", k + "s", 0, -1),
            ("HGET", k + "s", "f"), ("MGET", k + "s", k + "none", k + "h"), ("EXISTS", k + "s", k + "s", k + "none"),
            ("HSET", k + "h", "a", "1", "b", "x"), ("HSET", k + "h", "a", "2", "c", "3"), ("HSET", k + "h", "a"),
            ("HSETNX", k + "h", "a", "9"), ("HMGET", k + "h", "a", "none", "c"), ("HGETALL", k + "h"), ("HLEN", k + "h"),
            ("HINCRBY", k + "h", "a", 5), ("HINCRBY", k + "h", "b", 5), ("HINCRBYFLOAT", k + "h", "f", "1.5"),
            ("HINCRBYFLOAT", k + "h", "f", "0.25"), ("HINCRBY", k + "h", "a", 2**63 - 1), ("HDEL", k + "h", "a", "none"),
            ("HVALS", k + "h"), ("HEXISTS", k + "h", "b"), ("HDEL", k + "h", "b", "c", "f"), ("EXISTS", k + "h"),
            ("HDEL", k + "none", "a"), ("RPUSH", k + "l", "a", "b", "c"), ("LPUSH", k + "l", "y", "z"), ("LRANGE", k + "l", 0, -1),
            ("LRANGE", k + "l", -2, 100), ("LRANGE", k + "l", 3, 1), ("LLEN", k + "l"), ("LSET", k + "l", 1, "new"),
            ("LSET", k + "l", 9, "x"), ("LSET", k + "none", 0, "x"), ("LTRIM", k + "l", 1, 2), ("LRANGE", k + "l", 0, -1),
            ("SADD", k + "t", "a", "b", "a"), ("SADD", k + "t", "b"), ("SREM", k + "t", "a", "none"), ("SMEMBERS", k + "t"),
            ("SCARD", k + "t"), ("SISMEMBER", k + "t", "b"), ("SADD", k + "l", "x"), ("COPY", k + "l", k + "l2"),
            ("COPY", k + "l", k + "l2"), ("LRANGE", k + "l2", 0, -1), ("RENAME", k + "l2", k + "l3"), ("TYPE", k + "l3"),
            ("RENAME", k + "none", k + "x"), ("DEL", k + "l", k + "none"), ("UNLINK", k + "l3", k + "t"), ("TYPE", k + "l"),
            ("PEXPIRE", k + "s", 100_000), ("PERSIST", k + "s"), ("PERSIST", k + "s"), ("PTTL", k + "s"), ("PTTL", k + "none"),
            ("PEXPIRE", k + "none", 5), ("PEXPIRE", k + "s", 0), ("EXISTS", k + "s"), ("NOSUCH", "x"), ("GET",), ("INCR", k + "n", "x"),
        ],
    )  # fmt: skip


async def test_sorted_sets(valkey_url: str, namespace: str) -> None:
    z = f"{namespace}:{{x}}:z"
    await assert_equal(
        valkey_url,
        [
            ("ZADD", z, 3, "c", 1, "a", 2, "b"), ("ZADD", z, 1, "a2"), ("ZADD", z, "GT", "CH", 0, "a", 9, "b"), ("ZADD", z, "NX", 7, "a"),
            ("ZADD", z, "x", "a"), ("ZADD", z, 1), ("ZCARD", z), ("ZSCORE", z, "a"), ("ZSCORE", z, "none"), ("ZRANGE", z, 0, -1, "WITHSCORES"),
            ("ZREVRANGE", z, 0, 1), ("ZRANGEBYSCORE", z, "-inf", "+inf"), ("ZRANGEBYSCORE", z, "(1", 3, "WITHSCORES"),
            ("ZRANGEBYSCORE", z, 0, 100, "LIMIT", 1, 2), ("ZRANGEBYSCORE", z, "y", 3), ("ZCOUNT", z, 1, "(9"), ("ZINCRBY", z, "1.5", "a"),
            ("ZADD", z, 1e12, "far", "-5e11", "near"), ("ZPOPMIN", z, 2), ("ZPOPMIN", z), ("ZREMRANGEBYSCORE", z, "-inf", "(9"), ("ZREM", z, "b", "none"),
            ("ZRANGE", z, 0, -1, "WITHSCORES"), ("ZREM", z, "far"), ("EXISTS", z), ("ZPOPMIN", z), ("ZRANGEBYSCORE", z, 0, 1),
        ],
    )  # fmt: skip


async def test_streams_and_groups(valkey_url: str, namespace: str) -> None:
    s, g = f"{namespace}:{{x}}:s", "g"
    await assert_equal(
        valkey_url,
        [
            ("XADD", s, "NOMKSTREAM", "0-*", "a", "1"), ("XADD", s, "0-*", "a", "1"), ("XADD", s, "NOMKSTREAM", "0-*", "b", "2"),
            ("XADD", s, "0-2", "c", "3"), ("XADD", s, "0-0", "c", "3"), ("XADD", s, "5-1", "c", "3", "d", "4"), ("XADD", s, "4-*", "c", "3"),
            ("XADD", s, "5-*", "c", "3"), ("XADD", s, "7", "c", "3"), ("XADD", s, "x", "c", "3"), ("XADD", s, "*", "c"), ("XLEN", s),
            ("XRANGE", s, "-", "+"), ("XRANGE", s, "0-2", "5"), ("XRANGE", s, "(0-2", "+", "COUNT", 1), ("XREVRANGE", s, "+", "-", "COUNT", 2),
            ("XRANGE", s, "x", "+"), ("XREADGROUP", "GROUP", g, "me", "COUNT", 1, "STREAMS", s, ">"), ("XGROUP", "CREATE", s, g, "0"),
            ("XGROUP", "CREATE", s, g, "0", "MKSTREAM"), ("XGROUP", "CREATE", s + "none", g, "0"), ("XGROUP", "CREATE", s + "2", g, "$", "MKSTREAM"),
            ("XREADGROUP", "GROUP", g, "me", "COUNT", 2, "STREAMS", s, s + "2", ">", ">"), ("XPENDING", s, g), ("XPENDING", s, g, "-", "+", 10),
            ("XPENDING", s, g, "-", "+", 10, "nobody"), ("XPENDING", s, g, "IDLE", 100_000, "-", "+", 10), ("XPENDING", s, "none"),
            ("XPENDING", s, g, "0-2", "0-2", 1, "me"), ("XREADGROUP", "GROUP", g, "you", "STREAMS", s, ">"), ("XINFO", "CONSUMERS", s, g),
            ("XINFO", "GROUPS", s), ("XINFO", "GROUPS", s + "none"), ("XINFO", "CONSUMERS", s, "none"), ("XACK", s, g, "0-1", "9-9"), ("XACK", s, g, "0-1"),
            ("XACK", s + "none", g, "0-1"), ("XCLAIM", s, g, "other", 0, "0-2", "9-9"), ("XCLAIM", s, g, "other", 0, "5-1", "IDLE", 3_600_000, "JUSTID"),
            ("XCLAIM", s, g, "late", 100_000, "0-2"), ("XCLAIM", s, "none", "late", 0, "0-2"), ("XPENDING", s, g, "IDLE", 3_000_000, "-", "+", 10, "other"),
            ("XDEL", s, "0-2", "9-9"), ("XCLAIM", s, g, "other", 0, "0-2"), ("XPENDING", s, g), ("XGROUP", "DELCONSUMER", s, g, "other"),
            ("XGROUP", "DELCONSUMER", s, g, "other"), ("XGROUP", "SETID", s, g, "0"), ("XREADGROUP", "GROUP", g, "again", "STREAMS", s, ">"),
            ("XINFO", "CONSUMERS", s, g), ("XREADGROUP", "GROUP", g, "again", "STREAMS", s, "0"), ("XGROUP", "DESTROY", s, g), ("XGROUP", "DESTROY", s, g),
            ("XREAD", "COUNT", 2, "STREAMS", s, "0"), ("XREAD", "STREAMS", s, s + "none", "99", "0"), ("XADD", s, "MAXLEN", 2, "*", "e", "5"), ("XLEN", s),
            ("XADD", s + "h", "*", "a", "1"), ("SET", s + "w", 1), ("XADD", s + "w", "*", "a", "1"), ("XLEN", s + "w"), ("XREADGROUP", "GROUP", g, "me", "STREAMS", s),
        ],
    )  # fmt: skip


async def test_transactions(valkey_url: str, namespace: str) -> None:
    s = f"{namespace}:{{x}}:s"
    await assert_equal(
        valkey_url,
        [
            ("EXEC",), ("DISCARD",), ("MULTI",), ("SET", s, 1), ("XADD", s, "*", "a", "1"), ("INCR", s), ("EXEC",), ("MULTI",), ("GET",),
            ("SET", s, 9), ("EXEC",), ("GET", s), ("MULTI",), ("NOSUCH",), ("EXEC",), ("MULTI",), ("SET", s, 5), ("DISCARD",), ("GET", s),
        ],
    )  # fmt: skip


async def test_scripts_and_their_errors(valkey_url: str, namespace: str) -> None:
    k = f"{namespace}:{{x}}:k"
    returns = "return {1, 2.9, 'text', false, nil, 3}"
    kinds = "return {redis.call('SET', KEYS[1], ARGV[1]), redis.call('GET', 'none'), redis.call('TYPE', KEYS[1])}"
    numbers = "redis.call('HSET', KEYS[1], 'a', 1e12 - 1, 'b', 0.5, 'c', 3) return redis.call('HGETALL', KEYS[1])"
    pcall = "local r = redis.pcall('INCR', KEYS[1]) return {type(r), r.err}"
    await assert_equal(
        valkey_url,
        [
            ("EVALSHA", "0" * 40, 0), ("EVAL", returns, 0), ("EVAL", kinds, 1, k, "x"), ("EVAL", numbers, 1, k + "h"), ("EVAL", pcall, 1, k),
            ("EVAL", "return true", 0), ("EVAL", "return {ok='FINE'}", 0), ("EVAL", "return #redis.call('XRANGE', KEYS[1], '-', '+')", 1, k + "s"),
            ("EVAL", "return redis.call('ZADD', KEYS[1], 1, 'a')", 1, k + "z"), ("EVAL", "return redis.call('ZPOPMIN', KEYS[1], 5)", 1, k + "z"),
        ],
    )  # fmt: skip
    failing = "redis.call('SET', KEYS[1], 'text') return redis.call('INCR', KEYS[1])"
    told, real = await both(valkey_url, [("EVAL", failing, 1, k), ("EVAL", "error('boom')", 0), ("GET", k)])
    assert [reply[0] for reply in told[:2]] == [reply[0] for reply in real[:2]] == ["error", "error"]
    assert told[2] == real[2] == b"text", "a script is not rolled back"


async def test_the_smaller_scripts(valkey_url: str, namespace: str) -> None:
    """Each script of the project that the recorded runs below cannot replay, because they ask for the clock."""
    k = f"{namespace}:{{x}}:"

    def run(script: Any, keys: list[str], *arguments: Any) -> Command:
        return ("EVAL", script.source, len(keys), *keys, *arguments)

    lost = [k + "q", k + "r", k + "alive"]
    await assert_equal(
        valkey_url,
        [
            ("ZADD", k + "t", 0, "s/1", 5, 'q"', 9e15, "late"), run(FIRE_TIMERS, [k + "t", k + "r"], 100), ("XRANGE", k + "r", "-", "+"), ("ZRANGE", k + "t", 0, -1),
            ("SET", k + "lease", "me"), run(RENEW_LEASE, [k + "lease"], "you", 1000), run(RENEW_LEASE, [k + "lease"], "me", 1000), run(RENEW_LEASE, [k + "lease"], "me", 0),
            run(SWAP_VALUE, [k + "v"], "f", 0, "", "1"), run(SWAP_VALUE, [k + "v"], "f", 0, "", "2"), run(SWAP_VALUE, [k + "v"], "f", 1, "1", "2"), run(SWAP_VALUE, [k + "v"], "g", 1, "1", "2"),
            ("XGROUP", "CREATE", k + "q", "workers", 0, "MKSTREAM"), ("XADD", k + "q", "*", "t", "tool_task", "d", "body"), ("XREADGROUP", "GROUP", "workers", "w", "STREAMS", k + "q", ">"),
            ("SET", k + "alive", 1), run(TAKE_LOST_DELIVERY, lost, "workers", "w", 0, 10, 0), ("DEL", k + "alive"), run(TAKE_LOST_DELIVERY, lost, "workers", "w", 100_000, 10, 0),
            run(TAKE_LOST_DELIVERY, lost, "workers", "w", 0, 10, 0), run(TAKE_LOST_DELIVERY, lost, "workers", "w", 0, 10, 1), ("XINFO", "CONSUMERS", k + "q", "workers"), ("XRANGE", k + "r", "-", "+"),
            ("XADD", k + "c", "0-*", "t", "x", "d", "y"), ("HSET", k + "s", "live", "t/1/1"), run(APPEND_DELTAS, [k + "s", k + "c"], "t/1/1", 0, 5, 100, 1, "x 1", "x", "d"),
            run(APPEND_DELTAS, [k + "s", k + "c"], "t/1/1", 0, 5, 100, 1, "x 1", "x", "d"), run(APPEND_DELTAS, [k + "s", k + "c"], "t/1/1", 5, 5, 100, 1, "x 1", "x", "d"),
            run(APPEND_DELTAS, [k + "s", k + "c"], "t/1/2", 0, 5, 100, 1, "x 1", "x", "d"), run(APPEND_DELTAS, [k + "s", k + "c"], "t/1/1", 1, 5, 1, 1, "x 2", "x", "dd"), ("XRANGE", k + "c", "-", "+"), ("HGETALL", k + "s"),
        ],
    )  # fmt: skip


async def test_blocked_reads(valkey_url: str, namespace: str) -> None:
    """Who is blocked is served by what comes, in order, once; told where its stream or group goes; and let go in time."""
    s, other = f"{namespace}:{{x}}:s", f"{namespace}:{{x}}:t"
    script: list[tuple[int, Command, bool]] = [
        (1, ("XGROUP", "CREATE", s, "g", "0", "MKSTREAM"), True), (1, ("XGROUP", "CREATE", other, "g", "0", "MKSTREAM"), True),
        (2, ("XREADGROUP", "GROUP", "g", "a", "COUNT", 1, "BLOCK", 5000, "STREAMS", s, other, ">", ">"), False),
        (3, ("XREADGROUP", "GROUP", "g", "b", "COUNT", 5, "BLOCK", 5000, "STREAMS", s, ">"), False),
        (1, ("EVAL", "redis.call('XADD', KEYS[1], '1-1', 'a', '1') redis.call('XADD', KEYS[1], '1-2', 'a', '2') return 1", 1, s), True),
        (2, (), True), (3, (), True), (1, ("XPENDING", s, "g", "-", "+", 10), True),
        (2, ("XREADGROUP", "GROUP", "g", "a", "BLOCK", 20, "STREAMS", s, ">"), True), (1, ("XINFO", "CONSUMERS", s, "g"), True),
        (2, ("XREADGROUP", "GROUP", "g", "a", "BLOCK", 5000, "STREAMS", s, ">"), False), (1, ("DEL", s), True), (2, (), True),
        (3, ("XREADGROUP", "GROUP", "g", "b", "BLOCK", 5000, "STREAMS", other, ">"), False), (1, ("XGROUP", "DESTROY", other, "g"), True), (3, (), True),
        (2, ("XREAD", "BLOCK", 5000, "STREAMS", other, "$"), False), (1, ("XADD", other, "3-1", "x", "y"), True), (2, (), True),
    ]  # fmt: skip
    memory, engine = InMemory(), await Engine(valkey_url).connect()
    links: dict[int, Any] = {number: await engine.open_link() for number in (1, 2, 3)}
    waiting: dict[int, tuple[Command, Any]] = {}
    try:
        for connection, command, answered in script:
            if command:
                memory.send(connection, command)
                waiting[connection] = command, links[connection].call(*command)
                await asyncio.sleep(0.01)  # a blocked read is blocked before what follows
            if answered:
                sent, future = waiting.pop(connection)
                reply = (await asyncio.gather(future, return_exceptions=True))[0]
                assert shown(memory.reply(connection), sent) == shown(reply, sent), sent
    finally:
        for link in links.values():
            link.close()
        await engine.close()


# ---- any commands


_KEYS = st.sampled_from(["a", "b"])
_IDS = st.sampled_from(["0-1", "0-2", "1-1", "2-1", "5-0"])
_NAMES = st.sampled_from(["g", "h"])
_CONSUMERS = st.sampled_from(["me", "you"])
_COMMANDS = st.one_of(
    st.tuples(
        st.just("XADD"),
        _KEYS,
        st.sampled_from(["0-*", "1-*", "0-1", "1-1", "2-1", "5-0"]),
        st.just("f"),
        st.sampled_from("xy"),
    ),
    st.tuples(
        st.just("XADD"), _KEYS, st.just("NOMKSTREAM"), st.sampled_from(["0-*", "3-*"]), st.just("f"), st.just("z")
    ),
    st.tuples(
        st.just("XGROUP"), st.just("CREATE"), _KEYS, _NAMES, st.sampled_from(["0", "$", "1-1"]), st.just("MKSTREAM")
    ),
    st.tuples(st.just("XGROUP"), st.sampled_from(["SETID"]), _KEYS, _NAMES, st.sampled_from(["0", "1-1"])),
    st.tuples(st.just("XGROUP"), st.just("DELCONSUMER"), _KEYS, _NAMES, _CONSUMERS),
    st.tuples(
        st.just("XREADGROUP"),
        st.just("GROUP"),
        _NAMES,
        _CONSUMERS,
        st.just("COUNT"),
        st.integers(1, 3),
        st.just("STREAMS"),
        _KEYS,
        st.sampled_from([">", ">", "0"]),
    ),
    st.tuples(st.just("XACK"), _KEYS, _NAMES, _IDS, _IDS),
    st.tuples(st.just("XDEL"), _KEYS, _IDS),
    st.tuples(st.just("XCLAIM"), _KEYS, _NAMES, _CONSUMERS, st.just(0), _IDS, _IDS),
    st.tuples(st.just("XCLAIM"), _KEYS, _NAMES, _CONSUMERS, st.just(0), _IDS, st.just("JUSTID")),
    st.tuples(st.just("XPENDING"), _KEYS, _NAMES),
    st.tuples(st.just("XPENDING"), _KEYS, _NAMES, st.just("-"), st.just("+"), st.just(10)),
    st.tuples(st.just("XPENDING"), _KEYS, _NAMES, _IDS, st.just("+"), st.just(2), _CONSUMERS),
    st.tuples(st.just("XRANGE"), _KEYS, _IDS, st.just("+")),
    st.tuples(st.just("XINFO"), st.just("CONSUMERS"), _KEYS, _NAMES),
    st.tuples(st.just("XLEN"), _KEYS),
    st.tuples(st.just("DEL"), _KEYS),
    st.tuples(st.just("SET"), _KEYS, st.just("text")),
    st.tuples(st.just("ZADD"), st.just("z"), st.integers(-3, 3), st.sampled_from("pqr")),
    st.tuples(st.just("ZPOPMIN"), st.just("z"), st.integers(1, 2)),
    st.tuples(st.just("ZRANGEBYSCORE"), st.just("z"), st.integers(-3, 0), st.sampled_from(["+inf", "2", "(2"])),
    st.tuples(st.just("HSET"), st.sampled_from(["h", "a"]), st.sampled_from("pq"), st.integers(0, 3)),
    st.tuples(st.just("HINCRBY"), st.just("h"), st.sampled_from("pq"), st.integers(-2, 2)),
    st.tuples(st.just("HDEL"), st.just("h"), st.sampled_from("pq")),
    st.tuples(st.just("RPUSH"), st.just("l"), st.sampled_from("pq")),
    st.tuples(st.just("LRANGE"), st.just("l"), st.integers(-3, 2), st.integers(-3, 3)),
)
_PLACES_OF_KEYS = {"XGROUP": 2, "XINFO": 2, "XREADGROUP": 7}


async def test_any_sequence_of_commands(valkey_url: str, namespace: str) -> None:
    """Hypothesis looks for a sequence on which the two differ."""
    loop, sequences = asyncio.get_running_loop(), 0

    @settings(max_examples=120, deadline=None, database=None)
    @given(st.lists(_COMMANDS, min_size=1, max_size=25))
    def holds(commands: list[Command]) -> None:
        nonlocal sequences
        sequences += 1
        placed = []
        for command in commands:
            place = _PLACES_OF_KEYS.get(command[0], 1)
            placed.append((*command[:place], f"{namespace}:{{x}}:{sequences}:{command[place]}", *command[place + 1 :]))
        asyncio.run_coroutine_threadsafe(assert_equal(valkey_url, placed), loop).result(60)

    await asyncio.to_thread(holds)


# ---- what the project itself sends


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_simulated_run_replayed_on_the_real_engine(short_directory: Path, namespace: str, seed: int) -> None:
    """Every command of a run, in the order in which the in-memory engine executed them, with its scripts: the real engine
    gives the same replies. A server of its own, because coordinators of other tests load scripts into theirs."""
    commands = recorded(seed, Profile(()))
    assert len(commands) > 300
    server = ensure_server(short_directory)
    try:
        with ThreadPoolExecutor(1) as thread:  # a loop of its own, that takes no other's place
            thread.submit(asyncio.run, replay(server.url, namespace, commands)).result()
    finally:
        server.stop()


async def replay(valkey_url: str, namespace: str, commands: list[Recorded]) -> None:
    engine = await Engine(valkey_url).connect()
    links: dict[int, Any] = {}
    names: dict[bytes, bytes] = {}
    try:
        await engine.call("SCRIPT", "FLUSH")
        for number, (connection, words, told) in enumerate(commands):
            if connection not in links:
                links[connection] = await engine.open_link()
            placed = [_placed(word, namespace, names) for word in words]
            reply = (await asyncio.gather(links[connection].call(*placed), return_exceptions=True))[0]
            _learn(told, reply, names)
            command = tuple(word.decode(errors="replace") for word in words)
            assert shown(_translated(told, namespace, names), command) == shown(reply, command), (number, words)
    finally:
        for link in links.values():
            link.close()
        await engine.close()


def _placed(word: bytes, namespace: str, names: dict[bytes, bytes]) -> bytes:
    """An argument for the real engine: in a namespace of its own, with the ids that were made there."""
    if word.startswith(b"sim:"):
        return namespace.encode() + word[3:]
    if word.startswith(b"("):
        return b"(" + names.get(word[1:], word[1:])
    return names.get(word, word)


def _learn(told: Any, real: Any, names: dict[bytes, bytes]) -> None:
    if isinstance(told, list) and isinstance(real, list):
        for one, other in zip(told, real, strict=False):
            _learn(one, other, names)
    elif isinstance(told, bytes) and MADE_ID.match(told) and isinstance(real, bytes):
        names.setdefault(told, real)


def _translated(told: Any, namespace: str, names: dict[bytes, bytes]) -> Any:
    if isinstance(told, list):
        return [_translated(item, namespace, names) for item in told]
    return _placed(told, namespace, names) if isinstance(told, bytes) else told
