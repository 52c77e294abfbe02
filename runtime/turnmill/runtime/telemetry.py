"""Telemetry of the runtime: the life of turns, steps, tool calls and hooks, read off what was committed.

    unsubscribe = turnmill.runtime.telemetry.subscribe(print)

A coordinator tells what its commits made true, so nothing is told twice or in vain. One that took over in mid-turn
finds in the session's state what the one before had told, and tells the ends.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ConfigurationError, ErrorKind
from turnmill.protocol.events import (
    AgentChanged,
    Event,
    HookFinished,
    StepFinished,
    StepReset,
    StepRetrying,
    StepStarted,
    ToolCallReady,
    ToolExecutionFinished,
    ToolExecutionStarted,
    ToolResultReady,
    TurnFailed,
    TurnFinished,
    TurnResumed,
    TurnStarted,
    TurnSummary,
    TurnSuspended,
)
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ToolTask
from turnmill.protocol.telemetry import TELEMETRY, Callback, Telemetry, TelemetryEvent, subscribe
from turnmill.protocol.trace_context import traceparent

from .effects import DispatchTool, Feed, Publish
from .open_turn import OpenTurn, Span
from .state import CallState, CallStatus, Stage, TurnPhase, TurnState
from .store import SessionCommit

_log = get_logger(__name__)
_TURNS_MAX = 20_000
_IN_STEP = frozenset(
    {
        Stage.BEFORE_STEP,
        Stage.MODEL,
        Stage.BEFORE_CALLS,
        Stage.POLICIES,
        Stage.TOOLS,
        Stage.AFTER_CALLS,
        Stage.CLOSE,
    }
)
_WAITING = (CallStatus.QUEUED, CallStatus.APPROVAL, CallStatus.HOST)
_TOLD = (
    StepStarted,
    StepFinished,
    StepRetrying,
    StepReset,
    ToolCallReady,
    ToolExecutionStarted,
    ToolExecutionFinished,
    ToolResultReady,
    HookFinished,
    AgentChanged,
    TurnSuspended,
    TurnResumed,
)
"""What `_tell` knows, besides a turn's start and end."""


def start_telemetry(setting: str) -> Callable[[], None]:
    """Turn on what the setting `telemetry` names: `none`, `otel`, or `module:function`. Returns what ends it.

    Raises `ConfigurationError` where that cannot be had.
    """
    if setting == "none":
        return lambda: None
    if setting == "otel":
        try:
            from .otel_export import start_otel
        except ImportError as error:
            raise ConfigurationError(f"TURNMILL_TELEMETRY=otel needs `pip install turnmill[otel]`: {error}") from error
        return start_otel()
    return subscribe(_callback(setting))


def _callback(setting: str) -> Callback:
    module, _, name = setting.partition(":")
    _find_in_working_directory()
    try:
        callback: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"TURNMILL_TELEMETRY={setting} cannot be imported: {error}. It is none, otel, or module:function"
        ) from error
    if not callable(callback):
        raise ConfigurationError(f"TURNMILL_TELEMETRY={setting} is a {type(callback).__name__}, not a function")
    return callback  # type: ignore[no-any-return]  # it is callable


def _find_in_working_directory() -> None:
    """Modules beside the process are found, as those of an APP are."""
    folder = Path.cwd()
    if not any(Path(entry or folder).resolve() == folder.resolve() for entry in sys.path):
        sys.path.insert(0, str(folder))


