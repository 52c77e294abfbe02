"""The subscriber connection of a client: closing it ends, whatever it is doing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from turnmill.protocol.connection import Engine
from turnmill.runtime.channel import Channels


class OpenLink:
    """A subscriber link that hears nothing."""

    is_open = True
    silent_seconds = 0.0

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def send(self, *arguments: Any) -> None:
        return

    def close(self) -> None:
        self.is_open = False
        if not self.closed.done():
            self.closed.set_result(None)


class EngineThatConnectsWhenCancelled:
    """The connection is made in the very moment in which it is given up; `wait_for` of Python 3.11 returns it then."""

    is_cluster = False

    def __init__(self) -> None:
        self.is_connecting = asyncio.Event()

    async def call(self, *arguments: Any) -> list[Any]:
        await asyncio.Event().wait()
        return []

    async def open_subscriber(self, on_push: Any) -> OpenLink:
        self.is_connecting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return OpenLink()


async def test_closing_ends_though_the_connection_comes_at_that_moment() -> None:
    engine = EngineThatConnectsWhenCancelled()
    channels = Channels(cast("Engine", engine))
    follower = channels.follow("some-channel")
    reading = asyncio.ensure_future(anext(follower))
    await engine.is_connecting.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.wait_for(channels.close(), timeout=5)
