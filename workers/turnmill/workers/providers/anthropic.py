"""The wire format of Anthropic's Messages API, which relays and local servers speak too.

This file only connects: the request is built in `anthropic_request` and its neighbours, events become an answer in
`anthropic_reply`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from . import format as wire
from .anthropic_reply import Reply
from .anthropic_request import build_body
from .base import ProviderRequest
from .body_reader import BodyReader
from .format import Endpoint, HttpCall, is_streaming, json_headers

VERSION = "2023-06-01"


class AnthropicMessages:
    """The format at one endpoint. Its base URL may end with `/v1` or without it."""

    read_refusal = staticmethod(wire.read_refusal)

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._url = endpoint.base_url.rstrip("/").removesuffix("/v1") + "/v1/messages"

    def build_call(self, request: ProviderRequest) -> HttpCall:
        headers = json_headers(
            streaming=is_streaming(request),
            anthropic_version=VERSION,
            x_api_key=self.endpoint.api_key,
            anthropic_beta=_betas(request.options.get("betas")),
        )
        body = msgspec.json.encode(build_body(request, self.endpoint.name))
        return HttpCall(url=self._url, headers={**headers, **self.endpoint.headers}, body=body)

    def begin_reply(self, request: ProviderRequest) -> BodyReader:
        return BodyReader(Reply(request, self.endpoint.name))


def _betas(value: Any) -> str | None:
    """The option `betas` of the official SDK is a header."""
    return ",".join(str(beta) for beta in value) if isinstance(value, list) and value else None
