"""Agents and tools as the namespace knows them, and the plans made of them.

Registries are read and cached, never part of a commit. A plan is content-addressed and written to the partition before
the first state refers to it; it is refreshed while it is used, so that it outlives every turn that pinned it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.messages import StartTurn
from turnmill.protocol.specs import AgentSpec, Plan, ToolSpec, content_hash

from .agent_versions import note_uses

_FRESH_SECONDS = 2.0
_REWRITE_SECONDS = 15.0
_CACHE_MAX = 2000
_MERGED = ("hooks", "approvals")
_decode_agent = msgspec.json.Decoder(AgentSpec).decode
_decode_tool = msgspec.json.Decoder(ToolSpec).decode
_decode_plan = msgspec.json.Decoder(Plan).decode


class Resolved(NamedTuple):
    """The plan of a command, or why there is none."""

    plan_id: str
    plan: Plan | None
    problem: ErrorInfo | None


async def publish(
    engine: Engine, keys: Keys, agents: Collection[AgentSpec], tools: Iterable[ToolSpec]
) -> dict[str, str]:
    """Write agents and tools to the registries; the version of each agent by its name.

    A tool that a worker has registered is left alone: the worker that runs it knows best.
    """
    versions = {}
    calls = []
    for tool in tools:
        calls.append(engine.call("HSETNX", keys.tools, tool.name, msgspec.json.encode(tool)))
    for agent in agents:
        versions[agent.name] = content_hash(agent)
    uses = [f"{name}@{version}" for name, version in versions.items()]
    await note_uses(engine, keys, uses, int(time.time() * 1000))
    for agent in agents:
        version = versions[agent.name]
        body = msgspec.json.encode(agent)
        calls.append(engine.call("HSET", keys.agents, agent.name, version, f"{agent.name}@{version}", body))
    for call in calls:
        await call
    return versions


class Registry:
    """Resolves agents to plans for one coordinator."""

    def __init__(self, engine: Engine, keys: Keys, plan_ttl_seconds: int, agent_ttl_seconds: int = 86_400) -> None:
        self._engine = engine
        self._keys = keys
        self._plan_ttl_ms = plan_ttl_seconds * 1000
        self._resolved: dict[tuple[str, bytes], tuple[float, Resolved]] = {}
        self._written: dict[tuple[int, str], float] = {}
        self._agent_ttl_seconds = agent_ttl_seconds
        self._noted: dict[str, float] = {}

    async def resolve(self, partition: PartitionKeys, command: StartTurn) -> Resolved:
        """The plan of a command, written to its partition."""
        return await self.resolve_agent(partition, command.agent, command.overrides)

    async def resolve_agent(
        self, partition: PartitionKeys, reference: str, overrides: Mapping[str, Any] | None = None
    ) -> Resolved:
        """The plan of an agent (`name` or `name@version`), written to the partition that will use it.

        `overrides` replace fields of the definition; `hooks`, `approvals` and `own_tools` are merged by their keys. What
        is wrong with the agent is an answer, not an error.
        """
        key = (reference, msgspec.json.encode(overrides) if overrides else b"")
        cached = self._resolved.get(key)
        if cached is not None and cached[0] > time.monotonic():
            resolved = cached[1]
        else:
            resolved = await self._build(reference, overrides or {})
            if len(self._resolved) >= _CACHE_MAX:
                self._resolved.clear()
            self._resolved[key] = (time.monotonic() + _FRESH_SECONDS, resolved)
        if resolved.plan is not None:
            await self._write(partition, resolved.plan_id, resolved.plan)
        return resolved

    async def load_plan(self, partition: PartitionKeys, plan_id: str) -> Plan | None:
        body = await self._engine.call("GET", partition.plan(plan_id))
        return _decode_plan(body) if body else None

    async def _write(self, partition: PartitionKeys, plan_id: str, plan: Plan) -> None:
        """Once per plan and partition, and again when a quarter of its life has passed."""
        written = self._written.get((partition.partition, plan_id), 0.0)
        if written > time.monotonic():
            return
        body = msgspec.json.encode(plan)
        await self._engine.call("SET", partition.plan(plan_id), body, "PX", self._plan_ttl_ms)
        # Not for long: an engine that lost its data is told again.
        self._written[partition.partition, plan_id] = time.monotonic() + min(self._plan_ttl_ms / 4000, _REWRITE_SECONDS)

    async def _build(self, reference: str, overrides: Mapping[str, Any]) -> Resolved:
        used, spec, problem = await self._agent(reference)
        if spec is None:
            return Resolved("", None, problem)
        try:
            spec = _merged(spec, overrides)
        except msgspec.ValidationError as error:
            return _refused(ErrorKind.BAD_REQUEST, f"the turn's options do not fit agent {spec.name!r}: {error}")
        own = {tool.name: tool for tool in spec.own_tools if tool.name in spec.tools}
        await self._note_uses([used, *[tool.agent for tool in own.values() if tool.agent and "@" in tool.agent]])
        problem = _unusable_approvals(spec, overrides) or await self._unknown_agents(spec.name, own)
        if problem is not None:
            return Resolved("", None, problem)
        registered, problem = await self._registered(spec, [name for name in spec.tools if name not in own])
        if problem is not None:
            return Resolved("", None, problem)
        tools = {name: own.get(name) or registered[name] for name in spec.tools}
        # What its own tools are stands in `tools` from here on.
        plan = Plan(agent=msgspec.structs.replace(spec, own_tools=[]), tools=tools)
        return Resolved(content_hash(plan), plan, None)

    async def _registered(self, spec: AgentSpec, names: list[str]) -> tuple[dict[str, ToolSpec], ErrorInfo | None]:
        """The tools of workers by name."""
        if not names:
            return {}, None
        bodies = await self._engine.call("HMGET", self._keys.tools, *names)
        missing = [name for name, body in zip(names, bodies, strict=True) if body is None]
        if missing:
            text = (
                f"agent {spec.name!r} names tools that nobody registered: {', '.join(missing)}. "
                "Start `turnmill worker tools APP` with the app that defines them"
            )
            return {}, ErrorInfo(kind=ErrorKind.UNKNOWN_TOOL, message=text)
        return {name: _decode_tool(body) for name, body in zip(names, bodies, strict=True)}, None

    async def _unknown_agents(self, name: str, own: dict[str, ToolSpec]) -> ErrorInfo | None:
        """Why a tool cannot lead where it should: its agent is not published."""
        leading = [tool for tool in own.values() if tool.kind in ("agent", "handoff")]
        if not leading:
            return None
        bodies = await self._engine.call("HMGET", self._keys.agents, *[tool.agent or "" for tool in leading])
        unknown = [tool for tool, body in zip(leading, bodies, strict=True) if body is None]
        if not unknown:
            return None
        targets = ", ".join(
            f"{tool.agent!r} (tool {tool.name!r})" if tool.agent else f"none (tool {tool.name!r})" for tool in unknown
        )
        text = (
            f"tools of agent {name!r} lead to agents that are not published in the namespace {self._keys.prefix!r}: "
            f"{targets}. Start `turnmill worker tools APP` with the app that defines them, or publish them"
        )
        return ErrorInfo(kind=ErrorKind.UNKNOWN_AGENT, message=text)

    async def _note_uses(self, versions: Iterable[str]) -> None:
        """Each is noted again when a quarter of the time has passed that it stays without being used."""
        now = time.monotonic()
        due = [version for version in versions if self._noted.get(version, 0.0) <= now]
        if due:
            await note_uses(self._engine, self._keys, due, int(time.time() * 1000))
            if len(self._noted) >= _CACHE_MAX:
                self._noted.clear()
            self._noted.update(dict.fromkeys(due, now + self._agent_ttl_seconds / 4))

    async def _agent(self, reference: str) -> tuple[str, AgentSpec | None, ErrorInfo | None]:
        """The version that a reference means, with its definition."""
        name, _, version = reference.partition("@")
        if not version:
            published = await self._engine.call("HGET", self._keys.agents, name)
            version = published.decode() if published else ""
        body = await self._engine.call("HGET", self._keys.agents, f"{name}@{version}") if version else None
        if body is None:
            text = (
                f"no agent {reference!r} is published in the namespace {self._keys.prefix!r}. "
                "Start `turnmill worker tools APP` with the app that defines it, or pass the agent itself"
            )
            return "", None, ErrorInfo(kind=ErrorKind.UNKNOWN_AGENT, message=text)
        return f"{name}@{version}", _decode_agent(body), None


def _merged(spec: AgentSpec, overrides: Mapping[str, Any]) -> AgentSpec:
    """The agent's definition with a turn's options in it. Raises `msgspec.ValidationError` for what does not fit."""
    if not overrides:
        return spec
    own = msgspec.convert(overrides.get("own_tools", []), list[ToolSpec])
    fields = msgspec.to_builtins(spec)
    for name, value in overrides.items():
        known = fields.get(name)
        fields[name] = {**known, **value} if name in _MERGED and known and isinstance(value, dict) else value
    merged = msgspec.convert(fields, AgentSpec)
    tools = {tool.name: tool for tool in [*spec.own_tools, *own]}
    return msgspec.structs.replace(merged, own_tools=list(tools.values()))


def _unusable_approvals(spec: AgentSpec, overrides: Mapping[str, Any]) -> ErrorInfo | None:
    """A turn that wants an approval of calls that do not exist has probably another tool in mind."""
    unknown = [name for name in overrides.get("approvals", {}) if name not in spec.tools]
    if not unknown:
        return None
    text = (
        f"the turn's approvals name {', '.join(unknown)}, which is not among the tools of agent {spec.name!r}: "
        f"{', '.join(spec.tools) or 'none'}"
    )
    return ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text)


def _refused(kind: ErrorKind, text: str) -> Resolved:
    return Resolved("", None, ErrorInfo(kind=kind, message=text))
