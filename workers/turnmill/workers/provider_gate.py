"""Leave to call providers, for the calls of one LLM worker: within limits that all workers share, and past a provider that
is held back to the next model.

A call that has to wait keeps its slot for a while and goes back to the coordinator then. Only providers whose calls cost
something (those over HTTP), and those with limits or in a chain of fallbacks are asked for: others cost no command.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, Usage
from turnmill.protocol.errors import EngineError, ErrorKind
from turnmill.protocol.keys import Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.provider_leave import (
    LEAVE_SECONDS,
    Leave,
    ProviderLimit,
    enter_provider,
    leave_provider,
    renew_leave,
)
from turnmill.protocol.specs import provider_of

from .providers.base import ProviderError, ProviderRequest, ProviderSet

_log = get_logger("turnmill.llm")
WAIT_SECONDS_MAX = 20.0
"""How long a call waits in its slot for its provider's limits."""
HELD_SECONDS_MAX = 2.0
"""How long it waits there for a provider that is held back."""
_ANSWER_TOKENS = 500
_BYTES_PER_TOKEN = 4
_OUTAGES = frozenset({ErrorKind.OVERLOADED, ErrorKind.PROVIDER_ERROR, ErrorKind.STREAM_BROKEN, ErrorKind.TIMEOUT})
_LIMIT_WORDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_KEPT: set[asyncio.Task[Any]] = set()
_encode = msgspec.json.Encoder().encode
_decode_error = msgspec.json.Decoder(ErrorInfo).decode


class Entered:
    """A call that may be made: with this model, and what came of it in the end."""

    __slots__ = ("call", "model", "provider", "tenant", "tokens")

    def __init__(self, model: str, provider: str | None, call: str, tenant: str, tokens: int) -> None:
        self.model = model
        self.provider = provider
        self.call = call
        self.tenant = tenant
        self.tokens = tokens


class ProviderGate:
    """The gate of one worker process."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        providers: ProviderSet,
        limits: Mapping[str, ProviderLimit],
        now_ms: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._providers = providers
        self._limits = dict(limits)
        self._now_ms = now_ms
        self._under_way: dict[str, dict[str, str]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def publish(self) -> None:
        """Tell coordinators and operators what this worker's providers may be asked, unlimited ones too."""
        names = sorted({*self._providers.names, *self._limits})
        fields = [item for name in names for item in (name, _encode(self._limits.get(name, ProviderLimit())))]
        if fields:
            await self._engine.call("HSET", self._keys.limits, *fields)

    async def enter(self, models: Sequence[str], call: str, tenant: str, tokens: int) -> Entered:
        """Leave for the first model whose provider may be called, waiting for its limits if need be.

        Raises `ProviderError` where all are held back, or the wait is too long: of kind `rate_limited`, or with the error
        for which they are held back.
        """
        asyncio_time = asyncio.get_running_loop().time
        until = asyncio_time() + WAIT_SECONDS_MAX
        while True:
            answers: list[Leave] = []
            for model in models:
                name = provider_of(model)
                if not self._is_asked_for(name, models):
                    return Entered(model, None, call, tenant, tokens)
                limit = self._limits.get(name, ProviderLimit())
                answer = await enter_provider(self._engine, self._keys.provider(name), limit, call, tenant, tokens)
                if answer.granted:
                    self._begin(name, call, tenant)
                    await self._forget_waiting(models, model, call, tenant)
                    return Entered(model, name, call, tenant, tokens)
                answers.append(answer)
            pause = min(answer.wait_ms for answer in answers) / 1000
            held = all(answer.held_back for answer in answers)
            if pause > (HELD_SECONDS_MAX if held else until - asyncio_time()):
                for model in models:
                    await self._forget_waiting([model], "", call, tenant)
                raise ProviderError(_refusal(models, answers, pause))
            await asyncio.sleep(pause)

    def leave(
        self, entered: Entered, usage: Usage | None, error: ErrorInfo | None, *, has_fallback: bool, stopped: bool
    ) -> None:
        """Give the leave back. What that costs in time is nobody's wait."""
        name = entered.provider
        if name is None:
            return
        self._under_way.get(name, {}).pop(entered.call, None)
        limit = self._limits.get(name, ProviderLimit())
        used = entered.tokens if usage is None else usage.input_tokens + usage.output_tokens
        outcome = "unknown" if stopped else _outcome(error)
        _keep(
            leave_provider(
                self._engine,
                self._keys.provider(name),
                entered.call,
                entered.tenant,
                unused_tokens=entered.tokens - used,
                outcome=outcome,
                wait_seconds=(error.retry_after_seconds or 0.0) if error is not None else 0.0,
                error=_encode(error) if error is not None else b"",
                # Where another model is there to ask, one failure is reason enough to ask that.
                breaker_failures=1 if has_fallback else limit.breaker_failures,
            )
        )

    def _is_asked_for(self, name: str, models: Sequence[str]) -> bool:
        if len(models) > 1:
            return True
        limit = self._limits.get(name)
        return (limit is not None and limit.is_limited) or self._providers.is_remote(name)

    async def _forget_waiting(self, models: Sequence[str], chosen: str, call: str, tenant: str) -> None:
        """It does not wait any more for those that it was not given."""
        for name in {provider_of(model) for model in models} - {provider_of(chosen)}:
            if self._is_asked_for(name, models):
                await leave_provider(self._engine, self._keys.provider(name), call, tenant)

    def _begin(self, name: str, call: str, tenant: str) -> None:
        self._under_way.setdefault(name, {})[call] = tenant
        if self._renewing is None or self._renewing.done():
            self._renewing = _keep(self._renew())

    async def _renew(self) -> None:
        """While calls are under way their places stay theirs."""
        while any(self._under_way.values()):
            await asyncio.sleep(LEAVE_SECONDS / 3)
            until_ms = self._now_ms() + int(LEAVE_SECONDS * 1000)
            for name, calls in list(self._under_way.items()):
                if calls:
                    try:
                        await renew_leave(self._engine, self._keys.provider(name), dict(calls), until_ms)
                    except EngineError as error:
                        _log.warning("places at a provider not kept", provider=name, error=str(error))


