"""What a cluster's client computes: a key's hash slot, the key of a command, the map that nodes give. It does no I/O."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

from .link import Argument

SLOTS = 16384
_KEYLESS = frozenset(
    {
        "ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "ECHO", "FLUSHALL", "FLUSHDB", "FUNCTION", "INFO", "KEYS",
        "LASTSAVE", "LATENCY", "PING", "PUBLISH", "SCAN", "SCRIPT", "SLOWLOG", "TIME", "WAIT",
    }
)  # fmt: skip
_SECOND = frozenset({"XGROUP", "XINFO", "OBJECT", "MEMORY", "PUBSUB"})
_NUMBERED = frozenset({"EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "FCALL", "FCALL_RO"})
_STREAMS = frozenset({"XREAD", "XREADGROUP"})
_REFUSALS = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN")


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int


class Refusal(NamedTuple):
    """A cluster's answer to a command that it did not execute: where to send it, or to try it again later."""

    kind: str
    slot: int | None = None
    address: Address | None = None


def slot_of(key: Argument) -> int:
    """CRC16 of the key's hash tag, `{...}`, or of the whole key where it has none."""
    data = key if isinstance(key, bytes) else str(key).encode()
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return binascii.crc_hqx(data, 0) % SLOTS


def key_of(arguments: Sequence[Argument]) -> Argument | None:
    """The first key of a command, by which it is sent; None where any node may execute it."""
    name = arguments[0]
    position = 1
    if name in _NUMBERED:
        position = 3 if int(arguments[2]) else len(arguments)
    elif name in _KEYLESS:
        return None
    elif name in _SECOND:
        position = 2
    elif name in _STREAMS:
        position = list(arguments).index("STREAMS") + 1
    return arguments[position] if position < len(arguments) else None


def refusal_of(error: Exception, asked: Address | None = None) -> Refusal | None:
    """What a cluster's node says instead of executing a command; None for any other error."""
    text = str(error)
    if not text.startswith(_REFUSALS):
        return None
    words = text.split(" ")
    if words[0] not in ("MOVED", "ASK"):
        return Refusal(words[0])
    host, _, port = words[2].rpartition(":")
    return Refusal(words[0], int(words[1]), Address(_host(host, asked), int(port)))


def parse_slots(reply: list[Any], asked: Address) -> list[tuple[int, int, Address]]:
    """CLUSTER SLOTS as (first slot, last slot, primary)."""
    return [
        (int(first), int(last), Address(_host(primary[0], asked), int(primary[1])))
        for first, last, primary, *_replicas in reply
    ]


def _host(host: Any, asked: Address | None) -> str:
    """A node that does not know its own address (yet) means the one that it was reached at."""
    text = host.decode() if isinstance(host, bytes) else host or ""
    if text in ("", "?") and asked is not None:
        return asked.host
    return text.strip("[]")
