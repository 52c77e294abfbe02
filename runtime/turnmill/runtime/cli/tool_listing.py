"""`turnmill tool ls`: the tools that turns can call, with their policies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from . import options
from .exits import Exit

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings
    from turnmill.protocol.specs import ToolSpec

    from ..client import Client


class Listed(NamedTuple):
    """A tool, and the agent that it belongs to; None for a worker's, which all agents may name."""

    spec: ToolSpec
    owner: str | None


def list_tools(
    as_json: options.Json = False, redis_url: options.RedisUrl = None, namespace: options.Namespace = None
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_list(command_settings(redis_url, namespace), as_json))


async def _list(settings: Settings, as_json: bool) -> int:
    import msgspec

    from .attachment import attached_client
    from .wording import table_lines

    async with attached_client(settings) as client:
        tools = await _registered(client)
    if as_json:
        lines = [msgspec.json.encode(_fields(tool)).decode() for tool in tools]
    else:
        head = ["TOOL", "KIND", "QUEUE", "OF AGENT", "TIMEOUT", "START", "ATTEMPTS", "WHEN LOST", "APPROVAL"]
        lines = list(table_lines([head, *map(_row, tools)]))
    for line in lines:
        sys.stdout.write(line + "\n")
    return Exit.OK


async def _registered(client: Client) -> list[Listed]:
    """Workers' tools by name, then the tools of agents' own: the host's, other agents and handoffs."""
    from turnmill.protocol.connection import pairs
    from turnmill.protocol.specs import AgentSpec, ToolSpec

    bodies = pairs(await client.engine.call("HGETALL", client.keys.tools))
    tools = [Listed(spec, None) for spec in _readable(bodies.values(), ToolSpec)]
    published = pairs(await client.engine.call("HGETALL", client.keys.agents))
    current = {name + b"@" + version: name for name, version in published.items() if b"@" not in name}
    agents: list[AgentSpec] = _readable([published[name] for name in current if name in published], AgentSpec)
    tools += [Listed(spec, agent.name) for agent in agents for spec in agent.own_tools]
    return sorted(tools, key=lambda tool: (tool.owner or "", tool.spec.name))


def _readable(bodies: Any, kind: Any) -> list[Any]:
    import msgspec

    found = []
    for body in bodies:
        try:
            found.append(msgspec.json.decode(body, type=kind))
        except msgspec.DecodeError:
            continue  # of a newer version
    return found


def _fields(tool: Listed) -> dict[str, Any]:
    """All policies by name, also those that are defaults."""
    import msgspec

    fields = msgspec.structs.asdict(tool.spec)
    built: dict[str, Any] = {name: msgspec.to_builtins(value) for name, value in fields.items()}
    built["approval"] = {"mode": tool.spec.approval.mode, "timeout_seconds": tool.spec.approval.timeout_seconds}
    if tool.spec.approval.policy is not None:
        built["approval"]["policy"] = tool.spec.approval.policy.name
    return {**built, "retry_when_lost": tool.spec.retry_when_lost, "owner": tool.owner}


def _row(tool: Listed) -> list[str]:
    spec = tool.spec
    approval = f"policy {spec.approval.policy.name}" if spec.approval.policy is not None else spec.approval.mode
    leads_to = f"{spec.kind} {spec.agent}" if spec.agent else spec.kind
    if spec.kind != "worker":
        timeout = f"{spec.timeout_seconds:g} s" if spec.kind == "agent" else ""
        return [spec.name, leads_to, "", tool.owner or "", timeout, "", "", "", approval]
    return [
        spec.name,
        leads_to,
        spec.queue,
        tool.owner or "",
        f"{spec.timeout_seconds:g} s",
        f"{spec.start_timeout_seconds:g} s",
        str(spec.max_attempts),
        "retry" if spec.retry_when_lost else "fail",
        approval,
    ]
