"""The wire format of Ollama's own /api/chat: lines of JSON, thoughts, calls as objects.

This file only connects: the request is built in `ollama_chat_request`, lines become an answer in `ollama_chat_reply`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from . import format as wire
from .base import ProviderRequest
from .body_reader import LineReader
from .format import Endpoint, HttpCall, is_streaming, json_headers
from .ollama_chat_reply import Reply
from .ollama_chat_request import build_body

_PORT = 11434


class OllamaChat:
    """The format at one endpoint, which may be written as Ollama's own tools take it in OLLAMA_HOST: without a scheme."""

    read_refusal = staticmethod(wire.read_refusal)

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._url = _complete(endpoint.base_url) + "/api/chat"

    def build_call(self, request: ProviderRequest) -> HttpCall:
        key = self.endpoint.api_key
        headers = json_headers(
            streaming=is_streaming(request),
            accept="application/x-ndjson",
            authorization=f"Bearer {key}" if key else None,
        )
        body = msgspec.json.encode(build_body(request, self.endpoint.name))
        return HttpCall(url=self._url, headers={**headers, **self.endpoint.headers}, body=body)

    def begin_reply(self, request: ProviderRequest) -> LineReader:
        return LineReader(Reply(request, self.endpoint.name))


def _complete(host: str) -> str:
    if "://" in host:
        return host.rstrip("/")
    url = f"http://{host.rstrip('/')}"
    return url if urlsplit(url).port else f"{url}:{_PORT}"
