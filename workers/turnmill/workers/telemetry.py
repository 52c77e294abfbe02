"""What a worker tells about its own part: model calls, and the run of a tool's or a hook's function.

    with observed("model", task) as span:
        reply = await ...
        span.reply(reply)

tells the start, and exactly one end whatever happens inside. With nobody subscribed it does nothing.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Literal, TypeAlias

from turnmill.protocol.content import Cost, ErrorInfo, Usage
from turnmill.protocol.errors import ErrorKind, Superseded
from turnmill.protocol.events import ReasoningDelta
from turnmill.protocol.messages import ModelReply, ModelTask, ToolReply, ToolTask
from turnmill.protocol.telemetry import TELEMETRY, Status, TelemetryEvent, TelemetryName

Observed: TypeAlias = Literal["model", "tool_run", "hook_run"]
_NAMES: dict[Observed, tuple[TelemetryName, TelemetryName, TelemetryName]] = {
    "model": ("model.start", "model.stop", "model.exception"),
    "tool_run": ("tool_run.start", "tool_run.stop", "tool_run.exception"),
    "hook_run": ("hook_run.start", "hook_run.stop", "hook_run.exception"),
}


def observed(kind: Literal["model", "tool"], task: ModelTask | ToolTask) -> Observation:
    """Tell the start and the end of what runs inside `with`; a tool task with `hook` is told as a hook's."""
    if kind == "model":
        return Observation("model", task)
    return Observation("hook_run" if isinstance(task, ToolTask) and task.hook else "tool_run", task)


class Observation:
    """One model call, or one run of a function. What is set on it before its end goes into the last event."""

    __slots__ = (
        "_began",
        "_kind",
        "_started_at",
        "_task",
        "cost",
        "details",
        "error",
        "is_active",
        "subject",
        "usage",
    )

    def __init__(self, kind: Observed, task: ModelTask | ToolTask) -> None:
        self._kind: Observed = kind
        self._task = task
        self.is_active = TELEMETRY.is_active
        self.subject = ""
        """The model as its agent names it, `provider:model`; of a tool or hook, its name."""
        self.usage: Usage | None = None
        self.cost: Cost | None = None
        self.error: ErrorInfo | None = None
        self.details: dict[str, Any] = {}

    def __enter__(self) -> Observation:
        if self.is_active:
            self._started_at, self._began = time.time(), time.monotonic()
            if isinstance(self._task, ToolTask):
                self.subject = self._task.tool
                hook, arguments = self._task.hook, self._task.arguments
                self.details = {"point": hook} if hook else {"arguments": arguments}
            elif self._task.compact:
                self.details = {"compacts": True}
            TELEMETRY.emit(self._event(_NAMES[self._kind][0]))
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, raised: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if not self.is_active:
            return
        _, stop, exception = _NAMES[self._kind]
        name, status = stop, _status(self.error)
        if raised is not None:
            is_halted = isinstance(raised, Superseded | asyncio.CancelledError)
            name, status = exception, "halted" if is_halted else "error"
            kind = ErrorKind.ABORTED if is_halted else ErrorKind.INTERNAL
            self.error = ErrorInfo(kind=kind, message=f"{type(raised).__name__}: {raised}"[:500])
        elif self.error is not None:
            name = exception
        TELEMETRY.emit(self._event(name, status, time.monotonic() - self._began))

    def reply(self, reply: ModelReply | ToolReply) -> None:
        """Take over what the reply says. A tool's own error is an end of its own, with status `error`."""
        if not self.is_active:
            return
        self.error = reply.error
        if isinstance(reply, ModelReply):
            self.usage, self.cost = reply.usage, reply.cost
            for name, value in (("finish_reason", reply.finish_reason), ("response_model", reply.model)):
                if value is not None:
                    self.details[name] = value
        elif reply.result is not None and reply.result.is_error:
            self.details["is_error"] = True

    def live(self, item: object) -> None:
        """Note what comes from a provider: when the first piece came, and reasoning. Ask `is_active` first."""
        if "time_to_first_chunk_seconds" not in self.details:
            self.details["time_to_first_chunk_seconds"] = time.monotonic() - self._began
        if isinstance(item, ReasoningDelta) and item.text:
            event = self._event("reasoning.delta", details={"text": item.text, "kind": item.kind})
            TELEMETRY.emit(event)

    def _event(
        self,
        name: TelemetryName,
        status: Status | None = None,
        duration_seconds: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> TelemetryEvent:
        task = self._task
        return TelemetryEvent(
            name=name,
            turn_id=task.turn_id,
            session_id=task.session_id,
            agent_id=task.agent_id,
            at=self._started_at if duration_seconds is None and details is None else time.time(),
            started_at=self._started_at,
            step=task.step_number,
            call=task.call,
            attempt=task.attempt,
            subject=self.subject,
            tool_call_id=task.tool_call_id if isinstance(task, ToolTask) else "",
            duration_seconds=duration_seconds,
            status="error" if status == "ok" and self.details.get("is_error") else status,
            usage=self.usage,
            cost=self.cost,
            metadata=task.metadata,
            error=self.error,
            trace=task.trace,
            details=dict(self.details) if details is None else details,
        )


def _status(error: ErrorInfo | None) -> Status:
    if error is None:
        return "ok"
    return "halted" if error.kind == ErrorKind.ABORTED else "error"
