"""The in-memory engine: keys, connections, transactions, blocked reads, sharded pub/sub and scripts.

It does what Redis and Valkey do with the commands that Turnmill uses, and nothing else; the conformance suite holds it to
that. A command takes no time: the time between commands is the network's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from . import streams, values
from .loop import VirtualLoop
from .replies import NULL_ARRAY, OK, QUEUED, ReplyError, Status, number
from .scripts import run_script

Arguments = list[bytes]
Command = Callable[["Server", Arguments], Any]

COMMANDS: dict[bytes, tuple[Command, int]] = {
    b"GET": (values.get, 1), b"GETRANGE": (values.getrange, 3), b"MGET": (values.mget, 1), b"SET": (values.set_, 2), b"INCR": (values.incr, 1),
    b"INCRBY": (values.incrby, 2), b"DEL": (values.delete, 1), b"UNLINK": (values.delete, 1), b"EXISTS": (values.exists, 1),
    b"TYPE": (values.type_, 1), b"PEXPIRE": (values.pexpire, 2), b"EXPIRE": (values.expire, 2), b"PTTL": (values.pttl, 1),
    b"PERSIST": (values.persist, 1), b"COPY": (values.copy_, 2), b"RENAME": (values.rename, 2),
    b"HSET": (values.hset, 3), b"HSETNX": (values.hsetnx, 3), b"HGET": (values.hget, 2), b"HMGET": (values.hmget, 2),
    b"HGETALL": (values.hgetall, 1), b"HVALS": (values.hvals, 1), b"HKEYS": (values.hkeys, 1), b"HLEN": (values.hlen, 1),
    b"HEXISTS": (values.hexists, 2), b"HDEL": (values.hdel, 2), b"HINCRBY": (values.hincrby, 3),
    b"HINCRBYFLOAT": (values.hincrbyfloat, 3),
    b"RPUSH": (values.rpush, 2), b"LPUSH": (values.lpush, 2), b"LLEN": (values.llen, 1), b"LRANGE": (values.lrange, 3),
    b"LSET": (values.lset, 3), b"LTRIM": (values.ltrim, 3),
    b"SADD": (values.sadd, 2), b"SREM": (values.srem, 2), b"SMEMBERS": (values.smembers, 1), b"SCARD": (values.scard, 1),
    b"SISMEMBER": (values.sismember, 2), b"SSCAN": (values.sscan, 2), b"SPOP": (values.spop, 1),
    b"SRANDMEMBER": (values.srandmember, 1),
    b"ZADD": (values.zadd, 3), b"ZREM": (values.zrem, 2), b"ZCARD": (values.zcard, 1), b"ZSCORE": (values.zscore, 2),
    b"ZINCRBY": (values.zincrby, 3), b"ZCOUNT": (values.zcount, 3), b"ZRANGE": (values.zrange, 3),
    b"ZREVRANGE": (values.zrevrange, 3), b"ZRANGEBYSCORE": (values.zrangebyscore, 3),
    b"ZREMRANGEBYSCORE": (values.zremrangebyscore, 3), b"ZPOPMIN": (values.zpopmin, 1),
    b"XADD": (streams.xadd, 4), b"XLEN": (streams.xlen, 1), b"XDEL": (streams.xdel, 2), b"XRANGE": (streams.xrange, 3),
    b"XREVRANGE": (streams.xrevrange, 3), b"XTRIM": (streams.xtrim, 3), b"XREADGROUP": (streams.xreadgroup, 6),
    b"XREAD": (streams.xread, 3), b"XACK": (streams.xack, 3), b"XGROUP": (streams.xgroup, 2), b"XINFO": (streams.xinfo, 2),
    b"XPENDING": (streams.xpending, 2), b"XCLAIM": (streams.xclaim, 5),
}  # fmt: skip
DENIED_WITHOUT_MEMORY = frozenset(
    b"SET INCR INCRBY COPY HSET HSETNX HINCRBY HINCRBYFLOAT RPUSH LPUSH LSET SADD ZADD ZINCRBY XADD".split()
)
_OOM = "OOM command not allowed when used memory > 'maxmemory'."


class Watch:
    """What looks on while commands run; the simulator's invariants derive from it."""

    def added(self, key: bytes, entry_id: streams.Id, fields: list[bytes]) -> None: ...

    def delivered(self, key: bytes, entry_id: streams.Id, pending: streams.Pending) -> None: ...

    def acknowledged(self, key: bytes, entry_id: streams.Id) -> None: ...

    def claimed(self, key: bytes, entry_id: streams.Id, consumer: bytes, idle_ms: int) -> None: ...

    def armed(self, key: bytes, members: list[bytes]) -> None: ...

    def expiring(self, key: bytes) -> None: ...

    def loses_publication(self) -> bool:
        return False

    def before_script(self, sha: bytes, keys: Arguments, arguments: Arguments) -> None: ...

    def after_script(self, sha: bytes, keys: Arguments, arguments: Arguments, reply: Any) -> None: ...


