"""A turn's events for a person's eyes: text as it comes, everything else as one line for each.

The events of sub-turns stand behind a bar, one for each level, so that two that run at the same time are told apart from
their parent.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeAlias, assert_never

import msgspec
from rich.console import Console

from turnmill.protocol import events as e
from turnmill.protocol.codec import event_to_dict
from turnmill.protocol.content import ToolCall

from ..sub_turns import SubTurnEvent
from .pen import Pen
from .wording import call_text, result_text, seconds_text, shortened, summary_facts

_RESULT_LENGTH_MAX = 200
_BAR = "│ "

_AboutCalls: TypeAlias = (
    e.ToolCallReady
    | e.ToolExecutionStarted
    | e.ToolExecutionWaiting
    | e.ToolExecutionProgress
    | e.ToolExecutionFinished
    | e.ApprovalRequested
    | e.ApprovalDecided
    | e.SubTurnStarted
    | e.SubTurnFinished
)
_AboutTurn: TypeAlias = (
    e.TurnSuspended
    | e.TurnResumed
    | e.SteeringQueued
    | e.SteeringApplied
    | e.SteeringDropped
    | e.AgentChanged
    | e.HookFinished
    | e.ContextCompacted
)


class EventView(Protocol):
    """Shows events, one by one. `number` is 0 for those of sub-turns, which have numbers of their own channels."""

    def show(self, number: int, event: e.Event | SubTurnEvent) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One event per line: its dict form, and its number as `seq`. Events of sub-turns have `sub_turn` in its place."""

    def show(self, number: int, event: e.Event | SubTurnEvent) -> None:
        head: dict[str, Any] = {"seq": number}
        if isinstance(event, SubTurnEvent):
            child = {"turn_id": event.turn_id, "session_id": event.session_id, "agent_id": event.agent_id}
            head, event = {"sub_turn": child}, event.event
        line = msgspec.json.encode({**head, **event_to_dict(event)})
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        return


class Transcript:
    """Rendered like a chat. A failure's last line goes to stderr, so that it is seen where the output is not."""

    def __init__(self, console: Console | None = None, errors: Console | None = None) -> None:
        pen = Pen(console, errors)
        self._pen = pen
        self._own = _TurnView(pen, "")
        self._views: dict[str, _TurnView] = {}

    def show(self, number: int, event: e.Event | SubTurnEvent) -> None:
        view, inner = self._own, event
        if isinstance(inner, SubTurnEvent):
            view, inner = self._views.get(inner.turn_id, self._own), inner.event
        if isinstance(inner, e.SubTurnStarted):
            self._views[inner.turn_id] = _TurnView(self._pen, view.margin + _BAR)
        view.show(inner)

    def close(self) -> None:
        """End the line that is open."""
        self._pen.end_line()


