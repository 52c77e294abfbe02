"""The error tree. Every error says what happened, to what, and what the reader can do.

TurnmillError
├── ConfigurationError     settings that contradict each other or the namespace; names the rule
├── DefinitionError        an agent, tool or option that cannot work; raised where it is defined
├── NotInConversationError a turn or step that a session's conversation does not have
├── CodecError             bytes that are no message
│   └── MessageTooLarge
├── EngineError            Redis or Valkey
│   ├── EngineUnavailable  cannot be reached; a command's outcome may be unknown
│   ├── EngineReplyError   it answered a command with an error
│   └── EngineUnsuitable   too old, or set up in a way that loses work
├── Superseded             this attempt was replaced: stop, and say nothing
├── CommandRefusedError    a command that does not fit its turn or session; `kind` and `pending` say what it waits for
│   ├── TurnEndedError     the turn has ended already
│   ├── SessionBusyError   another turn is live, and `on_busy` says reject
│   └── IdempotencyConflictError  the key was used with another body
└── TurnError              a turn's end, with what it had by then; raised by `Turn.result()`
    ├── TurnFailedError
    ├── TurnAbortedError
    └── TurnLostError      the channel and the record are gone (expired, deleted)
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class ErrorKind(StrEnum):
    """Stable words for `error_type` in events and `kind` in results."""

    MAX_STEPS_REACHED = "max_steps_reached"
    UNKNOWN_AGENT = "unknown_agent"
    UNKNOWN_TOOL = "unknown_tool"
    QUEUE_FULL = "queue_full"
    TOO_MANY_TURNS = "too_many_turns"
    PROVIDER_ERROR = "provider_error"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    CONTEXT_OVERFLOW = "context_overflow"
    CONTENT_FILTER = "content_filter"
    AUTHENTICATION = "authentication"
    BAD_REQUEST = "bad_request"
    STREAM_BROKEN = "stream_broken"
    TIMEOUT = "timeout"
    DELIVERY_LOST = "delivery_lost"
    EVENT_LIMIT = "event_limit"
    MESSAGE_TOO_LARGE = "message_too_large"
    STATE_LOST = "state_lost"
    INTERNAL = "internal"
    ABORTED = "aborted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    SESSION_BUSY = "session_busy"
    SESSION_EXISTS = "session_exists"
    TOOL_RESULTS_REQUIRED = "tool_results_required"
    APPROVAL_REQUIRED = "approval_required"
    UNKNOWN_TOOL_RESULT = "unknown_tool_result"
    NO_PENDING_TOOLS = "no_pending_tools"
    NO_PENDING_APPROVAL = "no_pending_approval"
    ALREADY_DECIDED = "already_decided"
    STEERING_FULL = "steering_full"
    TURN_ENDED = "turn_ended"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    HOOK_FAILED = "hook_failed"
    REPEATED_TOOL_ERROR = "repeated_tool_error"
    OUTPUT_INVALID = "output_invalid"
    SUB_TURN_LIMIT = "sub_turn_limit"


class TurnmillError(Exception):
    """Base of all errors of Turnmill."""


class ConfigurationError(TurnmillError):
    """Settings that cannot work together, or do not fit the namespace."""


class DefinitionError(TurnmillError):
    """An agent, tool or option that cannot work as it is defined."""


class NotInConversationError(TurnmillError, ValueError):
    """A turn or step that a session's conversation does not have, cannot be cut at, or knows too little of."""


class CodecError(TurnmillError):
    """Bytes that are no message."""


class MessageTooLarge(CodecError):
    """A message above the size limit."""


class EngineError(TurnmillError):
    """An error of Redis or Valkey."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or the connection went while a command was under way (its outcome is unknown)."""


class EngineUnsuitable(EngineError):
    """The engine is too old, or its settings would lose work."""


class EngineReplyError(EngineError):
    """The engine answered a command with an error."""


class Superseded(TurnmillError):
    """The attempt was replaced by another one, or its turn has ended."""


class CommandRefusedError(TurnmillError):
    """A command changed nothing. `kind` is an `ErrorKind`; `pending` are the ids of the calls that the turn waits for;
    `retry_after_seconds` is when another try makes sense, where too many turns are the reason."""

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        turn_id: str = "",
        pending: tuple[str, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.turn_id = turn_id
        self.pending = pending
        self.retry_after_seconds = retry_after_seconds


class TurnEndedError(CommandRefusedError, RuntimeError):
    """The turn has ended: nothing can be said to it any more."""


class SessionBusyError(CommandRefusedError):
    """Another turn is live on the session, and the new one was not to wait."""


class IdempotencyConflictError(CommandRefusedError):
    """The idempotency key was used before, with another body."""


class TurnError(TurnmillError):
    """A turn that gave no result. `result` is what it had by then (a `TurnResult`), `termination` says why it ended,
    `pending` which calls the session's live turn waits for, where that is why, `retry_after_seconds` when another try
    makes sense, where it was refused because of too many others."""

    def __init__(
        self,
        message: str,
        *,
        turn_id: str,
        error_type: str,
        termination: Any = None,
        result: Any = None,
        pending: tuple[str, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.pending = pending
        self.retry_after_seconds = retry_after_seconds
        self.turn_id = turn_id
        self.error_type = error_type
        self.termination = termination
        self.result = result


class TurnFailedError(TurnError):
    """The turn failed or was refused."""


class TurnAbortedError(TurnError):
    """The turn was stopped."""


class TurnLostError(TurnError):
    """Nothing is left of the turn."""
