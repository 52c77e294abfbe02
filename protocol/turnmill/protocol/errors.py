"""The error tree. Every error says what happened, to what, and what the reader can do.

TurnmillError
├── ConfigurationError     settings that contradict each other or the namespace; names the rule
├── DefinitionError        an agent, tool or option that cannot work; raised where it is defined
├── CodecError             bytes that are no message
│   └── MessageTooLarge
├── EngineError            Redis or Valkey
│   ├── EngineUnavailable  cannot be reached; a command's outcome may be unknown
│   ├── EngineReplyError   it answered a command with an error
│   └── EngineUnsuitable   too old, or set up in a way that loses work
├── Superseded             this attempt was replaced: stop, and say nothing
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


class TurnmillError(Exception):
    """Base of all errors of Turnmill."""


class ConfigurationError(TurnmillError):
    """Settings that cannot work together, or do not fit the namespace."""


class DefinitionError(TurnmillError):
    """An agent, tool or option that cannot work as it is defined."""


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


class TurnError(TurnmillError):
    """A turn that gave no result. `result` is what it had by then (a `TurnResult`), `termination` says why it ended."""

    def __init__(
        self, message: str, *, turn_id: str, error_type: str, termination: Any = None, result: Any = None
    ) -> None:
        super().__init__(message)
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
