"""Channels: what happened so far, then what happens, without gap or duplicate.

A process follows all its channels over one subscriber connection, on a cluster over one to each primary. A follower subscribes, reads the stream from its
cursor, and then takes what is published; the number of every event tells a gap, and a gap is read from the stream. So a
lost connection, a slow reader whose buffer overflowed and a message that never came all end in the same way: read on
from the cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from turnmill.protocol.connection import Engine
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.protocol.streams import ChannelEvent, parse_publication, read_channel, read_through
from turnmill.protocol.subscription import subscription

_BUFFERED_EVENTS_MAX = 1000
_BUFFERED_BYTES_MAX = 1024 * 1024
_READ_COUNT = 500
TERMINAL_KINDS = frozenset(kind.encode() for kind in TERMINAL_EVENT_TYPES)


class ChannelExpiredError(Exception):
    """The channel is gone, or its beginning is: events after the cursor cannot be had any more."""


class ChannelGoneError(ChannelExpiredError):
    """Nothing is left of the channel."""


class _Follower:
    """One reader of one channel: a bounded buffer between the subscriber connection and the reader's pace."""

    __slots__ = ("buffer", "confirmed", "heard", "overflowed", "silent", "size", "wake")

    def __init__(self) -> None:
        self.buffer: list[ChannelEvent] = []
        self.size = 0
        self.wake = asyncio.Event()
        self.confirmed = False
        self.overflowed = False
        self.heard = True
        self.silent = False

    def push(self, events: list[ChannelEvent]) -> None:
        self.size += sum(len(event.body) for event in events)
        if len(self.buffer) + len(events) > _BUFFERED_EVENTS_MAX or self.size > _BUFFERED_BYTES_MAX:
            # A reader that is slower than its turn reads on from the stream: memory stays bounded, the turn is not slowed.
            self.buffer.clear()
            self.size = 0
            self.overflowed = True
        else:
            self.buffer.extend(events)
        self.heard = True
        self.wake.set()

    def tick(self) -> None:
        """Called now and then: one whole interval without a word ends the wait."""
        if not self.heard:
            self.silent = True
            self.wake.set()
        self.heard = False


class Channels:
    """All channels that this process follows, over one subscriber connection (to each node of a cluster)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followers: dict[bytes, set[_Follower]] = {}
        self._subscription = subscription(engine, on_open=self._on_open, on_push=self._on_push, on_look=self._on_look)

    async def follow(self, channel: str, after: int = 0, *, existing: bool = True) -> AsyncIterator[list[ChannelEvent]]:
        """The events of a channel after a number, until its terminal event, in the pieces in which they come. While nothing
        comes, an empty piece is given now and then.

        Raises `ChannelExpiredError` where the channel is gone or begins behind the cursor. With `existing` false a
        channel that is not there yet is waited for.
        """
        name = channel.encode()
        follower = _Follower()
        self._add(name, follower)
        cursor = after
        try:
            while True:
                if not follower.confirmed and self._subscription.serves(name):
                    await follower.wake.wait()
                events = await self._stored(channel, cursor, follower)
                if not events and (existing or cursor > 0) and not await self._exists(channel):
                    raise ChannelGoneError(channel)
                while events:
                    cursor = events[-1].number
                    yield events
                    if events[-1].kind in TERMINAL_KINDS:
                        return
                    if len(events) < _READ_COUNT:
                        break
                    events = await self._stored(channel, cursor, follower)
                if not events:
                    yield []  # nothing now: the reader may look whether there will be anything
                while events := await self._published(follower, cursor):
                    cursor = events[-1].number
                    yield events
                    if events[-1].kind in TERMINAL_KINDS:
                        return
        finally:
            self._remove(name, follower)

    async def close(self) -> None:
        await self._subscription.close()

    async def _stored(self, channel: str, cursor: int, follower: _Follower) -> list[ChannelEvent]:
        """What the stream holds after the cursor, up to a page."""
        follower.overflowed = False
        events = await read_channel(self._engine, channel, cursor, _READ_COUNT)
        for expected, event in enumerate(events, cursor + 1):
            if event.number != expected:
                raise ChannelExpiredError(f"events {expected} to {event.number - 1} of {channel} were removed")
        return events

    async def _published(self, follower: _Follower, cursor: int) -> list[ChannelEvent]:
        """What was published since, without a gap; nothing where the stream must be read."""
        while True:
            follower.wake.clear()
            events, follower.buffer, follower.size = follower.buffer, [], 0
            if events and events[0].number <= cursor:
                events = [event for event in events if event.number > cursor]
            if events:
                # Numbers in one publication follow each other; between two of them one may be missing.
                contiguous = events[0].number == cursor + 1 and events[-1].number == cursor + len(events)
                return events if contiguous else []
            if follower.overflowed:
                return []
            if follower.silent:
                follower.silent = False
                return []  # a look at the stream now and then, should a publication have been lost
            await follower.wake.wait()

    async def _exists(self, channel: str) -> bool:
        return bool(await read_through(self._engine, "EXISTS", channel))

    # ---- the subscriber connection

    def _add(self, name: bytes, follower: _Follower) -> None:
        followers = self._followers.setdefault(name, set())
        followers.add(follower)
        self._subscription.start()
        # Also where others follow it already: the confirmation says from when on this follower misses nothing.
        self._subscription.subscribe(name)

    def _remove(self, name: bytes, follower: _Follower) -> None:
        followers = self._followers.get(name)
        if followers is None:
            return
        followers.discard(follower)
        if not followers:
            del self._followers[name]
            self._subscription.unsubscribe(name)

    def _on_push(self, push: list[Any]) -> None:
        kind = push[0]
        if kind == b"smessage":
            followers = self._followers.get(push[1])
            if followers:
                events = parse_publication(push[2])
                for follower in followers:
                    follower.push(events)
        elif kind == b"ssubscribe":
            for follower in self._followers.get(push[1], ()):
                if not follower.confirmed:
                    follower.confirmed = True
                    follower.wake.set()

    def _on_open(self) -> list[bytes]:
        for followers in self._followers.values():
            for follower in followers:
                follower.confirmed = False
                follower.overflowed = True
        return list(self._followers)

    def _on_look(self) -> None:
        for followers in self._followers.values():
            for follower in followers:
                follower.tick()
