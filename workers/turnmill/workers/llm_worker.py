"""The LLM worker: a model task in, live events to the channel while the model speaks, one reply out."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema_rs
import msgspec

from turnmill.protocol.codec import WireFormat, decode_message
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, Message, ToolCall, ToolCallPart
from turnmill.protocol.errors import ErrorKind, Superseded
from turnmill.protocol.keys import Keys, PartitionKeys, model_queue
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ModelReply, ModelTask
from turnmill.protocol.settings import Settings
from turnmill.protocol.specs import Plan

from .consumer import Consumer
from .deltas import DeltaPublisher
from .providers.base import Completed, ProviderError, ProviderRequest, ProviderSet

_log = get_logger(__name__)
_decode_plan = msgspec.json.Decoder(Plan).decode
_CACHED_PLANS_MAX = 1000


class LLMWorker:
    """Runs model tasks with the providers of this process, hundreds of streams at a time."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        settings: Settings,
        providers: ProviderSet,
        *,
        pools: list[str] | None = None,
        concurrency: int | None = None,
    ) -> None:
        """`pools` are the pools whose tasks this worker takes."""
        self._engine = engine
        self._keys = keys
        self._providers = providers
        self._wire: WireFormat = settings.wire
        self._bytes_max = settings.event_bytes_max
        self._plans: dict[str, tuple[Plan, dict[str, jsonschema_rs.Validator]]] = {}
        self._streams_open = 0
        self.consumer = Consumer(
            engine,
            keys,
            settings,
            role="llm",
            queues=[model_queue(pool) for pool in pools or ["default"]],
            concurrency=concurrency or settings.llm_concurrency,
            takes=ModelTask,
            handler=self._handle,
            wire=settings.wire,
            details={"providers": providers.names},
        )

    def stop(self) -> None:
        self.consumer.stop()

    async def run(self) -> None:
        """Until `stop`; then the providers' connections are closed."""
        try:
            await self.consumer.run()
        finally:
            await self._providers.close()

    async def _handle(self, task: ModelTask, partition: int) -> ModelReply:
        reply = task.answer(ModelReply)
        remaining_seconds = (task.deadline_ms - self.consumer.clock.now_ms()) / 1000
        if remaining_seconds <= 0:
            # It waited too long for a worker: the machine has gone on to the next attempt, or given up.
            raise Superseded(
                f"attempt {task.attempt} at step {task.step_number} of {task.turn_id} is past its deadline"
            )
        keys = self._keys.partitions[partition]
        publisher = self._publisher(task, keys)
        self._streams_open += 1
        limit = asyncio.timeout(remaining_seconds)
        try:
            async with limit:
                completed, validators = await self._stream(task, keys, publisher)
            tail = await publisher.finish()
        except TimeoutError:
            if not limit.expired():
                raise
            await publisher.discard()
            text = "the model call was not complete by its deadline (model_timeout)"
            info = ErrorInfo(kind=ErrorKind.TIMEOUT, message=text, retryable=True)
            return msgspec.structs.replace(reply, error=info)
        except ProviderError as error:
            await publisher.discard()
            return msgspec.structs.replace(reply, error=error.info)
        finally:
            self._streams_open -= 1
        return msgspec.structs.replace(
            reply,
            message=_with_checked_calls(completed.message, validators),
            finish_reason=completed.finish_reason,
            usage=completed.usage,
            tail=tail,
        )

    async def _stream(
        self, task: ModelTask, keys: PartitionKeys, publisher: DeltaPublisher
    ) -> tuple[Completed, dict[str, jsonschema_rs.Validator]]:
        plan, validators = self._plans.get(task.plan) or await self._load_plan(keys, task)
        messages = await self._messages(keys, task)
        prefix, _, model = plan.agent.model.partition(":")
        provider = self._providers.get(prefix)
        if provider is None:
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=self._no_provider(plan.agent.model)))
        request = ProviderRequest(
            model=model,
            messages=messages,
            system=plan.agent.system,
            tools=list(plan.tools.values()) if task.with_tools else [],
            tool_choice=plan.agent.tool_choice,
            options=plan.agent.provider_options.get(prefix, {}),
            turn_id=task.turn_id,
            session_id=task.session_id,
            step_number=task.step_number,
            attempt=task.attempt,
        )
        stream = provider.stream(request)
        try:
            async for item in stream:
                if isinstance(item, Completed):
                    return item, validators
                publisher.add(item)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        text = f"the provider of {plan.agent.model!r} ended its stream without completing it"
        raise ProviderError(ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message=text, retryable=True))

    def _publisher(self, task: ModelTask, keys: PartitionKeys) -> DeltaPublisher:
        return DeltaPublisher(
            self._engine,
            keys.session(task.session_id),
            keys.events(task.turn_id),
            f"{task.turn_id}/{task.call}/{task.attempt}",
            now_ms=self.consumer.clock.now_ms,
            streams_open=lambda: self._streams_open,
            bytes_max=self._bytes_max,
            wire=self._wire,
        )

    async def _load_plan(self, keys: PartitionKeys, task: ModelTask) -> tuple[Plan, dict[str, jsonschema_rs.Validator]]:
        """A plan is content-addressed: what was read once holds for ever."""
        body = await self._engine.call("GET", keys.plan(task.plan))
        if body is None:
            text = f"the plan {task.plan} of turn {task.turn_id} is gone (TURNMILL_PLAN_TTL)"
            raise ProviderError(ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))
        plan = _decode_plan(body)
        loaded = plan, {name: jsonschema_rs.validator_for(spec.schema) for name, spec in plan.tools.items()}
        while len(self._plans) >= _CACHED_PLANS_MAX:
            del self._plans[next(iter(self._plans))]
        self._plans[task.plan] = loaded
        return loaded

    async def _messages(self, keys: PartitionKeys, task: ModelTask) -> list[Message]:
        entries = await self._engine.call("LRANGE", keys.transcript(task.session_id), 0, task.messages - 1)
        if len(entries) != task.messages:
            text = f"the transcript of session {task.session_id} holds {len(entries)} of {task.messages} messages"
            raise ProviderError(ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))
        return [decode_message(entry) for entry in entries]

    def _no_provider(self, model: str) -> str:
        known = ", ".join(self._providers.names) or "none"
        return (
            f"this LLM worker has no provider for the model {model!r}; it has: {known}. "
            "Name models as provider:model, and give the worker the provider's key or its entry in turnmill.toml"
        )


