"""One connection to the engine (Redis or Valkey): commands of one tick leave in one write, nothing is ever sent twice.

redis-py does what it is good at: URLs, TLS, authentication, the handshake (`Dialer`). After that a `Link` takes over the
transport. redis-py's own retries execute an XADD or a script again after a lost reply, so they are off, and a lost
connection is said as what it is: `EngineUnavailable`, outcome unknown.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit, urlunsplit

import hiredis
import redis.asyncio.connection as redis_connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from .errors import ConfigurationError, EngineReplyError, EngineUnavailable

Argument: TypeAlias = str | bytes | int | float
pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # typed as a 1-tuple
_CONNECT_TIMEOUT_SECONDS = 5.0


class Link(asyncio.Protocol):
    """One connection. `call` returns a future of the reply; an error reply is raised as `EngineReplyError`."""

    def __init__(self, owner: Any, response_timeout_seconds: float) -> None:
        self._owner = owner  # redis-py's connection: it owns the socket's StreamWriter, which closes when collected
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=EngineReplyError, notEnoughData=...)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._buffer: list[bytes] = []
        self._timeout_seconds = response_timeout_seconds
        self._progress_at = self._loop.time()
        self._transport: Any = None
        self._watchdog: asyncio.TimerHandle | None = None
        self.closed = self._loop.create_future()

    def attach(self, transport: Any) -> None:
        self._transport = transport
        transport.set_protocol(self)
        self._watch()

    @property
    def is_open(self) -> bool:
        return not self.closed.done() and not self._transport.is_closing()

    def call(self, *arguments: Argument) -> asyncio.Future[Any]:
        """Send a command; awaiting the future gives its reply."""
        future = self._loop.create_future()
        if not self.is_open:
            future.set_exception(EngineUnavailable("the connection to the engine is closed"))
            future.exception()  # seen: not every caller awaits
            return future
        packed = pack(arguments)  # what cannot be packed must not wait for a reply
        if not self._waiting:
            self._progress_at = self._loop.time()
        self._waiting.append(future)
        if not self._buffer:
            self._loop.call_soon(self._flush)
        self._buffer.append(packed)
        return future

    def close(self) -> None:
        """Close at once; what waits for a reply is told that its outcome is unknown."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._progress_at = self._loop.time()
        reader = self._reader
        reader.feed(data)
        while (reply := reader.gets()) is not ...:
            self._deliver(reply)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        reason = EngineUnavailable(f"the connection to the engine was lost ({error or 'closed'}); outcome unknown")
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(reason)
                future.exception()  # seen: a caller that went away is no unhandled error
        self._owner._writer = self._owner._reader = None
        if not self.closed.done():
            self.closed.set_result(None)

    def _deliver(self, reply: Any) -> None:
        future = self._waiting.popleft()
        if future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
            future.exception()  # seen: the first commands of a transaction are not awaited, its EXEC is
            if str(reply).startswith("READONLY"):
                self.close()  # a replica by now: a new connection finds whoever is the primary
        else:
            future.set_result(reply)

    def _flush(self) -> None:
        if self._buffer and self.is_open:
            self._transport.write(b"".join(self._buffer))
        self._buffer.clear()

    def _watch(self) -> None:
        """A peer that has gone silent (a black hole) is found here: replies are due, and nothing comes."""
        if self._waiting and self._loop.time() - self._progress_at > self._timeout_seconds:
            self.close()
            return
        self._watchdog = self._loop.call_later(self._timeout_seconds / 4, self._watch)


class SubscriberLink(Link):
    """A connection in subscriber mode: confirmations and messages go to `on_push`, in order; refusals to `on_error`."""

    def __init__(
        self,
        owner: Any,
        response_timeout_seconds: float,
        on_push: Callable[[list[Any]], None],
        on_error: Callable[[EngineReplyError], None] | None = None,
    ) -> None:
        super().__init__(owner, response_timeout_seconds)
        self._on_push = on_push
        self._on_error = on_error

    def send(self, *arguments: Argument) -> None:
        """Send a command whose answer comes to `on_push`."""
        if not self.is_open:
            return
        if not self._buffer:
            self._loop.call_soon(self._flush)
        self._buffer.append(pack(arguments))

    @property
    def silent_seconds(self) -> float:
        return self._loop.time() - self._progress_at

    def _deliver(self, reply: Any) -> None:
        if isinstance(reply, list):
            self._on_push(reply)
        elif isinstance(reply, EngineReplyError) and self._on_error is not None:
            self._on_error(reply)
        elif isinstance(reply, EngineReplyError):
            self.close()  # a subscription that was refused (loading, busy) is asked for again on a new connection


class Dialer:
    """Opens connections to one address."""

    def __init__(self, url: str, client_name: str | None) -> None:
        self.url = url
        try:
            self._pool = redis_connection.ConnectionPool.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=_CONNECT_TIMEOUT_SECONDS,
                client_name=client_name,
            )
        except ValueError as error:
            raise ConfigurationError(f"TURNMILL_REDIS_URL is no Redis URL: {error}") from error

    @property
    def address(self) -> str:
        """The URL without its password."""
        scheme, separator, rest = self.url.partition("://")
        return scheme + separator + rest.rpartition("@")[2]

    async def open(self) -> tuple[Any, Any]:
        """redis-py's connection behind its handshake, and its transport. Raises `EngineUnavailable` where nobody answers."""
        try:
            owner = cast("Any", self._pool).make_connection()
        except TypeError as error:
            raise ConfigurationError(
                f"TURNMILL_REDIS_URL has a parameter that redis-py does not know: {error}"
            ) from error
        try:
            # Not wait_for: on Python 3.11 it may swallow a cancellation that comes as the connection is made.
            async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
                await owner.connect()
        except (RedisError, OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_CONNECT_TIMEOUT_SECONDS:g} s"
            if "closed by server" in reason and self.url.startswith("redis://"):
                reason += " Where it speaks TLS, the URL begins with rediss://"
            raise EngineUnavailable(
                f"cannot reach Redis or Valkey at {self.address}: {reason} "
                "(set TURNMILL_REDIS_URL, or leave it unset for the embedded server)"
            ) from error
        writer = owner._writer
        assert writer is not None
        return owner, writer.transport


def split_urls(urls: str) -> list[str]:
    """`TURNMILL_REDIS_URL` may name several nodes of a cluster: URLs with a comma between them."""
    return re.split(r",\s*(?=[a-z]+://)", urls.strip())


def url_at(url: str, host: str, port: int) -> str:
    """The same URL, with its user, password and options, for another node."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigurationError(
            f"TURNMILL_REDIS_URL names a node of a cluster by {parts.scheme}://: a cluster is reached by redis:// or rediss://"
        )
    user = parts.netloc.rpartition("@")[0]
    name = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{user}@{name}:{port}" if user else f"{name}:{port}"))
