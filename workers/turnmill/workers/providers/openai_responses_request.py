"""The body of a /responses request, from a transcript.

The conversation is sent whole each time and nothing is kept at the provider (`store` is false), so a session may change its
model in between. Reasoning and the provider's own items go back as they came, to the provider that wrote them, in their
places: a call without the reasoning before it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from turnmill.protocol.content import (
    ErrorInfo,
    FilePart,
    ImagePart,
    Message,
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.specs import ToolSpec

from .base import ProviderError, ProviderRequest
from .call_names import fit_name
from .openai_chat_request import build_response_format, locate, not_loaded, read_effort
from .openai_responses_reply import ITEM

Json: TypeAlias = dict[str, Any]
_REASONING_MODEL = re.compile(r"(^|/)(o\d|gpt-5|gpt-oss|codex)")
_ID_LENGTH_MAX = 64
_ENCRYPTED = "reasoning.encrypted_content"


def build_body(request: ProviderRequest, provider_name: str) -> Json:
    """The request's body. The request's options come last and win; an option of None leaves the field out.

    Raises `ProviderError` (bad_request) where the reasoning that is asked for cannot be said, or is said twice.
    """
    body: Json = {
        "model": request.model,
        "input": build_input(request.messages, provider_name),
        "stream": True,
        "store": False,
    }
    if request.system:
        body["instructions"] = request.system
    if request.tools:
        body["tools"] = [_build_tool(tool) for tool in request.tools]
        if request.tool_choice:
            body["tool_choice"] = _build_tool_choice(request.tool_choice)
    if request.output_schema is not None:
        named = build_response_format(request.output_name, request.output_schema)["json_schema"]
        body["text"] = {"format": {"type": "json_schema", "strict": False, **named}}
    if request.reasoning is not None:
        body["reasoning"] = {"effort": read_effort(request.reasoning, request.options, provider_name)}
    if request.reasoning is not None or _REASONING_MODEL.search(request.model):
        body["include"] = [_ENCRYPTED]  # other models refuse to be asked for it
    body.update(request.options)
    return {name: value for name, value in body.items() if value is not None}


def build_input(messages: Iterable[Message], provider_name: str) -> list[Json]:
    """The transcript as items."""
    built: list[Json] = []
    for message in messages:
        match message.role:
            case "tool":
                built += [_build_result(result) for result in message.tool_results]
            case "assistant":
                built += _build_answer(message, provider_name)
            case _:
                built.append({"role": message.role, "content": _build_content(message)})
    return built


def _build_content(message: Message) -> str | list[Json]:
    if isinstance(message.content, str):
        return message.content
    return [_build_part(part) for part in message.content if isinstance(part, OutputPart)]


def _build_answer(message: Message, provider_name: str) -> Iterable[Json]:
    """The items of an answer, in their order."""
    if isinstance(message.content, str):
        if message.content:
            yield _said(message.content)
        return
    for part in message.content:
        match part:
            case TextPart(text):
                if text:
                    yield _said(text)
            case ReasoningPart():
                item = part.data.get(ITEM)
                if item and part.provider == provider_name:
                    yield _sent_back(item)
            case ToolCallPart(call):
                yield _build_call(call)


def _said(text: str) -> Json:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _sent_back(item: Json) -> Json:
    """As it came, but for its status, which is no field of an input. An id without its content means something that is kept
    at the provider, which it is not."""
    item = {name: value for name, value in item.items() if name != "status" or item.get("type") != "reasoning"}
    if item.get("type") == "reasoning" and item.get("content") is None:
        item.pop("content", None)
    return item


def _build_call(call: ToolCall) -> Json:
    """Arguments that were no valid JSON are replayed as an empty object: the model finds what was wrong in the answer."""
    arguments = "{}" if call.error else msgspec.json.encode(call.arguments).decode()
    return {
        "type": "function_call",
        "call_id": fit_name(call.id, _ID_LENGTH_MAX),
        "name": call.name,
        "arguments": arguments,
    }


def _build_result(result: ToolResult) -> Json:
    return {
        "type": "function_call_output",
        "call_id": fit_name(result.tool_call_id, _ID_LENGTH_MAX),
        "output": _build_output(result),
    }


def _build_output(result: ToolResult) -> str | list[Json]:
    if result.content is not None:
        return [_build_part(part) for part in result.content]
    if result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    return result.result if isinstance(result.result, str) else msgspec.json.encode(result.result).decode()


def _build_part(part: OutputPart) -> Json:
    match part:
        case TextPart():
            return {"type": "input_text", "text": part.text}
        case ImagePart():
            return {"type": "input_image", "image_url": locate(part, part.media_type or "image/png")}
        case FilePart() if part.media_type.startswith("image/"):
            return {"type": "input_image", "image_url": locate(part, part.media_type)}
        case FilePart() if part.media_type.startswith("audio/"):
            text = 'the Responses API takes no audio: use the provider\'s chat completions (api = "openai")'
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
        case FilePart() if part.data is None and part.url is not None:
            return {"type": "input_file", "file_url": part.url}
        case FilePart():
            name = part.filename or "file"
            return {"type": "input_file", "filename": name, "file_data": locate(part, part.media_type)}


def _build_tool(tool: ToolSpec) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.schema,
        "strict": False,
    }


def _build_tool_choice(choice: str) -> Any:
    """The API's own words, or the name of the tool that must be called."""
    return choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice}
