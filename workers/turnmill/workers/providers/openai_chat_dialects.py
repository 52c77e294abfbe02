"""Where servers of /chat/completions differ in what they take, by the host of the endpoint.

What they send back differs far more; `openai_chat_reply` reads all of it without asking who wrote it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

Json: TypeAlias = dict[str, Any]


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint takes. `call_ids` is the form that ids of calls must have: those of another provider that do not
    are replaced, by the same ones each time, with `call_id_length` letters and digits."""

    takes_stream_options: bool = True
    takes_reasoning_budget: bool = False
    call_ids: str = ""
    call_id_length: int = 0
    marked_models: str = ""
    """The beginning of the names of models that keep a prompt only where the request says so."""
    takes_null_content: bool = True
    """Whether the content of a message that only calls tools may be null."""

    def fit(self, messages: list[Json]) -> None:
        """Change messages to what the endpoint takes."""
        for message in messages if not self.takes_null_content else ():
            if message["content"] is None:
                message["content"] = ""
        for message in messages if self.call_ids else ():
            for call in message.get("tool_calls", ()):
                call["id"] = self._fit(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = self._fit(message["tool_call_id"])

    def _fit(self, call_id: str) -> str:
        if re.fullmatch(self.call_ids, call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[: self.call_id_length]


STANDARD = Dialect()
# Servers on one's own machine refused null (llama-cpp-python does, LM Studio and llama.cpp did), all take an empty text.
# Gateways to Bedrock and Anthropic are the other way round.
_LOCAL = Dialect(takes_null_content=False)
_OPENAI = Dialect(call_ids=r".{1,40}", call_id_length=32)
_DIALECT_BY_HOST = {
    "api.openai.com": _OPENAI,
    "openai.azure.com": _OPENAI,
    "api.mistral.ai": Dialect(takes_stream_options=False, call_ids=r"[a-zA-Z0-9]{9}", call_id_length=9),
    "openrouter.ai": Dialect(takes_reasoning_budget=True, marked_models="anthropic/"),
}


def dialect_of(base_url: str) -> Dialect:
    host = urlsplit(base_url).hostname or ""
    if host == "localhost" or _is_loopback(host):
        return _LOCAL
    found = (dialect for known, dialect in _DIALECT_BY_HOST.items() if host == known or host.endswith(f".{known}"))
    return next(found, STANDARD)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
