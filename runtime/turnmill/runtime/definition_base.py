"""What definitions share: pydantic's checks in our words, the checks of their fields, and how fields are published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import RetryPolicy, StopCondition, ToolSpec

from .hook_definitions import HookCollector, check_approval, check_hook, check_stop_condition, spec_of
from .option_values import check_model, compaction_of, output_spec_of, reasoning_of, struct_of
from .tool_definitions import own_specs, tool_names

TOOL_CHOICES = (None, "auto", "none", "required")
"""Words; any other `tool_choice` is the name of a tool."""


class Definition(BaseModel):
    """Pydantic's checks, with our words."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise DefinitionError(_readable(type(self).__name__, error)) from None


class Options(Definition):
    """The checks that an agent and a turn's options share."""

    @field_validator("tools", mode="before", check_fields=False)
    @classmethod
    def _known_tools(cls, value: Any) -> Any:
        if value is None or isinstance(value, str) or not isinstance(value, Sequence):
            return value
        tools = [_as_tool(item) for item in value]
        names = tool_names(tools)
        double = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if double is not None:
            raise ValueError(f"two tools are called {double!r}: give one of them another name")
        return tools

    @field_validator("stop_when", mode="before", check_fields=False)
    @classmethod
    def _conditions(cls, value: Any) -> Any:
        if value is None:
            return value
        conditions = list(value) if isinstance(value, list | tuple) else [value]
        for condition in conditions:
            check_stop_condition(condition)
        return conditions

    @field_validator("approvals", mode="before", check_fields=False)
    @classmethod
    def _approvals(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, Mapping):
            raise ValueError('give a dict by tool names, such as {"delete_file": "always"}')
        for tool, wanted in (value or {}).items():
            check_approval(tool, wanted)
        return value

    @field_validator("extract_signals", mode="before", check_fields=False)
    @classmethod
    def _extractor(cls, value: Any) -> Any:
        if value is not None:
            check_hook(value, "signals")
        return value

    @field_validator("output", mode="before", check_fields=False)
    @classmethod
    def _output(cls, value: Any) -> Any:
        if value is not None:
            output_spec_of(value)
        return value

    @field_validator("retry", "compaction", "reasoning", mode="before", check_fields=False)
    @classmethod
    def _struct(cls, value: Any, info: Any) -> Any:
        return None if value is None else _STRUCTS[info.field_name](value)

    @field_validator("model", mode="after", check_fields=False)
    @classmethod
    def _provider_and_model(cls, value: str | None) -> str | None:
        if value is not None:
            check_model(value)
        return value

    @field_validator("fallbacks", mode="after", check_fields=False)
    @classmethod
    def _further_models(cls, value: list[str] | None) -> list[str] | None:
        for model in value or ():
            check_model(model)
        return value

    @field_validator("provider_options", mode="after", check_fields=False)
    @classmethod
    def _json(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"it cannot be sent: {error}") from None
        return value


def published_fields(definition: Options, given: Iterable[str], collector: HookCollector) -> dict[str, Any]:
    """The fields of an AgentSpec, of those of a definition that are given and not None."""
    fields: dict[str, Any] = {}
    for name in given:
        value = getattr(definition, name)
        if value is None:
            continue
        match name:
            case "tools":
                fields["tools"], fields["own_tools"] = tool_names(value), own_specs(value)
            case "hooks":
                fields["hooks"] = {point: collector.add(code, point) for point, code in value.given().items()}
            case "stop_when":
                fields["stop_when"] = [collector.stop_condition(condition) for condition in value]
            case "extract_signals":
                fields["signals"] = collector.add(value, "signals")
            case "approvals":
                fields["approvals"] = {tool: collector.approval(wanted) for tool, wanted in value.items()}
            case "output":
                fields["output"] = output_spec_of(value)
            case "repeated_errors_max":
                fields[name] = value or None
            case "tool_timeout" | "model_timeout" | "turn_timeout":
                fields[f"{name}_seconds"] = value
            case _:
                fields[name] = value
    return fields


def check_approved_tools(where: str, approvals: Mapping[str, Any], tools: Sequence[Any]) -> None:
    """A name that is written wrong would let a call run that was to be approved."""
    names = tool_names(tools)
    unknown = [tool for tool in approvals if tool not in names]
    if unknown:
        known = ", ".join(names) or "none"
        raise DefinitionError(f"{where}: approvals names {', '.join(unknown)}, which is not among its tools: {known}")


def check_named_tools(where: str, definition: Any) -> None:
    """A name that is written wrong would be refused by the provider, or a condition that never holds."""
    names = tool_names(definition.tools)
    wanted = [("tool_choice", definition.tool_choice)] if definition.tool_choice not in TOOL_CHOICES else []
    conditions = [condition for condition in definition.stop_when or () if isinstance(condition, StopCondition)]
    wanted += [("has_tool_call", condition.tool) for condition in conditions if condition.tool is not None]
    for field, name in wanted:
        if name not in names:
            known = ", ".join(names) or "none"
            raise DefinitionError(f"{where}: {field} names {name!r}, which is not among its tools: {known}")


_STRUCTS: dict[str, Callable[[Any], msgspec.Struct]] = {
    "retry": lambda value: struct_of(RetryPolicy, value),
    "compaction": compaction_of,
    "reasoning": reasoning_of,
}


def _as_tool(item: Any) -> Any:
    if callable(getattr(item, "agent_spec", None)) and callable(getattr(item, "as_tool", None)):
        return item.as_tool()
    if isinstance(item, str) and valid_name(item):
        return item
    if not isinstance(item, str) and isinstance(getattr(item, "spec", None), ToolSpec):
        return item
    if spec_of(item) is not None:
        raise ValueError(f"{item!r} is a hook, not a tool: it belongs into hooks=, stop_when= or approvals=")
    raise ValueError(
        f"{item!r} is no tool: give a function decorated with @tool, a registered tool's name, a HostTool or an Agent"
    )


def _readable(what: str, error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"]) or what
        faults.append(f"{where}: {fault['msg'].removeprefix('Value error, ')}")
    return f"{what}: " + "; ".join(faults)
