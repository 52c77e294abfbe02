"""A session's control record: what the coordinator knows of it between two messages.

It is small whatever the length of the conversation: the transcript stands apart, and the record holds its length. It is
written as a MessagePack array, so fields are only ever added at the end, with a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from turnmill.protocol.content import AttemptUsage, Cost, ErrorInfo, Message, ToolCall, ToolResult, Usage
from turnmill.protocol.messages import Parent, Segment, StartTurn
from turnmill.protocol.specs import HookSpec


class TurnPhase(StrEnum):
    """Where a live turn stands."""

    MODEL = "model"
    """A model call is with the LLM workers."""
    BACKOFF = "backoff"
    """The model call failed; its next attempt waits for its time."""
    TOOLS = "tools"
    """Tool calls are with their workers, or wait for their next attempt."""
    HOOK = "hook"
    """A hook of the agent is with the worker that carries its code."""
    SUSPENDED = "suspended"
    """Nothing runs: calls wait for the host's results, or for a person's approval."""
    ABORTING = "aborting"
    """Stopped: what was under way may still say what it has."""


class Stage(StrEnum):
    """What comes next in a turn, in this order within a step."""

    STEP = "step"
    BEFORE_STEP = "before_step"
    MODEL = "model"
    BEFORE_CALLS = "before_calls"
    """`position` is the call whose hook comes next; the same for the other stages that go through a list."""
    POLICIES = "policies"
    TOOLS = "tools"
    AFTER_CALLS = "after_calls"
    CLOSE = "close"
    AFTER_STEP = "after_step"
    CONDITIONS = "conditions"
    SIGNALS = "signals"
    FINISH = "finish"


class CallStatus(StrEnum):
    """Where a tool call stands."""

    QUEUED = "queued"
    """Not handed out yet: calls run one after the other, or hooks come first."""
    APPROVAL = "approval"
    """Waits for a person to let it run."""
    HOST = "host"
    """Waits for its result from the host: no worker runs it."""
    RUNNING = "running"
    """With a tool worker, or on the way to one."""
    BACKOFF = "backoff"
    """Failed with a retryable error; its next attempt waits for its time."""
    DONE = "done"
    """Has its one result."""


class CallState(msgspec.Struct, array_like=True):
    """One tool call of the running step."""

    index: int
    tool_call: ToolCall
    status: CallStatus = CallStatus.QUEUED
    attempt: int = 1
    failures: int = 0
    losses: int = 0
    due_ms: int = 0
    """The deadline of a running attempt, or the time of the next one."""
    progress_sequence: int = 0
    waiting_announced: bool = False
    result: ToolResult | None = None
    deadline_ms: int = 0
    """The end of a running attempt, whatever progress it makes; `due_ms` may come before it."""
    is_approved: bool = False
    child_turn_id: str = ""
    """The sub-turn that answers the call."""
    progress_bytes: int = 0
    """What this attempt has said of its progress."""
    decided: str = ""
    """How a person decided on the call: approved, denied, or expired where nobody did in time."""


class Steering(msgspec.Struct, array_like=True, frozen=True):
    """A message for a live turn that no step has claimed yet."""

    steering_id: str
    message: Message


class HookState(msgspec.Struct, array_like=True):
    """The one hook that is under way. `index` is the call or condition it is about."""

    point: str
    spec: HookSpec
    event: dict[str, Any]
    index: int = 0
    attempt: int = 1
    losses: int = 0
    due_ms: int = 0


class Halt(msgspec.Struct, array_like=True, frozen=True):
    """Why the turn ends when its step is closed: `kind` is the termination's."""

    kind: str
    name: str | None = None
    reason: str | None = None


