"""From what a coordinator refused to the error that the caller sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turnmill.protocol.errors import (
    CommandRefusedError,
    EngineReplyError,
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


_REMEDIES = {
    "OOM": "its memory is full; raise its maxmemory, or delete sessions",
    "MISCONF": "it cannot save its data; look at its disk and its log",
    "NOREPLICAS": "it misses replicas (min-replicas-to-write)",
    "READONLY": "it is a replica; TURNMILL_REDIS_URL must lead to the primary",
}


@contextmanager
def refusal_told(kind: str) -> Iterator[None]:
    """An engine that takes nothing new: what it says, and what helps."""
    try:
        yield
    except EngineReplyError as error:
        for start, remedy in _REMEDIES.items():
            if str(error).startswith(start):
                raise EngineReplyError(f"the engine takes no {kind} now: {remedy} ({error})") from error
        raise


def refusal(answer: Answer) -> CommandRefusedError:
    error = answer.error
    assert error is not None
    kind = _KINDS.get(error.kind, CommandRefusedError)
    pending = tuple(answer.pending or error.pending)
    return kind(
        error.message,
        kind=error.kind,
        turn_id=answer.turn_id,
        pending=pending,
        retry_after_seconds=error.retry_after_seconds,
    )
