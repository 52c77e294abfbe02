"""From what a tool returns to what the wire carries.

A tool may return any Python value that has a JSON form; bytes, images and files become content. What has no form is found
here, where it can be told to the model, and not when the reply is sent.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic_core import to_jsonable_python

from turnmill.protocol.content import FilePart, ImagePart, OutputPart, TextPart
from turnmill.protocol.values import pack_value

_PARTS = (TextPart, ImagePart, FilePart)
_encode = msgspec.msgpack.Encoder().encode


class ToolOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A rich result: texts, images and files for the model, instead of one JSON value."""

    content: list[OutputPart]


def content_of(value: Any) -> list[OutputPart] | None:
    """The parts of a rich result; None for a plain value."""
    match value:
        case None | str() | int() | dict():
            return None
        case bytes() | bytearray() | memoryview():
            return [FilePart(data=bytes(value))]
        case TextPart() | ImagePart() | FilePart():
            return [value]
        case ToolOutput(content=content):
            return [_checked_part(part) for part in content]
        case [_, *_] if all(isinstance(item, _PARTS) for item in value):
            return list(value)
        case _:
            return None


def _checked_part(part: Any) -> OutputPart:
    if not isinstance(part, _PARTS):
        raise TypeError(f"ToolOutput holds a {type(part).__name__}, not a TextPart, ImagePart or FilePart")
    return part


def wire_value(value: Any) -> Any:
    """The JSON-compatible form of whatever a tool returns, proven to pass through either wire format."""
    return measured_value(value)[0]


def measured_value(value: Any) -> tuple[Any, int]:
    """The JSON-compatible form of a value, proven to pass through either wire format, and its length in bytes there.

    Both formats refuse lone surrogates, and MessagePack integers beyond 64 bits: found here, that is an answer to the
    model; found later, it would be a reply that cannot be sent.
    """
    if type(value) is str and value.isascii():
        return value, len(value)
    try:
        packed = pack_value(value)
        size = len(_encode(packed))
    except TypeError:  # not of JSON's own types
        packed = pack_value(_plain(value))
        size = len(_encode(packed))
    return packed, size


def content_bytes(content: list[OutputPart]) -> int:
    """The length of what rich parts hold."""
    return sum(len(part.text.encode()) if isinstance(part, TextPart) else len(part.data or b"") for part in content)


def _plain(value: Any) -> Any:
    """Models, dataclasses, dates and the like as plain values; bytes stay, for `pack_value` marks them."""
    match value:
        case None | bool() | bytes() | bytearray() | memoryview():
            return value
        case dict():
            plain = {_plain_key(key): _plain(item) for key, item in value.items()}
            if len(plain) < len(value):
                raise ValueError("two keys of a dict have the same JSON form")
            return plain
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case msgspec.Struct():
            return msgspec.to_builtins(value)
        case _:
            return to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="constants")


def _plain_key(key: Any) -> str:
    return key if type(key) is str else next(iter(to_jsonable_python({key: None})))
