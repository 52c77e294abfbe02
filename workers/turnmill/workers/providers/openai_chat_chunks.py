"""The chunks of /chat/completions as they are on the wire.

The structs fix the shape of a chunk and leave its leaves open, because servers put other types there than the API says.
What the strict decoder refuses is read once more by the standard library's, which takes what models and relays write.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from turnmill.protocol.content import Cost, Usage


class Function(msgspec.Struct, gc=False):
    name: Any = None
    arguments: Any = None


class CallDelta(msgspec.Struct):
    index: Any = None
    id: Any = None
    function: Function | None = None
    extra_content: Any = None


class Delta(msgspec.Struct):
    content: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    tool_calls: list[CallDelta | None] | None = None


class Choice(msgspec.Struct):
    index: Any = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: Any = None
    error: Any = None
    usage: Any = None


class Chunk(msgspec.Struct):
    choices: list[Choice | None] | None = None
    usage: Any = None
    error: Any = None
    model: Any = None
    object: Any = None
    x_groq: Any = None


_AMOUNT_LIMIT = 10**9
"""No call costs that much; and what a provider says must not overflow the sums."""
_DECODE_CHUNK = msgspec.json.Decoder(Chunk | None).decode


def read_usage(value: dict[str, Any]) -> Usage:
    """The tokens, whichever of the fields a provider uses."""
    prompt = _object(value.get("prompt_tokens_details"))
    completion = _object(value.get("completion_tokens_details"))
    input_tokens, output_tokens = _count(value.get("prompt_tokens")), _count(value.get("completion_tokens"))
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=_first_count(
            prompt.get("cached_tokens"), value.get("prompt_cache_hit_tokens"), value.get("cached_tokens")
        ),
        cache_write_tokens=_first_count(
            prompt.get("cache_write_tokens"),
            prompt.get("cache_creation_tokens"),
            value.get("cache_creation_input_tokens"),
        ),
        cache_miss_tokens=_count(value.get("prompt_cache_miss_tokens")),
        reasoning_tokens=_first_count(completion.get("reasoning_tokens"), value.get("reasoning_tokens")),
        total_tokens=_count(value.get("total_tokens")) or input_tokens + output_tokens,
    )


def read_cost(value: dict[str, Any]) -> Cost | None:
    """What a relay says the call cost, in US dollars: a number, or an object with the parts. None where it says nothing."""
    cost = value.get("cost")
    if not isinstance(cost, dict):
        cost = {"total_cost": cost}
    total = _amount(cost.get("total_cost"))
    if total is None:
        return None
    return Cost(
        input=_amount(cost.get("input_tokens_cost")),
        output=_amount(cost.get("output_tokens_cost")),
        total=total,
        source="provider",
    )


def decode_chunk(data: bytes) -> Chunk | None:
    """A chunk, or None for JSON that is no object (keep-alives). Raises `ValueError` for what is no JSON or no chunk."""
    try:
        return _DECODE_CHUNK(data)
    except msgspec.DecodeError:
        value = decode_any(data)
        return msgspec.convert(value, Chunk) if isinstance(value, dict) else _chunk_of_list(value)


def _chunk_of_list(value: Any) -> Chunk | None:
    """Some servers wrap an error in a list."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and value[0].get("error"):
        return msgspec.convert(value[0], Chunk)
    return None


def decode_any(data: bytes) -> Any:
    """JSON as it is; else as models and relays write it: raw control characters in strings, halves of surrogate pairs.

    Raises `ValueError`."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return _mend(json.loads(data.decode("utf-8", "replace"), strict=False, parse_constant=_refuse_constant))


def _mend(value: Any) -> Any:
    """Replaces halves of surrogate pairs, which no encoder of ours takes."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_mend(key): _mend(item) for key, item in value.items()}
        case list():
            return [_mend(item) for item in value]
        case _:
            return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return max(0, int(value)) if isinstance(value, (int, float)) else 0


def _amount(value: Any) -> Decimal | None:
    """A number as it was written, which its shortest text is."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and 0 <= amount < _AMOUNT_LIMIT else None


def _first_count(*values: Any) -> int:
    return next((_count(value) for value in values if value), 0)
