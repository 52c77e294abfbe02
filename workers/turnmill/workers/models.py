"""Models by the host: a function of the application answers in place of a provider.

`@model("name")` takes an async generator of what the model says, as it says it: text, reasoning, tool calls, usage. A
plain async function may return all of it at once. Agents name it as `host:name`; LLM workers that were started with the
application serve it (`providers/host.py`).

    @model("echo")
    async def echo(request: ModelRequest):
        yield "You said: "
        yield request.messages[-1].text
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import update_wrapper
from typing import Any, TypeAlias

from turnmill.protocol.content import Message, Part, ToolCall, Usage
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.events import ReasoningDelta, TextDelta
from turnmill.protocol.keys import valid_name

from .providers.base import ProviderRequest

ModelRequest: TypeAlias = ProviderRequest
"""What a model function is given: the transcript, the system prompt, the tools that may be called, the options."""

Said: TypeAlias = str | TextDelta | ReasoningDelta | ToolCall | Usage | Part
"""One thing that a model function says."""

ModelFunction: TypeAlias = (
    Callable[[ModelRequest], AsyncIterator[Any]]
    | Callable[[ModelRequest], Awaitable[str | Message | ToolCall | Sequence[Any]]]
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


def _check_function(name: str, function: Any) -> None:
    if not (inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)):
        raise DefinitionError(
            f"model {name!r}: {function!r} must be an `async def`, with `yield` to stream or `return`"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise DefinitionError(f"model {name!r} must take one argument, the ModelRequest: {error}") from error
