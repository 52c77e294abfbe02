"""The LLM worker: a model task in, live events to the channel while the model speaks, one reply out.

A task may also ask for a shorter conversation in place of an answer; its reply then says what stands for it. Whatever
becomes of a call, its reply tells what it used and cost, as far as that is known.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from turnmill.protocol.abort_signal import AbortSignal, call_in_loop
from turnmill.protocol.codec import WireFormat
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, Message
from turnmill.protocol.errors import EngineError, ErrorKind, Superseded
from turnmill.protocol.keys import Keys, PartitionKeys, model_queue
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ModelReply, ModelTask
from turnmill.protocol.provider_leave import ProviderLimit
from turnmill.protocol.settings import Settings
from turnmill.protocol.specs import Plan, provider_of

from .cancellation import Cancellations
from .compaction import Urgency, View, entries_of, plan_shortening
from .consumer import Consumer
from .conversation import ConversationLost, read_conversation
from .deltas import DeltaPublisher
from .held import aborted_error
from .model_call import Heard, call_model, find_provider
from .output_check import OutputCheck
from .prices import Prices
from .provider_gate import ProviderGate, estimated_tokens
from .providers.base import Completed, Live, ProviderError, ProviderRequest, ProviderSet
from .providers.capabilities import KnownModels
from .summary import Summarizer, shortened
from .telemetry import Observation, observed

_decode_plan = msgspec.json.Decoder(Plan).decode
_CACHED_PLANS_MAX = 1000
_PUBLISH_SECONDS = 15.0
_log = get_logger(__name__)


def _expire(limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
    try:
        limit.reschedule(loop.time())
    except RuntimeError:
        pass  # the call has ended, or its time has: there is nothing left to end


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
        self._prices = Prices.from_settings(settings)
        self._models = KnownModels.from_settings(settings)
        self._plans: dict[str, tuple[Plan, OutputCheck]] = {}
        self._streams_open = 0
        self._numbers = itertools.count()
        limits = {name: ProviderLimit(**limit.model_dump()) for name, limit in settings.limits.items()}
        self._gate = ProviderGate(engine, keys, providers, limits, lambda: self.consumer.clock.now_ms())
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
        loading = asyncio.create_task(asyncio.to_thread(self._prices.load_for, self._providers.names))
        publishing = asyncio.create_task(self._keep_published())
        try:
            await self.consumer.run()
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await loading
            await self._providers.close()

    async def _keep_published(self) -> None:
        """Now and again and again: a registry that was lost comes back while the workers live."""
        while True:
            try:
                await self._gate.publish()
            except EngineError as error:
                _log.warning("limits of providers not published", error=str(error))
            await asyncio.sleep(_PUBLISH_SECONDS)

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
                plan, check = self._plans.get(task.plan) or await self._load_plan(keys, task)
                span.subject = plan.agent.model
                messages = await self._messages(keys, task)
                if task.compact:
                    view = await self._shorten(task, plan, messages, heard)
                    return self._reply(task, heard, view=view.segments, replacements=view.replacements)
                completed = await self._answer(task, plan, messages, publisher, heard, span)
            tail = await publisher.finish()
        except (TimeoutError, ProviderError) as error:
            if not isinstance(error, ProviderError) and not limit.expired():
                raise
            await publisher.discard()
            return self._failure(task, error, heard, cancelled)
        finally:
            if forget is not None:
                forget()
            self._streams_open -= 1
        return self._reply(
            task,
            heard,
            message=check.with_checked_calls(completed.message),
            finish_reason=completed.finish_reason,
            tail=tail,
            output_error=check.answer_error(completed.message),
        )

    def _failure(
        self, task: ModelTask, error: TimeoutError | ProviderError, heard: Heard, cancelled: AbortSignal
    ) -> ModelReply:
        """What a provider's error, the deadline, or the end of the turn leaves: only then what was heard is told."""
        if cancelled.is_set():
            return self._reply(task, heard, error=aborted_error(cancelled), message=heard.message())
        if isinstance(error, ProviderError):
            return self._reply(task, heard, error=error.info)
        text = "the model call was not complete by its deadline (model_timeout)"
        return self._reply(task, heard, error=ErrorInfo(kind=ErrorKind.TIMEOUT, message=text, retryable=True))

    def _reply(self, task: ModelTask, heard: Heard, **fields: Any) -> ModelReply:
        return task.answer(ModelReply, usage=heard.usage, cost=heard.price(self._prices), model=heard.model, **fields)

    async def _answer(
        self,
        task: ModelTask,
        plan: Plan,
        messages: list[Message],
        publisher: DeltaPublisher,
        heard: Heard,
        span: Observation,
    ) -> Completed:
        agent = plan.agent
        request = ProviderRequest(
            model="",
            messages=messages,
            system=agent.system,
            tools=list(plan.tools.values()) if task.with_tools else [],
            tool_choice=agent.tool_choice,
            reasoning=agent.reasoning,
            output_schema=agent.output.schema if agent.output is not None else None,
            output_name=agent.output.name if agent.output is not None else "response",
            turn_id=task.turn_id,
            session_id=task.session_id,
            step_number=task.step_number,
            attempt=task.attempt,
        )

        def told(item: Live) -> None:
            span.live(item)
            publisher.add(item)

        models = [agent.model, *agent.fallbacks][task.first_model :]
        heard.model = models[0]
        take = told if span.is_active else publisher.add
        return await self._ask(task, models, request, agent.provider_options, heard, take)

    async def _ask(
        self,
        task: ModelTask,
        models: list[str],
        request: ProviderRequest,
        options: Mapping[str, dict[str, Any]],
        heard: Heard,
        take: Callable[[Live], object],
    ) -> Completed:
        """Call the first model that can take it and whose provider may be called now, with that provider's options."""
        models = self._models.that_take(models, request)
        name = f"{task.turn_id}/{task.call}/{task.attempt}/{next(self._numbers)}"
        tokens = estimated_tokens(request, options.get(provider_of(models[0]), {}))
        entered = await self._gate.enter(models, name, task.tenant, tokens)
        heard.model = entered.model
        error: ErrorInfo | None = None
        stopped = True
        try:
            provider, model = find_provider(self._providers, entered.model)
            own = options.get(provider_of(entered.model), {})
            request = msgspec.structs.replace(request, model=model, options=own)
            completed = await call_model(provider, request, heard, take)
            stopped = False
            return completed
        except ProviderError as failure:
            error, stopped = failure.info, False
            raise
        finally:
            self._gate.leave(entered, heard.usage, error, has_fallback=len(models) > 1, stopped=stopped)

    async def _shorten(self, task: ModelTask, plan: Plan, messages: list[Message], heard: Heard) -> View:
        """The view that stands for the conversation from now on. Raises `ProviderError` where there is no shorter one."""
        policy = plan.agent.compaction
        entries = entries_of(messages, task.view, task.view_end)
        shortening = plan_shortening(entries, policy, task.turn_id, _urgency(task))
        if shortening is None:
            raise ProviderError(_nothing_left())

        async def ask(request: ProviderRequest) -> Completed:
            call = Heard(policy.summarizer)
            try:
                return await self._ask(task, [policy.summarizer or ""], request, {}, call, lambda _: None)
            finally:
                heard.include(call, self._prices)

        request = ProviderRequest(
            model="", messages=[], turn_id=task.turn_id, session_id=task.session_id, step_number=task.step_number
        )
        summarizer = Summarizer(ask, request, plan.agent.retry, policy.instructions)
        view = await shortened(entries, shortening, task.turn_id, summarizer, policy.tool_output_bytes)
        if view is None:
            raise ProviderError(_nothing_left())
        return view

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

    async def _load_plan(self, keys: PartitionKeys, task: ModelTask) -> tuple[Plan, OutputCheck]:
        """A plan is content-addressed: what was read once holds for ever."""
        body = await self._engine.call("GET", keys.plan(task.plan))
        if body is None:
            text = f"the plan {task.plan} of turn {task.turn_id} is gone (TURNMILL_PLAN_TTL)"
            raise ProviderError(ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))
        plan = _decode_plan(body)
        try:
            loaded = plan, OutputCheck(plan)
        except ValueError as error:
            raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=str(error))) from error
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


def _urgency(task: ModelTask) -> Urgency:
    """A view that nothing was added to is one that was refused as well."""
    if not task.overflow:
        return Urgency.EARLY
    return Urgency.REFUSED_AGAIN if task.view and task.view_end == task.messages else Urgency.REFUSED


def _nothing_left() -> ErrorInfo:
    text = (
        "the conversation is too long for the model, and nothing is left to shorten: its tool results are short, and its "
        "older messages are summed up or the agent's compaction names no summarizer"
    )
    return ErrorInfo(kind=ErrorKind.CONTEXT_OVERFLOW, message=text)
