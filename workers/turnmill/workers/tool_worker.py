"""The tool worker: a tool task in, progress while it runs, one reply out. A tool's error is content, not a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from turnmill.protocol.codec import WireFormat, encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import EngineError, ErrorKind
from turnmill.protocol.keys import Keys, tool_queue
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ToolProgress, ToolReply, ToolTask
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import append_message
from turnmill.protocol.values import unpack_value

from .consumer import Consumer
from .tools import AbortSignal, Tool, ToolContext, run_tool

_log = get_logger(__name__)


class ToolWorker:
    """Runs the calls of a set of tools."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        settings: Settings,
        tools: Mapping[str, Tool[..., Any]],
        *,
        queues: list[str] | None = None,
        concurrency: int | None = None,
    ) -> None:
        """`queues` restricts the worker to some of its tools' queues."""
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._wire: WireFormat = settings.wire
        served = set(queues or [tool.spec.queue for tool in tools.values()]) or {"default"}
        self.tools: dict[str, Tool[..., Any]] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        for tool in tools.values():
            if tool.spec.queue in served:
                self.add(tool)
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
            details={"tools": sorted(self.tools)},
        )

    def stop(self) -> None:
        self.consumer.stop()

    async def run(self) -> None:
        """Register the tools and serve them, until `stop`."""
        await self.register()
        await self.consumer.run()

    def add(self, tool: Tool[..., Any]) -> None:
        """One more tool of a queue that this worker serves; `register` tells the registry."""
        self.tools[tool.spec.name] = tool
        self._slots.pop(tool.spec.name, None)
        if tool.spec.concurrency:
            self._slots[tool.spec.name] = asyncio.Semaphore(tool.spec.concurrency)

    async def register(self) -> None:
        """Write the tools' specs to the registry: the worker that runs a tool knows best what it is."""
        if self.tools:
            fields = [item for name, tool in self.tools.items() for item in (name, msgspec.json.encode(tool.spec))]
            await self._engine.call("HSET", self._keys.tools, *fields)

    async def _handle(self, task: ToolTask, partition: int) -> ToolReply:
        try:
            return await self._call(task, partition)
        except Exception as error:
            # A fault of ours must cost one call: a task without an answer would be found pending and fail again.
            _log.exception("tool call failed", tool=task.tool, turn=task.turn_id, call=task.call)
            return task.answer(
                ToolReply, error=ErrorInfo(kind=ErrorKind.INTERNAL, message=f"{type(error).__name__}: {error}")
            )

    async def _call(self, task: ToolTask, partition: int) -> ToolReply:
        tool = self.tools.get(task.tool)
        if tool is None:
            return task.answer(ToolReply, error=self._unknown(task))
        slots = self._slots.get(task.tool)
        if slots is None:
            return await self._run(tool, task, partition)
        async with slots:
            return await self._run(tool, task, partition)

    async def _run(self, tool: Tool[..., Any], task: ToolTask, partition: int) -> ToolReply:
        if self.consumer.clock.now_ms() > task.start_by_ms:
            text = f"the call could not be started within its start timeout of {tool.spec.start_timeout_seconds:g} s"
            return task.answer(ToolReply, error=ErrorInfo(kind=ErrorKind.TIMEOUT, message=text))
        cancelled = AbortSignal()
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
            metadata=task.metadata,
            cancelled=cancelled,
            send_progress=_ProgressSender(self, task, partition),
        )
        try:
            outcome = await run_tool(tool, unpack_value(task.arguments), context)
        finally:
            cancelled.set("the call has ended")
        if outcome.exception is not None:
            _log.info("tool failed", tool=task.tool, turn=task.turn_id, call=task.call, error=repr(outcome.exception))
        return task.answer(
            ToolReply, result=outcome.result, error=outcome.error, duration_seconds=outcome.duration_seconds
        )

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
