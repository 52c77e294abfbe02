"""A TCP proxy for tests, in front of the engine: it delays, swallows and resets what goes through it.

    proxy = await Proxy("127.0.0.1", 6379).start()
    ... connect to proxy.url ...
    proxy.black_hole()      # nothing passes, nothing is closed: what a firewall does that forgot a connection
    proxy.pass_on()         # what was held back goes on
    proxy.reset()           # every connection ends with RST
    proxy.lead_to(port)     # new connections go elsewhere, as after a failover

It lives in the event loop of whoever starts it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from typing import Any, cast

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """One listening port that leads to one address."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._swallowing = False
        self.delay_seconds = 0.0
        self.port = 0

    async def start(self) -> Proxy:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> int:
        return len(self._connections)

    def lead_to(self, port: int, host: str = "127.0.0.1") -> None:
        """New connections go there; those that exist stay where they are."""
        self._target = (host, port)

    def black_hole(self) -> None:
        """From now on nothing passes, also on connections that are made meanwhile."""
        self._swallowing = True
        for connection in self._connections:
            connection.swallow()

    def forget(self, share: float = 1.0, chance: random.Random | None = None) -> int:
        """Connections that exist, all or some, pass nothing any more, for ever; the number of them."""
        chosen = [connection for connection in self._connections if chance is None or chance.random() < share]
        for connection in chosen:
            connection.swallow()
            connection.forgotten = True
        return len(chosen)

    def pass_on(self) -> None:
        """The end of `black_hole`: what was held back goes on."""
        self._swallowing = False
        for connection in self._connections:
            if not connection.forgotten:
                connection.pass_on()

    def reset(self, share: float = 1.0, chance: random.Random | None = None) -> int:
        """End connections, all or some, with RST; the number of them."""
        chosen = [connection for connection in self._connections if chance is None or chance.random() < share]
        for connection in chosen:
            connection.reset()
        return len(chosen)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    # ---- for the sides

    def accepted(self, near: _Side) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(near))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: _Side) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._target
        try:
            _, far = await loop.create_connection(lambda: _Side(self), host, port)
        except OSError:
            near.reset()
            return
        connection = _Connection(self, near, far)
        if near.is_closed:
            far.reset()
            return
        self._connections.add(connection)
        connection.open()
        if self._swallowing:
            connection.swallow()

    def gone(self, connection: _Connection) -> None:
        self._connections.discard(connection)


class _Connection:
    """Two sides that give each other what comes."""

    def __init__(self, proxy: Proxy, near: _Side, far: _Side) -> None:
        self._proxy = proxy
        self._sides = (near, far)
        self.forgotten = False

    def open(self) -> None:
        near, far = self._sides
        near.connection = far.connection = self
        near.peer, far.peer = far, near
        near.let_out()

    def swallow(self) -> None:
        for side in self._sides:
            side.pause()

    def pass_on(self) -> None:
        for side in self._sides:
            side.resume()

    def reset(self) -> None:
        self._proxy.gone(self)
        for side in self._sides:
            side.reset()

    def lost(self, side: _Side, error: Exception | None) -> None:
        """One side has closed: so does the other, in the same way."""
        self._proxy.gone(self)
        assert side.peer is not None
        if error is None:
            side.peer.close()
        else:
            side.peer.reset()


class _Side(asyncio.Protocol):
    """One end of a connection: the client's or the engine's."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._early: list[bytes] = []
        self._transport: Any = None
        self.peer: _Side | None = None
        self.connection: _Connection | None = None
        self._last_due_at = 0.0

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._transport.get_extra_info("sockname")[1] == self._proxy.port:
            self._proxy.accepted(self)

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self._early.append(data)
            return
        # What is on its way may not be overtaken, also where the delay has become shorter.
        loop = asyncio.get_running_loop()
        due_at = max(self._last_due_at, loop.time() + self._proxy.delay_seconds)
        if due_at <= loop.time():
            self.peer.write(data)
        else:
            self._last_due_at = due_at + 1e-6
            loop.call_at(due_at, self.peer.write, data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.connection is not None:
            self.connection.lost(self, error)

    def let_out(self) -> None:
        """What came before the other side was there."""
        assert self.peer is not None
        for data in self._early:
            self.peer.write(data)
        self._early.clear()

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._transport.write(data)

    def pause(self) -> None:
        if not self.is_closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self.is_closed:
            self._transport.resume_reading()

    def close(self) -> None:
        """Once all is written that came."""
        if not self.is_closed:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        own: socket.socket = self._transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self._transport.abort()
