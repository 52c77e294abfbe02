"""What is open in one turn: itself, its step, tool calls and hook, so that every start that was told gets its one end.

Times are the engine's clock in ms. Each method tells what a committed event means; what a turn's end leaves open is
closed first, the innermost first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnmill.protocol.content import Cost, ErrorInfo, ToolCall, Usage
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import (
    HookFinished,
    StepFinished,
    ToolExecutionFinished,
    ToolExecutionStarted,
    ToolResultReady,
    TurnSummary,
)
from turnmill.protocol.messages import ToolTask
from turnmill.protocol.telemetry import Status, TelemetryEvent, TelemetryName

TOOL_ERROR = "tool_error"
"""The kind of an error that is a tool's own answer."""


class Span:
    """Something that has begun: `started_ms` as a whole, `since_ms` the start that was told last.

    `is_seen` says whether the beginning was told here; a coordinator that took over in mid-turn has not seen it.
    """

    __slots__ = ("attempt", "call", "details", "is_seen", "name", "since_ms", "started_ms", "tool_call_id")

    def __init__(
        self,
        started_ms: int,
        name: str = "",
        call: str = "",
        attempt: int = 1,
        tool_call_id: str = "",
        details: dict[str, Any] | None = None,
        *,
        is_seen: bool = True,
    ) -> None:
        self.started_ms = self.since_ms = started_ms
        self.name = name
        self.call = call
        self.attempt = attempt
        self.tool_call_id = tool_call_id
        self.details = details or {}
        self.is_seen = is_seen

    def lasted(self, seconds: float, now_ms: int) -> None:
        """Where the beginning was not seen, it is at least as long ago as the worker says that it took."""
        if not self.is_seen:
            self.started_ms = self.since_ms = min(self.since_ms, now_ms - int(seconds * 1000))


