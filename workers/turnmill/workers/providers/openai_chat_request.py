"""The body of a /chat/completions request, from a transcript.

What a provider wants back unchanged (reasoning, signatures on calls) goes back only to the provider that wrote it:
another one would reject it, or read it as the user's words.
"""

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
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolResult,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.specs import Reasoning, ToolSpec

from .base import ProviderError, ProviderRequest
from .openai_chat_dialects import STANDARD, Dialect

Json: TypeAlias = dict[str, Any]

REASONING_FIELD = "field"
"""The key in `ReasoningPart.data` that names the wire's field the text came in."""
REASONING_DETAILS = "reasoning_details"
THINKING_PARTS = "thinking"
"""The value of `REASONING_FIELD` where the reasoning came as parts of the content."""
_ENFORCED_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs"),
        *("title", "description"),
    }
)


def build_body(request: ProviderRequest, provider_name: str, dialect: Dialect = STANDARD) -> Json:
    """The request's body. The request's options come last and win; an option of None leaves the field out.

    Raises `ProviderError` (bad_request) where the reasoning that is asked for cannot be said, or is said twice.
    """
    body: Json = {
        "model": request.model,
        "messages": build_messages(request.system, request.messages, provider_name),
        "stream": True,
    }
    if dialect.takes_stream_options:
        body["stream_options"] = {"include_usage": True}
    if dialect.marked_models and request.model.startswith(dialect.marked_models):
        body["cache_control"] = {"type": "ephemeral"}
    dialect.fit(body["messages"])
    if request.tools:
        body["tools"] = [_build_tool(tool) for tool in request.tools]
        if request.tool_choice:
            body["tool_choice"] = _build_tool_choice(request.tool_choice)
    if request.output_schema is not None:
        body["response_format"] = build_response_format(request.output_name, request.output_schema)
    if request.reasoning is not None and request.reasoning.effort is None and dialect.takes_reasoning_budget:
        _refuse_twice(request.options, provider_name)
        body["reasoning"] = {"max_tokens": request.reasoning.budget_tokens}
    elif request.reasoning is not None:
        body["reasoning_effort"] = read_effort(request.reasoning, request.options, provider_name)
    body.update(request.options)
    if not body["stream"]:
        body.pop("stream_options", None)
    return {name: value for name, value in body.items() if value is not None}


def build_messages(system: str | None, messages: Iterable[Message], provider_name: str) -> list[Json]:
    """The transcript. What the API cannot carry in a tool's answer (images, files) follows the answers as a message of
    the user, because nothing may stand between a call and its answers."""
    built: list[Json] = [{"role": "system", "content": system}] if system else []
    attachments: list[Json] = []
    for message in messages:
        if message.role == "tool":
            for result in message.tool_results:
                built.append(_build_tool_message(result))
                attachments += _build_attachments(result)
            continue
        if attachments:
            built.append({"role": "user", "content": attachments})
            attachments = []
        built.append(_build_message(message, provider_name))
    if attachments:
        built.append({"role": "user", "content": attachments})
    return built


def build_response_format(name: str, schema: Json) -> Json:
    """A schema is enforced while the model writes (`strict`) where it keeps to what can be; others are only followed."""
    described: Json = {"name": name, "schema": schema}
    if schema.get("type") == "object" and is_enforceable(schema):
        described["strict"] = True
    return {"type": "json_schema", "json_schema": described}


def is_enforceable(schema: Any) -> bool:
    """Whether a schema keeps to the part of JSON Schema that is enforced: objects name all their properties as required
    and allow no others, and no keyword is used that some server refuses."""
    if not isinstance(schema, dict) or not schema.keys() <= _ENFORCED_KEYWORDS:
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" or properties:
        closed = schema.get("additionalProperties") is False and set(schema.get("required", ())) == set(properties)
        if not closed:
            return False
    inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
    return all(is_enforceable(each) for each in inner) and ("items" not in schema or is_enforceable(schema["items"]))


def read_effort(reasoning: Reasoning, options: Json, provider_name: str) -> str:
    _refuse_twice(options, provider_name)
    if reasoning.effort is None:
        text = (
            "this API takes an effort for reasoning, not budget_tokens: give the agent reasoning=Reasoning(effort=...), "
            f"or write the server's own field into provider_options[{provider_name!r}]"
        )
        raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
    return reasoning.effort