def estimated_tokens(request: ProviderRequest, options: Mapping[str, Any]) -> int:
    """About what a call will use; what it really did is settled behind it. A quarter of the text's bytes, and what the
    answer may have at most, or a guess."""
    texts = sum(len(message.text) for message in request.messages) + len(request.system or "")
    answer = next((value for word in _LIMIT_WORDS if isinstance(value := options.get(word), int)), None)
    return texts // _BYTES_PER_TOKEN + (_ANSWER_TOKENS if answer is None else answer)


def _outcome(error: ErrorInfo | None) -> str:
    if error is None:
        return "ok"
    if error.kind == ErrorKind.RATE_LIMITED and error.retryable:
        return "limited"
    if error.retryable and error.kind in _OUTAGES:
        return "outage"
    return "ok"  # a refused request, a wrong key: the provider is there


def _refusal(models: Sequence[str], answers: Sequence[Leave], pause: float) -> ErrorInfo:
    """What to tell of a call that was not made. A little more than the wait, by chance: not all at once again."""
    wait = pause + random.uniform(0, min(5.0, pause / 4 + 0.05))
    told = next((answer.error for answer in answers if answer.error), b"")
    if all(answer.held_back for answer in answers) and told:
        error = _decode_error(told)
        return msgspec.structs.replace(error, retryable=True, retry_after_seconds=wait)
    text = f"{', '.join(models)}: the provider's limits leave no place (see [limits] in turnmill.toml)"
    return ErrorInfo(kind=ErrorKind.RATE_LIMITED, message=text, retryable=True, retry_after_seconds=wait)


def _keep(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    async def quietly() -> None:
        try:
            await work
        except EngineError as error:
            _log.warning("leave not given back: it ends by itself", error=str(error))

    task = asyncio.get_running_loop().create_task(quietly())
    _KEPT.add(task)
    task.add_done_callback(_KEPT.discard)
    return task
