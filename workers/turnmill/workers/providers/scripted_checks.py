"""What a scripted model objects to in a request, as real providers do: a history with a hole, a window that is too small."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnmill.protocol.content import Message, ReasoningPart, TextPart, ToolCallPart, ToolResult, ToolResultPart

from .base import ProviderError, ProviderRequest
from .http_errors import Problem, error_info


def history_fault(messages: Sequence[Message]) -> str | None:
    """What a strict provider objects to, or None: every tool call has exactly one result directly after it, in call order."""
    open_calls: list[str] = []
    for position, message in enumerate(messages):
        for result in message.tool_results:
            if message.role != "tool":
                return f"message {position}: a {message.role} message holds the result of {result.tool_call_id!r}"
            if not open_calls:
                return f"message {position}: the result of {result.tool_call_id!r} answers no open call"
            if result.tool_call_id != open_calls[0]:
                return f"message {position}: the result of {result.tool_call_id!r} where {open_calls[0]!r} is expected"
            del open_calls[0]
        if message.role == "tool":
            if not message.tool_results:
                return f"message {position}: a tool message without a result"
            continue
        if open_calls:
            return f"message {position}: a {message.role} message where the result of {open_calls[0]!r} is expected"
        open_calls = [call.id for call in message.tool_calls]
        if open_calls and message.role != "assistant":
            return f"message {position}: a {message.role} message holds the tool call {open_calls[0]!r}"
        if len(set(open_calls)) < len(open_calls):
            return f"message {position}: two tool calls have the same id"
    return f"the history ends without the result of {open_calls[0]!r}" if open_calls else None


def refuse_overflow(request: ProviderRequest, window: int) -> None:
    """Raise what a real provider's refusal becomes, where the request has more characters than the window."""
    characters = characters_of(request)
    if characters > window:
        text = (
            f"This model's maximum context length is {window} characters. However, your messages resulted in {characters} "
            "characters. Please reduce the length of the messages."
        )
        problem = Problem(message=text, code="context_length_exceeded", type="invalid_request_error")
        raise ProviderError(error_info(problem, 400))


def characters_of(request: ProviderRequest) -> int:
    """The length of the system prompt, and of the messages' texts, arguments and results."""
    return len(request.system or "") + sum(_characters(message) for message in request.messages)


def _characters(message: Message) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    total = 0
    for part in message.content:
        match part:
            case TextPart(text=text) | ReasoningPart(text=text):
                total += len(text)
            case ToolCallPart(tool_call=call):
                total += len(call.name) + len(msgspec.json.encode(call.arguments))
            case ToolResultPart(tool_result=result):
                total += len(result_text(result))
            case _:
                pass
    return total


def result_text(result: ToolResult) -> str:
    """A tool's result as a model reads it."""
    if result.content is not None:
        return "".join(part.text for part in result.content if isinstance(part, TextPart))
    return result.result if isinstance(result.result, str) else msgspec.json.encode(result.result).decode()
