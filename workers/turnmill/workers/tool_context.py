"""What a running tool may know of its call, and say about it."""

from __future__ import annotations

import asyncio
import threading
import time
import types
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

from turnmill.protocol.specs import ToolSpec

from .tool_results import wire_value

SendProgress: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Carries a running call's message and data to the turn's watchers."""

TIMEOUT_SECONDS_DEFAULT = ToolSpec(name="default").timeout_seconds


class AbortSignal:
    """Tells a running tool that nobody waits for it any more. Safe to use from the event loop and from threads."""

    __slots__ = ("_is_set", "_lock", "_wakers", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_set = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self, reason: str | None = None) -> None:
        """Set it, from any thread; the first reason stays."""
        with self._lock:
            if self._is_set:
                return
            self.reason, self._is_set = reason, True
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    async def wait(self) -> None:
        """Return when it is set."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            call_in_loop(loop, _settle, future)

        if self._add(wake):
            try:
                await future
            finally:
                self._remove(wake)

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Block this thread until it is set, or for `timeout` seconds; returns whether it is set."""
        event = threading.Event()
        if self._add(event.set):
            event.wait(timeout)
            self._remove(event.set)
        return self._is_set

    def _add(self, wake: Callable[[], object]) -> bool:
        with self._lock:
            if not self._is_set:
                self._wakers.append(wake)
            return not self._is_set

    def _remove(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if wake in self._wakers:
                self._wakers.remove(wake)


class ToolContext:
    """What a running tool knows of its call. A parameter annotated with it is filled in and hidden from the model.

    Its clock starts when it is made: `deadline` tells the wall clock's time, `remaining_seconds` counts on the monotonic
    clock, so that a clock that is set does not move it.
    """

    __slots__ = (
        "_loop",
        "_send_progress",
        "_started_at",
        "_started_monotonic",
        "agent_id",
        "attempt",
        "cancelled",
        "idempotency_key",
        "metadata",
        "session_id",
        "step_number",
        "timeout_seconds",
        "tool_call_id",
        "tool_name",
        "turn_id",
    )

    def __init__(
        self,
        *,
        tool_call_id: str = "",
        tool_name: str = "",
        turn_id: str = "",
        session_id: str = "",
        agent_id: str = "",
        step_number: int = 1,
        attempt: int = 1,
        idempotency_key: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS_DEFAULT,
        metadata: Mapping[str, Any] | None = None,
        cancelled: AbortSignal | None = None,
        send_progress: SendProgress | None = None,
    ) -> None:
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name
        self.turn_id = turn_id
        self.session_id = session_id
        self.agent_id = agent_id
        self.step_number = step_number
        self.attempt = attempt
        self.idempotency_key = idempotency_key
        self.timeout_seconds = timeout_seconds
        self.metadata: Mapping[str, Any] = types.MappingProxyType(metadata or {})
        self.cancelled = cancelled or AbortSignal()
        self._send_progress = send_progress
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at = time.time()
        self._started_monotonic = time.monotonic()

    @property
    def deadline(self) -> datetime:
        return datetime.fromtimestamp(self._started_at + self.timeout_seconds, UTC)

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self._started_monotonic + self.timeout_seconds - time.monotonic())

    async def progress(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Tell the turn's watchers how far the call is. What a call says after its end reaches nobody."""
        if not message:
            raise ValueError("progress needs a message")
        if self._send_progress is not None and not self.cancelled.is_set():
            await self._send_progress(message, wire_value(dict(data)) if data else {})

    def progress_sync(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        """`progress` for sync tools, which run in a thread: returns when the message is sent."""
        if not message:
            raise ValueError("progress needs a message")
        if self._send_progress is None or self.cancelled.is_set():
            return
        if self._loop is None:
            raise RuntimeError(
                "progress_sync() is for sync tools; in an async tool write `await context.progress(...)`"
            )
        asyncio.run_coroutine_threadsafe(self.progress(message, data), self._loop).result()


ToolExecutionContext: TypeAlias = ToolContext


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call from any thread."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # the loop is closed: nobody is left to be told


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
