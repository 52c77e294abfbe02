"""A tool worker or a bare consumer on a real engine, without coordinator: tasks go in, replies come out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from support.waiting import wait_until_async
from turnmill.protocol.codec import MESSAGE_CODEC, encode_body
from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.keys import Keys, new_turn_id
from turnmill.protocol.messages import ToolProgress, ToolReply, ToolTask
from turnmill.protocol.settings import Settings, load_settings
from turnmill.workers.hooks import Hook
from turnmill.workers.tool_worker import ToolWorker
from turnmill.workers.tools import Tool

SESSION = "session"


class Runs(Protocol):
    def stop(self) -> None: ...

    async def run(self) -> None: ...


class WorkerBench:
    """One session's partition as its coordinator would see it."""

    def __init__(self, engine: Engine, namespace: str, **settings: Any) -> None:
        self.engine = engine
        self.keys = Keys(namespace, 2)
        self.names = self.keys.of_session(SESSION)
        self.settings: Settings = load_settings(
            **{"namespace": namespace, "partitions": 2, "liveness_seconds": 3, "heartbeat_seconds": 0.5, **settings}
        )
        self.turn_id = self.new_turn()

    def new_turn(self) -> str:
        return new_turn_id(self.names.partition)

    def task(self, tool: str, call: str = "1.0", **fields: Any) -> ToolTask:
        task = ToolTask(
            session_id=SESSION,
            turn_id=self.turn_id,
            call=call,
            attempt=1,
            tool=tool,
            tool_call_id=f"id-{call}",
            arguments={},
            agent_id="agent",
            step_number=1,
            idempotency_key=f"{self.turn_id}/{call}",
            timeout_seconds=30,
            start_by_ms=2**52,
            deadline_ms=2**52,
        )
        return msgspec.structs.replace(task, **fields)

    async def add(self, tool: str, call: str = "1.0", queue: str = "default", **fields: Any) -> ToolTask:
        task = self.task(tool, call, **fields)
        await self.engine.call("XADD", self.names.tool(queue), "*", "t", task.type, "d", encode_body(task))
        return task

    async def stop_turn(self, turn_id: str, reason: str = "stop", *, told: bool = True) -> None:
        """As a commit does it: the marker, and a word to those who listen."""
        await self.engine.call("SET", self.names.cancel(turn_id), reason, "PX", 60_000)
        if told:
            await self.engine.call("SPUBLISH", self.names.cancellations, f"{turn_id} {reason}")

    async def replies(self) -> list[ToolReply | ToolProgress]:
        entries = await self.engine.call("XRANGE", self.names.results, "-", "+")
        return [MESSAGE_CODEC.decode_fields(pairs(fields)) for _, fields in entries]

    async def reply(self, call: str = "1.0", timeout_seconds: float = 10.0) -> ToolReply:
        async def look() -> list[ToolReply]:
            return [each for each in await self.replies() if isinstance(each, ToolReply) and each.call == call]

        replies = await wait_until_async(look, timeout_seconds)
        assert len(replies) == 1
        return replies[0]

    async def listening(self, listeners: int = 1) -> None:
        """Wait until so many connections listen for stopped turns."""

        async def look() -> bool:
            reply = await self.engine.call("PUBSUB", "SHARDNUMSUB", self.names.cancellations)
            return int(reply[1]) >= listeners

        await wait_until_async(look)

    @asynccontextmanager
    async def running(self, worker: Runs) -> AsyncIterator[None]:
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            await asyncio.wait_for(running, 30)

    @asynccontextmanager
    async def tools(self, *carried: Tool[..., Any] | Hook[..., Any], **options: Any) -> AsyncIterator[ToolWorker]:
        tools: Mapping[str, Tool[..., Any]] = {each.name: each for each in carried if isinstance(each, Tool)}
        hooks: Mapping[str, Hook[..., Any]] = {each.name: each for each in carried if isinstance(each, Hook)}
        worker = ToolWorker(self.engine, self.keys, self.settings, tools, hooks=hooks, **options)
        async with self.running(worker):
            await self.listening()
            yield worker
