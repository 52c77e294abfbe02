"""A session's control record: what the coordinator knows of it between two messages.

It is small whatever the length of the conversation: the transcript stands apart, and the record holds its length. It is
written as a MessagePack array, so fields are only ever added at the end, with a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from turnmill.protocol.content import ToolCall, ToolResult, Usage
from turnmill.protocol.messages import StartTurn


class TurnPhase(StrEnum):
    """Where a live turn stands."""

    MODEL = "model"
    """A model call is with the LLM workers."""
    BACKOFF = "backoff"
    """The model call failed; its next attempt waits for its time."""
    TOOLS = "tools"
    """Tool calls are with their workers, or wait for their next attempt."""


class CallStatus(StrEnum):
    """Where a tool call stands."""

    QUEUED = "queued"
    """Not handed out yet: calls run one after the other."""
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


class QueuedTurn(msgspec.Struct, array_like=True):
    """A turn that was accepted while another one runs."""

    command: StartTurn
    plan_id: str


class SessionState(msgspec.Struct, array_like=True):
    """The whole record. `timer_ms` is the time for which the session's timer is set, None where there is none."""

    length: int = 0
    turn: TurnState | None = None
    queue: list[QueuedTurn] = []
    timer_ms: int | None = None

    @property
    def plan_ids(self) -> set[str]:
        """The plans that the machine needs to decide on this state."""
        needed = {queued.plan_id for queued in self.queue}
        if self.turn is not None:
            needed.add(self.turn.plan_id)
        return needed


def copy_state(state: SessionState) -> SessionState:
    """A copy that may be changed without the original seeing it; what is immutable is shared."""
    replace = msgspec.structs.replace
    turn = state.turn
    if turn is not None:
        turn = replace(turn, calls=[replace(call) for call in turn.calls])
    return replace(state, turn=turn, queue=list(state.queue))


encode_state = msgspec.msgpack.Encoder().encode
decode_state = msgspec.msgpack.Decoder(SessionState).decode
