"""The body of a Converse request, from a transcript.

The API has no structured answers for all of its models, so a schema becomes a tool that the model must use; what it tells
that tool is the answer.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

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
from turnmill.protocol.specs import Reasoning, ToolSpec

from .anthropic_models import model_named
from .base import ProviderError, ProviderRequest
from .call_names import fit_name
from .format import without_none
from .openai_chat_request import not_loaded

Json: TypeAlias = dict[str, Any]
_NAME_LENGTH_MAX = 64
_CACHE_POINT: Json = {"cachePoint": {"type": "default"}}
_INFERENCE = frozenset({"maxTokens", "temperature", "topP", "stopSequences"})
_INFERENCE_BY_WORD = {"max_tokens": "maxTokens", "top_p": "topP", "stop": "stopSequences"}
_DOCUMENTS = {
    "application/pdf": "pdf",
    "text/csv": "csv",
    "text/html": "html",
    "text/plain": "txt",
    "text/markdown": "md",
    "application/msword": "doc",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.ms-excel": "xls",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
}
_BUDGET_BY_EFFORT = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 32768}


def answers_by_tool(request: ProviderRequest) -> bool:
    """Whether a tool stands for the answer."""
    return request.output_schema is not None


def build_body(request: ProviderRequest, provider_name: str) -> Json:
    """The request's body. The request's options come last and win; an option of None leaves the field out. Options that are
    no field of the API go to the model itself (`additionalModelRequestFields`)."""
    body: Json = {"messages": build_messages(request.messages, provider_name)}
    if request.system:
        body["system"] = [{"text": request.system}]
    body["toolConfig"] = _build_tools(request)
    fields: Json = {}
    if request.reasoning is not None and request.reasoning.effort != "none":
        fields["thinking"] = {"type": "enabled", "budget_tokens": _budget(request.reasoning)}
    inference: Json = {}
    for name, value in request.options.items():
        name = _INFERENCE_BY_WORD.get(name, name)
        if name in _INFERENCE:
            inference[name] = value
        elif name == "inferenceConfig":
            inference |= value
        elif name == "additionalModelRequestFields":
            fields |= value
        elif name in ("stream", "parallel_tool_calls", "cache_control"):
            continue
        elif name[:1].islower() and any(letter.isupper() for letter in name):
            body[name] = value  # guardrailConfig, performanceConfig, requestMetadata, ...
        else:
            fields[name] = value
    if "cache_control" not in request.options and model_named(request.model).version >= (3, 7):
        _mark_what_stays(body)
    body["inferenceConfig"] = without_none(inference) or None
    body["additionalModelRequestFields"] = without_none(fields) or None
    return without_none(body)


def _mark_what_stays(body: Json) -> None:
    """Claude keeps a prompt up to the points that are marked: what is in front of the messages, and the last two of the
    user's side, so that each step reads what the step before has written. Other models may refuse the marks."""
    if body.get("system"):
        body["system"] = [*body["system"], _CACHE_POINT]
    asked = [message for message in body["messages"] if message["role"] == "user"]
    for message in asked[-2:]:
        message["content"].append(_CACHE_POINT)


def build_messages(messages: Iterable[Message], provider_name: str) -> list[Json]:
    """The transcript; the API takes no two messages of one role in a row, and no system messages among them."""
    built: list[Json] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = list(_build_blocks(message, provider_name))
        if not blocks:
            continue
        if built and built[-1]["role"] == role:
            built[-1]["content"] += blocks
        else:
            built.append({"role": role, "content": blocks})
    return built


def _build_blocks(message: Message, provider_name: str) -> Iterable[Json]:
    if message.role == "tool":
        for result in message.tool_results:
            yield _build_result(result)
        return
    parts = [TextPart(message.content)] if isinstance(message.content, str) else message.content
    for part in parts:
        match part:
            case TextPart(text):
                if text.strip():  # blank texts are refused
                    yield {"text": text}
            case ImagePart() | FilePart():
                yield _build_media(part)
            case ReasoningPart():
                if part.provider == provider_name:
                    yield from _build_reasoning(part)
            case ToolCallPart(call):
                yield _build_call(call)


