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


HookPoint: TypeAlias = Literal["before_step", "after_step", "before_tool_call", "after_tool_call", "on_reasoning_event"]
ToolKind: TypeAlias = Literal["worker", "host", "agent", "handoff"]
"""Who runs a tool: a tool worker, the host (the turn suspends), another agent (a sub-turn), or nobody (the turn goes on
with another agent)."""


class HookSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Code that belongs to an agent: a hook, a custom stop condition, an approval policy, a signal extractor.

    It is called like a tool: a task in the stream of `queue`, for whichever worker carries the code. It may run again
    when its worker dies.
    """

    name: str
    queue: str = "hooks"
    timeout_seconds: float = 60.0
    start_timeout_seconds: float = 60.0


class Approval(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Whether a tool's calls wait for a person: never, always, or as `policy` says of each call."""

    mode: Literal["never", "always", "policy"] = "never"
    policy: HookSpec | None = None
    timeout_seconds: float = 86_400.0


class Compaction(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a conversation is shortened for the model. The transcript itself stays whole.

    Where the model's window is exceeded, long tool results are trimmed first, to `tool_output_bytes` each. With
    `summarizer` (provider:model) older messages are replaced by its summary. `trigger_tokens` does it before a turn's
    first step, once the last step's input had that many tokens; `keep_steps` of the newest steps are left as they are.
    """

    trigger_tokens: int | None = None
    tool_output_bytes: int = 2_000
    keep_steps: int = 2
    summarizer: str | None = None
    instructions: str | None = None


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How much a model may think: a word, or a number of tokens, as its provider takes it."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    budget_tokens: int | None = None


class OutputSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer is JSON of this schema. An answer that is not gets `repairs` more rounds, with what was wrong."""

    schema: dict[str, Any]
    name: str = "response"
    repairs: int = 1


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tool as it stands in the registry.

    `timeout_seconds` runs from the start of an attempt to its end, `start_timeout_seconds` from dispatch to start,
    `idle_timeout_seconds` from one word of progress to the next.
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
    approval: Approval = Approval()
    encoding: str | None = None
    kind: ToolKind = "worker"
    agent: str | None = None
    """The agent of a sub-turn or a handoff: `name` or `name@version`."""
    idle_timeout_seconds: float | None = None

    @property
    def retry_when_lost(self) -> bool:
        return self.on_lost == "retry" or (self.on_lost is None and self.idempotent)


class StopCondition(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Ends a turn after a step with tool calls: after `steps` steps, when the step called `tool`, or as `hook` says."""

    steps: int | None = None
    tool: str | None = None
    hook: HookSpec | None = None

    @property
    def name(self) -> str:
        if self.hook is not None:
            return self.hook.name
        return f"step_count_is({self.steps})" if self.steps is not None else f"has_tool_call({self.tool})"


class AgentSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An agent as data. `tools` are names; their specs come from the tool registry when a turn starts."""

    name: str
    model: str
    fallbacks: list[str] = []
    """The models that are asked, in this order, where the first one fails or is held back."""
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
    hooks: dict[HookPoint, HookSpec] = {}
    signals: HookSpec | None = None
    approvals: dict[str, Approval] = {}
    """By tool name, in place of the tool's own."""
    own_tools: list[ToolSpec] = []
    """The specs of those `tools` that no worker registers: of kind host, agent and handoff. They are looked up first."""
    mode: Literal["auto", "single_exchange"] = "auto"
    late_steering: Literal["step", "drop"] = "step"
    """What becomes of steering that arrives while the final answer streams: one more step, or dropped."""
    warn_repeated_calls: bool = True
    repeated_errors_max: int | None = 3
    """The same error of the same tool so many times in a row stops the turn; None: never."""
    compaction: Compaction = Compaction()
    reasoning: Reasoning | None = None
    output: OutputSpec | None = None
    turn_timeout_seconds: float | None = None
    max_sub_turns: int = 20
    max_depth: int = 4
    """How deep sub-turns may nest below a turn of this agent that is none itself."""


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


def provider_of(model: str) -> str:
    """The prefix of `provider:model`."""
    return model.partition(":")[0]


def content_hash(value: msgspec.Struct) -> str:
    """The name of a value by its content: 16 hex digits of BLAKE2b over its sorted JSON."""
    encoded = msgspec.json.encode(value, order="sorted")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()
