"""What every provider of models looks like to the LLM worker.

A provider turns one request into a stream: live events as they come (`TextDelta`, `ReasoningDelta`, `ToolCallStarted`,
`ToolCallDelta`), then exactly one `Completed`. Everything that goes wrong is a `ProviderError`; a stream that ends
without `Completed` is a bug of the provider's adapter.

A `Usage` or `Cost` in between is what is known by then: it is told of a call that is stopped or fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from turnmill.protocol.content import Cost, ErrorInfo, Message, Usage
from turnmill.protocol.errors import TurnmillError
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from turnmill.protocol.specs import Reasoning, ToolSpec


class ProviderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. `model` is the name behind the provider's prefix; `tools` are what may be called, maybe none.

    With `output_schema` the answer is to be JSON of that schema, under `output_name` where the provider wants a name.
    `options` are the provider's own, and win over what is made of the other fields.

    `turn_id`, `step_number` and `attempt` are for logs and deterministic fakes; they are not sent to the provider.
    """

    model: str
    messages: list[Message]
    system: str | None = None
    tools: list[ToolSpec] = []
    tool_choice: str | None = None
    options: dict[str, Any] = {}
    reasoning: Reasoning | None = None
    output_schema: dict[str, Any] | None = None
    output_name: str = "response"
    turn_id: str = ""
    session_id: str = ""
    step_number: int = 1
    attempt: int = 1


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a stream: the whole assistant message (parts in the order they began), and what is known about it.

    `finish_reason` is one of stop, length, tool_calls, content_filter, refusal, pause, other. Calls in the message make
    it `tool_calls` whatever the provider's word was, unless they were cut off by `length`. `cost` is the provider's own word.
    """

    message: Message
    finish_reason: str
    usage: Usage | None = None
    cost: Cost | None = None


Live: TypeAlias = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta
Streamed: TypeAlias = Live | Usage | Cost | Completed


class ProviderError(TurnmillError):
    """A failed model call; `info.retryable` says whether another attempt may succeed, `usage` what it has cost, where
    that is known."""

    def __init__(self, info: ErrorInfo, usage: Usage | None = None) -> None:
        super().__init__(info.message)
        self.info = info
        self.usage = usage


class Provider(Protocol):
    """Closing the iterator closes the connection to the provider."""

    def stream(self, request: ProviderRequest) -> AsyncIterator[Streamed]: ...

    async def close(self) -> None: ...


class ProviderSet:
    """The providers of one process by the prefix of their models' names, and what they share."""

    def __init__(self, providers: Mapping[str, Provider], *shared: Closable) -> None:
        self._providers = dict(providers)
        self._shared = shared

    @property
    def names(self) -> list[str]:
        return sorted(self._providers)

    def get(self, prefix: str) -> Provider | None:
        return self._providers.get(prefix)

    def is_remote(self, prefix: str) -> bool:
        """Whether its calls leave the process: only then it can be too much for somebody else."""
        return bool(getattr(self._providers.get(prefix), "is_remote", False))

    async def close(self) -> None:
        """Close every provider, then what they share."""
        for resource in (*self._providers.values(), *self._shared):
            await resource.close()


class Closable(Protocol):
    async def close(self) -> None: ...
