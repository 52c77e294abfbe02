"""Trace context (W3C `traceparent`) of turns, computed rather than handed around.

A turn outlives any process, so the ids of its spans follow from the names of what they cover: every process knows them,
and whoever sees the end writes the span. The trace is the caller's, or follows from the turn's id where there is none.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?\Z")
_SAMPLED = 1


class Caller(NamedTuple):
    """The span in which a turn was started."""

    trace_id: int
    span_id: int
    is_sampled: bool


def caller_of(trace: dict[str, str]) -> Caller | None:
    """The caller's span; None where there is none, or it cannot be read."""
    match = _TRACEPARENT.match(trace.get("traceparent", "")) if trace else None
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return Caller(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & _SAMPLED))


def traceparent(trace_id: int, span_id: int, *, is_sampled: bool = True) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{_SAMPLED if is_sampled else 0:02x}"


def trace_id_of(trace: dict[str, str], turn_id: str) -> int:
    """The 128 bits of the trace that a turn belongs to."""
    caller = caller_of(trace)
    return caller.trace_id if caller is not None else _hash(turn_id, 16)


def turn_span_id(turn_id: str) -> int:
    """The 64 bits of a turn's span."""
    return _hash(turn_id, 8)


def step_span_id(turn_id: str, step: int) -> int:
    return _hash(f"{turn_id}/{step}", 8)


def call_span_id(turn_id: str, call: str, attempt: int) -> int:
    """Of one attempt at a tool call or a hook; `call` is its name on the wire, such as `2.0`."""
    return _hash(f"{turn_id}/{call}/{attempt}", 8)


def child_trace(trace: dict[str, str], turn_id: str, call: str, attempt: int) -> dict[str, str]:
    """What a turn gives to a sub-turn: the same trace, below the call that the sub-turn answers."""
    caller = caller_of(trace)
    is_sampled = caller is None or caller.is_sampled
    parent = traceparent(trace_id_of(trace, turn_id), call_span_id(turn_id, call, attempt), is_sampled=is_sampled)
    return {**trace, "traceparent": parent}


def _hash(name: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=size).digest(), "big") or 1
