"""How an answer that is to be JSON of a schema is asked for.

Newer models enforce a schema while they write. For others, and for schemas beyond what can be enforced, it becomes the
input of a tool that they must use; a model that cannot be forced, or an answer that is no object, is told in words.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

import msgspec

from .anthropic_models import model_named
from .base import ProviderRequest

Json: TypeAlias = dict[str, Any]
_ENFORCED_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs"),
        *("title", "description", "default"),
    }
)


class OutputWay(Enum):
    """How the answer comes: as free text, enforced, as a tool's input, or as text that was asked for in words."""

    TEXT = "text"
    ENFORCED = "enforced"
    TOOL = "tool"
    WORDS = "words"


def output_way(request: ProviderRequest) -> OutputWay:
    schema = request.output_schema
    if schema is None:
        return OutputWay.TEXT
    model = model_named(request.model)
    if model.enforces_schemas and closed_schema(schema) is not None:
        return OutputWay.ENFORCED
    # A model that thinks with a budget refuses to be forced.
    free = model.can_be_forced and (model.thinks_adaptively or not thinks(request))
    return OutputWay.TOOL if free and schema.get("type") == "object" else OutputWay.WORDS


def thinks(request: ProviderRequest) -> bool:
    """Whether the request asks for thinking, in whichever way."""
    thinking = request.options.get("thinking")
    if isinstance(thinking, dict):
        return thinking.get("type") != "disabled"
    return request.reasoning is not None and request.reasoning.effort != "none"


def prompt_for(schema: Json) -> str:
    return f"Answer with JSON that matches this JSON Schema, and with nothing else:\n{msgspec.json.encode(schema).decode()}"


def closed_schema(schema: Json) -> Json | None:
    """The schema with objects that take no further properties, which is what can be enforced; None where it cannot."""
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, dict) or any(_reaches(name, name, definitions) for name in definitions):
        return None
    closed = _close(schema)
    return closed if isinstance(closed, dict) else None


def _close(schema: Any) -> Any:
    """None for what cannot be enforced."""
    if not isinstance(schema, dict) or not schema.keys() <= _ENFORCED_KEYWORDS:
        return None
    closed = dict(schema)
    for keyword in ("properties", "$defs"):
        if keyword in schema:
            closed[keyword] = {name: _close(inner) for name, inner in schema[keyword].items()}
            if None in closed[keyword].values():
                return None
    if "anyOf" in schema:
        closed["anyOf"] = [_close(inner) for inner in schema["anyOf"]]
        if None in closed["anyOf"]:
            return None
    if "items" in schema and (closed.update(items=_close(schema["items"])) or closed["items"] is None):
        return None
    if schema.get("type") == "object" or "properties" in schema:
        if isinstance(schema.get("additionalProperties"), dict) or not schema.get("properties"):
            return None
        closed["additionalProperties"] = False
    return closed


def _reaches(name: str, target: str, definitions: Json, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a definition refers to `target`, maybe through others: such schemas have no end."""
    for other in _references(definitions.get(name)):
        if other == target or (other not in seen and _reaches(other, target, definitions, seen | {other})):
            return True
    return False


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for item in schema for name in _references(item)]
    if not isinstance(schema, dict):
        return []
    found = [name for value in schema.values() for name in _references(value)]
    reference = schema.get("$ref")
    return [*found, reference.removeprefix("#/$defs/")] if isinstance(reference, str) else found
