"""The one loop of every worker: read as many tasks as there are free slots, run them, complete them, drain.

What a worker holds is compared with what the engine says is pending for it, on every beat: an entry that was delivered
in a reply that never arrived is found and run, a task that was taken away is abandoned.

A task whose turn was stopped is answered and not abandoned: its handler is told by a signal and gives what it has; what
was not started yet, and what does not end within a grace, is answered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.codec import BODY_FIELD, TASK_CODEC, TYPE_FIELD, Unreadable, WireFormat, encode_body, unreadable
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import (
    EngineError,
    EngineReplyError,
    EngineUnavailable,
    ErrorKind,
    MessageTooLarge,
    Superseded,
)
from turnmill.protocol.keys import WORKER_GROUP, Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import Body, ModelReply, ModelTask, Task, ToolReply, UnreadableTask
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.processes import new_process_id
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import (
    Completer,
    Delivery,
    GroupReader,
    acknowledge,
    create_groups,
    is_transient,
    pending_ids,
    read_entry,
)

from .cancellation import Cancellations, stop_reasons
from .liveness import Liveness

_log = get_logger(__name__)
_READ_COUNT_MAX = 32
_HAND_BACK_IDLE_MS = 3_600_000
_AGAIN_SECONDS = 0.1
"""An engine that is reachable and refuses (memory, loading) is not asked again at full speed."""
_LIVENESS_POLL_SECONDS = 0.01
STOP_GRACE_SECONDS = 2.0
"""How long a handler may take to give its reply once its turn was stopped."""


class Held:
    """A task that this worker holds."""

    __slots__ = (
        "abandoned",
        "cancelled",
        "delivery",
        "overdue",
        "partition",
        "settled",
        "stopped",
        "task",
        "turn_id",
        "waiter",
    )

    def __init__(self, delivery: Delivery, partition: int, task: Any) -> None:
        self.delivery = delivery
        self.partition = partition
        self.task = task
        self.turn_id: str = getattr(task, "turn_id", "")
        self.cancelled = AbortSignal()
        self.waiter: asyncio.Task[None] | None = None
        self.stopped = self.settled = self.overdue = False
        self.abandoned = False

    def abandon(self) -> None:
        """It was taken away, or the worker must leave: nobody takes its reply."""
        if not self.abandoned:
            self.abandoned = True
            if self.waiter is not None:
                self.waiter.cancel()

    def stop(self, reason: str) -> None:
        """Its turn was stopped: the handler is told, and answered for when its grace is over."""
        if not self.stopped:
            self.stopped = True
            self.cancelled.set(reason or "the turn was stopped")
            asyncio.get_running_loop().call_later(STOP_GRACE_SECONDS, self._expire)

    def _expire(self) -> None:
        if not self.settled and self.waiter is not None:
            self.overdue = True
            self.waiter.cancel()


Handler = Callable[[Any, int, AbortSignal], Awaitable[Body]]
"""Runs one task of a partition and gives its result, soon once the signal is set: what it has, with an error of kind
`aborted`. Raises `Superseded` where nobody wants it any more. The signal is the task's own; a handler may set it too."""


def failure_of(task: Task, error: ErrorInfo) -> ModelReply | ToolReply:
    """The result of a task that could not be run at all."""
    if isinstance(task, ModelTask):
        return task.answer(ModelReply, error=error)
    return task.answer(ToolReply, error=error)


def aborted_error(cancelled: AbortSignal) -> ErrorInfo:
    """What the reply to a task of a stopped turn says."""
    return ErrorInfo(kind=ErrorKind.ABORTED, message=cancelled.reason or "the turn was stopped")


