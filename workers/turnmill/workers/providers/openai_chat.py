"""The wire format of OpenAI's /chat/completions, which most providers and servers of models speak.

This file only connects: the request is built in `openai_chat_request`, bytes become events in `sse`, events become an
answer in `openai_chat_reply`.
"""

from __future__ import annotations

import msgspec

from . import format as wire
from .base import ProviderRequest
from .body_reader import BodyReader
from .format import Endpoint, HttpCall, is_streaming, json_headers
from .openai_chat_dialects import dialect_of
from .openai_chat_reply import Reply
from .openai_chat_request import build_body


class OpenAIChat:
    """The format at one endpoint."""

    read_refusal = staticmethod(wire.read_refusal)

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._dialect = dialect_of(endpoint.base_url)
        self._url = endpoint.base_url.rstrip("/") + "/chat/completions"

    def build_call(self, request: ProviderRequest) -> HttpCall:
        key = self.endpoint.api_key
        headers = json_headers(streaming=is_streaming(request), authorization=f"Bearer {key}" if key else None)
        body = msgspec.json.encode(build_body(request, self.endpoint.name, self._dialect))
        return HttpCall(url=self._url, headers={**headers, **self.endpoint.headers}, body=body)

    def begin_reply(self, request: ProviderRequest) -> BodyReader:
        return BodyReader(Reply(request, self.endpoint.name))
