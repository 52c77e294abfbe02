"""Models by the host: a function of the application answers in place of a provider.

`@model("name")` takes an async generator of what the model says, as it says it: text, reasoning, tool calls, usage, cost.
A plain async function may return all of it at once, also as a dict `{"content": ..., "tool_calls": [...]}`. Agents name it
as `host:name`; LLM workers that were started with the application serve it (`providers/host.py`).

    @model("echo")
    async def echo(request: ModelRequest):
        yield "You said: "
        yield request.messages[-1].text
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import update_wrapper
from typing import Any, Literal, TypeAlias

import msgspec

from turnmill.protocol.content import Cost, Message, Part, TextPart, ToolCall, ToolCallPart, Usage
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.events import ReasoningDelta, TextDelta
from turnmill.protocol.keys import valid_name

from .providers.base import ProviderRequest

ModelRequest: TypeAlias = ProviderRequest
"""What a model function is given: the transcript, the system prompt, the tools that may be called, the options."""

Said: TypeAlias = str | TextDelta | ReasoningDelta | ToolCall | Usage | Cost | Part | dict[str, Any]
"""One thing that a model function says."""

ModelFunction: TypeAlias = (
    Callable[[ModelRequest], AsyncIterator[Any]]
    | Callable[[ModelRequest], Awaitable[str | Message | ToolCall | Sequence[Any] | dict[str, Any]]]
)


class HostModel:
    """A model function under its name. Calling it calls the function."""

    def __init__(self, name: str, function: ModelFunction) -> None:
        update_wrapper(self, function)  # first, because it copies the function's attributes
        self.name = name
        self.function = function
        self.streams = inspect.isasyncgenfunction(function)

    def __call__(self, request: ModelRequest) -> Any:
        return self.function(request)

    def __repr__(self) -> str:
        return f"HostModel({self.name!r})"


def model(name: str) -> Callable[[ModelFunction], HostModel]:
    """Make a model of an async function or an async generator function that takes one `ModelRequest`."""
    if not isinstance(name, str):
        raise DefinitionError('a model function needs a name: write @model("name") above it')
    if not valid_name(name):
        raise DefinitionError(f"{name!r} is no name for a model: use 1 to 128 letters, digits and _ . : @ -")

    def define(function: ModelFunction) -> HostModel:
        _check_function(name, function)
        return HostModel(name, function)

    return define


def reasoning(text: str) -> ReasoningDelta:
    """A piece of reasoning, to yield from a model function."""
    return ReasoningDelta(kind="delta", text=text)


def tool_call(name: str, **arguments: Any) -> ToolCall:
    """A tool call, to yield from a model function; its id is made when it is served."""
    return ToolCall(id="", name=name, arguments=arguments)


def generated_call_id(request: ModelRequest, index: int) -> str:
    """An id for the call `index` of this request: the same in every attempt, and no other one in its session, because a
    transcript only grows."""
    return f"call_{len(request.messages)}_{index}"


class _DictCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call as a host writes it: flat, or with the API's `function` object, whose arguments may be text."""

    name: str | None = None
    arguments: Any = None
    id: str | None = None
    metadata: dict[str, Any] = {}
    type: str = "function"
    function: _DictFunction | None = None


class _DictFunction(msgspec.Struct):
    name: str
    arguments: Any = None


class _DictMessage(msgspec.Struct, forbid_unknown_fields=True):
    content: str | list[Part] | None = None
    tool_calls: list[_DictCall] | None = None
    role: Literal["assistant"] = "assistant"
    usage: Usage | None = None
    cost: Cost | None = None
    finish_reason: str | None = None
    metadata: dict[str, Any] = {}


def message_of(answer: dict[str, Any]) -> Message:
    """An assistant's message from a dict: `content` (text, parts or None), `tool_calls` of `{id?, name, arguments}`, and
    optionally `usage`, `cost`, `finish_reason` and `metadata`. Raises `ValueError` that says what does not fit."""
    try:
        given = msgspec.convert(answer, _DictMessage)
    except msgspec.ValidationError as error:
        raise ValueError(f"the dict it gave is no answer: {error}") from error
    content: str | list[Part] = given.content or ""
    if given.tool_calls:
        text: list[Part] = [TextPart(content)] if isinstance(content, str) and content else []
        parts = text if isinstance(content, str) else content
        content = [*parts, *(ToolCallPart(_call_of(call)) for call in given.tool_calls)]
    return Message(
        role="assistant",
        content=content,
        usage=given.usage,
        cost=given.cost,
        finish_reason=given.finish_reason,
        metadata=given.metadata,
    )


def _call_of(call: _DictCall) -> ToolCall:
    name, arguments, error = call.name, call.arguments, None
    if call.function is not None:
        name, arguments = call.function.name, call.function.arguments
    if not name:
        raise ValueError("the dict it gave is no answer: a tool call without a name")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as failure:
            arguments, error = {}, f"the arguments are no JSON object: {failure}"
    if arguments is not None and not isinstance(arguments, dict):
        arguments, error = {}, "the arguments are no JSON object"
    return ToolCall(id=call.id or "", name=name, arguments=arguments or {}, metadata=call.metadata, error=error)


def _check_function(name: str, function: Any) -> None:
    if not (inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)):
        raise DefinitionError(
            f"model {name!r}: {function!r} must be an `async def`, with `yield` to stream or `return`"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise DefinitionError(f"model {name!r} must take one argument, the ModelRequest: {error}") from error
