"""The only module that knows the HTTP stack: httpx's interface on aiohttp's connections.

Plain httpx falls behind at some hundreds of live streams in one process; httpx on `AiohttpTransport` does not.

Three limits apply to every answer, and they are ours, because a read timeout of the HTTP stack restarts with every
byte and a server may send keep-alive comments for ever: `first_token_seconds` until the model said something,
`idle_seconds` between two things it says, `total_seconds` for all of it. The reader of the bytes tells with
`note_progress` that there was more than noise.

A pooled connection may have been closed by the server just before it is used again. Such a request never reached the
server; it is sent once more, on another connection.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind

from .base import ProviderError
from .http_errors import shorten

BODY_BYTES_MAX = 8 * 1024 * 1024


class StreamTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long an answer may take: until its first token, between two tokens, and in total."""

    first_token_seconds: float = 300.0
    idle_seconds: float = 120.0
    total_seconds: float = 1800.0


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the connections. `connections_per_host_max` 0 leaves the total as the only limit."""

    connections_max: int = 1000
    connections_per_host_max: int = 0
    keepalive_seconds: float = 15.0
    connect_timeout_seconds: float = 10.0
    timeouts: StreamTimeouts = StreamTimeouts()


class HttpClient:
    """A pool of connections to providers, shared by all of them. Whoever made it closes it."""

    def __init__(self, settings: HttpSettings | None = None) -> None:
        self._settings = settings or HttpSettings()
        self._ssl_context = httpx.create_ssl_context()
        self._client_by_proxy: dict[str | None, httpx.AsyncClient] = {}
        self._proxy_by_origin: dict[tuple[str, str], str | None] = {}

    @asynccontextmanager
    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, timeouts: StreamTimeouts | None = None
    ) -> AsyncIterator[HttpResponse]:
        """Sends `body` and gives the response as it begins, whatever its status. Leaving closes the connection, unless
        the response was read to its end. Raises `ProviderError` where there is no response."""
        clock = _Clock(timeouts or self._settings.timeouts)
        response = await self._send(url, headers, body, clock)
        chunks = cast("AsyncGenerator[bytes, None]", response.aiter_bytes())
        watchdog = _Watchdog(clock)
        try:
            yield HttpResponse(response, chunks, clock, watchdog)
        finally:
            watchdog.stop()
            await response.aclose()
            await chunks.aclose()

    async def close(self) -> None:
        """Closes all connections; answers under way break."""
        clients = list(self._client_by_proxy.values())
        self._client_by_proxy.clear()
        for client in clients:
            await client.aclose()

    async def _send(self, url: str, headers: Mapping[str, str], body: bytes, clock: _Clock) -> httpx.Response:
        client = self._client_for(url)
        try:
            async with asyncio.timeout_at(clock.deadline):
                return await _send_again_if_stale(
                    client, client.build_request("POST", url, headers=headers, content=body)
                )
        except TimeoutError:
            raise clock.timed_out() from None
        except (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, OSError) as error:
            raise _no_response(url, error) from error

    def _client_for(self, url: str) -> httpx.AsyncClient:
        parts = urlsplit(url)
        origin = (parts.scheme, parts.hostname or "")
        if origin not in self._proxy_by_origin:
            self._proxy_by_origin[origin] = _proxy_of_environment(*origin)
        proxy = self._proxy_by_origin[origin]
        if proxy not in self._client_by_proxy:
            self._client_by_proxy[proxy] = self._open_client(proxy)
        return self._client_by_proxy[proxy]

    def _open_client(self, proxy: str | None) -> httpx.AsyncClient:
        transport = AiohttpTransport(
            verify=self._ssl_context, proxy=httpx.Proxy(proxy) if proxy else None, client=self._open_session
        )
        timeout = httpx.Timeout(None, connect=self._settings.connect_timeout_seconds)
        return httpx.AsyncClient(transport=transport, timeout=timeout, headers={"user-agent": "turnmill"})

    def _open_session(self) -> aiohttp.ClientSession:
        """Called by the transport inside the running loop. The environment is read by us: aiohttp would also look for
        credentials in `.netrc`, in a thread, for every request."""
        connector = aiohttp.TCPConnector(
            limit=self._settings.connections_max,
            limit_per_host=self._settings.connections_per_host_max,
            keepalive_timeout=self._settings.keepalive_seconds,
            ssl=self._ssl_context,
        )
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[_trace_of_reuse()]
        )


class HttpResponse:
    """A response whose body is read piece by piece, within its limits of time."""

    def __init__(
        self, response: httpx.Response, chunks: AsyncGenerator[bytes, None], clock: _Clock, watchdog: _Watchdog
    ) -> None:
        self._response = response
        self._chunks = chunks
        self._clock = clock
        self._watchdog = watchdog
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    async def read(self) -> bytes:
        """The next bytes as the network gives them; none at the end. Raises `ProviderError`: timeout, stream_broken."""
        try:
            with self._watchdog:
                return await anext(self._chunks, b"")
        except TimeoutError:
            raise self._clock.timed_out() from None
        except (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError) as error:
            message = f"the connection broke while the answer was read: {_describe(error)}"
            raise ProviderError(ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message=message, retryable=True)) from error

    async def read_all(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """The rest of the body, cut off at `bytes_max`."""
        body = bytearray()
        while len(body) < bytes_max and (chunk := await self.read()):
            body += chunk
        return bytes(body[:bytes_max])

    def note_progress(self) -> None:
        """The model said something: from now on the idle limit applies, anew each time."""
        self._clock.note_progress()
        self._watchdog.follow()

    def expect_end_within(self, seconds: float) -> None:
        """The answer is complete but for what may follow it; do not wait longer than this."""
        self._clock.expect_end_within(seconds)
        self._watchdog.follow()

    async def drain(self, seconds: float) -> None:
        """Reads a body that should be at its end, so that its connection can be used again."""
        self.expect_end_within(seconds)
        try:
            while await self.read():
                pass
        except ProviderError:
            pass  # the connection is closed instead of kept, nothing else is lost


class _Clock:
    """The deadlines of one answer, in the loop's time."""

    def __init__(self, timeouts: StreamTimeouts) -> None:
        self._timeouts = timeouts
        self._now = asyncio.get_running_loop().time
        started_at = self._now()
        self._total_deadline = started_at + timeouts.total_seconds
        self._began = False
        self.deadline = min(started_at + timeouts.first_token_seconds, self._total_deadline)

    def note_progress(self) -> None:
        self._began = True
        self.deadline = min(self._now() + self._timeouts.idle_seconds, self._total_deadline)

    def expect_end_within(self, seconds: float) -> None:
        self._total_deadline = min(self._now() + seconds, self._total_deadline)
        self.deadline = min(self.deadline, self._total_deadline)

    def timed_out(self) -> ProviderError:
        """The error that names the limit which was hit, so that the reader knows what to raise."""
        if self.deadline == self._total_deadline:
            message = f"the answer was not complete within {self._timeouts.total_seconds:g} s (total_seconds)"
        elif self._began:
            message = f"the model said nothing for {self._timeouts.idle_seconds:g} s (idle_seconds)"
        else:
            message = f"the model did not begin within {self._timeouts.first_token_seconds:g} s (first_token_seconds)"
        return ProviderError(ErrorInfo(kind=ErrorKind.TIMEOUT, message=message, retryable=True))


