"""The wire format of Google's Gemini API, which Vertex AI speaks too.

This file only connects: the request is built in `gemini_request`, events become an answer in `gemini_reply`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from turnmill.protocol.content import ErrorInfo

from . import format as wire
from .base import ProviderRequest
from .body_reader import BodyReader
from .format import Endpoint, HttpCall, is_streaming, json_headers
from .gemini_reply import Reply
from .gemini_request import build_body


class Gemini:
    """The format at one endpoint. Its base URL ends before `/models/`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._base = endpoint.base_url.rstrip("/")

    def build_call(self, request: ProviderRequest) -> HttpCall:
        streaming = is_streaming(request)
        action = "streamGenerateContent?alt=sse" if streaming else "generateContent"
        model = (
            request.model
            if request.model.startswith(("models/", "tunedModels/", "publishers/"))
            else f"models/{request.model}"
        )
        headers = json_headers(streaming=streaming, x_goog_api_key=self.endpoint.api_key)
        body = msgspec.json.encode(build_body(request, self.endpoint.name))
        return HttpCall(url=f"{self._base}/{model}:{action}", headers={**headers, **self.endpoint.headers}, body=body)

    def begin_reply(self, request: ProviderRequest) -> BodyReader:
        return BodyReader(Reply(request, self.endpoint.name))

    def read_refusal(self, status: int, headers: Mapping[str, str], body: bytes, now: float) -> ErrorInfo:
        """The time to wait stands in the body (`RetryInfo`), not in a header."""
        info = wire.read_refusal(status, headers, body, now)
        if info.retry_after_seconds is None and (seconds := _retry_delay(body)) is not None:
            return msgspec.structs.replace(info, retry_after_seconds=seconds)
        return info


def _retry_delay(body: bytes) -> float | None:
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    told = told[0] if isinstance(told, list) and told else told
    error = told.get("error") if isinstance(told, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for detail in details if isinstance(details, list) else ():
        delay = detail.get("retryDelay") if isinstance(detail, dict) else None
        if isinstance(delay, str) and delay.endswith("s"):
            try:
                return float(delay[:-1])
            except ValueError:
                return None
    return None
