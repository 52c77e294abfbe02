"""A subscription that lives as long as its owner: one connection for sharded pub/sub, opened again when it is lost.

Messages of pub/sub are not kept by the engine, so whoever subscribes must know from when on it misses nothing. After
every new connection the owner names its channels and hears each confirmation; what was published before that must be
found elsewhere. A connection that has gone silent is asked for a sign of life, and given up where none comes.

On a cluster a channel is heard at the primary of its slot, so there is a connection to each of them; a slot that moves
takes its subscriptions away, and they are made again where it is then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .connection import Engine, SubscriberLink
from .errors import EngineReplyError, EngineUnavailable

if TYPE_CHECKING:
    from .cluster import ClusterEngine

SILENCE_SECONDS = 5.0
"""How long a connection may say nothing before it is asked; three times as long, and it is given up."""
_AGAIN_SECONDS = 0.2
_MOVED_SECONDS = 0.05
_CONNECT_SECONDS = 1.0


def subscription(engine: Engine, **callbacks: Any) -> Subscription | ClusterSubscription:
    """The subscription of an engine; the callbacks are those of `Subscription`."""
    if engine.is_cluster:
        return ClusterSubscription(engine, **callbacks)  # type: ignore[arg-type]
    return Subscription(engine, **callbacks)


class Subscription:
    """One subscriber connection of a process, and the task that keeps it."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_open: Callable[[], Iterable[bytes]],
        on_push: Callable[[list[Any]], None],
        on_lost: Callable[[], None] = lambda: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_open` gives the channels of a new connection, `on_push` takes its messages and confirmations. `on_lost` tells
        that messages are missed from now on. `on_look` is called every `SILENCE_SECONDS` while the connection is kept."""
        self._engine = engine
        self._on_open = on_open
        self._on_push = on_push
        self._on_lost = on_lost
        self._on_look = on_look
        self._link: SubscriberLink | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep a connection from now on, until `close`."""
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_open(self) -> bool:
        return self._link is not None and self._link.is_open

    def serves(self, _channel: bytes) -> bool:
        """Whether a channel that was subscribed to is confirmed, or will be soon."""
        return self.is_open

    def subscribe(self, channel: bytes) -> None:
        """One more channel of the open connection. A channel that is there already is confirmed again."""
        if self._link is not None:
            self._link.send("SSUBSCRIBE", channel)

    def unsubscribe(self, channel: bytes) -> None:
        if self._link is not None:
            self._link.send("SUNSUBSCRIBE", channel)

    async def close(self) -> None:
        while self._keeper is not None and not self._keeper.done():
            # More than once: what it awaits while connecting may swallow a cancellation.
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=0.1)
        if self._link is not None:
            self._link.close()
            await self._link.closed

    async def _keep(self) -> None:
        while True:
            try:
                self._link = await self._engine.open_subscriber(self._on_push)
            except EngineUnavailable:
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            for channel in self._on_open():
                self._link.send("SSUBSCRIBE", channel)
            await self._watch(self._link)
            self._on_lost()

    async def _watch(self, link: SubscriberLink) -> None:
        """Until the connection is lost, or silent for too long."""
        while link.is_open:
            await asyncio.wait({link.closed}, timeout=SILENCE_SECONDS)
            self._on_look()
            if link.is_open and link.silent_seconds > SILENCE_SECONDS:
                if link.silent_seconds > 3 * SILENCE_SECONDS:
                    link.close()
                    return
                link.send("PING")


class ClusterSubscription:
    """The same on a cluster. Whatever changes, all channels are subscribed to again: that is seldom, and every owner knows
    what to do about it."""

    def __init__(
        self,
        engine: ClusterEngine,
        *,
        on_open: Callable[[], Iterable[bytes]],
        on_push: Callable[[list[Any]], None],
        on_lost: Callable[[], None] = lambda: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_open = on_open
        self._on_push = on_push
        self._on_lost = on_lost
        self._on_look = on_look
        self._links: dict[Engine, SubscriberLink] = {}
        self._homes: dict[bytes, SubscriberLink] = {}
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_open(self) -> bool:
        return any(link.is_open for link in self._links.values())

    def serves(self, channel: bytes) -> bool:
        link = self._homes.get(channel)
        return link is not None and link.is_open

    def subscribe(self, channel: bytes) -> None:
        try:
            link = self._links.get(self._engine.node_of(channel))
        except EngineUnavailable:
            link = None
        if link is None or not link.is_open:
            return  # its node is connected to, and all channels are subscribed to again then
        self._homes[channel] = link
        link.send("SSUBSCRIBE", channel)

    def unsubscribe(self, channel: bytes) -> None:
        link = self._homes.pop(channel, None)
        if link is not None:
            link.send("SUNSUBSCRIBE", channel)

    async def close(self) -> None:
        while self._keeper is not None and not self._keeper.done():
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=0.1)
        for link in self._links.values():
            link.close()
        await asyncio.gather(*[link.closed for link in self._links.values()])

    async def _keep(self) -> None:
        looked_at = asyncio.get_running_loop().time()
        while True:
            if await self._connect() or self._changed.is_set():
                self._changed.clear()
                self._subscribe_all()
            await self._wait(looked_at + SILENCE_SECONDS)
            if asyncio.get_running_loop().time() >= looked_at + SILENCE_SECONDS:
                looked_at = asyncio.get_running_loop().time()
                self._look()

    async def _connect(self) -> bool:
        """Have a connection to each primary and to no other node. Whether that is a change."""
        primaries = self._engine.primaries
        gone = [node for node, link in self._links.items() if node not in primaries or not link.is_open]
        for node in gone:
            self._links.pop(node).close()
        missing = [node for node in primaries if node not in self._links]
        opened = await asyncio.gather(*[self._open(node) for node in missing])
        return bool(gone) or any(opened)

    async def _open(self, node: Engine) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                self._links[node] = await node.open_subscriber(self._heard, self._refused)
        except (EngineUnavailable, TimeoutError):
            return False
        return True

    def _subscribe_all(self) -> None:
        self._on_lost()
        self._homes.clear()
        for channel in self._on_open():
            self.subscribe(channel)

    async def _wait(self, until: float) -> None:
        """Until a connection is lost, something has changed, or it is time for a look."""
        is_complete = len(self._links) == len(self._engine.primaries)
        seconds = until - asyncio.get_running_loop().time() if is_complete else _AGAIN_SECONDS
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait(
                {changed, *[link.closed for link in self._links.values()]},
                timeout=max(0.0, seconds),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()
        if self._changed.is_set():
            await asyncio.sleep(_MOVED_SECONDS)  # the map is being read
        if not all(link.is_open for link in self._links.values()):
            self._on_lost()

    def _look(self) -> None:
        self._on_look()
        for link in self._links.values():
            if link.is_open and link.silent_seconds > 3 * SILENCE_SECONDS:
                link.close()
            elif link.is_open and link.silent_seconds > SILENCE_SECONDS:
                link.send("PING")
        if set(self._links) != set(self._engine.primaries):
            self._changed.set()

    def _heard(self, push: list[Any]) -> None:
        if push[0] == b"sunsubscribe" and push[1] in self._homes:
            # Not asked for: the slot is elsewhere now, and what was published there since is missed.
            self._engine.doubt()
            self._on_lost()
            self._changed.set()
            return
        self._on_push(push)

    def _refused(self, error: EngineReplyError) -> None:
        self._engine.doubt(error)
        self._changed.set()