class Session:
    """A connection as the server sees it. `push` takes every reply and message, in their order."""

    def __init__(self, push: Callable[[Any], None], number: int) -> None:
        self.push = push
        self.number = number
        self.queued: list[Arguments] | None = None
        self.is_doomed = False
        self.channels: dict[bytes, None] = {}
        self.blocked: Blocked | None = None
        self.waiting: list[Arguments] = []
        """Commands that came while a read was blocked."""


class Blocked:
    """A read that waits for entries."""

    __slots__ = ("arguments", "command", "keys", "timer")

    def __init__(self, command: bytes, arguments: Arguments, keys: list[bytes]) -> None:
        self.command = command
        self.arguments = arguments
        self.keys = keys
        self.timer: Any = None


class Server:
    """One engine. `clock_offset_ms` is its clock against the world's; it may be moved."""

    def __init__(self, loop: VirtualLoop, watch: Watch | None = None) -> None:
        self.loop = loop
        self.watch = watch or Watch()
        self.data: dict[bytes, Any] = {}
        self.expires: dict[bytes, int] = {}
        self.scripts: dict[bytes, bytes] = {}
        self.clock_offset_ms = 1_700_000_000_000
        self.is_full = False
        self.commands_run = 0
        self._sessions: dict[int, Session] = {}
        self._blocked: dict[bytes, dict[Session, None]] = {}
        self._channels: dict[bytes, dict[Session, None]] = {}
        self._signalled: dict[bytes, None] = {}
        self._connections = 0
        self._script_wrote = False
        self._in_script = False

    # ---- keys, for the commands

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000) + self.clock_offset_ms

    def lookup(self, key: bytes) -> Any:
        """What a key holds; None where it is not there, or has expired."""
        at = self.expires.get(key)
        if at is not None and at <= self.now_ms():
            self.remove(key)
            return None
        return self.data.get(key)

    def value(self, key: bytes, kind: type) -> Any:
        found = self.lookup(key)
        if found is not None and type(found) is not kind:
            raise ReplyError(values.WRONG_TYPE)
        return found

    def made(self, key: bytes, kind: type) -> Any:
        found = self.value(key, kind)
        if found is None:
            found = self.data[key] = kind()
        return found

    def store(self, key: bytes, value: Any, *, keep_expiry: bool = False) -> None:
        self.data[key] = value
        if not keep_expiry:
            self.expires.pop(key, None)

    def remove(self, key: bytes) -> bool:
        at = self.expires.pop(key, None)
        found = self.data.pop(key, None)
        if found is not None and key in self._blocked:
            self.signal(key)
        return found is not None and (at is None or at > self.now_ms())

    def drop_if_empty(self, key: bytes) -> None:
        if not self.data.get(key):
            self.remove(key)

    def signal(self, key: bytes) -> None:
        """Something came to a stream, or it went: whoever is blocked on it looks again behind this command."""
        if key in self._blocked:
            self._signalled[key] = None

    def status(self, word: bytes) -> Status:
        return Status(word)

    # ---- connections

    def connect(self, push: Callable[[Any], None]) -> Session:
        self._connections += 1
        session = self._sessions[self._connections] = Session(push, self._connections)
        return session

    def disconnect(self, session: Session) -> None:
        self._sessions.pop(session.number, None)
        self._unblock(session)
        for channel in session.channels:
            self._channels[channel].pop(session, None)
        session.queued, session.waiting = None, []

    def flush_scripts(self) -> None:
        self.scripts.clear()

    def receive(self, session: Session, arguments: Arguments) -> None:
        """Run one command of a connection; its reply goes to `push`, where there is one."""
        if session.number not in self._sessions:
            return
        if session.blocked is not None:
            session.waiting.append(arguments)
            return
        reply = self._reply(session, arguments)
        if session.blocked is None and not isinstance(reply, _Told):
            session.push(reply)
        self._serve_blocked()

    def _reply(self, session: Session, arguments: Arguments) -> Any:
        name, rest = arguments[0].upper(), arguments[1:]
        self.commands_run += 1
        try:
            if session.queued is not None and name not in (b"EXEC", b"DISCARD"):
                return self._queue(session, name, arguments)
            special = _SPECIAL.get(name)
            if special is not None:
                return special(self, session, rest)
            reply = self.run(name, rest)
        except ReplyError as error:
            return error
        if reply is NULL_ARRAY and name in (b"XREADGROUP", b"XREAD"):
            return self._block(session, name, rest)
        return reply

    def run(self, name: bytes, arguments: Arguments) -> Any:
        """A command on keys; also from scripts. Raises `ReplyError`."""
        known = COMMANDS.get(name)
        if known is None:
            raise ReplyError(_unknown(name, arguments))
        command, least = known
        if len(arguments) < least:
            raise ReplyError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        if self.is_full and name in DENIED_WITHOUT_MEMORY and not self._script_wrote:
            raise ReplyError(_OOM)
        reply = command(self, arguments)
        if self._in_script and name in _WRITES:
            self._script_wrote = True
        return reply

    # ---- transactions

    def _queue(self, session: Session, name: bytes, arguments: Arguments) -> Any:
        assert session.queued is not None
        known = COMMANDS.get(name)
        problem = None
        if known is None and name not in _SPECIAL:
            problem = _unknown(arguments[0], arguments[1:])
        elif known is not None and len(arguments) - 1 < known[1]:
            problem = f"ERR wrong number of arguments for '{name.decode().lower()}' command"
        elif self.is_full and name in DENIED_WITHOUT_MEMORY:
            problem = _OOM
        if problem is not None:
            session.is_doomed = True
            raise ReplyError(problem)
        session.queued.append(arguments)
        return QUEUED

    def _multi(self, session: Session, _: Arguments) -> Any:
        session.queued, session.is_doomed = [], False
        return OK

    def _exec(self, session: Session, _: Arguments) -> Any:
        queued, session.queued = session.queued, None
        if queued is None:
            raise ReplyError("ERR EXEC without MULTI")
        if session.is_doomed:
            raise ReplyError("EXECABORT Transaction discarded because of previous errors.")
        replies: list[Any] = []
        for arguments in queued:
            try:
                replies.append(self.run(arguments[0].upper(), arguments[1:]))
            except ReplyError as error:
                replies.append(error)
        return replies

    def _discard(self, session: Session, _: Arguments) -> Any:
        if session.queued is None:
            raise ReplyError("ERR DISCARD without MULTI")
        session.queued = None
        return OK

    # ---- scripts

    def _eval(self, session: Session, a: Arguments) -> Any:
        sha = hashlib.sha1(a[0]).hexdigest().encode()
        self.scripts[sha] = a[0]
        return self._run_script(sha, a[0], a[1:])

    def _evalsha(self, session: Session, a: Arguments) -> Any:
        source = self.scripts.get(a[0].lower())
        if source is None:
            raise ReplyError("NOSCRIPT No matching script.")
        return self._run_script(a[0].lower(), source, a[1:])

    def _run_script(self, sha: bytes, source: bytes, a: Arguments) -> Any:
        count = number(a[0])
        if not 0 <= count <= len(a) - 1:
            raise ReplyError("ERR Number of keys can't be greater than number of args")
        keys, arguments = a[1 : 1 + count], a[1 + count :]
        self._in_script, self._script_wrote = True, False
        self.watch.before_script(sha, keys, arguments)
        try:
            reply = run_script(self, sha, source, keys, arguments)
        finally:
            self._in_script = self._script_wrote = False
        self.watch.after_script(sha, keys, arguments, reply)
        return reply

    def _script(self, session: Session, a: Arguments) -> Any:
        match a[0].upper():
            case b"LOAD":
                sha = hashlib.sha1(a[1]).hexdigest().encode()
                self.scripts[sha] = a[1]
                return sha
            case b"EXISTS":
                return [int(sha.lower() in self.scripts) for sha in a[1:]]
            case b"FLUSH":
                self.flush_scripts()
                return OK
        raise ReplyError(f"ERR the in-memory engine has no SCRIPT {a[0].decode()}")

    # ---- blocked reads

    def _block(self, session: Session, name: bytes, rest: Arguments) -> Any:
        read = streams.Read(rest, grouped=name == b"XREADGROUP")
        if read.block_ms is None:
            return NULL_ARRAY
        blocked = session.blocked = Blocked(name, rest, read.keys)
        for key in read.keys:
            self._blocked.setdefault(key, {})[session] = None
        if read.block_ms > 0:
            blocked.timer = self.loop.call_later(read.block_ms / 1000, self._time_out, session, blocked)
        return None

    def _time_out(self, session: Session, blocked: Blocked) -> None:
        if session.blocked is blocked:
            self._finish_blocked(session, NULL_ARRAY)

    def _serve_blocked(self) -> None:
        while self._signalled:
            key = next(iter(self._signalled))
            del self._signalled[key]
            for session in list(self._blocked.get(key, ())):
                blocked = session.blocked
                if blocked is None:
                    continue
                try:
                    reply = self.run(blocked.command, blocked.arguments)
                except ReplyError as error:
                    reply = error
                if reply is not NULL_ARRAY:
                    self._finish_blocked(session, reply)

    def _finish_blocked(self, session: Session, reply: Any) -> None:
        self._unblock(session)
        session.push(reply)
        waiting, session.waiting = session.waiting, []
        for arguments in waiting:
            self.receive(session, arguments)

    def _unblock(self, session: Session) -> None:
        blocked, session.blocked = session.blocked, None
        if blocked is None:
            return
        if blocked.timer is not None:
            blocked.timer.cancel()
        for key in blocked.keys:
            waiting = self._blocked.get(key)
            if waiting is not None:
                waiting.pop(session, None)
                if not waiting:
                    del self._blocked[key]

    # ---- pub/sub

    def publish(self, channel: bytes, payload: bytes) -> int:
        listening = self._channels.get(channel, {})
        for session in listening:
            if not self.watch.loses_publication():
                session.push([b"smessage", channel, payload])
        return len(listening)

    def _spublish(self, session: Session, a: Arguments) -> Any:
        return self.publish(a[0], a[1])

    def _ssubscribe(self, session: Session, a: Arguments) -> Any:
        for channel in a:
            session.channels[channel] = None
            self._channels.setdefault(channel, {})[session] = None
            session.push([b"ssubscribe", channel, len(session.channels)])
        return TOLD

    def _sunsubscribe(self, session: Session, a: Arguments) -> Any:
        for channel in a or list(session.channels):
            session.channels.pop(channel, None)
            self._channels.get(channel, {}).pop(session, None)
            session.push([b"sunsubscribe", channel, len(session.channels)])
        return TOLD

    # ---- the rest

    def _ping(self, session: Session, a: Arguments) -> Any:
        if session.channels:
            return [b"pong", a[0] if a else b""]
        return a[0] if a else Status(b"PONG")

    def _time(self, session: Session | None, a: Arguments) -> Any:
        microseconds = int(self.loop.time() * 1_000_000) + self.clock_offset_ms * 1000
        return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]

    def _info(self, session: Session, a: Arguments) -> Any:
        return b"# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\n"

    def _config(self, session: Session, a: Arguments) -> Any:
        known = {b"maxmemory-policy": b"noeviction"}
        return [part for name in a[1:] if name in known for part in (name, known[name])]

    def _client(self, session: Session, a: Arguments) -> Any:
        match a[0].upper():
            case b"ID":
                return session.number
            case b"UNBLOCK":
                other = self._sessions.get(number(a[1]))
                if other is None or other.blocked is None:
                    return 0
                self._finish_blocked(other, NULL_ARRAY)
                return 1
            case b"SETNAME" | b"SETINFO":
                return OK
        raise ReplyError(f"ERR the in-memory engine has no CLIENT {a[0].decode()}")

    def run_in_script(self, name: bytes, arguments: Arguments) -> Any:
        if name == b"SPUBLISH":
            return self.publish(arguments[0], arguments[1])
        if name == b"TIME":
            return self._time(None, arguments)
        return self.run(name, arguments)

    def keys_with(self, ending: bytes) -> Iterable[bytes]:
        """For looks from outside."""
        return [key for key in list(self.data) if key.endswith(ending) and self.lookup(key) is not None]


