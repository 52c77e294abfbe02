"""What keys of the in-memory engine hold, and the commands on it: strings, hashes, lists, sets and sorted sets."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .replies import OK, ReplyError, number, score_of, score_text

if TYPE_CHECKING:
    from .server import Server

Arguments = list[bytes]


class Hash(dict[bytes, bytes]):
    """Fields and their values."""


class List(list[bytes]):
    """Elements in their order."""


class Set(dict[bytes, None]):
    """Members, in the order in which they were added: runs with one seed are equal."""


class ZSet(dict[bytes, float]):
    """Members and their scores."""

    def in_order(self) -> list[tuple[bytes, float]]:
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


# ---- strings and keys


def get(server: Server, a: Arguments) -> Any:
    return server.value(a[0], bytes)


def getrange(server: Server, a: Arguments) -> Any:
    value = server.value(a[0], bytes) or b""
    first, last = _bounds(len(value), number(a[1]), number(a[2]))
    return bytes(value[first : last + 1])


def mget(server: Server, a: Arguments) -> Any:
    values = [server.lookup(key) for key in a]
    return [value if isinstance(value, bytes) else None for value in values]


def set_(server: Server, a: Arguments) -> Any:
    key, value, options = a[0], a[1], iter(a[2:])
    expires, keep, give, only = None, False, False, b""
    for raw in options:
        word = raw.upper()
        if word in (b"NX", b"XX"):
            only = word
        elif word == b"PX":
            expires = server.now_ms() + number(next(options))
        elif word == b"EX":
            expires = server.now_ms() + 1000 * number(next(options))
        elif word == b"KEEPTTL":
            keep = True
        elif word == b"GET":
            give = True
        else:
            raise ReplyError("ERR syntax error")
    old = server.value(key, bytes) if give else server.lookup(key)
    if (only == b"NX" and old is not None) or (only == b"XX" and old is None):
        return old if give else None
    server.store(key, value, keep_expiry=keep)
    if expires is not None:
        server.expires[key] = expires
    return old if give else OK


def incr(server: Server, a: Arguments) -> Any:
    if len(a) > 1:
        raise ReplyError("ERR wrong number of arguments for 'incr' command")
    return incrby(server, [a[0], b"1"])


def incrby(server: Server, a: Arguments) -> Any:
    step = number(a[1])
    new = number(server.value(a[0], bytes) or b"0") + step
    server.store(a[0], b"%d" % new, keep_expiry=True)
    return new


def delete(server: Server, a: Arguments) -> Any:
    return sum(server.remove(key) for key in a)


def exists(server: Server, a: Arguments) -> Any:
    return sum(server.lookup(key) is not None for key in a)


def type_(server: Server, a: Arguments) -> Any:
    from .streams import Stream

    names: dict[type, bytes] = {
        bytes: b"string", Hash: b"hash", List: b"list", Set: b"set", ZSet: b"zset", Stream: b"stream", type(None): b"none",
    }  # fmt: skip
    return server.status(names[type(server.lookup(a[0]))])


def pexpire(server: Server, a: Arguments) -> Any:
    if server.lookup(a[0]) is None:
        return 0
    milliseconds = number(a[1])
    if milliseconds <= 0:
        server.remove(a[0])
    else:
        server.expires[a[0]] = server.now_ms() + milliseconds
        server.watch.expiring(a[0])
    return 1


def expire(server: Server, a: Arguments) -> Any:
    return pexpire(server, [a[0], b"%d" % (1000 * number(a[1]))])


def pttl(server: Server, a: Arguments) -> Any:
    if server.lookup(a[0]) is None:
        return -2
    at = server.expires.get(a[0])
    return -1 if at is None else max(0, at - server.now_ms())


def persist(server: Server, a: Arguments) -> Any:
    return int(server.lookup(a[0]) is not None and server.expires.pop(a[0], None) is not None)


def rename(server: Server, a: Arguments) -> Any:
    value = server.lookup(a[0])
    if value is None:
        raise ReplyError("ERR no such key")
    at = server.expires.get(a[0])
    server.remove(a[0])
    server.store(a[1], value)
    if at is not None:
        server.expires[a[1]] = at
    return OK


def sscan(server: Server, a: Arguments) -> Any:
    """Small sets come as a whole."""
    return [b"0", list(server.value(a[0], Set) or ())]


def spop(server: Server, a: Arguments) -> Any:
    members = server.value(a[0], Set)
    count = number(a[1]) if len(a) > 1 else 1
    gone = list(members or ())[:count]
    for member in gone:
        del members[member]
    if gone:
        server.drop_if_empty(a[0])
    return gone if len(a) > 1 else (gone[0] if gone else None)


def srandmember(server: Server, a: Arguments) -> Any:
    members = list(server.value(a[0], Set) or ())
    if len(a) == 1:
        return members[0] if members else None
    return members[: abs(number(a[1]))]


def copy_(server: Server, a: Arguments) -> Any:
    value = server.lookup(a[0])
    if value is None or server.lookup(a[1]) is not None:
        return 0
    server.store(a[1], value if isinstance(value, bytes) else copy.deepcopy(value))
    if a[0] in server.expires:
        server.expires[a[1]] = server.expires[a[0]]
    return 1


# ---- hashes


def hset(server: Server, a: Arguments) -> Any:
    if len(a) % 2 == 0:
        raise ReplyError("ERR wrong number of arguments for 'hset' command")
    fields = server.made(a[0], Hash)
    before = len(fields)
    fields.update(zip(a[1::2], a[2::2], strict=True))
    return len(fields) - before


def hsetnx(server: Server, a: Arguments) -> Any:
    fields = server.made(a[0], Hash)
    if a[1] in fields:
        return 0
    fields[a[1]] = a[2]
    return 1


def hget(server: Server, a: Arguments) -> Any:
    return (server.value(a[0], Hash) or {}).get(a[1])


def hmget(server: Server, a: Arguments) -> Any:
    fields = server.value(a[0], Hash) or {}
    return [fields.get(name) for name in a[1:]]


def hgetall(server: Server, a: Arguments) -> Any:
    return [part for item in (server.value(a[0], Hash) or {}).items() for part in item]


def hvals(server: Server, a: Arguments) -> Any:
    return list((server.value(a[0], Hash) or {}).values())


def hkeys(server: Server, a: Arguments) -> Any:
    return list(server.value(a[0], Hash) or {})


def hlen(server: Server, a: Arguments) -> Any:
    return len(server.value(a[0], Hash) or {})


def hexists(server: Server, a: Arguments) -> Any:
    return int(a[1] in (server.value(a[0], Hash) or {}))


def hdel(server: Server, a: Arguments) -> Any:
    fields = server.value(a[0], Hash)
    if fields is None:
        return 0
    gone = sum(fields.pop(name, None) is not None for name in a[1:])
    server.drop_if_empty(a[0])
    return gone


def hincrby(server: Server, a: Arguments) -> Any:
    step = number(a[2])
    fields = server.made(a[0], Hash)
    try:
        new = number(fields.get(a[1], b"0")) + step
    except ReplyError:
        raise ReplyError("ERR hash value is not an integer") from None
    if not -(2**63) <= new < 2**63:
        raise ReplyError("ERR increment or decrement would overflow")
    fields[a[1]] = b"%d" % new
    return new


def hincrbyfloat(server: Server, a: Arguments) -> Any:
    fields = server.made(a[0], Hash)
    try:
        old = float(fields.get(a[1], b"0"))
    except ValueError:
        raise ReplyError("ERR hash value is not a float") from None
    new = old + float(a[2])
    if not math.isfinite(new):
        raise ReplyError("ERR increment would produce NaN or Infinity")
    text = (f"{new:.17f}".rstrip("0").rstrip(".") or "0").encode()
    fields[a[1]] = text
    return text


# ---- lists


def rpush(server: Server, a: Arguments) -> Any:
    elements = server.made(a[0], List)
    elements.extend(a[1:])
    return len(elements)


def lpush(server: Server, a: Arguments) -> Any:
    elements = server.made(a[0], List)
    elements[:0] = a[:0:-1]
    return len(elements)


def llen(server: Server, a: Arguments) -> Any:
    return len(server.value(a[0], List) or ())


def lrange(server: Server, a: Arguments) -> Any:
    elements = server.value(a[0], List) or []
    first, last = _bounds(len(elements), number(a[1]), number(a[2]))
    return list(elements[first : last + 1])


def lset(server: Server, a: Arguments) -> Any:
    elements = server.value(a[0], List)
    if elements is None:
        raise ReplyError("ERR no such key")
    try:
        elements[number(a[1])] = a[2]
    except IndexError:
        raise ReplyError("ERR index out of range") from None
    return OK


def ltrim(server: Server, a: Arguments) -> Any:
    elements = server.value(a[0], List)
    if elements is not None:
        first, last = _bounds(len(elements), number(a[1]), number(a[2]))
        elements[:] = elements[first : last + 1]
        server.drop_if_empty(a[0])
    return OK


def _bounds(length: int, first: int, last: int) -> tuple[int, int]:
    first = max(0, first + length if first < 0 else first)
    last = last + length if last < 0 else min(last, length - 1)
    return first, last


# ---- sets


def sadd(server: Server, a: Arguments) -> Any:
    members = server.made(a[0], Set)
    before = len(members)
    members.update(dict.fromkeys(a[1:]))
    return len(members) - before


def srem(server: Server, a: Arguments) -> Any:
    members = server.value(a[0], Set)
    if members is None:
        return 0
    before = len(members)
    for member in a[1:]:
        members.pop(member, None)
    gone = before - len(members)
    server.drop_if_empty(a[0])
    return gone


def smembers(server: Server, a: Arguments) -> Any:
    return list(server.value(a[0], Set) or ())


def scard(server: Server, a: Arguments) -> Any:
    return len(server.value(a[0], Set) or ())


def sismember(server: Server, a: Arguments) -> Any:
    return int(a[1] in (server.value(a[0], Set) or ()))


# ---- sorted sets


def zadd(server: Server, a: Arguments) -> Any:
    key, rest = a[0], a[1:]
    options = set()
    while rest and rest[0].upper() in (b"NX", b"XX", b"GT", b"LT", b"CH"):
        options.add(rest.pop(0).upper())
    if not rest or len(rest) % 2:
        raise ReplyError("ERR syntax error")
    scored = [(score_of(rest[index]), rest[index + 1]) for index in range(0, len(rest), 2)]
    members = server.made(key, ZSet)
    added = changed = 0
    for score, member in scored:
        old = members.get(member)
        if old is None:
            if b"XX" not in options:
                members[member] = score
                added += 1
        elif (
            b"NX" not in options and not (b"GT" in options and score <= old) and not (b"LT" in options and score >= old)
        ):
            changed += score != old
            members[member] = score
    server.drop_if_empty(key)
    server.watch.armed(key, [member for _, member in scored])
    return added + changed if b"CH" in options else added


def zrem(server: Server, a: Arguments) -> Any:
    members = server.value(a[0], ZSet)
    if members is None:
        return 0
    gone = sum(members.pop(member, None) is not None for member in a[1:])
    server.drop_if_empty(a[0])
    return gone


def zcard(server: Server, a: Arguments) -> Any:
    return len(server.value(a[0], ZSet) or ())


def zscore(server: Server, a: Arguments) -> Any:
    score = (server.value(a[0], ZSet) or {}).get(a[1])
    return None if score is None else score_text(score)


def zincrby(server: Server, a: Arguments) -> Any:
    step = score_of(a[1])
    members = server.made(a[0], ZSet)
    members[a[2]] = members.get(a[2], 0.0) + step
    return score_text(members[a[2]])


def zcount(server: Server, a: Arguments) -> Any:
    return len(list(_by_score(server, a[0], a[1], a[2])))


def zrangebyscore(server: Server, a: Arguments) -> Any:
    found = list(_by_score(server, a[0], a[1], a[2]))
    with_scores, options = False, iter(a[3:])
    for raw in options:
        word = raw.upper()
        if word == b"WITHSCORES":
            with_scores = True
        elif word == b"LIMIT":
            offset, count = number(next(options)), number(next(options))
            found = found[offset:] if count < 0 else found[offset : offset + count]
        else:
            raise ReplyError("ERR syntax error")
    return _told(found, with_scores)


def zrange(server: Server, a: Arguments) -> Any:
    return _by_rank(server, a, (server.value(a[0], ZSet) or ZSet()).in_order())


def zrevrange(server: Server, a: Arguments) -> Any:
    return _by_rank(server, a, (server.value(a[0], ZSet) or ZSet()).in_order()[::-1])


def zremrangebyscore(server: Server, a: Arguments) -> Any:
    found = list(_by_score(server, a[0], a[1], a[2]))
    members = server.value(a[0], ZSet)
    for member, _ in found:
        del members[member]
    if found:
        server.drop_if_empty(a[0])
    return len(found)


def zpopmin(server: Server, a: Arguments) -> Any:
    members = server.value(a[0], ZSet)
    if members is None:
        return []
    found = members.in_order()[: number(a[1]) if len(a) > 1 else 1]
    for member, _ in found:
        del members[member]
    server.drop_if_empty(a[0])
    return _told(found, True)


def _by_rank(server: Server, a: Arguments, ordered: list[tuple[bytes, float]]) -> Any:
    first, last = _bounds(len(ordered), number(a[1]), number(a[2]))
    return _told(ordered[first : last + 1], any(word.upper() == b"WITHSCORES" for word in a[3:]))


def _by_score(server: Server, key: bytes, low: bytes, high: bytes) -> Iterator[tuple[bytes, float]]:
    least, most = _limit(low), _limit(high)
    for member, score in (server.value(key, ZSet) or ZSet()).in_order():
        above = score > least[0] if least[1] else score >= least[0]
        below = score < most[0] if most[1] else score <= most[0]
        if above and below:
            yield member, score


def _limit(word: bytes) -> tuple[float, bool]:
    is_open = word.startswith(b"(")
    try:
        return float(word[1:] if is_open else word), is_open
    except ValueError:
        raise ReplyError("ERR min or max is not a float") from None


def _told(found: list[tuple[bytes, float]], with_scores: bool) -> list[bytes]:
    if with_scores:
        return [part for member, score in found for part in (member, score_text(score))]
    return [member for member, _ in found]