class OpenTurn:
    """One live turn, as far as it was told."""

    def __init__(
        self,
        turn_id: str,
        session_id: str,
        agent_id: str,
        metadata: dict[str, Any],
        trace: dict[str, str],
        emit: Callable[[TelemetryEvent], None],
    ) -> None:
        self.turn_id = turn_id
        self.session_id = session_id
        self.agent_id = agent_id
        self.metadata = metadata
        self.trace = trace
        self.details: dict[str, Any] = {}
        self.turn: Span | None = None
        """None while it is suspended."""
        self.started_ms = 0
        self.step_number = 0
        self.step: Span | None = None
        self.paused_step: Span | None = None
        self.step_calls = 0
        self.tools: dict[int, Span] = {}
        self.ready: dict[int, tuple[ToolCall, int]] = {}
        self.between_attempts: set[int] = set()
        """Calls whose last attempt has ended, and whose next one waits for its time."""
        """Calls that nobody runs so far; some get a result without having run."""
        self.hook: Span | None = None
        self._emit = emit

    # ---- the turn

    def begin(self, now_ms: int, started_ms: int, **details: Any) -> None:
        self.started_ms = started_ms
        self.turn = Span(started_ms)
        self.turn.since_ms = now_ms
        self._tell("turn.start", self.turn, now_ms, details={**self.details, **details})

    def go_on(self, now_ms: int) -> None:
        """It was suspended and is not any more, whether that was told or not."""
        if self.turn is not None:
            return
        self.begin(now_ms, self.started_ms, resumed=True)
        if self.paused_step is not None:
            self.step, self.paused_step = self.paused_step, None
            self.step.since_ms, self.step.is_seen = now_ms, True
            self._tell("step.start", self.step, now_ms, details={"resumed": True})

    def rest(self, now_ms: int, summary: TurnSummary | None, error: ErrorInfo | None) -> None:
        """It waits for its host: nothing of it is open until it is resumed."""
        if self.turn is None:
            return
        self.paused_step = self.step
        self._end_step(now_ms, "step.stop", "halted", None, details={"suspended": True})
        self._end_turn(now_ms, "turn.stop", "halted", "suspended", summary, error)

    def end(self, now_ms: int, outcome: str, summary: TurnSummary | None, error: ErrorInfo | None) -> None:
        """`outcome` is finished, failed or aborted."""
        # Where it was stopped while it was suspended, which had ended it once, it goes on for no time.
        self.go_on(now_ms)
        status: Status = "error" if outcome == "failed" else "halted"
        for index in list(self.tools):
            self.cut_tool(index, now_ms, status, error)
        self.cut_hook(now_ms, status, error)
        self._end_step(now_ms, "step.stop" if outcome == "finished" else "step.exception", status, error)
        if outcome == "finished":
            self._end_turn(now_ms, "turn.stop", "ok", outcome, summary, error)
        else:
            self._end_turn(now_ms, "turn.exception", status, outcome, summary, error)

    def _end_turn(
        self,
        now_ms: int,
        name: TelemetryName,
        status: Status,
        outcome: str,
        summary: TurnSummary | None,
        error: ErrorInfo | None,
    ) -> None:
        turn, self.turn = self.turn, None
        assert turn is not None
        details = {**self.details, "outcome": outcome, "steps": summary.steps if summary else self.step_number}
        usage = cost = None
        if summary is not None:
            usage, cost = summary.usage, summary.cost
            details["termination"] = summary.termination.kind
            if summary.attempts:
                details["attempts"] = summary.attempts
        self._tell(name, turn, now_ms, status, usage=usage, cost=cost, error=error, details=details)

    # ---- the step

    def begin_step(self, number: int, now_ms: int) -> None:
        self.go_on(now_ms)
        if self.step is not None and self.step_number == number:
            return
        self._end_step(now_ms, "step.stop", "halted", None)
        self.step_number, self.step_calls = number, 0
        self.ready.clear()
        self.between_attempts.clear()
        self.step = Span(now_ms, call=str(number))
        self._tell("step.start", self.step, now_ms)

    def end_step(self, event: StepFinished, now_ms: int) -> None:
        self.go_on(now_ms)
        if self.step is None:
            self.step = Span(now_ms, call=str(event.step_number), is_seen=False)
        self.step_number = event.step_number
        details = {"finish_reason": event.step.finish_reason, "tool_calls": self.step_calls}
        self._end_step(
            now_ms,
            "step.stop",
            "ok",
            None,
            usage=event.step.usage or event.usage,
            cost=event.step.cost,
            details=details,
        )

    def _end_step(
        self,
        now_ms: int,
        name: TelemetryName,
        status: Status,
        error: ErrorInfo | None,
        *,
        usage: Usage | None = None,
        cost: Cost | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        step, self.step = self.step, None
        if step is not None:
            details = {**(details or {}), "attempts": step.attempt}
            self._tell(name, step, now_ms, status, usage=usage, cost=cost, error=error, details=details)

    # ---- its calls

    def note_call(self, index: int, call: ToolCall, now_ms: int) -> None:
        self.step_calls += 1
        self.ready[index] = call, now_ms

    def begin_tool(self, event: ToolExecutionStarted, task: ToolTask | None, now_ms: int) -> None:
        self.go_on(now_ms)
        index = event.index
        self.between_attempts.discard(index)
        self.cut_tool(index, now_ms, "error", ErrorInfo(kind=ErrorKind.DELIVERY_LOST, message="the call is repeated"))
        known = self.ready.pop(index, None)
        arguments = task.arguments if task is not None else known[0].arguments if known is not None else {}
        call = f"{event.step_number}.{index}"
        span = Span(now_ms, event.name, call, event.attempt, event.tool_call_id, {"arguments": arguments})
        self.tools[index] = span
        self._tell("tool.start", span, now_ms, details=span.details)

    def end_tool(self, event: ToolExecutionFinished, now_ms: int) -> None:
        index = event.index
        if index in self.between_attempts:
            return None  # stopped while nothing of it ran: its attempts have ended already
        span = self.tools.pop(index, None) or self._never_run(index)
        if span is None:
            span = Span(
                now_ms, event.name, f"{event.step_number}.{index}", tool_call_id=event.tool_call_id, is_seen=False
            )
        span.lasted(event.duration, now_ms)
        details: dict[str, Any] = {**span.details, "run_seconds": event.duration}
        error = None
        if event.aborted:
            error = ErrorInfo(kind=ErrorKind.ABORTED, message=event.error or "the turn was stopped")
            return self._tell("tool.exception", span, now_ms, "halted", error=error, details=details)
        if event.error is not None:
            error = ErrorInfo(kind=TOOL_ERROR, message=event.error)
        if event.tool_result is not None:
            details["result"] = event.tool_result.result
        return self._tell("tool.stop", span, now_ms, "error" if error else "ok", error=error, details=details)

    def give_result(self, event: ToolResultReady, now_ms: int) -> None:
        """The result of a call that nobody ran (unknown, refused, denied, the host's): told as a call all the same."""
        span = self._never_run(event.index)
        if span is None:
            return
        result = event.tool_result
        error = ErrorInfo(kind=TOOL_ERROR, message=str(result.result)[:500]) if result.is_error else None
        details = {**span.details, "executed": False, "result": result.result}
        self._tell("tool.stop", span, now_ms, "error" if error else "ok", error=error, details=details)

    def _never_run(self, index: int) -> Span | None:
        """Tell the start of a call that is known but was not handed to a worker."""
        known = self.ready.pop(index, None)
        if known is None:
            return None
        call, since_ms = known
        name = f"{self.step_number}.{index}"
        span = Span(since_ms, call.name, name, 1, call.id, {"arguments": call.arguments})
        self._tell("tool.start", span, since_ms, details=span.details)
        return span

    def cut_tool(self, index: int, now_ms: int, status: Status, error: ErrorInfo | None) -> None:
        span = self.tools.pop(index, None)
        if span is not None:
            self._tell("tool.exception", span, now_ms, status, error=error, details=span.details)

    # ---- its hook; there is one at a time

    def begin_hook(self, task: ToolTask, now_ms: int) -> None:
        self.cut_hook(now_ms, "error", ErrorInfo(kind=ErrorKind.DELIVERY_LOST, message="the hook is repeated"))
        about = task.arguments.get("tool_call")
        tool_call_id = str(about.get("id", "")) if isinstance(about, dict) else ""
        self.hook = Span(now_ms, task.tool, task.call, task.attempt, tool_call_id, {"point": task.hook})
        self._tell("hook.start", self.hook, now_ms, details=self.hook.details)

    def end_hook(self, event: HookFinished, now_ms: int) -> None:
        span, self.hook = self.hook, None
        if span is None:
            call_id = event.tool_call_id or ""
            span = Span(now_ms, event.name, tool_call_id=call_id, details={"point": event.point}, is_seen=False)
        span.lasted(event.duration, now_ms)
        details = {**span.details, "run_seconds": event.duration}
        if event.error is None:
            return self._tell("hook.stop", span, now_ms, "ok", details=details)
        error = ErrorInfo(kind=ErrorKind.HOOK_FAILED, message=event.error)
        return self._tell("hook.exception", span, now_ms, "error", error=error, details=details)

    def cut_hook(self, now_ms: int, status: Status, error: ErrorInfo | None) -> None:
        span, self.hook = self.hook, None
        if span is not None:
            self._tell("hook.exception", span, now_ms, status, error=error, details=span.details)

    def _tell(
        self,
        name: TelemetryName,
        span: Span,
        now_ms: int,
        status: Status | None = None,
        *,
        usage: Usage | None = None,
        cost: Cost | None = None,
        error: ErrorInfo | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        details = details or {}
        if not span.is_seen and status is not None:
            details = {**details, "start_unknown": True}
        self._emit(
            TelemetryEvent(
                name=name,
                turn_id=self.turn_id,
                session_id=self.session_id,
                agent_id=self.agent_id,
                at=now_ms / 1000,
                started_at=span.started_ms / 1000,
                step=self.step_number,
                call=span.call,
                attempt=span.attempt,
                subject=span.name,
                tool_call_id=span.tool_call_id,
                duration_seconds=None if status is None else max(0, now_ms - span.since_ms) / 1000,
                status=status,
                usage=usage,
                cost=cost,
                metadata=self.metadata,
                error=error,
                trace=self.trace,
                details=details,
            )
        )
