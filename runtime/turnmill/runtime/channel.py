"""Channels: what happened so far, then what happens, without gap or duplicate.

A process follows all its channels over one subscriber connection. A follower subscribes, reads the stream from its
cursor, and then takes what is published; the number of every event tells a gap, and a gap is read from the stream. So a
lost connection, a slow reader whose buffer overflowed and a message that never came all end in the same way: read on
from the cursor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from turnmill.protocol.connection import Engine, SubscriberLink, pairs
from turnmill.protocol.errors import EngineUnavailable
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.protocol.streams import parse_publication

_BUFFERED_EVENTS_MAX = 1000
_READ_COUNT = 500
_SILENCE_SECONDS = 5.0
_TERMINAL = frozenset(kind.encode() for kind in TERMINAL_EVENT_TYPES)


class RawEvent(NamedTuple):
    """An event as it stands in the channel: its number, type, time in ms of the engine's clock, and body."""

    number: int
    kind: bytes
    at_ms: int
    body: bytes


class ChannelExpiredError(Exception):
    """The channel is gone, or its beginning is: events after the cursor cannot be had any more."""


class _Follower:
    """One reader of one channel: a bounded buffer between the subscriber connection and the reader's pace."""

    __slots__ = ("buffer", "confirmed", "heard", "overflowed", "silent", "wake")

    def __init__(self) -> None:
        self.buffer: deque[tuple[int, bytes, int, bytes]] = deque()
        self.wake = asyncio.Event()
        self.confirmed = False
        self.overflowed = False
        self.heard = True
        self.silent = False

    def push(self, events: list[tuple[int, bytes, int, bytes]]) -> None:
        if len(self.buffer) + len(events) > _BUFFERED_EVENTS_MAX:
            # A reader that is slower than its turn reads on from the stream: memory stays bounded, the turn is not slowed.
            self.buffer.clear()
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
    """All channels that this process follows, over one subscriber connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followers: dict[bytes, set[_Follower]] = {}
        self._link: SubscriberLink | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def follow(self, channel: str, after: int = 0, *, existing: bool = True) -> AsyncIterator[RawEvent]:
        """The events of a channel after a number, until its terminal event.

        Raises `ChannelExpiredError` where the channel is gone or begins behind the cursor. With `existing` false a
        channel that is not there yet is waited for.
        """
        name = channel.encode()
        follower = _Follower()
        self._add(name, follower)
        cursor = after
        try:
            while True:
                if not follower.confirmed and self._link is not None and self._link.is_open:
                    await follower.wake.wait()
                before = cursor
                async for event in self._replay(channel, cursor, follower):
                    cursor = event.number
                    yield event
                    if event.kind in _TERMINAL:
                        return
                if cursor == before and (existing or cursor > 0) and not await self._exists(channel):
                    raise ChannelExpiredError(channel)
                async for event in self._live(follower, cursor):
                    cursor = event.number
                    yield event
                    if event.kind in _TERMINAL:
                        return
        finally:
            self._remove(name, follower)

    async def close(self) -> None:
        while self._keeper is not None and not self._keeper.done():
            # More than once: Python 3.11's `wait_for`, in which it may be connecting, swallows a cancellation at times.
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=0.1)
        if self._link is not None:
            self._link.close()
            await self._link.closed

    async def _replay(self, channel: str, cursor: int, follower: _Follower) -> AsyncIterator[RawEvent]:
        """What the stream holds after the cursor."""
        while True:
            follower.overflowed = False
            try:
                entries = await self._engine.call("XRANGE", channel, f"0-{cursor + 1}", "+", "COUNT", _READ_COUNT)
            except EngineUnavailable:
                await self._engine.ready()
                continue
            for entry_id, fields in entries:
                number = int(entry_id[2:])
                if number != cursor + 1:
                    raise ChannelExpiredError(f"events {cursor + 1} to {number - 1} of {channel} were removed")
                cursor = number
                values = pairs(fields)
                yield RawEvent(number, values[b"t"], int(values.get(b"at", 0)), values[b"d"])
            if len(entries) < _READ_COUNT:
                return

    async def _live(self, follower: _Follower, cursor: int) -> AsyncIterator[RawEvent]:
        """What is published, until something is missing."""
        while True:
            follower.wake.clear()
            while follower.buffer:
                number, kind, at_ms, body = follower.buffer.popleft()
                if number <= cursor:
                    continue
                if number > cursor + 1:
                    follower.buffer.clear()
                    return
                cursor = number
                yield RawEvent(number, kind, at_ms, body)
            if follower.overflowed:
                return
            if follower.silent:
                follower.silent = False
                return  # a look at the stream now and then, should a publication have been lost
            await follower.wake.wait()

    async def _exists(self, channel: str) -> bool:
        try:
            return bool(await self._engine.call("EXISTS", channel))
        except EngineUnavailable:
            return True

    # ---- the subscriber connection

    def _add(self, name: bytes, follower: _Follower) -> None:
        followers = self._followers.setdefault(name, set())
        followers.add(follower)
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())
        if self._link is not None and self._link.is_open:
            # Also where others follow it already: the confirmation says from when on this follower misses nothing.
            self._link.send("SSUBSCRIBE", name)

    def _remove(self, name: bytes, follower: _Follower) -> None:
        followers = self._followers.get(name)
        if followers is None:
            return
        followers.discard(follower)
        if not followers:
            del self._followers[name]
            if self._link is not None:
                self._link.send("SUNSUBSCRIBE", name)

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

    async def _keep(self) -> None:
        """Keep the connection: open it, ask for a sign of life when it is silent, open it again when it is lost."""
        while True:
            try:
                self._link = await self._engine.open_subscriber(self._on_push)
            except EngineUnavailable:
                await asyncio.sleep(0.2)
                continue
            for name, followers in self._followers.items():
                for follower in followers:
                    follower.confirmed = False
                    follower.overflowed = True
                self._link.send("SSUBSCRIBE", name)
            await self._watch(self._link)

    async def _watch(self, link: SubscriberLink) -> None:
        while link.is_open:
            await asyncio.wait({link.closed}, timeout=_SILENCE_SECONDS)
            for followers in self._followers.values():
                for follower in followers:
                    follower.tick()
            if link.is_open and link.silent_seconds > _SILENCE_SECONDS:
                if link.silent_seconds > 3 * _SILENCE_SECONDS:
                    link.close()
                    return
                link.send("PING")
