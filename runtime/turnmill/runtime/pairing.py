"""The pairing of calls and results: each call gets exactly one result, in call order, before the next model call.

Nothing else in the runtime writes results into a transcript, so no history that leaves here can be refused by a
provider for a call without its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnmill.protocol.content import Message, Part, ToolCall, ToolCallPart, ToolResult, ToolResultPart

from .state import CallState, CallStatus


def with_unique_calls(message: Message) -> Message:
    """The message with call ids that differ: a result must tell which call it answers. Some models repeat an id, and
    some use the function's name."""
    calls = message.tool_calls
    if len({call.id for call in calls}) == len(calls) and all(call.id for call in calls):
        return message
    taken: set[str] = set()
    parts: list[Part] = []
    for index, part in enumerate(message.content):
        if isinstance(part, ToolCallPart):
            wanted = part.tool_call.id or "call"
            unique = wanted if wanted not in taken and part.tool_call.id else f"{wanted}_{index}"
            while unique in taken:
                unique += "_"
            taken.add(unique)
            part = ToolCallPart(msgspec.structs.replace(part.tool_call, id=unique))
        assert not isinstance(part, str)
        parts.append(part)
    return msgspec.structs.replace(message, content=parts)


def fault(messages: Sequence[Message]) -> str | None:
    """Why messages that somebody else made may not join a conversation; None where they may. A provider that sees a call
    without its result, or a result without its call, refuses every later request too."""
    open_calls: list[str] = []
    for message in messages:
        for result in message.tool_results:
            if message.role != "tool" or not open_calls or result.tool_call_id != open_calls.pop(0):
                return f"the result of {result.tool_call_id!r} does not come behind its call, in call order"
        if message.role == "tool":
            if not message.tool_results:
                return "a tool message holds no result"
            continue
        if open_calls:
            break
        open_calls = [call.id for call in message.tool_calls]
        if open_calls and message.role != "assistant":
            return f"a {message.role} message holds the tool call {open_calls[0]!r}"
        if len(set(open_calls)) < len(open_calls):
            return "two tool calls of a message have the same id"
    return f"the tool call {open_calls[0]!r} has no result" if open_calls else None


def error_result(call: ToolCall, text: str) -> ToolResult:
    """A result that tells the model what went wrong."""
    return ToolResult(tool_call_id=call.id, tool_name=call.name, result=f"Error: {text}", is_error=True)


def unknown_tool(call: ToolCall, available: list[str]) -> ToolResult:
    return error_result(call, f"unknown tool '{call.name}'. Available: {', '.join(available) or 'none'}")


def invalid_arguments(call: ToolCall) -> ToolResult:
    return error_result(call, f"invalid arguments for '{call.name}': {call.error}")


def timed_out(call: ToolCall, timeout_seconds: float) -> ToolResult:
    return error_result(call, f"execution failed (timeout after {timeout_seconds:g} s)")


def not_started(call: ToolCall, timeout_seconds: float, paused: str | None = None) -> ToolResult:
    """`paused` says why where an operator has paused the call's queue."""
    why = (
        "no worker took the call"
        if paused is None
        else f"the tool's queue is paused ({paused}): no worker took the call"
    )
    return error_result(call, f"execution failed ({why} within {timeout_seconds:g} s; it did not take effect)")


def outcome_unknown(call: ToolCall) -> ToolResult:
    return error_result(call, "execution failed (the worker was lost in mid-call; whether it took effect is unknown)")


def not_executed(call: ToolCall, reason: str) -> ToolResult:
    return error_result(call, f"not executed ({reason})")


def handed_off(call: ToolCall, agent_id: str) -> ToolResult:
    return ToolResult(tool_call_id=call.id, tool_name=call.name, result=f"The conversation goes on with {agent_id}.")


def stopped(call: ToolCall, reason: str) -> ToolResult:
    return error_result(call, f"stopped ({reason}); whether the call took effect is unknown")


def settle(call: CallState, result: ToolResult) -> None:
    """Give a call its one result, under its own id whatever the worker wrote."""
    assert call.status is not CallStatus.DONE, "a call has one result"
    fits = result.tool_call_id == call.tool_call.id and result.tool_name == call.tool_call.name
    if not fits:
        result = ToolResult(
            tool_call_id=call.tool_call.id,
            tool_name=call.tool_call.name,
            result=result.result,
            is_error=result.is_error,
            content=result.content,
            blob=result.blob,
        )
    call.result = result
    call.status = CallStatus.DONE


def closing_messages(calls: list[CallState], turn_id: str, step: int) -> list[Message]:
    """The results of a step as transcript entries, in call order. Every call must be settled."""
    messages = []
    for call in calls:
        assert call.result is not None, f"call {call.tool_call.id} has no result"
        messages.append(Message(role="tool", content=[ToolResultPart(call.result)], turn_id=turn_id, step=step))
    return messages
