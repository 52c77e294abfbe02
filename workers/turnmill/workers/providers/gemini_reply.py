"""An answer of Gemini's generateContent, put together from its chunks.

Each chunk holds parts of the first candidate. Calls come whole and without ids, or, from Vertex, as pieces of arguments by
JSON path. A signature on a part goes back on the same part; on a text it may stand in an empty one at the end.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo, ImagePart, Part, ReasoningPart, TextPart, ToolCallPart, Usage
from turnmill.protocol.errors import ErrorKind

from .answer import Answer, broken, count_of, object_of, text_of
from .base import Completed, Live, ProviderError, ProviderRequest
from .http_errors import error_info, read_problem, read_problem_body
from .openai_chat_calls import CallBuilder
from .sse import SseEvent

SIGNATURE = "thoughtSignature"
ITEM = "item"
"""The key in `ReasoningPart.data` under which a part of the provider's own stands whole."""
_FINISH_BY_WORD = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "IMAGE_PROHIBITED_CONTENT": "content_filter",
    "MODEL_ARMOR": "content_filter",
}
_FAILURES = frozenset(
    {
        "MALFORMED_FUNCTION_CALL",
        "UNEXPECTED_TOOL_CALL",
        "MALFORMED_RESPONSE",
        "MISSING_THOUGHT_SIGNATURE",
        "TOO_MANY_TOOL_CALLS",
    }
)
"""Answers that are none, though they come with status 200; another attempt may be one."""
_PATH = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\['([^']*)'\]")
_SCALARS = ("stringValue", "numberValue", "boolValue", "nullValue")
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Reply(Answer):
    """One answer as far as it was read. `take` the events, look at `failure` after each, take `completed` at the end."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        super().__init__(request, provider_name)
        self._parts: list[_Text | _Call | Part] = []
        self._open_call: _PiecedCall | None = None
        self._finish = ""
        self._chunks = 0

    @property
    def is_finished(self) -> bool:
        return self.is_done or bool(self._finish)

    def take(self, event: SseEvent) -> list[Live]:
        """What an event of the stream tells watchers."""
        data = event.data.strip()
        if not data or data == b"[DONE]":
            return []
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            if not self.is_finished:
                self.failure = self.failure or broken(f"a chunk cannot be read: {error}: {data[:200]!r}")
            return []
        return self._take_chunk(chunk)

    def take_whole(self, body: bytes) -> list[Live]:
        """The same for one JSON body: an answer, or a list of chunks."""
        try:
            chunks = _decode(body)
        except (msgspec.DecodeError, RecursionError):
            self.failure = ProviderError(error_info(read_problem_body(body)))
            return []
        live: list[Live] = []
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            live += self._take_chunk(chunk)
        return live

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` where the stream ended before the answer did."""
        if not self.is_finished:
            raise self._cut_off(began=bool(self._parts), missing="a finish reason")
        parts = [part for begun in self._parts for part in self._finish_part(begun)]
        return self._whole(parts, self._finish)

    # ---- chunks

    def _take_chunk(self, chunk: Any) -> list[Live]:
        if not isinstance(chunk, dict):
            return []
        if chunk.get("error"):
            self._fail(read_problem(chunk))
            return []
        self._model = text_of(chunk.get("modelVersion")) or self._model
        usage = chunk.get("usageMetadata")
        if isinstance(usage, dict):
            self.usage = _read_usage(usage)
        live: list[Live] = []
        candidates = chunk.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else ():
            if isinstance(candidate, dict) and candidate.get("index") in (0, None):
                live += self._take_candidate(candidate)
                break
        else:
            if object_of(chunk.get("promptFeedback")).get("blockReason"):
                self._finish = "content_filter"
        return live

    def _take_candidate(self, candidate: dict[str, Any]) -> Iterator[Live]:
        parts = object_of(candidate.get("content")).get("parts")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                yield from self._take_part(part)
        word = candidate.get("finishReason")
        if not word or word == "FINISH_REASON_UNSPECIFIED":
            return
        if word in _FAILURES:
            text = f"{word}: {candidate.get('finishMessage') or 'the model wrote no valid call'}"
            info = ErrorInfo(kind=ErrorKind.PROVIDER_ERROR, message=text, retryable=True)
            self.failure = self.failure or ProviderError(info, self.usage)
        yield from self._close_call()
        self._finish = _FINISH_BY_WORD.get(word, "other")

    def _take_part(self, part: dict[str, Any]) -> Iterator[Live]:
        signature = text_of(part.get(SIGNATURE))
        if "functionCall" in part:
            yield from self._take_call(object_of(part["functionCall"]), signature)
        elif isinstance(part.get("text"), str):
            yield from self._take_text(part["text"], bool(part.get("thought")), signature)
        elif isinstance(part.get("inlineData"), dict):
            yield from self._take_data(part["inlineData"], part)
        elif part:
            yield from self._take_own(part)

    def _take_text(self, text: str, is_thought: bool, signature: str) -> Iterator[Live]:
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, _Text) or last.is_thought != is_thought or last.signature:
            if not text and not signature:
                return
            last = _Text(is_thought)
            self._parts.append(last)
        if text:
            last.pieces.append(text)
            yield self.think(text) if is_thought else self.say(text)
        if signature:
            last.signature = signature
            yield self.tell_state({SIGNATURE: signature}, is_signature=True)

    def _take_data(self, data: dict[str, Any], part: dict[str, Any]) -> Iterator[Live]:
        """An image that the model has made; other kinds go back as they came."""
        media_type = text_of(data.get("mimeType"))
        try:
            content = base64.b64decode(text_of(data.get("data")), validate=True)
        except binascii.Error:
            content = b""
        if content and media_type.startswith("image/") and not part.get("thought"):
            self._parts.append(ImagePart(data=content, media_type=media_type))
        else:
            yield from self._take_own(part)

    def _take_own(self, part: dict[str, Any]) -> Iterator[Live]:
        """What the provider has done by itself, such as code that it ran."""
        self._parts.append(ReasoningPart(provider=self._provider_name, data={ITEM: part}))
        yield self.tell_state({ITEM: part})

    # ---- calls

    def _take_call(self, call: dict[str, Any], signature: str) -> Iterator[Live]:
        name, pieces = text_of(call.get("name")), call.get("partialArgs")
        if name and not pieces and not call.get("willContinue"):
            yield from self._close_call()
            builder = self._begin_call(text_of(call.get("id")), name, signature)
            yield self.tell_call(builder)
            arguments = call.get("args")
            yield from self._tell_whole(builder, arguments if arguments is not None else {})
            return
        if name:
            yield from self._close_call()
            builder = self._begin_call(text_of(call.get("id")), name, signature)
            self._open_call = _PiecedCall(builder, call.get("args"))
            yield self.tell_call(builder)
        if self._open_call is None:
            return
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, dict):
                self._open_call.take(piece)
        if not call.get("willContinue"):
            yield from self._close_call()

    def _begin_call(self, call_id: str, name: str, signature: str) -> CallBuilder:
        builder = self.new_call(call_id, name)
        if signature:
            builder.metadata = {self._provider_name: {SIGNATURE: signature}}
        self._parts.append(_Call(builder))
        return builder

    def _close_call(self) -> Iterator[Live]:
        """The end of a call that came in pieces; it may be missing."""
        pieced, self._open_call = self._open_call, None
        if pieced is not None:
            yield from self._tell_whole(pieced.builder, pieced.arguments)

    def _tell_whole(self, builder: CallBuilder, arguments: Any) -> Iterator[Live]:
        text = _encode(arguments).decode()
        builder.extend("", "", text)
        yield self.tell_arguments(builder, text)

    def _finish_part(self, begun: _Text | _Call | Part) -> list[Part]:
        match begun:
            case _Call():
                return [ToolCallPart(begun.builder.finish())]
            case _Text():
                return begun.parts(self._provider_name)
            case _:
                return [begun]


