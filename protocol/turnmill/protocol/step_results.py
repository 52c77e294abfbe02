"""The steps of a turn, built from its part of the transcript: for results, and for stop conditions that look at them.

A step is an assistant's message and the results of the calls it asked for. Nothing is kept beside the transcript.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .content import Message, ReasoningPart, ToolCall, ToolResult, ToolResultPart, Usage
from .values import unpack_value


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One model call and the calls it asked for."""

    text: str
    tool_calls: list[ToolCall] = []
    tool_results: list[ToolResult] = []
    reasoning_parts: list[ReasoningPart] = []
    finish_reason: str | None = None
    usage: Usage | None = None


def step_results(messages: Iterable[Message]) -> list[StepResult]:
    """The steps among a turn's messages, in order. Messages that belong to no step (a user's, steering, history) are
    passed over."""
    steps: dict[int, list[Message]] = {}
    for message in messages:
        if message.step is not None and (message.role == "assistant" or message.step in steps):
            steps.setdefault(message.step, []).append(message)
    return [step_result(group) for _, group in sorted(steps.items())]


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


def unpack_message(message: Message) -> Message:
    """The message with bytes in its tools' results restored."""
    if isinstance(message.content, str) or not message.tool_results:
        return message
    parts = [_unpacked(part) if isinstance(part, ToolResultPart) else part for part in message.content]
    return msgspec.structs.replace(message, content=parts)


def _unpacked(part: ToolResultPart) -> ToolResultPart:
    result = part.tool_result
    return ToolResultPart(tool_result=msgspec.structs.replace(result, result=unpack_value(result.result)))
