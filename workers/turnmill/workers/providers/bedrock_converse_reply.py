"""An answer of Bedrock's Converse API, put together from its frames. Blocks are known by their index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from turnmill.protocol.content import ErrorInfo, Part, ReasoningPart, TextPart, ToolCallPart, Usage
from turnmill.protocol.errors import ErrorKind

from .answer import Answer, broken, count_of, object_of, text_of
from .base import Completed, Live, ProviderError, ProviderRequest
from .bedrock_converse_request import answers_by_tool
from .http_errors import Problem, error_info, read_problem_body
from .openai_chat_calls import CallBuilder, arguments_text

SIGNATURE = "signature"
REDACTED = "redactedContent"
_FINISH_BY_WORD = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "guardrail_intervened": "content_filter",
    "content_filtered": "content_filter",
    "refusal": "refusal",
    "pause_turn": "pause",
}
_KIND_BY_EXCEPTION = {
    "throttlingexception": (ErrorKind.RATE_LIMITED, True),
    "servicequotaexceededexception": (ErrorKind.RATE_LIMITED, True),
    "modelstreamerrorexception": (ErrorKind.PROVIDER_ERROR, True),
    "internalserverexception": (ErrorKind.PROVIDER_ERROR, True),
    "serviceunavailableexception": (ErrorKind.OVERLOADED, True),
    "modelnotreadyexception": (ErrorKind.OVERLOADED, True),
    "modeltimeoutexception": (ErrorKind.TIMEOUT, True),
    "accessdeniedexception": (ErrorKind.AUTHENTICATION, False),
}
_decode = msgspec.json.Decoder().decode


class Frame(NamedTuple):
    """One frame: what kind it is of, whether it reports a failure (`told` are its words, where they stand in a header)."""

    kind: str
    is_failure: bool
    payload: bytes
    told: str = ""


class _Block:
    """One block of the answer: a text, reasoning, or a call."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.data: dict[str, str] = {}
        self.call: CallBuilder | None = None


