"""What is addressed to one consumer: commands, tasks and results.

Commands go from clients to a partition's inbox, tasks from the coordinator to workers, results back to the partition's
results stream. Each kind has a `type` that stands in the entry's field `t`; the body in `d` does not repeat it.

Every task names a call (`"2"` is the model call of step 2, `"2.0"` the first tool call of step 2), an attempt and a
token. A result must echo all three: they are the fence against what comes late, twice or forged.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import msgspec

from .content import Cost, ErrorInfo, Message, ToolResult, Usage
from .events import LiveEvent

OnBusy: TypeAlias = Literal["queue", "reject", "steer", "interrupt"]
Segment: TypeAlias = tuple[int, int, int]
"""Entries `[first, end)` of a list: 0 is the session's transcript, 1 its replacements (2 the new ones of a reply)."""


class Body(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What all bodies share: fields with defaults are left out, unknown fields are ignored."""

    type: ClassVar[str]


class Parent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The call of another turn that a sub-turn answers. `depth` is 1 for the child of a turn that is none itself, whose
    agent has said how deep it may go: `max_depth`."""

    session_id: str
    turn_id: str
    call: str
    attempt: int
    depth: int
    token: str = ""
    max_depth: int | None = None


class StartTurn(Body, frozen=True, kw_only=True):
    """Command: run a turn. `agent` is `name` or `name@version`; `overrides` replace fields of its definition.

    `on_busy` says what happens where another turn is live. With `answer` the command is answered under the turn's id.
    `deadline_ms` is the engine's clock. `rewind_to` leaves out what the transcript holds from that entry on.
    """

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
    on_busy: OnBusy = "queue"
    answer: bool = False
    parent: Parent | None = None
    deadline_ms: int | None = None
    rewind_to: int | None = None
    is_text: bool = False
    """The message was given as a text: the agent's `user_prompt_prefix` goes before it."""
    idempotency: str = ""
    """The name behind the partition of the idempotency key that stands for the turn: it goes with the session."""

    @property
    def has_plain_text(self) -> bool:
        """Whether all it carries is a user's text."""
        plain = (
            len(self.messages) == 1 and isinstance(self.messages[0].content, str) and self.messages[0].role == "user"
        )
        return plain and not self.metadata and not self.overrides and not self.messages[0].metadata


class SteerTurn(Body, frozen=True, kw_only=True):
    """Command: give a live turn another message, before its next model call (`steer`) or as the session's next turn
    (`queue`; the steering's id is that turn's id then). Answered under the steering's id."""

    type: ClassVar[str] = "steer_turn"
    session_id: str
    turn_id: str
    steering_id: str
    message: Message
    mode: Literal["steer", "queue"] = "steer"


class CancelSteering(Body, frozen=True, kw_only=True):
    """Command: take a message back that was not claimed yet."""

    type: ClassVar[str] = "cancel_steering"
    session_id: str
    turn_id: str
    steering_id: str
    request_id: str


class AbortTurn(Body, frozen=True, kw_only=True):
    """Command: stop a turn, wherever it stands. Answered where `request_id` is given."""

    type: ClassVar[str] = "abort_turn"
    session_id: str
    turn_id: str
    request_id: str = ""
    reason: str | None = None


class ResumeTurn(Body, frozen=True, kw_only=True):
    """Command: the results of calls that no worker runs, all or some of them; `message` becomes steering behind them."""

    type: ClassVar[str] = "resume_turn"
    session_id: str
    turn_id: str
    request_id: str
    tool_results: list[ToolResult] = []
    message: Message | None = None


class ApprovalDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    tool_call_id: str
    approved: bool
    reason: str | None = None


class DecideApprovals(Body, frozen=True, kw_only=True):
    """Command: let calls run that wait for a person, or not; one or several."""

    type: ClassVar[str] = "decide_approvals"
    session_id: str
    turn_id: str
    request_id: str
    decisions: list[ApprovalDecision]


class DeleteSession(Body, frozen=True, kw_only=True):
    """Command: remove a session with everything that belongs to it. A live turn is stopped first."""

    type: ClassVar[str] = "delete_session"
    session_id: str
    request_id: str


class HandOff(Body, frozen=True, kw_only=True):
    """Command of a coordinator to itself: a turn goes on with another agent, whose plan is to be resolved."""

    type: ClassVar[str] = "hand_off"
    session_id: str
    turn_id: str
    call: str
    agent: str


class Answer(Body, frozen=True, kw_only=True):
    """What became of a command. `error` says why it changed nothing; `pending` are the calls that the turn waits for."""

    type: ClassVar[str] = "answer"
    turn_id: str = ""
    error: ErrorInfo | None = None
    pending: list[str] = []
    done: bool | None = None
    """Of a cancellation: whether the message was still there. Of an abort: whether it found the turn live."""
    steering_id: str | None = None
    """Of a start that became steering: under which id."""


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
    """Task: one model call. The worker reads the plan by its hash, and the conversation: the entries of `view`, then
    `[view_end, messages)` of the transcript. `injected` stand before entry `inject_at`, for this call alone.

    With `compact` the task is to shorten that conversation, and not to answer: the reply's `view` stands for the entries
    up to `messages`. With `overflow` a provider has refused it as too long, and the newest steps are not spared.
    """

    type: ClassVar[str] = "model_task"
    agent_id: str
    plan: str
    step_number: int
    messages: int
    deadline_ms: int
    with_tools: bool = True
    trace: dict[str, str] = {}
    view: list[Segment] = []
    view_end: int = 0
    injected: list[Message] = []
    inject_at: int = 0
    compact: bool = False
    overflow: bool = False
    metadata: dict[str, Any] = {}
    first_model: int = 0
    """Where to begin in the agent's model and its fallbacks."""
    tenant: str = ""
    provider: str = ""
    """The provider that has limits, where the model's has: such tasks are counted by it."""


class ToolTask(Addressed, frozen=True, kw_only=True):
    """Task: one tool call, or a hook's (`hook` says which). Times are the engine's clock in ms; do not start after
    `start_by_ms`.

    A hook's `arguments` are its event, and its result's value is what it decided. Where it needs the conversation, the
    event says which entries of the transcript (`messages`, and `view` as in a model task).
    """

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
    hook: str | None = None
    idle_timeout_seconds: float | None = None


class ModelReply(Addressed, frozen=True, kw_only=True):
    """Result of a model call: the assistant's message, or `error`. With an error of kind `aborted` the message is what
    had come by then. `usage` and `cost` are told with an error too, where they are known.

    `tail` are live events that the worker did not publish itself: the coordinator publishes them with its commit.
    `output_error` says why the answer is not the JSON that was asked for. `view` and `replacements` answer a task with
    `compact`: list 2 in its segments are these replacements, list 1 those that there were before.
    """

    type: ClassVar[str] = "model_reply"
    message: Message | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    tail: list[LiveEvent] = []
    error: ErrorInfo | None = None
    cost: Cost | None = None
    model: str | None = None
    output_error: str | None = None
    view: list[Segment] | None = None
    replacements: list[Message] = []


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
    entry_fields: dict[str, bytes] = {}
    """The entry's other fields, such as its version `v`."""


class DeliveryLost(Addressed, frozen=True, kw_only=True):
    """The coordinator's finding: the worker that had read a task is gone. Its body is the task's, so it has its token."""

    type: ClassVar[str] = "delivery_lost"


class CallWaiting(Addressed, frozen=True, kw_only=True):
    """The coordinator's finding: no worker took a tool call so far, or (`expired`) until its start timeout. `paused`
    says why where an operator has paused the queue."""

    type: ClassVar[str] = "call_waiting"
    expired: bool = False
    paused: str | None = None


class SubTurnEnded(Addressed, frozen=True, kw_only=True):
    """The end of a sub-turn, told to the call that started it."""

    type: ClassVar[str] = "sub_turn_ended"
    child_turn_id: str
    status: str
    text: str = ""
    error: ErrorInfo | None = None


class TimerFired(Body, frozen=True, kw_only=True):
    """The session's earliest deadline has come. The machine looks at the clock and decides what is due."""

    type: ClassVar[str] = "timer_fired"
    session_id: str


Command: TypeAlias = (
    StartTurn | SteerTurn | CancelSteering | AbortTurn | ResumeTurn | DecideApprovals | DeleteSession | HandOff
)
Task: TypeAlias = ModelTask | ToolTask
WorkerResult: TypeAlias = ModelReply | ToolReply | ToolProgress
Finding: TypeAlias = DeliveryLost | CallWaiting | SubTurnEnded | TimerFired
SessionMessage: TypeAlias = Command | WorkerResult | Finding
AnyMessage: TypeAlias = SessionMessage | Task | UnreadableTask | Answer

COMMANDS: tuple[type[Body], ...] = get_args(Command)
TASKS: tuple[type[Body], ...] = (ModelTask, ToolTask)
RESULTS: tuple[type[Body], ...] = (ModelReply, ToolReply, ToolProgress, UnreadableTask)
FINDINGS: tuple[type[Body], ...] = get_args(Finding)
