"""JSON-compatible values that may hold bytes.

Typed fields carry bytes by their type. Where a value is free (a tool's result, a provider's state), bytes are written
as `{"$bytes": "<base64>"}`, and a user's own object that happens to look like that is escaped as `{"$escaped": {...}}`,
so that every value comes back as it was.
"""

from __future__ import annotations

import base64
import math
from typing import Any

_BYTES = "$bytes"
_ESCAPED = "$escaped"
DEPTH_MAX = 200


def pack_value(value: Any, depth: int = 0) -> Any:
    """The JSON-compatible form of a value of dicts, lists, strings, numbers, booleans, None and bytes.

    Raises `TypeError` for anything else and `ValueError` for NaN, infinities and nesting above `DEPTH_MAX`.
    """
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} has no JSON form")
            return value
        case bytes() | bytearray() | memoryview():
            return {_BYTES: base64.b64encode(bytes(value)).decode()}
        case dict():
            packed = {_key(key): pack_value(item, depth + 1) for key, item in value.items()}
            return {_ESCAPED: packed} if len(packed) == 1 and next(iter(packed)) in (_BYTES, _ESCAPED) else packed
        case list() | tuple():
            return [pack_value(item, depth + 1) for item in value]
        case _:
            raise TypeError(f"a {type(value).__name__} has no JSON form")


def unpack_value(value: Any) -> Any:
    """The value that `pack_value` was given. What only looks like packed bytes (a model may write anything) stays."""
    match value:
        case dict():
            if len(value) == 1:
                (key, item), *_ = value.items()
                if key == _BYTES and isinstance(item, str):
                    return _bytes_of(item, value)
                if key == _ESCAPED and isinstance(item, dict):
                    return {name: unpack_value(inner) for name, inner in item.items()}
            return {key: unpack_value(item) for key, item in value.items()}
        case list():
            return [unpack_value(item) for item in value]
        case _:
            return value


def _bytes_of(text: str, otherwise: Any) -> Any:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return otherwise


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key of type {type(key).__name__} has no JSON form")
    return key
