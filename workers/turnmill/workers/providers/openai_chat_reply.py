"""An answer of /chat/completions, put together from its chunks.

A plain JSON answer is read as a stream of one chunk whose `message` is the delta. The servers that speak this API agree
on little; these rules hold against all of them:

- "", null and absent are the same thing;
- a call is known by its index; another id at the same index, or an id without index, is another call;
- names and ids are set once, arguments are appended;
- calls decide how a step ends, whatever the finish reason says;
- the `function_call` of the API's first years is no call: only `functions` ask for it, which we never send;
- the last usage counts, usages are never added up;
- nothing on a chunk is lost because of what else is on it; an error is raised after the rest of its chunk was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnmill.protocol.content import (
    Cost,
    ErrorInfo,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    Usage,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted

from .base import Completed, Live, ProviderError, ProviderRequest
from .http_errors import Problem, error_info, read_problem, read_problem_body, shorten
from .openai_chat_calls import CallBuilder, arguments_text
from .openai_chat_chunks import (
    CallDelta,
    Choice,
    Chunk,
    Delta,
    Function,
    decode_any,
    decode_chunk,
    read_cost,
    read_usage,
)
from .openai_chat_request import REASONING_DETAILS, REASONING_FIELD, THINKING_PARTS
from .sse import SseEvent

DONE = b"[DONE]"
_FINISH_BY_WORD = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "refusal",
    "pause_turn": "pause",
}
_APPENDED_DETAILS = ("text", "summary", "data")


class Reply:
    """One answer as far as it was read. `take` the events, look at `failure` after each, take `completed` at the end."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        self._request = request
        self._provider_name = provider_name
        self._step_number = request.step_number
        self._text: list[str] = []
        self._reasoning = _Reasoning()
        self._calls: list[CallBuilder] = []
        self._parts: list[list[str] | _Reasoning | CallBuilder] = []
        self._refused = False
        self._finish_word = ""
        self.usage: Usage | None = None
        self.cost: Cost | None = None
        self._model = ""
        self._choice_seen = False
        self.is_done = False
        self.has_begun = False
        self.failure: ProviderError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the answer is whole; usage may still follow."""
        return self.is_done or bool(self._finish_word)

    def take(self, event: SseEvent) -> list[Live]:
        """What an event of the stream tells watchers."""
        data = event.data.strip()
        if data == DONE:
            self.is_done = True
            return []
        if not data:
            return []
        self.has_begun = self._choice_seen
        if event.name == b"error":
            return self._fail(read_problem_body(data))
        return self._take_json(data)

    def take_whole(self, body: bytes) -> list[Live]:
        """The same for an answer that came as one JSON body: it is whole if it holds a choice."""
        live = self._take_json(body)
        self.is_done = self._choice_seen
        return live

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` where the stream ended before the answer did."""
        if not self.is_finished:
            self.has_begun = self._choice_seen
            where = "in the middle of the answer" if self._parts else "before the answer began"
            raise _broken(f"the stream ended {where}, without a finish reason")
        parts = [self._finish_part(part) for part in self._parts]
        finish = self._decide_finish([part.tool_call for part in parts if isinstance(part, ToolCallPart)])
        message = Message(
            role="assistant",
            content=parts if any(part is not self._text for part in self._parts) else "".join(self._text),
            turn_id=self._request.turn_id or None,
            step=self._step_number,
            usage=self.usage,
            finish_reason=finish,
            model=self._model or self._request.model,
        )
        return Completed(message=message, finish_reason=finish, usage=self.usage, cost=self.cost)

    def _take_json(self, data: bytes) -> list[Live]:
        try:
            chunk = decode_chunk(data)
        except (ValueError, RecursionError) as error:
            if not self.is_finished:
                self.failure = self.failure or _broken(f"a chunk cannot be read: {error}: {data[:200]!r}")
            return []
        return self._take_chunk(chunk, data) if chunk is not None else []

    def _take_chunk(self, chunk: Chunk, data: bytes) -> list[Live]:
        if chunk.model and isinstance(chunk.model, str):
            self._model = chunk.model
        self._take_usage(chunk.usage or (chunk.x_groq.get("usage") if isinstance(chunk.x_groq, dict) else None))
        live: list[Live] = []
        for choice in chunk.choices or ():
            if choice is not None and choice.index in (0, None):
                live += self._take_choice(choice)
        if chunk.error or chunk.object == "error":
            self._fail(read_problem(decode_any(data)))
        elif self._finish_word == "error":
            self._fail(Problem(message="the provider ended the answer with an error"))
        return live

    def _take_choice(self, choice: Choice) -> list[Live]:
        self._choice_seen = True
        delta = choice.delta
        if choice.message is not None and not self._parts:
            delta = choice.message
        live = list(self._take_delta(delta)) if delta is not None else []
        if choice.finish_reason and isinstance(choice.finish_reason, str):
            self._finish_word = choice.finish_reason.lower()
        self._take_usage(choice.usage)
        if choice.error:
            self._fail(read_problem({"error": choice.error}))
        return live

    def _take_delta(self, delta: Delta) -> Iterator[Live]:
        if delta.reasoning_content or delta.reasoning or delta.reasoning_details:
            yield from self._take_reasoning(delta)
        if delta.content:
            yield from self._take_content(delta.content)
        if delta.refusal and isinstance(delta.refusal, str):
            self._refused = True
            yield self._add_text(delta.refusal)
        for call_delta in delta.tool_calls or ():
            if call_delta is not None:
                yield from self._take_call(call_delta)

    def _take_content(self, content: Any) -> Iterator[Live]:
        """Text, or parts of text and thinking; parts of kinds that are not known are left out."""
        if isinstance(content, str):
            yield self._add_text(content)
            return
        for part in content if isinstance(content, list) else ():
            match part:
                case {"type": "thinking", "thinking": thinking}:
                    if text := _text_of(thinking):
                        yield self._add_reasoning(text, THINKING_PARTS)
                case {"text": str(text)} if text:
                    yield self._add_text(text)

    def _take_reasoning(self, delta: Delta) -> Iterator[Live]:
        """The same text may come in two fields and in the details: it counts once."""
        details = delta.reasoning_details if isinstance(delta.reasoning_details, list) else []
        details = [detail for detail in details if isinstance(detail, dict)]
        if delta.reasoning_content and isinstance(delta.reasoning_content, str):
            yield self._add_reasoning(delta.reasoning_content, "reasoning_content")
        elif delta.reasoning and isinstance(delta.reasoning, str):
            yield self._add_reasoning(delta.reasoning, "reasoning")
        elif text := "".join(_text_of_detail(detail) for detail in details):
            yield self._add_reasoning(text, "reasoning")
        for detail in details:
            self._begin(self._reasoning)
            self._reasoning.merge_detail(detail)
            if not _text_of_detail(detail):
                yield self._tell_state(detail)

    def _take_call(self, delta: CallDelta) -> Iterator[Live]:
        function = delta.function or Function()
        name = function.name if isinstance(function.name, str) else ""
        call_id = delta.id if isinstance(delta.id, str) else ""
        arguments = arguments_text(function.arguments)
        call = self._find_call(delta.index, call_id, name, arguments)
        if call is None:
            call = self._begin_call(delta.index, call_id, name)
            yield ToolCallStarted(
                step_number=self._step_number, index=call.position, tool_call_id=call.id, name=name or None
            )
        elif call.repeats(call_id, arguments):
            return
        name_delta = name if name and not call.name else None
        call.extend(call_id, name, arguments)
        if delta.extra_content:
            call.metadata = {self._provider_name: {"extra_content": delta.extra_content}}
        if arguments or name_delta:
            yield ToolCallDelta(
                step_number=self._step_number,
                index=call.position,
                tool_call_id=call.id,
                name_delta=name_delta,
                arguments_delta=arguments or None,
            )

    def _find_call(self, index: Any, call_id: str, name: str, arguments: str) -> CallBuilder | None:
        """The call that a fragment belongs to; the last one that fits, as fragments follow their beginning."""
        if not isinstance(index, int):
            candidates = self._calls if call_id else self._calls[-1:]
        else:
            candidates = [call for call in self._calls if call.index == index]
        if call_id and any(call.provider_id == call_id for call in candidates):
            candidates = [call for call in candidates if call.provider_id == call_id]
        elif call_id:
            candidates = [call for call in candidates[-1:] if not call.provider_id]
        if not candidates or candidates[-1].is_followed_by_another(call_id, name, arguments):
            return None
        return candidates[-1]

    def _begin_call(self, index: Any, call_id: str, name: str) -> CallBuilder:
        position = len(self._calls)
        call = CallBuilder(position, index if isinstance(index, int) else None, self._unique_id(call_id, position))
        call.provider_id, call.name = call_id, name
        self._calls.append(call)
        self._parts.append(call)
        return call

    def _unique_id(self, call_id: str, position: int) -> str:
        """The provider's id; where it gives none, or the same twice, one that comes out the same in
        every attempt and, as a transcript only grows, of no other call of the session."""
        taken = {call.id for call in self._calls}
        call_id = call_id or f"call_{len(self._request.messages)}_{position}"
        while call_id in taken:
            call_id = f"{call_id}_{position}"
        return call_id

    def _add_text(self, text: str) -> TextDelta:
        self._begin(self._text)
        self._text.append(text)
        return TextDelta(text=text, step_number=self._step_number)

    def _add_reasoning(self, text: str, field: str) -> ReasoningDelta:
        self._begin(self._reasoning)
        self._reasoning.add_text(text, field)
        return ReasoningDelta(kind="delta", text=text, provider=self._provider_name, step_number=self._step_number)

    def _tell_state(self, detail: dict[str, Any]) -> ReasoningDelta:
        return ReasoningDelta(
            kind="signature" if detail.get("signature") else "state",
            provider=self._provider_name,
            data={REASONING_DETAILS: [detail]},
            step_number=self._step_number,
        )

    def _begin(self, part: list[str] | _Reasoning) -> None:
        """Gives the part its place among the parts, once."""
        if not any(begun is part for begun in self._parts):
            self._parts.append(part)

    def _take_usage(self, value: Any) -> None:
        if value and isinstance(value, dict):
            self.usage, self.cost = read_usage(value), read_cost(value) or self.cost

    def _fail(self, problem: Problem) -> list[Live]:
        self.failure = self.failure or ProviderError(error_info(problem))
        return []

    def _decide_finish(self, calls: list[ToolCall]) -> str:
        """Only where the limit cut a call off does `length` stand before the calls: it says why they are invalid."""
        finish = _FINISH_BY_WORD.get(self._finish_word, "other") if self._finish_word else "stop"
        if finish == "length" and any(call.error for call in calls):
            return finish
        if calls:
            return "tool_calls"
        return "refusal" if self._refused and finish == "stop" else finish

    def _finish_part(self, part: list[str] | _Reasoning | CallBuilder) -> Part:
        match part:
            case CallBuilder():
                return ToolCallPart(part.finish())
            case _Reasoning():
                return part.finish(self._provider_name)
            case _:
                return TextPart("".join(part))


