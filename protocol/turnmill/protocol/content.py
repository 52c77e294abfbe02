"""What messages, results and events are made of: conversation messages, their parts, usage and terminations.

These structs stand in the transcript, in tasks, results and events alike, so that a value is written the same way
everywhere. A message's `content` is a string or a list of parts; the parts form a union told apart by `type`.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from .keys import BLOB_PATTERN

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Tokens of one provider call, or summed over several. `input_tokens` includes what was read from a cache."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_miss_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Cost(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a provider call cost, as decimal strings on the wire. An unknown part is absent, never 0."""

    currency: str = "USD"
    input: Decimal | None = None
    output: Decimal | None = None
    total: Decimal | None = None
    source: str = ""
    """provider (it told the cost itself), settings (turnmill.toml) or the name of the price list."""

    def __add__(self, other: Cost) -> Cost:
        """Both together. A part that one of them lacks is the other's; costs in two currencies have no sum."""
        if self.currency != other.currency:
            return Cost(currency="", source="mixed")
        return Cost(
            currency=self.currency,
            input=_sum(self.input, other.input),
            output=_sum(self.output, other.output),
            total=_sum(self.total, other.total),
            source=self.source if self.source == other.source else "mixed",
        )


def _sum(one: Decimal | None, other: Decimal | None) -> Decimal | None:
    return other if one is None else one if other is None else one + other


class AttemptUsage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is known of one provider call that gave no answer: it failed and was repeated, or was stopped."""

    step: int
    attempt: int
    outcome: str
    """The kind of its error, such as `rate_limited` or `aborted`."""
    usage: Usage | None = None
    cost: Cost | None = None
    model: str | None = None


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One call that the model asked for.

    `arguments` is the parsed object. Where the model's text was no JSON object, or violates the tool's schema, `error`
    says why and the call is never executed. `metadata` is the provider's own state, sent back to it unchanged.
    """

    id: str
    name: str
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    error: str | None = None


class BlobRef(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A value that stands under a key of its own because it is large; `key` is the suffix behind the partition."""

    # What refers to another kind of key would have it read, kept and deleted in a blob's place.
    key: Annotated[str, msgspec.Meta(pattern=BLOB_PATTERN)]
    bytes: int
    media_type: str | None = None


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", omit_defaults=True):
    """A text; a large one that is not the model's own stands in `blob`, with an empty `text`."""

    text: str
    blob: BlobRef | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image", omit_defaults=True, kw_only=True):
    """An image by `data` or by `url`; large data is replaced by `blob` on the wire."""

    data: bytes | None = None
    url: str | None = None
    media_type: str | None = None
    blob: BlobRef | None = None


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file", omit_defaults=True, kw_only=True):
    """A file by `data` or by `url`; large data is replaced by `blob` on the wire."""

    data: bytes | None = None
    url: str | None = None
    media_type: str = "application/octet-stream"
    filename: str | None = None
    blob: BlobRef | None = None


class ReasoningPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning", omit_defaults=True, kw_only=True):
    """Reasoning as the provider gave it. `data` holds what it wants back unchanged (signatures, encrypted state)."""

    text: str = ""
    provider: str = ""
    data: dict[str, Any] = {}


class ToolCallPart(msgspec.Struct, frozen=True, tag_field="type", tag="tool_call"):
    tool_call: ToolCall


OutputPart: TypeAlias = TextPart | ImagePart | FilePart


class ToolResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a call gave: `result` is any JSON value, `content` rich parts instead of it, `blob` a large result's place."""

    tool_call_id: str
    tool_name: str
    result: Any = None
    is_error: bool = False
    content: list[OutputPart] | None = None
    blob: BlobRef | None = None


class ToolResultPart(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_result: ToolResult


Part: TypeAlias = TextPart | ImagePart | FilePart | ReasoningPart | ToolCallPart | ToolResultPart


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One entry of a transcript. `usage`, `cost`, `finish_reason`, `model` and `attempt` stand on assistant messages.

    `metadata` of the runtime's own messages says why they are there: `{"turnmill": "interrupted"}` for an answer that
    was stopped, `loop_guard`, `output_repair` and `summary` for what the model is told.
    """

    role: Role
    content: str | list[Part]
    turn_id: str | None = None
    step: int | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    model: str | None = None
    metadata: dict[str, Any] = {}
    cost: Cost | None = None
    attempt: int = 1

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def tool_calls(self) -> list[ToolCall]:
        if isinstance(self.content, str):
            return []
        return [part.tool_call for part in self.content if isinstance(part, ToolCallPart)]

    @property
    def tool_results(self) -> list[ToolResult]:
        if isinstance(self.content, str):
            return []
        return [part.tool_result for part in self.content if isinstance(part, ToolResultPart)]

    @property
    def reasoning(self) -> list[ReasoningPart]:
        if isinstance(self.content, str):
            return []
        return [part for part in self.content if isinstance(part, ReasoningPart)]


class Termination(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Why a turn ended. `kind` is one of completed, step_limit, stop_condition, hook_stop, tool_terminated,
    repeated_tool_error, aborted, failed; the other fields say more where they apply."""

    kind: str
    provider_finish_reason: str | None = None
    reason: str | None = None
    stop_condition: str | None = None
    tool_name: str | None = None
    final_step_number: int = 0
    has_text: bool = False
    has_tool_calls: bool = False
    last_tool_error: str | None = None
    error_type: str | None = None
    message: str | None = None


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error that travels: `kind` is a stable word, `message` speaks to a person."""

    kind: str
    message: str
    retryable: bool = False
    retry_after_seconds: float | None = None
    status: int | None = None
    pending: list[str] = []
    """The ids of the calls that a turn waits for, where that is why something was refused."""