class Consumer:
    """A worker process's consumer over the queues it serves, in all partitions."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        settings: Settings,
        *,
        role: str,
        queues: Sequence[str],
        concurrency: int,
        takes: type[Body],
        handler: Handler,
        wire: WireFormat = "json",
        details: dict[str, Any] | None = None,
        cancellations: Cancellations | None = None,
    ) -> None:
        """`queues` are stream names behind the partition, such as `tool:default`; `takes` is the kind of their tasks.
        Consumers of one process may share their `cancellations`, and with it a connection."""
        self.worker_id = new_process_id(role)
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._concurrency = concurrency
        self._readable = (Unreadable, takes)
        self._handler = handler
        self._wire: WireFormat = wire
        self._streams = {keys_.base + queue: keys_.partition for queue in queues for keys_ in keys.partitions}
        self._order = list(self._streams)
        self._held: dict[tuple[str, bytes], Held] = {}
        self._suspects: set[tuple[str, bytes]] = set()
        self._slot_free = asyncio.Event()
        self._stop = asyncio.Event()
        self._reader = GroupReader(engine, WORKER_GROUP, self.worker_id)
        self._completer = Completer(engine)
        self._cancellations = cancellations or Cancellations(engine, keys)
        self._looking: asyncio.Task[None] | None = None
        self.clock = ServerClock(engine)
        self._description = {
            "id": self.worker_id,
            "role": role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "queues": list(queues),
            "slots": concurrency,
            "language": "python",
            "started_at": time.time(),
            **(details or {}),
        }
        self._liveness = Liveness(
            engine.url,
            [keys_.alive(self.worker_id) for keys_ in keys.partitions],
            settings.liveness_seconds,
            settings.heartbeat_seconds,
            (keys.workers, self.worker_id, self._describe),
        )
        # A read must end before the liveness time, so that a frozen reader cannot swallow what others already retry.
        self._block_ms = max(50, min(1000, int(settings.liveness_seconds * 1000 / 3)))
        self.counters: dict[str, int] = {}

    def stop(self) -> None:
        """Drain: read nothing more, finish what is held, hand back the rest."""
        self._stop.set()
        self._slot_free.set()

    async def run(self) -> None:
        """Until `stop`."""
        await create_groups(self._engine, self._order, WORKER_GROUP)
        await self.clock.synchronize()
        await asyncio.to_thread(self._liveness.start)
        self._cancellations.attach(self)
        beating: asyncio.Task[object] = asyncio.create_task(self._beat())
        reading: asyncio.Task[object] = asyncio.create_task(self._read())
        stopping: asyncio.Task[object] = asyncio.create_task(self._stop.wait())
        _log.info("worker started", worker=self.worker_id, queues=self._description["queues"], slots=self._concurrency)
        try:
            done, _ = await asyncio.wait({beating, reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._stop.set()
            await self._reader.interrupt()
            await asyncio.gather(reading, stopping, return_exceptions=True)
            await self._drain()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await self._cancellations.detach(self)
            await asyncio.to_thread(self._liveness.stop)
            _log.info("worker stopped", worker=self.worker_id, **self.counters)

    # ---- read

    async def _read(self) -> None:
        try:
            while not self._stop.is_set():
                free = self._concurrency - len(self._held)
                if free <= 0:
                    self._slot_free.clear()
                    await self._slot_free.wait()
                    continue
                lapses = self._liveness.lapses
                streams, count = self._share(free)
                deliveries = await self._reader.read(streams, count, self._block_ms)
                if deliveries and (self._liveness.lapses != lapses or not self._liveness.is_valid):
                    deliveries = await self._still_owned(deliveries)
                for delivery in deliveries:
                    self._accept(delivery)
        finally:
            self._reader.close()

    def _share(self, free: int) -> tuple[list[str], int]:
        """COUNT counts per stream: divide the free slots, and rotate where there are fewer slots than streams."""
        if free >= len(self._order):
            return self._order, min(free // len(self._order), _READ_COUNT_MAX)
        self._order = self._order[free:] + self._order[:free]
        return self._order[-free:], 1

    async def _still_owned(self, deliveries: list[Delivery]) -> list[Delivery]:
        """After a freeze: what was read may have been given to a retry already; start only what is still ours."""
        self._count("doubted_reads")
        # A sign of life first: what is ours under it cannot be taken away between this look and the start.
        while not self._liveness.is_valid and not self._stop.is_set():
            await asyncio.sleep(_LIVENESS_POLL_SECONDS)
        owned = []
        for delivery in deliveries:
            try:
                entry = await self._engine.call(
                    "XPENDING", delivery.stream, WORKER_GROUP, delivery.entry_id, delivery.entry_id, 1, self.worker_id
                )
            except EngineError:
                continue  # unknown: the next beat finds it if it is ours
            if entry:
                owned.append(delivery)
        return owned

    def _accept(self, delivery: Delivery) -> None:
        if (delivery.stream, delivery.entry_id) in self._held:
            return  # found pending meanwhile
        held = Held(delivery, self._streams[delivery.stream], self._task(delivery.fields))
        self._held[delivery.stream, delivery.entry_id] = held
        held.waiter = asyncio.get_running_loop().create_task(self._run_one(held))

    def _task(self, fields: dict[bytes, bytes] | None) -> Body | Unreadable:
        if not fields:
            return Unreadable("deleted while it was pending", "", b"")
        task = TASK_CODEC.decode_fields(fields)
        if isinstance(task, self._readable):
            return task
        return unreadable(f"a {task.type} does not belong into this stream", fields[TYPE_FIELD], fields[BODY_FIELD])

    # ---- run

    async def _run_one(self, held: Held) -> None:
        try:
            result = await self._settled(held)
            body = None if result is None else self._encode(held, result)
            while result is not None and body is not None:
                try:
                    results = self._keys.partitions[held.partition].results
                    await self._completer.complete(results, held.delivery, result.type, body)
                    break
                except EngineUnavailable:
                    # The result may be stored or not. A copy is harmless: it meets a call that has its result.
                    self._count("results_sent_again")
                    await self._engine.ready()
                    await asyncio.sleep(_AGAIN_SECONDS)
        except asyncio.CancelledError:
            if not held.abandoned:
                raise
            self._count("abandoned")
        finally:
            self._held.pop((held.delivery.stream, held.delivery.entry_id), None)
            self._slot_free.set()

    async def _settled(self, held: Held) -> Body | None:
        """The result, or what stands in for it where the handler has overrun its grace."""
        try:
            return await self._result(held)
        except asyncio.CancelledError:
            if held.abandoned or not held.overdue or held.waiter is None:
                raise
            held.waiter.uncancel()
            self._count("stopped_after_grace")
            return failure_of(held.task, aborted_error(held.cancelled))
        finally:
            held.settled = True

    async def _result(self, held: Held) -> Body | None:
        task = held.task
        if isinstance(task, Unreadable):
            self._count("unreadable")
            return UnreadableTask(
                stream=held.delivery.stream,
                entry_id=held.delivery.entry_id.decode(),
                reason=task.reason,
                entry_type=task.entry_type,
                entry_body=task.body,
            )
        while True:
            try:
                if self._must_look(held):
                    await self._look_at(held)
                if held.stopped:
                    self._count("stopped_before_start")
                    return failure_of(task, aborted_error(held.cancelled))
                return await self._handler(task, held.partition, held.cancelled)
            except Superseded:
                self._count("superseded")
                await self._acknowledge(held.delivery)
                return None
            except EngineUnavailable:
                # Nothing is decided: begin again when the engine is back, unless the task is another's by then.
                await self._engine.ready()
                await asyncio.sleep(_AGAIN_SECONDS)
            except EngineReplyError as error:
                if not is_transient(error):
                    return failure_of(task, ErrorInfo(kind=ErrorKind.INTERNAL, message=str(error)))
                await asyncio.sleep(_AGAIN_SECONDS)
            except Exception as error:
                # A fault of ours must cost one call, not the worker, and must not run again for ever.
                _log.exception("task failed", worker=self.worker_id, task=task.type, turn=task.turn_id, call=task.call)
                return failure_of(task, ErrorInfo(kind=ErrorKind.INTERNAL, message=f"{type(error).__name__}: {error}"))

    def _encode(self, held: Held, result: Body) -> bytes:
        """A result above the limit becomes an error that says so, not a message that nobody can read."""
        try:
            return encode_body(result, self._wire, self._settings.payload_bytes_max)
        except MessageTooLarge as error:
            self._count("results_too_large")
            text = f"{error} (TURNMILL_PAYLOAD_BYTES_MAX)"
            return encode_body(
                failure_of(held.task, ErrorInfo(kind=ErrorKind.MESSAGE_TOO_LARGE, message=text)), self._wire
            )

    async def _acknowledge(self, delivery: Delivery) -> None:
        with contextlib.suppress(EngineError):  # else it is found pending, and run into the same answer
            await acknowledge(self._engine, delivery, WORKER_GROUP)

    # ---- stopped turns

    def turn_stopped(self, turn_id: str, reason: str) -> None:
        """Heard of a stopped turn: its tasks here are told."""
        for held in self._held.values():
            if held.turn_id == turn_id:
                self._count("stopped")
                held.stop(reason)

    def _must_look(self, held: Held) -> bool:
        """Whether only its marker says if a task's turn is stopped. Where that is known, the task is told."""
        reason = self._cancellations.reason(held.turn_id)
        if reason is not None:
            held.stop(reason)
        return not held.stopped and not self._cancellations.covers(held.delivery.entry_id)

    async def _look_at(self, held: Held) -> None:
        for reason in (
            await stop_reasons(self._engine, self._keys.partitions[held.partition], [held.turn_id])
        ).values():
            held.stop(reason)

    def cancellations_missed(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look_for_stopped())

    async def _look_for_stopped(self) -> None:
        """The markers of all turns whose tasks are held."""
        running: dict[int, set[str]] = {}
        for held in self._held.values():
            if held.turn_id and not held.stopped:
                running.setdefault(held.partition, set()).add(held.turn_id)
        for partition, turn_ids in running.items():
            try:
                stopped = await stop_reasons(self._engine, self._keys.partitions[partition], list(turn_ids))
            except EngineError as error:
                _log.warning("cannot look for stopped turns", worker=self.worker_id, error=str(error))
                return
            for turn_id, reason in stopped.items():
                self.turn_stopped(turn_id, reason)

    # ---- beat

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds * random.uniform(0.8, 1.2))
            try:
                await self.clock.synchronize()
                await self._look_for_stopped()
                await self._compare()
            except EngineError as error:
                _log.warning("cannot compare what is held", worker=self.worker_id, error=str(error))

    async def _compare(self) -> None:
        """Held against pending. A reply may be on its way, so what is unknown is acted on at the second look."""
        unknown: set[tuple[str, bytes]] = set()
        for stream in self._streams:
            before = [held for (name, _), held in self._held.items() if name == stream]
            pending = await pending_ids(self._engine, stream, WORKER_GROUP, self.worker_id, len(before))
            if pending is None:
                continue
            for held in before:
                if held.delivery.entry_id not in pending:
                    held.abandon()
            unknown |= {(stream, entry_id) for entry_id in pending if (stream, entry_id) not in self._held}
        again = unknown & self._suspects
        self._suspects = unknown - again
        for stream, entry_id in again:
            self._count("found_pending")
            if (stream, entry_id) not in self._held and not self._stop.is_set():
                self._accept(await read_entry(self._engine, stream, entry_id))

    # ---- leave

    async def _drain(self) -> None:
        running = {held.waiter for held in self._held.values() if held.waiter is not None}
        if running:
            await asyncio.wait(running, timeout=self._settings.drain_timeout)
        for held in list(self._held.values()):
            held.abandon()
            await self._hand_back(held.delivery)
        left = {held.waiter for held in self._held.values() if held.waiter is not None}
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _hand_back(self, delivery: Delivery) -> None:
        """Make the entry look long idle, so that the coordinator takes it at its next look."""
        self._count("handed_back")
        with contextlib.suppress(EngineError):  # else it is taken when the liveness time is over
            await self._engine.call(
                "XCLAIM", delivery.stream, WORKER_GROUP, self.worker_id, 0, delivery.entry_id,
                "IDLE", _HAND_BACK_IDLE_MS, "JUSTID",
            )  # fmt: skip

    def _describe(self) -> bytes:
        return msgspec.json.encode({**self._description, "used": len(self._held), "seen_at": time.time()})

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
