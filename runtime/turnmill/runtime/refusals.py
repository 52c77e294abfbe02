"""From what a coordinator refused to the error that the caller sees."""

from __future__ import annotations

from turnmill.protocol.errors import (
    CommandRefusedError,
    ErrorKind,
    IdempotencyConflictError,
    SessionBusyError,
    TurnEndedError,
)
from turnmill.protocol.messages import Answer

_KINDS: dict[str, type[CommandRefusedError]] = {
    ErrorKind.TURN_ENDED: TurnEndedError,
    ErrorKind.SESSION_BUSY: SessionBusyError,
    ErrorKind.IDEMPOTENCY_CONFLICT: IdempotencyConflictError,
}


def refusal(answer: Answer) -> CommandRefusedError:
    error = answer.error
    assert error is not None
    kind = _KINDS.get(error.kind, CommandRefusedError)
    pending = tuple(answer.pending or error.pending)
    return kind(error.message, kind=error.kind, turn_id=answer.turn_id, pending=pending)
