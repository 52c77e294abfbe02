"""What callers hand over - messages, results, reasons - made into what is sent. What does not fit is a `DefinitionError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from turnmill.protocol.content import FilePart, ImagePart, Message, TextPart, ToolResult
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.values import pack_value

REASON_CHARACTERS_MAX = 4000
_PARTS = (TextPart, ImagePart, FilePart)
_STEERING_ROLES = ("user", "system")


def messages_of(given: Any) -> list[Message]:
    """What a turn starts with: a text, a list of parts (one user message), a message, or a list of messages."""
    if isinstance(given, str) or _is_parts(given):
        messages = [_said("user", given)]
    else:
        listed = [given] if isinstance(given, Message) else given
        messages = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, bytes | bytearray) else []
        if not messages or not all(isinstance(item, Message) for item in messages):
            raise DefinitionError("a turn starts with a text, a list of parts, a Message or a list of Messages")
    for message in messages:
        _check(message)
    return messages


def steering_of(given: Any, role: str = "user") -> Message:
    """A message for a live turn: a text, a list of parts, or a message of the role user or system."""
    if isinstance(given, Message):
        message = given
    elif isinstance(given, str) or _is_parts(given):
        message = _said(role, given)
    else:
        raise DefinitionError("a turn is told a text, a list of parts (TextPart, ImagePart, FilePart), or a Message")
    if message.role not in _STEERING_ROLES:
        raise DefinitionError(f"a turn is told something by a user or by the system, not by the role {message.role!r}")
    _check(message)
    return message


def results_of(given: Mapping[str, Any] | Sequence[ToolResult | Mapping[str, Any]]) -> list[ToolResult]:
    """A host's results in the form of the wire."""
    if isinstance(given, Mapping):
        given = [{"tool_call_id": call_id, "result": value} for call_id, value in given.items()]
    try:
        return [_result(item) for item in given]
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"a tool result cannot be sent: {error}") from error


def reason_of(given: Any) -> str | None:
    """Why somebody decided something; a long reason is cut."""
    if given is not None and not isinstance(given, str):
        raise DefinitionError(f"a reason is a text, not {given!r}")
    if given is None or len(given) <= REASON_CHARACTERS_MAX:
        return given
    return given[: REASON_CHARACTERS_MAX - 1] + "…"


def _is_parts(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(item, _PARTS) for item in given)


def _said(role: str, content: Any) -> Message:
    return Message(role=role, content=content if isinstance(content, str) else list(content))  # type: ignore[arg-type]


def _check(message: Message) -> None:
    content: Any = message.content
    if not isinstance(content, str | list):
        raise DefinitionError(f"a message holds a text or a list of parts, not {content!r}")
    if message.role in _STEERING_ROLES and _is_empty(content):
        raise DefinitionError(f"a {message.role} message is empty: providers refuse it")
    for part in content if isinstance(content, list) else ():
        _check_source(part)


def _is_empty(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, TextPart) and not part.text and part.blob is None for part in content)
    return bool(content == "")


def _check_source(part: Any) -> None:
    if isinstance(part, ImagePart | FilePart):
        sources = sum(source is not None for source in (part.data, part.url, part.blob))
        if sources != 1:
            kind = type(part).__name__
            raise DefinitionError(f"{kind} has {'both data and url' if sources else 'neither data nor url'}: give one")


def _result(item: ToolResult | Mapping[str, Any]) -> ToolResult:
    made = item if isinstance(item, ToolResult) else _result_of_fields(item)
    if not isinstance(made.is_error, bool):
        raise DefinitionError(f"is_error={made.is_error!r} of {made.tool_call_id!r}: True or False")
    content: Any = made.content
    if isinstance(made.result, bytes | bytearray | memoryview) and content is None:
        made = msgspec.structs.replace(made, result=None, content=[FilePart(data=bytes(made.result))])
    elif content is not None and not _is_parts(content):
        raise DefinitionError(f"content of {made.tool_call_id!r} is a list of TextPart, ImagePart and FilePart")
    for part in made.content or ():
        _check_source(part)
    return msgspec.structs.replace(made, result=pack_value(made.result))


def _result_of_fields(item: Any) -> ToolResult:
    if not isinstance(item, Mapping) or not isinstance(item.get("tool_call_id"), str):
        raise DefinitionError(f"{item!r} is no tool result: write {{'tool_call_id': ..., 'result': ...}}")
    unknown = item.keys() - {"tool_call_id", "result", "is_error", "tool_name", "content"}
    if unknown:
        raise DefinitionError(f"a tool result has no field {', '.join(sorted(map(str, unknown)))}")
    if "result" not in item and item.get("content") is None:
        raise DefinitionError(f"the tool result of {item['tool_call_id']!r} has no 'result'")
    return ToolResult(
        tool_call_id=item["tool_call_id"],
        tool_name=str(item.get("tool_name", "")),
        result=item.get("result"),
        is_error=item.get("is_error", False),
        content=item.get("content"),
    )
