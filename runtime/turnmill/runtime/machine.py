"""The machine: what happens next in a session.

`advance(state, message, now)` is pure and total. It has no I/O, no clock and no randomness; a message that does not fit
the state is answered or discarded with a reason, never a crash. It changes a copy and returns it with the effects that
the shell must commit together with the message's acknowledgement.

A turn is a loop of steps: a model call, then the tool calls it asked for, until the model answers without a call, a stop
condition holds or a limit is reached. Which attempt may still be answered is part of the state: a result of another
attempt is late or a repetition, and is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, assert_never

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import ToolExecutionProgress, ToolExecutionWaiting
from turnmill.protocol.messages import (
    CallWaiting,
    DeliveryLost,
    ModelReply,
    StartTurn,
    TimerFired,
    ToolProgress,
    ToolReply,
)
from turnmill.protocol.specs import Plan

from . import pairing
from .draft import Draft
from .effects import Decision, SetTimer
from .state import CallState, CallStatus, QueuedTurn, SessionState, TurnPhase, TurnState, copy_state
from .steps import (
    LOSSES_MAX,
    accept_reply,
    begin_turn,
    call_deadline_seconds,
    dispatch_call,
    end_call,
    fail_turn,
    model_failed,
    refuse_turn,
    retry_model,
)


class Start(NamedTuple):
    """A `start_turn` whose agent was resolved: the plan it will run with, or why it cannot."""

    command: StartTurn
    plan_id: str
    problem: ErrorInfo | None = None


Input: TypeAlias = Start | ModelReply | ToolReply | ToolProgress | DeliveryLost | CallWaiting | TimerFired


class Limits(NamedTuple):
    """Limits that are the namespace's, not the agent's."""

    queued_turns_max: int = 100
    losses_max: int = LOSSES_MAX


def advance(
    state: SessionState,
    message: Input,
    now_ms: int,
    session_id: str,
    plans: Mapping[str, Plan],
    limits: Limits = Limits(),  # noqa: B008  # immutable
) -> Decision:
    """Decide on one message. `plans` holds the plans that `state.plan_ids` and the message name."""
    draft = Draft(copy_state(state), session_id, now_ms, plans, limits.losses_max)
    match message:
        case Start():
            _start(draft, message, limits)
        case ModelReply():
            _model_reply(draft, message)
        case ToolReply():
            _tool_reply(draft, message)
        case ToolProgress():
            _tool_progress(draft, message)
        case DeliveryLost():
            _delivery_lost(draft, message)
        case CallWaiting():
            _call_waiting(draft, message)
        case TimerFired():
            _timer_fired(draft)
        case _:
            assert_never(message)
    if draft.discarded is not None:
        return Decision(state, draft.effects, discarded=draft.discarded)
    _set_timer(draft)
    return Decision(draft.state, draft.effects, draft.live, draft.new_turn)


def _start(draft: Draft, start: Start, limits: Limits) -> None:
    command, state = start.command, draft.state
    known = {queued.command.turn_id for queued in state.queue}
    if state.turn is not None:
        known.add(state.turn.turn_id)
    if command.turn_id in known:
        return draft.discard("duplicate_turn")
    draft.new_turn = command.turn_id
    if start.problem is not None:
        return refuse_turn(draft, command, start.problem)
    if state.turn is None:
        return begin_turn(draft, command, start.plan_id)
    if len(state.queue) >= limits.queued_turns_max:
        text = (
            f"{len(state.queue)} turns wait on session {command.session_id} already: raise TURNMILL_SESSION_QUEUE_MAX"
        )
        return refuse_turn(draft, command, ErrorInfo(kind=ErrorKind.QUEUE_FULL, message=text))
    state.queue.append(QueuedTurn(command, start.plan_id))
    draft.record_queued(command)
    return None


def _model_reply(draft: Draft, reply: ModelReply) -> None:
    turn = _turn_of(draft, reply)
    if (
        turn is None
        or turn.phase is not TurnPhase.MODEL
        or reply.call != str(turn.step)
        or reply.attempt != turn.attempt
    ):
        return draft.discard("stale_model_reply")
    if draft.plan_of(turn) is None:
        return _plan_lost(draft, turn)
    if reply.error is not None or reply.message is None:
        error = reply.error or ErrorInfo(kind=ErrorKind.INTERNAL, message="a model reply without message or error")
        return model_failed(draft, turn, error)
    return accept_reply(draft, turn, reply)


def _tool_reply(draft: Draft, reply: ToolReply) -> None:
    turn = _turn_of(draft, reply)
    call = _call_of(turn, reply.call)
    if turn is None or call is None:
        return draft.discard("stale_tool_reply")
    if call.status is not CallStatus.RUNNING or call.attempt != reply.attempt:
        return draft.discard("late_tool_reply" if call.status is CallStatus.DONE else "stale_tool_reply")
    plan = draft.plan_of(turn)
    if plan is None:
        return _plan_lost(draft, turn)
    if reply.error is not None and reply.error.retryable:
        call.failures += 1
        if call.failures < plan.tools[call.tool_call.name].max_attempts:
            call.status = CallStatus.BACKOFF
            delay_ms = draft.backoff_ms(plan.agent.retry, call.failures)
            call.due_ms = draft.now_ms + max(delay_ms, int((reply.error.retry_after_seconds or 0) * 1000))
            return None
    result = reply.result
    if result is None:
        text = reply.error.message if reply.error else "the worker sent no result"
        result = pairing.error_result(call.tool_call, f"execution failed ({text})")
    return end_call(draft, turn, call, result, reply.duration_seconds)


def _tool_progress(draft: Draft, progress: ToolProgress) -> None:
    turn = _turn_of(draft, progress)
    call = _call_of(turn, progress.call)
    fits = (
        turn is not None
        and call is not None
        and call.status is CallStatus.RUNNING
        and call.attempt == progress.attempt
        and progress.sequence > call.progress_sequence
    )
    if not fits:
        return draft.discard("stale_progress")
    assert turn is not None and call is not None
    call.progress_sequence = progress.sequence
    draft.publish(
        ToolExecutionProgress(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            name=call.tool_call.name,
            message=progress.message,
            data=progress.data,
        )
    )
    return None


def _delivery_lost(draft: Draft, lost: DeliveryLost) -> None:
    turn = _turn_of(draft, lost)
    if turn is None:
        return draft.discard("stale_loss")
    if draft.plan_of(turn) is None:
        return _plan_lost(draft, turn)
    if turn.phase is TurnPhase.MODEL and lost.call == str(turn.step) and lost.attempt == turn.attempt:
        return _model_lost(draft, turn)
    call = _call_of(turn, lost.call)
    if call is None or call.status is not CallStatus.RUNNING or call.attempt != lost.attempt:
        return draft.discard("stale_loss")
    return _call_lost(draft, turn, call)


def _model_lost(draft: Draft, turn: TurnState) -> None:
    turn.losses += 1
    if turn.losses >= draft.losses_max:
        text = f"step {turn.step} was lost with its LLM worker {turn.losses} times (TURNMILL_MAX_ATTEMPTS)"
        return fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.DELIVERY_LOST, message=text))
    return retry_model(draft, turn)


def _call_lost(draft: Draft, turn: TurnState, call: CallState) -> None:
    call.losses += 1
    spec = draft.plan(turn).tools[call.tool_call.name]
    if spec.retry_when_lost and call.losses < draft.losses_max:
        call.attempt += 1
        return dispatch_call(draft, turn, call)
    return end_call(draft, turn, call, pairing.outcome_unknown(call.tool_call))


def _call_waiting(draft: Draft, waiting: CallWaiting) -> None:
    turn = _turn_of(draft, waiting)
    call = _call_of(turn, waiting.call)
    if turn is None or call is None or call.status is not CallStatus.RUNNING or call.attempt != waiting.attempt:
        return draft.discard("stale_finding")
    plan = draft.plan_of(turn)
    if plan is None:
        return _plan_lost(draft, turn)
    spec = plan.tools[call.tool_call.name]
    if waiting.expired:
        return end_call(draft, turn, call, pairing.not_started(call.tool_call, spec.start_timeout_seconds))
    if call.waiting_announced:
        return draft.discard("stale_finding")
    call.waiting_announced = True
    draft.publish(
        ToolExecutionWaiting(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            name=call.tool_call.name,
            queue=spec.queue,
        )
    )
    return None


def _timer_fired(draft: Draft) -> None:
    draft.state.timer_ms = None
    turn = draft.state.turn
    if turn is None:
        return None
    if draft.plan_of(turn) is None:
        return _plan_lost(draft, turn)
    if turn.phase is TurnPhase.TOOLS:
        return _calls_due(draft, turn)
    if turn.due_ms > draft.now_ms:
        return None
    if turn.phase is TurnPhase.BACKOFF:
        return retry_model(draft, turn)
    seconds = draft.plan(turn).agent.model_timeout_seconds
    text = f"no reply to step {turn.step} within {seconds:g} s (model_timeout_seconds)"
    return model_failed(draft, turn, ErrorInfo(kind=ErrorKind.TIMEOUT, message=text, retryable=True))


def _calls_due(draft: Draft, turn: TurnState) -> None:
    for call in list(turn.calls):
        if call.due_ms > draft.now_ms or draft.state.turn is not turn or turn.phase is not TurnPhase.TOOLS:
            continue
        if call.status is CallStatus.BACKOFF:
            call.attempt += 1
            dispatch_call(draft, turn, call)
        elif call.status is CallStatus.RUNNING:
            seconds = call_deadline_seconds(draft.plan(turn), call)
            end_call(draft, turn, call, pairing.timed_out(call.tool_call, seconds))


def _plan_lost(draft: Draft, turn: TurnState) -> None:
    text = f"the plan {turn.plan_id} of turn {turn.turn_id} is gone (TURNMILL_PLAN_TTL, or the engine lost data)"
    fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))


def _turn_of(
    draft: Draft, message: ModelReply | ToolReply | ToolProgress | DeliveryLost | CallWaiting
) -> TurnState | None:
    turn = draft.state.turn
    return turn if turn is not None and turn.turn_id == message.turn_id else None


def _call_of(turn: TurnState | None, name: str) -> CallState | None:
    """The call of a wire name such as `2.0`: the first call of step 2."""
    if turn is None or turn.phase is not TurnPhase.TOOLS:
        return None
    step, _, index = name.partition(".")
    if step != str(turn.step) or not index.isdecimal() or len(index) > 4 or int(index) >= len(turn.calls):
        return None
    return turn.calls[int(index)]


def _set_timer(draft: Draft) -> None:
    """One timer per session, for its earliest deadline. A timer that fires early only looks and is set again, so a
    later deadline needs no write."""
    state, due = draft.state, _earliest_due(draft.state.turn)
    if due is None:
        if state.timer_ms is not None:
            state.timer_ms = None
            draft.effects.append(SetTimer(None))
    elif state.timer_ms is None or due < state.timer_ms:
        state.timer_ms = due
        draft.effects.append(SetTimer(due))


def _earliest_due(turn: TurnState | None) -> int | None:
    if turn is None:
        return None
    if turn.phase is not TurnPhase.TOOLS:
        return turn.due_ms
    waiting = [call.due_ms for call in turn.calls if call.status in (CallStatus.RUNNING, CallStatus.BACKOFF)]
    return min(waiting, default=None)


__all__ = ["Input", "Limits", "Start", "advance"]
