"""The tool worker: a tool task in, progress while it runs, one reply out. A tool's error is content, not a crash.

Calls to the application's hooks come as tool tasks too, from queues of their own. A large result does not travel with the
reply: it is stored first, and the reply refers to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.blobs import with_blobs
from turnmill.protocol.codec import WireFormat, encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, ToolResult
from turnmill.protocol.errors import EngineError, EngineReplyError, EngineUnavailable, ErrorKind, MessageTooLarge
from turnmill.protocol.keys import Keys, tool_queue
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ToolProgress, ToolReply, ToolTask
from turnmill.protocol.session_values import SessionValues
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import append_message, is_transient
from turnmill.protocol.values import unpack_value

from .cancellation import Cancellations
from .consumer import Consumer
from .held import aborted_error
from .hook_calls import call_hook
from .hooks import Hook
from .telemetry import observed
from .tools import Tool, ToolContext, ToolOutcome, run_tool

_log = get_logger(__name__)
_AGAIN_SECONDS = 0.1


class ToolWorker:
    """Runs the calls of a set of tools, and of the hooks that agents and tools carry."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        settings: Settings,
        tools: Mapping[str, Tool[..., Any]],
        *,
        hooks: Mapping[str, Hook[..., Any]] | None = None,
        queues: list[str] | None = None,
        concurrency: int | None = None,
        cancellations: Cancellations | None = None,
    ) -> None:
        """`queues` restricts the worker to some of the queues of its tools and hooks."""
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._wire: WireFormat = settings.wire
        carried: list[Tool[..., Any] | Hook[..., Any]] = [*tools.values(), *(hooks or {}).values()]
        served = set(queues or [each.spec.queue for each in carried]) or {"default"}
        self.tools: dict[str, Tool[..., Any]] = {}
        self.hooks: dict[str, Hook[..., Any]] = {}
        self._details: dict[str, list[str]] = {"tools": [], "hooks": []}
        self._slots: dict[str, asyncio.Semaphore] = {}
        for each in carried:
            if each.spec.queue in served:
                self.add(each)
        self.consumer = Consumer(
            engine,
            keys,
            settings,
            role="tools",
            queues=[tool_queue(queue) for queue in sorted(served)],
            concurrency=concurrency or settings.tool_concurrency,
            takes=ToolTask,
            handler=self._handle,
            wire=settings.wire,
            details=self._details,
            cancellations=cancellations,
        )

    def stop(self) -> None:
        self.consumer.stop()

    async def run(self) -> None:
        """Register the tools and serve them, until `stop`."""
        await self.register()
        await self.consumer.run()

    def add(self, carried: Tool[..., Any] | Hook[..., Any]) -> None:
        """One more tool or hook of a queue that this worker serves; `register` tells the registry of tools."""
        if isinstance(carried, Hook):
            self.hooks[carried.name] = carried
            self._details["hooks"][:] = sorted(self.hooks)
            return
        self.tools[carried.name] = carried
        self._details["tools"][:] = sorted(self.tools)
        self._slots.pop(carried.name, None)
        if carried.spec.concurrency:
            self._slots[carried.name] = asyncio.Semaphore(carried.spec.concurrency)

    async def register(self) -> None:
        """Write the tools' specs to the registry: the worker that runs a tool knows best what it is."""
        if self.tools:
            fields = [item for name, tool in self.tools.items() for item in (name, msgspec.json.encode(tool.spec))]
            try:
                await self._engine.call("HSET", self._keys.tools, *fields)
            except EngineReplyError as error:
                if not str(error).startswith("NOPERM"):
                    raise
                _log.info("tools are left to others to register: the engine's user may not", tools=sorted(self.tools))

    async def _handle(self, task: ToolTask, partition: int, cancelled: AbortSignal) -> ToolReply:
        try:
            with observed("tool", task) as observation:
                if self.consumer.clock.now_ms() > task.start_by_ms:
                    reply = task.answer(ToolReply, error=_started_late(task))
                elif task.hook is not None:
                    reply = await self._call_hook(task, partition, cancelled)
                else:
                    reply = await self._call(task, partition, cancelled)
                observation.reply(reply)
                return reply
        except EngineError:
            raise
        except Exception as error:
            # A fault of ours must cost one call: a task without an answer would be found pending and fail again.
            _log.exception("tool call failed", tool=task.tool, turn=task.turn_id, call=task.call)
            return task.answer(
                ToolReply, error=ErrorInfo(kind=ErrorKind.INTERNAL, message=f"{type(error).__name__}: {error}")
            )

    async def _call(self, task: ToolTask, partition: int, cancelled: AbortSignal) -> ToolReply:
        tool = self.tools.get(task.tool)
        if tool is None:
            return task.answer(ToolReply, error=self._unknown(task))
        slots = self._slots.get(task.tool)
        if slots is None:
            return await self._run(tool, task, partition, cancelled)
        if not await _acquired(slots, cancelled):
            return task.answer(ToolReply, error=aborted_error(cancelled))
        try:
            if cancelled.is_set():
                return task.answer(ToolReply, error=aborted_error(cancelled))
            if self.consumer.clock.now_ms() > task.start_by_ms:
                return task.answer(ToolReply, error=_started_late(task))
            return await self._run(tool, task, partition, cancelled)
        finally:
            slots.release()

    async def _run(self, tool: Tool[..., Any], task: ToolTask, partition: int, cancelled: AbortSignal) -> ToolReply:
        context = ToolContext(
            tool_call_id=task.tool_call_id,
            tool_name=task.tool,
            turn_id=task.turn_id,
            session_id=task.session_id,
            agent_id=task.agent_id,
            step_number=task.step_number,
            attempt=task.attempt,
            idempotency_key=task.idempotency_key,
            timeout_seconds=task.timeout_seconds,
            idle_timeout_seconds=task.idle_timeout_seconds,
            metadata=unpack_value(task.metadata),
            cancelled=cancelled,
            send_progress=_ProgressSender(self, task, partition),
            state=lambda: SessionValues(self._engine, self._keys.partitions[partition], task.session_id),
        )
        try:
            outcome = await run_tool(tool, unpack_value(task.arguments), context)
        finally:
            cancelled.set("the call has ended")
        if outcome.exception is not None:
            _log.info("tool failed", tool=task.tool, turn=task.turn_id, call=task.call, error=repr(outcome.exception))
        return await self._reply(task, partition, outcome)

    async def _reply(self, task: ToolTask, partition: int, outcome: ToolOutcome) -> ToolReply:
        result: ToolResult | None = outcome.result
        error = outcome.error
        if error is not None and error.kind == ErrorKind.ABORTED:
            result = None  # it has none: the machine says what became of the call
        elif outcome.result_bytes > self._settings.blob_threshold:
            try:
                result = await self._stored(partition, outcome)
            except MessageTooLarge as refusal:
                result, error = None, ErrorInfo(kind=ErrorKind.MESSAGE_TOO_LARGE, message=str(refusal))
        return task.answer(ToolReply, result=result, error=error, duration_seconds=outcome.duration_seconds)

    async def _stored(self, partition: int, outcome: ToolOutcome) -> ToolResult:
        """The result with what is large in it stored apart. The tool has run: it must not run again for an engine that is
        away or full, so this waits for it. Raises `MessageTooLarge`."""
        settings = self._settings
        if outcome.result_bytes > settings.payload_bytes_max:
            raise MessageTooLarge(
                f"the result of {outcome.result_bytes} bytes is above the limit of {settings.payload_bytes_max} "
                "(TURNMILL_PAYLOAD_BYTES_MAX): return less of it, or a URL"
            )
        while True:
            try:
                keys = self._keys.partitions[partition]
                lifetime_ms = settings.blob_ttl * 1000
                return await with_blobs(self._engine, keys, outcome.result, settings.blob_threshold, lifetime_ms)
            except EngineUnavailable:
                await self._engine.ready()
            except EngineReplyError as error:
                if not is_transient(error):
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)

    # ---- hooks

    async def _call_hook(self, task: ToolTask, partition: int, cancelled: AbortSignal) -> ToolReply:
        hook = self.hooks.get(task.tool)
        if hook is None:
            return task.answer(ToolReply, error=await self._unknown_hook(task))
        reply = await call_hook(self._engine, self._keys.partitions[partition], hook, task, cancelled)
        if reply.error is not None:
            _log.warning("hook failed", hook=task.tool, point=task.hook, turn=task.turn_id, error=reply.error.message)
        return reply

    async def _unknown_hook(self, task: ToolTask) -> ErrorInfo:
        carriers = await self._carriers(task.tool)
        known = ", ".join(sorted(self.hooks)) or "none"
        text = (
            f"the worker {self.consumer.worker_id} on its queue does not have it (it has: {known}); "
            + (f"{', '.join(carriers)} has it" if carriers else "no live worker has it")
            + ". Workers with different applications need hook queues of their own: @hook(queue=...)"
        )
        return ErrorInfo(kind=ErrorKind.HOOK_FAILED, message=text)

    async def _carriers(self, hook_name: str) -> list[str]:
        """The workers that say of themselves that they carry a hook."""
        found = []
        for description in await self._engine.call("HVALS", self._keys.workers):
            worker = msgspec.json.decode(description)
            if hook_name in worker.get("hooks", ()):
                found.append(worker["id"])
        return sorted(found)

    # ---- tools

    def _unknown(self, task: ToolTask) -> ErrorInfo:
        known = ", ".join(sorted(self.tools)) or "none"
        text = (
            f"a worker on the queue of tool {task.tool!r} does not have it; it has: {known}. "
            "Tools of different workers need queues of their own: @tool(queue=...)"
        )
        return ErrorInfo(kind=ErrorKind.UNKNOWN_TOOL, message=text)

    async def send_progress(
        self, task: ToolTask, partition: int, sequence: int, message: str, data: dict[str, Any]
    ) -> None:
        progress = task.answer(ToolProgress, sequence=sequence, message=message, data=data)
        results = self._keys.partitions[partition].results
        try:
            await append_message(self._engine, results, progress.type, encode_body(progress, self._wire))
        except EngineError as error:
            # Progress informs; a tool does not fail because nobody could be told.
            _log.warning("progress not sent", turn=task.turn_id, call=task.call, error=str(error))


def _started_late(task: ToolTask) -> ErrorInfo:
    what = "call" if task.hook is None else f"hook {task.tool!r}"
    return ErrorInfo(kind=ErrorKind.TIMEOUT, message=f"the {what} could not be started within its start timeout")


async def _acquired(slots: asyncio.Semaphore, cancelled: AbortSignal) -> bool:
    """Wait for a slot; False where the call was stopped before there was one."""
    if not slots.locked():
        return await slots.acquire()
    stopped, forget = cancelled.future()
    waiting = asyncio.ensure_future(slots.acquire())
    either: set[asyncio.Future[Any]] = {waiting, stopped}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if waiting.done():
            slots.release()
        raise
    finally:
        forget()
        waiting.cancel()
    return waiting.done() and not waiting.cancelled()


class _ProgressSender:
    """Counts the progress of one attempt."""

    __slots__ = ("_partition", "_sequence", "_task", "_worker")

    def __init__(self, worker: ToolWorker, task: ToolTask, partition: int) -> None:
        self._worker = worker
        self._task = task
        self._partition = partition
        self._sequence = 0

    async def __call__(self, message: str, data: dict[str, Any]) -> None:
        self._sequence += 1
        await self._worker.send_progress(self._task, self._partition, self._sequence, message, data)
