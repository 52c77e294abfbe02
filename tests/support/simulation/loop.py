"""An event loop whose clock is virtual: nothing waits, the time jumps to the next timer.

Every callback belongs to a thread of an actor (see `actors`), or to the world. One callback is a step: between any two
of them an actor may be paused or killed, and what runs when depends on the seed alone.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actors import Thread

THREAD: ContextVar[Thread | None] = ContextVar("THREAD", default=None)
"""Whose code runs. None is the world: the server, the network and the faults."""
STEPS_AT_ONE_TIME_MAX = 20_000


class Livelock(AssertionError):
    """Callbacks follow each other without any time passing: somebody spins."""


class Stalled(AssertionError):
    """Nothing is ready and no timer is set: what is awaited never comes."""


class _Step(asyncio.Handle):
    """A callback that is ready. Made in every other step, so it is made quickly."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _Timer(asyncio.TimerHandle):
    """A callback that waits for its time."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, False


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """Runs callbacks in the order in which they became ready; time passes only when none is."""

    def __init__(self, start_seconds: float = 1000.0) -> None:
        super().__init__()
        self._now = start_seconds
        self._steps_now = 0
        self._timers: list[tuple[float, int, Any]] = []
        self._timers_made = 0
        self.steps = 0
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = _Step(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = _Timer(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: Any) -> None:
        return

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """There are no threads here: the function is called at once. A coroutine that it returns stands for what a thread
        would do, and is awaited in its place."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            future.set_exception(error)
            return future
        if asyncio.iscoroutine(result):
            return self.create_task(result)
        future.set_result(result)
        return future

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._pass_time()
        count = len(ready)
        for _ in range(count):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            thread = context.get(THREAD)
            if thread is None or thread.may_run(handle):
                try:
                    context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {handle!r}", "exception": error, "handle": handle})
        self.steps += count
        self._steps_now += count
        if self._steps_now > STEPS_AT_ONE_TIME_MAX:
            raise Livelock(f"{self._steps_now} steps at {self._now:.3f} s")

    def _pass_time(self) -> None:
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stalled("nothing is left to run")
        self._steps_now = 0
        self._now = now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)

    def __del__(self) -> None:
        return  # it has nothing to close

    def _process_events(self, event_list: Any) -> None:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        return


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], context: Context | None = None
) -> asyncio.Task[Any]:
    """A task that its actor knows of, so that it can be buried with it."""
    thread = THREAD.get() if context is None else context.get(THREAD)
    task = asyncio.Task(coroutine, loop=loop, context=context)
    if thread is not None:
        thread.actor.tasks.add(task)
    return task
