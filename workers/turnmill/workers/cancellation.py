"""What a worker process hears of stopped turns, over one connection for all partitions.

A turn is stopped by a marker, a key that stays for a while, and by a word on its partition's pub/sub channel. The word
comes at once but may be missed; so this also tells since when none was missed. A task that was added after that moment
needs no look at its marker: had its turn been stopped since, it would have been heard. That is how a plain task costs no
command. What a silent connection swallows, and a model task that came late from the backlog of a turn that was stopped
before this process began, is found by the look at the markers with every heartbeat.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import EngineError
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.subscription import subscription

_REMEMBERED_TURNS_MAX = 4096
_AGAIN_SECONDS = 0.2


class Listener(Protocol):
    """A consumer, as it is told."""

    def turn_stopped(self, turn_id: str, reason: str) -> None: ...

    def cancellations_missed(self) -> None:
        """The connection is up again: what was stopped meanwhile is to be looked up."""


class Cancellations:
    """The stopped turns that this process heard of lately. Several consumers of one process may share it."""

    def __init__(self, engine: Engine, keys: Keys) -> None:
        self._engine = engine
        self._channels = [partition.cancellations.encode() for partition in keys.partitions]
        self._unconfirmed: set[bytes] = set()
        self._listeners: list[Listener] = []
        self._stopped: dict[str, str] = {}
        self._since_ms: int | None = None
        self._timing: asyncio.Task[None] | None = None
        self._subscription = subscription(engine, on_open=self._on_open, on_push=self._on_push, on_lost=self._on_lost)

    def attach(self, listener: Listener) -> None:
        """Tell this listener too; the first one opens the connection."""
        self._listeners.append(listener)
        self._subscription.start()

    async def detach(self, listener: Listener) -> None:
        """The last listener closes the connection."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            await self._subscription.close()
            self._on_lost()

    def reason(self, turn_id: str) -> str | None:
        """Why a turn was stopped, where that was heard lately."""
        return self._stopped.get(turn_id)

    def covers(self, entry_id: bytes) -> bool:
        """Whether every stop since this entry was added to its stream was heard, or is on its way."""
        since = self._since_ms
        return since is not None and int(entry_id[: entry_id.index(b"-")]) > since

    def _on_open(self) -> list[bytes]:
        self._on_lost()
        self._unconfirmed = set(self._channels)
        return self._channels

    def _on_lost(self) -> None:
        self._since_ms = None
        if self._timing is not None:
            self._timing.cancel()
            self._timing = None

    def _on_push(self, push: list[Any]) -> None:
        match push:
            case [b"smessage", _, payload]:
                turn_id, _, reason = payload.decode("utf-8", "replace").partition(" ")
                self._remember(turn_id, reason)
                for listener in self._listeners:
                    listener.turn_stopped(turn_id, reason)
            case [b"ssubscribe", channel, _] if channel in self._unconfirmed:
                self._unconfirmed.discard(channel)
                if not self._unconfirmed:
                    self._timing = asyncio.get_running_loop().create_task(self._note_time())

    def _remember(self, turn_id: str, reason: str) -> None:
        if len(self._stopped) >= _REMEMBERED_TURNS_MAX:
            del self._stopped[next(iter(self._stopped))]
        self._stopped[turn_id] = reason

    async def _note_time(self) -> None:
        """The engine's own clock, asked when all channels are confirmed: later than the subscriptions, for certain."""
        while True:
            try:
                times = await self._engine.call_each("TIME")
                break
            except EngineError:
                await asyncio.sleep(_AGAIN_SECONDS)
        # Entries are stamped by the node that holds them: the clock that is ahead of the others decides.
        self._since_ms = max(int(seconds) * 1000 + int(microseconds) // 1000 for seconds, microseconds in times)
        for listener in self._listeners:
            listener.cancellations_missed()


async def stop_reasons(engine: Engine, keys: PartitionKeys, turn_ids: list[str]) -> dict[str, str]:
    """The reasons of those turns of a partition that are stopped, by their markers; one command."""
    markers = await engine.call("MGET", *[keys.cancel(turn_id) for turn_id in turn_ids])
    return {
        turn_id: marker.decode("utf-8", "replace")
        for turn_id, marker in zip(turn_ids, markers, strict=True)
        if marker is not None
    }