def current_trace() -> dict[str, str]:
    """The caller's trace context, for `StartTurn.trace`. Empty where OpenTelemetry is not in use."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    carried = {"traceparent": traceparent(context.trace_id, context.span_id, is_sampled=context.trace_flags.sampled)}
    if context.trace_state:
        carried["tracestate"] = context.trace_state.to_header()
    return carried


class RuntimeTelemetry:
    """What one partition tells. Ask `is_active` before `committed`."""

    def __init__(self, telemetry: Telemetry = TELEMETRY, turns_max: int = _TURNS_MAX) -> None:
        self._telemetry = telemetry
        self._turns_max = turns_max
        self._turns: dict[str, OpenTurn] = {}

    @property
    def is_active(self) -> bool:
        return self._telemetry.is_active

    def committed(self, commits: Sequence[SessionCommit], now_ms: int) -> None:
        """Tell what commits that have landed mean; `now_ms` is the time they were decided at. Raises nothing."""
        for commit in commits:
            try:
                self._commit(commit, now_ms)
            except Exception:
                _log.exception("telemetry of a commit failed", session=commit.session_id)

    def forget(self) -> None:
        """The partition has another owner, which tells the ends of what is open here."""
        self._turns.clear()

    def _commit(self, commit: SessionCommit, now_ms: int) -> None:
        before = commit.before.turn if commit.before is not None else None
        if before is not None:
            self._turn(commit, before.turn_id, now_ms)  # what no event tells of is seen in its state
        tasks: dict[tuple[str, str], ToolTask] = {}
        for effect in commit.effects:
            if isinstance(effect, DispatchTool):
                tasks[effect.task.turn_id, effect.task.call] = effect.task
        for effect in commit.effects:
            if isinstance(effect, Publish):
                self._event(commit, effect.turn_id, effect.event, tasks, now_ms)
            elif isinstance(effect, DispatchTool) and effect.task.hook:
                turn = self._turn(commit, effect.task.turn_id, now_ms)
                if turn is not None:
                    turn.begin_hook(effect.task, now_ms)
        self._look_at_state(commit, now_ms)

    def _event(
        self, commit: SessionCommit, turn_id: str, event: Event, tasks: dict[tuple[str, str], ToolTask], now_ms: int
    ) -> None:
        if isinstance(event, TurnStarted):
            self._started(commit, event, now_ms)
        elif isinstance(event, TurnFinished | TurnFailed):
            self._ended(commit, turn_id, event, now_ms)
        elif isinstance(event, _TOLD):
            turn = self._turn(commit, turn_id, now_ms)
            if turn is not None:
                _tell(turn, event, tasks, now_ms)

    def _started(self, commit: SessionCommit, event: TurnStarted, now_ms: int) -> None:
        turn = self._new(commit, event.turn_id, event.agent_id)
        if event.parent_turn_id is not None:
            turn.details["parent_turn_id"] = event.parent_turn_id
        turn.begin(now_ms, round(event.created_at * 1000))

    def _ended(self, commit: SessionCommit, turn_id: str, event: TurnFinished | TurnFailed, now_ms: int) -> None:
        summary = event.result
        turn = self._turn(commit, turn_id, now_ms)
        if turn is None and summary is None:
            return self._refused(commit, turn_id, event, now_ms)
        if turn is None:
            assert summary is not None
            turn = self._unseen(commit, summary, now_ms)
        self._turns.pop(turn_id, None)
        if isinstance(event, TurnFinished):
            return turn.end(now_ms, "finished", summary, None)
        return turn.end(now_ms, "aborted" if event.aborted else "failed", summary, _error_of(event))

    def _refused(self, commit: SessionCommit, turn_id: str, event: TurnFinished | TurnFailed, now_ms: int) -> None:
        """A turn that never started has a start and an end all the same: nobody should have to miss it."""
        assert isinstance(event, TurnFailed)
        feeds = [effect for effect in commit.effects if isinstance(effect, Feed) and effect.turn_id == turn_id]
        turn = self._new(commit, turn_id, feeds[0].agent_id if feeds else "")
        self._turns.pop(turn_id)
        turn.details["refused"] = True
        turn.begin(now_ms, now_ms)
        turn.end(now_ms, "aborted" if event.aborted else "failed", None, _error_of(event))

    def _look_at_state(self, commit: SessionCommit, now_ms: int) -> None:
        """End what no event ends: attempts that wait for the next one, hooks of stopped turns, turns that are gone."""
        if commit.state is None:
            return
        live = commit.state.turn
        before = commit.before.turn if commit.before is not None else None
        if before is not None and (live is None or live.turn_id != before.turn_id):
            gone = self._turns.pop(before.turn_id, None)
            if gone is not None:
                error = ErrorInfo(kind=ErrorKind.ABORTED, message="the turn is gone with its session")
                gone.end(now_ms, "aborted", None, error)
        turn = self._turns.get(live.turn_id) if live is not None else None
        if live is None or turn is None:
            return
        if turn.hook is not None and live.hook is None:
            turn.cut_hook(now_ms, "halted", ErrorInfo(kind=ErrorKind.ABORTED, message="the turn was stopped"))
        for index in list(turn.tools):
            if index < len(live.calls) and live.calls[index].status is CallStatus.BACKOFF:
                error = ErrorInfo(kind=ErrorKind.INTERNAL, message="the attempt failed; the call is repeated")
                turn.cut_tool(index, now_ms, "error", error)
                turn.between_attempts.add(index)

    # ---- turns

    def _turn(self, commit: SessionCommit, turn_id: str, now_ms: int) -> OpenTurn | None:
        """A turn that is known, or that another coordinator had told of before; None for one that has ended."""
        known = self._turns.get(turn_id)
        if known is not None:
            return known
        before = commit.before.turn if commit.before is not None else None
        if before is not None and before.turn_id == turn_id:
            return self._adopt(commit, before, now_ms)
        after = commit.state.turn if commit.state is not None else None
        if after is not None and after.turn_id == turn_id:
            turn = self._new(commit, turn_id, after.agent_id)
            turn.started_ms = after.started_ms
            turn.turn = Span(after.started_ms)
            return turn
        return None

    def _adopt(self, commit: SessionCommit, state: TurnState, now_ms: int) -> OpenTurn:
        """Take a turn over as its state says that it was told. When its parts began is not known any more."""
        turn = self._new(commit, state.turn_id, state.agent_id)
        turn.started_ms, turn.step_number = state.started_ms, state.step
        if state.parent is not None:
            turn.details["parent_turn_id"] = state.parent.turn_id
        turn.step_calls = len(state.calls)
        turn.ready = {call.index: (call.tool_call, now_ms) for call in state.calls if call.status in _WAITING}
        step = Span(now_ms, call=str(state.step), attempt=state.attempt, is_seen=False)
        is_in_step = state.step > 0 and state.stage in _IN_STEP
        if state.phase is TurnPhase.SUSPENDED:
            turn.paused_step = step if is_in_step else None
            return turn
        turn.turn = Span(state.started_ms)
        turn.step = step if is_in_step else None
        turn.between_attempts = {call.index for call in state.calls if call.status is CallStatus.BACKOFF}
        for call in state.calls:
            if call.status is CallStatus.RUNNING:
                turn.tools[call.index] = _running(state, call, now_ms)
        if state.hook is not None:
            hook = state.hook
            name = f"{state.step}.{hook.point}.{hook.index}"
            turn.hook = Span(now_ms, hook.spec.name, name, hook.attempt, details={"point": hook.point}, is_seen=False)
        return turn

    def _unseen(self, commit: SessionCommit, summary: TurnSummary, now_ms: int) -> OpenTurn:
        """A turn of which nothing is known but its end."""
        turn = self._new(commit, summary.turn_id, summary.agent_id)
        turn.started_ms = min(now_ms, round(summary.started_at * 1000))
        turn.turn = Span(turn.started_ms)
        return turn

    def _new(self, commit: SessionCommit, turn_id: str, agent_id: str) -> OpenTurn:
        metadata, trace = _caller_of(commit, turn_id)
        while len(self._turns) >= self._turns_max:
            # Its next event adopts it again.
            del self._turns[next(iter(self._turns))]
        turn = OpenTurn(turn_id, commit.session_id, agent_id, metadata, trace, self._telemetry.emit)
        self._turns[turn_id] = turn
        return turn


def _tell(turn: OpenTurn, event: Event, tasks: dict[tuple[str, str], ToolTask], now_ms: int) -> None:
    match event:
        case StepStarted():
            turn.begin_step(event.step_number, now_ms)
        case StepFinished():
            turn.end_step(event, now_ms)
        case StepRetrying() | StepReset():
            turn.go_on(now_ms)
            if turn.step is not None:
                turn.step.attempt = event.attempt
        case ToolCallReady():
            turn.note_call(event.index, event.tool_call, now_ms)
        case ToolExecutionStarted():
            task = tasks.get((turn.turn_id, f"{event.step_number}.{event.index}"))
            turn.begin_tool(event, task, now_ms)
        case ToolExecutionFinished():
            turn.end_tool(event, now_ms)
        case ToolResultReady():
            turn.give_result(event, now_ms)
        case HookFinished():
            turn.end_hook(event, now_ms)
        case AgentChanged():
            turn.agent_id = event.agent_id
        case TurnSuspended():
            turn.rest(now_ms, event.result, event.error)
        case TurnResumed():
            turn.go_on(now_ms)
        case _:
            return


def _running(state: TurnState, call: CallState, now_ms: int) -> Span:
    asked, name = call.tool_call, f"{state.step}.{call.index}"
    details = {"arguments": asked.arguments}
    return Span(now_ms, asked.name, name, call.attempt, asked.id, details, is_seen=False)


def _caller_of(commit: SessionCommit, turn_id: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata and the trace that a turn was started with, as far as the commit still knows them."""
    for state in (commit.before, commit.state):
        if state is None:
            continue
        if state.turn is not None and state.turn.turn_id == turn_id:
            return state.turn.metadata, state.turn.trace
        for queued in state.queue:
            if queued.command.turn_id == turn_id:
                return queued.command.metadata, queued.command.trace
    return {}, {}


def _error_of(event: TurnFailed) -> ErrorInfo:
    return ErrorInfo(kind=event.error_type, message=event.error)


__all__ = [
    "Callback",
    "RuntimeTelemetry",
    "TelemetryEvent",
    "current_trace",
    "start_telemetry",
    "subscribe",
]
