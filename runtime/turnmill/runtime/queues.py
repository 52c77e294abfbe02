"""The task queues of a namespace over all partitions: what waits, what is in work, who serves it, and whether it is paused.

A queue is named as its streams are behind the partition: `tool:<name>` or `model:<pool>`. Every look is a handful of
commands whose cost does not grow with the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.errors import EngineReplyError
from turnmill.protocol.keys import WORKER_GROUP, Keys, PartitionKeys, is_task_queue, pool_of_queue, tool_queue
from turnmill.protocol.settings import Settings
from turnmill.protocol.specs import ToolSpec
from turnmill.protocol.streams import is_group_missing

from .directives import Directive, read_directives
from .fleet import Fleet, described, read_fleet

T = TypeVar("T")


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """One queue. `waiting` tasks stand in streams and nobody has read them, `in_work` ones are with a worker,
    `backlog` ones wait for the dispatch window (model queues only)."""

    queue: str
    waiting: int = 0
    in_work: int = 0
    backlog: int = 0
    oldest_waiting_seconds: float | None = None
    oldest_in_work_seconds: float | None = None
    workers: int = 0
    slots: int = 0
    paused: Directive | None = None
    faults: list[str] = []
    """What is wrong with the keys of single partitions."""

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        built["paused"] = self.paused is not None
        built["paused_reason"] = self.paused.reason if self.paused else None
        built["paused_at"] = self.paused.at if self.paused else None
        return built


class _Part(NamedTuple):
    """One queue in one partition; times are when the oldest entry was added, in ms."""

    waiting: int = 0
    in_work: int = 0
    backlog: int = 0
    oldest_waiting_ms: int | None = None
    oldest_in_work_ms: int | None = None
    fault: str | None = None


async def read_queues(engine: Engine, keys: Keys, settings: Settings) -> list[QueueReport]:
    """Every queue that was ever used here, that a registered tool names, that a worker serves, or that is paused."""
    fleet = await read_fleet(engine, keys, settings)
    directives = await read_directives(engine, keys)
    names = await known_queues(engine, keys, fleet) | set(directives.paused)
    seconds, microseconds = await engine.call("TIME")
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    queues = sorted(names)
    parts = await asyncio.gather(*[_parts(engine, keys, name) for name in queues])
    return [
        _report(name, found, now_ms, fleet, directives.paused.get(name))
        for name, found in zip(queues, parts, strict=True)
    ]


async def known_queues(engine: Engine, keys: Keys, fleet: Fleet) -> set[str]:
    """Every queue that was used, that a tool names, or that a living worker serves."""
    used = await asyncio.gather(*[engine.call("SMEMBERS", partition.queues) for partition in keys.partitions])
    names = {name.decode() for members in used for name in members}
    return names | await _queues_of_tools(engine, keys) | {name for name in fleet.queues if is_task_queue(name)}


async def registered_queues(engine: Engine, keys: Keys) -> set[str]:
    """Every queue that a tool names, or a worker, alive or not."""
    workers = pairs(await engine.call("HGETALL", keys.workers))
    served = {
        queue for name, body in workers.items() for queue in described(name.decode(errors="replace"), body).queues
    }
    return await _queues_of_tools(engine, keys) | {name for name in served if is_task_queue(name)}


async def _queues_of_tools(engine: Engine, keys: Keys) -> set[str]:
    queues = set()
    for body in pairs(await engine.call("HGETALL", keys.tools)).values():
        try:
            queues.add(tool_queue(msgspec.json.decode(body, type=ToolSpec).queue))
        except (msgspec.DecodeError, RecursionError):
            continue  # of a newer version
    return queues


async def _parts(engine: Engine, keys: Keys, name: str) -> list[_Part]:
    return list(await asyncio.gather(*[_part(engine, partition, name) for partition in keys.partitions]))


async def _part(engine: Engine, keys: PartitionKeys, name: str) -> _Part:
    stream, pool = keys.base + name, pool_of_queue(name)
    backlog = 0 if pool is None else await engine.call("ZCARD", keys.backlog(pool))
    try:
        length = await engine.call("XLEN", stream)
        if not length:
            return _Part(backlog=backlog)
        delivered = await _last_delivered(engine, stream)
        in_work, oldest_in_work = (await engine.call("XPENDING", stream, WORKER_GROUP))[:2] if delivered else (0, None)
        first = await _first_behind(engine, stream, delivered)
    except EngineReplyError as error:
        if is_group_missing(error):
            return _Part(waiting=length, backlog=backlog)
        return _Part(backlog=backlog, fault=f"partition {keys.partition}: {error}")
    return _Part(
        max(0, length - in_work),
        in_work,
        backlog,
        _time_of(first[0][0]) if first else None,
        _time_of(oldest_in_work) if oldest_in_work else None,
    )


async def _first_behind(engine: Engine, stream: str, delivered: bytes | None) -> list[Any]:
    """The first entry that no worker has."""
    start = "-" if delivered is None else b"(" + delivered
    return await if_allowed(engine.call("XRANGE", stream, start, "+", "COUNT", 1), [])


async def if_allowed(asked: Awaitable[T], otherwise: T) -> T:
    """A reply, or something else where the user's access list forbids the command: a monitor may see numbers, and no
    content."""
    try:
        return await asked
    except EngineReplyError as error:
        if not str(error).startswith("NOPERM"):
            raise
        return otherwise


async def _last_delivered(engine: Engine, stream: str) -> bytes | None:
    """The last entry that workers were given; None where nobody has read yet."""
    for group in await engine.call("XINFO", "GROUPS", stream):
        fields = pairs(group)
        if fields[b"name"] == WORKER_GROUP.encode():
            delivered: bytes = fields[b"last-delivered-id"]
            return delivered
    return None


def _time_of(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _report(name: str, parts: list[_Part], now_ms: int, fleet: Fleet, paused: Directive | None) -> QueueReport:
    serving = [worker for worker in fleet.workers if name in worker.queues]
    return QueueReport(
        queue=name,
        waiting=sum(part.waiting for part in parts),
        in_work=sum(part.in_work for part in parts),
        backlog=sum(part.backlog for part in parts),
        oldest_waiting_seconds=_age(now_ms, (part.oldest_waiting_ms for part in parts)),
        oldest_in_work_seconds=_age(now_ms, (part.oldest_in_work_ms for part in parts)),
        workers=len(serving),
        slots=sum(worker.slots for worker in serving),
        paused=paused,
        faults=[part.fault for part in parts if part.fault is not None],
    )


def _age(now_ms: int, times: Iterable[int | None]) -> float | None:
    oldest = min((time for time in times if time is not None), default=None)
    return None if oldest is None else max(0.0, (now_ms - oldest) / 1000)
