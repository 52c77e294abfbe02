"""What a turn gave: built from its summary and its part of the transcript, so that nothing is kept twice."""

from __future__ import annotations

from typing import Any

import msgspec

from turnmill.protocol.content import Message, ReasoningPart, Termination, ToolCall, ToolResult, Usage
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
from turnmill.protocol.values import unpack_value


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call with its result, as the tool returned it."""

    id: str
    name: str
    arguments: dict[str, Any]
    result: Any = None
    is_error: bool = False


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One model call and the calls it asked for."""

    text: str
    tool_calls: list[ToolCall] = []
    tool_results: list[ToolResult] = []
    reasoning_parts: list[ReasoningPart] = []
    finish_reason: str | None = None
    usage: Usage | None = None


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one step used. `usage` is None where the provider told none."""

    step: int
    model: str | None
    usage: Usage | None


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn ended and what it said.

    `text` is all text of the turn, `answer` that of its last step. `usage` is the sum over its steps. Times are seconds
    since the epoch.
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


def build_result(summary: TurnSummary, messages: list[Message]) -> TurnResult:
    """The result of a turn; `messages` are the transcript's entries that the summary names."""
    messages = [unpack_message(message) for message in messages]
    steps = _steps(messages)
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
            StepCost(step=message.step or 0, model=message.model, usage=message.usage)
            for message in messages
            if message.role == "assistant" and message.step is not None
        ],
    )


def step_result(messages: list[Message]) -> StepResult:
    """The step of an assistant's message and the results behind it."""
    assistant = messages[0]
    return StepResult(
        text=assistant.text,
        tool_calls=assistant.tool_calls,
        tool_results=[result for message in messages[1:] for result in message.tool_results],
        reasoning_parts=assistant.reasoning,
        finish_reason=assistant.finish_reason,
        usage=assistant.usage,
    )


class SeenStep:
    """What a reader has seen of the running step, so that `step.finished` need not be looked up in the transcript."""

    __slots__ = ("_calls", "_follows", "_reasoning", "_results", "_text")

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


def _steps(messages: list[Message]) -> list[StepResult]:
    """Only what this turn wrote: messages that were handed in as history have no step."""
    steps: dict[int, list[Message]] = {}
    for message in messages:
        if message.step is not None:
            steps.setdefault(message.step, []).append(message)
    return [step_result(group) for _, group in sorted(steps.items()) if group[0].role == "assistant"]


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


def unpack_message(message: Message) -> Message:
    """Bytes in free values restored."""
    if not message.tool_results:
        return message
    parts = [
        msgspec.structs.replace(
            part, tool_result=msgspec.structs.replace(part.tool_result, result=unpack_value(part.tool_result.result))
        )
        if hasattr(part, "tool_result")
        else part
        for part in message.content
        if not isinstance(part, str)
    ]
    return msgspec.structs.replace(message, content=parts)