def _with_checked_calls(message: Message, validators: dict[str, jsonschema_rs.Validator]) -> Message:
    """The message with every call's arguments checked against its tool's schema, before any worker sees them."""
    if isinstance(message.content, str):
        return message
    parts = [
        ToolCallPart(_checked(part.tool_call, validators)) if isinstance(part, ToolCallPart) else part
        for part in message.content
    ]
    return msgspec.structs.replace(message, content=parts)


def _checked(call: ToolCall, validators: dict[str, jsonschema_rs.Validator]) -> ToolCall:
    if call.error is None and not _is_portable(call.arguments):
        return msgspec.structs.replace(call, arguments={}, error="an integer of more than 64 bits")
    validator = validators.get(call.name)
    if validator is None or call.error is not None or validator.is_valid(call.arguments):
        return call
    reasons = [_reason(error) for _, error in zip(range(5), validator.iter_errors(call.arguments), strict=False)]
    return msgspec.structs.replace(call, error="; ".join(reasons))


def _is_portable(value: Any) -> bool:
    """Whether every integer fits 64 bits: no other language, and no state record, could carry it."""
    if isinstance(value, dict):
        return all(_is_portable(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_portable(item) for item in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _reason(error: jsonschema_rs.ValidationError) -> str:
    path = ".".join(str(part) for part in error.instance_path)
    return f"{path}: {error.message}" if path else error.message
