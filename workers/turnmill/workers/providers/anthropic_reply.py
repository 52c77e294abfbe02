"""An answer of Anthropic's Messages API, put together from its events.

An answer is a list of blocks. Text, thinking and calls are ours to understand; every other kind (tools that the provider
runs, their results, what is yet to come) is kept as it came and sent back in its place. A plain JSON answer is read as the
events that it would have been. The last usage counts, field by field: relays estimate in the first event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from turnmill.protocol.content import Part, ReasoningPart, TextPart, ToolCallPart, Usage

from .answer import Answer, broken, count_of, object_of, text_of
from .anthropic_content import BLOCK, CALLER, CITATIONS, CONTAINER, SIGNATURE
from .anthropic_request import answer_tool
from .base import Completed, Live, ProviderRequest
from .http_errors import read_problem, read_problem_body
from .openai_chat_calls import CallBuilder, arguments_text, read_arguments
from .openai_chat_chunks import decode_any, read_cost
from .sse import SseEvent

_FINISH_BY_WORD = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "pause",
    "compaction": "pause",
    "refusal": "refusal",
}
_CACHED, _WRITTEN = "cache_read_input_tokens", "cache_creation_input_tokens"
_INPUT_COUNTS = ("input_tokens", _CACHED, _WRITTEN)


class _Delta(msgspec.Struct, gc=False):
    type: Any = None
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    signature: Any = None
    citation: Any = None
    stop_reason: Any = None
    container: Any = None


class _Event(msgspec.Struct):
    type: Any = None
    index: Any = None
    delta: _Delta | None = None
    content_block: Any = None
    message: Any = None
    usage: Any = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _Block:
    """One block as it grows. `raw` is what it began with; `call` is set for one of our tools, `says` where the input is
    the answer itself (see `anthropic_request.answer_tool`)."""

    def __init__(self, kind: str, raw: dict[str, Any]) -> None:
        self.kind = kind
        self.raw = raw
        self.text: list[str] = []
        self.input: list[str] = []
        self.signature: list[str] = []
        self.citations: list[Any] = []
        self.call: CallBuilder | None = None
        self.says = False


class Reply(Answer):
    """One answer as far as it was read. `take` the events, look at `failure` after each, take `completed` at the end."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        super().__init__(request, provider_name)
        self._blocks: dict[int, _Block] = {}
        self._counts: dict[str, Any] = {}
        self._finish_word = ""
        self._container = ""
        self._answer_tool = answer_tool(request)

    @property
    def is_finished(self) -> bool:
        return self.is_done or bool(self._finish_word)

    def take(self, event: SseEvent) -> list[Live]:
        """What an event of the stream tells watchers."""
        data = event.data
        try:
            told = _decode_event(data)
        except (msgspec.DecodeError, RecursionError):
            return self._take_odd(data)
        kind = told.type or event.name.decode("utf-8", "replace")
        if kind == "content_block_delta" and told.delta is not None:
            return self._take_delta(self._block_at(told.index), told.delta, data)
        return self._take_event(kind, told, data)

    def take_whole(self, body: bytes) -> list[Live]:
        """The same for an answer that came as one JSON body."""
        try:
            told = decode_any(body)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("content"), list):
            self._fail(read_problem_body(body))
            return []
        self._begin_message(told)
        live: list[Live] = []
        for index, block in enumerate(told["content"]):
            if isinstance(block, dict):
                live += self._take_whole_block(index, block)
        self._finish_word = text_of(told.get("stop_reason"))
        self._container = text_of(object_of(told.get("container")).get("id"))
        self.is_done = True
        return live

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` where the stream ended before the answer did."""
        if not self.is_finished:
            raise self._cut_off(began=bool(self._blocks), missing="a stop reason")
        blocks = list(self._blocks.values())
        if any(block.says for block in blocks):
            blocks = [block for block in blocks if block.says or block.kind != "text"]  # the answer is the tool's input
        parts = [part for block in blocks for part in self._parts(block)]
        if self._container:
            parts.append(ReasoningPart(provider=self._provider_name, data={CONTAINER: self._container}))
        finish = _FINISH_BY_WORD.get(self._finish_word, "other") if self._finish_word else "stop"
        if finish == "tool_calls" and not any(isinstance(part, ToolCallPart) for part in parts):
            finish = "stop"  # it called the tool that stands for the answer
        return self._whole(parts, finish)

    # ---- events

    def _take_odd(self, data: bytes) -> list[Live]:
        """What the strict decoder refuses: JSON as relays write it, marks of other APIs, or no JSON at all."""
        if data.strip() in (b"[DONE]", b"null", b""):
            self.is_done = self.is_finished
            return []
        try:
            told = msgspec.convert(decode_any(data), _Event)
        except (ValueError, RecursionError) as error:
            if not self.is_finished:
                self.failure = self.failure or broken(f"an event cannot be read: {error}: {data[:200]!r}")
            return []
        if told.delta is not None and told.type == "content_block_delta":
            return self._take_delta(self._block_at(told.index), told.delta, data)
        return self._take_event(text_of(told.type), told, data)

    def _take_event(self, kind: str, told: _Event, data: bytes) -> list[Live]:
        match kind:
            case "content_block_start":
                return list(self._begin_block(told.index, object_of(told.content_block)))
            case "content_block_stop":
                block = self._blocks.get(told.index) if isinstance(told.index, int) else None
                return list(self._end_block(block)) if block is not None else []
            case "message_start":
                self._begin_message(object_of(told.message))
            case "message_delta":
                if told.delta is not None:
                    self._finish_word = text_of(told.delta.stop_reason) or self._finish_word
                    self._container = text_of(object_of(told.delta.container).get("id")) or self._container
                self._take_usage(told.usage)
            case "message_stop":
                self.is_done = True
            case "error":
                self._fail(read_problem(decode_any(data)))
            case _ if told.error:
                self._fail(read_problem({"error": told.error}))
        return []

    def _begin_message(self, message: dict[str, Any]) -> None:
        self._model = text_of(message.get("model")) or self._model
        self._take_usage(message.get("usage"))

    def _take_whole_block(self, index: int, block: dict[str, Any]) -> Iterator[Live]:
        """A block of a plain answer, as the events that it would have been."""
        kind = block.get("type")
        begun = {
            name: value for name, value in block.items() if name not in ("text", "thinking", "signature", "citations")
        }
        if kind not in ("text", "thinking"):
            begun = block
        yield from self._begin_block(index, begun)
        grown = self._blocks[index]
        if kind in ("text", "thinking"):
            delta = _Delta(text=block.get("text"), thinking=block.get("thinking"), signature=block.get("signature"))
            yield from self._take_delta(grown, delta, b"")
            citations = block.get("citations")
            grown.citations += citations if isinstance(citations, list) else []
        yield from self._end_block(grown)

    # ---- blocks

    def _block_at(self, index: Any) -> _Block | None:
        """The block of that index, or the last one where an event names none."""
        if isinstance(index, int):
            return self._blocks.get(index)
        return next(reversed(self._blocks.values()), None)

    def _begin_block(self, index: Any, raw: dict[str, Any]) -> Iterator[Live]:
        if not isinstance(index, int):
            index = max(self._blocks, default=-1) + 1
        kind = text_of(raw.get("type"))
        block = self._blocks[index] = _Block(kind, raw)
        if kind == "tool_use":
            yield from self._begin_call(block)
        elif kind in ("text", "thinking"):
            # Most begin empty and grow; a relay may say something at once.
            delta = _Delta(text=raw.get("text"), thinking=raw.get("thinking"), signature=raw.get("signature"))
            yield from self._take_delta(block, delta, b"")
        elif kind == "fallback":
            self._model = text_of(object_of(raw.get("to")).get("model")) or self._model

    def _begin_call(self, block: _Block) -> Iterator[Live]:
        name, arguments = text_of(block.raw.get("name")), arguments_text(block.raw.get("input"))
        if name and name == self._answer_tool:
            block.says = True
        else:
            block.call = self.new_call(text_of(block.raw.get("id")), name)
            caller = object_of(block.raw.get("caller"))
            if caller.get("type", "direct") != "direct":
                block.call.metadata = {self._provider_name: {CALLER: caller}}
            yield self.tell_call(block.call)
        if arguments:
            yield from self._take_input(block, arguments)

    def _take_delta(self, block: _Block | None, delta: _Delta, data: bytes) -> list[Live]:
        if block is None:
            return []
        live: list[Live] = []
        if delta.text and isinstance(delta.text, str) and block.kind == "text":
            block.text.append(delta.text)
            live.append(self.say(delta.text))
        elif delta.partial_json and isinstance(delta.partial_json, str):
            live += self._take_input(block, delta.partial_json)
        elif delta.thinking and isinstance(delta.thinking, str):
            block.text.append(delta.thinking)
            live.append(self.think(delta.thinking))
        elif delta.citation:
            block.citations.append(delta.citation)
        elif block.kind not in ("text", "thinking", "tool_use") and data:
            _grow(block.raw, object_of(object_of(decode_any(data)).get("delta")))
        if delta.signature and isinstance(delta.signature, str):
            block.signature.append(delta.signature)
        return live

    def _take_input(self, block: _Block, text: str) -> list[Live]:
        if block.says:
            block.text.append(text)
            return [self.say(text)]
        block.input.append(text)
        if block.call is None:
            return []
        block.call.extend("", "", text)
        return [self.tell_arguments(block.call, text)]

    def _end_block(self, block: _Block) -> Iterator[Live]:
        """Tells what goes back to the provider, once it is whole."""
        if block.kind in ("text", "tool_use"):
            return
        part = self._reasoning_part(block)
        if part is not None and part.data:
            yield self.tell_state(part.data, is_signature=SIGNATURE in part.data)

    # ---- in the end

    def _parts(self, block: _Block) -> Iterator[Part]:
        if block.call is not None:
            yield ToolCallPart(block.call.finish())
        elif block.kind in ("text", "tool_use"):
            if block.text:
                yield TextPart("".join(block.text))
            if block.citations:
                yield ReasoningPart(provider=self._provider_name, data={CITATIONS: block.citations})
        else:
            part = self._reasoning_part(block)
            if part is not None:
                yield part

    def _reasoning_part(self, block: _Block) -> ReasoningPart | None:
        """Thinking, or a block that is only kept."""
        text, signature = "".join(block.text), "".join(block.signature)
        if block.kind == "thinking":
            data: dict[str, Any] = {SIGNATURE: signature} if signature else {}
            return ReasoningPart(text=text, provider=self._provider_name, data=data) if text or data else None
        if not block.kind:
            return None
        raw = block.raw
        if block.input:
            raw = {**raw, "input": read_arguments("".join(block.input))[0]}
        return ReasoningPart(provider=self._provider_name, data={BLOCK: raw})

    def _take_usage(self, value: Any) -> None:
        """Field by field: a later event that leaves out the input, or has 0 for all of it, only counts the output."""
        told = {name: count for name, count in object_of(value).items() if count is not None}
        if not any(count_of(told.get(name)) for name in _INPUT_COUNTS):
            told = {
                name: count for name, count in told.items() if name not in _INPUT_COUNTS or name not in self._counts
            }
        if not told:
            return
        self._counts.update(told)
        counts = self._counts
        cached, written = count_of(counts.get(_CACHED)), count_of(counts.get(_WRITTEN))
        details = object_of(counts.get("output_tokens_details"))
        total_input, output = (
            count_of(counts.get("input_tokens")) + cached + written,
            count_of(counts.get("output_tokens")),
        )
        self.usage = Usage(
            input_tokens=total_input,
            output_tokens=output,
            cached_tokens=cached,
            cache_write_tokens=written,
            reasoning_tokens=count_of(details.get("thinking_tokens")),
            total_tokens=total_input + output,
        )
        self.cost = read_cost(counts) or self.cost


def _grow(raw: dict[str, Any], delta: dict[str, Any]) -> None:
    """A delta of a kind that is not known: text is appended, the rest is set."""
    for name, value in delta.items():
        if name == "type" or value is None:
            continue
        if isinstance(value, str) and isinstance(raw.get(name), str):
            raw[name] += value
        else:
            raw[name] = value
