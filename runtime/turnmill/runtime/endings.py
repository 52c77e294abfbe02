"""How a turn ends or comes to rest: finished, failed, stopped, suspended; and what is said about it.

Whatever the end, every open call gets its one result, so that the session stays usable, and steering that no step has
claimed is given back as dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnmill.protocol.content import ErrorInfo, Termination, ToolCall, ToolResult, Usage
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import (
    ENDED_STATUSES,
    Event,
    SteeringDropped,
    SteeringQueued,
    StepFinished,
    StepSummary,
    ToolExecutionFinished,
    TurnFailed,
    TurnFinished,
    TurnSummary,
    TurnSuspended,
)
from turnmill.protocol.messages import AbortTurn, Answer, StartTurn, SubTurnEnded

from . import pairing
from .draft import Draft
from .effects import Cancel, Publish, Send
from .state import CallState, CallStatus, Halt, QueuedTurn, Stage, Steering, TurnPhase, TurnState

ABORT_GRACE_SECONDS = 2.0
"""How long a stopped turn waits for partial text, usage and results of what was under way."""
SUB_TURN_GRACE_SECONDS = 1.0
"""How much longer it waits for each level of sub-turns below."""


_STARTED = (CallStatus.RUNNING, CallStatus.BACKOFF)
"""Calls that somebody was told of as started, so their end is told too."""
_LIVE_TURN_IN_THE_WAY = (ErrorKind.SESSION_BUSY, ErrorKind.TOOL_RESULTS_REQUIRED, ErrorKind.APPROVAL_REQUIRED)


def refuse_turn(draft: Draft, command: StartTurn, error: ErrorInfo) -> None:
    """Answer on the turn's own channel, so that whoever waits there is told."""
    _never_started(draft, command, error, "failed")
    if command.answer:
        live = draft.state.turn
        meant = live.turn_id if live is not None and error.kind in _LIVE_TURN_IN_THE_WAY else command.turn_id
        draft.reply(command.turn_id, Answer(turn_id=meant, error=error))


def drop_queued(draft: Draft, queued: QueuedTurn, reason: str) -> None:
    """Stop a turn that has not started. Its command was answered when it was accepted."""
    _never_started(draft, queued.command, ErrorInfo(kind=ErrorKind.ABORTED, message=reason), "aborted", queued.steering)


def _never_started(
    draft: Draft, command: StartTurn, error: ErrorInfo, status: str, steering: Sequence[Steering] = ()
) -> None:
    draft.record_refused(command, error, status)
    for position, item in enumerate(steering):
        queued = SteeringQueued(steering_id=item.steering_id, message=item.message)
        draft.effects.append(Publish(command.turn_id, queued, opens=position == 0))
    for item in steering:
        dropped = SteeringDropped(steering_id=item.steering_id, reason="the turn was stopped before it started")
        draft.effects.append(Publish(command.turn_id, dropped))
    termination = Termination(kind=status, error_type=error.kind, message=error.message)
    failed = TurnFailed(
        error=error.message,
        error_type=error.kind,
        aborted=status == "aborted",
        termination=termination,
        pending=error.pending,
        retry_after_seconds=error.retry_after_seconds,
    )
    draft.effects.append(Publish(command.turn_id, failed, opens=not steering, closes=True))
    draft.feed(command.turn_id, command.agent.partition("@")[0], "turn.failed", error.kind)
    _tell_parent(draft, command, command.turn_id, status, "", error)


def finish_turn(draft: Draft, turn: TurnState, halt: Halt) -> None:
    reason = halt.reason
    stop_condition = halt.name if halt.kind in ("step_limit", "stop_condition") else None
    tool_name = halt.name if halt.kind == "tool_terminated" else None
    termination = _termination(turn, halt.kind, reason=reason, stop_condition=stop_condition, tool_name=tool_name)
    drop_steering(draft, turn, "the turn has ended")
    is_json = halt.kind == "completed" and draft.plan(turn).agent.output is not None
    summary = msgspec.structs.replace(summarize(draft, turn, "finished", termination), is_json=is_json)
    _end_turn(draft, turn, "finished", summary, TurnFinished(result=summary))


def fail_turn(draft: Draft, turn: TurnState, error: ErrorInfo, halt: Halt | None = None) -> None:
    """End the turn with an error."""
    _cancel_running(draft, turn, "the turn failed")
    for call in turn.calls:
        if call.status in _STARTED:
            reason = f"the turn failed: {error.kind}"
            settle_stopped(draft, turn, call, pairing.stopped(call.tool_call, reason), reason=reason)
        elif call.status is not CallStatus.DONE:
            pairing.settle(call, pairing.not_executed(call.tool_call, f"the turn failed: {error.kind}"))
    _close_calls(draft, turn)
    drop_steering(draft, turn, "the turn failed")
    kind, name = (halt.kind, halt.name) if halt is not None else ("failed", None)
    termination = _termination(turn, kind, error_type=error.kind, message=error.message, tool_name=name)
    summary = msgspec.structs.replace(summarize(draft, turn, "failed", termination), error=error)
    failed = TurnFailed(error=error.message, error_type=error.kind, termination=termination, result=summary)
    _end_turn(draft, turn, "failed", summary, failed)


