"""Large values out of messages and results, and back in: the part that does no I/O.

A *holder* is what can hold a value by reference: a tool result, or a part with text, an image or a file. `take_out`
puts references in the place of what is large, `put_back` does the reverse, and `refs_of` tells what is referred to.
A model's own text is left where it is: how a turn goes on depends on it. Whatever else is above the threshold goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from .content import (
    BlobRef,
    FilePart,
    ImagePart,
    Message,
    OutputPart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

JSON_MEDIA_TYPE = "application/json"
TEXT_MEDIA_TYPE = "text/plain"
STRING_MEDIA_TYPE = "text/plain; content=string"
"""The text of a message whose content is a string, and not a list of parts."""

Holder: TypeAlias = TextPart | ImagePart | FilePart | ToolResult
Store: TypeAlias = Callable[[bytes, str | None], BlobRef]
"""Takes a value and its media type, and gives the reference that it will stand under."""
V = TypeVar("V", Message, ToolResult)
P = TypeVar("P", bound=Part)

_replace = msgspec.structs.replace
_encode_json = msgspec.json.Encoder().encode
_NO_HOLDERS = frozenset({ReasoningPart, ToolCallPart})


def refs_of(message: Message) -> list[str]:
    """The keys of the blobs that a message refers to, as suffixes behind the partition."""
    content = message.content
    if content.__class__ is str:
        return []
    keys: list[str] = []
    for part in content:
        kind = part.__class__
        if kind is ToolResultPart:
            keys += refs_of_result(part.tool_result)  # type: ignore[union-attr]
        elif kind not in _NO_HOLDERS and part.blob is not None:  # type: ignore[union-attr]
            keys.append(part.blob.key)  # type: ignore[union-attr]
    return keys


def refs_of_result(result: ToolResult) -> list[str]:
    """The keys of the blobs that a result refers to, as suffixes behind the partition."""
    keys = [] if result.blob is None else [result.blob.key]
    if result.content is not None:
        keys += [part.blob.key for part in result.content if part.blob is not None]
    return keys


def with_keys(message: Message, renamed: Mapping[str, str]) -> Message:
    """The message with the keys of its references replaced, where `renamed` knows them."""

    def rename(holder: Any) -> Any:
        ref = holder.blob
        if ref is None or ref.key not in renamed:
            return holder
        return _replace(holder, blob=_replace(ref, key=renamed[ref.key]))

    return _map_message(message, rename)


# --- out


def take_out(value: V, threshold: int, store: Store) -> V:
    """The value with references in place of what is above `threshold` bytes; the same object where nothing is."""
    return (
        _out_of_result(value, threshold, store) if isinstance(value, ToolResult) else _out_of(value, threshold, store)
    )


def _out_of_result(result: ToolResult, threshold: int, store: Store) -> ToolResult:
    if result.content is not None:
        content = _out_of_parts(result.content, threshold, store)
        result = result if content is result.content else _replace(result, content=content)
    if _is_small(result.result, threshold):
        return result
    encoded = _encode_json(result.result)
    return result if len(encoded) <= threshold else _replace(result, result=None, blob=store(encoded, JSON_MEDIA_TYPE))


def _is_small(value: Any, threshold: int) -> bool:
    """Whether a plain look is enough to say that the value's JSON is below the threshold."""
    if isinstance(value, str):
        return 6 * len(value) + 2 <= threshold  # a character is six bytes at most: \u001f
    return value is None or isinstance(value, bool | int | float)


def _out_of(message: Message, threshold: int, store: Store) -> Message:
    content, keep_text = message.content, message.role == "assistant"
    if isinstance(content, str):
        if keep_text or 4 * len(content) <= threshold or _size(TextPart(content)) <= threshold:
            return message
        ref = store(content.encode(), STRING_MEDIA_TYPE)
        return _replace(message, content=[TextPart("", blob=ref)])
    parts = _out_of_parts(content, threshold, store, keep_text)
    return message if parts is content else _replace(message, content=parts)


def _out_of_parts(parts: list[P], threshold: int, store: Store, keep_text: bool = False) -> list[P]:
    """What stays is not above the threshold in all: where the parts are, each may have its share of it."""
    sizes = [0 if keep_text and isinstance(part, TextPart) else _size(part) for part in parts]
    share = threshold if sum(sizes) <= threshold else threshold // len(parts)
    changed: list[Any] = [
        _out_of_part(part, store) if size > share else part for part, size in zip(parts, sizes, strict=True)
    ]
    for index, part in enumerate(changed):
        if isinstance(part, ToolResultPart):
            result = _out_of_result(part.tool_result, threshold, store)
            changed[index] = part if result is part.tool_result else ToolResultPart(result)
    return parts if all(new is old for new, old in zip(changed, parts, strict=True)) else changed


def _size(part: Part) -> int:
    """The bytes of a part that could go out."""
    match part:
        case TextPart(text=text):
            return len(text) if text.isascii() else len(text.encode())
        case ImagePart(data=data) | FilePart(data=data):
            return len(data or b"")
        case _:
            return 0


def _out_of_part(part: Any, store: Store) -> Any:
    if isinstance(part, TextPart):
        return TextPart("", blob=store(part.text.encode(), TEXT_MEDIA_TYPE))
    return _replace(part, data=None, blob=store(part.data, part.media_type))


# --- back in


def put_back(value: V, values: Mapping[str, bytes | None]) -> V:
    """The value with its blobs' contents in their places. What is gone or cannot be read becomes a text that says so,
    and a result an error."""

    def fill(holder: Any) -> Any:
        return holder if holder.blob is None else _filled(holder, holder.blob, values.get(holder.blob.key))

    if isinstance(value, ToolResult):
        return _map_result(value, fill)
    message = _map_message(value, fill)
    only = value.content[0] if len(value.content) == 1 else None
    if isinstance(only, TextPart) and only.blob is not None and only.blob.media_type == STRING_MEDIA_TYPE:
        return _replace(message, content=message.text)
    return message


def _filled(holder: Holder, ref: BlobRef, data: bytes | None) -> Holder:
    if data is None:
        return _lost(holder, ref, "is gone: it expired or was deleted")
    try:
        match holder:
            case ToolResult():
                return _replace(holder, result=msgspec.json.decode(data), blob=None)
            case TextPart():
                return TextPart(data.decode())
            case _:
                return _replace(holder, data=data, blob=None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _lost(holder, ref, f"cannot be read ({error})")


def _lost(holder: Holder, ref: BlobRef, reason: str) -> Holder:
    if isinstance(holder, ToolResult):
        text = f"Error: the result ({ref.bytes} bytes) {reason}"
        return _replace(holder, result=text, is_error=True, blob=None)
    return TextPart(f"[content of type {ref.media_type or 'unknown'} ({ref.bytes} bytes) {reason}]")


def _map_message(message: Message, change: Callable[[Any], Any]) -> Message:
    if isinstance(message.content, str):
        return message
    parts: list[Part] = []
    for part in message.content:
        match part:
            case ToolResultPart(tool_result=result):
                parts.append(ToolResultPart(_map_result(result, change)))
            case ReasoningPart() | ToolCallPart():
                parts.append(part)
            case _:
                parts.append(change(part))
    return _replace(message, content=parts)


def _map_result(result: ToolResult, change: Callable[[Any], Any]) -> ToolResult:
    if result.content is not None:
        content: list[OutputPart] = [change(part) for part in result.content]
        result = _replace(result, content=content)
    return change(result)  # type: ignore[no-any-return]
