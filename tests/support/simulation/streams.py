"""Streams of the in-memory engine: entries, groups, consumers and what is pending for them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from .replies import NULL_ARRAY, OK, ReplyError, number

if TYPE_CHECKING:
    from .server import Server

Arguments = list[bytes]
Id = tuple[int, int]
FIRST: Id = (0, 0)
LAST: Id = (2**64 - 1, 2**64 - 1)
_SMALLER = "ERR The ID specified in XADD is equal or smaller than the target stream top item"
_BAD_ID = "ERR Invalid stream ID specified as stream command argument"


class Consumer:
    __slots__ = ("active_ms", "pending", "seen_ms")

    def __init__(self, now_ms: int) -> None:
        self.pending: dict[Id, Pending] = {}
        self.seen_ms = now_ms
        self.active_ms = -1


class Pending:
    __slots__ = ("consumer", "count", "delivered_ms")

    def __init__(self, consumer: bytes, delivered_ms: int, count: int) -> None:
        self.consumer = consumer
        self.delivered_ms = delivered_ms
        self.count = count


class Group:
    __slots__ = ("consumers", "last_id", "pending")

    def __init__(self, last_id: Id) -> None:
        self.last_id = last_id
        self.pending: dict[Id, Pending] = {}
        self.consumers: dict[bytes, Consumer] = {}

    def consumer(self, name: bytes, now_ms: int) -> Consumer:
        """Seen now, and made if need be."""
        consumer = self.consumers.get(name)
        if consumer is None:
            consumer = self.consumers[name] = Consumer(now_ms)
        consumer.seen_ms = now_ms
        return consumer

    def drop(self, entry_id: Id) -> bool:
        pending = self.pending.pop(entry_id, None)
        if pending is None:
            return False
        del self.consumers[pending.consumer].pending[entry_id]
        return True


class Stream:
    __slots__ = ("entries", "groups", "ids", "last_id")

    def __init__(self) -> None:
        self.ids: list[Id] = []
        self.entries: dict[Id, list[bytes]] = {}
        self.last_id: Id = FIRST
        self.groups: dict[bytes, Group] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, first: Id, last: Id) -> list[Id]:
        return self.ids[bisect_left(self.ids, first) : bisect_right(self.ids, last)]

    def delete(self, entry_id: Id) -> bool:
        if self.entries.pop(entry_id, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry_id)]
        return True


def text(entry_id: Id) -> bytes:
    return b"%d-%d" % entry_id


def parse(word: bytes, sequence: int = 0) -> Id:
    """`ms-seq`, or `ms` with the given sequence."""
    head, dash, tail = word.partition(b"-")
    if not head.isdigit() or (dash and not tail.isdigit()):
        raise ReplyError(_BAD_ID)
    return int(head), int(tail) if dash else sequence


def _next(entry_id: Id) -> Id:
    return (entry_id[0], entry_id[1] + 1) if entry_id[1] < 2**64 - 1 else (entry_id[0] + 1, 0)


def _before(entry_id: Id) -> Id:
    return (entry_id[0], entry_id[1] - 1) if entry_id[1] else (entry_id[0] - 1, 2**64 - 1)


def _range(low: bytes, high: bytes) -> tuple[Id, Id]:
    first = _next(parse(low[1:])) if low[:1] == b"(" else FIRST if low == b"-" else parse(low)
    highest = 2**64 - 1
    last = _before(parse(high[1:], highest)) if high[:1] == b"(" else LAST if high == b"+" else parse(high, highest)
    return first, last


# ---- adding and reading


def xadd(server: Server, a: Arguments) -> Any:
    key, index, make, most = a[0], 1, True, None
    while True:
        word = a[index].upper()
        if word == b"NOMKSTREAM":
            make = False
        elif word == b"MAXLEN":
            index += 1
            is_exact = a[index] != b"~"
            index += a[index] in (b"~", b"=")
            most = number(a[index]) if is_exact else None  # `~` may keep what the engine likes
        else:
            break
        index += 1
    wanted, fields = a[index], a[index + 1 :]
    if not fields or len(fields) % 2:
        raise ReplyError("ERR wrong number of arguments for 'xadd' command")
    stream = server.value(key, Stream)
    if stream is None and not make:
        return None
    entry_id = _new_id(server, stream.last_id if stream is not None else FIRST, wanted)
    if stream is None:
        stream = server.made(key, Stream)
    stream.ids.append(entry_id)
    stream.entries[entry_id] = fields
    stream.last_id = entry_id
    while most is not None and len(stream.ids) > most:
        stream.delete(stream.ids[0])
    server.signal(key)
    server.watch.added(key, entry_id, fields)
    return text(entry_id)


def _new_id(server: Server, last: Id, wanted: bytes) -> Id:
    if wanted == b"*":
        now = server.now_ms()
        return (now, 0) if now > last[0] else _next(last)
    if wanted.endswith(b"-*") and wanted[:-2].isdigit():
        milliseconds = int(wanted[:-2])
        if milliseconds < last[0]:
            raise ReplyError(_SMALLER)
        return _next(last) if milliseconds == last[0] else (milliseconds, 0)
    entry_id = parse(wanted)
    if entry_id == FIRST:
        raise ReplyError("ERR The ID specified in XADD must be greater than 0-0")
    if entry_id <= last:
        raise ReplyError(_SMALLER)
    return entry_id


def xlen(server: Server, a: Arguments) -> Any:
    return len(server.value(a[0], Stream) or ())


def xdel(server: Server, a: Arguments) -> Any:
    ids = [parse(word) for word in a[1:]]
    stream = server.value(a[0], Stream)
    return 0 if stream is None else sum(stream.delete(entry_id) for entry_id in ids)


def xrange(server: Server, a: Arguments) -> Any:
    return _entries(server, a[0], a[1], a[2], a[3:], is_reversed=False)


def xrevrange(server: Server, a: Arguments) -> Any:
    return _entries(server, a[0], a[2], a[1], a[3:], is_reversed=True)


def _entries(server: Server, key: bytes, low: bytes, high: bytes, rest: Arguments, *, is_reversed: bool) -> Any:
    first, last = _range(low, high)
    count = number(rest[1]) if rest and rest[0].upper() == b"COUNT" else -1
    stream = server.value(key, Stream)
    if stream is None:
        return []
    ids = stream.between(first, last)
    if is_reversed:
        ids = ids[::-1]
    return [[text(entry_id), stream.entries[entry_id]] for entry_id in (ids if count < 0 else ids[:count])]


def xtrim(server: Server, a: Arguments) -> Any:
    stream = server.value(a[0], Stream)
    if stream is None or a[2] == b"~":
        return 0
    most, gone = number(a[-1]), 0
    while len(stream.ids) > most:
        gone += stream.delete(stream.ids[0])
    return gone


# ---- reading with and without a group


class Read:
    """A parsed XREAD or XREADGROUP."""

    def __init__(self, a: Arguments, *, grouped: bool) -> None:
        self.group = self.consumer = b""
        self.count, self.block_ms, index = -1, None, 0
        while a[index].upper() != b"STREAMS":
            word = a[index].upper()
            if word == b"GROUP" and grouped:
                self.group, self.consumer = a[index + 1], a[index + 2]
                index += 3
            elif word == b"COUNT":
                self.count = number(a[index + 1])
                index += 2
            elif word == b"BLOCK":
                self.block_ms = number(a[index + 1])
                index += 2
            else:
                raise ReplyError("ERR syntax error")
            if index >= len(a):
                raise ReplyError("ERR syntax error")
        rest = a[index + 1 :]
        if not rest or len(rest) % 2:
            command = "xreadgroup" if grouped else "xread"
            raise ReplyError(
                f"ERR Unbalanced '{command}' list of streams: for each stream key an ID or '>' must be specified."
                if grouped
                else f"ERR Unbalanced '{command}' list of streams: for each stream key an ID, '+', or '$' must be specified."
            )
        half = len(rest) // 2
        self.keys, self.ids = rest[:half], rest[half:]


def xreadgroup(server: Server, a: Arguments) -> Any:
    read = Read(a, grouped=True)
    groups = [_group_for_read(server, key, read.group) for key in read.keys]
    found = []
    for key, after, (stream, group) in zip(read.keys, read.ids, groups, strict=True):
        entries = (
            _read_new(server, key, stream, group, read)
            if after == b">"
            else _history(server, stream, group, read, after)
        )
        if entries is not None:
            found.append([key, entries])
    return found or NULL_ARRAY


def _group_for_read(server: Server, key: bytes, name: bytes) -> tuple[Stream, Group]:
    stream = server.value(key, Stream)
    group = stream.groups.get(name) if stream is not None else None
    if stream is None or group is None:
        raise ReplyError(
            f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}' in XREADGROUP with GROUP option"
        )
    return stream, group


def _read_new(server: Server, key: bytes, stream: Stream, group: Group, read: Read) -> list[Any] | None:
    now = server.now_ms()
    consumer = group.consumer(read.consumer, now)
    if not stream.ids or stream.ids[-1] <= group.last_id:
        return None
    ids = stream.ids[bisect_right(stream.ids, group.last_id) :]
    if read.count > 0:
        ids = ids[: read.count]
    consumer.active_ms = now
    for entry_id in ids:
        known = group.pending.get(entry_id)
        if known is not None:  # the group was set back: the entry changes hands
            del group.consumers[known.consumer].pending[entry_id]
        pending = group.pending[entry_id] = consumer.pending[entry_id] = Pending(read.consumer, now, 1)
        server.watch.delivered(key, entry_id, pending)
    group.last_id = ids[-1]
    return [[text(entry_id), stream.entries[entry_id]] for entry_id in ids]


def _history(server: Server, stream: Stream, group: Group, read: Read, after: bytes) -> list[Any]:
    consumer = group.consumer(read.consumer, server.now_ms())
    start = parse(after)
    ids = sorted(entry_id for entry_id in consumer.pending if entry_id > start)
    found = []
    for entry_id in ids[: read.count] if read.count > 0 else ids:
        pending = consumer.pending[entry_id]
        pending.count, pending.delivered_ms = pending.count + 1, server.now_ms()
        found.append([text(entry_id), stream.entries.get(entry_id, NULL_ARRAY)])
    return found


def xread(server: Server, a: Arguments) -> Any:
    read = Read(a, grouped=False)
    found = []
    for index, (key, word) in enumerate(zip(read.keys, read.ids, strict=True)):
        stream = server.value(key, Stream)
        if word == b"$":
            # A blocked read is done again with the id of the moment when it began.
            last = stream.last_id if stream is not None else FIRST
            a[len(a) - len(read.ids) + index] = text(last)
            continue
        after = parse(word)
        ids = stream.between(_next(after), LAST) if stream is not None else []
        if ids:
            entries = [
                [text(entry_id), stream.entries[entry_id]]
                for entry_id in (ids[: read.count] if read.count > 0 else ids)
            ]
            found.append([key, entries])
    return found or NULL_ARRAY


# ---- groups


def xack(server: Server, a: Arguments) -> Any:
    stream = server.value(a[0], Stream)
    group = stream.groups.get(a[1]) if stream is not None else None
    if group is None:
        return 0
    done = 0
    for entry_id in [parse(word) for word in a[2:]]:
        if group.drop(entry_id):
            done += 1
            server.watch.acknowledged(a[0], entry_id)
    return done


def xgroup(server: Server, a: Arguments) -> Any:
    action = a[0].upper()
    stream = server.value(a[1], Stream)
    options = [word.upper() for word in a[4:]]
    if stream is None and not (action == b"CREATE" and b"MKSTREAM" in options):
        raise ReplyError(
            "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM "
            "option to create an empty stream automatically."
        )
    if action == b"CREATE":
        last_id = _position(stream, a[3])
        if stream is None:
            stream = server.made(a[1], Stream)
        if a[2] in stream.groups:
            raise ReplyError("BUSYGROUP Consumer Group name already exists")
        stream.groups[a[2]] = Group(last_id)
        return OK
    group = stream.groups.get(a[2])
    if action == b"DESTROY":
        if group is None:
            return 0
        del stream.groups[a[2]]
        server.signal(a[1])
        return 1
    if group is None:
        raise ReplyError(f"NOGROUP No such consumer group '{a[2].decode()}' for key name '{a[1].decode()}'")
    if action == b"SETID":
        group.last_id = _position(stream, a[3])
        return OK
    if action == b"DELCONSUMER":
        consumer = group.consumers.pop(a[3], None)
        for entry_id in consumer.pending if consumer is not None else ():
            del group.pending[entry_id]
        return 0 if consumer is None else len(consumer.pending)
    if action == b"CREATECONSUMER":
        is_new = a[3] not in group.consumers
        group.consumer(a[3], server.now_ms())
        return int(is_new)
    raise ReplyError(f"ERR unknown subcommand '{a[0].decode()}'. Try XGROUP HELP.")


def _position(stream: Stream | None, word: bytes) -> Id:
    if word == b"$":
        return stream.last_id if stream is not None else FIRST
    return parse(word)


def xinfo(server: Server, a: Arguments) -> Any:
    action = a[0].upper()
    stream = server.value(a[1], Stream)
    if stream is None:
        raise ReplyError("ERR no such key")
    now = server.now_ms()
    if action == b"GROUPS":
        return [_told_group(stream, name, group) for name, group in sorted(stream.groups.items())]
    if action == b"CONSUMERS":
        group = stream.groups.get(a[2])
        if group is None:
            raise ReplyError(f"NOGROUP No such consumer group '{a[2].decode()}' for key name '{a[1].decode()}'")
        return [_told_consumer(name, consumer, now) for name, consumer in sorted(group.consumers.items())]
    raise ReplyError(f"ERR the in-memory engine has no XINFO {action.decode()}")


def _told_group(stream: Stream, name: bytes, group: Group) -> list[Any]:
    return [
        b"name", name, b"consumers", len(group.consumers), b"pending", len(group.pending),
        b"last-delivered-id", text(group.last_id), b"entries-read", None, b"lag", None,
    ]  # fmt: skip


def _told_consumer(name: bytes, consumer: Consumer, now: int) -> list[Any]:
    inactive = max(0, now - consumer.active_ms) if consumer.active_ms >= 0 else -1
    return [
        b"name", name, b"pending", len(consumer.pending), b"idle", max(0, now - consumer.seen_ms), b"inactive", inactive,
    ]  # fmt: skip


def xpending(server: Server, a: Arguments) -> Any:
    stream = server.value(a[0], Stream)
    group = stream.groups.get(a[1]) if stream is not None else None
    if group is None:
        raise ReplyError(f"NOGROUP No such key '{a[0].decode()}' or consumer group '{a[1].decode()}'")
    if len(a) == 2:
        return _summary(group)
    rest, least_idle = a[2:], 0
    if rest[0].upper() == b"IDLE":
        least_idle, rest = number(rest[1]), rest[2:]
    if len(rest) not in (3, 4):
        raise ReplyError("ERR syntax error")
    first, last = _range(rest[0], rest[1])
    most, now = number(rest[2]), server.now_ms()
    pending = group.pending
    if len(rest) == 4:
        if rest[3] not in group.consumers:
            return []
        pending = group.consumers[rest[3]].pending
    found = []
    for entry_id in sorted(pending):
        if len(found) >= most or entry_id > last:
            break
        entry = pending[entry_id]
        idle = max(0, now - entry.delivered_ms)
        if entry_id >= first and idle >= least_idle:
            found.append([text(entry_id), entry.consumer, idle, entry.count])
    return found


def _summary(group: Group) -> list[Any]:
    if not group.pending:
        return [0, None, None, NULL_ARRAY]
    ids = sorted(group.pending)
    holding = [[name, b"%d" % len(one.pending)] for name, one in sorted(group.consumers.items()) if one.pending]
    return [len(ids), text(ids[0]), text(ids[-1]), holding]


def xclaim(server: Server, a: Arguments) -> Any:
    stream = server.value(a[0], Stream)
    group = stream.groups.get(a[1]) if stream is not None else None
    if group is None or stream is None:
        raise ReplyError(f"NOGROUP No such key '{a[0].decode()}' or consumer group '{a[1].decode()}'")
    least_idle, index, ids = max(0, number(a[3])), 4, []
    while index < len(a) and a[index][:1].isdigit():
        ids.append(parse(a[index]))
        index += 1
    now = server.now_ms()
    delivered_ms, just_id, force = now, False, False
    while index < len(a):
        word = a[index].upper()
        if word == b"IDLE":
            delivered_ms = now - number(a[index + 1])
            index += 1
        elif word == b"JUSTID":
            just_id = True
        elif word == b"FORCE":
            force = True
        else:
            raise ReplyError(f"ERR Unrecognized XCLAIM option '{a[index].decode()}'")
        index += 1
    consumer = group.consumer(a[2], now)
    found = []
    for entry_id in ids:
        pending = group.pending.get(entry_id)
        if entry_id not in stream.entries:
            group.drop(entry_id)
            continue
        if pending is None and force:
            pending = group.pending[entry_id] = consumer.pending[entry_id] = Pending(a[2], now, 0)
        if pending is None or (least_idle and now - pending.delivered_ms < least_idle):
            continue
        del group.consumers[pending.consumer].pending[entry_id]
        consumer.pending[entry_id] = pending
        pending.consumer, pending.delivered_ms = a[2], delivered_ms
        pending.count += not just_id
        server.watch.claimed(a[0], entry_id, a[2], now - delivered_ms)
        consumer.active_ms = now
        found.append(text(entry_id) if just_id else [text(entry_id), stream.entries[entry_id]])
    return found
