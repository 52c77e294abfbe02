"""What is published to watchers: the events of a turn's channel.

The entry `0-N` of the stream `{prefix}:{<partition>}:turn:<turn id>:events` is event N: fields `t` (type), `d` (body)
and `at` (the engine's clock in ms). Numbers are contiguous from 1 and are the resume cursor.

Canonical events are written with the coordinator's commit. Live events (`LiveEvent`) may also be written by LLM
workers while a step runs. A step whose attempt was superseded is announced by `step.reset`: what live events told of
it before is void.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, get_args

import msgspec

from .content import AttemptUsage, Cost, ErrorInfo, Message, Termination, ToolCall, ToolResult, Usage


class EventBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What all events share. `type` stands in the entry's field `t`."""

    type: ClassVar[str]


class StepSummary(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A finished step. Its messages are the entries `[first_message, end_message)` of the session's transcript.

    The wire does not repeat them: `text`, `reasoning`, `tool_calls` and `tool_results` are filled in by the reader, from
    the events before or from the transcript."""

    step_number: int
    first_message: int
    end_message: int
    finish_reason: str | None = None
    usage: Usage | None = None
    cost: Cost | None = None
    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_results: list[ToolResult] = []


class TurnSummary(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a turn ended. Its messages are the entries `[first_message, end_message)` of the session's transcript."""

    turn_id: str
    session_id: str
    agent_id: str
    status: Literal["finished", "failed", "aborted", "suspended"]
    steps: int
    usage: Usage
    started_at: float
    ended_at: float
    first_message: int
    end_message: int
    termination: Termination
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    cost: Cost | None = None
    attempts: list[AttemptUsage] = []
    """Provider calls that were paid for and gave no answer."""
    signals: list[Any] = []
    pending: list[str] = []
    approvals: list[str] = []
    parent_turn_id: str | None = None
    is_json: bool = False
    """The answer is the JSON that the agent was to give."""


class TurnStarted(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "turn.started"
    turn_id: str
    agent_id: str
    session_id: str
    messages: list[Message]
    created_at: float
    parent_turn_id: str | None = None


class StepStarted(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "step.started"
    step_number: int


class TextDelta(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "text.delta"
    text: str
    step_number: int = 0


class ReasoningDelta(EventBody, frozen=True, kw_only=True):
    """`kind`: `delta` and `summary` carry text; `signature` and `state` carry `data` that goes back to the provider."""

    type: ClassVar[str] = "reasoning.delta"
    kind: Literal["summary", "delta", "signature", "state"]
    text: str | None = None
    provider: str = ""
    data: dict[str, Any] = {}
    step_number: int = 0


class ToolCallStarted(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "tool_call.started"
    step_number: int
    index: int
    tool_call_id: str | None = None
    name: str | None = None


class ToolCallDelta(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "tool_call.delta"
    step_number: int
    index: int
    tool_call_id: str | None = None
    name_delta: str | None = None
    arguments_delta: str | None = None


class ToolCallReady(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "tool_call.ready"
    step_number: int
    index: int
    tool_call: ToolCall


class ToolExecutionStarted(EventBody, frozen=True, kw_only=True):
    """The call was handed to its queue (again, where `attempt` is above 1)."""

    type: ClassVar[str] = "tool_execution.started"
    step_number: int
    index: int
    tool_call_id: str
    name: str
    attempt: int = 1


class ToolExecutionWaiting(EventBody, frozen=True, kw_only=True):
    """No worker took the call so far; it fails at the tool's start timeout. `paused` says why where an operator has
    paused the queue."""

    type: ClassVar[str] = "tool_execution.waiting"
    step_number: int
    index: int
    tool_call_id: str
    name: str
    queue: str
    paused: str | None = None


class ToolExecutionProgress(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "tool_execution.progress"
    step_number: int
    index: int
    tool_call_id: str
    name: str
    message: str
    data: dict[str, Any] = {}


class ToolExecutionFinished(EventBody, frozen=True, kw_only=True):
    """Published in order of completion; `tool_result` is None where the call was aborted."""

    type: ClassVar[str] = "tool_execution.finished"
    step_number: int
    index: int
    tool_call_id: str
    name: str
    tool_result: ToolResult | None = None
    duration: float = 0.0
    error: str | None = None
    aborted: bool = False


class ToolResultReady(EventBody, frozen=True, kw_only=True):
    """Published in call order, when all calls of the step have ended."""

    type: ClassVar[str] = "tool_result"
    step_number: int
    index: int
    tool_call_id: str
    tool_result: ToolResult


class StepRetrying(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "step.retrying"
    step_number: int
    attempt: int
    max_attempts: int
    delay: float
    error: str
    usage: Usage | None = None
    cost: Cost | None = None


class StepReset(EventBody, frozen=True, kw_only=True):
    """Attempt `attempt` starts anew: live events of this step so far are void."""

    type: ClassVar[str] = "step.reset"
    step_number: int
    attempt: int


class StepFinished(EventBody, frozen=True, kw_only=True):
    """The step is durable."""

    type: ClassVar[str] = "step.finished"
    step_number: int
    step: StepSummary
    usage: Usage | None = None


class TurnFinished(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "turn.finished"
    result: TurnSummary


class TurnFailed(EventBody, frozen=True, kw_only=True):
    """Also the answer to a turn that was refused; `result` is None where it never started."""

    type: ClassVar[str] = "turn.failed"
    error: str
    error_type: str
    aborted: bool = False
    termination: Termination | None = None
    result: TurnSummary | None = None
    pending: list[str] = []
    """The ids of the calls that the session's live turn waits for, where that is why this one was refused."""
    retry_after_seconds: float | None = None
    """When another try makes sense, where the turn was refused because of too many others."""


class TurnSuspended(EventBody, frozen=True, kw_only=True):
    """The turn waits for its host: `pending` are the ids of calls that no worker runs, `approvals` of those that a person
    must decide on. With `error` a provider call failed, and `resume` repeats it."""

    type: ClassVar[str] = "turn.suspended"
    pending: list[str]
    approvals: list[str] = []
    error: ErrorInfo | None = None
    result: TurnSummary | None = None


class TurnResumed(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "turn.resumed"
    tool_call_ids: list[str] = []


class SteeringQueued(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "steering.queued"
    steering_id: str
    message: Message


class SteeringApplied(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "steering.applied"
    steering_id: str
    step: int


class SteeringDropped(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "steering.dropped"
    steering_id: str
    reason: str


class ApprovalRequested(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "approval.requested"
    step_number: int
    index: int
    tool_call: ToolCall
    expires_at: float | None = None


class ApprovalDecided(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "approval.decided"
    step_number: int
    index: int
    tool_call_id: str
    approved: bool
    reason: str | None = None


class SubTurnStarted(EventBody, frozen=True, kw_only=True):
    """A call started a turn of another agent; its events are on a channel of its own."""

    type: ClassVar[str] = "sub_turn.started"
    step_number: int
    index: int
    tool_call_id: str
    turn_id: str
    session_id: str
    agent_id: str


class SubTurnFinished(EventBody, frozen=True, kw_only=True):
    type: ClassVar[str] = "sub_turn.finished"
    step_number: int
    index: int
    tool_call_id: str
    turn_id: str
    status: str


class AgentChanged(EventBody, frozen=True, kw_only=True):
    """The turn goes on with another agent."""

    type: ClassVar[str] = "agent.changed"
    step_number: int
    agent_id: str
    from_agent_id: str


class HookFinished(EventBody, frozen=True, kw_only=True):
    """A hook, a stop condition, an approval policy or a signal extractor has answered, or failed."""

    type: ClassVar[str] = "hook.finished"
    step_number: int
    point: str
    name: str
    tool_call_id: str | None = None
    duration: float = 0.0
    error: str | None = None


class ContextCompacted(EventBody, frozen=True, kw_only=True):
    """The model sees a shortened conversation from now on; the transcript is whole."""

    type: ClassVar[str] = "context.compacted"
    step_number: int
    reason: Literal["overflow", "trigger"]
    replacements: int


LiveEvent: TypeAlias = dict[str, Any]
"""A live event inside a result: its dict form, `{"type": ..., ...}`."""

Event: TypeAlias = (
    TurnStarted
    | StepStarted
    | TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallReady
    | ToolExecutionStarted
    | ToolExecutionWaiting
    | ToolExecutionProgress
    | ToolExecutionFinished
    | ToolResultReady
    | StepRetrying
    | StepReset
    | StepFinished
    | TurnFinished
    | TurnFailed
    | TurnSuspended
    | TurnResumed
    | SteeringQueued
    | SteeringApplied
    | SteeringDropped
    | ApprovalRequested
    | ApprovalDecided
    | SubTurnStarted
    | SubTurnFinished
    | AgentChanged
    | HookFinished
    | ContextCompacted
)

EVENTS: tuple[type[EventBody], ...] = get_args(Event)
LIVE_EVENTS = (TextDelta, ReasoningDelta, ToolCallStarted, ToolCallDelta)
LIVE_EVENT_TYPES = frozenset(kind.type for kind in LIVE_EVENTS)
ENDED_STATUSES = frozenset({"finished", "failed", "aborted"})
"""What a turn's record says once it has ended."""
TERMINAL_EVENT_TYPES = frozenset({"turn.finished", "turn.failed"})
