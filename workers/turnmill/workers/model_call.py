"""One provider call: found by the model's name, streamed, closed, and what is known of it kept however it ends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from turnmill.protocol.content import Cost, ErrorInfo, Message, Usage
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import TextDelta

from .prices import Prices
from .providers.base import Completed, Live, Provider, ProviderError, ProviderRequest, ProviderSet
from .sendable import sendable, sendable_message


class Heard:
    """What has come of an answer so far: it is kept where the turn is stopped, and paid for where the call fails."""

    __slots__ = ("_text", "cost", "model", "usage")

    def __init__(self, model: str | None = None) -> None:
        """`model` is `provider:model`."""
        self.model = model
        self.usage: Usage | None = None
        self.cost: Cost | None = None
        self._text: list[str] = []

    def add(self, item: Live) -> None:
        if item.__class__ is TextDelta:
            self._text.append(item.text)

    def note(self, usage: Usage | None, cost: Cost | None = None) -> None:
        """Later words count; what was known stays where nothing new is said."""
        self.usage, self.cost = usage or self.usage, cost or self.cost

    def message(self) -> Message | None:
        """The text as an assistant's message; None where there is none. Calls were never complete, and reasoning
        without its answer is refused by some providers."""
        text = "".join(self._text)
        return Message(role="assistant", content=text, model=self.model) if text else None

    def price(self, prices: Prices) -> Cost | None:
        """What the provider says that it cost, else by the price list."""
        return self.cost or prices.cost_of(self.model, self.usage)

    def include(self, other: Heard, prices: Prices) -> None:
        """Add up another call, made for the same task."""
        self.model, cost = other.model, other.price(prices)
        if other.usage is not None:
            self.usage = other.usage if self.usage is None else self.usage + other.usage
        if cost is not None:
            self.cost = cost if self.cost is None else self.cost + cost


async def call_model(
    provider: Provider, request: ProviderRequest, heard: Heard, take: Callable[[Live], object]
) -> Completed:
    """The whole answer; `take` is given the live events. Leaving it in mid-stream closes the provider's connection.

    Whatever a provider says is made sendable here. Raises `ProviderError`.
    """
    stream = provider.stream(request)
    try:
        async for item in stream:
            if isinstance(item, Completed):
                heard.note(item.usage, item.cost)
                return msgspec.structs.replace(item, message=sendable_message(item.message))
            if isinstance(item, Usage):
                heard.note(item)
            elif isinstance(item, Cost):
                heard.note(None, item)
            else:
                item = sendable(item)
                heard.add(item)
                take(item)
    except ProviderError as error:
        heard.note(error.usage)
        error.info = sendable(error.info)
        raise
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
    text = f"the provider of {heard.model!r} ended its stream without completing it"
    raise ProviderError(ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message=text, retryable=True))


def find_provider(providers: ProviderSet, model: str) -> tuple[Provider, str]:
    """The provider of `provider:model`, and the name behind the prefix. Raises `ProviderError` that says what there is."""
    prefix, _, name = model.partition(":")
    provider = providers.get(prefix)
    if provider is not None:
        return provider, name
    known = ", ".join(providers.names) or "none"
    text = (
        f"this LLM worker has no provider for the model {model!r}; it has: {known}. "
        "Name models as provider:model, and give the worker the provider's key or its entry in turnmill.toml"
    )
    raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
