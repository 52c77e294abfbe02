"""What a wire format of providers is: pure code between a `ProviderRequest` and bytes, and between bytes and an answer.

A format knows one API. It does no I/O and looks at no clock; `http_provider.HttpProvider` sends what it builds and gives
it the bytes of the answer as they come. So a format can be tried on recorded bytes alone (`decoding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from turnmill.protocol.content import Cost, ErrorInfo, Usage

from .base import Completed, Live, ProviderError, ProviderRequest
from .http_errors import error_info, read_problem_body


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a format's requests go. `name` is the prefix of the models' names (`openai`, or a table of turnmill.toml):
    what a provider wants back unchanged goes back to the endpoint of that name only. `headers` win over the format's."""

    name: str
    base_url: str
    api_key: str | None = None
    headers: dict[str, str] = {}


class HttpCall(msgspec.Struct, frozen=True, kw_only=True):
    """One POST. `headers` hold what the format needs; the client adds what any request has."""

    url: str
    headers: dict[str, str]
    body: bytes


class Reply(Protocol):
    """One answer as far as it was read. Whatever pieces the bytes come in, the events and the end are the same.

    `has_begun` says that an answer had begun before its failure, although watchers were told nothing of it.
    `is_finished` says that the answer is whole, though usage may follow; `is_done` that nothing will follow. `failure`
    is what the provider reported in its bytes: it is set, not raised, so that what came before it is still told.
    """

    @property
    def usage(self) -> Usage | None: ...

    @property
    def cost(self) -> Cost | None: ...

    @property
    def failure(self) -> ProviderError | None: ...

    @property
    def has_begun(self) -> bool: ...

    @property
    def is_finished(self) -> bool: ...

    @property
    def is_done(self) -> bool: ...

    def feed(self, chunk: bytes) -> list[Live]:
        """What the next bytes tell watchers. Raises `ProviderError` for an answer above the limits of size."""
        ...

    def close(self) -> list[Live]:
        """What the end of the body completes."""
        ...

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` (stream_broken) where the body ended before the answer did."""
        ...


class WireFormat(Protocol):
    """One API at one endpoint."""

    @property
    def endpoint(self) -> Endpoint: ...

    def build_call(self, request: ProviderRequest) -> HttpCall:
        """Raises `ProviderError` (bad_request) for what the API cannot carry."""
        ...

    def begin_reply(self, request: ProviderRequest) -> Reply:
        """Reads the body of a response with a status of 2xx, streamed or not."""
        ...

    def read_refusal(self, status: int, headers: Mapping[str, str], body: bytes, now: float) -> ErrorInfo:
        """What a response with any other status says. `now` is Unix time in seconds."""
        ...


def read_refusal(status: int, headers: Mapping[str, str], body: bytes, now: float) -> ErrorInfo:
    """What most APIs say with a status: JSON with an error object, and in headers the time to wait, and sometimes whether
    another attempt makes sense."""
    info = error_info(read_problem_body(body), status, headers, now)
    match headers.get("x-should-retry"):
        case "true":
            return msgspec.structs.replace(info, retryable=True)
        case "false":
            return msgspec.structs.replace(info, retryable=False)
        case _:
            return info


def is_streaming(request: ProviderRequest) -> bool:
    """Whether the answer is to come as a stream: yes, unless the options say `stream: False`, in whatever API."""
    return request.options.get("stream") is not False


def json_headers(*, streaming: bool, accept: str = "text/event-stream", **more: str | None) -> dict[str, str]:
    """The headers of a JSON request; `more` with `_` for `-`, None leaves one out. Compressed answers are not asked for:
    a compressor holds back the tokens that it has."""
    headers = {
        "content-type": "application/json",
        "accept": accept if streaming else "application/json",
        "accept-encoding": "identity",
    }
    headers.update({name.replace("_", "-"): value for name, value in more.items() if value is not None})
    return headers


def without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the fields that are None: an option of None takes a field out of a request."""
    return {name: value for name, value in body.items() if value is not None}
