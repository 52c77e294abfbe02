"""Models behind an OpenAI-compatible /chat/completions endpoint.

This file only connects: the request is built in `openai_chat_request`, bytes become events in `sse`, events become an
answer in `openai_chat_reply`, and the connection lives in `http_client`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping

import msgspec

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind, MessageTooLarge

from .base import Live, ProviderError, ProviderRequest, Streamed
from .http_client import BODY_BYTES_MAX, HttpClient, HttpResponse, StreamTimeouts
from .http_errors import error_info, read_problem_body
from .openai_chat_reply import Reply
from .openai_chat_request import build_body
from .sse import SseParser

USAGE_WAIT_SECONDS = 5.0
"""How long usage may take to follow a finished answer."""
DRAIN_SECONDS = 0.1
"""How long the end of the body may take to follow [DONE]; later, the connection is not worth the wait."""
_ERROR_BODY_BYTES_MAX = 64 * 1024


class OpenAIChat:
    """One endpoint. `client` is shared with other providers and closed by whoever made it."""

    is_remote = True

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        client: HttpClient,
        provider_name: str = "openai",
        *,
        headers: Mapping[str, str] | None = None,
        timeouts: StreamTimeouts | None = None,
    ) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._client = client
        self._provider_name = provider_name
        self._timeouts = timeouts
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._headers.update(headers or {})
        self._api_key = api_key

    async def stream(self, request: ProviderRequest) -> AsyncGenerator[Streamed, None]:
        body = msgspec.json.encode(build_body(request, self._provider_name))
        reply = Reply(request, self._provider_name)
        async with self._client.post(self._url, self._headers, body, self._timeouts) as response:
            if not response.is_success:
                raise self._masked(await _read_refusal(response))
            reader, told = BodyReader(reply), reply.usage
            while not reply.is_done:
                chunk = await _read(response, reply)
                live = reader.feed(chunk) if chunk else reader.close()
                if live:
                    response.note_progress()
                for event in live:
                    yield event
                if reply.usage is not told and not (reply.is_finished and reply.failure is None):
                    # Most tell it once the answer is whole, but a call may end before that.
                    told = reply.usage
                    for known in (reply.usage, reply.cost):
                        if known is not None:
                            yield known
                if reply.failure is not None:
                    raise self._masked(reply.failure)
                if not chunk:
                    break
                if reply.is_finished:
                    response.expect_end_within(USAGE_WAIT_SECONDS)
            yield reply.completed()
            await response.drain(DRAIN_SECONDS)

    def _masked(self, error: ProviderError) -> ProviderError:
        """The error without the key, which some servers repeat: errors are shown and stored."""
        if not self._api_key or self._api_key not in error.info.message:
            return error
        text = error.info.message.replace(self._api_key, "***")
        return ProviderError(msgspec.structs.replace(error.info, message=text), error.usage)

    async def close(self) -> None:
        """Nothing of its own is open: the client belongs to whoever made it."""


class BodyReader:
    """Bytes of a body to live events, into a reply. The first byte tells a JSON body from a stream of events, as the
    content type is not to be trusted: no line of an event stream that we could use begins with `{` or `[`."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._parser = SseParser()
        self._json: bytearray | None = None
        self._began = False

    def feed(self, chunk: bytes) -> list[Live]:
        if not self._began:
            chunk = self._begin(chunk)
        if self._json is None:
            return self._take_events(chunk)
        self._json += chunk
        if len(self._json) > BODY_BYTES_MAX:
            raise _too_large(f"the answer is above the limit of {BODY_BYTES_MAX} bytes")
        return []

    def close(self) -> list[Live]:
        """What the end of the body completes."""
        if self._json is not None:
            return self._reply.take_whole(bytes(self._json))
        return self._take_events(None)

    def _begin(self, chunk: bytes) -> bytes:
        """White space before the first byte means nothing in either form."""
        chunk = chunk.lstrip()
        self._began = bool(chunk)
        if chunk[:1] in (b"{", b"["):
            self._json = bytearray()
        return chunk

    def _take_events(self, chunk: bytes | None) -> list[Live]:
        try:
            events = self._parser.close() if chunk is None else self._parser.feed(chunk)
        except MessageTooLarge as error:
            raise _too_large(str(error)) from error
        live: list[Live] = []
        for event in events:
            live += self._reply.take(event)
            if self._reply.is_done or self._reply.failure is not None:
                break
        return live


async def _read(response: HttpResponse, reply: Reply) -> bytes:
    """The next bytes. A connection that breaks or stalls after the answer was whole has only lost what may follow."""
    try:
        return await response.read()
    except ProviderError:
        if reply.is_finished:
            return b""
        raise


async def _read_refusal(response: HttpResponse) -> ProviderError:
    body = await response.read_all(_ERROR_BODY_BYTES_MAX)
    return ProviderError(error_info(read_problem_body(body), response.status, response.headers, time.time()))


def _too_large(message: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.MESSAGE_TOO_LARGE, message=message))