class TurnState(msgspec.Struct, array_like=True):
    """The live turn of a session."""

    turn_id: str
    agent_id: str
    plan_id: str
    phase: TurnPhase
    started_ms: int
    first_message: int
    step: int = 0
    step_first_message: int = 0
    attempt: int = 1
    failures: int = 0
    losses: int = 0
    waits: int = 0
    due_ms: int = 0
    """The deadline of the model call, or the time of its next attempt."""
    final_answer: bool = False
    calls: list[CallState] = []
    usage: Usage = Usage()
    step_usage: Usage | None = None
    finish_reason: str | None = None
    has_text: bool = False
    has_tool_calls: bool = False
    last_tool_error: str | None = None
    metadata: dict[str, Any] = {}
    tenant: str = ""
    priority: int = 0
    trace: dict[str, str] = {}
    stage: Stage = Stage.STEP
    position: int = 0
    hook: HookState | None = None
    steering: list[Steering] = []
    steered: list[str] = []
    """The ids of steering that came, so that a repeated command is seen."""
    injected: list[Message] = []
    inject_at: int = 0
    abort_reason: str | None = None
    deadline_ms: int | None = None
    parent: Parent | None = None
    cost: Cost | None = None
    step_cost: Cost | None = None
    attempts: list[AttemptUsage] = []
    signals: list[Any] = []
    last_calls: list[int] = []
    """Checksums of the last step's calls."""
    errors_in_a_row: dict[str, int] = {}
    """Digests of the last step's errors, with how many steps in a row they came."""
    repairs: int = 0
    compactions: int = 0
    compacting: str = ""
    """Why the model task under way shortens the conversation; empty where it answers."""
    overflow: ErrorInfo | None = None
    answered: list[str] = []
    """Calls of the last step whose results came from the host."""
    failed_exchange: ErrorInfo | None = None
    """A single exchange that failed behind the host's results: `resume` repeats it."""
    sub_turns: int = 0
    next_plan_id: str = ""
    """The plan that a handoff chose; the next step takes it."""
    answer: str = ""
    """The last answer, where a parent or a signal extractor is to be told."""
    halt: Halt | None = None
    warning: str = ""
    """What the next step tells the model about its last calls."""
    is_final: bool = False
    """The step's reply asked for no call."""
    first_model: int = 0
    """The first of the agent's models that the step may still ask: those before it have refused."""


class QueuedTurn(msgspec.Struct, array_like=True):
    """A turn that was accepted while another one runs."""

    command: StartTurn
    plan_id: str
    steering: list[Steering] = []
    steered: list[str] = []
    """The ids of steering that came, also of what was taken back."""


class SessionState(msgspec.Struct, array_like=True):
    """The whole record. `timer_ms` is the time for which the session's timer is set, None where there is none."""

    length: int = 0
    turn: TurnState | None = None
    queue: list[QueuedTurn] = []
    timer_ms: int | None = None
    view: list[Segment] = []
    """What the model sees in place of the transcript's entries below `view_end`."""
    view_end: int = 0
    replaced: int = 0
    """How many replacements there are."""
    context_tokens: int = 0
    """The size of the conversation as the last model call told it."""
    deletions: list[str] = []
    """Who waits for the session to be deleted."""
    idle_since_ms: int = 0
    """The end of the last turn; 0 while one is live, or where nobody noted it."""
    joined: list[tuple[str, str]] = []
    """The newest starts that became steering, with the turn that each joined: a start that comes twice, however late, is
    seen."""

    @property
    def plan_ids(self) -> set[str]:
        """The plans that the machine needs to decide on this state."""
        needed = {queued.plan_id for queued in self.queue}
        if self.turn is not None:
            needed.add(self.turn.plan_id)
            if self.turn.next_plan_id:
                needed.add(self.turn.next_plan_id)
        return needed


def copy_state(state: SessionState) -> SessionState:
    """A copy that may be changed without the original seeing it; what is immutable is shared, and so are a turn's other
    lists: they are replaced, never changed."""
    replace = msgspec.structs.replace
    turn = state.turn
    if turn is not None:
        hook = turn.hook if turn.hook is None else replace(turn.hook)
        turn = replace(turn, calls=[replace(call) for call in turn.calls], hook=hook)
    return replace(state, turn=turn, queue=list(state.queue))


BLANK = SessionState()
"""A session that does not exist."""
encode_state = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionState).decode


def decode_state(data: bytes) -> SessionState:
    """A record as it was written, by this version or the one before, which knew no stages."""
    state = _decode(data)
    turn = state.turn
    if turn is not None and turn.stage is Stage.STEP:  # a turn never waits there
        turn.stage = Stage.TOOLS if turn.phase is TurnPhase.TOOLS else Stage.MODEL
    return state