class _Reasoning:
    """The reasoning of an answer, and what the provider wants back of it."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._field = ""
        self._details: list[dict[str, Any]] = []

    def add_text(self, text: str, field: str) -> None:
        self._field = self._field or field
        self._text.append(text)

    def merge_detail(self, detail: dict[str, Any]) -> None:
        """A detail comes in fragments like a call: text is appended, the rest is set."""
        begun = next((item for item in reversed(self._details) if _is_same_detail(item, detail)), None)
        if begun is None:
            self._details.append(dict(detail))
            return
        for key, value in detail.items():
            if key in _APPENDED_DETAILS and isinstance(value, str):
                begun[key] = (begun.get(key) or "") + value
            elif value is not None:
                begun[key] = value

    def finish(self, provider_name: str) -> ReasoningPart:
        data: dict[str, Any] = {REASONING_FIELD: self._field} if self._field else {}
        if self._details:
            data[REASONING_DETAILS] = self._details
        return ReasoningPart(text="".join(self._text), provider=provider_name, data=data)


def _is_same_detail(begun: dict[str, Any], detail: dict[str, Any]) -> bool:
    if begun.get("type") != detail.get("type") or begun.get("index") != detail.get("index"):
        return False
    return not (begun.get("id") and detail.get("id") and begun["id"] != detail["id"])


def _text_of_detail(detail: dict[str, Any]) -> str:
    text = detail.get("text") or detail.get("summary")
    return text if isinstance(text, str) else ""


def _text_of(value: Any) -> str:
    """The text of a string or of a list of text parts."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _broken(message: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message=shorten(message), retryable=True))
