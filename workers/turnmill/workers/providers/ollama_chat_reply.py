"""An answer of Ollama's /api/chat, put together from its lines. An answer that was not streamed is one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from turnmill.protocol.content import Part, ReasoningPart, TextPart, ToolCallPart, Usage

from .answer import Answer, broken, count_of, text_of
from .base import Completed, Live, ProviderRequest
from .http_errors import Problem
from .openai_chat_calls import CallBuilder, arguments_text


class _Function(msgspec.Struct, gc=False):
    name: Any = None
    arguments: Any = None


class _Call(msgspec.Struct, gc=False):
    function: _Function | None = None
    id: Any = None


class _Message(msgspec.Struct, gc=False):
    content: Any = None
    thinking: Any = None
    tool_calls: list[_Call | None] | None = None


class _Line(msgspec.Struct, gc=False):
    model: Any = None
    message: _Message | None = None
    done: bool | None = None
    done_reason: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Line).decode


class Reply(Answer):
    """One answer as far as it was read. `take_line` the lines, look at `failure` after each, take `completed` at the end."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        super().__init__(request, provider_name)
        self._parts: list[tuple[str, list[str]] | CallBuilder] = []
        self._reason = ""

    def take_line(self, line: bytes) -> list[Live]:
        """What a line tells watchers."""
        try:
            told = _decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            self.failure = self.failure or broken(f"a line cannot be read: {error}: {line[:200]!r}")
            return []
        if told.error:
            message = told.error if isinstance(told.error, str) else msgspec.json.encode(told.error).decode()
            self._fail(Problem(message=message), retryable=True)
            return []
        self._model = text_of(told.model) or self._model
        live = list(self._take_message(told.message)) if told.message is not None else []
        if told.done:
            self._end(told)
        return live

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` where the stream ended before the answer did."""
        if not self.is_done:
            raise self._cut_off(began=bool(self._parts), missing="its last line")
        parts: list[Part] = []
        for begun in self._parts:
            if isinstance(begun, CallBuilder):
                parts.append(ToolCallPart(begun.finish()))
            elif begun[0] == "thinking":
                parts.append(ReasoningPart(text="".join(begun[1]), provider=self._provider_name))
            else:
                parts.append(TextPart("".join(begun[1])))
        return self._whole(parts, {"stop": "stop", "": "stop", "length": "length"}.get(self._reason, "other"))

    def _take_message(self, message: _Message) -> Iterator[Live]:
        if thinking := text_of(message.thinking):
            self._add("thinking", thinking)
            yield self.think(thinking)
        if content := text_of(message.content):
            self._add("text", content)
            yield self.say(content)
        for call in message.tool_calls or ():
            if call is not None and call.function is not None:
                yield from self._take_call(call, call.function)

    def _take_call(self, call: _Call, function: _Function) -> Iterator[Live]:
        builder = self.new_call(text_of(call.id), text_of(function.name))
        self._parts.append(builder)
        yield self.tell_call(builder)
        arguments = arguments_text(function.arguments) or "{}"
        builder.extend("", "", arguments)
        yield self.tell_arguments(builder, arguments)

    def _add(self, kind: str, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self._parts.append((kind, [text]))

    def _end(self, told: _Line) -> None:
        self._reason = text_of(told.done_reason)
        taken, given = count_of(told.prompt_eval_count), count_of(told.eval_count)
        if taken or given:
            self.usage = Usage(input_tokens=taken, output_tokens=given, total_tokens=taken + given)
        self.is_done = True
