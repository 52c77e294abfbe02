"""What users define: agents and the options of a turn. Mistakes are said here, where they are typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import AgentSpec, RetryPolicy, StopCondition, ToolSpec


@runtime_checkable
class HasSpec(Protocol):
    """A tool as an object: what `@tool` gives."""

    @property
    def spec(self) -> ToolSpec: ...


def step_count_is(steps: int) -> StopCondition:
    """Stop after `steps` steps; the turn finishes with termination `step_limit`."""
    if steps < 1:
        raise DefinitionError(f"step_count_is({steps}): a turn has at least one step")
    return StopCondition(steps=steps)


def has_tool_call(name: str) -> StopCondition:
    """Stop after a step that called the tool; the turn finishes with termination `stop_condition`."""
    return StopCondition(tool=name)


TIMEOUT_SECONDS_MAX = 30 * 86_400.0


class _Definition(BaseModel):
    """Pydantic's checks, with our words."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise DefinitionError(_readable(type(self).__name__, error)) from None

    @field_validator("tools", mode="before", check_fields=False)
    @classmethod
    def _known_tools(cls, value: Any) -> Any:
        if value is None or isinstance(value, str) or not isinstance(value, Sequence):
            return value
        for item in value:
            if isinstance(item, str) and valid_name(item):
                continue
            if not isinstance(item, str) and isinstance(getattr(item, "spec", None), ToolSpec):
                continue
            raise ValueError(f"{item!r} is no tool: give a function decorated with @tool, or a registered tool's name")
        return value

    @field_validator("stop_when", mode="before", check_fields=False)
    @classmethod
    def _condition_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, StopCondition) else value

    @field_validator("model", mode="after", check_fields=False)
    @classmethod
    def _provider_and_model(cls, value: str | None) -> str | None:
        if value is not None and not all(value.partition(":")[::2]):
            raise ValueError(f"{value!r}: write provider:model, such as openai:gpt-5-mini or scripted:demo")
        return value


class Agent(_Definition):
    """An agent as data: a name, a model, instructions, tools by name, limits and policies.

    `model` is `provider:model`. `tools` are functions decorated with `@tool`, or names of tools that workers have
    registered. Times are in seconds.
    """

    name: str
    model: str
    system: str | None = None
    tools: list[Any] = []
    max_steps: int = Field(10, ge=1, le=1000)
    on_limit: Literal["error", "final_answer"] = "error"
    stop_when: list[StopCondition] = []
    tool_execution: Literal["parallel", "sequential"] = "parallel"
    tool_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    model_timeout: float = Field(300.0, gt=0, le=TIMEOUT_SECONDS_MAX)
    max_calls_per_step: int = Field(64, ge=1, le=1000)
    retry: RetryPolicy = RetryPolicy()
    tool_choice: str | None = None
    provider_options: dict[str, Any] = {}
    pool: str | None = None
    user_prompt_prefix: str = ""

    def __init__(self, name: str, model: str, **options: Any) -> None:
        super().__init__(name=name, model=model, **options)

    @field_validator("name")
    @classmethod
    def _usable_name(cls, value: str) -> str:
        if not valid_name(value) or "@" in value:
            raise ValueError(f"{value!r}: up to 128 letters, digits and `_ . : -`")
        return value

    @field_validator("pool")
    @classmethod
    def _usable_pool(cls, value: str | None) -> str | None:
        if value is not None and not valid_name(value):
            raise ValueError(f"{value!r}: up to 128 letters, digits and `_ . : @ -`")
        return value

    def agent_spec(self) -> AgentSpec:
        """The agent as it is published."""
        return AgentSpec(
            name=self.name,
            model=self.model,
            system=self.system,
            tools=_tool_names(self.tools),
            max_steps=self.max_steps,
            on_limit=self.on_limit,
            stop_when=self.stop_when,
            tool_execution=self.tool_execution,
            tool_timeout_seconds=self.tool_timeout,
            model_timeout_seconds=self.model_timeout,
            max_calls_per_step=self.max_calls_per_step,
            retry=self.retry,
            tool_choice=self.tool_choice,
            provider_options=self.provider_options,
            pool=self.pool,
            user_prompt_prefix=self.user_prompt_prefix,
        )

    def tool_specs(self) -> list[ToolSpec]:
        """The specs of the tools that were given as objects."""
        return [item.spec for item in self.tools if not isinstance(item, str)]


class TurnOptions(_Definition):
    """What one turn does differently from its agent. What is None is the agent's.

    `metadata` reaches tools and telemetry, never the provider. `tenant` and `priority` (0 to 9) order turns that wait
    for a model.
    """

    model: str | None = None
    system: str | None = None
    tools: list[Any] | None = None
    max_steps: int | None = Field(None, ge=1, le=1000)
    on_limit: Literal["error", "final_answer"] | None = None
    stop_when: list[StopCondition] | None = None
    tool_execution: Literal["parallel", "sequential"] | None = None
    tool_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    model_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    retry: RetryPolicy | None = None
    tool_choice: str | None = None
    provider_options: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    tenant: str = Field("", max_length=128)
    priority: int = Field(0, ge=0, le=9)

    def overrides(self) -> dict[str, Any]:
        """The fields of the agent's definition that this turn replaces."""
        values = {
            "model": self.model,
            "system": self.system,
            "tools": None if self.tools is None else _tool_names(self.tools),
            "max_steps": self.max_steps,
            "on_limit": self.on_limit,
            "stop_when": self.stop_when,
            "tool_execution": self.tool_execution,
            "tool_timeout_seconds": self.tool_timeout,
            "model_timeout_seconds": self.model_timeout,
            "retry": self.retry,
            "tool_choice": self.tool_choice,
            "provider_options": self.provider_options,
        }
        return {name: msgspec.to_builtins(value) for name, value in values.items() if value is not None}

    def tool_specs(self) -> list[ToolSpec]:
        return [item.spec for item in self.tools or [] if not isinstance(item, str)]


def _tool_names(tools: Sequence[Any]) -> list[str]:
    return [item if isinstance(item, str) else item.spec.name for item in tools]


def _readable(what: str, error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"]) or what
        faults.append(f"{where}: {fault['msg'].removeprefix('Value error, ')}")
    return f"{what}: " + "; ".join(faults)
