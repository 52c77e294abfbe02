"""An LLM worker on a real engine, without coordinator: a session's transcript and a plan, model tasks in, replies out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from support.waiting import wait_until_async
from support.worker_bench import SESSION, WorkerBench
from turnmill.protocol.codec import EVENT_CODEC, encode_body
from turnmill.protocol.connection import pairs
from turnmill.protocol.content import Message
from turnmill.protocol.events import LIVE_EVENT_TYPES
from turnmill.protocol.messages import ModelReply, ModelTask
from turnmill.protocol.specs import AgentSpec, Plan, content_hash
from turnmill.workers.llm_worker import LLMWorker
from turnmill.workers.providers.base import Provider, ProviderSet
from turnmill.workers.providers.scripted import Script, ScriptedProvider


class LLMBench(WorkerBench):
    """`scripted` is the provider that the worker has, and remembers what it was asked."""

    scripted: ScriptedProvider

    async def write(self, *messages: Message) -> None:
        """Append to the session's transcript."""
        bodies = [encode_body(message) for message in messages]
        await self.engine.call("RPUSH", self.names.transcript(SESSION), *bodies)

    async def replace(self, *messages: Message) -> None:
        """Append to what stands in for parts of the transcript."""
        bodies = [encode_body(message) for message in messages]
        await self.engine.call("RPUSH", self.names.replacements(SESSION), *bodies)

    async def ask(self, plan: Plan | None = None, *, call: str = "1", **fields: Any) -> ModelTask:
        """Hand out a model task for the transcript as it is, and let its attempt publish."""
        plan = plan or agent_plan()
        plan_id = content_hash(plan)
        await self.engine.call("SET", self.names.plan(plan_id), encode_body(plan))
        task = ModelTask(
            session_id=SESSION,
            turn_id=self.turn_id,
            call=call,
            attempt=1,
            agent_id="agent",
            plan=plan_id,
            step_number=1,
            messages=int(await self.engine.call("LLEN", self.names.transcript(SESSION))),
            deadline_ms=2**52,
        )
        task = msgspec.structs.replace(task, **fields)
        live = f"{task.turn_id}/{task.call}/{task.attempt}"
        await self.engine.call("HSET", self.names.session(SESSION), "live", live, "offset", 0, "size", 0)
        await self.engine.call("XADD", self.names.events(self.turn_id), "0-*", "t", "step.started", "d", b"{}")
        await self.engine.call("XADD", self.names.model("default"), "*", "t", task.type, "d", encode_body(task))
        return task

    async def answer(self, call: str = "1", timeout_seconds: float = 10.0) -> ModelReply:
        """Wait for the reply to a task."""

        async def look() -> list[ModelReply]:
            return [each for each in await self.replies() if isinstance(each, ModelReply) and each.call == call]

        replies = await wait_until_async(look, timeout_seconds)
        assert len(replies) == 1
        return replies[0]

    async def published(self) -> list[Any]:
        """The live events on the turn's channel."""
        entries = await self.engine.call("XRANGE", self.names.events(self.turn_id), "-", "+")
        events = [EVENT_CODEC.decode_fields(pairs(fields)) for _, fields in entries]
        return [event for event in events if event.type in LIVE_EVENT_TYPES]

    @asynccontextmanager
    async def models(self, *scripts: Script, **providers: Provider) -> AsyncIterator[LLMWorker]:
        self.scripted = ScriptedProvider(scripts)
        worker = LLMWorker(self.engine, self.keys, self.settings, ProviderSet({"scripted": self.scripted, **providers}))
        async with self.running(worker):
            await self.listening()
            yield worker


def agent_plan(model: str = "scripted:test", tools: Iterable[Any] = (), **fields: Any) -> Plan:
    specs = {tool.name: tool for tool in tools}
    return Plan(agent=AgentSpec(name="agent", model=model, tools=list(specs), **fields), tools=specs)
