"""Tools that no worker runs: the host's own, other agents, and handoffs to other agents.

They belong to the agent that lists them, and are published inside of it: two agents may have different tools of one name,
and neither meets a worker's tool of that name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import ToolKind, ToolSpec, content_hash

from .option_values import json_schema_of

if TYPE_CHECKING:
    from .definitions import Agent

AGENT_TOOL_TIMEOUT_SECONDS = 3600.0
TIMEOUT_SECONDS_MAX = 30 * 86_400.0
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class HostTool:
    """A tool that the host runs itself: a call suspends the turn, until `Turn.resume` brings its result.

    `schema` describes the arguments, as a JSON Schema or a pydantic model class; without it there are none.
    """

    __slots__ = ("spec",)

    def __init__(self, name: str, description: str = "", schema: Any = None) -> None:
        _check_name("HostTool", name)
        _check_description(f"HostTool {name!r}", description)
        self.spec = ToolSpec(
            name=name, description=description, schema=_arguments_schema(f"HostTool {name!r}", schema), kind="host"
        )

    @property
    def name(self) -> str:
        return self.spec.name

    def __repr__(self) -> str:
        return f"HostTool({self.spec.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostTool) and other.spec == self.spec

    def __hash__(self) -> int:
        return hash(self.spec.name)


class AgentTool:
    """A tool that leads to another agent. Made by `Agent.as_tool` (a sub-turn answers the call) and by `handoff_to`.

    `agent` is the other agent, None where it is only named.
    """

    __slots__ = ("agent", "spec")

    def __init__(self, spec: ToolSpec, agent: Agent | None) -> None:
        self.spec = spec
        self.agent = agent

    @property
    def name(self) -> str:
        return self.spec.name

    def __repr__(self) -> str:
        return f"AgentTool({self.spec.name!r}, kind={self.spec.kind!r}, agent={self.spec.agent!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentTool) and other.spec == self.spec

    def __hash__(self) -> int:
        return hash(self.spec.name)


def sub_turn_tool(agent: Agent, name: str | None, description: str | None, timeout: float | None) -> AgentTool:
    """The agent as a tool: its argument is a message, its result what the agent answers."""
    seconds = timeout if timeout is not None else agent.turn_timeout or AGENT_TOOL_TIMEOUT_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= TIMEOUT_SECONDS_MAX:
        raise DefinitionError(
            f"agent {agent.name!r} as a tool: timeout is a number of seconds above 0, not {timeout!r}"
        )
    words = f"Ask the agent {agent.name!r}. It sees nothing but the message." if description is None else description
    schema = {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "What the agent is to do, with all it must know."}},
        "required": ["message"],
        "additionalProperties": False,
    }
    return AgentTool(_agent_spec("agent", agent, name or agent.name, words, schema, float(seconds)), agent)


def handoff_to(agent: Agent | str, name: str | None = None, description: str | None = None) -> AgentTool:
    """A tool with which the model gives the turn to another agent, which goes on with the same conversation.

    `agent` may be a name, or `name@version`, of an agent that is published by the time the turn starts: so two agents can
    hand over to each other. A name means what is published under it when the handoff happens. The tool is called
    `transfer_to_<agent>` where it has no `name`.
    """
    title = agent if isinstance(agent, str) else getattr(agent, "name", None)
    if not isinstance(title, str) or not (isinstance(agent, str) or callable(getattr(agent, "agent_spec", None))):
        raise DefinitionError(f"handoff_to({agent!r}): give an Agent, or the name of one")
    bare, at, version = title.partition("@")
    if not valid_name(bare) or (at and not version) or "@" in version:
        raise DefinitionError(f"handoff_to({title!r}): write the name of an agent, or name@version")
    words = f"Hand the conversation over to the agent {bare!r}." if description is None else description
    spec = _agent_spec("handoff", agent, name or f"transfer_to_{bare}", words, _NO_ARGUMENTS, None)
    return AgentTool(spec, None if isinstance(agent, str) else agent)


def tool_names(tools: Iterable[Any]) -> list[str]:
    return [item if isinstance(item, str) else item.spec.name for item in tools]


def worker_specs(tools: Iterable[Any]) -> list[ToolSpec]:
    """The specs of tools that workers run, where they were given as objects."""
    return [item.spec for item in tools if not isinstance(item, str) and item.spec.kind == "worker"]


def own_specs(tools: Iterable[Any]) -> list[ToolSpec]:
    """The specs of tools that belong to their agent alone."""
    return [item.spec for item in tools if not isinstance(item, str) and item.spec.kind != "worker"]


def other_agents(tools: Iterable[Any]) -> list[Agent]:
    """The agents that tools lead to, where they were given as objects."""
    return [item.agent for item in tools if isinstance(item, AgentTool) and item.agent is not None]


def _agent_spec(
    kind: ToolKind, agent: Agent | str, name: str, description: str, schema: dict[str, Any], timeout: float | None
) -> ToolSpec:
    reference = agent if isinstance(agent, str) else f"{agent.name}@{content_hash(agent.agent_spec())}"
    where = f"{kind} tool for {reference!r}"
    _check_name(where, name)
    _check_description(where, description)
    spec = ToolSpec(name=name, description=description, schema=schema, kind=kind, agent=reference)
    return spec if timeout is None else msgspec.structs.replace(spec, timeout_seconds=timeout)


def _arguments_schema(where: str, schema: Any) -> dict[str, Any]:
    if schema is None:
        return _NO_ARGUMENTS
    try:
        made = json_schema_of(schema)
    except ValueError as error:
        raise DefinitionError(f"{where}: {error}") from None
    if made.get("type", "object") != "object":
        raise DefinitionError(f"{where}: arguments are an object, and the schema describes a {made['type']!r}")
    return {"type": "object", **made}


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not valid_name(name):
        raise DefinitionError(f"{where}: {name!r} is no name for a tool: 1 to 128 letters, digits and `_ . : @ -`")


def _check_description(where: str, description: Any) -> None:
    if not isinstance(description, str):
        raise DefinitionError(f"{where}: the description is a text for the model, not {description!r}")
