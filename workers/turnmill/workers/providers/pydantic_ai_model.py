"""Any model that pydantic-ai knows, as `pydantic-ai:<its name for it>`, such as `pydantic-ai:cohere:command-a`.

For the long tail: it comes with the extra `pydantic-ai`, brings the provider's own SDK, and costs far more CPU for each
event than the formats of this package. Keys are those that pydantic-ai reads from the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from turnmill.protocol.content import (
    ErrorInfo,
    FilePart,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    Usage,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.values import pack_value, unpack_value

from .answer import Answer
from .base import Completed, Live, ProviderError, ProviderRequest, Streamed
from .http_errors import error_info, read_problem
from .openai_chat_calls import CallBuilder, arguments_text
from .openai_chat_request import not_loaded

PREFIX = "pydantic-ai"
PART = "part"
"""The key in `ReasoningPart.data` under which a part of pydantic-ai's stands whole."""
_FINISH_BY_WORD = {"stop": "stop", "length": "length", "content_filter": "content_filter", "tool_call": "tool_calls"}


class PydanticAIProvider:
    """The models of pydantic-ai. It keeps one object for each model, and with it that model's connections."""

    is_remote = True

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}

    async def stream(self, request: ProviderRequest) -> AsyncGenerator[Streamed, None]:
        await asyncio.to_thread(import_module, "pydantic_ai.direct")  # it takes seconds, the first time
        from pydantic_ai.direct import model_request_stream
        from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError, UnexpectedModelBehavior, UserError

        reply = _Reply(request, PREFIX)
        try:
            async with model_request_stream(
                self._model(request.model),
                _build_messages(request),
                model_settings=_build_settings(request),
                model_request_parameters=_build_parameters(request),
            ) as stream:
                async for event in stream:
                    for live in reply.take(event):
                        yield live
                yield reply.whole(stream.get())
        except ModelHTTPError as error:
            raise ProviderError(error_info(read_problem(error.body), error.status_code)) from error
        except (UserError, ImportError) as error:
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=str(error))) from error
        except (ModelAPIError, UnexpectedModelBehavior) as error:
            info = ErrorInfo(kind=ErrorKind.PROVIDER_ERROR, message=str(error), retryable=True)
            raise ProviderError(info) from error

    async def close(self) -> None:
        """pydantic-ai closes the connections of its models with the process."""
        self._models.clear()

    def _model(self, name: str) -> Any:
        from pydantic_ai.models import infer_model

        if name not in self._models:
            self._models[name] = infer_model(name)
        return self._models[name]


def open_pydantic_ai() -> PydanticAIProvider | None:
    """None where the extra is not installed."""
    return PydanticAIProvider() if find_spec("pydantic_ai") is not None else None


# ---- the request


def _build_settings(request: ProviderRequest) -> Any:
    settings: dict[str, Any] = {}
    if request.tool_choice and request.tools:
        known = request.tool_choice in ("auto", "none", "required")
        settings["tool_choice"] = request.tool_choice if known else [request.tool_choice]
    if request.reasoning is not None:
        effort = request.reasoning.effort
        if effort is None:
            text = (
                "pydantic-ai takes an effort for reasoning: give reasoning=Reasoning(effort=...), or its own settings"
            )
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
        settings["thinking"] = False if effort == "none" else effort
    settings |= request.options
    return {name: value for name, value in settings.items() if value is not None and name != "stream"}


def _build_parameters(request: ProviderRequest) -> Any:
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.output import OutputObjectDefinition
    from pydantic_ai.tools import ToolDefinition

    tools = [
        ToolDefinition(name=tool.name, description=tool.description, parameters_json_schema=tool.schema)
        for tool in request.tools
    ]
    if request.output_schema is None:
        return ModelRequestParameters(function_tools=tools)
    wanted = OutputObjectDefinition(json_schema=request.output_schema, name=request.output_name)
    return ModelRequestParameters(function_tools=tools, output_mode="native", output_object=wanted)


def _build_messages(request: ProviderRequest) -> list[Any]:
    from pydantic_ai.messages import ModelRequest, SystemPromptPart

    built: list[Any] = []
    asked: list[Any] = [SystemPromptPart(request.system)] if request.system else []
    for message in request.messages:
        if message.role == "assistant":
            if asked:
                built.append(ModelRequest(parts=asked))
                asked = []
            built.append(_build_answer(message))
        else:
            asked += _build_asked(message)
    return [*built, ModelRequest(parts=asked)] if asked else built


def _build_asked(message: Message) -> Iterable[Any]:
    from pydantic_ai.messages import SystemPromptPart, UserPromptPart

    if message.role == "tool":
        for result in message.tool_results:
            yield from _build_result(result)
    elif message.role == "system":
        yield SystemPromptPart(message.text)
    elif isinstance(message.content, str):
        yield UserPromptPart(message.content)
    else:
        yield UserPromptPart([_build_part(part) for part in message.content])


