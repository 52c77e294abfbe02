"""The values that users write into definitions, made into what is published. What does not fit is a `ValueError`.

Each function takes the short forms (a word, a dict, a pydantic model class) and the struct itself, and gives the struct.
"""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from turnmill.protocol.schemas import foreign_reference
from turnmill.protocol.specs import Compaction, OutputSpec, Reasoning, RetryPolicy
from turnmill.protocol.values import pack_value

S = TypeVar("S", bound=msgspec.Struct)

_LEAST: dict[type[msgspec.Struct], dict[str, float]] = {
    RetryPolicy: {"max_attempts": 1, "initial_delay_seconds": 0, "max_delay_seconds": 0, "backoff": 1},
    Compaction: {"trigger_tokens": 1, "tool_output_bytes": 1, "keep_steps": 0},
    Reasoning: {"budget_tokens": 0},
    OutputSpec: {"repairs": 0},
}
_OUTPUT_NAME_MAX = 64


def struct_of(kind: type[S], value: Any) -> S:
    """A struct from itself or from a dict of its fields, with types and ranges checked."""
    fields = msgspec.to_builtins(value) if isinstance(value, kind) else value
    if not isinstance(fields, dict):
        raise ValueError(f"{value!r} is no {kind.__name__}: give {kind.__name__}(...) or a dict of its fields")
    unknown = [str(name) for name in fields if name not in kind.__struct_fields__]
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}; it has {known}")
    try:
        made = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
    for name, least in _LEAST.get(kind, {}).items():
        given = getattr(made, name)
        if given is not None and given < least:
            raise ValueError(f"{kind.__name__}({name}={given}): at least {least:g}")
    return made


def compaction_of(value: Any) -> Compaction:
    """From a dict of fields or a `Compaction`. An agent as the summarizer lends its model and its instructions."""
    made = struct_of(Compaction, _with_summarizing_model(value))
    if made.summarizer is not None:
        check_model(made.summarizer)
    return made


def _with_summarizing_model(value: Any) -> Any:
    fields = (
        dict(value)
        if isinstance(value, dict)
        else msgspec.structs.asdict(value)
        if isinstance(value, Compaction)
        else {}
    )
    describe = getattr(fields.get("summarizer"), "agent_spec", None)
    if describe is None:
        return value
    spec = describe()
    return {**fields, "summarizer": spec.model, "instructions": fields.get("instructions") or spec.system}


def reasoning_of(value: Any) -> Reasoning:
    """From an effort, a dict of fields, or a `Reasoning`."""
    made = struct_of(Reasoning, {"effort": value} if isinstance(value, str) else value)
    if made.effort is None and made.budget_tokens is None:
        raise ValueError("Reasoning says nothing: give an effort, or budget_tokens")
    return made


def output_spec_of(value: Any) -> OutputSpec:
    """From a JSON Schema, a pydantic model class, or an `OutputSpec`, which also says the number of repairs."""
    if isinstance(value, OutputSpec):
        made = struct_of(OutputSpec, value)
        return msgspec.structs.replace(made, schema=json_schema_of(made.schema), name=_output_name(made.name))
    schema = json_schema_of(value)
    title = value.__name__ if isinstance(value, type) else value.get("title", "")
    return OutputSpec(schema=schema, name=_output_name(title if isinstance(title, str) else ""))


def model_class_of(value: Any) -> type[BaseModel] | None:
    """The value where it is a pydantic model class."""
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def json_schema_of(value: Any) -> dict[str, Any]:
    """The JSON Schema of a pydantic model class, or a copy of one that was written as a dict."""
    model = model_class_of(value)
    if model is not None:
        return _schema_of_class(model)
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no schema: give a JSON Schema as a dict, or a pydantic model class")
    try:
        pack_value(value)
        schema: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema is no JSON: {error}") from None
    _check_schema(schema)
    return schema


def check_model(value: str) -> None:
    if not all(value.partition(":")[::2]):
        raise ValueError(f"{value!r}: write provider:model, such as openai:gpt-5-mini or scripted:demo")


def check_signal(value: Any) -> None:
    """An `AbortSignal`, or what behaves like one: `is_set()`, and `wait()` as a coroutine."""
    if not callable(getattr(value, "is_set", None)) or not inspect.iscoroutinefunction(getattr(value, "wait", None)):
        raise ValueError(f"{value!r} is no signal: give an AbortSignal, or an object with is_set() and `async wait()`")


@lru_cache(maxsize=256)
def _schema_of_class(model: type[BaseModel]) -> dict[str, Any]:
    try:
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise ValueError(f"{model.__name__} has no JSON Schema: {error.message}") from None
    _check_references(schema)
    return schema


def _check_schema(schema: dict[str, Any]) -> None:
    """Against the meta schema, where the library for it is there: it comes with what LLM workers need."""
    _check_references(schema)
    try:
        from jsonschema_rs import ValidationError, meta
    except ImportError:
        return
    try:
        meta.validate(schema)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.instance_path)
        raise ValueError(f"the schema is no JSON Schema: {where or 'it'}: {error.message}") from None
    except ValueError as error:
        raise ValueError(f"the schema is no JSON Schema: {error}") from None


def _check_references(schema: dict[str, Any]) -> None:
    reference = foreign_reference(schema)
    if reference is not None:
        raise ValueError(
            f"the schema refers to {reference!r}, which is not inside of it: nothing is fetched, so put what it names into "
            "its $defs and refer to that as #/$defs/NAME"
        )


def _output_name(title: str) -> str:
    """As providers take it: letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", title).strip("_")[:_OUTPUT_NAME_MAX] or "response"
