"""What is addressed to one consumer: commands, tasks and results.

Commands go from clients to a partition's inbox, tasks from the coordinator to workers, results back to the partition's
results stream. Each kind has a `type` that stands in the entry's field `t`; the body in `d` does not repeat it.

Every task names a call (`"2"` is the model call of step 2, `"2.0"` the first tool call of step 2), an attempt and a
token. A result must echo all three: they are the fence against what comes late, twice or forged.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec

from .content import ErrorInfo, Message, ToolResult, Usage
from .events import LiveEvent


class Body(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What all bodies share: fields with defaults are left out, unknown fields are ignored."""

    type: ClassVar[str]


class StartTurn(Body, frozen=True, kw_only=True):
    """Command: run a turn. `agent` is `name` or `name@version`; `overrides` replace fields of its definition."""

    type: ClassVar[str] = "start_turn"
    turn_id: str
    session_id: str
    agent: str
    messages: list[Message]
    overrides: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    tenant: str = ""
    priority: int = 0
    trace: dict[str, str] = {}

    @property
    def has_plain_text(self) -> bool:
        """Whether all it carries is a user's text."""
        plain = (
            len(self.messages) == 1 and isinstance(self.messages[0].content, str) and self.messages[0].role == "user"
        )
        return plain and not self.metadata and not self.overrides and not self.messages[0].metadata


A = TypeVar("A", bound="Addressed")


class Addressed(Body, frozen=True, kw_only=True):
    """What ties tasks and results to one attempt at one call."""

    session_id: str
    turn_id: str
    call: str
    attempt: int
    token: str = ""

    def answer(self, kind: type[A], **fields: Any) -> A:
        """A message of another kind in the name of this one: the same address, with its own fields."""
        return kind(
            session_id=self.session_id,
            turn_id=self.turn_id,
            call=self.call,
            attempt=self.attempt,
            token=self.token,
            **fields,
        )


class ModelTask(Addressed, frozen=True, kw_only=True):
    """Task: one model call. The worker reads the first `messages` entries of the transcript and the plan by its hash."""

    type: ClassVar[str] = "model_task"
    agent_id: str
    plan: str
    step_number: int
    messages: int
    deadline_ms: int
    with_tools: bool = True
    trace: dict[str, str] = {}


class ToolTask(Addressed, frozen=True, kw_only=True):
    """Task: one tool call. Times are the engine's clock in ms; do not start after `start_by_ms`."""

    type: ClassVar[str] = "tool_task"
    tool: str
    tool_call_id: str
    arguments: dict[str, Any]
    agent_id: str
    step_number: int
    idempotency_key: str
    timeout_seconds: float
    start_by_ms: int
    deadline_ms: int
    metadata: dict[str, Any] = {}
    trace: dict[str, str] = {}


class ModelReply(Addressed, frozen=True, kw_only=True):
    """Result of a model call: the assistant's message, or `error`.

    `tail` are live events that the worker did not publish itself: the coordinator publishes them with its commit.
    """

    type: ClassVar[str] = "model_reply"
    message: Message | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    tail: list[LiveEvent] = []
    error: ErrorInfo | None = None


class ToolReply(Addressed, frozen=True, kw_only=True):
    """Result of a tool call. A tool's own error is a result with `is_error`; `error.retryable` asks for a new attempt."""

    type: ClassVar[str] = "tool_reply"
    result: ToolResult | None = None
    error: ErrorInfo | None = None
    duration_seconds: float = 0.0


class ToolProgress(Addressed, frozen=True, kw_only=True):
    """Progress of a running tool call. `sequence` counts from 1 in each attempt, so that a repetition is seen."""

    type: ClassVar[str] = "tool_progress"
    sequence: int
    message: str
    data: dict[str, Any] = {}


class UnreadableTask(Body, frozen=True, kw_only=True):
    """A worker's report that it could not read a task: the entry's fields go to the dead letters."""

    type: ClassVar[str] = "unreadable_task"
    stream: str
    entry_id: str
    reason: str
    entry_type: str = ""
    entry_body: bytes = b""


class DeliveryLost(Addressed, frozen=True, kw_only=True):
    """The coordinator's finding: the worker that had read a task is gone. Its body is the task's, so it has its token."""

    type: ClassVar[str] = "delivery_lost"


class CallWaiting(Addressed, frozen=True, kw_only=True):
    """The coordinator's finding: no worker took a tool call so far, or (`expired`) until its start timeout."""

    type: ClassVar[str] = "call_waiting"
    expired: bool = False


class TimerFired(Body, frozen=True, kw_only=True):
    """The session's earliest deadline has come. The machine looks at the clock and decides what is due."""

    type: ClassVar[str] = "timer_fired"
    session_id: str


Command: TypeAlias = StartTurn
Task: TypeAlias = ModelTask | ToolTask
WorkerResult: TypeAlias = ModelReply | ToolReply | ToolProgress
Finding: TypeAlias = DeliveryLost | CallWaiting | TimerFired
SessionMessage: TypeAlias = Command | WorkerResult | Finding
AnyMessage: TypeAlias = SessionMessage | Task | UnreadableTask

COMMANDS: tuple[type[Body], ...] = (StartTurn,)
TASKS: tuple[type[Body], ...] = (ModelTask, ToolTask)
RESULTS: tuple[type[Body], ...] = (ModelReply, ToolReply, ToolProgress, UnreadableTask)
FINDINGS: tuple[type[Body], ...] = (DeliveryLost, CallWaiting, TimerFired)