def plan_lost(draft: Draft, turn: TurnState) -> None:
    text = f"the plan {turn.plan_id} of turn {turn.turn_id} is gone (TURNMILL_PLAN_TTL, or the engine lost data)"
    fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))


# ---- stop


def abort_turn(draft: Draft, turn: TurnState, reason: str | None) -> None:
    """State first: from here on nothing new is started. What was under way has a moment to say what it has."""
    if turn.phase is TurnPhase.ABORTING:
        return
    turn.abort_reason = reason or "the turn was stopped"
    waits_for_model = turn.phase is TurnPhase.MODEL and not turn.compacting
    draft.live = ""
    draft.effects.append(Cancel(turn.turn_id, turn.abort_reason))
    turn.phase, turn.hook = TurnPhase.ABORTING, None
    turn.due_ms = draft.now_ms + int(ABORT_GRACE_SECONDS * 1000)
    for call in turn.calls:
        if call.status is CallStatus.RUNNING:
            if call.child_turn_id:
                abort_child(draft, turn, call, turn.abort_reason)
        elif call.status is CallStatus.BACKOFF:
            settle_stopped(draft, turn, call, pairing.stopped(call.tool_call, turn.abort_reason))
        elif call.status is not CallStatus.DONE:
            pairing.settle(call, pairing.not_executed(call.tool_call, f"stopped: {turn.abort_reason}"))
    if any(call.child_turn_id and call.status is CallStatus.RUNNING for call in turn.calls):
        depth = turn.parent.depth if turn.parent is not None else 0
        below = max(1, depth_limit(draft, turn) - depth) if draft.plan_of(turn) is not None else 1
        turn.due_ms += int(SUB_TURN_GRACE_SECONDS * below * 1000)
    if not waits_for_model:
        end_if_stopped(draft, turn)


def end_if_stopped(draft: Draft, turn: TurnState) -> None:
    """The end of a stopped turn, once nothing is awaited any more."""
    if all(call.status is CallStatus.DONE for call in turn.calls):
        end_stopped(draft, turn)


def end_stopped(draft: Draft, turn: TurnState) -> None:
    """The end of a stopped turn, whatever is still under way."""
    reason = turn.abort_reason or "the turn was stopped"
    for call in turn.calls:
        if call.status is not CallStatus.DONE:
            settle_stopped(draft, turn, call, pairing.stopped(call.tool_call, reason))
    _close_calls(draft, turn)
    drop_steering(draft, turn, "the turn was stopped")
    termination = _termination(turn, "aborted", reason=reason, error_type=ErrorKind.ABORTED, message=reason)
    error = ErrorInfo(kind=ErrorKind.ABORTED, message=reason)
    summary = msgspec.structs.replace(summarize(draft, turn, "aborted", termination), error=error)
    event = TurnFailed(
        error=reason, error_type=ErrorKind.ABORTED, aborted=True, termination=termination, result=summary
    )
    _end_turn(draft, turn, "aborted", summary, event)


def settle_stopped(
    draft: Draft,
    turn: TurnState,
    call: CallState,
    result: ToolResult,
    duration_seconds: float = 0.0,
    *,
    ran: bool = False,
    reason: str | None = None,
) -> None:
    """Give a call that was stopped with its turn its result; `ran` where it is the tool's own."""
    draft.publish(
        ToolExecutionFinished(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            name=call.tool_call.name,
            tool_result=result if ran else None,
            duration=duration_seconds,
            error=None if ran else reason or turn.abort_reason,
            aborted=not ran,
        )
    )
    pairing.settle(call, result)


def abort_child(draft: Draft, turn: TurnState, call: CallState, reason: str) -> None:
    command = AbortTurn(session_id=child_session(draft.session_id, call), turn_id=call.child_turn_id, reason=reason)
    draft.effects.append(Send(command))


def depth_limit(draft: Draft, turn: TurnState) -> int:
    """How deep sub-turns may nest: the uppermost turn says it for all below."""
    told = turn.parent.max_depth if turn.parent is not None else None
    return draft.plan(turn).agent.max_depth if told is None else told


def child_session(session_id: str, call: CallState) -> str:
    """The session of a call's sub-turn: below the root, so that it lies in the same partition."""
    return f"{session_id.partition('/')[0]}/{call.child_turn_id.partition('-')[2]}"


# ---- rest