def _unknown(name: bytes, arguments: Arguments) -> str:
    told = "".join(f"'{word.decode(errors='replace')}' " for word in arguments)
    return f"ERR unknown command '{name.decode(errors='replace')}', with args beginning with: {told}"


class _Told:
    """A command whose replies were pushed already."""


TOLD = _Told()
_WRITES = DENIED_WITHOUT_MEMORY | frozenset(
    b"DEL UNLINK PEXPIRE EXPIRE PERSIST RENAME HDEL LTRIM SREM SPOP ZREM ZREMRANGEBYSCORE ZPOPMIN XDEL XACK XGROUP XCLAIM XTRIM".split()
)
_SPECIAL: dict[bytes, Callable[[Server, Session, Arguments], Any]] = {
    b"MULTI": Server._multi, b"EXEC": Server._exec, b"DISCARD": Server._discard, b"EVAL": Server._eval,
    b"EVALSHA": Server._evalsha, b"SCRIPT": Server._script, b"SPUBLISH": Server._spublish,
    b"SSUBSCRIBE": Server._ssubscribe, b"SUNSUBSCRIBE": Server._sunsubscribe, b"PING": Server._ping, b"TIME": Server._time,
    b"INFO": Server._info, b"CONFIG": Server._config, b"CLIENT": Server._client,
}  # fmt: skip
