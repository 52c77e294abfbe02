"""What a model gave, made such that every message can carry it.

A lone surrogate has no UTF-8 form, an integer beyond 64 bits no MessagePack form, and a deep value no reader. Found
where they enter, the first becomes U+FFFD, and the others are a mistake in a call that the model is told of.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from turnmill.protocol.content import Message, ToolCall, ToolCallPart
from turnmill.protocol.events import TextDelta
from turnmill.protocol.values import DEPTH_MAX

T = TypeVar("T")

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_encode = msgspec.json.encode


def sendable(value: T) -> T:
    """The same value, a struct or one of JSON's own types, with U+FFFD for each lone surrogate of its texts.

    Raises `RecursionError` for a value that is nested too deep for any message.
    """
    if value.__class__ is TextDelta and value.text.isascii():  # type: ignore[attr-defined]  # most of what comes
        return value
    try:
        _encode(value)
    except UnicodeEncodeError:
        return _replaced(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError):
        pass  # not for its texts: whoever encodes it says what is wrong
    return value


def sendable_message(message: Message) -> Message:
    """The message with sendable texts, and its calls with arguments that can be sent."""
    if not isinstance(message.content, str):
        content = [
            ToolCallPart(sendable_call(part.tool_call)) if isinstance(part, ToolCallPart) else part
            for part in message.content
        ]
        message = msgspec.structs.replace(message, content=content)
    return sendable(message)


def sendable_call(call: ToolCall) -> ToolCall:
    """The call with sendable texts; arguments that cannot be sent give way to an `error` that says why."""
    fault = arguments_fault(call.arguments)
    if fault is not None:
        call = msgspec.structs.replace(call, arguments={}, error=call.error or fault)
    return sendable(call)


def arguments_fault(value: Any, depth: int = 0) -> str | None:
    """Why no message, and no other language, could carry a call's arguments; None where they are fine."""
    if depth > DEPTH_MAX:
        return f"nested deeper than {DEPTH_MAX} levels"
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return next((fault for item in items if (fault := arguments_fault(item, depth + 1)) is not None), None)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of more than 64 bits"
    return None


def _replaced(value: Any) -> Any:
    match value:
        case str():
            return _LONE_SURROGATE.sub(_REPLACEMENT, value)
        case dict():
            return {_replaced(key): _replaced(item) for key, item in value.items()}
        case list() | tuple():
            return [_replaced(item) for item in value]
        case msgspec.Struct():
            fields = {name: _replaced(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        case _:
            return value
