"""A signal that something is to stop, with its reason. Safe to use from the event loop and from threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class AbortSignal:
    """Set once; the first reason stays. A running tool is told by it that nobody waits for it any more, and a turn that its
    host wants it stopped."""

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
        future, forget = self.future()
        try:
            await future
        finally:
            forget()

    def future(self) -> tuple[asyncio.Future[None], Callable[[], None]]:
        """A future of the running loop that is done once it is set, to wait for it among others; and what to call when
        nobody waits any more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        return future, self.when_set(lambda: call_in_loop(loop, _settle, future))

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Block this thread until it is set, or for `timeout` seconds; returns whether it is set."""
        event = threading.Event()
        if self._add(event.set):
            event.wait(timeout)
            self._remove(event.set)
        return self._is_set

    def when_set(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Have a function called once it is set: at once where it is, else in the thread that sets it. What this returns
        takes the function back."""
        if not self._add(callback):
            callback()
        return lambda: self._remove(callback)

    def _add(self, wake: Callable[[], object]) -> bool:
        with self._lock:
            if not self._is_set:
                self._wakers.append(wake)
            return not self._is_set

    def _remove(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if wake in self._wakers:
                self._wakers.remove(wake)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call from any thread."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # the loop is closed: nobody is left to be told


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
