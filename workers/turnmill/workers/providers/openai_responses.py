"""The wire format of OpenAI's /responses, which Azure, xAI, DeepSeek, OpenRouter and local servers speak too.

This file only connects: the request is built in `openai_responses_request`, events become an answer in
`openai_responses_reply`.
"""

from __future__ import annotations

import msgspec

from . import format as wire
from .base import ProviderRequest
from .body_reader import BodyReader
from .format import Endpoint, HttpCall, is_streaming, json_headers
from .openai_responses_reply import Reply
from .openai_responses_request import build_body


class OpenAIResponses:
    """The format at one endpoint."""

    read_refusal = staticmethod(wire.read_refusal)

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._url = endpoint.base_url.rstrip("/") + "/responses"

    def build_call(self, request: ProviderRequest) -> HttpCall:
        key = self.endpoint.api_key
        headers = json_headers(streaming=is_streaming(request), authorization=f"Bearer {key}" if key else None)
        body = msgspec.json.encode(build_body(request, self.endpoint.name))
        return HttpCall(url=self._url, headers={**headers, **self.endpoint.headers}, body=body)

    def begin_reply(self, request: ProviderRequest) -> BodyReader:
        return BodyReader(Reply(request, self.endpoint.name))
