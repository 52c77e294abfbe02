"""Replies of the in-memory engine: what commands give, and its bytes on the wire (RESP2)."""

from __future__ import annotations

from typing import Any


class ReplyError(Exception):
    """An error reply; its text begins with the code."""


class Status(bytes):
    """A simple string, such as OK."""


class NullArray:
    """The reply of a blocked read that found nothing, and of a transaction that was given up."""


OK = Status(b"OK")
QUEUED = Status(b"QUEUED")
NULL_ARRAY = NullArray()


def encode(reply: Any) -> bytes:
    """A reply as it travels."""
    parts: list[bytes] = []
    _encode(reply, parts)
    return b"".join(parts)


def _encode(reply: Any, parts: list[bytes]) -> None:
    kind = type(reply)
    if kind is bytes:
        parts.append(b"$%d\r\n%b\r\n" % (len(reply), reply))
    elif kind is int or kind is bool:
        parts.append(b":%d\r\n" % reply)
    elif reply is None:
        parts.append(b"$-1\r\n")
    elif kind is list or kind is tuple:
        parts.append(b"*%d\r\n" % len(reply))
        for item in reply:
            _encode(item, parts)
    elif kind is Status:
        parts.append(b"+%b\r\n" % reply)
    elif kind is ReplyError:
        parts.append(b"-%b\r\n" % str(reply).encode())
    elif kind is NullArray:
        parts.append(b"*-1\r\n")
    else:
        raise TypeError(f"{reply!r} is no reply")


def number(word: bytes) -> int:
    """A whole number of 64 bits, as strictly as the engine reads it."""
    try:
        value = int(word)
    except ValueError:
        raise ReplyError("ERR value is not an integer or out of range") from None
    if not -(2**63) <= value < 2**63 or b"%d" % value != word:
        raise ReplyError("ERR value is not an integer or out of range")
    return value


def score_of(word: bytes) -> float:
    try:
        return float(word)
    except ValueError:
        raise ReplyError("ERR value is not a valid float") from None


def score_text(score: float) -> bytes:
    if score == int(score) and abs(score) < 1e17:
        return b"%d" % int(score)
    return repr(score).encode()