class _TurnView:
    """One turn's events, at one margin."""

    def __init__(self, pen: Pen, margin: str) -> None:
        self._pen = pen
        self._calls: dict[tuple[int, int], ToolCall] = {}
        self._turn_id = ""
        self.margin = margin

    def show(self, event: e.Event) -> None:
        match event:
            case e.TextDelta():
                self._pen.text(self.margin, event.text)
            case e.ReasoningDelta():
                self._pen.text(self.margin, event.text or "", "dim italic")
            case e.TurnStarted():
                self._turn_id = event.turn_id
                self._line(f"● {event.agent_id}  {event.turn_id}  session {event.session_id}", "bold")
            case e.StepStarted():
                self._line(f"step {event.step_number}", "dim")
            case e.StepRetrying():
                text = f"attempt {event.attempt} of {event.max_attempts} in {event.delay:g} s"
                self._line(f"↻ step {event.step_number} failed: {event.error}; {text}", "yellow")
            case e.StepReset():
                text = f"↻ step {event.step_number} begins again (attempt {event.attempt}); what it said above is void"
                self._line(text, "yellow")
            case e.StepFinished() | e.ToolCallStarted() | e.ToolCallDelta() | e.ToolResultReady():
                return
            case e.TurnFinished() | e.TurnFailed():
                self._ending(event)
            case (
                e.TurnSuspended()
                | e.TurnResumed()
                | e.SteeringQueued()
                | e.SteeringApplied()
                | e.SteeringDropped()
                | e.AgentChanged()
                | e.HookFinished()
                | e.ContextCompacted()
            ):
                self._turn(event)
            case _:
                self._call(event)

    # ---- what happens to the turn

    def _turn(self, event: _AboutTurn) -> None:
        match event:
            case e.TurnSuspended():
                self._line(f"‖ suspended: {'; '.join(self._reasons(event)) or 'it waits for its host'}", "magenta")
            case e.TurnResumed():
                self._line("▶ resumed" + _with_ids(event.tool_call_ids), "magenta")
            case e.SteeringQueued():
                who = "" if event.message.role == "user" else f" ({event.message.role})"
                self._line(f"» steering queued{who}: {event.message.text}  {event.steering_id}", "magenta")
            case e.SteeringApplied():
                self._line(f"» steering applied in step {event.step}  {event.steering_id}", "magenta")
            case e.SteeringDropped():
                self._line(f"» steering dropped: {event.reason}  {event.steering_id}", "magenta")
            case e.AgentChanged():
                self._line(f"⇒ {event.from_agent_id} hands over to {event.agent_id}", "bold")
            case e.HookFinished():
                self._hook(event)
            case e.ContextCompacted():
                why = "the model's window was exceeded" if event.reason == "overflow" else "it had grown long"
                text = f"{event.replacements} message{'' if event.replacements == 1 else 's'} in place of older ones"
                self._line(f"≈ conversation shortened ({why}): {text}", "yellow")
            case _:
                assert_never(event)

    def _reasons(self, event: e.TurnSuspended) -> list[str]:
        reasons = []
        if event.error is not None:
            reasons.append(f"the provider call failed: {event.error.message} ({event.error.kind})")
        if event.pending and event.error is None:
            reasons.append(f"it waits for the results of {self._named(event.pending)}")
        if event.approvals:
            reasons.append(f"it waits for approval of {self._named(event.approvals)}")
        return reasons

    def _named(self, ids: list[str]) -> str:
        """Calls by what they are and by their ids, which the next command needs."""
        known = {call.id: call for call in self._calls.values()}
        return ", ".join(f"{call_text(known[call_id])} {call_id}" if call_id in known else call_id for call_id in ids)

    def _hook(self, event: e.HookFinished) -> None:
        head = f"  ∘ {event.point} {event.name} {seconds_text(event.duration)}"
        if event.error is not None:
            self._line(f"{head}: {event.error}", "red")
        else:
            self._line(head, "dim")

    # ---- calls

    def _call(self, event: _AboutCalls) -> None:
        match event:
            case e.ToolCallReady():
                self._calls[event.step_number, event.index] = event.tool_call
                self._line(f"  → {call_text(event.tool_call)}", "cyan")
                if event.tool_call.error:
                    self._line(f"    not run: {event.tool_call.error}", "red")
            case e.ToolExecutionStarted():
                if event.attempt > 1:
                    self._line(f"  ↻ {self._label(event)} attempt {event.attempt}", "yellow")
            case e.ToolExecutionWaiting():
                self._line(f"  … {self._label(event)} waits: {waiting_text(event)}", "yellow")
            case e.ToolExecutionProgress():
                self._line(f"  · {self._label(event)} {event.message}", "dim")
            case e.ToolExecutionFinished():
                self._finished(event)
            case e.ApprovalRequested():
                self._line(f"  ? {call_text(event.tool_call)} waits for approval  {event.tool_call.id}", "magenta")
            case e.ApprovalDecided():
                word = "approved" if event.approved else "denied"
                why = f": {event.reason}" if event.reason else ""
                self._line(f"  ? {self._label(event)} {word}{why}", "magenta")
            case e.SubTurnStarted():
                self._line(f"  ↳ {event.agent_id}  {event.turn_id}  session {event.session_id}", "cyan")
            case e.SubTurnFinished():
                self._line(f"  ↲ {event.turn_id} {event.status}", "cyan" if event.status == "finished" else "red")
            case _:
                assert_never(event)

    def _finished(self, event: e.ToolExecutionFinished) -> None:
        head = f"  ← {self._label(event)} {seconds_text(event.duration)}"
        if event.aborted:
            self._line(f"{head}: aborted", "yellow")
            return
        text = event.error if event.tool_result is None else result_text(event.tool_result)
        is_error = event.error is not None or (event.tool_result is not None and event.tool_result.is_error)
        self._line(f"{head}: {shortened(text or '', _RESULT_LENGTH_MAX)}", "red" if is_error else "green")

    def _label(self, event: Any) -> str:
        """The call as it was asked for, so that parallel calls of one tool are told apart."""
        call = self._calls.get((event.step_number, event.index))
        return call_text(call) if call is not None else str(getattr(event, "name", event.tool_call_id))

    # ---- the end

    def _ending(self, event: e.TurnFinished | e.TurnFailed) -> None:
        summary = event.result
        facts = summary_facts(summary) if summary is not None else ""
        turn_id = summary.turn_id if summary is not None else self._turn_id
        if isinstance(event, e.TurnFinished):
            kind = event.result.termination.kind
            how = "finished" if kind == "completed" else f"finished ({kind})"
            self._line("  ".join(filter(None, [f"✓ {how}: {facts}", turn_id])), "bold green")
            return
        word = "aborted" if event.aborted else "failed"
        text = f"✗ {word}: {event.error} ({event.error_type})"
        # A sub-turn's failure is its parent's affair: only the watched turn's own ends the output.
        self._line("  ".join(filter(None, [text, facts, turn_id])), "bold red", is_failure=not self.margin)

    def _line(self, text: str, style: str, *, is_failure: bool = False) -> None:
        self._pen.line(self.margin, text, style, is_failure=is_failure)


def _with_ids(ids: list[str]) -> str:
    return f" with {', '.join(ids)}" if ids else ""


def waiting_text(event: e.ToolExecutionWaiting) -> str:
    """Why a call waits, and what helps."""
    if event.paused is not None:
        return f"its queue is paused ({event.paused}): `turnmill queue resume tool:{event.queue}`"
    return f"no worker takes its queue {event.queue!r}: start `turnmill worker tools APP`"
