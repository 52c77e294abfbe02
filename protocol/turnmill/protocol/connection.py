"""The engine (Redis or Valkey) as a process sees it: a shared connection that comes back, and further ones on request.

Callers know this interface and nothing else: `call`, `transact`, `call_each`, `node_of`, `doubt`, `open_link`,
`open_subscriber`, `ready`, `close`, `address`, `is_cluster`. `Engine(url).connect()` looks at the server and gives this class for a single
(or replicated) one, `cluster.ClusterEngine` for a node of a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from .errors import ConfigurationError, EngineReplyError, EngineUnavailable
from .link import Argument, Dialer, Link, SubscriberLink, split_urls

__all__ = ["Argument", "Engine", "Link", "SubscriberLink", "pairs"]
_RECONNECT_DELAY_SECONDS = (0.05, 1.0)


class Engine:
    """A single engine."""

    is_cluster = False

    def __init__(self, url: str, *, response_timeout_seconds: float = 10.0, client_name: str | None = None) -> None:
        self.url = url
        self._timeout_seconds = response_timeout_seconds
        self._client_name = client_name
        self._dialers = [Dialer(each, client_name) for each in split_urls(url)]
        self._shared: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._closing = False

    async def connect(self) -> Engine:
        """The engine to work with: this one, or the cluster that the server belongs to. Raises `EngineUnavailable` with
        the address where nobody answers."""
        link = await self.open_link()
        if await _is_cluster_node(link):
            from .cluster import ClusterEngine  # a cluster is made of engines: it imports this module

            link.close()
            return await ClusterEngine(
                self.url, response_timeout_seconds=self._timeout_seconds, client_name=self._client_name
            ).connect()
        if len(self._dialers) > 1:
            link.close()
            raise ConfigurationError(
                f"TURNMILL_REDIS_URL has several addresses ({self.address}), and the server is no node of a cluster: name one"
            )
        self._adopt(link)
        return self

    async def open_link(self) -> Link:
        """A new connection of the caller's own, for blocking reads."""
        owner, transport = await self._dial()
        link = Link(owner, self._timeout_seconds)
        link.attach(transport)
        return link

    async def open_subscriber(
        self, on_push: Callable[[list[Any]], None], on_error: Callable[[EngineReplyError], None] | None = None
    ) -> SubscriberLink:
        owner, transport = await self._dial()
        link = SubscriberLink(owner, self._timeout_seconds, on_push, on_error)
        link.attach(transport)
        return link

    def call(self, *arguments: Argument) -> asyncio.Future[Any]:
        """A command on the shared link. While it is down the future fails with `EngineUnavailable`."""
        if self._shared is None:
            raise EngineUnavailable(f"not connected to the engine at {self.address}")
        return self._shared.call(*arguments)

    def transact(self, commands: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        """Commands on keys of one partition as one transaction. The future gives their replies; MULTI does not roll back, so
        an error reply stands among them as an `EngineReplyError`."""
        call = self.call
        call("MULTI")
        for command in commands:
            call(*command)
        return call("EXEC")

    async def call_each(self, *arguments: Argument) -> list[Any]:
        """A command without a key on every server that holds keys; the replies."""
        return [await self.call(*arguments)]

    def node_of(self, _key: Argument) -> Engine:
        """The server that holds a key, for connections of one's own to it."""
        return self

    def doubt(self, _error: Exception | None = None) -> bool:
        """Whether an error reply says that this server does not hold the key (any more), so that nothing was executed."""
        return False

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
        return ",".join(dialer.address for dialer in self._dialers)

    async def _dial(self) -> tuple[Any, Any]:
        """A connection to the first address that answers."""
        *others, last = self._dialers
        for dialer in others:
            try:
                return await dialer.open()
            except EngineUnavailable:
                continue
        return await last.open()

    async def _open_shared(self) -> Link:
        return await self.open_link()

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
                self._adopt(await self._open_shared())
                return
            except EngineUnavailable:
                await asyncio.sleep(delay)
                delay = min(delay * 2, delay_max)


async def _is_cluster_node(link: Link) -> bool:
    try:
        information: bytes = await link.call("INFO", "cluster")
    except EngineReplyError:
        return False  # not allowed to ask: whoever is on a cluster must be
    return b"cluster_enabled:1" in information


def pairs(reply: list[Any]) -> dict[bytes, Any]:
    """A flat list of names and values (HGETALL, XINFO, an entry's fields) as a dict."""
    iterator = iter(reply)
    return cast("dict[bytes, Any]", dict(zip(iterator, iterator, strict=True)))
