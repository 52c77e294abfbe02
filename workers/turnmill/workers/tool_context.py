"""What a running tool may know of its call, and say about it."""

from __future__ import annotations

import asyncio
import os
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.session_values import SessionValues
from turnmill.protocol.specs import ToolSpec

from .child_process import OUTPUT_BYTES_MAX, ProcessResult, run_process
from .tool_results import wire_value

T = TypeVar("T")
SendProgress: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Carries a running call's message and data to the turn's watchers."""

TIMEOUT_SECONDS_DEFAULT = ToolSpec(name="default").timeout_seconds


_ASYNC_HINTS = {
    "progress": "progress_sync() is for sync tools; in an async tool write `await context.progress(...)`",
    "run_process": "run_process_sync() is for sync tools; in an async tool write `await context.run_process(...)`",
    "state": "state_sync is for sync tools; in an async tool write `await context.state.get(...)`",
}


class ToolContext:
    """What a running tool knows of its call. A parameter annotated with it is filled in and hidden from the model.

    `cancelled` is set, with the reason, when nobody waits for the call any more: its turn was stopped, or its time is over.
    An async tool is cancelled then; a sync one looks at it, or waits for it, and returns. Its clock starts when it is made: `deadline` tells the wall clock's time, `remaining_seconds` counts on the monotonic
    clock, so that a clock that is set does not move it.
    """

    __slots__ = (
        "_loop",
        "_on_progress",
        "_send_progress",
        "_started_at",
        "_started_monotonic",
        "_state",
        "agent_id",
        "attempt",
        "cancelled",
        "idempotency_key",
        "idle_timeout_seconds",
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
        idle_timeout_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        cancelled: AbortSignal | None = None,
        send_progress: SendProgress | None = None,
        state: Callable[[], SessionValues] | None = None,
    ) -> None:
        """`state` makes the access to the session's values, where the tool asks for it."""
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name
        self.turn_id = turn_id
        self.session_id = session_id
        self.agent_id = agent_id
        self.step_number = step_number
        self.attempt = attempt
        self.idempotency_key = idempotency_key
        self.timeout_seconds = timeout_seconds
        self.idle_timeout_seconds = idle_timeout_seconds
        self.metadata: Mapping[str, Any] = types.MappingProxyType(metadata or {})
        self.cancelled = cancelled or AbortSignal()
        self._send_progress = send_progress
        self._state = state
        self._on_progress: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at = time.time()
        self._started_monotonic = time.monotonic()

    @property
    def deadline(self) -> datetime:
        return datetime.fromtimestamp(self._started_at + self.timeout_seconds, UTC)

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self._started_monotonic + self.timeout_seconds - time.monotonic())

    @property
    def state(self) -> SessionValues:
        """The session's own values, shared by all its tools and its host, and changed atomically."""
        if self._state is None:
            raise RuntimeError("this call belongs to no session, so it has no state")
        return self._state()

    @property
    def state_sync(self) -> BlockingSessionValues:
        """`state` for sync tools: the same methods, which return when it is done."""
        return BlockingSessionValues(self.state, self._blocking)

    async def progress(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Tell the turn's watchers how far the call is. What a call says after its end reaches nobody."""
        if not message:
            raise ValueError("progress needs a message")
        if self._on_progress is not None:
            self._on_progress()
        if self._send_progress is not None and not self.cancelled.is_set():
            await self._send_progress(message, wire_value(dict(data)) if data else {})

    def progress_sync(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        """`progress` for sync tools, which run in a thread: returns when the message is sent."""
        if not message:
            raise ValueError("progress needs a message")
        if self._on_progress is not None:
            self._on_progress()
        if self._send_progress is None or self.cancelled.is_set():
            return
        self._blocking("progress", self.progress(message, data))

    async def run_process(
        self,
        *arguments: str | os.PathLike[str],
        stdin: bytes | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
    ) -> ProcessResult:
        """Run a program (not through a shell) and give its exit code and what it wrote, up to `output_bytes_max` of each.

        It runs in a process group of its own. When the call is stopped or runs out of time, the group is asked to end and
        then killed, with whatever the program has started. After `timeout_seconds` this raises `TimeoutError`.
        """
        return await run_process(
            arguments,
            self.cancelled,
            stdin=stdin,
            cwd=cwd,
            env=env,
            timeout_seconds=timeout_seconds,
            output_bytes_max=output_bytes_max,
        )

    def run_process_sync(self, *arguments: str | os.PathLike[str], **options: Any) -> ProcessResult:
        """`run_process` for sync tools. When the call is stopped it raises `concurrent.futures.CancelledError`."""
        return self._blocking("run_process", self.run_process(*arguments, **options))

    def _blocking(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        """Run something on the worker's loop, from the thread of a sync tool."""
        if self._loop is None:
            call.close()
            raise RuntimeError(_ASYNC_HINTS[name])
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class BlockingSessionValues:
    """A session's values, from the thread of a sync tool: see `SessionValues`."""

    __slots__ = ("_run", "_values")

    def __init__(self, values: SessionValues, run: Callable[[str, Coroutine[Any, Any, Any]], Any]) -> None:
        self._values = values
        self._run = run

    def get(self, key: str, default: Any = None) -> Any:
        return self._run("state", self._values.get(key, default))

    def all(self) -> dict[str, Any]:
        values: dict[str, Any] = self._run("state", self._values.all())
        return values

    def set(self, key: str, value: Any) -> None:
        self._run("state", self._values.set(key, value))

    def delete(self, key: str) -> bool:
        return bool(self._run("state", self._values.delete(key)))

    def increment(self, key: str, by: float = 1) -> int | float:
        number: int | float = self._run("state", self._values.increment(key, by))
        return number

    def update(self, key: str, function: Callable[[Any], Any], default: Any = None) -> Any:
        """`function` runs on the worker's loop: it should only compute."""
        return self._run("state", self._values.update(key, function, default))


ToolExecutionContext: TypeAlias = ToolContext