def _build_result(result: ToolResult) -> Iterable[Any]:
    from pydantic_ai.messages import ToolReturnPart, UserPromptPart

    attached: list[Any] = []
    if result.content is not None:
        texts = [part.text for part in result.content if isinstance(part, TextPart)]
        attached = [_build_part(part) for part in result.content if not isinstance(part, TextPart)]
        value: Any = "\n".join(texts) if texts else "(see the attachments below)"
    elif result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    else:
        value = result.result
    outcome: Any = "failed" if result.is_error else "success"
    yield ToolReturnPart(result.tool_name, value, result.tool_call_id, outcome=outcome)
    if attached:
        yield UserPromptPart(attached)


def _build_part(part: Part) -> Any:
    from pydantic_ai.messages import BinaryContent, DocumentUrl, ImageUrl

    match part:
        case TextPart():
            return part.text
        case ImagePart() | FilePart():
            media_type = part.media_type or "image/png"
            if part.data is not None:
                return BinaryContent(part.data, media_type=media_type)
            if part.url is None:
                raise not_loaded(f"a part of {media_type}")
            return ImageUrl(part.url) if isinstance(part, ImagePart) else DocumentUrl(part.url, media_type=media_type)
        case _:
            raise TypeError(f"no part of a user's message: {part!r}")


def _build_answer(message: Message) -> Any:
    from pydantic_ai import messages as theirs

    parts: list[Any] = []
    for part in [TextPart(message.content)] if isinstance(message.content, str) else message.content:
        match part:
            case TextPart(text):
                parts.append(theirs.TextPart(text))
            case ReasoningPart() if part.provider == PREFIX and PART in part.data:
                parts.append(theirs.ThinkingPart(**unpack_value(part.data[PART])))
            case ToolCallPart(call):
                arguments = {} if call.error else call.arguments
                kept = unpack_value(call.metadata.get(PREFIX, {}))
                parts.append(theirs.ToolCallPart(call.name, arguments, call.id, **kept))
    return theirs.ModelResponse(parts=parts)


# ---- the answer


class _Reply(Answer):
    """The events of pydantic-ai, told in ours."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        super().__init__(request, provider_name)
        self._by_place: dict[int, CallBuilder] = {}

    def take(self, event: Any) -> Iterable[Live]:
        part = getattr(event, "part", None) if event.event_kind == "part_start" else getattr(event, "delta", None)
        kind = getattr(part, "part_kind", None) or getattr(part, "part_delta_kind", None)
        match kind:
            case "text":
                if text := getattr(part, "content", None) or getattr(part, "content_delta", None):
                    yield self.say(text)
            case "thinking":
                if text := getattr(part, "content", None) or getattr(part, "content_delta", None):
                    yield self.think(text)
            case "tool-call":
                assert part is not None
                call = self._by_place[event.index] = self.new_call(part.tool_call_id, part.tool_name)
                yield self.tell_call(call)
                yield from self._argue(call, part.args)
            case "tool_call":
                assert part is not None
                yield from self._argue(self._by_place[event.index], part.args_delta)

    def _argue(self, call: CallBuilder, arguments: Any) -> Iterable[Live]:
        if text := arguments_text(arguments):
            call.extend("", "", text)
            yield self.tell_arguments(call, text)

    def whole(self, response: Any) -> Completed:
        """The message of pydantic-ai's. Raises `ProviderError` where it says that the answer is not whole."""
        if response.state != "complete":
            raise self._cut_off(began=bool(response.parts), missing="its end")
        self._model = response.model_name or ""
        used = response.usage
        if used is not None and (used.input_tokens or used.output_tokens):
            self.usage = Usage(
                input_tokens=used.input_tokens,
                output_tokens=used.output_tokens,
                cached_tokens=used.cache_read_tokens,
                cache_write_tokens=used.cache_write_tokens,
                reasoning_tokens=used.details.get("reasoning_tokens", 0),
                total_tokens=used.input_tokens + used.output_tokens,
            )
        parts = [part for place, each in enumerate(response.parts) for part in self._part(place, each)]
        return self._whole(parts, _FINISH_BY_WORD.get(response.finish_reason or "stop", "other"))

    def _part(self, place: int, part: Any) -> Iterable[Part]:
        match part.part_kind:
            case "text":
                if part.content:
                    yield TextPart(part.content)
            case "thinking":
                kept = _told(part, "content", "id", "signature", "provider_name", "provider_details")
                yield ReasoningPart(text=part.content, provider=PREFIX, data={PART: pack_value(kept)})
            case "tool-call":
                call = self._by_place.get(place) or self.new_call(part.tool_call_id, part.tool_name)
                if not call.text:
                    call.extend("", "", arguments_text(part.args))
                finished: ToolCall = call.finish()
                kept = _told(part, "id", "provider_name", "provider_details")
                metadata = {PREFIX: pack_value(kept)} if kept else {}
                yield ToolCallPart(msgspec.structs.replace(finished, metadata=metadata))


def _told(part: Any, *fields: str) -> dict[str, Any]:
    return {name: value for name in fields if (value := getattr(part, name)) is not None}
