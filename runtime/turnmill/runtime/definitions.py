"""What users define: agents and the options of a turn. Mistakes are said here, where they are typed.

A definition is a pydantic model of what users write; `agent_spec()` and `overrides()` make the data of it that is
published or sent. What they share is in `definition_base`, tools that no worker runs in `tool_definitions`, code that
belongs to an agent in `hook_definitions`, and the short forms of values in `option_values`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, field_validator

from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import AgentSpec, Compaction, Reasoning, RetryPolicy, StopCondition, ToolSpec
from turnmill.protocol.values import pack_value

from .definition_base import Definition, Options, check_approved_tools, check_named_tools, published_fields
from .hook_definitions import HOOK_POINTS, HookCollector, HookFunction, check_hook
from .option_values import check_signal, model_class_of
from .tool_definitions import (
    TIMEOUT_SECONDS_MAX,
    AgentTool,
    HostTool,
    handoff_to,
    other_agents,
    sub_turn_tool,
    worker_specs,
)

__all__ = [
    "Agent",
    "AgentHooks",
    "AgentTool",
    "HookFunction",
    "HostTool",
    "TurnOptions",
    "handoff_to",
    "has_tool_call",
    "step_count_is",
]

NOT_OF_THE_AGENT = frozenset({"metadata", "tenant", "priority", "signal"})
"""What only a turn has."""


def step_count_is(steps: int) -> StopCondition:
    """Stop after `steps` steps; the turn finishes with termination `step_limit`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise DefinitionError(f"step_count_is({steps!r}): a turn has at least one step")
    return StopCondition(steps=steps)


def has_tool_call(name: str) -> StopCondition:
    """Stop after a step that called the tool; the turn finishes with termination `stop_condition`."""
    if not isinstance(name, str) or not valid_name(name):
        raise DefinitionError(f"has_tool_call({name!r}): give the name of a tool")
    return StopCondition(tool=name)


class AgentHooks(Definition):
    """Functions that are called at fixed points of each step, by a worker that carries them.

    Each field takes a function or a `Hook`. A hook that raises fails its turn. No hook costs nothing; each one that is
    there costs a round trip to a worker at its point.
    """

    before_step: Any = None
    after_step: Any = None
    before_tool_call: Any = None
    after_tool_call: Any = None
    on_reasoning_event: Any = None

    @field_validator(*HOOK_POINTS, mode="before")
    @classmethod
    def _callable(cls, value: Any, info: Any) -> Any:
        if value is not None:
            check_hook(value, info.field_name)
        return value

    def given(self) -> dict[str, Any]:
        """The hooks that are there, by their points."""
        return {point: getattr(self, point) for point in HOOK_POINTS if getattr(self, point) is not None}