def _build_reasoning(part: ReasoningPart) -> Iterable[Json]:
    """Only what is signed goes back: the model refuses thoughts that are not."""
    if redacted := part.data.get("redactedContent"):
        yield {"reasoningContent": {"redactedContent": redacted}}
    elif signature := part.data.get("signature"):
        yield {"reasoningContent": {"reasoningText": {"text": part.text, "signature": signature}}}


def _build_call(call: ToolCall) -> Json:
    """Arguments that were no valid JSON are replayed as an empty object: the model finds what was wrong in the answer."""
    return {
        "toolUse": {
            "toolUseId": fit_name(call.id, _NAME_LENGTH_MAX),
            "name": fit_name(call.name or "unnamed", _NAME_LENGTH_MAX),
            "input": {} if call.error else call.arguments,
        }
    }


def _build_result(result: ToolResult) -> Json:
    content: list[Json]
    if result.content is not None:
        content = [_build_part(part) for part in result.content]
    elif result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    elif isinstance(result.result, dict):
        content = [{"json": result.result}]
    elif isinstance(result.result, str):
        content = [{"text": result.result or "(empty)"}]
    else:
        content = [{"json": {"result": result.result}}]
    status = "error" if result.is_error else "success"
    return {
        "toolResult": {
            "toolUseId": fit_name(result.tool_call_id, _NAME_LENGTH_MAX),
            "content": content,
            "status": status,
        }
    }


def _build_part(part: OutputPart) -> Json:
    return {"text": part.text or "(empty)"} if isinstance(part, TextPart) else _build_media(part)


def _build_media(part: ImagePart | FilePart) -> Json:
    media_type = part.media_type or "image/png"
    if part.data is None:
        if part.url is None:
            raise not_loaded(f"a part of {media_type}")
        raise _refused("Bedrock fetches no URLs: give the bytes of images and files")
    source = {"bytes": base64.b64encode(part.data).decode()}
    kind, _, name = media_type.partition("/")
    if kind in ("image", "video"):
        return {kind: {"format": {"jpg": "jpeg"}.get(name, name), "source": source}}
    if media_type not in _DOCUMENTS:
        raise _refused(f"Bedrock takes no files of {media_type}; it takes {', '.join(sorted(_DOCUMENTS))}")
    name = getattr(part, "filename", None) or "file"
    # Letters, digits, single blanks, hyphens and brackets; a dot is refused.
    clean = re.sub(r"\s+", " ", re.sub(r"[^\w\s\-()\[\]]|_", "-", name)).strip() or "file"
    return {"document": {"format": _DOCUMENTS[media_type], "name": clean, "source": source}}


def _build_tools(request: ProviderRequest) -> Json | None:
    tools = [_build_tool(tool) for tool in request.tools]
    choice = _build_choice(request.tool_choice) if request.tools and request.tool_choice else None
    if answers_by_tool(request):
        schema = {"json": request.output_schema}
        text = "Give your final answer by calling this tool, once."
        tools.append({"toolSpec": {"name": request.output_name, "description": text, "inputSchema": schema}})
        # A thinking model may not be forced.
        forced = {"any": {}} if request.tools else {"tool": {"name": request.output_name}}
        choice = forced if request.reasoning is None else None
    if not tools or (request.tool_choice == "none" and not answers_by_tool(request) and not _has_calls(request)):
        return None
    return without_none({"tools": tools, "toolChoice": choice})


def _has_calls(request: ProviderRequest) -> bool:
    """A conversation with calls in it is refused without its tools."""
    return any(message.tool_calls for message in request.messages)


def _build_tool(tool: ToolSpec) -> Json:
    spec: Json = {"name": tool.name, "inputSchema": {"json": tool.schema}}
    if tool.description:
        spec["description"] = tool.description
    return {"toolSpec": spec}


def _build_choice(choice: str) -> Json | None:
    match choice:
        case "auto" | "none":
            return {"auto": {}}
        case "required":
            return {"any": {}}
        case _:
            return {"tool": {"name": choice}}


def _budget(reasoning: Reasoning) -> int:
    """In tokens, as the thinking models of this API take it."""
    return reasoning.budget_tokens or _BUDGET_BY_EFFORT[reasoning.effort or "medium"]


def _refused(text: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