class Answered(Answer):
    """One answer as far as it was read. `take` the frames, look at `failure` after each, take `completed` at the end."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        super().__init__(request, provider_name)
        self._blocks: dict[int, _Block] = {}
        self._finish = ""
        self._answer_tool = request.output_name if answers_by_tool(request) else None

    @property
    def is_finished(self) -> bool:
        return self.is_done or bool(self._finish)

    def take(self, frame: Frame) -> list[Live]:
        """What a frame tells watchers."""
        if frame.is_failure:
            self._fail_with(frame)
            return []
        try:
            body = _decode(frame.payload)
        except (msgspec.DecodeError, RecursionError) as error:
            self.failure = self.failure or broken(f"a frame cannot be read: {error}: {frame.payload[:200]!r}")
            return []
        return list(self._take_event(frame.kind, body)) if isinstance(body, dict) else []

    def take_whole(self, body: bytes) -> list[Live]:
        """The same for an answer that came as one JSON body."""
        try:
            told = _decode(body)
        except (msgspec.DecodeError, RecursionError):
            told = None
        if not isinstance(told, dict) or "output" not in told:
            self.failure = ProviderError(error_info(read_problem_body(body)))
            return []
        live: list[Live] = []
        content = object_of(object_of(told["output"]).get("message")).get("content")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict):
                live += self._take_block(index, block)
        self._take_end(told)
        self.is_done = True
        return live

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` where the stream ended before the answer did."""
        if not self.is_finished:
            raise self._cut_off(began=bool(self._blocks), missing="a stop reason")
        blocks = [block for _, block in sorted(self._blocks.items())]
        if self._answer_tool is not None:
            _say_what_the_tool_was_told(blocks, self._answer_tool)
        parts = [part for block in blocks for part in self._parts(block)]
        has_calls = any(isinstance(part, ToolCallPart) for part in parts)
        return self._whole(parts, "stop" if self._finish == "tool_calls" and not has_calls else self._finish)

    # ---- events

    def _take_event(self, kind: str, body: dict[str, Any]) -> Iterator[Live]:
        index = body.get("contentBlockIndex")
        index = index if isinstance(index, int) else max(self._blocks, default=0)
        match kind:
            case "contentBlockStart":
                yield from self._begin_call(index, object_of(object_of(body.get("start")).get("toolUse")))
            case "contentBlockDelta":
                yield from self._take_delta(index, object_of(body.get("delta")))
            case "messageStop":
                self._take_end(body)
            case "metadata":
                self._take_end(body)
                self.is_done = bool(self._finish)

    def _take_block(self, index: int, block: dict[str, Any]) -> Iterator[Live]:
        """A block of an answer that was not streamed."""
        if "toolUse" in block:
            use = object_of(block["toolUse"])
            yield from self._begin_call(index, use)
            yield from self._take_delta(index, {"toolUse": {"input": arguments_text(use.get("input"))}})
        elif "reasoningContent" in block:
            content = object_of(block["reasoningContent"])
            told = object_of(content.get("reasoningText"))
            yield from self._take_delta(index, {"reasoningContent": {**told, **content}})
        elif "citationsContent" in block:
            for part in object_of(block["citationsContent"]).get("content") or ():
                yield from self._take_delta(index, object_of(part))
        else:
            yield from self._take_delta(index, block)

    def _begin_call(self, index: int, use: dict[str, Any]) -> Iterator[Live]:
        block = self._block(index)
        if use and block.call is None:
            block.call = self.new_call(text_of(use.get("toolUseId")), text_of(use.get("name")))
            if block.call.name != self._answer_tool:
                yield self.tell_call(block.call)

    def _take_delta(self, index: int, delta: dict[str, Any]) -> Iterator[Live]:
        block = self._block(index)
        if text := text_of(delta.get("text")):
            block.texts.append(text)
            yield self.say(text)
        if isinstance(delta.get("reasoningContent"), dict):
            yield from self._take_reasoning(block, delta["reasoningContent"])
        pieces = arguments_text(object_of(delta.get("toolUse")).get("input"))
        if pieces and block.call is not None:
            block.call.extend("", "", pieces)
            is_answer = block.call.name == self._answer_tool
            yield self.say(pieces) if is_answer else self.tell_arguments(block.call, pieces)

    def _take_reasoning(self, block: _Block, content: dict[str, Any]) -> Iterator[Live]:
        if text := text_of(content.get("text")):
            block.thoughts.append(text)
            yield self.think(text)
        for key in (SIGNATURE, REDACTED):
            if piece := text_of(content.get(key)):
                block.data[key] = block.data.get(key, "") + piece
                yield self.tell_state({key: piece}, is_signature=key == SIGNATURE)

    def _take_end(self, body: dict[str, Any]) -> None:
        word = text_of(body.get("stopReason"))
        if word.startswith("malformed_"):
            text = f"{word}: the model wrote no valid answer"
            info = ErrorInfo(kind=ErrorKind.PROVIDER_ERROR, message=text, retryable=True)
            self.failure = self.failure or ProviderError(info, self.usage)
        if word:
            self._finish = _FINISH_BY_WORD.get(word, "other")
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.usage = _read_usage(usage)

    def _fail_with(self, frame: Frame) -> None:
        problem = read_problem_body(frame.payload) if frame.payload.strip() else Problem(message=frame.told)
        problem = msgspec.structs.replace(problem, code=frame.kind)
        info = error_info(problem)
        kind, retryable = _KIND_BY_EXCEPTION.get(frame.kind.lower(), (info.kind, info.retryable))
        self.failure = self.failure or ProviderError(
            msgspec.structs.replace(info, kind=kind, retryable=retryable), self.usage
        )

    # ---- in the end

    def _block(self, index: int) -> _Block:
        return self._blocks.setdefault(index, _Block())

    def _parts(self, block: _Block) -> Iterator[Part]:
        if block.thoughts or block.data:
            yield ReasoningPart(text="".join(block.thoughts), provider=self._provider_name, data=dict(block.data))
        if block.texts:
            yield TextPart("".join(block.texts))
        if block.call is not None:
            yield ToolCallPart(block.call.finish())


def _say_what_the_tool_was_told(blocks: list[_Block], name: str) -> None:
    """The tool that stands for the answer is no call: what it was told is the answer."""
    for block in blocks:
        if block.call is not None and block.call.name == name:
            block.texts, block.call = [block.call.text], None


def _read_usage(value: dict[str, Any]) -> Usage:
    """Tokens read from a cache and written to it are not among the input tokens here."""
    cached, written = count_of(value.get("cacheReadInputTokens")), count_of(value.get("cacheWriteInputTokens"))
    input_tokens = count_of(value.get("inputTokens")) + cached + written
    output_tokens = count_of(value.get("outputTokens"))
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        cache_write_tokens=written,
        total_tokens=input_tokens + output_tokens,
    )