class Agent(Options):
    """An agent as data: a name, a model, instructions, tools, limits and policies, and the code that belongs to it.

    `model` is `provider:model`, and `fallbacks` are those that are asked where it fails or is held back. `tools` are functions decorated with `@tool`, names of tools that workers have
    registered, `HostTool`s, other agents (see `as_tool`) and `handoff_to(...)`. `stop_when` takes `step_count_is`,
    `has_tool_call` and functions; `approvals` says by tool name `"always"`, `"never"`, or a function that decides.
    `output` is a JSON Schema or a pydantic model class. Times are in seconds. docs/python.md tells all of them.
    """

    name: str
    model: str
    fallbacks: list[str] = Field(default_factory=list, max_length=16)
    system: str | None = None
    tools: list[Any] = Field(default_factory=list)
    max_steps: int = Field(10, ge=1, le=1000)
    on_limit: Literal["error", "final_answer"] = "error"
    stop_when: list[Any] = Field(default_factory=list)
    tool_execution: Literal["parallel", "sequential"] = "parallel"
    tool_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    model_timeout: float = Field(300.0, gt=0, le=TIMEOUT_SECONDS_MAX)
    turn_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    max_calls_per_step: int = Field(64, ge=1, le=1000)
    retry: RetryPolicy = RetryPolicy()
    tool_choice: str | None = None
    provider_options: dict[str, Any] = Field(default_factory=dict)
    pool: str | None = None
    user_prompt_prefix: str = ""
    hooks: AgentHooks | None = None
    extract_signals: Any = None
    approvals: dict[str, Any] = Field(default_factory=dict)
    mode: Literal["auto", "single_exchange"] = "auto"
    late_steering: Literal["step", "drop"] = "step"
    warn_repeated_calls: bool = True
    repeated_errors_max: int = Field(3, ge=0, le=1000)
    """0 (or None): never."""
    compaction: Compaction = Compaction()
    reasoning: Reasoning | None = None
    output: Any = None
    max_sub_turns: int = Field(20, ge=0, le=1000)
    max_depth: int = Field(4, ge=0, le=32)

    def __init__(self, name: str, model: str, **options: Any) -> None:
        super().__init__(**{"name": name, "model": model, **options})

    def model_post_init(self, context: Any, /) -> None:
        self.agent_spec()
        self.agents()
        check_approved_tools(f"agent {self.name!r}", self.approvals, self.tools)
        check_named_tools(f"agent {self.name!r}", self)

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

    @field_validator("repeated_errors_max", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        return 0 if value is None else value

    def as_tool(
        self, *, name: str | None = None, description: str | None = None, timeout: float | None = None
    ) -> AgentTool:
        """This agent as another one's tool: a call starts a sub-turn, and its answer is the result.

        The tool has the agent's name where it has no `name`. `timeout` bounds the sub-turn, in seconds; without it the
        agent's own `turn_timeout` does, or one hour.
        """
        return sub_turn_tool(self, name, description, timeout)

    def agent_spec(self) -> AgentSpec:
        """The agent as it is published."""
        return AgentSpec(**self._published(HookCollector(self.name)))

    def tool_specs(self) -> list[ToolSpec]:
        """The specs of the tools that workers run, where they were given as objects."""
        return worker_specs(self.tools)

    def agents(self) -> list[Agent]:
        """This agent, and all agents that its tools lead to, and theirs: what is published together."""
        return nested_agents([self])

    def hook_functions(self) -> dict[str, HookFunction]:
        """The code that belongs to this agent (not to those below it), by the names under which it is called."""
        collector = HookCollector(self.name)
        self._published(collector)
        return collector.functions

    @property
    def output_type(self) -> type[BaseModel] | None:
        """The pydantic model class of `output`, where it is one."""
        return model_class_of(self.output)

    def _published(self, collector: HookCollector) -> dict[str, Any]:
        """What was given: the defaults are the spec's, and need not be written."""
        return published_fields(self, [name for name in Agent.model_fields if name in self.model_fields_set], collector)


class TurnOptions(Options):
    """What one turn does differently from its agent. What is None is the agent's.

    Hooks replace the agent's hook by hook, and `approvals` tool by tool; all other values replace the agent's.
    `repeated_errors_max=0` means never. `metadata` reaches tools and telemetry, never the provider. `tenant` and
    `priority` (0 to 9) order turns that wait for a model. `signal` is an `AbortSignal` of this process: when it is set,
    the turn is stopped.
    """

    model: str | None = None
    fallbacks: list[str] | None = Field(None, max_length=16)
    system: str | None = None
    tools: list[Any] | None = None
    max_steps: int | None = Field(None, ge=1, le=1000)
    on_limit: Literal["error", "final_answer"] | None = None
    stop_when: list[Any] | None = None
    tool_execution: Literal["parallel", "sequential"] | None = None
    tool_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    model_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    turn_timeout: float | None = Field(None, gt=0, le=TIMEOUT_SECONDS_MAX)
    retry: RetryPolicy | None = None
    tool_choice: str | None = None
    provider_options: dict[str, Any] | None = None
    hooks: AgentHooks | None = None
    extract_signals: Any = None
    approvals: dict[str, Any] | None = None
    mode: Literal["auto", "single_exchange"] | None = None
    late_steering: Literal["step", "drop"] | None = None
    warn_repeated_calls: bool | None = None
    repeated_errors_max: int | None = Field(None, ge=0, le=1000)
    compaction: Compaction | None = None
    reasoning: Reasoning | None = None
    output: Any = None
    max_sub_turns: int | None = Field(None, ge=0, le=1000)
    max_depth: int | None = Field(None, ge=0, le=32)
    metadata: dict[str, Any] = Field(default_factory=dict)
    tenant: str = Field("", max_length=128)
    priority: int = Field(0, ge=0, le=9)
    signal: Any = None

    def model_post_init(self, context: Any, /) -> None:
        self.overrides()
        if self.tools is not None:
            check_approved_tools("TurnOptions", self.approvals or {}, self.tools)
            check_named_tools("TurnOptions", self)

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            sent_metadata(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"it cannot be sent: {error}") from None
        return value

    @field_validator("signal", mode="before")
    @classmethod
    def _signal(cls, value: Any) -> Any:
        if value is not None:
            check_signal(value)
        return value

    def overrides(self) -> dict[str, Any]:
        """The fields of the agent's definition that this turn replaces, or merges into it (see `Registry`)."""
        if self.model_fields_set <= NOT_OF_THE_AGENT:
            return {}
        return {name: msgspec.to_builtins(value) for name, value in self._published(HookCollector(None)).items()}

    def tool_specs(self) -> list[ToolSpec]:
        """The specs of the tools that workers run, where they were given as objects."""
        return worker_specs(self.tools or [])

    def agents(self) -> list[Agent]:
        """The agents that the turn's tools lead to, and theirs: they are to be published before the turn starts."""
        return nested_agents(other_agents(self.tools or []))

    def hook_functions(self) -> dict[str, HookFunction]:
        """The code that belongs to this turn, by the names under which it is called."""
        collector = HookCollector(None)
        self._published(collector)
        return collector.functions

    @property
    def output_type(self) -> type[BaseModel] | None:
        """The pydantic model class of `output`, where it is one."""
        return model_class_of(self.output)

    def _published(self, collector: HookCollector) -> dict[str, Any]:
        given = self.model_fields_set - NOT_OF_THE_AGENT
        # In the order of their definition: the same options are the same bytes in every process.
        fields = published_fields(self, [name for name in TurnOptions.model_fields if name in given], collector)
        if not fields.get("own_tools", True):
            del fields["own_tools"]
        return fields


def sent_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata as it goes on the wire. Raises `TypeError` or `ValueError` for what has no JSON form."""
    if not metadata:
        return {}
    plain = msgspec.to_builtins(metadata, builtin_types=(bytes, bytearray, memoryview), str_keys=True)
    packed: dict[str, Any] = pack_value(plain)
    return packed


def nested_agents(roots: Iterable[Agent]) -> list[Agent]:
    """The agents and all below them, each once. Raises `DefinitionError` for two different ones of the same name."""
    found: dict[str, Agent] = {}
    waiting = list(roots)
    while waiting:
        agent = waiting.pop(0)
        known = found.get(agent.name)
        if known is None:
            found[agent.name] = agent
            waiting.extend(other_agents(agent.tools))
        elif known is not agent and not _same(known, agent):
            raise DefinitionError(f"two different agents are called {agent.name!r}: rename one, or use the same object")
    return list(found.values())


def _same(one: Agent, other: Agent) -> bool:
    return one.agent_spec() == other.agent_spec() and one.hook_functions() == other.hook_functions()
