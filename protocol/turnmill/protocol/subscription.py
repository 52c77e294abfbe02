"""A subscription that lives as long as its owner: one connection for sharded pub/sub, opened again when it is lost.

Messages of pub/sub are not kept by the engine, so whoever subscribes must know from when on it misses nothing. After
every new connection the owner names its channels and hears each confirmation; what was published before that must be
found elsewhere. A connection that has gone silent is asked for a sign of life, and given up where none comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from .connection import Engine, SubscriberLink
from .errors import EngineUnavailable

SILENCE_SECONDS = 5.0
"""How long a connection may say nothing before it is asked; three times as long, and it is given up."""
_AGAIN_SECONDS = 0.2


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
