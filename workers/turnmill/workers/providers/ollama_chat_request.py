"""The body of an /api/chat request of Ollama, from a transcript."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from turnmill.protocol.content import (
    ErrorInfo,
    FilePart,
    ImagePart,
    Message,
    OutputPart,
    TextPart,
    ToolCall,
    ToolResult,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.specs import Reasoning, ToolSpec

from .base import ProviderError, ProviderRequest
from .format import without_none
from .openai_chat_request import not_loaded

Json: TypeAlias = dict[str, Any]
_TOP_LEVEL = frozenset(
    {"stream", "think", "format", "keep_alive", "options", "tools", "messages", "logprobs", "top_logprobs"}
)
"""Options of these names are fields of the request; all others are the model's (`options`), such as `num_ctx`."""


def build_body(request: ProviderRequest, provider_name: str) -> Json:
    """The request's body. The request's options come last and win; an option of None leaves the field out. The API has no
    choice of tools: `none` leaves them out, any other choice is left to the model."""
    body: Json = {
        "model": request.model,
        "messages": build_messages(request.system, request.messages, provider_name),
        "stream": True,
    }
    if request.tools and request.tool_choice != "none":
        body["tools"] = [_build_tool(tool) for tool in request.tools]
    if request.output_schema is not None:
        body["format"] = request.output_schema
    if request.reasoning is not None:
        body["think"] = _build_think(request.reasoning)
    options: Json = {}
    for name, value in request.options.items():
        if name == "options":
            options |= value
        elif name in _TOP_LEVEL:
            body[name] = value
        elif name != "parallel_tool_calls":  # the API cannot say it
            options[name] = value
    body["options"] = without_none(options) or None
    return without_none(body)


def build_messages(system: str | None, messages: Iterable[Message], provider_name: str) -> list[Json]:
    """The transcript. Images in a tool's answer go with that answer."""
    built: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        match message.role:
            case "tool":
                built += [_build_result(result) for result in message.tool_results]
            case "assistant":
                built.append(_build_answer(message, provider_name))
            case role:
                content = message.content if isinstance(message.content, list) else [TextPart(message.content)]
                built.append(
                    {"role": role, **_build_content([part for part in content if isinstance(part, OutputPart)])}
                )
    return built


def _build_answer(message: Message, provider_name: str) -> Json:
    built: Json = {"role": "assistant", "content": message.text}
    thinking = "".join(part.text for part in message.reasoning if part.provider == provider_name)
    if thinking:
        built["thinking"] = thinking
    if message.tool_calls:
        built["tool_calls"] = [_build_call(call) for call in message.tool_calls]
    return built


def _build_call(call: ToolCall) -> Json:
    """Arguments that were no valid JSON are replayed as an empty object: the model finds what was wrong in the answer."""
    return {"id": call.id, "function": {"name": call.name, "arguments": {} if call.error else call.arguments}}


def _build_result(result: ToolResult) -> Json:
    built: Json = {"role": "tool", "tool_name": result.tool_name, "tool_call_id": result.tool_call_id}
    if result.content is not None:
        return {**built, **_build_content(result.content)}
    if result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    text = result.result if isinstance(result.result, str) else msgspec.json.encode(result.result).decode()
    return {**built, "content": text}


def _build_content(parts: Iterable[OutputPart]) -> Json:
    texts, images = [], []
    for part in parts:
        match part:
            case TextPart():
                texts.append(part.text)
            case ImagePart():
                images.append(_build_image(part))
            case FilePart() if part.media_type.startswith("image/"):
                images.append(_build_image(part))
            case FilePart():
                raise _refused(f"Ollama takes texts and images, not {part.media_type}")
    content: Json = {"content": "\n".join(texts)}
    return {**content, "images": images} if images else content


def _build_image(part: ImagePart | FilePart) -> str:
    if part.data is not None:
        return base64.b64encode(part.data).decode()
    if part.url is not None:
        raise _refused("Ollama fetches no images: give the image's bytes, not its URL")
    raise not_loaded("an image")


def _build_tool(tool: ToolSpec) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


def _build_think(reasoning: Reasoning) -> bool | str:
    """Some models take a level, all that think take yes or no."""
    if reasoning.effort is None:
        raise _refused("Ollama takes an effort for reasoning, not budget_tokens: give reasoning=Reasoning(effort=...)")
    if reasoning.effort == "none":
        return False
    return reasoning.effort if reasoning.effort in ("low", "medium", "high") else True


def _refused(text: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
