"""What the readers of all formats have in common: how an answer is told while it comes, and what it is in the end."""

from __future__ import annotations

from typing import Any

from turnmill.protocol.content import Cost, ErrorInfo, Message, Part, TextPart, ToolCallPart, Usage
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted

from .base import Completed, ProviderError, ProviderRequest
from .http_errors import Problem, error_info, shorten
from .openai_chat_calls import CallBuilder


class Answer:
    """One answer as far as it was read. `failure` is set where it cannot become whole. What watchers
    were told shows that it has begun; `has_begun` is for formats that begin without telling anything."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        self._request = request
        self._provider_name = provider_name
        self._step_number = request.step_number
        self._calls: list[CallBuilder] = []
        self._model = ""
        self.usage: Usage | None = None
        self.cost: Cost | None = None
        self.is_done = False
        self.failure: ProviderError | None = None
        self.has_begun = False

    @property
    def is_finished(self) -> bool:
        """Whether the answer is whole; usage may still follow."""
        return self.is_done

    # ---- while it comes

    def say(self, text: str) -> TextDelta:
        return TextDelta(text=text, step_number=self._step_number)

    def think(self, text: str, *, is_summary: bool = False) -> ReasoningDelta:
        kind: Any = "summary" if is_summary else "delta"
        return ReasoningDelta(kind=kind, text=text, provider=self._provider_name, step_number=self._step_number)

    def tell_state(self, data: dict[str, Any], *, is_signature: bool = False) -> ReasoningDelta:
        kind: Any = "signature" if is_signature else "state"
        return ReasoningDelta(kind=kind, provider=self._provider_name, data=data, step_number=self._step_number)

    def new_call(self, call_id: str, name: str) -> CallBuilder:
        """The next call. Where the provider gives no id, or one twice, it has one that comes out the same in every attempt
        and, as a transcript only grows, is of no other call of the session."""
        position = len(self._calls)
        taken = {call.id for call in self._calls}
        unique = call_id or f"call_{len(self._request.messages)}_{position}"
        while unique in taken:
            unique = f"{unique}_{position}"
        call = CallBuilder(position, None, unique)
        call.provider_id, call.name = call_id, name
        self._calls.append(call)
        return call

    def tell_call(self, call: CallBuilder) -> ToolCallStarted:
        return ToolCallStarted(
            step_number=self._step_number, index=call.position, tool_call_id=call.id, name=call.name or None
        )

    def tell_arguments(self, call: CallBuilder, text: str) -> ToolCallDelta:
        return ToolCallDelta(
            step_number=self._step_number, index=call.position, tool_call_id=call.id, arguments_delta=text
        )

    # ---- in the end

    def _fail(self, problem: Problem, *, retryable: bool = False) -> None:
        """The first problem counts. `retryable` where the words do not say it and the format does."""
        info = error_info(problem)
        if retryable and not info.retryable:
            info = ErrorInfo(kind=info.kind, message=info.message, retryable=True, status=info.status)
        self.failure = self.failure or ProviderError(info, self.usage)

    def _whole(self, parts: list[Part], finish: str) -> Completed:
        """The message of these parts. Calls decide how a step ends, unless the limit cut one off."""
        calls = [part.tool_call for part in parts if isinstance(part, ToolCallPart)]
        if calls and not (finish == "length" and any(call.error for call in calls)):
            finish = "tool_calls"
        texts_only = all(isinstance(part, TextPart) for part in parts)
        message = Message(
            role="assistant",
            content="".join(part.text for part in parts if isinstance(part, TextPart)) if texts_only else parts,
            turn_id=self._request.turn_id or None,
            step=self._step_number,
            usage=self.usage,
            finish_reason=finish,
            model=self._model or self._request.model,
        )
        return Completed(message=message, finish_reason=finish, usage=self.usage, cost=self.cost)

    def _cut_off(self, *, began: bool, missing: str) -> ProviderError:
        where = "in the middle of the answer" if began else "before the answer began"
        return broken(f"the stream ended {where}, without {missing}")


def broken(message: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message=shorten(message), retryable=True))


def count_of(value: Any) -> int:
    """A number of tokens; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def object_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""
