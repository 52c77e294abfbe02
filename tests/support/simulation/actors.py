"""Actors: simulated processes that can be paused, blocked, killed, and that leave nothing behind.

An actor has two threads: the main one with its event loop, and the one of its heartbeat. A pause stops both (SIGSTOP);
a block stops the main one alone, as a tool does that never lets go of the loop. A killed actor runs nothing any more, not
even the cleanup of its coroutines.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .loop import THREAD, VirtualLoop

if TYPE_CHECKING:
    from .network import Network, Wire

_CLOSES_MAX = 50


class Thread:
    """What runs in one context of an actor, and in those copied from it."""

    __slots__ = ("_deferred", "actor", "context", "held", "is_heart")

    def __init__(self, actor: Actor, *, is_heart: bool) -> None:
        self.actor = actor
        self.is_heart = is_heart
        self.held = False
        self._deferred: list[Any] = []
        self.context: Context = copy_context()
        self.context.run(THREAD.set, self)

    def may_run(self, handle: Any) -> bool:
        """Whether a step runs now. That of a held thread comes when it goes on; that of a dead one never does."""
        actor = self.actor
        if actor.countdown and not actor.step():
            pass  # what was to happen before this step has happened
        if actor.is_dead:
            return False
        if self.held:
            self._deferred.append(handle)
            return False
        return True

    def hold(self) -> None:
        self.held = True

    def go_on(self, loop: VirtualLoop) -> None:
        self.held = False
        deferred, self._deferred = self._deferred, []
        loop._ready.extend(deferred)  # type: ignore[attr-defined]


class Actor:
    """One simulated process."""

    def __init__(self, name: str, role: str, network: Network) -> None:
        self.name = name
        self.role = role
        self.network = network
        self.loop: VirtualLoop = network.loop
        self.is_dead = False
        self.is_stopping = False
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.wires: set[Wire] = set()
        self.main = Thread(self, is_heart=False)
        self.heart = Thread(self, is_heart=True)
        self.countdown = 0
        self.process: Any = None
        """What runs in it: a coordinator, a worker, a client."""
        self.resumed_at = 0.0
        self.read_at = 0.0
        """When it last heard something of a blocking read."""
        self.troubled_at = self.heart_troubled_at = -1.0
        """Until when it, or its heartbeat, is kept from running or from speaking to the server, and a while longer."""
        self._after_countdown: Callable[[], None] | None = None
        self._kept: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def is_paused(self) -> bool:
        return self.main.held

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine, context=self.main.context.copy())

    def received(self, wire: Wire) -> None:
        if wire.is_blocking:
            self.read_at = self.loop.time()

    def in_steps(self, steps: int, action: Callable[[], None]) -> None:
        """Have something happen before one of its next steps."""
        self.countdown, self._after_countdown = steps, action

    def step(self) -> bool:
        self.countdown -= 1
        if self.countdown or self._after_countdown is None:
            return False
        action, self._after_countdown = self._after_countdown, None
        action()
        return True

    def pause(self) -> None:
        self.main.hold()
        self.heart.hold()

    def block(self) -> None:
        self.main.hold()

    def resume(self) -> None:
        if self.is_dead:
            return
        self.resumed_at = self.loop.time()
        self.main.go_on(self.loop)
        self.heart.go_on(self.loop)

    def kill(self) -> None:
        """Nothing of it runs any more. Its tasks are kept until `bury`: what a collector frees runs cleanup code."""
        self.is_dead = True
        self._kept = [task for task in self.tasks if not task.done()]
        for wire in list(self.wires):
            wire.owner_died()

    def bury(self) -> None:
        """Close what was left in mid-run. Its cleanup reaches nobody: the wires are cut and the world is over."""
        self.is_dead = True
        for task in {*self._kept, *self.tasks}:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
        self._kept.clear()


def bury(actors: Iterable[Actor]) -> None:
    """What coroutines complain about when they are closed in mid-run concerns nobody: their process is no more."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for actor in actors:
                actor.bury()
    finally:
        sys.unraisablehook = hook


def _close(coroutine: Any) -> None:
    """Code that awaits in its cleanup is closed again until it has ended."""
    for _ in range(_CLOSES_MAX):
        try:
            coroutine.close()
            return
        except RuntimeError:
            continue
        except BaseException:
            return
    with suppress(BaseException):
        coroutine.throw(SystemExit)
