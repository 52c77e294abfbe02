"""One tool call of an answer, from fragments."""

from __future__ import annotations

from typing import Any

import msgspec

from turnmill.protocol.content import ToolCall

from .http_errors import shorten
from .openai_chat_chunks import decode_any


class CallBuilder:
    """One call of an answer. `index` is the provider's, `position` ours: its place among the answer's calls."""

    def __init__(self, position: int, index: int | None, call_id: str) -> None:
        self.position = position
        self.index = index
        self.id = call_id
        self.provider_id = ""
        self.name = ""
        self.metadata: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._length = 0

    @property
    def text(self) -> str:
        """The arguments as they came."""
        return "".join(self._pieces)

    def extend(self, call_id: str, name: str, arguments: str) -> None:
        self.provider_id = self.provider_id or call_id
        self.name = self.name or name
        if arguments:
            self._pieces.append(arguments)
            self._length += len(arguments)

    def repeats(self, call_id: str, arguments: str) -> bool:
        """Whether a fragment is the whole call once more, as some servers send at the end."""
        if not call_id or call_id != self.provider_id or len(arguments) != self._length:
            return False
        return self._is_complete() and arguments == "".join(self._pieces)

    def is_followed_by_another(self, call_id: str, name: str, arguments: str) -> bool:
        """Whether a fragment with a name begins another call although neither index nor id say so: the arguments here
        are a whole object already, and it brings more."""
        return bool(name and arguments.strip()) and not self.repeats(call_id, arguments) and self._is_complete()

    def finish(self) -> ToolCall:
        arguments, error = read_arguments("".join(self._pieces))
        if not self.name:
            error = "the call names no tool"
        return ToolCall(id=self.id, name=self.name, arguments=arguments, metadata=self.metadata, error=error)

    def _is_complete(self) -> bool:
        """Whether the arguments are a whole object. The look at the last piece saves parsing after each fragment."""
        if not self._pieces or not self._pieces[-1].rstrip().endswith("}"):
            return False
        return read_arguments("".join(self._pieces))[1] is None


def read_arguments(text: str) -> tuple[dict[str, Any], str | None]:
    """The arguments as an object, or why they are none. No arguments at all are an empty object."""
    try:
        value = decode_any(text.encode()) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        return {}, f"the arguments are not JSON ({error}): {shorten(text, 200)}"
    if value is None:
        return {}, None
    if isinstance(value, dict):
        return value, None
    return {}, f"the arguments are no JSON object: {shorten(text, 200)}"


def arguments_text(value: Any) -> str:
    """Arguments come as JSON text, and from some servers as the object itself. An empty object before the text is the
    same as no arguments yet."""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode() if value is not None and value != {} else ""
