"""Puts lost deliveries back through the machine's door.

For every partition it owns, the coordinator looks for
- task deliveries whose worker is gone: taken away in one script, told to the machine as `delivery_lost`;
- messages that a former owner of the partition had read and not acknowledged: claimed and handled;
- messages that it was itself given in a reply that never arrived: found pending on two looks, then handled;
- tool calls that nobody takes: told to the machine as `call_waiting`, once, and once more at their start timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from turnmill.protocol.codec import TASK_CODEC, encode_body
from turnmill.protocol.connection import Argument, Engine, pairs
from turnmill.protocol.dead_letters import is_wrong_type
from turnmill.protocol.errors import EngineReplyError
from turnmill.protocol.keys import COORDINATOR_GROUP, WORKER_GROUP, Keys, pool_of_queue
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import CallWaiting, ToolTask
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.streams import (
    TAKE_LOST_DELIVERY,
    Delivery,
    append_message,
    create_groups,
    is_group_missing,
    pending_ids,
)

from .directives import read_pause
from .partition import Partition

_log = get_logger(__name__)
_TAKE_MAX = 200
_CLAIM_MAX = 500
_ALONE_FROM = 2
"""Deliveries from which on an entry of a lost coordinator is handled alone."""
_UNDELIVERED_MAX = 1000
WAITING_AFTER_MS = 2000
_ANY_BYTES = "surrogateescape"


def _in_order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)


def _groups(pending: list[Any]) -> Iterator[tuple[list[bytes], int]]:
    """Entries of a lost coordinator in their order: ids, and how often they were delivered. What several coordinators
    were lost with may be why, so each of these goes alone, and is not counted for what others did."""
    together: list[bytes] = []
    for entry_id, _, _, deliveries in pending:
        if deliveries < _ALONE_FROM:
            together.append(entry_id)
            continue
        if together:
            yield together, 1
        together = []
        yield [entry_id], deliveries
    if together:
        yield together, 1


def _raw(name: str) -> bytes:
    """A worker may call itself anything, also what is no text."""
    return name.encode("utf-8", _ANY_BYTES)


class Reclaimer:
    """The caretaker of one coordinator's partitions."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        consumer: str,
        liveness_seconds: float,
        clock: ServerClock,
        deliveries_max: int,
    ) -> None:
        """What `deliveries_max` coordinators were lost with, one after the other, is given up."""
        self._engine = engine
        self._keys = keys
        self._consumer = consumer
        self._liveness_ms = int(liveness_seconds * 1000)
        self._clock = clock
        self._deliveries_max = deliveries_max
        self._suspects: dict[str, set[bytes]] = {}
        self._announced: dict[tuple[str, bytes], bool] = {}

    async def look(self, partition: Partition, *, tasks: bool = True) -> None:
        """One look at one partition; without `tasks` only at what coordinators left."""
        await self.adopt(partition)
        await self._find_own(partition)
        for stream in partition.task_streams if tasks else []:
            try:
                await self._find_lost(partition, stream)
                if pool_of_queue(stream.removeprefix(partition.keys.base)) is None:
                    await self._find_waiting(partition, stream)
            except EngineReplyError as error:
                if is_group_missing(error):
                    await create_groups(self._engine, [stream], WORKER_GROUP)
                elif is_wrong_type(error):
                    await partition.displace_wrong_keys()
                else:
                    _log.warning("stream not looked after", stream=stream, error=str(error))

    async def adopt(self, partition: Partition) -> None:
        """Handle what other consumers of the coordinator group left. Never our own: that is in flight."""
        for stream in (partition.keys.inbox, partition.keys.results):
            for consumer in await self._consumers(stream, COORDINATOR_GROUP):
                if consumer["name"] == self._consumer:
                    continue
                if consumer["pending"]:
                    await self._claim_all(partition, stream, consumer["name"])
                elif consumer["idle"] > 20 * self._liveness_ms:
                    await self._forget_consumer(partition, stream, COORDINATOR_GROUP, consumer["name"])

    async def _claim_all(self, partition: Partition, stream: str, consumer: str) -> None:
        while True:
            pending = await self._engine.call(
                "XPENDING", stream, COORDINATOR_GROUP, "-", "+", _CLAIM_MAX, _raw(consumer)
            )
            if not pending:
                return
            for ids, deliveries in _groups(pending):
                claimed = await self._engine.call("XCLAIM", stream, COORDINATOR_GROUP, self._consumer, 0, *ids)
                found = {entry_id: pairs(fields) for entry_id, fields in claimed}
                gone = [entry_id for entry_id in ids if entry_id not in found]
                if gone:  # deleted while pending: nothing is left of them to handle
                    await self._engine.call("XACK", stream, COORDINATOR_GROUP, *gone)
                batch = [Delivery(stream, entry_id, fields) for entry_id, fields in found.items()]
                is_poison = deliveries >= max(self._deliveries_max, _ALONE_FROM + 1)
                reason = f"{deliveries} coordinators were lost while they had it (TURNMILL_MAX_ATTEMPTS)"
                await partition.handle(batch, given_up=reason if is_poison else None)

    async def _find_own(self, partition: Partition) -> None:
        for stream in (partition.keys.inbox, partition.keys.results):
            held = {entry_id for name, entry_id in partition.in_flight if name == stream}
            pending = await pending_ids(self._engine, stream, COORDINATOR_GROUP, self._consumer, len(held))
            unknown = (pending or set()) - {entry_id for name, entry_id in partition.in_flight if name == stream}
            again = sorted(unknown & self._suspects.get(stream, set()), key=_in_order)
            self._suspects[stream] = unknown - set(again)
            if again:
                entries = await asyncio.gather(
                    *[self._engine.call("XRANGE", stream, entry_id, entry_id) for entry_id in again]
                )
                found = [
                    Delivery(stream, entry_id, pairs(entry[0][1]) if entry else None)
                    for entry_id, entry in zip(again, entries, strict=True)
                ]
                await partition.handle(found)

    async def _find_lost(self, partition: Partition, stream: str) -> None:
        for consumer in await self._consumers(stream, WORKER_GROUP):
            forgotten = consumer["idle"] > 20 * self._liveness_ms
            while consumer["pending"] or forgotten:
                taken = await self._take(partition, stream, consumer["name"], forget=forgotten)
                if taken < _TAKE_MAX:
                    break

    async def _take(self, partition: Partition, stream: str, consumer: str, *, forget: bool) -> int:
        names: list[Argument] = [stream, partition.keys.results, _raw(partition.keys.alive(consumer))]
        arguments: list[Argument] = [WORKER_GROUP, _raw(consumer), self._liveness_ms, _TAKE_MAX, int(forget)]
        taken: int = await TAKE_LOST_DELIVERY.run(self._engine, names, arguments)
        if taken > 0:
            partition.counters["lost_deliveries"] = partition.counters.get("lost_deliveries", 0) + taken
        return taken

    async def _forget_consumer(self, partition: Partition, stream: str, group: str, consumer: str) -> None:
        names: list[Argument] = [stream, partition.keys.results, _raw(partition.keys.alive(consumer))]
        await TAKE_LOST_DELIVERY.run(self._engine, names, [group, _raw(consumer), self._liveness_ms, 0, 1])

    async def _find_waiting(self, partition: Partition, stream: str) -> None:
        groups = await self._engine.call("XINFO", "GROUPS", stream)
        delivered = next(
            (pairs(g)[b"last-delivered-id"] for g in groups if pairs(g)[b"name"] == WORKER_GROUP.encode()), b"0-0"
        )
        entries = await self._engine.call("XRANGE", stream, b"(" + delivered, "+", "COUNT", _UNDELIVERED_MAX)
        now_ms = self._clock.now_ms()
        waiting = [entry for entry in entries if now_ms - int(entry[0].split(b"-")[0]) >= WAITING_AFTER_MS]
        if waiting:
            pause = await read_pause(self._engine, self._keys, stream.removeprefix(partition.keys.base))
            paused = None if pause is None else pause.text
            for entry_id, fields in waiting:
                await self._announce(partition, stream, entry_id, fields, now_ms, paused)
        while len(self._announced) > 10 * _UNDELIVERED_MAX:
            del self._announced[next(iter(self._announced))]

    async def _announce(
        self, partition: Partition, stream: str, entry_id: bytes, fields: Any, now_ms: int, paused: str | None
    ) -> None:
        task = TASK_CODEC.decode_fields(pairs(fields))
        if not isinstance(task, ToolTask):
            return
        expired = now_ms > task.start_by_ms
        if self._announced.get((stream, entry_id)) is expired:
            return
        self._announced[stream, entry_id] = expired
        finding = task.answer(CallWaiting, expired=expired, paused=paused)
        await append_message(self._engine, partition.keys.results, finding.type, encode_body(finding))

    async def _consumers(self, stream: str, group: str) -> list[dict[str, Any]]:
        reply = await self._engine.call("XINFO", "CONSUMERS", stream, group)
        consumers = [pairs(item) for item in reply]
        return [
            {"name": item[b"name"].decode("utf-8", _ANY_BYTES), "pending": item[b"pending"], "idle": item[b"idle"]}
            for item in consumers
        ]
