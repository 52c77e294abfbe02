"""Connections to the engine (Redis or Valkey), as the hot path needs them.

redis-py does what it is good at: URLs, TLS, authentication, the handshake. After that a `Link` takes over the transport:
commands issued in one tick of the loop leave in one write, replies resolve futures in order, nothing is ever sent a
second time. redis-py's own retries execute an XADD or a script again after a lost reply, so they are off, and a lost
connection is said as what it is: `EngineUnavailable`, outcome unknown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import hiredis
import redis.asyncio.connection as redis_connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from .errors import ConfigurationError, EngineReplyError, EngineUnavailable

Argument: TypeAlias = str | bytes | int | float
_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # typed as a 1-tuple
_CONNECT_TIMEOUT_SECONDS = 5.0
_RECONNECT_DELAY_SECONDS = (0.05, 1.0)


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
        packed = _pack(arguments)  # what cannot be packed must not wait for a reply
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
    """A connection in subscriber mode: confirmations and messages go to `on_push`, in order."""

    def __init__(self, owner: Any, response_timeout_seconds: float, on_push: Callable[[list[Any]], None]) -> None:
        super().__init__(owner, response_timeout_seconds)
        self._on_push = on_push

    def send(self, *arguments: Argument) -> None:
        """Send a command whose answer comes to `on_push`."""
        if not self.is_open:
            return
        if not self._buffer:
            self._loop.call_soon(self._flush)
        self._buffer.append(_pack(arguments))

    @property
    def silent_seconds(self) -> float:
        return self._loop.time() - self._progress_at

    def _deliver(self, reply: Any) -> None:
        if isinstance(reply, list):
            self._on_push(reply)


class Engine:
    """The engine as a process sees it: one shared link that comes back after a loss, and further links on request."""

    def __init__(self, url: str, *, response_timeout_seconds: float = 10.0, client_name: str | None = None) -> None:
        self.url = url
        self._timeout_seconds = response_timeout_seconds
        self._pool = _pool(url, client_name)
        self._shared: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._closing = False

    async def connect(self) -> Engine:
        """Connect the shared link. Raises `EngineUnavailable` with the address where nobody answers."""
        self._adopt(await self.open_link())
        return self

    async def open_link(self) -> Link:
        """A new connection of the caller's own, for blocking reads."""
        owner, transport = await self._open_transport()
        link = Link(owner, self._timeout_seconds)
        link.attach(transport)
        return link

    async def open_subscriber(self, on_push: Callable[[list[Any]], None]) -> SubscriberLink:
        owner, transport = await self._open_transport()
        link = SubscriberLink(owner, self._timeout_seconds, on_push)
        link.attach(transport)
        return link

    def call(self, *arguments: Argument) -> asyncio.Future[Any]:
        """A command on the shared link. While it is down the future fails with `EngineUnavailable`."""
        if self._shared is None:
            raise EngineUnavailable(f"not connected to the engine at {self.address}")
        return self._shared.call(*arguments)

    async def ready(self) -> None:
        """Return when the shared link is up (again). Raises `EngineUnavailable` once this engine was closed."""
        if self._closing:
            raise EngineUnavailable(f"this connection to the engine at {self.address} was closed")
        if self._shared is not None and not self._shared.is_open:
            self._lost()
        await self._connected.wait()
        if self._closing:
            raise EngineUnavailable(f"this connection to the engine at {self.address} was closed")

    async def close(self) -> None:
        self._closing = True
        self._connected.set()  # whoever waits for it is told
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._shared is not None:
            self._shared.close()
            await self._shared.closed

    @property
    def address(self) -> str:
        """Where the engine is, without its password."""
        scheme, separator, rest = self.url.partition("://")
        return scheme + separator + rest.rpartition("@")[2]

    async def _open_transport(self) -> tuple[Any, Any]:
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
            raise EngineUnavailable(
                f"cannot reach Redis or Valkey at {self.address}: {str(error) or f'no answer within {_CONNECT_TIMEOUT_SECONDS:g} s'} "
                "(set TURNMILL_REDIS_URL, or leave it unset for the embedded server)"
            ) from error
        writer = owner._writer
        assert writer is not None
        return owner, writer.transport

    def _adopt(self, link: Link) -> None:
        self._shared = link
        self._connected.set()
        link.closed.add_done_callback(lambda _: self._lost() if link is self._shared else None)

    def _lost(self) -> None:
        self._connected.clear()
        if not self._closing and (self._connecting is None or self._connecting.done()):
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        delay, delay_max = _RECONNECT_DELAY_SECONDS
        while not self._closing:
            try:
                self._adopt(await self.open_link())
                return
            except EngineUnavailable:
                await asyncio.sleep(delay)
                delay = min(delay * 2, delay_max)


def _pool(url: str, client_name: str | None) -> redis_connection.ConnectionPool:
    try:
        return redis_connection.ConnectionPool.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=_CONNECT_TIMEOUT_SECONDS,
            client_name=client_name,
        )
    except ValueError as error:
        raise ConfigurationError(f"TURNMILL_REDIS_URL is no Redis URL: {error}") from error


def pairs(reply: list[Any]) -> dict[bytes, Any]:
    """A flat list of names and values (HGETALL, XINFO, an entry's fields) as a dict."""
    iterator = iter(reply)
    return cast("dict[bytes, Any]", dict(zip(iterator, iterator, strict=True)))