class _Text:
    """A run of text, or of thoughts."""

    def __init__(self, is_thought: bool) -> None:
        self.is_thought = is_thought
        self.pieces: list[str] = []
        self.signature = ""

    def parts(self, provider_name: str) -> list[Part]:
        """A signature on a text stands behind it, because a text of ours holds nothing else."""
        text, data = "".join(self.pieces), {SIGNATURE: self.signature} if self.signature else {}
        if self.is_thought:
            return [ReasoningPart(text=text, provider=provider_name, data=data)]
        signed: list[Part] = [ReasoningPart(provider=provider_name, data=data)] if data else []
        return [TextPart(text), *signed] if text else signed


class _Call:
    def __init__(self, builder: CallBuilder) -> None:
        self.builder = builder


class _PiecedCall:
    """A call whose arguments come by JSON path; the pieces of one text follow each other."""

    def __init__(self, builder: CallBuilder, arguments: Any) -> None:
        self.builder = builder
        self.arguments: dict[str, Any] = dict(object_of(arguments))
        self._continued = ""

    def take(self, piece: dict[str, Any]) -> None:
        path = text_of(piece.get("jsonPath"))
        name = next((name for name in _SCALARS if name in piece), None)
        if name is None:
            return
        value = None if name == "nullValue" else piece[name]
        steps = [part or quoted or int(index) for part, index, quoted in _PATH.findall(path)]
        if steps:
            _put(self.arguments, steps, value, appends=path == self._continued)
        self._continued = path if piece.get("willContinue") else ""


def _put(target: Any, steps: list[str | int], value: Any, *, appends: bool) -> None:
    """Set a value at a path, making what is missing on the way; a text that goes on is appended to."""
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(target, list) and isinstance(step, int):
            target.extend([None] * (step + 1 - len(target)) if step < 10_000 else [])
        elif not isinstance(target, dict):
            return
        if isinstance(target, list) and (not isinstance(step, int) or step >= len(target)):
            return
        known = target.get(step) if isinstance(target, dict) else target[step]
        if following is None:
            target[step] = known + value if appends and isinstance(known, str) and isinstance(value, str) else value
            return
        if not isinstance(known, dict | list):
            known = target[step] = [] if isinstance(following, int) else {}
        target = known


def _read_usage(value: dict[str, Any]) -> Usage:
    prompt = count_of(value.get("promptTokenCount")) + count_of(value.get("toolUsePromptTokenCount"))
    thoughts = count_of(value.get("thoughtsTokenCount"))
    answer = count_of(value.get("candidatesTokenCount")) + thoughts
    return Usage(
        input_tokens=prompt,
        output_tokens=answer,
        cached_tokens=count_of(value.get("cachedContentTokenCount")),
        reasoning_tokens=thoughts,
        total_tokens=count_of(value.get("totalTokenCount")) or prompt + answer,
    )
