"""JSON Schemas that strangers wrote, and values checked against them.

A schema may refer to what is inside of it and to nothing else: whoever checks with it would otherwise fetch what the
reference names, from the network or from its own disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import jsonschema_rs

REASONS_MAX = 5
_REASON_LENGTH_MAX = 300
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_KNOWN_DIALECTS = ("http://json-schema.org/", "https://json-schema.org/")
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"default", "const", "enum", "examples"})


def foreign_reference(schema: Any) -> str | None:
    """The first reference of a schema to what is not inside of it; None where there is none."""
    if isinstance(schema, list):
        return next((found for item in schema if (found := foreign_reference(item)) is not None), None)
    if not isinstance(schema, dict):
        return None
    for key, value in schema.items():
        if key in _REFERENCES and isinstance(value, str) and not value.startswith("#"):
            return value
        if key == "$schema" and isinstance(value, str) and not value.startswith(_KNOWN_DIALECTS):
            return value
        if key in _VALUES:
            continue
        inner = list(value.values()) if key in _MAPS_OF_SCHEMAS and isinstance(value, dict) else value
        found = foreign_reference(inner)
        if found is not None:
            return found
    return None


def validator_of(schema: dict[str, Any], of: str) -> jsonschema_rs.Validator:
    """A validator that fetches nothing. `of` says whose schema it is. Raises `ValueError` where it is no JSON Schema,
    `ImportError` where the library for it is not installed."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema, retriever=_refused)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise ValueError(f"the schema of {of} is no JSON Schema: {reason}") from error


def reasons(validator: jsonschema_rs.Validator, value: Any) -> Iterator[str]:
    """What does not fit, with the place where; at most `REASONS_MAX`."""
    for error in islice(validator.iter_errors(value), REASONS_MAX):
        path = ".".join(str(part) for part in error.instance_path)
        # The message quotes the value, which may be all of an answer.
        reason = error.message
        if len(reason) > _REASON_LENGTH_MAX:
            reason = f"{reason[: _REASON_LENGTH_MAX // 2]} ... {reason[-_REASON_LENGTH_MAX // 2 :]}"
        yield f"{path}: {reason}" if path else reason


def arguments_error(schema: dict[str, Any], arguments: dict[str, Any], of: str) -> str | None:
    """Why arguments do not fit a tool's schema; None where they do. Raises as `validator_of`."""
    validator = _cached_validator(msgspec.json.encode(schema), of)
    return "; ".join(reasons(validator, arguments)) or None


@lru_cache(maxsize=256)
def _cached_validator(schema: bytes, of: str) -> jsonschema_rs.Validator:
    return validator_of(msgspec.json.decode(schema), of)


def _refused(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema, and nothing is fetched")
