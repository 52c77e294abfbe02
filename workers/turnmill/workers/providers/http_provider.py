"""The one class that speaks to providers over HTTP, whatever their wire format.

A format (`format.WireFormat`) builds the request and understands the answer; here the connection is opened, read, told of
progress and closed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from .base import ProviderError, ProviderRequest, Streamed
from .format import HttpCall, Reply, WireFormat
from .http_client import HttpClient, HttpResponse, StreamTimeouts

USAGE_WAIT_SECONDS = 5.0
"""How long usage may take to follow a finished answer."""
DRAIN_SECONDS = 0.1
"""How long the end of the body may take to follow the last event; later, the connection is not worth the wait."""
_ERROR_BODY_BYTES_MAX = 64 * 1024
_SECRET_LENGTH_MIN = 8
"""Shorter keys are words such as `none`, for servers that look at none."""


class Signer(Protocol):
    """Adds what only the moment of sending knows: a signature over the request, a token that is renewed now and then."""

    async def sign(self, call: HttpCall) -> HttpCall:
        """Raises `ProviderError` (authentication) where there are no credentials."""
        ...


class HttpProvider:
    """One format at one endpoint. `client` is shared with other providers and closed by whoever made it."""

    is_remote = True

    def __init__(
        self,
        wire_format: WireFormat,
        client: HttpClient,
        *,
        timeouts: StreamTimeouts | None = None,
        signer: Signer | None = None,
    ) -> None:
        self._format = wire_format
        self._client = client
        self._timeouts = timeouts
        self._signer = signer

    async def stream(self, request: ProviderRequest) -> AsyncGenerator[Streamed, None]:
        call = self._format.build_call(request)
        if self._signer is not None:
            call = await self._signer.sign(call)
        reply = self._format.begin_reply(request)
        async with self._client.post(call.url, call.headers, call.body, self._timeouts) as response:
            if not response.is_success:
                raise await self._read_refusal(response)
            told = reply.usage
            while not reply.is_done:
                chunk = await _read(response, reply)
                live = reply.feed(chunk) if chunk else reply.close()
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

    async def close(self) -> None:
        """Nothing of its own is open: the client belongs to whoever made it."""

    async def _read_refusal(self, response: HttpResponse) -> ProviderError:
        body = await response.read_all(_ERROR_BODY_BYTES_MAX)
        info = self._format.read_refusal(response.status, response.headers, body, time.time())
        return self._masked(ProviderError(info))

    def _masked(self, error: ProviderError) -> ProviderError:
        """The error without the key, which some servers repeat: errors are shown and stored."""
        key = self._format.endpoint.api_key
        if not key or len(key) < _SECRET_LENGTH_MIN or key not in error.info.message:
            return error
        text = error.info.message.replace(key, "***")
        return ProviderError(msgspec.structs.replace(error.info, message=text), error.usage)


async def _read(response: HttpResponse, reply: Reply) -> bytes:
    """The next bytes. A connection that breaks or stalls after the answer was whole has only lost what may follow."""
    try:
        return await response.read()
    except ProviderError:
        if reply.is_finished:
            return b""
        raise
