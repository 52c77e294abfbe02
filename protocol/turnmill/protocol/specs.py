"""What the registries hold: tools, agents, and the plan that a turn pins when it starts.

A plan is an agent's definition with the turn's options merged in and every tool resolved. It is named by the hash of
its content, so the same plan is written once for many turns, and a worker may cache it for ever.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, TypeAlias

import msgspec

OnLost: TypeAlias = Literal["retry", "fail"]


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Attempts at a provider call or a tool call that failed with a retryable error; delays in seconds."""

    max_attempts: int = 3
    initial_delay_seconds: float = 0.5
    max_delay_seconds: float = 30.0
    backoff: float = 2.0


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tool as it stands in the registry.

    `timeout_seconds` runs from the start of an attempt to its end, `start_timeout_seconds` from dispatch to start.
    `on_lost` says what happens when a worker dies in mid-call; the default is `retry` for idempotent tools and `fail`
    for all others.
    """

    name: str
    description: str = ""
    schema: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    queue: str = "default"
    timeout_seconds: float = 300.0
    start_timeout_seconds: float = 60.0
    max_attempts: int = 1
    idempotent: bool = False
    on_lost: OnLost | None = None
    concurrency: int | None = None
    approval: str = "never"
    encoding: str | None = None

    @property
    def retry_when_lost(self) -> bool:
        return self.on_lost == "retry" or (self.on_lost is None and self.idempotent)


class StopCondition(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Ends a turn after a step with tool calls: after `steps` steps, or when the step called `tool`."""

    steps: int | None = None
    tool: str | None = None

    @property
    def name(self) -> str:
        return f"step_count_is({self.steps})" if self.steps is not None else f"has_tool_call({self.tool})"


class AgentSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An agent as data. `tools` are names; their specs come from the tool registry when a turn starts."""

    name: str
    model: str
    system: str | None = None
    tools: list[str] = []
    max_steps: int = 10
    on_limit: Literal["error", "final_answer"] = "error"
    stop_when: list[StopCondition] = []
    tool_execution: Literal["parallel", "sequential"] = "parallel"
    tool_timeout_seconds: float | None = None
    retry: RetryPolicy = RetryPolicy()
    model_timeout_seconds: float = 300.0
    max_calls_per_step: int = 64
    pool: str | None = None
    tool_choice: str | None = None
    provider_options: dict[str, Any] = {}
    user_prompt_prefix: str = ""


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one turn runs with: the agent with the turn's options merged in, and its tools' specs by name."""

    agent: AgentSpec
    tools: dict[str, ToolSpec] = {}

    @property
    def pool(self) -> str:
        """The pool of LLM workers: the agent's own, or one pool per model function of a host, else `default`."""
        if self.agent.pool:
            return self.agent.pool
        provider, _, name = self.agent.model.partition(":")
        return f"host.{name}" if provider == "host" else "default"


def content_hash(value: msgspec.Struct) -> str:
    """The name of a value by its content: 16 hex digits of BLAKE2b over its sorted JSON."""
    encoded = msgspec.json.encode(value, order="sorted")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()