class _Watchdog:
    """Interrupts a read at the clock's deadline, with one timer for the whole answer.

    Deadlines nearly always move away, so the timer looks at the clock when it fires and sets itself again: a timeout for
    each read would cost as much as the read.
    """

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[object] | None = None
        self._expired = False
        self._timer = self._loop.call_at(clock.deadline, self._look)

    def __enter__(self) -> None:
        if self._expired:
            raise TimeoutError
        self._reader = asyncio.current_task()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        reader, self._reader = self._reader, None
        interrupted = self._expired and isinstance(error, asyncio.CancelledError)
        # Ours alone, or did somebody else cancel the task as well?
        if interrupted and reader is not None and reader.uncancel() == 0:
            raise TimeoutError from error

    def follow(self) -> None:
        """The clock's deadline has changed. One that moved away is found when the timer fires."""
        if self._clock.deadline < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self._clock.deadline, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() < self._clock.deadline:
            self._timer = self._loop.call_at(self._clock.deadline, self._look)
            return
        self._expired = True
        if self._reader is not None:
            self._reader.cancel()


@dataclass
class _Attempt:
    """Filled in by the trace: whether the connection of this request had served another one before."""

    reused_connection: bool = False


_ATTEMPT: ContextVar[_Attempt] = ContextVar("turnmill_http_attempt")


async def _send_again_if_stale(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    attempt = _Attempt()
    token = _ATTEMPT.set(attempt)
    try:
        return await client.send(request, stream=True)
    except httpx.TransportError as error:
        if not (attempt.reused_connection and _is_stale(error)):
            raise
    finally:
        _ATTEMPT.reset(token)
    return await client.send(request, stream=True)


def _is_stale(error: httpx.TransportError) -> bool:
    """Whether the connection went before any byte of a response. A disconnect in the middle of the head carries what
    was read of it instead of a text."""
    match error.__cause__:
        case aiohttp.ServerDisconnectedError() as cause:
            return isinstance(cause.message, str)
        case aiohttp.ClientOSError() as cause:
            return not isinstance(cause, aiohttp.ClientConnectorError)
        case _:
            return False


def _trace_of_reuse() -> aiohttp.TraceConfig:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return trace


async def _note_reuse(_session: Any, _context: Any, _parameters: Any) -> None:
    attempt = _ATTEMPT.get(None)
    if attempt is not None:
        attempt.reused_connection = True


def _proxy_of_environment(scheme: str, host: str) -> str | None:
    """The proxy that `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` name for an origin."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _no_response(url: str, error: Exception) -> ProviderError:
    """The kind comes from the cause, as the transport calls every lost connection a timeout. The message names the host
    only: a URL may carry a key."""
    kind = ErrorKind.TIMEOUT if isinstance(error.__cause__, TimeoutError) else ErrorKind.PROVIDER_ERROR
    message = f"no response from {urlsplit(url).hostname}: {_describe(error)}"
    retryable = not isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol)
    return ProviderError(ErrorInfo(kind=kind, message=message, retryable=retryable))


def _describe(error: Exception) -> str:
    cause = error.__cause__ or error
    return shorten(f"{type(cause).__name__}: {cause}", 200)
