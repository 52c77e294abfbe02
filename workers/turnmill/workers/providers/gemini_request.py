"""The body of a Gemini generateContent request, from a transcript.

Answers to calls go by name and place, with our ids beside them where the API takes them. A signature goes back on the part
it came on, to the provider that wrote it: without it a thinking model refuses the request.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from turnmill.protocol.content import (
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
from turnmill.protocol.specs import Reasoning, ToolSpec

from .base import ProviderRequest
from .format import without_none
from .gemini_reply import ITEM, SIGNATURE
from .openai_chat_request import not_loaded

Json: TypeAlias = dict[str, Any]
_TOP_LEVEL = frozenset(
    {
        "contents",
        "systemInstruction",
        "tools",
        "toolConfig",
        "safetySettings",
        "generationConfig",
        "cachedContent",
        "labels",
    }
)
"""Options of these names are fields of the request; all others are of its generationConfig."""
_WITH_BUDGET = re.compile(r"gemini-(1|2)[.-]")
_BUDGET_BY_EFFORT = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": 24576}


def build_body(request: ProviderRequest, provider_name: str) -> Json:
    """The request's body. The request's options come last and win; an option of None leaves the field out."""
    body: Json = {"contents": build_contents(request.messages, provider_name)}
    if request.system:
        body["systemInstruction"] = {"parts": [{"text": request.system}]}
    if request.tools:
        body["tools"] = [{"functionDeclarations": [_build_tool(tool) for tool in request.tools]}]
        if request.tool_choice:
            body["toolConfig"] = {"functionCallingConfig": _build_tool_choice(request.tool_choice)}
    config: Json = {}
    if request.output_schema is not None:
        config |= {"responseMimeType": "application/json", "responseJsonSchema": request.output_schema}
    if request.reasoning is not None:
        config["thinkingConfig"] = _build_thinking(request.reasoning, request.model)
    for name, value in request.options.items():
        if name in _TOP_LEVEL and name != "generationConfig":
            body[name] = value
        elif name == "generationConfig":
            config |= value
        elif name not in ("stream", "parallel_tool_calls"):  # the first is the URL's, the second this API cannot say
            config[name] = value
    body["generationConfig"] = without_none(config) or None
    return without_none(body)


def build_contents(messages: Iterable[Message], provider_name: str) -> list[Json]:
    """The transcript as turns of user and model; the API takes no two of one role in a row."""
    contents: list[Json] = []
    for message in messages:
        role = "model" if message.role == "assistant" else "user"
        parts = list(_build_parts(message, provider_name))
        if not parts:
            continue
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        else:
            contents.append({"role": role, "parts": parts})
    return contents


def _build_parts(message: Message, provider_name: str) -> Iterable[Json]:
    if message.role == "tool":
        for result in message.tool_results:
            yield from _build_result(result)
    elif isinstance(message.content, str):
        if message.content:
            yield {"text": message.content}
    elif message.role == "assistant":
        yield from _build_answer(message, provider_name)
    else:
        for part in message.content:
            if isinstance(part, OutputPart):
                yield _build_part(part)


def _build_answer(message: Message, provider_name: str) -> Iterable[Json]:
    """The parts of an answer, with their signatures."""
    built: list[Json] = []
    for part in message.content:
        match part:
            case TextPart(text) if text:
                built.append({"text": text})
            case ReasoningPart() if part.provider == provider_name:
                _add_reasoning(built, part)
            case ToolCallPart(call):
                built.append(_build_call(call, provider_name))
            case ImagePart() | FilePart():
                built.append(_build_part(part))
    return built


def _add_reasoning(built: list[Json], part: ReasoningPart) -> None:
    """A thought that is signed, a signature of the text before it, or a part of the provider's own."""
    item, signature = part.data.get(ITEM), part.data.get(SIGNATURE)
    if item:
        built.append(item)
    elif signature and part.text:
        built.append({"text": part.text, "thought": True, SIGNATURE: signature})
    elif signature and built and "text" in built[-1] and SIGNATURE not in built[-1]:
        built[-1][SIGNATURE] = signature
    elif signature:
        built.append({"text": "", SIGNATURE: signature})


def _build_call(call: ToolCall, provider_name: str) -> Json:
    """Arguments that were no valid JSON are replayed as an empty object: the model finds what was wrong in the answer."""
    kept = call.metadata.get(provider_name, {})
    return {**kept, "functionCall": {"id": call.id, "name": call.name, "args": {} if call.error else call.arguments}}


def _build_result(result: ToolResult) -> Iterable[Json]:
    """The answer as an object, as the API wants one; images and files follow it."""
    attached: list[Json] = []
    if result.content is not None:
        texts = [part.text for part in result.content if isinstance(part, TextPart)]
        attached = [_build_part(part) for part in result.content if not isinstance(part, TextPart)]
        value: Any = "\n".join(texts) if texts else "(see the attachments)"
    elif result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    else:
        value = result.result
    response = value if isinstance(value, dict) else {"error" if result.is_error else "result": value}
    yield {"functionResponse": {"id": result.tool_call_id, "name": result.tool_name, "response": response}}
    yield from attached


def _build_part(part: OutputPart) -> Json:
    match part:
        case TextPart():
            return {"text": part.text}
        case ImagePart():
            return _build_media(part, part.media_type or "image/png")
        case FilePart():
            return _build_media(part, part.media_type)


def _build_media(part: ImagePart | FilePart, media_type: str) -> Json:
    if part.data is not None:
        return {"inlineData": {"mimeType": media_type, "data": base64.b64encode(part.data).decode()}}
    if part.url is None:
        raise not_loaded(f"a part of {media_type}")
    return {"fileData": {"mimeType": media_type, "fileUri": part.url}}


def _build_tool(tool: ToolSpec) -> Json:
    declared: Json = {"name": tool.name, "description": tool.description}
    if tool.schema.get("properties"):
        declared["parametersJsonSchema"] = tool.schema
    return declared


def _build_tool_choice(choice: str) -> Json:
    match choice:
        case "auto":
            return {"mode": "AUTO"}
        case "none":
            return {"mode": "NONE"}
        case "required":
            return {"mode": "ANY"}
        case _:
            return {"mode": "ANY", "allowedFunctionNames": [choice]}


def _build_thinking(reasoning: Reasoning, model: str) -> Json:
    """A budget, or an effort: as the level that newer models take, and as a budget for those before."""
    budget = reasoning.budget_tokens
    if budget is None and (reasoning.effort == "none" or _WITH_BUDGET.search(model)):
        budget = _BUDGET_BY_EFFORT[reasoning.effort or "medium"]
    if budget is not None:
        return {"thinkingBudget": budget, "includeThoughts": budget > 0}
    return {"thinkingLevel": "high" if reasoning.effort == "xhigh" else reasoning.effort, "includeThoughts": True}
