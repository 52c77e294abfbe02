"""Calls, results, tokens, costs and times as a person reads them: short texts for lines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from turnmill.protocol.content import AttemptUsage, Cost, TextPart, ToolCall, ToolResult, Usage

if TYPE_CHECKING:
    from turnmill.protocol.events import TurnSummary

_VALUE_LENGTH_MAX = 60
# What a model or a tool says must not steer the terminal.
_CONTROL_CHARACTERS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def clean(text: str) -> str:
    """Without control characters, except for tab and line feed."""
    return text.translate(_CONTROL_CHARACTERS)


def shortened(text: str, length_max: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


def call_text(call: ToolCall) -> str:
    """`weather(city="Oslo")`."""
    return f"{call.name}({arguments_text(call.arguments)})"


def arguments_text(arguments: Mapping[str, Any]) -> str:
    encoded = [(name, msgspec.json.encode(value, enc_hook=repr).decode()) for name, value in arguments.items()]
    return ", ".join(f"{name}={shortened(value, _VALUE_LENGTH_MAX)}" for name, value in encoded)


def result_text(result: ToolResult) -> str:
    if result.content is not None:
        return "".join(
            part.text if isinstance(part, TextPart) else f"[{type(part).__name__}]" for part in result.content
        )
    if result.blob is not None:
        return f"[{result.blob.bytes} bytes, stored apart]"
    if isinstance(result.result, str):
        return result.result
    return msgspec.json.encode(result.result, enc_hook=repr).decode()


def summary_facts(summary: TurnSummary) -> str:
    """`2 steps, 413 tokens, 0.0012 USD, 1.9 s`; an unknown cost is left out."""
    steps = f"{summary.steps} step" + ("" if summary.steps == 1 else "s")
    facts = [steps, tokens_text(summary.usage)]
    if summary.cost is not None and summary.cost.total is not None:
        facts.append(cost_text(summary.cost))
    return ", ".join([*facts, seconds_text(summary.ended_at - summary.started_at)])


def tokens_text(usage: Usage) -> str:
    total = usage.total_tokens or usage.input_tokens + usage.output_tokens
    return f"{total} tokens" if total else "no token count"


def cost_text(cost: Cost) -> str:
    """`0.0012 USD`; `unknown` where no price was known, and where currencies were mixed."""
    if cost.total is None:
        return "unknown"
    return f"{cost.total.normalize():f} {cost.currency}"


def attempt_text(attempt: AttemptUsage) -> str:
    """`step 1 attempt 2: rate_limited, 90 tokens, 0.001 USD`."""
    facts = [attempt.outcome]
    if attempt.usage is not None:
        facts.append(tokens_text(attempt.usage))
    if attempt.cost is not None and attempt.cost.total is not None:
        facts.append(cost_text(attempt.cost))
    return f"step {attempt.step} attempt {attempt.attempt}: {', '.join(facts)}"


def seconds_text(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Plain columns: wide enough for what is in them, and fit for `grep` and `cut`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
