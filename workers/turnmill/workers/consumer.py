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
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from turnmill.protocol.acknowledgement import Acknowledgement
from turnmill.protocol.codec import (
    BODY_FIELD,
    TASK_CODEC,
    TYPE_FIELD,
    Unreadable,
    WireFormat,
    encode_body,
    unreadable,
    unreadable_report,
)
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.directives import Directives
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
from turnmill.protocol.messages import Body
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.processes import new_process_id
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import (
    Completer,
    Delivery,
    acknowledge,
    create_groups,
    is_transient,
    pending_ids,
    read_entry,
)

from .cancellation import Cancellations, stop_reasons
from .cluster_liveness import liveness
from .held import Handler, Held, aborted_error, failure_of
from .partition_reads import PartitionReads
from .sendable import sendable
from .shared_reads import SharedReads

_log = get_logger(__name__)
_HAND_BACK_IDLE_MS = 3_600_000
_AGAIN_SECONDS = 0.1
"""An engine that is reachable and refuses (memory, loading) is not asked again at full speed."""
_LIVENESS_POLL_SECONDS = 0.01
_FOUND_MAX = 1000


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
        self.worker_id = new_process_id(role, engine.url)
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._concurrency = concurrency
        self._readable = (Unreadable, takes)
        self._handler = handler
        self._wire: WireFormat = wire
        self._streams = {keys_.base + queue: keys_.partition for queue in queues for keys_ in keys.partitions}
        self._queues = list(queues)
        self._held: dict[tuple[str, bytes], Held] = {}
        self._suspects: set[tuple[str, bytes]] = set()
        self._found: dict[tuple[str, bytes], None] = {}
        """What was found pending and started, the newest: the reply that it was first read in may still come."""
        self._slot_free = asyncio.Event()
        self._stop = asyncio.Event()
        self._completer = Completer(engine, Acknowledgement.of(settings))
        self._directives = Directives(engine, keys, self.worker_id, list(queues), self._directed)
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
        self._liveness = liveness(
            engine,
            [keys_.alive(self.worker_id) for keys_ in keys.partitions],
            settings.liveness_seconds,
            settings.heartbeat_seconds,
            (keys.workers, self.worker_id, self._describe),
        )
        self._reads = self._make_reads(settings)
        self.counters: dict[str, int] = {}

    def _make_reads(self, settings: Settings) -> SharedReads | PartitionReads:
        engine, keys, queues, free = self._engine, self._keys, self._queues, self._slot_free
        # A read must end before the liveness time, so that a frozen reader cannot swallow what others already retry.
        block_ms = max(50, min(1000, int(settings.liveness_seconds * 1000 / 3)))
        if engine.is_cluster:
            now_ms = self.clock.now_ms
            return PartitionReads(engine, keys, settings, self, queues, self._concurrency, block_ms, free, now_ms)
        return SharedReads(engine, keys, self, queues, block_ms, free, Acknowledgement.of(settings))

    def stop(self) -> None:
        """Drain: read nothing more, finish what is held, hand back the rest."""
        self._stop.set()
        self._reads.stop()

    async def run(self) -> None:
        """Until `stop`."""
        await create_groups(self._engine, self._streams, WORKER_GROUP)
        await self.clock.synchronize()
        await asyncio.to_thread(self._liveness.start)
        with contextlib.suppress(EngineError):
            await self._directives.look()
        self._cancellations.attach(self)
        directed: asyncio.Task[object] = asyncio.create_task(self._directives.follow())
        beating: asyncio.Task[object] = asyncio.create_task(self._beat())
        reading: asyncio.Task[object] = asyncio.create_task(self._reads.run())
        stopping: asyncio.Task[object] = asyncio.create_task(self._stop.wait())
        _log.info("worker started", worker=self.worker_id, queues=self._description["queues"], slots=self._concurrency)
        try:
            done, _ = await asyncio.wait({beating, reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.stop()
            await self._reads.interrupt()
            await asyncio.gather(reading, stopping, return_exceptions=True)
            await self._drain()
            beating.cancel()
            directed.cancel()
            await asyncio.gather(beating, directed, return_exceptions=True)
            with contextlib.suppress(EngineError):
                await self._directives.leave()
            await self._cancellations.detach(self)
            await asyncio.to_thread(self._liveness.stop)
            _log.info("worker stopped", worker=self.worker_id, **self.counters)

    # ---- read

    def free_slots(self) -> int:
        return self._concurrency - len(self._held)

    def open_queues(self) -> list[str]:
        """Those that are not paused."""
        paused = self._directives.paused
        return [queue for queue in self._queues if queue not in paused] if paused else self._queues

    async def receive(self, partition: int, reading: Awaitable[list[Delivery]]) -> int:
        """Take what a read gives. Where this worker's sign of life was in doubt meanwhile, it looks before it starts."""
        lapses = self._liveness.lapses_in(partition)
        deliveries = await reading
        if deliveries and not (self._liveness.is_valid_in(partition) and self._liveness.lapses_in(partition) == lapses):
            deliveries = await self._still_owned(deliveries)
        for delivery in deliveries:
            self._accept(delivery)
        return len(deliveries)

    def _directed(self) -> None:
        """An operator has paused or resumed a queue, or asks to drain. A read that is blocked ends, so that it reads no
        queue that was paused meanwhile."""
        if self._directives.draining:
            self.stop()
        self._slot_free.set()
        self._interrupting = asyncio.get_running_loop().create_task(self._reads.interrupt())

    async def _still_owned(self, deliveries: list[Delivery]) -> list[Delivery]:
        """After a freeze: what was read may have been given to a retry already; start only what is still ours."""
        self._count("doubted_reads")
        # A sign of life first: what is ours under it cannot be taken away between this look and the start.
        partition = self._streams[deliveries[0].stream]
        while not self._liveness.is_valid_in(partition) and not self._stop.is_set():
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
        name = delivery.stream, delivery.entry_id
        if name not in self._held and name not in self._found:  # else found pending meanwhile, and maybe done
            self._start(delivery)

    def _start(self, delivery: Delivery) -> None:
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
            if result is not None:
                await self._send(held, result)
        except asyncio.CancelledError:
            if not held.abandoned:
                raise
            self._count("abandoned")
        except Exception:
            # A fault of ours. A task that nobody answers for is found pending, and would be run again for ever.
            self._count("results_lost")
            _log.exception("no result could be sent", worker=self.worker_id, turn=held.turn_id)
            await self._acknowledge(held.delivery)
        finally:
            self._held.pop((held.delivery.stream, held.delivery.entry_id), None)
            self._slot_free.set()

    async def _send(self, held: Held, result: Body) -> None:
        kind, body = self._encoded(held, result)
        while True:
            try:
                results = self._keys.partitions[held.partition].results
                return await self._completer.complete(results, held.delivery, kind, body)
            except EngineUnavailable:
                # The result may be stored or not. A copy is harmless: it meets a call that has its result.
                self._count("results_sent_again")
                await self._engine.ready()
                await asyncio.sleep(_AGAIN_SECONDS)

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
            delivery = held.delivery
            return unreadable_report(task, delivery.stream, delivery.entry_id, delivery.fields or {})
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
                    return self._failure(held, ErrorInfo(kind=ErrorKind.INTERNAL, message=str(error)))
                await asyncio.sleep(_AGAIN_SECONDS)
            except Exception as error:
                # A fault of ours must cost one call, not the worker, and must not run again for ever.
                _log.exception("task failed", worker=self.worker_id, task=task.type, turn=task.turn_id, call=task.call)
                return self._failure(
                    held, ErrorInfo(kind=ErrorKind.INTERNAL, message=f"{type(error).__name__}: {error}")
                )

    def _encoded(self, held: Held, result: Body) -> tuple[str, bytes]:
        """The type and body of a result. One that no message can carry, or that is above the limit, becomes an error that
        says so."""
        try:
            return result.type, encode_body(result, self._wire, self._settings.payload_bytes_max)
        except MessageTooLarge as error:
            self._count("results_too_large")
            kind, text = ErrorKind.MESSAGE_TOO_LARGE, f"{error} (TURNMILL_PAYLOAD_BYTES_MAX)"
        except Exception as error:  # a value of the handler's that the format does not know
            self._count("results_unsendable")
            kind, text = ErrorKind.INTERNAL, f"the result cannot be sent: {type(error).__name__}: {error}"
        failure = self._failure(held, ErrorInfo(kind=kind, message=text))
        return failure.type, encode_body(failure, self._wire)

    def _failure(self, held: Held, error: ErrorInfo) -> Body:
        """What stands in for a result; of an entry that is no task, what is known of it but its content."""
        task, delivery = held.task, held.delivery
        if isinstance(task, Unreadable):
            report = unreadable_report(task, delivery.stream, delivery.entry_id, {})
            return msgspec.structs.replace(report, entry_body=b"", reason=f"{task.reason}; {error.message}")
        return failure_of(task, sendable(error))

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
        trouble: EngineError | None = None
        for stream in self._streams:
            before = [held for (name, _), held in self._held.items() if name == stream]
            try:
                pending = await pending_ids(self._engine, stream, WORKER_GROUP, self.worker_id, len(before))
            except EngineError as error:  # of one shard of a cluster, maybe: the others are looked at
                trouble = error
                continue
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
            if (stream, entry_id) in self._held or self._stop.is_set():
                continue
            delivery = await read_entry(self._engine, stream, entry_id)
            if (stream, entry_id) not in self._held:
                self._found[stream, entry_id] = None
                self._start(delivery)
        while len(self._found) > _FOUND_MAX:
            del self._found[next(iter(self._found))]
        if trouble is not None:
            raise trouble

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
        state = "draining" if self._stop.is_set() else "running"
        return msgspec.json.encode(
            {**self._description, "state": state, "used": len(self._held), "seen_at": time.time()}
        )

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
