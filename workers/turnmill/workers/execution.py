"""Running a user's function, a tool's or a hook's: within its time, told when it is stopped, left behind if need be.

Whatever the function does (raise, exit, hang) becomes a value here. Only a cancellation that comes from outside passes
through, because it is addressed to the worker.

An async function runs in a task of its own. A sync one runs in a thread of its own, not in a bounded pool: no thread can
be stopped from outside, and a hung one must not take the slot of the next call. It sees its signal instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from turnmill.protocol.abort_signal import AbortSignal, call_in_loop
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.logs import get_logger

ERROR_TEXT_CHARACTERS_MAX = 4_000
CANCELLATION_GRACE_SECONDS = 1.0
"""How long a cancelled function may take to clean up before it is left behind."""
_CLOCK_TOLERANCE_SECONDS = 0.002

_log = get_logger("turnmill.tools")
_LEFT_BEHIND: set[asyncio.Task[Any]] = set()


class RanOutOfTime(Exception):
    """The call's time is over; the text says which. Not a `TimeoutError`: the function may raise that itself."""


class CallStopped(Exception):
    """The call's signal was set before it had ended."""


class Run:
    """One call of a user's function: who it is, for the log, and its limits. `progress` starts the idle time again."""

    __slots__ = ("call_id", "cancelled", "idle_timeout_seconds", "kind", "name", "progress_at", "timeout_seconds")

    def __init__(
        self,
        kind: str,
        name: str,
        call_id: str,
        timeout_seconds: float,
        cancelled: AbortSignal,
        idle_timeout_seconds: float | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.call_id = call_id
        self.timeout_seconds = timeout_seconds
        self.cancelled = cancelled
        self.idle_timeout_seconds = idle_timeout_seconds
        self.progress_at = time.monotonic()

    def progress(self) -> None:
        self.progress_at = time.monotonic()


async def run_function(
    function: Callable[..., Any], is_async: bool, run: Run, *args: Any, **keywords: Any
) -> tuple[Any, BaseException | None]:
    """What the function returns, or what it raises.

    Raises `RanOutOfTime` and `CallStopped`, and a cancellation from outside. A function that swallows its cancellation is
    left behind after a short grace, so that it costs no slot; what it returns then is void.
    """
    call = function(*args, **keywords) if is_async else _run_in_thread(function, run, args, keywords)
    task = asyncio.get_running_loop().create_task(_caught(call))
    try:
        await _end_of(task, run)
    except asyncio.CancelledError:
        run.cancelled.set("cancelled")
        await _leave(task, run)
        raise
    except RanOutOfTime:
        run.cancelled.set(ErrorKind.TIMEOUT)
        await _leave(task, run)
        raise
    if task.done():
        value, error = task.result()
        if not (isinstance(error, asyncio.CancelledError) and run.cancelled.is_set()):
            return value, error
    await _leave(task, run)
    raise CallStopped


async def _end_of(task: asyncio.Task[Any], run: Run) -> None:
    """Return when the task has ended or its signal is set. Raises `RanOutOfTime`."""
    deadline = time.monotonic() + run.timeout_seconds
    idle = run.idle_timeout_seconds
    while True:
        until = deadline if idle is None else min(deadline, run.progress_at + idle)
        await _wait(task, run.cancelled, until - time.monotonic())
        if task.done() or run.cancelled.is_set():
            return
        now = time.monotonic() + _CLOCK_TOLERANCE_SECONDS
        if now >= deadline:
            raise RanOutOfTime(f"timeout after {run.timeout_seconds:.10g} s")
        if idle is not None and now >= run.progress_at + idle:
            raise RanOutOfTime(f"no progress for {idle:.10g} s")


async def _wait(task: asyncio.Task[Any], signal: AbortSignal, seconds: float) -> None:
    """Until the task has ended, the signal is set or the time is over. `asyncio.wait` does the same at twice the cost, and
    this is on the way of every call."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: Any = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(max(0.0, seconds), wake)
    task.add_done_callback(wake)
    forget = signal.when_set(lambda: call_in_loop(loop, wake))
    try:
        await woken
    finally:
        timer.cancel()
        task.remove_done_callback(wake)
        forget()


async def _caught(call: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """A function that exits, or is interrupted, must not take its worker along: errors are values from here on."""
    try:
        return await call, None
    except GeneratorExit:  # this coroutine is being closed, nobody takes an outcome
        raise
    except BaseException as error:
        return None, error


async def _leave(task: asyncio.Task[Any], run: Run) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCELLATION_GRACE_SECONDS)
    if not task.done():
        _LEFT_BEHIND.add(task)
        task.add_done_callback(_LEFT_BEHIND.discard)
        _log.warning(f"{run.kind}.stuck", **{run.kind: run.name}, tool_call_id=run.call_id)


# --- threads


async def _run_in_thread(function: Callable[..., Any], run: Run, args: Any, keywords: dict[str, Any]) -> Any:
    """Run a sync function in a new daemon thread that sees the caller's context variables."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    variables = contextvars.copy_context()

    def body() -> None:
        value, error = None, None
        try:
            value = variables.run(function, *args, **keywords)
        except BaseException as raised:  # judged on the loop, where it cannot end the thread with a traceback
            error = raised
        call_in_loop(loop, deliver, value, error)

    def deliver(value: Any, error: BaseException | None) -> None:
        if ended.done():
            _log.warning(f"{run.kind}.late", **{run.kind: run.name}, tool_call_id=run.call_id, failed=error is not None)
        else:
            ended.set_result((value, error))

    threading.Thread(target=body, name=f"{run.kind}-{run.name}", daemon=True).start()
    value, error = await ended
    if error is not None:
        raise error
    # A decorator without `async` around an async function gives a coroutine: it belongs on the loop.
    return await value if inspect.iscoroutine(value) else value


# --- errors


def describe(error: BaseException) -> str:
    """An error's own words, with its type where they say nothing alone."""
    try:
        text = str(error)
    except Exception:  # an error whose text cannot be made is still an error
        text = ""
    if not text:
        return type(error).__name__
    return bounded(text if isinstance(error, Exception) else f"{type(error).__name__}: {text}")


def bounded(text: str) -> str:
    """At most `ERROR_TEXT_CHARACTERS_MAX` characters that the wire can carry."""
    if len(text) > ERROR_TEXT_CHARACTERS_MAX:
        text = text[: ERROR_TEXT_CHARACTERS_MAX - 1] + "…"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
