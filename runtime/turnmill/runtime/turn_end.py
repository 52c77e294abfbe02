"""How a turn ended, or rests, as its record and its last event tell it: the event again, and the caller's result or error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind, TurnAbortedError, TurnFailedError, TurnLostError
from turnmill.protocol.events import TurnFailed, TurnFinished, TurnSummary, TurnSuspended

from .results import TurnResult
from .state import SessionState, decode_state

LastEvent: TypeAlias = TurnFinished | TurnFailed | TurnSuspended
_decode_summary = msgspec.json.Decoder(TurnSummary).decode
_decode_error = msgspec.json.Decoder(ErrorInfo).decode


def event_of_record(record: Mapping[bytes, bytes]) -> LastEvent | None:
    """The last event of a turn whose channel is gone, or that rests; None where its record tells neither."""
    if b"result" in record:
        return _event_of(_decode_summary(record[b"result"]))
    if b"error" not in record:
        return None
    error = _decode_error(record[b"error"])
    aborted = record.get(b"status") == b"aborted"
    return TurnFailed(
        error=error.message,
        error_type=error.kind,
        aborted=aborted,
        pending=error.pending,
        retry_after_seconds=error.retry_after_seconds,
    )


def is_live(session: bytes | None, turn_id: str) -> bool:
    """Whether a session's stored state has the turn, running or waiting for its place."""
    state = decode_state(session) if session else SessionState()
    running = state.turn is not None and state.turn.turn_id == turn_id
    return running or any(queued.command.turn_id == turn_id for queued in state.queue)


def lost_turn(turn_id: str, what: str) -> TurnLostError:
    """The engine does not have (any more) what belongs to a turn that it once had."""
    return TurnLostError(f"turn {turn_id} is lost: {what}", turn_id=turn_id, error_type=ErrorKind.STATE_LOST)


def unknown_turn(turn_id: str, namespace: str) -> TurnLostError:
    text = f"nothing is known of turn {turn_id}: it expired (TURNMILL_RECORD_TTL), or was never accepted in the namespace {namespace!r}"
    return TurnLostError(text, turn_id=turn_id, error_type="unknown_turn")


def told_status(record: Mapping[bytes, bytes]) -> str:
    return f"its record says {record.get(b'status', b'?').decode()!r}"


def _event_of(summary: TurnSummary) -> LastEvent:
    if summary.status == "finished":
        return TurnFinished(result=summary)
    if summary.status == "suspended":
        return TurnSuspended(pending=summary.pending, approvals=summary.approvals, error=summary.error, result=summary)
    error = summary.error or ErrorInfo(kind=summary.status, message=f"the turn {summary.status}")
    return TurnFailed(
        error=error.message,
        error_type=error.kind,
        aborted=summary.status == "aborted",
        termination=summary.termination,
        result=summary,
    )


def result_or_error(turn_id: str, event: LastEvent, result: TurnResult | None) -> TurnResult:
    """What the caller gets. Raises `TurnFailedError` or `TurnAbortedError` with the partial result; a rest whose cause is
    a failed provider call raises too, and the turn may be resumed all the same."""
    if isinstance(event, TurnFailed):
        kind = TurnAbortedError if event.aborted else TurnFailedError
        raise kind(
            event.error,
            turn_id=turn_id,
            error_type=event.error_type,
            termination=event.termination,
            result=result,
            pending=tuple(event.pending),
            retry_after_seconds=event.retry_after_seconds,
        )
    assert result is not None
    if isinstance(event, TurnSuspended) and event.error is not None:
        raise TurnFailedError(
            event.error.message,
            turn_id=turn_id,
            error_type=event.error.kind,
            termination=result.termination,
            result=result,
            pending=tuple(event.pending),
        )
    return result