def _refuse_twice(options: Json, provider_name: str) -> None:
    twice = [name for name in ("reasoning_effort", "reasoning") if options.get(name) is not None]
    if twice:
        where = f"provider_options[{provider_name!r}][{twice[0]!r}]"
        text = f"reasoning is set twice: by the agent's `reasoning` and by {where}; remove one of them"
        raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))


def _build_message(message: Message, provider_name: str) -> Json:
    if message.role == "assistant":
        return _build_assistant_message(message, provider_name)
    return {"role": message.role, "content": _build_content(message.content)}


def _build_assistant_message(message: Message, provider_name: str) -> Json:
    calls = [_build_tool_call(call, provider_name) for call in message.tool_calls]
    built: Json = {"role": "assistant", "content": message.text or (None if calls else "")}
    if calls:
        built["tool_calls"] = calls
    for part in message.reasoning:
        if part.provider == provider_name:
            _add_reasoning(built, part)
    return built


def _add_reasoning(built: Json, part: ReasoningPart) -> None:
    """Details hold the text as well, so they go alone."""
    field = part.data.get(REASONING_FIELD, "reasoning_content")
    if details := part.data.get(REASONING_DETAILS):
        built[REASONING_DETAILS] = built.get(REASONING_DETAILS, []) + details
    elif field == THINKING_PARTS:
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": part.text}]}
        text = [{"type": "text", "text": built["content"]}] if built["content"] else []
        built["content"] = [thinking, *text]
    else:
        built[field] = built.get(field, "") + part.text


def _build_tool_call(call: ToolCall, provider_name: str) -> Json:
    """Arguments that were no valid JSON are replayed as an empty object: a server that reads them would fail each time
    from then on. The model finds what was wrong in the call's answer."""
    arguments = "{}" if call.error else _compact_json(call.arguments)
    kept = call.metadata.get(provider_name, {})
    return {**kept, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _build_tool_message(result: ToolResult) -> Json:
    return {"role": "tool", "tool_call_id": result.tool_call_id, "content": _build_result_text(result)}


def _build_result_text(result: ToolResult) -> str:
    if result.content is not None:
        texts = [part.text for part in result.content if isinstance(part, TextPart)]
        return "\n".join(texts) if texts else "(see the attachments below)"
    if result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    return result.result if isinstance(result.result, str) else _compact_json(result.result)


def _build_attachments(result: ToolResult) -> list[Json]:
    return [_build_part(part) for part in result.content or [] if not isinstance(part, TextPart)]


def _build_content(content: str | list[Part]) -> str | list[Json]:
    """Text alone goes as a string, which servers understand that know no parts."""
    match content:
        case str():
            return content
        case [TextPart(text)]:
            return text
        case _:
            return [_build_part(part) for part in content if isinstance(part, OutputPart)]


def _build_part(part: OutputPart) -> Json:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():
            return _build_image(locate(part, part.media_type or "image/png"))
        case FilePart() if part.media_type.startswith("image/"):
            return _build_image(locate(part, part.media_type))
        case FilePart() if part.media_type.startswith("audio/") and part.data is not None:
            format_name = part.media_type.removeprefix("audio/").removeprefix("x-")
            audio = {
                "data": base64.b64encode(part.data).decode(),
                "format": {"mpeg": "mp3"}.get(format_name, format_name),
            }
            return {"type": "input_audio", "input_audio": audio}
        case FilePart():
            name = part.filename or "file"
            return {"type": "file", "file": {"filename": name, "file_data": locate(part, part.media_type)}}


def _build_image(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def locate(part: ImagePart | FilePart, media_type: str) -> str:
    """Where the provider finds the content: its URL, or the data itself as one."""
    if part.data is not None:
        return f"data:{media_type};base64,{base64.b64encode(part.data).decode()}"
    if part.url is None:
        raise not_loaded(f"a part of {media_type}")
    return part.url


def _build_tool(tool: ToolSpec) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


def _build_tool_choice(choice: str) -> Any:
    """The API's own words, or the name of the tool that must be called."""
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _compact_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def not_loaded(what: str) -> ProviderError:
    message = f"{what} stands under a key of its own and was not loaded before the request"
    return ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=message))
