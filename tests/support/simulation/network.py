"""Connections between actors and the server: delays, losses, stalls and black holes, all chosen by the seed.

The project's own `Engine` and `Link` run as they are; only the socket below them is ours. What is written in one tick is a
packet: it arrives as a whole, or, where a connection is cut, up to some command of it. The order within a connection holds.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from types import SimpleNamespace
from typing import Any

import hiredis

from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import EngineUnavailable

from .actors import Actor, Thread
from .loop import THREAD, VirtualLoop
from .replies import encode
from .server import Server

URL = "redis://simulated"
_DELAY_SECONDS = (0.0002, 0.002)
_CONNECT_SECONDS = (0.0005, 0.003)
_APART_SECONDS = 1e-6
"""Between two packets of a connection: timers of one time have no order."""


class Network:
    """All connections of a world, and how bad they are."""

    def __init__(self, loop: VirtualLoop, server: Server, rng: random.Random) -> None:
        self.loop = loop
        self.server = server
        self.rng = rng
        self.wires: dict[Wire, None] = {}
        self.is_down = False
        self.slow_chance = 0.0
        self.slow_seconds = 0.3

    def delay(self) -> float:
        rng = self.rng
        if self.slow_chance and rng.random() < self.slow_chance:
            return rng.uniform(0.0, self.slow_seconds)
        return rng.uniform(*_DELAY_SECONDS)

    async def connect(self) -> Wire:
        """A connection of whoever runs. Raises `EngineUnavailable` while the server is away."""
        thread = THREAD.get()
        assert thread is not None, "the world opens no connections"
        await asyncio.sleep(self.rng.uniform(*_CONNECT_SECONDS))
        if self.is_down:
            raise EngineUnavailable(f"cannot reach {URL}: it is down")
        wire = Wire(self, thread)
        self.wires[wire] = None
        thread.actor.wires.add(wire)
        return wire

    def cut_all(self) -> None:
        """The server went away: every connection with it."""
        for wire in list(self.wires):
            wire.cut(from_server=True)


class Wire:
    """One connection: the transport of a `Link` on one side, a session of the server on the other."""

    def __init__(self, network: Network, thread: Thread) -> None:
        self.network = network
        self.thread = thread
        self.actor: Actor = thread.actor
        self.session = network.server.connect(self._push)
        self.is_blocking = self.is_subscriber = False
        self.is_black = False
        """Swallows everything in both directions, and says nothing."""
        self._protocol: Any = None
        self._closing = self._is_breaking = False
        self._parser = hiredis.Reader()
        self._up_at = self._down_at = 0.0
        self._held: list[list[list[bytes]]] | None = None
        self.holds_at: bytes | None = None
        """Begin to hold with the first packet that has this word."""
        self._down: list[bytes] = []
        self._down_context = thread.context.copy()

    def __repr__(self) -> str:
        return f"the {self.kind} connection of {self.actor}"

    @property
    def kind(self) -> str:
        """What it is for."""
        if self.is_subscriber:
            return "subscription"
        return "reading" if self.is_blocking else "heartbeat" if self.thread.is_heart else "shared"

    # ---- a transport, as `Link` knows it

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes) -> None:
        if self._closing:
            return
        self._parser.feed(data)
        commands: list[list[bytes]] = []
        while (command := self._parser.gets()) is not False:
            commands.append(command)
        if self.is_black:
            return
        if commands[0][0] == b"XREADGROUP":
            self.is_blocking = True
        elif commands[0][0] == b"SSUBSCRIBE":
            self.is_subscriber = True
        network = self.network
        if self.holds_at is not None and any(self.holds_at in command for command in commands):
            self.holds_at = None
            self.hold()
        self._up_at = max(self._up_at + _APART_SECONDS, network.loop.time() + network.delay())
        network.loop.call_at(self._up_at, self._arrive, commands, context=_WORLD)

    def abort(self) -> None:
        """The actor closes: what was sent before may still arrive."""
        if not self._closing:
            self._lose("closed here")
            self._server_notices()

    # ---- faults

    def cut(self, *, from_server: bool = False) -> None:
        """The connection breaks: replies on the way are lost, commands on the way may or may not be."""
        if self._closing and from_server:
            self._forget()
            return
        rng = self.network.rng
        if from_server or rng.random() < 0.5:
            self._forget()
        else:
            self._break()
        if not self._closing:
            self._lose("reset")

    def stall(self, seconds: float) -> None:
        """Nothing gets through for a while, in either direction."""
        until = self.network.loop.time() + seconds
        self._up_at, self._down_at = max(self._up_at, until), max(self._down_at, until)

    def hold(self) -> None:
        """What is sent from now on is kept on the way until `release`, also behind the end of the connection."""
        if self._held is None:
            self._held = []
            if self.network.rng.random() < 0.5:  # its owner hears of a lost connection, and goes on with another one
                self.network.loop.call_later(self.network.rng.uniform(0.02, 0.4), self._reset, context=_WORLD)

    @property
    def is_holding(self) -> bool:
        return self._held is not None

    def _reset(self) -> None:
        if self._held is not None and not self._closing:
            self._lose("reset")

    def release(self) -> None:
        held, self._held = self._held, None
        for commands in held or ():
            self._arrive(commands)
        if self._closing:
            self._forget()

    def owner_died(self) -> None:
        """What was sent may still arrive; the server may hear of the end at once, late, or never."""
        self._closing = True
        if self.network.rng.random() < 0.2:
            self._forget()
        else:
            self._break()

    # ---- between the two

    def _arrive(self, commands: list[list[bytes]]) -> None:
        network = self.network
        if self not in network.wires:
            return
        if self._held is not None:
            self._held.append(commands)
            return
        if self._is_breaking:  # what was written in one go is not received in one go
            commands = commands[: network.rng.randint(0, len(commands))]
        for command in commands:
            network.server.receive(self.session, command)
        if self._is_breaking:
            self._forget()

    def _push(self, reply: Any) -> None:
        """A reply or message leaves the server; what leaves at one time arrives at one time."""
        if self._closing or self.is_black:
            return
        network = self.network
        if not self._down:
            self._down_at = max(self._down_at + _APART_SECONDS, network.loop.time() + network.delay())
            network.loop.call_at(self._down_at, self._deliver, context=self._down_context)
        self._down.append(encode(reply))

    def _deliver(self) -> None:
        data, self._down = b"".join(self._down), []
        if not self._closing and not self.is_black and self._protocol is not None:
            self.actor.received(self)
            self._protocol.data_received(data)

    def _lose(self, reason: str) -> None:
        self._closing = True
        self.actor.wires.discard(self)
        protocol, loop = self._protocol, self.network.loop
        if protocol is not None:
            loop.call_soon(protocol.connection_lost, ConnectionError(reason), context=self._down_context)

    def _break(self) -> None:
        self._is_breaking = self.network.rng.random() < 0.5
        self._server_notices()

    def _server_notices(self) -> None:
        loop = self.network.loop
        seconds = self.network.rng.choice((0.0, 0.002, 0.5))
        loop.call_at(max(self._up_at, loop.time()) + seconds, self._forget, context=_WORLD)

    def _forget(self) -> None:
        if self in self.network.wires and self._held is None:
            del self.network.wires[self]
            self.network.server.disconnect(self.session)


class SimulatedEngine(Engine):
    """The project's engine client over a simulated network."""

    def __init__(self, network: Network, response_timeout_seconds: float) -> None:
        super().__init__(URL, response_timeout_seconds=response_timeout_seconds)
        self._dialers = [SimulatedDialer(network)]  # type: ignore[list-item]
        self._open_transport = self._dialers[0].open  # HEAD


class SimulatedDialer:
    """What opens connections, in place of redis-py."""

    url = address = URL

    def __init__(self, network: Network) -> None:
        self._network = network

    async def open(self) -> tuple[Any, Any]:
        return SimpleNamespace(_writer=None, _reader=None), await self._network.connect()


_WORLD = contextvars.Context()
"""Where the network's and the server's own steps run: nobody's pause or death stops them."""
