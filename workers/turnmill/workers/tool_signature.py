"""From a function's signature and docstring to the arguments a model may send: their JSON Schema and their validation.

Everything is read once, where the tool is defined, and what cannot be described is a `DefinitionError` there.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, cast, get_args, get_type_hints

import docstring_parser
import msgspec
from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import SchemaError, to_jsonable_python
from typing_extensions import TypedDict

from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.schemas import foreign_reference
from turnmill.protocol.values import pack_value

from .tool_context import ToolContext


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool's function takes. `validate` makes its keyword arguments, `context` names the parameter for the context."""

    description: str
    schema: dict[str, Any]
    validate: Callable[[Mapping[str, Any]], dict[str, Any]]
    context: str | None


def read_signature(function: Callable[..., Any], tool_name: str) -> Signature:
    """Raises `DefinitionError` for a function that a model cannot call."""
    parameters, context = _read_parameters(function, tool_name)
    arguments = _arguments_adapter(tool_name, parameters)
    documentation = _read_docstring(function)
    return Signature(
        description=(documentation.description or "").strip(),
        schema=_arguments_schema(tool_name, arguments, parameters, documentation),
        validate=arguments.validator.validate_python,
        context=context,
    )


class _Parameter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


def _read_parameters(function: Callable[..., Any], tool_name: str) -> tuple[list[_Parameter], str | None]:
    """The parameters that the model fills in, and the name of the one that takes the context."""
    signature = inspect.signature(function).parameters.values()
    hints = _parameter_types(function, tool_name, {item.name: item.annotation for item in signature})
    parameters, contexts = [], []
    for item in signature:
        _check_parameter(tool_name, item)
        if _takes_context(hints[item.name]):
            contexts.append(item.name)
        else:
            parameters.append(_Parameter(name=item.name, annotation=hints[item.name], default=item.default))
    if len(contexts) > 1:
        raise DefinitionError(f"tool {tool_name!r} takes the ToolContext more than once: {', '.join(contexts)}")
    return parameters, contexts[0] if contexts else None


def _check_parameter(tool_name: str, item: inspect.Parameter) -> None:
    where = f"tool {tool_name!r}, parameter {item.name!r}"
    if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD):
        raise DefinitionError(
            f"{where}: a model fills in named arguments only, so *args and **kwargs cannot be described"
        )
    if item.kind is item.POSITIONAL_ONLY:
        raise DefinitionError(f"{where} is positional-only: arguments are passed by name, remove the `/`")
    if item.annotation is item.empty:
        raise DefinitionError(f"{where} has no type: annotate it, so that the model knows what to send")
    if isinstance(item.default, FieldInfo):
        raise DefinitionError(f"{where}: write `Annotated[type, Field(...)] = default` instead of `= Field(...)`")


def _parameter_types(function: Callable[..., Any], tool_name: str, annotations: dict[str, Any]) -> dict[str, Any]:
    """Annotations with names in strings resolved. What the function returns is not described, so it is not looked at."""
    described = types.SimpleNamespace(__annotations__=annotations)
    try:
        return get_type_hints(described, inspect.unwrap(function).__globals__, include_extras=True)
    except Exception as error:  # a name, attribute, syntax or type error of the user's annotation
        raise DefinitionError(
            f"tool {tool_name!r}: the type of a parameter cannot be resolved ({error}); types must be importable where the "
            "tool is defined, at module level and outside of `if TYPE_CHECKING`"
        ) from error


def _takes_context(annotation: Any) -> bool:
    return annotation is ToolContext or ToolContext in get_args(annotation)


def _arguments_adapter(tool_name: str, parameters: list[_Parameter]) -> TypeAdapter[Any]:
    """A typed dict of the arguments: unlike a model's fields, its keys may have any name, and it validates to a dict that
    is passed on as it is. An argument that was left out stays out, so that the function's own default applies."""
    fields = {item.name: item.annotation if item.required else NotRequired[item.annotation] for item in parameters}
    arguments = cast("Any", TypedDict)("Arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        return TypeAdapter(arguments)
    except (PydanticUserError, SchemaError, TypeError) as error:
        raise DefinitionError(
            f"tool {tool_name!r} has a parameter of a type that cannot be validated: {error}"
        ) from error


def _arguments_schema(
    tool_name: str, arguments: TypeAdapter[Any], parameters: list[_Parameter], documentation: docstring_parser.Docstring
) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = _without_titles(arguments.json_schema())
    except PydanticUserError as error:
        raise DefinitionError(f"tool {tool_name!r} has a parameter of a type without a JSON Schema: {error}") from error
    descriptions = {item.arg_name: item.description for item in documentation.params if item.description}
    for item in parameters:
        described = schema["properties"][item.name]
        if item.name in descriptions:
            described.setdefault("description", descriptions[item.name])
        if not item.required:
            _describe_default(described, item.default)
    reference = foreign_reference(schema)
    if reference is not None:
        raise DefinitionError(
            f"tool {tool_name!r} has a parameter whose schema refers to {reference!r}, which is not inside of it"
        )
    return schema


def _describe_default(schema: dict[str, Any], default: Any) -> None:
    try:
        schema["default"] = pack_value(to_jsonable_python(default))
    except (ValueError, TypeError):
        pass  # a default that has no JSON form is the function's own matter


_MAPS_OF_SCHEMAS = frozenset({"properties", "$defs", "patternProperties"})
_VALUES = frozenset({"default", "const", "enum", "examples"})


def _without_titles(schema: Any) -> Any:
    """The titles repeat the names in other words: tokens that tell a model nothing."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS:
            bare[key] = {name: _without_titles(item) for name, item in value.items()}
        elif key in _VALUES:
            bare[key] = value
        elif key != "title":
            bare[key] = _without_titles(value)
    return bare


def _read_docstring(function: Callable[..., Any]) -> docstring_parser.Docstring:
    text = inspect.getdoc(function) or ""
    try:
        return docstring_parser.parse(text)
    except docstring_parser.ParseError:
        plain = docstring_parser.Docstring()
        plain.short_description = text
        return plain
