"""The transcript as messages of the Messages API.

The API takes turns: what follows each other on one side becomes one message, a tool's results first. It refuses blank
texts, names and ids of calls with other than letters, digits, `_` and `-`, and calls without their results beside them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
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

from .base import ProviderError
from .call_names import fit_name
from .openai_chat_request import not_loaded

Json: TypeAlias = dict[str, Any]

SIGNATURE = "signature"
"""Keys of `ReasoningPart.data`: the signature of a thought, ..."""
BLOCK = "block"
"""... a block that is only kept, as it came, ..."""
CITATIONS = "citations"
"""... the citations of the text before it, ..."""
CONTAINER = "container"
"""... the id of the place where the provider runs code for this conversation."""
CALLER = "caller"
"""The key of `ToolCall.metadata` for the code that made the call."""

_NAME_LENGTH_MAX = 128
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


def build_messages(messages: Iterable[Message], provider_name: str) -> list[Json]:
    """Messages that take turns. Raises `ProviderError` (bad_request) for content that the API cannot carry."""
    built: list[Json] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = list(_build_blocks(message, provider_name))
        if not blocks:
            continue
        if not built or built[-1]["role"] != role:
            built.append({"role": role, "content": blocks})
        elif message.role == "tool":
            before = built[-1]["content"]
            results = sum(block["type"] == "tool_result" for block in before)
            built[-1]["content"] = before[:results] + blocks + before[results:]
        else:
            built[-1]["content"] += blocks
    if built and built[-1]["role"] == "assistant":
        _trim_end(built[-1]["content"])
    return built


def _trim_end(blocks: list[Json]) -> None:
    """An answer that is to go on may not end in white space."""
    if blocks[-1]["type"] == "text":
        blocks[-1]["text"] = blocks[-1]["text"].rstrip()


def _build_blocks(message: Message, provider_name: str) -> Iterator[Json]:
    if message.role == "tool":
        for result in message.tool_results:
            yield _build_result(result)
    elif message.role == "assistant":
        yield from _build_answer(message, provider_name)
    elif message.role == "system":
        if message.text.strip():
            # The system prompt stands in front of everything: what is said later must not change it.
            yield {"type": "text", "text": f"<system>\n{message.text}\n</system>"}
    elif isinstance(message.content, str):
        if message.content.strip():
            yield {"type": "text", "text": message.content}
    else:
        for part in message.content:
            if isinstance(part, OutputPart) and not _is_blank(part):
                yield _build_part(part)


def _build_answer(message: Message, provider_name: str) -> Iterator[Json]:
    if isinstance(message.content, str):
        if message.content.strip():
            yield {"type": "text", "text": message.content}
        return
    blocks: list[Json] = []
    for part in message.content:
        match part:
            case TextPart(text) if text.strip():
                blocks.append({"type": "text", "text": text})
            case ReasoningPart() if part.provider == provider_name:
                _add_kept(blocks, part)
            case ToolCallPart(call):
                blocks.append(_build_call(call, provider_name))
            case ImagePart() | FilePart():
                name = getattr(part, "filename", None) or part.media_type or "image"
                blocks.append({"type": "text", "text": f"({name}: an answer cannot hold it)"})
            case _:
                pass
    yield from blocks


def _add_kept(blocks: list[Json], part: ReasoningPart) -> None:
    """Thoughts go back only with their signature: without it they are refused."""
    if signature := part.data.get(SIGNATURE):
        blocks.append({"type": "thinking", "thinking": part.text, "signature": signature})
    elif block := part.data.get(BLOCK):
        blocks.append(dict(block))
    elif (citations := part.data.get(CITATIONS)) and blocks and blocks[-1]["type"] == "text":
        blocks[-1]["citations"] = citations


def _build_call(call: ToolCall, provider_name: str) -> Json:
    """Arguments that were no valid JSON are replayed as an empty object: the model finds what was wrong in the answer."""
    block: Json = {
        "type": "tool_use",
        "id": fit_name(call.id, _NAME_LENGTH_MAX),
        "name": fit_name(call.name or "unnamed", _NAME_LENGTH_MAX),
        "input": {} if call.error else call.arguments,
    }
    caller = call.metadata.get(provider_name, {}).get(CALLER)
    return {**block, CALLER: caller} if caller else block


def _build_result(result: ToolResult) -> Json:
    block: Json = {"type": "tool_result", "tool_use_id": fit_name(result.tool_call_id, _NAME_LENGTH_MAX)}
    if result.content is not None:
        parts = [_build_result_part(part) for part in result.content if not _is_blank(part)]
        if parts:
            block["content"] = parts
    elif result.blob is not None:
        raise not_loaded(f"the result of {result.tool_name}")
    else:
        text = result.result if isinstance(result.result, str) else msgspec.json.encode(result.result).decode()
        if text.strip():
            block["content"] = text
    if result.is_error:
        block["is_error"] = True
        block.setdefault("content", "(no message)")
    return block


def _build_result_part(part: OutputPart) -> Json:
    """A tool may give what the API does not take: one result must not stop the conversation for ever."""
    try:
        return _build_part(part)
    except ProviderError as error:
        if error.info.kind != ErrorKind.BAD_REQUEST or _is_elsewhere(part):
            raise
        return {"type": "text", "text": f"(left out: {error.info.message})"}


def _is_elsewhere(part: OutputPart) -> bool:
    return not isinstance(part, TextPart) and part.data is None and part.url is None


def _is_blank(part: OutputPart) -> bool:
    return isinstance(part, TextPart) and not part.text.strip()


def _build_part(part: OutputPart) -> Json:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():
            return _build_image(part, part.media_type or "image/png")
        case FilePart() if part.media_type.startswith("image/"):
            return _build_image(part, part.media_type)
        case FilePart():
            return _build_document(part)


def _build_image(part: ImagePart | FilePart, media_type: str) -> Json:
    media_type = media_type.replace("image/jpg", "image/jpeg")
    if part.data is not None and media_type not in _IMAGES:
        raise _refused(f"Anthropic takes no images of {media_type}; it takes {', '.join(sorted(_IMAGES))}")
    return {"type": "image", "source": _build_source(part, media_type)}


def _build_document(part: FilePart) -> Json:
    """PDFs, and texts of any kind; the API takes neither sound nor office files."""
    kind = part.media_type
    if kind != "application/pdf" and not _is_text(kind):
        raise _refused(f"Anthropic takes no files of {kind}: it takes PDF, texts and images")
    source = _build_source(part, kind)
    if _is_text(kind) and part.data is not None:
        source = {"type": "text", "media_type": "text/plain", "data": part.data.decode("utf-8", "replace")}
    document: Json = {"type": "document", "source": source}
    return {**document, "title": part.filename} if part.filename else document


def _is_text(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in ("application/json", "application/xml", "application/yaml")


def _build_source(part: ImagePart | FilePart, media_type: str) -> Json:
    if part.data is not None:
        return {"type": "base64", "media_type": media_type, "data": base64.b64encode(part.data).decode()}
    if part.url is None:
        raise not_loaded(f"a part of {media_type}")
    return {"type": "url", "url": part.url}


def _refused(text: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
