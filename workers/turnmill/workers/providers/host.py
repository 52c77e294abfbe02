"""Serves the application's model functions as the provider `host`.

A function says text, reasoning, tool calls, usage and cost in any order; the assembly tells the watchers of each as it comes
and keeps the assistant's message whole. What the function raises is a failed model call with its words, not retried,
because only the function knows whether that helps: it raises a `ProviderError` to ask for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import msgspec

from turnmill.protocol.content import (
    Cost,
    ErrorInfo,
    FilePart,
    ImagePart,
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
from turnmill.workers.models import HostModel, generated_call_id, message_of
from turnmill.workers.sendable import sendable_call

from .base import Completed, Live, ProviderError, ProviderRequest, Streamed

Told: TypeAlias = Live | Usage | Cost


class HostProvider:
    """Provider of the model functions of one application."""

    def __init__(self, models: Iterable[HostModel]) -> None:
        self._models = {model.name: model for model in models}

    async def stream(self, request: ProviderRequest) -> AsyncIterator[Streamed]:
        model = self._find(request.model)
        assembly = _Assembly(request)
        try:
            if model.streams:
                async with aclosing(model(request)) as said:
                    async for item in said:
                        for event in assembly.add(item):
                            yield event
            else:
                for event in assembly.add_all(await model(request)):
                    yield event
        except (ProviderError, GeneratorExit):
            raise
        except BaseException as error:  # a function that exits must not take its worker along
            _raise_cancellation(error)
            raise _failed(model.name, error) from error
        yield assembly.completed()

    async def close(self) -> None:
        """Nothing to close: functions own what they use."""

    def _find(self, name: str) -> HostModel:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)) or "none"
            message = f"no model function {name!r} in this worker's application. Available: {known}"
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=message))
        return model


def _raise_cancellation(error: BaseException) -> None:
    """Pass a cancellation on if it came from outside; one that the function raised itself is its failure."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def _failed(name: str, error: BaseException) -> ProviderError:
    message = f"model function {name!r} failed: {str(error) or type(error).__name__}"
    return ProviderError(ErrorInfo(kind=ErrorKind.PROVIDER_ERROR, message=message))


class _Assembly:
    """The assistant's message as it grows: neighbours of one kind become one part."""

    def __init__(self, request: ProviderRequest) -> None:
        self._request = request
        self._parts: list[Part] = []
        self._text: list[str] = []
        self._reasoning: list[ReasoningPart] = []
        self._calls = 0
        self._usage: Usage | None = None
        self._cost: Cost | None = None
        self._finish_reason = "stop"
        self._metadata: dict[str, Any] = {}

    def add_all(self, returned: Any) -> list[Told]:
        """What a function returned at once."""
        if isinstance(returned, Sequence) and not isinstance(returned, str):
            return [event for item in returned for event in self.add(item)]
        return self.add(returned)

    def add(self, item: Any) -> list[Told]:
        """Take one thing in; returns what watchers are told of it."""
        match item:
            case str():
                return self._add_text(item)
            case TextDelta() | TextPart():
                return self._add_text(item.text)
            case ReasoningDelta():
                return self._add_reasoning(item)
            case ReasoningPart():
                self._close_text()
                self._reasoning.append(item)
                return [self._told(item)]
            case ToolCall():
                return self._add_call(item)
            case ToolCallPart():
                return self._add_call(item.tool_call)
            case Usage():
                self._usage = item
                return [item]
            case Cost():
                self._cost = item
                return [item]
            case ImagePart() | FilePart():
                self._close_parts()
                self._parts.append(item)
            case Message():
                return self._add_message(item)
            case dict():
                return self._add_message(message_of(item))
            case _:
                kind = type(item).__name__
                raise TypeError(
                    f"it gave a {kind}, not text, a ReasoningDelta, a ToolCall, a Usage, a Message or a dict"
                )
        return []

    def completed(self) -> Completed:
        self._close_parts()
        content: str | list[Part] = self._parts
        if not self._parts:
            content = ""
        elif len(self._parts) == 1 and isinstance(self._parts[0], TextPart):
            content = self._parts[0].text
        return Completed(
            message=Message(role="assistant", content=content, metadata=self._metadata),
            finish_reason="tool_calls" if self._calls else self._finish_reason,
            usage=self._usage,
            cost=self._cost,
        )

    def _add_message(self, message: Message) -> list[Told]:
        if message.role != "assistant":
            raise ValueError(f"it gave a message of the role {message.role!r}, not 'assistant'")
        self._usage, self._cost = message.usage or self._usage, message.cost or self._cost
        self._finish_reason = message.finish_reason or self._finish_reason
        self._metadata = message.metadata
        return self.add(message.content) if isinstance(message.content, str) else self.add_all(message.content)

    def _add_text(self, text: str) -> list[Told]:
        if not text:
            return []
        self._close_reasoning()
        self._text.append(text)
        return [TextDelta(text=text, step_number=self._request.step_number)]

    def _add_reasoning(self, delta: ReasoningDelta) -> list[Told]:
        self._close_text()
        self._reasoning.append(ReasoningPart(text=delta.text or "", provider=delta.provider, data=delta.data))
        return [msgspec.structs.replace(delta, step_number=self._request.step_number)]

    def _told(self, part: ReasoningPart) -> ReasoningDelta:
        return ReasoningDelta(
            kind="delta" if part.text else "state",
            text=part.text or None,
            provider=part.provider,
            data=part.data,
            step_number=self._request.step_number,
        )

    def _add_call(self, call: ToolCall) -> list[Told]:
        self._close_parts()
        index, step_number = self._calls, self._request.step_number
        self._calls += 1
        call = sendable_call(call)
        if not call.id:
            call = msgspec.structs.replace(call, id=generated_call_id(self._request, index))
        self._parts.append(ToolCallPart(call))
        arguments = msgspec.json.encode(call.arguments).decode()
        return [
            ToolCallStarted(step_number=step_number, index=index, tool_call_id=call.id, name=call.name),
            ToolCallDelta(step_number=step_number, index=index, tool_call_id=call.id, arguments_delta=arguments),
        ]

    def _close_parts(self) -> None:
        self._close_text()
        self._close_reasoning()

    def _close_text(self) -> None:
        if self._text:
            self._parts.append(TextPart("".join(self._text)))
            self._text = []

    def _close_reasoning(self) -> None:
        """Reasoning of one provider is one part, its signature with it; a part that carries state ends there."""
        pieces: list[ReasoningPart] = []
        for piece in self._reasoning:
            if pieces and pieces[-1].provider == piece.provider and not pieces[-1].data:
                joined = pieces[-1].text + piece.text
                pieces[-1] = ReasoningPart(text=joined, provider=piece.provider, data=piece.data)
            else:
                pieces.append(piece)
        self._parts.extend(cast("list[Part]", pieces))
        self._reasoning = []
