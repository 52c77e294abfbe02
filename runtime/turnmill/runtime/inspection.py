"""What a namespace tells of its turns: records, the index, events so far. It reads and waits for nothing."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.events import TurnSummary
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.streams import ChannelEvent, read_channel

STATES = ("queued", "running", "suspended", "finished", "failed", "aborted")
_PAGE = 1000
_CHUNK = 200
_decode_summary = msgspec.json.Decoder(TurnSummary).decode
_decode_error = msgspec.json.Decoder(ErrorInfo).decode


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as its record tells it. `summary` is there when it has ended, `error` where it was refused or failed."""

    turn_id: str
    session_id: str
    agent_id: str
    state: str
    created_at: float
    summary: TurnSummary | None = None
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: flat, with times in seconds."""
        summary = self.summary
        return {
            "turn_id": self.turn_id,
            "session_id": self.session_id,
            "agent_id": self.agent_id,
            "state": self.state,
            "created_at": self.created_at,
            "started_at": summary.started_at if summary else None,
            "ended_at": summary.ended_at if summary else None,
            "steps": summary.steps if summary else None,
            "usage": msgspec.to_builtins(summary.usage) if summary else None,
            "termination": msgspec.to_builtins(summary.termination) if summary else None,
            "error": msgspec.to_builtins(self.error) if self.error else None,
        }


async def read_record(engine: Engine, keys: Keys, turn_id: str) -> TurnRecord | None:
    """The record of a turn; None where there is none. Raises `ValueError` for what is no turn id."""
    fields = pairs(await engine.call("HGETALL", keys.of_turn(turn_id).turn(turn_id)))
    return _record(turn_id, fields) if fields else None


async def read_events(engine: Engine, keys: Keys, turn_id: str) -> list[ChannelEvent]:
    """The events of a turn's channel up to now; none where it has expired."""
    channel = keys.of_turn(turn_id).events(turn_id)
    events: list[ChannelEvent] = []
    while True:
        after = events[-1].number if events else 0
        page = await read_channel(engine, channel, after, _PAGE)
        events += page
        if len(page) < _PAGE:
            return events


async def list_turns(
    engine: Engine, keys: Keys, wanted: Callable[[TurnRecord], bool] = lambda record: True, limit: int = 20
) -> list[TurnRecord]:
    """The newest turns of all partitions that are wanted, newest first."""
    found = await asyncio.gather(*[_newest(engine, part, wanted, limit) for part in keys.partitions])
    return heapq.nlargest(limit, [record for records in found for record in records], key=_age_order)


async def turns_of_session(engine: Engine, keys: Keys, session_id: str, limit: int = 20) -> list[TurnRecord]:
    """The newest turns of one session, newest first."""
    return await _newest(engine, keys.of_session(session_id), lambda record: record.session_id == session_id, limit)


async def _newest(
    engine: Engine, keys: PartitionKeys, wanted: Callable[[TurnRecord], bool], limit: int
) -> list[TurnRecord]:
    records: list[TurnRecord] = []
    async for record in _walk(engine, keys):
        if wanted(record):
            records.append(record)
            if len(records) >= limit:
                break
    return records


async def _walk(engine: Engine, keys: PartitionKeys) -> AsyncIterator[TurnRecord]:
    """A partition's index from its newest turn on; turns whose records have expired are passed over."""
    start = 0
    while True:
        names = [name.decode() for name in await engine.call("ZREVRANGE", keys.turns, start, start + _CHUNK - 1)]
        replies = await asyncio.gather(*[engine.call("HGETALL", keys.turn(name)) for name in names])
        for name, reply in zip(names, replies, strict=True):
            if reply:
                yield _record(name, pairs(reply))
        if len(names) < _CHUNK:
            return
        start += _CHUNK


def _record(turn_id: str, fields: dict[bytes, bytes]) -> TurnRecord:
    summary = _decode_summary(fields[b"result"]) if b"result" in fields else None
    if summary is not None and summary.status.encode() != fields.get(b"status"):
        summary = None  # of a rest that is over: the turn goes on
    error = _decode_error(fields[b"error"]) if b"error" in fields else summary.error if summary else None
    return TurnRecord(
        turn_id=turn_id,
        session_id=fields.get(b"session", b"?").decode(),
        agent_id=fields.get(b"agent", b"?").decode(),
        state=fields.get(b"status", b"?").decode(),
        created_at=int(fields.get(b"created", 0)) / 1000,
        summary=summary,
        error=error,
    )


def _age_order(record: TurnRecord) -> tuple[float, str]:
    return record.created_at, record.turn_id
