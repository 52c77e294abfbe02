"""What a format makes of recorded bytes: the code that a worker runs, without a connection.

Text, reasoning and calls are taken from the live events, so that an answer that breaks off shows what watchers had seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo, Message, ToolCall, Usage
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted

from .base import Completed, Live, ProviderError, ProviderRequest
from .format import Endpoint, Reply, WireFormat
from .openai_chat_calls import read_arguments
from .registry import open_format

_PIECE_BYTES_MAX = 64
_ASKED = Message(role="user", content="?")


class DecodedCall(msgspec.Struct, kw_only=True):
    id: str = ""
    name: str = ""
    pieces: list[str] = []


def decode_body(
    api: str,
    chunks: Iterable[bytes],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    streaming: bool = True,
    now: float = 0.0,
) -> dict[str, Any]:
    """What a worker makes of a response that comes in these chunks.

    Returns `text`, `reasoning`, `tool_calls` (`id`, `name`, `arguments`, `valid`), `finish`, `usage` (`input_total`,
    `output_total`, `cached`, `reasoning`) and `error` (`kind`, `retryable`, `midstream`, `message`); what is not known is
    left out. `api` is a name of `registry.APIS`, `now` Unix time in seconds.
    """
    wire_format = open_format(api, Endpoint(name=api, base_url="http://localhost"))
    if not 200 <= status < 300:
        info = wire_format.read_refusal(status, headers or {}, b"".join(chunks), now)
        return {"tool_calls": [], "finish": "error", "error": _error(info, midstream=False)}
    return _decode_answer(wire_format, chunks, streaming)


def split_body(body: bytes, how: str) -> list[bytes]:
    """The body in pieces: `whole`, `1` (byte by byte), or `random:SEED`. Raises `ValueError` for anything else."""
    if how == "whole":
        return [body]
    if how == "1":
        return [body[start : start + 1] for start in range(len(body))]
    kind, _, seed = how.partition(":")
    if kind != "random" or not seed:
        raise ValueError(f"{how!r} is no way to split: whole, 1 or random:SEED")
    dice, pieces, start = random.Random(seed), [], 0
    while start < len(body):
        end = start + dice.randint(1, _PIECE_BYTES_MAX)
        pieces.append(body[start:end])
        start = end
    return pieces


def _decode_answer(wire_format: WireFormat, chunks: Iterable[bytes], streaming: bool) -> dict[str, Any]:
    options: dict[str, Any] = {} if streaming else {"stream": False}
    reply = wire_format.begin_reply(ProviderRequest(model="", messages=[_ASKED], options=options))
    live: list[Live] = []
    completed: Completed | None = None
    info: ErrorInfo | None = None
    try:
        for event in read_events(reply, chunks):
            live.append(event)
        completed = reply.completed()
    except ProviderError as error:
        info = error.info
    return _describe(live, reply, completed, info)


def read_events(reply: Reply, chunks: Iterable[bytes]) -> Iterable[Live]:
    """The events of a body, read as `HttpProvider` reads it. Raises `ProviderError`."""
    for chunk in chunks:
        if chunk:
            yield from reply.feed(chunk)
        if reply.failure is not None:
            raise reply.failure
        if reply.is_done:
            return
    yield from reply.close()
    if reply.failure is not None:
        raise reply.failure


def _describe(live: list[Live], reply: Reply, completed: Completed | None, info: ErrorInfo | None) -> dict[str, Any]:
    told: dict[str, Any] = {"text": "".join(event.text for event in live if isinstance(event, TextDelta))}
    reasoning = "".join(event.text or "" for event in live if isinstance(event, ReasoningDelta))
    if reasoning:
        told["reasoning"] = reasoning
    finished = completed.message.tool_calls if completed is not None else []
    told["tool_calls"] = [_call(position, call, finished) for position, call in enumerate(_calls_of(live))]
    told["finish"] = completed.finish_reason if completed is not None else "error"
    if reply.usage is not None:
        told["usage"] = _usage(reply.usage)
    if info is not None:
        told["error"] = _error(info, midstream=bool(live) or reply.has_begun)
    return told


def _calls_of(live: list[Live]) -> list[DecodedCall]:
    calls: dict[int, DecodedCall] = {}
    for event in live:
        if isinstance(event, ToolCallStarted | ToolCallDelta):
            call = calls.setdefault(event.index, DecodedCall(pieces=[]))
            call.id = event.tool_call_id or call.id
            if isinstance(event, ToolCallStarted):
                call.name = event.name or call.name
            else:
                call.name = call.name or event.name_delta or ""
                call.pieces.append(event.arguments_delta or "")
    return list(calls.values())


def _call(position: int, call: DecodedCall, finished: list[ToolCall]) -> dict[str, Any]:
    """Arguments as the object that a tool would get, or as the model's text where that is none."""
    text = "".join(call.pieces)
    arguments, error = read_arguments(text)
    if position < len(finished):
        arguments, error = finished[position].arguments, finished[position].error
    return {
        "id": call.id,
        "name": call.name,
        "arguments": arguments if error is None else text,
        "valid": error is None,
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_total": usage.input_tokens,
        "output_total": usage.output_tokens,
        "cached": usage.cached_tokens,
        "reasoning": usage.reasoning_tokens,
    }


def _error(info: ErrorInfo, *, midstream: bool) -> dict[str, Any]:
    return {
        "kind": str(info.kind),
        "retryable": info.retryable,
        "midstream": midstream,
        "message": info.message,
    }