def suspend_turn(draft: Draft, turn: TurnState, error: ErrorInfo | None = None) -> None:
    """Wait for the host, or for a person, without anything that runs."""
    turn.phase = TurnPhase.SUSPENDED
    pending = turn.answered if error is not None else host_calls(turn)
    approvals = [call.tool_call.id for call in turn.calls if call.status is CallStatus.APPROVAL]
    termination = _termination(turn, "suspended")
    summary = msgspec.structs.replace(
        summarize(draft, turn, "suspended", termination), pending=pending, approvals=approvals, error=error
    )
    draft.record_status(turn.turn_id, "suspended", summary)
    suspended = TurnSuspended(pending=pending, approvals=approvals, error=error, result=summary)
    draft.publish(suspended)
    draft.feed(turn.turn_id, turn.agent_id, suspended.type, ", ".join([*pending, *approvals])[:200])


def host_calls(turn: TurnState) -> list[str]:
    """The ids of the calls whose results the host owes, in call order; none while hooks may still answer in its place."""
    if turn.stage is not Stage.TOOLS:
        return []
    return [call.tool_call.id for call in turn.calls if call.status is CallStatus.HOST]


def drop_steering(draft: Draft, turn: TurnState, reason: str) -> None:
    for item in turn.steering:
        draft.publish(SteeringDropped(steering_id=item.steering_id, reason=reason))
    turn.steering = []


# ---- what is told


def publish_step_finished(draft: Draft, turn: TurnState) -> None:
    summary = StepSummary(
        step_number=turn.step,
        first_message=turn.step_first_message,
        end_message=draft.state.length,
        finish_reason=turn.finish_reason,
        usage=turn.step_usage,
        cost=turn.step_cost,
    )
    draft.publish(StepFinished(step_number=turn.step, step=summary, usage=turn.step_usage))


def summarize(draft: Draft, turn: TurnState, status: str, termination: Termination) -> TurnSummary:
    return TurnSummary(
        turn_id=turn.turn_id,
        session_id=draft.session_id,
        agent_id=turn.agent_id,
        status=status,  # type: ignore[arg-type]  # one of the four
        steps=turn.step,
        usage=turn.usage if turn.usage is not None else Usage(),
        started_at=turn.started_ms / 1000,
        ended_at=draft.now_ms / 1000,
        first_message=turn.first_message,
        end_message=draft.state.length,
        termination=termination,
        finish_reason=turn.finish_reason,
        cost=turn.cost,
        attempts=turn.attempts,
        signals=turn.signals,
        parent_turn_id=turn.parent.turn_id if turn.parent is not None else None,
    )


def _termination(
    turn: TurnState,
    kind: str,
    *,
    reason: str | None = None,
    stop_condition: str | None = None,
    tool_name: str | None = None,
    error_type: str | None = None,
    message: str | None = None,
) -> Termination:
    return Termination(
        kind=kind,
        provider_finish_reason=turn.finish_reason,
        reason=reason,
        stop_condition=stop_condition,
        tool_name=tool_name,
        # A step that a hook stopped before its model call is none.
        final_step_number=turn.step - 1 if kind == "hook_stop" else turn.step,
        has_text=turn.has_text,
        has_tool_calls=turn.has_tool_calls,
        last_tool_error=turn.last_tool_error,
        error_type=error_type,
        message=message,
    )


# ---- the end itself


def _cancel_running(draft: Draft, turn: TurnState, reason: str) -> None:
    """Calls that run for a turn which ends without them are of no use any more."""
    running = [call for call in turn.calls if call.status is CallStatus.RUNNING]
    if running or turn.phase is TurnPhase.HOOK:
        draft.effects.append(Cancel(turn.turn_id, reason))
    for call in running:
        if call.child_turn_id:
            abort_child(draft, turn, call, reason)


def _close_calls(draft: Draft, turn: TurnState) -> None:
    """The results of the calls into the transcript; they may stand there already, for the step was closed."""
    for message in pairing.closing_messages(turn.calls, turn.turn_id, turn.step):
        draft.append(message)
    turn.calls = []
    draft.live = ""


def _end_turn(draft: Draft, turn: TurnState, status: str, summary: TurnSummary, event: Event) -> None:
    assert status in ENDED_STATUSES
    draft.close_channel(turn.turn_id, event)
    draft.record_ended(turn.turn_id, status, summary)
    draft.feed(turn.turn_id, turn.agent_id, event.type, summary.termination.kind)
    draft.state.turn = None
    _tell_parent(draft, turn, turn.turn_id, status, turn.answer, summary.error)


def _tell_parent(
    draft: Draft, child: TurnState | StartTurn, child_turn_id: str, status: str, text: str, error: ErrorInfo | None
) -> None:
    parent = child.parent
    if parent is None:
        return
    ended = SubTurnEnded(
        session_id=parent.session_id,
        turn_id=parent.turn_id,
        call=parent.call,
        attempt=parent.attempt,
        token=parent.token,
        child_turn_id=child_turn_id,
        status=status,
        text=text,
        error=error,
    )
    draft.effects.append(Send(ended))


def call_text(call: ToolCall) -> str:
    """A call as a model reads it: name and arguments."""
    return f"{call.name}({msgspec.json.encode(call.arguments).decode()})"
