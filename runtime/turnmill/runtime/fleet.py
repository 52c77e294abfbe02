"""Which coordinators and workers are alive, and what is missing for turns to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.keys import Keys, pool_of_queue
from turnmill.protocol.settings import Settings


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it registered itself. `queues` are stream names behind the partition, such as `tool:default`."""

    id: str
    role: str = "?"
    host: str = "?"
    pid: int = 0
    queues: list[str] = []
    slots: int = 0
    used: int = 0
    language: str = "?"


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Who is alive in a namespace."""

    coordinators: list[str]
    workers: list[WorkerEntry]

    @property
    def queues(self) -> set[str]:
        return {queue for worker in self.workers for queue in worker.queues}

    def of_role(self, role: str) -> list[WorkerEntry]:
        return [worker for worker in self.workers if worker.role == role]

    def missing(self) -> Iterator[str]:
        """What no turn can do without."""
        if not self.coordinators:
            yield "no coordinator is alive: start `turnmill coordinator` (or `turnmill dev APP`)"
        if not any(pool_of_queue(queue) is not None for queue in self.queues):
            yield "no LLM worker is alive: start `turnmill worker llm` (or `turnmill dev APP`)"


async def read_fleet(engine: Engine, keys: Keys, settings: Settings) -> Fleet:
    """The coordinators that renewed their membership within a lease, and the workers whose sign of life is there."""
    seconds, _ = await engine.call("TIME")
    oldest_ms = int((int(seconds) - settings.lease_seconds) * 1000)
    members = await engine.call("ZRANGEBYSCORE", keys.coordinators, oldest_ms, "+inf")
    registered = pairs(await engine.call("HGETALL", keys.workers))
    names = [name.decode() for name in registered]
    alive = await asyncio.gather(*[engine.call("EXISTS", keys.partitions[0].alive(name)) for name in names])
    workers = [
        _worker(name, body) for name, body, is_alive in zip(names, registered.values(), alive, strict=True) if is_alive
    ]
    return Fleet(coordinators=[member.decode() for member in members], workers=workers)


def _worker(name: str, body: bytes) -> WorkerEntry:
    """A worker of any language: what it registered is read with patience."""
    try:
        described: Any = msgspec.json.decode(body)
        return msgspec.convert({**described, "id": name}, WorkerEntry)
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError):
        return WorkerEntry(id=name)
