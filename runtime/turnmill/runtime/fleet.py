"""Which coordinators and workers are alive, and what is missing for turns to go on."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.keys import Keys, model_queue, pool_of_queue
from turnmill.protocol.settings import Settings

from .directives import read_directives

_SLOTS_SECONDS = 1.0


QUEUES_MAX = 256
"""Queues of one worker that anybody looks at."""


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
    state: str = "running"
    partitions: list[int] = []
    """Of a coordinator: the partitions that it reads."""
    started_at: float | None = None
    seen_at: float | None = None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Who is alive in a namespace."""

    coordinators: list[str]
    workers: list[WorkerEntry]

    @property
    def queues(self) -> set[str]:
        return {queue for worker in self.workers for queue in worker.queues}

    def of_role(self, role: str) -> list[WorkerEntry]:
        return [worker for worker in self.workers if worker.role == role]

    def missing(self, pool: str | None = None) -> Iterator[str]:
        """What no turn can do without, and one whose model calls wait in this pool."""
        if not self.coordinators:
            yield "no coordinator is alive: start `turnmill coordinator` (or `turnmill dev APP`)"
        if not any(pool_of_queue(queue) is not None for queue in self.queues):
            yield "no LLM worker is alive: start `turnmill worker llm` (or `turnmill dev APP`)"
        elif pool is not None and model_queue(pool) not in self.queues:
            yield f"no LLM worker serves the pool {pool!r}: {_who_serves(pool)}"


def _who_serves(pool: str) -> str:
    if pool.startswith("host."):
        return "bring the app of that model function: `turnmill worker llm APP`, or --app APP"
    return f"start `turnmill worker llm --pool {pool}`"


async def read_fleet(engine: Engine, keys: Keys, settings: Settings) -> Fleet:
    """The coordinators that renewed their membership within a lease, and the workers whose sign of life is there."""
    seconds, _ = await engine.call("TIME")
    oldest_ms = int((int(seconds) - settings.lease_seconds) * 1000)
    members = await engine.call("ZRANGEBYSCORE", keys.coordinators, oldest_ms, "+inf")
    workers = await _live_workers(engine, keys)
    return Fleet(coordinators=[member.decode() for member in members], workers=workers)


async def _live_workers(engine: Engine, keys: Keys) -> list[WorkerEntry]:
    registered = pairs(await engine.call("HGETALL", keys.workers))
    names = [name.decode(errors="replace") for name in registered]
    alive = await asyncio.gather(*[engine.call("EXISTS", keys.partitions[0].alive(name)) for name in names])
    return [
        described(name, body)
        for name, body, is_alive in zip(names, registered.values(), alive, strict=True)
        if is_alive
    ]


class PoolSlots:
    """How many model calls the live workers of each pool can make at once, for all partitions of a coordinator."""

    def __init__(self, engine: Engine, keys: Keys) -> None:
        self._engine = engine
        self._keys = keys
        self._slots: dict[str, int] = {}
        self._read_at = -math.inf

    def of(self, pool: str) -> int:
        return self._slots.get(pool, 0)

    async def look(self) -> None:
        """Read the registry again, unless that was just done."""
        if time.monotonic() < self._read_at + _SLOTS_SECONDS:
            return
        self._read_at = time.monotonic()
        slots: dict[str, int] = {}
        for worker in await _live_workers(self._engine, self._keys):
            for pool in {pool for queue in worker.queues if (pool := pool_of_queue(queue)) is not None}:
                slots[pool] = slots.get(pool, 0) + worker.slots
        self._slots = slots


class Registration:
    """A coordinator's entry in the registry of processes, for people; workers write theirs with their sign of life."""

    def __init__(self, engine: Engine, keys: Keys, name: str) -> None:
        self._engine = engine
        self._keys = keys
        self._name = name
        self._description = {
            "id": name,
            "role": "coordinator",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "language": "python",
            "started_at": time.time(),
        }

    async def write(self, partitions: list[int], *, is_draining: bool) -> None:
        state = "draining" if is_draining else "running"
        body = msgspec.json.encode(
            {**self._description, "state": state, "partitions": partitions, "seen_at": time.time()}
        )
        await self._engine.call("HSET", self._keys.workers, self._name, body)

    async def remove(self) -> None:
        await self._engine.call("HDEL", self._keys.workers, self._name)


async def list_processes(engine: Engine, keys: Keys, settings: Settings) -> list[WorkerEntry]:
    """Everybody in the registry, coordinators first; `lost` are those whose sign of life is gone, `draining` those that
    are on their way out, or asked to be."""
    fleet = await read_fleet(engine, keys, settings)
    registered = pairs(await engine.call("HGETALL", keys.workers))
    directives = await read_directives(engine, keys)
    alive = {*fleet.coordinators, *(worker.id for worker in fleet.workers)}
    entries = [described(name.decode(errors="replace"), body) for name, body in registered.items()]
    known = {entry.id for entry in entries}
    entries += [WorkerEntry(id=name, role="coordinator") for name in fleet.coordinators if name not in known]
    found = [
        msgspec.structs.replace(entry, state=_state(entry, entry.id in alive, entry.id in directives.draining))
        for entry in entries
    ]
    return sorted(found, key=lambda entry: (entry.role != "coordinator", entry.role, entry.id))


def _state(entry: WorkerEntry, is_alive: bool, is_asked: bool) -> str:
    if not is_alive:
        return "lost"
    return "draining" if is_asked else entry.state


def described(name: str, body: bytes) -> WorkerEntry:
    """A worker of any language: what it registered is read with patience."""
    try:
        described: Any = msgspec.json.decode(body)
        entry = msgspec.convert({**described, "id": name}, WorkerEntry)
        return msgspec.structs.replace(entry, queues=entry.queues[:QUEUES_MAX])
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return WorkerEntry(id=name)
