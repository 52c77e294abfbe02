"""What models can do: their context window, images, files, tools, reasoning.

A table `[models."<provider:model>"]` of turnmill.toml says it. The window of a model that it does not tell is taken from the
data of the package genai-prices, where that knows the model at its endpoint. None means not known: then the provider is
asked, and refuses in its own words.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo, FilePart, ImagePart, Message, ToolResultPart
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.settings import FILE_NAME, ModelCapabilities, Settings

from .base import ProviderError, ProviderRequest
from .registry import base_urls


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is known of one model; `context_window` in tokens."""

    context_window: int | None = None
    images: bool | None = None
    files: bool | None = None
    tools: bool | None = None
    reasoning: bool | None = None


class KnownModels:
    """The models of one process, as far as the settings and the package know them."""

    def __init__(self, table: Mapping[str, ModelCapabilities], endpoints: Mapping[str, str]) -> None:
        """`endpoints` are base URLs by the prefix of their models' names."""
        self._told = {name: Capabilities(**told.model_dump()) for name, told in table.items()}
        self._endpoints = endpoints

    @classmethod
    def from_settings(cls, settings: Settings, environment: Mapping[str, str] = os.environ) -> KnownModels:
        return cls(settings.models, base_urls(settings, environment))

    def of(self, model: str) -> Capabilities:
        """What is known of `provider:model`."""
        told = self._told.get(model, Capabilities())
        if told.context_window is not None:
            return told
        prefix, _, name = model.partition(":")
        return msgspec.structs.replace(told, context_window=_listed_window(name, self._endpoints.get(prefix)))

    def of_provider(self, prefix: str) -> dict[str, Capabilities]:
        """The models of a provider that the settings tell of."""
        return {model: self.of(model) for model in sorted(self._told) if model.partition(":")[0] == prefix}

    def that_take(self, models: list[str], request: ProviderRequest) -> list[str]:
        """Those of `models` that are not known to lack what a request needs, in their order.

        Raises `ProviderError` (bad_request) where none is left; it says what the first one lacks.
        """
        if not any(model in self._told for model in models):
            return models
        faults = [self._fault(model, request) for model in models]
        able = [model for model, fault in zip(models, faults, strict=True) if fault is None]
        if not able:
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=str(faults[0])))
        return able

    def _fault(self, model: str, request: ProviderRequest) -> str | None:
        told = self._told.get(model)
        if told is None:
            return None
        lacking = next((name for name in _needed(request) if getattr(told, name) is False), None)
        if lacking is None:
            return None
        what = _WORDS[lacking]
        return f'the model {model!r} takes no {what} (`[models."{model}"] {lacking} = false` in {FILE_NAME})'


_WORDS = {
    "images": "images, and there is one in the conversation",
    "files": "files, and there is one in the conversation",
    "tools": "tools, and the agent has some",
    "reasoning": "reasoning settings, and the agent has some",
}


def _needed(request: ProviderRequest) -> Iterable[str]:
    """What a model must be able to do for this request, by the names of `Capabilities`."""
    if request.tools:
        yield "tools"
    if request.reasoning is not None and request.reasoning.effort != "none":
        yield "reasoning"
    kinds = {type(part) for message in request.messages for part in _parts(message)}
    if ImagePart in kinds:
        yield "images"
    if FilePart in kinds:
        yield "files"


def _parts(message: Message) -> Iterable[Any]:
    """The parts of a message, also those inside results of tools."""
    if isinstance(message.content, str):
        return
    for part in message.content:
        yield part
        if isinstance(part, ToolResultPart):
            yield from part.tool_result.content or []


def _listed_window(name: str, base_url: str | None) -> int | None:
    """The window of a model at an endpoint, as the package has it; None without the package."""
    if base_url is None:
        return None
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        return None
    try:
        _, model = get_snapshot().find_provider_model(name, None, None, base_url)
    except LookupError:
        return None
    return model.context_window
