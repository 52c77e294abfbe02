"""What a consumer holds: tasks that run or are about to, and what stands in for a result that a handler does not give."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.messages import Body, ModelReply, ModelTask, Task, ToolReply
from turnmill.protocol.streams import Delivery

STOP_GRACE_SECONDS = 2.0
"""How long a handler may take to give its reply once its turn was stopped."""


class Held:
    """A task that this worker holds."""

    __slots__ = (
        "abandoned",
        "cancelled",
        "delivery",
        "overdue",
        "partition",
        "settled",
        "stopped",
        "task",
        "turn_id",
        "waiter",
    )

    def __init__(self, delivery: Delivery, partition: int, task: Any) -> None:
        self.delivery = delivery
        self.partition = partition
        self.task = task
        self.turn_id: str = getattr(task, "turn_id", "")
        self.cancelled = AbortSignal()
        self.waiter: asyncio.Task[None] | None = None
        self.stopped = self.settled = self.overdue = False
        self.abandoned = False

    def abandon(self) -> None:
        """It was taken away, or the worker must leave: nobody takes its reply."""
        if not self.abandoned:
            self.abandoned = True
            if self.waiter is not None:
                self.waiter.cancel()

    def stop(self, reason: str) -> None:
        """Its turn was stopped: the handler is told, and answered for when its grace is over."""
        if not self.stopped:
            self.stopped = True
            self.cancelled.set(reason or "the turn was stopped")
            asyncio.get_running_loop().call_later(STOP_GRACE_SECONDS, self._expire)

    def _expire(self) -> None:
        if not self.settled and self.waiter is not None:
            self.overdue = True
            self.waiter.cancel()


Handler = Callable[[Any, int, AbortSignal], Awaitable[Body]]
"""Runs one task of a partition and gives its result, soon once the signal is set: what it has, with an error of kind
`aborted`. Raises `Superseded` where nobody wants it any more. The signal is the task's own; a handler may set it too."""


def failure_of(task: Task, error: ErrorInfo) -> ModelReply | ToolReply:
    """The result of a task that could not be run at all."""
    if isinstance(task, ModelTask):
        return task.answer(ModelReply, error=error)
    return task.answer(ToolReply, error=error)


def aborted_error(cancelled: AbortSignal) -> ErrorInfo:
    """What the reply to a task of a stopped turn says."""
    return ErrorInfo(kind=ErrorKind.ABORTED, message=cancelled.reason or "the turn was stopped")
