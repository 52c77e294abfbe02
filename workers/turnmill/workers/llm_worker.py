"""The LLM worker: a model task in, live events to the channel while the model speaks, one reply out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import msgspec

from turnmill.protocol.abort_signal import AbortSignal, call_in_loop
from turnmill.protocol.codec import WireFormat
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, Message, ToolCall, ToolCallPart, Usage
from turnmill.protocol.errors import ErrorKind, Superseded
from turnmill.protocol.events import ReasoningDelta, TextDelta
from turnmill.protocol.keys import Keys, PartitionKeys, model_queue
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ModelReply, ModelTask
from turnmill.protocol.settings import Settings
from turnmill.protocol.specs import Plan

from .cancellation import Cancellations
from .consumer import Consumer
from .conversation import ConversationLost, read_conversation
from .deltas import DeltaPublisher
from .providers.base import Completed, Live, ProviderError, ProviderRequest, ProviderSet
from .telemetry import Observation, observed

_log = get_logger(__name__)
_decode_plan = msgspec.json.Decoder(Plan).decode
_CACHED_PLANS_MAX = 1000


class Heard:
    """What has come of an answer so far: it is kept where the turn is stopped."""

    __slots__ = ("_reasoning", "_text", "model", "usage")

    def __init__(self) -> None:
        self.model: str | None = None
        self.usage: Usage | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, item: Live) -> None:
        if isinstance(item, TextDelta):
            self._text.append(item.text)
        elif isinstance(item, ReasoningDelta) and item.text:
            self._reasoning.append(item.text)

    def message(self) -> Message | None:
        """The text as an assistant's message; None where there is none. Calls were never complete, and reasoning
        without its answer is refused by some providers."""
        text = "".join(self._text)
        return Message(role="assistant", content=text, model=self.model) if text else None


def _expire(limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
    if not limit.expired():
        limit.reschedule(loop.time())


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
        cancellations: Cancellations | None = None,
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
            cancellations=cancellations,
        )

    def stop(self) -> None:
        self.consumer.stop()

    async def run(self) -> None:
        """Until `stop`; then the providers' connections are closed."""
        try:
            await self.consumer.run()
        finally:
            await self._providers.close()

    async def _handle(self, task: ModelTask, partition: int, cancelled: AbortSignal) -> ModelReply:
        with observed("model", task) as span:
            reply = await self._call(task, self._keys.partitions[partition], cancelled, span)
            span.reply(reply)
        return reply

    async def _call(
        self, task: ModelTask, keys: PartitionKeys, cancelled: AbortSignal, span: Observation
    ) -> ModelReply:
        """One attempt: its answer, its error, or, where its turn was stopped, what had come by then."""
        remaining_seconds = (task.deadline_ms - self.consumer.clock.now_ms()) / 1000
        if remaining_seconds <= 0:
            # It waited too long for a worker: the machine has gone on to the next attempt, or given up.
            raise Superseded(
                f"attempt {task.attempt} at step {task.step_number} of {task.turn_id} is past its deadline"
            )
        heard, publisher = Heard(), self._publisher(task, keys)
        self._streams_open += 1
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(remaining_seconds)
        forget: Callable[[], None] | None = None
        try:
            async with limit:
                # Stopping ends the same block as the deadline does: closing the stream closes the connection.
                forget = cancelled.when_set(lambda: call_in_loop(loop, _expire, limit, loop))
                completed, plan, validators = await self._stream(task, keys, publisher, heard, span)
            tail = await publisher.finish()
        except TimeoutError:
            if not limit.expired():
                raise
            await publisher.discard()
            return self._not_completed(task, heard, cancelled)
        except ProviderError as error:
            await publisher.discard()
            return self._with_price(task.answer(ModelReply, error=error.info, usage=error.usage or heard.usage), heard)
        finally:
            if forget is not None:
                forget()
            self._streams_open -= 1
        return self._answer(task, completed, plan, validators, tail, heard)

    def _not_completed(self, task: ModelTask, heard: Heard, cancelled: AbortSignal) -> ModelReply:
        """The deadline has passed, or the turn was stopped: then what was heard is told."""
        if cancelled.is_set():
            info = ErrorInfo(kind=ErrorKind.ABORTED, message=cancelled.reason or "the turn was stopped")
            return self._with_price(
                task.answer(ModelReply, error=info, message=heard.message(), usage=heard.usage), heard
            )
        text = "the model call was not complete by its deadline (model_timeout)"
        info = ErrorInfo(kind=ErrorKind.TIMEOUT, message=text, retryable=True)
        return self._with_price(task.answer(ModelReply, error=info, usage=heard.usage), heard)

    def _answer(
        self,
        task: ModelTask,
        completed: Completed,
        plan: Plan,
        validators: dict[str, jsonschema_rs.Validator],
        tail: list[dict[str, Any]],
        heard: Heard,
    ) -> ModelReply:
        message = _with_checked_calls(completed.message, validators)
        return task.answer(
            ModelReply,
            message=message,
            finish_reason=completed.finish_reason,
            usage=completed.usage or heard.usage,
            tail=tail,
            model=heard.model,
        )

    def _with_price(self, reply: ModelReply, heard: Heard) -> ModelReply:
        return msgspec.structs.replace(reply, model=heard.model)

    async def _stream(
        self, task: ModelTask, keys: PartitionKeys, publisher: DeltaPublisher, heard: Heard, span: Observation
    ) -> tuple[Completed, Plan, dict[str, jsonschema_rs.Validator]]:
        plan, validators = self._plans.get(task.plan) or await self._load_plan(keys, task)
        messages = await self._messages(keys, task)
        heard.model = span.subject = plan.agent.model
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
                    return item, plan, validators
                if isinstance(item, Usage):
                    heard.usage = item
                    continue
                if span.is_active:
                    span.live(item)
                heard.add(item)
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
        """The conversation, with what hooks put before the last messages for this call alone."""
        try:
            messages = await read_conversation(
                self._engine, keys, task.session_id, task.messages, task.view, task.view_end
            )
        except ConversationLost as error:
            raise ProviderError(ErrorInfo(kind=ErrorKind.STATE_LOST, message=str(error))) from error
        if task.injected:
            behind = task.messages - task.inject_at
            place = len(messages) - behind
            messages = [*messages[:place], *task.injected, *messages[place:]]
        return messages

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
