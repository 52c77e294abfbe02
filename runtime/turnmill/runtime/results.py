"""What a turn gave: built from its summary and its part of the transcript, so that nothing is kept twice."""

from __future__ import annotations

from typing import Any

import msgspec

from turnmill.protocol.content import AttemptUsage, Cost, Message, Termination, ToolCall, ToolResult, Usage
from turnmill.protocol.events import (
    Event,
    ReasoningDelta,
    StepFinished,
    StepReset,
    StepStarted,
    TextDelta,
    ToolCallReady,
    ToolResultReady,
    TurnSummary,
)
from turnmill.protocol.json_answer import json_answer
from turnmill.protocol.step_results import StepResult, step_result, step_results, unpack_message
from turnmill.protocol.values import unpack_value

__all__ = [
    "Exchange",
    "ExchangeState",
    "FunctionCall",
    "SeenStep",
    "StepCost",
    "StepResult",
    "TurnResult",
    "build_result",
    "step_result",
    "unpack_message",
]


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call with its result, as the tool returned it."""

    id: str
    name: str
    arguments: dict[str, Any]
    result: Any = None
    is_error: bool = False


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one step used and cost. Each is None where it is not known."""

    step: int
    model: str | None
    usage: Usage | None
    cost: Cost | None = None


class ExchangeState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host's conversation stands: all it takes to go on with it, from any process."""

    turn_id: str
    session_id: str
    status: str


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A settled exchange. Its shape is frozen: it does not change without a major version."""

    content: str | None
    state: ExchangeState
    pending: list[str]
    signals: list[Any]


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn ended, or rests, and what it said.

    `text` is all text of the turn, `answer` that of its last step, `output` the answer as JSON where the agent was to
    give that. `usage` and `total_cost` are sums over all provider calls, those of `attempts`, which gave no answer,
    included. Of a suspended turn `pending` are the calls whose results the host owes, `approvals` those that a person
    must decide on. Times are seconds since the epoch.
    """

    turn_id: str
    session_id: str
    agent_id: str
    status: str
    text: str
    answer: str
    finish_reason: str | None
    usage: Usage
    steps: list[StepResult]
    started_at: float
    ended_at: float
    output_message: Message | None
    termination: Termination
    messages: list[Message]
    function_calls: list[FunctionCall]
    cost: list[StepCost]
    pending: list[ToolCall] = []
    signals: list[Any] = []
    output: Any = None
    approvals: list[ToolCall] = []
    attempts: list[AttemptUsage] = []
    total_cost: Cost | None = None

    @property
    def content(self) -> str | None:
        """The answer; None while the turn is suspended."""
        return None if self.status == "suspended" else self.answer

    @property
    def exchange(self) -> Exchange:
        """What a host that runs the tools itself needs of this result."""
        return Exchange(
            content=self.content,
            state=ExchangeState(turn_id=self.turn_id, session_id=self.session_id, status=self.status),
            pending=[call.id for call in self.pending],
            signals=self.signals,
        )


def build_result(summary: TurnSummary, messages: list[Message], output_type: Any = None) -> TurnResult:
    """The result of a turn; `messages` are the transcript's entries that the summary names, `output_type` the pydantic
    model of its output, where the caller has one."""
    messages = [unpack_message(message) for message in messages]
    steps = step_results(messages)
    return TurnResult(
        turn_id=summary.turn_id,
        session_id=summary.session_id,
        agent_id=summary.agent_id,
        status=summary.status,
        text="".join(step.text for step in steps),
        answer=steps[-1].text if steps else "",
        finish_reason=summary.finish_reason,
        usage=summary.usage,
        steps=steps,
        started_at=summary.started_at,
        ended_at=summary.ended_at,
        output_message=messages[-1] if steps else None,
        termination=summary.termination,
        messages=messages,
        function_calls=[call for step in steps for call in _function_calls(step)],
        cost=[
            StepCost(step=message.step or 0, model=message.model, usage=message.usage, cost=message.cost)
            for message in messages
            if message.role == "assistant" and message.step is not None and not _is_interrupted(message)
        ],
        pending=_calls(messages, summary.pending),
        approvals=_calls(messages, summary.approvals),
        signals=unpack_value(summary.signals),
        output=_output(steps[-1].text, output_type) if summary.is_json and steps else None,
        attempts=summary.attempts,
        total_cost=summary.cost,
    )


class SeenStep:
    """What a reader has seen of the running step, so that `step.finished` need not be looked up in the transcript."""

    __slots__ = ("_calls", "_follows", "_reasoning", "_results", "_text")
    kinds = frozenset(
        kind.type.encode()
        for kind in (TextDelta, ReasoningDelta, ToolCallReady, ToolResultReady, StepStarted, StepReset)
    )
    """The events that it wants to see."""

    def __init__(self, *, complete: bool) -> None:
        """`complete`: the reader sees every event of the channel from its beginning."""
        self._follows = complete
        self._clear()

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._text += event.text
            case ReasoningDelta():
                self._reasoning += event.text or ""
            case ToolCallReady():
                self._calls.append(event.tool_call)
            case ToolResultReady():
                self._results.append(event.tool_result)
            case StepStarted() | StepReset():
                self._clear()
            case _:
                return

    def filled(self, event: StepFinished) -> StepFinished | None:
        """The event with the step's content; None where this reader has not seen all of it."""
        if not self._follows:
            return None
        step = msgspec.structs.replace(
            event.step,
            text=self._text,
            reasoning=self._reasoning or None,
            tool_calls=self._calls,
            tool_results=self._results,
        )
        return StepFinished(step_number=event.step_number, step=step, usage=event.usage)

    def _clear(self) -> None:
        self._text = self._reasoning = ""
        self._calls: list[ToolCall] = []
        self._results: list[ToolResult] = []


def _calls(messages: list[Message], ids: list[str]) -> list[ToolCall]:
    """The calls of these ids, in the order of the ids; an id may come again in a later step."""
    known = {call.id: call for message in messages for call in message.tool_calls}
    return [known[call_id] for call_id in ids if call_id in known]


def _is_interrupted(message: Message) -> bool:
    """What its attempt used stands among the attempts that gave no answer."""
    return message.metadata.get("turnmill") == "interrupted"


def _output(text: str, output_type: Any) -> Any:
    """The answer's JSON; the worker has checked it against the schema."""
    value = json_answer(text)
    return value if output_type is None else output_type.model_validate(value)


def _function_calls(step: StepResult) -> list[FunctionCall]:
    results = {result.tool_call_id: result for result in step.tool_results}
    calls = []
    for call in step.tool_calls:
        result = results.get(call.id)
        value = None if result is None else result.result if result.content is None else result.content
        calls.append(
            FunctionCall(
                id=call.id,
                name=call.name,
                arguments=call.arguments,
                result=value,
                is_error=result.is_error if result is not None else False,
            )
        )
    return calls
