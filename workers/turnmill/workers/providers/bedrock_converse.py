"""The wire format of Bedrock's Converse API: frames of Amazon's event stream, requests that are signed.

This file connects, and takes the frames apart with botocore, which comes with the extra `bedrock`: the request is built in
`bedrock_converse_request`, frames become an answer in `bedrock_converse_reply`, signatures are made in `bedrock_signer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from turnmill.protocol.content import Cost, ErrorInfo, Usage
from turnmill.protocol.errors import ConfigurationError

from . import format as wire
from .answer import broken
from .base import Completed, Live, ProviderError, ProviderRequest
from .bedrock_converse_reply import Answered, Frame
from .bedrock_converse_request import build_body
from .format import Endpoint, HttpCall, is_streaming, json_headers


class BedrockConverse:
    """The format at one endpoint. With an API key the request bears that, else it is to be signed."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._base = endpoint.base_url.rstrip("/")

    def build_call(self, request: ProviderRequest) -> HttpCall:
        key, streaming = self.endpoint.api_key, is_streaming(request)
        headers = json_headers(
            streaming=streaming,
            accept="application/vnd.amazon.eventstream",
            authorization=f"Bearer {key}" if key else None,
        )
        action = "converse-stream" if streaming else "converse"
        url = f"{self._base}/model/{quote(request.model, safe='')}/{action}"
        body = msgspec.json.encode(build_body(request, self.endpoint.name))
        return HttpCall(url=url, headers={**headers, **self.endpoint.headers}, body=body)

    def begin_reply(self, request: ProviderRequest) -> Reply:
        return Reply(Answered(request, self.endpoint.name))

    def read_refusal(self, status: int, headers: Mapping[str, str], body: bytes, now: float) -> ErrorInfo:
        """The kind of an error stands in a header; throttling comes with other statuses than 429, too."""
        kind = headers.get("x-amzn-errortype", "").partition(":")[0]
        info = wire.read_refusal(status, headers, body, now)
        if kind in ("ThrottlingException", "ServiceQuotaExceededException"):
            return msgspec.structs.replace(info, kind="rate_limited", retryable=True)
        if kind in ("ModelNotReadyException", "ServiceUnavailableException"):
            return msgspec.structs.replace(info, kind="overloaded", retryable=True)
        return info


class Reply:
    """Bytes of a body as frames, or as one JSON body, to an answer. A frame begins with its length, so the first byte of a
    stream is never a brace."""

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._buffer: Any = None
        self._json: bytearray | None = None

    @property
    def usage(self) -> Usage | None:
        return self._answered.usage

    @property
    def cost(self) -> Cost | None:
        return self._answered.cost

    @property
    def failure(self) -> ProviderError | None:
        return self._answered.failure

    @property
    def has_begun(self) -> bool:
        return self._answered.has_begun

    @property
    def is_finished(self) -> bool:
        return self._answered.is_finished

    @property
    def is_done(self) -> bool:
        return self._answered.is_done

    def feed(self, chunk: bytes) -> list[Live]:
        if self._buffer is None and self._json is None:
            if chunk.lstrip()[:1] == b"{":
                self._json = bytearray()
            else:
                self._buffer = _new_buffer()
        if self._json is not None:
            self._json += chunk
            return []
        self._buffer.add_data(chunk)
        return self._take_frames()

    def close(self) -> list[Live]:
        """What the end of the body completes: a frame that is cut off tells nothing."""
        return self._answered.take_whole(bytes(self._json)) if self._json is not None else []

    def completed(self) -> Completed:
        return self._answered.completed()

    def _take_frames(self) -> list[Live]:
        from botocore.eventstream import ParserError

        live: list[Live] = []
        try:
            for message in self._buffer:
                headers = message.headers
                kind = str(
                    headers.get(":event-type") or headers.get(":exception-type") or headers.get(":error-code") or ""
                )
                is_failure = headers.get(":message-type") in ("exception", "error")
                told = str(headers.get(":error-message") or "")
                live += self._answered.take(Frame(kind, is_failure, message.payload, told))
                if self.is_done or self.failure is not None:
                    break
        except ParserError as error:
            self._answered.failure = self._answered.failure or broken(f"a frame is damaged: {error}")
        return live


def _new_buffer() -> Any:
    try:
        from botocore.eventstream import EventStreamBuffer
    except ImportError as error:
        raise ConfigurationError(f"Bedrock needs `pip install turnmill[bedrock]`: {error}") from error
    return EventStreamBuffer()
