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
from turnmill.protocol.keys import is_idempotency_name
from turnmill.protocol.messages import (
    AbortTurn,
    Answer,
    CallWaiting,
    CancelSteering,
    DecideApprovals,
    DeliveryLost,
    HandOff,
    ModelReply,
    ResumeTurn,
    StartTurn,
    SteerTurn,
    SubTurnEnded,
    TimerFired,
    ToolProgress,
    ToolReply,
)
from turnmill.protocol.messages import DeleteSession as DeleteSessionCommand
from turnmill.protocol.specs import Plan

from . import commands, pairing
from .calls import call_overdue, dispatch_call, end_call, is_handoff
from .draft import Draft
from .effects import Cancel, Decision, DeleteSession, Record, SetTimer
from .endings import (
    abort_turn,
    end_if_stopped,
    end_stopped,
    fail_turn,
    host_calls,
    plan_lost,
    refuse_turn,
    settle_stopped,
)
from .flow import advance_turn
from .hook_calls import hook_overdue
from .model_failures import model_failed
from .replies import (
    answered_by_sub_turn,
    call_of,
    call_waiting,
    delivery_lost,
    model_reply,
    tool_progress,
    tool_reply,
)
from .state import CallStatus, QueuedTurn, SessionState, Steering, TurnPhase, TurnState, copy_state
from .steps import begin_turn, retry_model

LOSSES_MAX = 5
JOINED_MAX = 50
"""How many starts that became steering a session remembers."""


class Start(NamedTuple):
    """A `start_turn` whose agent was resolved: the plan it will run with, or why it cannot."""

    command: StartTurn
    plan_id: str
    problem: ErrorInfo | None = None


class Transfer(NamedTuple):
    """A `hand_off` whose agent was resolved: the plan that the turn goes on with, or why it cannot."""

    command: HandOff
    plan_id: str
    problem: ErrorInfo | None = None


Input: TypeAlias = (
    Start
    | SteerTurn
    | CancelSteering
    | AbortTurn
    | ResumeTurn
    | DecideApprovals
    | DeleteSessionCommand
    | Transfer
    | ModelReply
    | ToolReply
    | ToolProgress
    | DeliveryLost
    | CallWaiting
    | SubTurnEnded
    | TimerFired
)


class Limits(NamedTuple):
    """Limits that are the namespace's, not the agent's."""

    queued_turns_max: int = 100
    losses_max: int = LOSSES_MAX
    session_ttl_ms: int = 0
    """How long an idle session is kept; 0: until it is deleted."""
    event_bytes_max: int = 64 * 1024 * 1024
    """What one attempt at a tool call may say of its progress."""


def advance(
    state: SessionState,
    message: Input,
    now_ms: int,
    session_id: str,
    plans: Mapping[str, Plan],
    limits: Limits = Limits(),  # noqa: B008  # immutable
) -> Decision:
    """Decide on one message. `plans` holds the plans that `state.plan_ids` and the message name."""
    draft = Draft(copy_state(state), session_id, now_ms, plans, limits.losses_max, limits.event_bytes_max)
    _decide(draft, message, limits)
    if draft.discarded is not None:
        return Decision(state, draft.effects, discarded=draft.discarded)
    _settle(draft)
    _note_idleness(draft, state)
    _set_timer(draft, limits.session_ttl_ms)
    return Decision(draft.state, draft.effects, draft.live, draft.new_turn)


def _decide(draft: Draft, message: Input, limits: Limits) -> None:
    match message:
        case Start():
            _start(draft, message, limits)
        case ModelReply():
            model_reply(draft, message)
        case ToolReply():
            tool_reply(draft, message)
        case ToolProgress():
            tool_progress(draft, message)
        case DeliveryLost():
            delivery_lost(draft, message)
        case CallWaiting():
            call_waiting(draft, message)
        case TimerFired():
            _timer_fired(draft, limits)
        case SubTurnEnded():
            answered_by_sub_turn(draft, message)
        case Transfer():
            _transfer(draft, message)
        case SteerTurn():
            commands.steer(draft, message, limits.queued_turns_max)
        case CancelSteering():
            commands.cancel_steering(draft, message)
        case AbortTurn():
            commands.abort(draft, message)
        case ResumeTurn():
            commands.resume(draft, message, limits.queued_turns_max)
        case DecideApprovals():
            commands.decide_approvals(draft, message)
        case DeleteSessionCommand():
            commands.delete_session(draft, message)
        case _:
            assert_never(message)


def _settle(draft: Draft) -> None:
    """Behind the end of a turn: the end of the session if that was asked for, and then the next turn of the queue."""
    if draft.state.turn is None and draft.state.deletions:
        _remove(draft)
    while draft.state.turn is None and draft.state.queue:
        queued = draft.state.queue.pop(0)
        _begin(draft, queued, was_queued=True)


def _remove(draft: Draft) -> None:
    """The end of the session. Turns that wait came behind it: they begin a new session of the same name."""
    state = draft.state
    draft.effects.append(DeleteSession())
    for request_id in state.deletions:
        draft.reply(request_id, Answer(done=True))
    # What is left is a record without a content: the script removes it with everything else.
    draft.state = SessionState(timer_ms=state.timer_ms, queue=state.queue)
    for queued in state.queue:
        draft.keep_blobs(*queued.command.messages, *[item.message for item in queued.steering])


def _note_idleness(draft: Draft, before: SessionState) -> None:
    """A session is idle since the end of its last turn, and a turn that was refused is none."""
    state = draft.state
    if state.turn is not None:
        state.idle_since_ms = 0
    elif state.length and (before.turn is not None or state.length != before.length):
        state.idle_since_ms = draft.now_ms


def _expire(draft: Draft, session_ttl_ms: int) -> None:
    """An idle session's time may be over. One that nobody noted as idle, a fork, is so from now on."""
    state = draft.state
    if not session_ttl_ms or not state.length:
        return
    if not state.idle_since_ms:
        state.idle_since_ms = draft.now_ms
    elif state.idle_since_ms + session_ttl_ms <= draft.now_ms:
        _remove(draft)


def _begin(draft: Draft, queued: QueuedTurn, *, was_queued: bool = False) -> None:
    begin_turn(draft, queued, was_queued=was_queued)
    turn = draft.state.turn
    if turn is not None:
        advance_turn(draft, turn)


# ---- a new turn


def _start(draft: Draft, start: Start, limits: Limits) -> None:
    command, state = start.command, draft.state
    known = {queued.command.turn_id for queued in state.queue}
    if state.turn is not None:
        known |= {state.turn.turn_id, *state.turn.steered}
    if command.turn_id in known or command.turn_id in dict(state.joined):
        return _known_start(draft, command)
    draft.new_turn = command.turn_id
    problem = start.problem or _unfit(command)
    if problem is not None:
        return refuse_turn(draft, command, problem)
    if state.turn is None:
        draft.keep_blobs(*command.messages)
        return _begin(draft, QueuedTurn(command, start.plan_id))
    refusal = _busy(draft, state.turn, command, limits)
    if refusal is not None:
        return refuse_turn(draft, command, refusal)
    if command.on_busy == "steer" and state.turn.phase is not TurnPhase.ABORTING:
        return _steer_instead(draft, state.turn, command)
    queued = QueuedTurn(command, start.plan_id)
    draft.keep_blobs(*command.messages)
    if command.on_busy == "interrupt":
        state.queue.insert(0, queued)
        draft.record_queued(command)
        _answer_start(draft, command)
        return abort_turn(draft, state.turn, f"interrupted by turn {command.turn_id}")
    state.queue.append(queued)
    draft.record_queued(command)
    return _answer_start(draft, command)


def _unfit(command: StartTurn) -> ErrorInfo | None:
    fault = pairing.fault(command.messages)
    return (
        ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=f"the messages fit no conversation: {fault}") if fault else None
    )


def _known_start(draft: Draft, command: StartTurn) -> None:
    """A repetition, answered as the command was the first time."""
    joined = dict(draft.state.joined).get(command.turn_id)
    answer = Answer(turn_id=command.turn_id)
    if joined is not None:
        answer = Answer(turn_id=joined, steering_id=command.turn_id)
    draft.discard("duplicate_turn")
    if command.answer:
        draft.reply(command.turn_id, answer)


def _answer_start(draft: Draft, command: StartTurn) -> None:
    if command.answer:
        draft.reply(command.turn_id, Answer(turn_id=command.turn_id))


def _busy(draft: Draft, live: TurnState, command: StartTurn, limits: Limits) -> ErrorInfo | None:
    """Why a new turn may not come behind the live one; None where it may."""
    state, session = draft.state, command.session_id
    if live.phase is TurnPhase.SUSPENDED and command.on_busy != "interrupt":
        pending = host_calls(live) or (live.answered if live.failed_exchange is not None else [])
        if pending:
            text = f"turn {live.turn_id} of session {session} waits for the results of {', '.join(pending)}"
            return ErrorInfo(kind=ErrorKind.TOOL_RESULTS_REQUIRED, message=text, pending=pending)
        pending = commands.waiting_approvals(live)
        text = f"turn {live.turn_id} of session {session} waits for a person to approve {', '.join(pending)}"
        return ErrorInfo(kind=ErrorKind.APPROVAL_REQUIRED, message=text, pending=pending)
    if command.on_busy == "reject":
        text = f"turn {live.turn_id} is live on session {session} (on_busy=reject)"
        return ErrorInfo(kind=ErrorKind.SESSION_BUSY, message=text)
    joins = command.on_busy == "steer" and live.phase is not TurnPhase.ABORTING
    faults = [fault for message in command.messages if (fault := commands.steering_fault(message))] if joins else []
    if faults:
        text = f"the messages cannot join turn {live.turn_id} (on_busy=steer): {faults[0]}"
        return ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text)
    waiting = len(live.steering) if joins else len(state.queue)
    if waiting >= limits.queued_turns_max:
        text = f"{waiting} turns wait on session {session} already: raise TURNMILL_SESSION_QUEUE_MAX"
        return ErrorInfo(kind=ErrorKind.QUEUE_FULL, message=text)
    return None


def _steer_instead(draft: Draft, live: TurnState, command: StartTurn) -> None:
    """The messages join the live turn; the turn that was asked for does not come to be."""
    if is_idempotency_name(command.idempotency):
        draft.effects.append(Record(live.turn_id, {command.idempotency: ""}))
    draft.state.joined = [*draft.state.joined, (command.turn_id, live.turn_id)][-JOINED_MAX:]
    for index, message in enumerate(command.messages):
        steering_id = command.turn_id if index == 0 else f"{command.turn_id}.{index}"
        commands.add_steering(draft, live, Steering(steering_id, message))
    if command.answer:
        draft.reply(command.turn_id, Answer(turn_id=live.turn_id, steering_id=command.turn_id))


def _transfer(draft: Draft, transfer: Transfer) -> None:
    """The agent of a handoff is known: the call has its result, and the next step is that agent's."""
    turn = draft.state.turn
    if turn is None or turn.turn_id != transfer.command.turn_id:
        return draft.discard("stale_transfer")
    call = call_of(turn, transfer.command.call)
    if call is None or call.status is not CallStatus.RUNNING:
        return draft.discard("stale_transfer")
    if turn.phase is TurnPhase.ABORTING:
        settle_stopped(draft, turn, call, pairing.stopped(call.tool_call, turn.abort_reason or ""))
        return end_if_stopped(draft, turn)
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    if not is_handoff(draft, turn, call):
        return draft.discard("stale_transfer")
    name = transfer.command.agent.partition("@")[0]
    if transfer.problem is not None:
        result = pairing.error_result(call.tool_call, f"execution failed ({transfer.problem.message})")
    else:
        turn.next_plan_id = transfer.plan_id
        result = pairing.handed_off(call.tool_call, name)
    end_call(draft, turn, call, result)
    return advance_turn(draft, turn)


# ---- time


def _timer_fired(draft: Draft, limits: Limits) -> None:
    draft.state.timer_ms = None
    turn = draft.state.turn
    if turn is None:
        return _expire(draft, limits.session_ttl_ms)
    if turn.phase is TurnPhase.ABORTING:
        return end_stopped(draft, turn) if turn.due_ms <= draft.now_ms else None
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    if turn.deadline_ms is not None and turn.deadline_ms <= draft.now_ms:
        if turn.phase is TurnPhase.MODEL:
            draft.effects.append(Cancel(turn.turn_id, "the turn's time is over"))
        text = f"turn {turn.turn_id} was not done by its deadline (turn_timeout)"
        return fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.DEADLINE_EXCEEDED, message=text))
    match turn.phase:
        case TurnPhase.TOOLS | TurnPhase.SUSPENDED:
            return _calls_due(draft, turn)
        case TurnPhase.HOOK:
            return hook_overdue(draft, turn) if turn.hook is not None and turn.hook.due_ms <= draft.now_ms else None
        case TurnPhase.BACKOFF:
            return retry_model(draft, turn) if turn.due_ms <= draft.now_ms else None
        case TurnPhase.MODEL:
            return _model_overdue(draft, turn) if turn.due_ms <= draft.now_ms else None
        case _:
            assert_never(turn.phase)


def _model_overdue(draft: Draft, turn: TurnState) -> None:
    seconds = draft.plan(turn).agent.model_timeout_seconds
    text = f"no reply to step {turn.step} within {seconds:g} s (model_timeout_seconds)"
    error = ErrorInfo(kind=ErrorKind.TIMEOUT, message=text, retryable=True)
    if turn.compacting:
        turn.compacting = ""
        error = turn.overflow or error
        turn.overflow = None
    model_failed(draft, turn, error)


def _calls_due(draft: Draft, turn: TurnState) -> None:
    """Each call whose time has come; the turn goes on once, behind all of them."""
    expired = []
    changed = False
    for call in turn.calls:
        if call.due_ms > draft.now_ms:
            continue
        match call.status:
            case CallStatus.BACKOFF:
                call.attempt += 1
                dispatch_call(draft, turn, call)
            case CallStatus.RUNNING:
                end_call(draft, turn, call, call_overdue(draft, turn, call))
                changed = True
            case CallStatus.APPROVAL:
                commands.conclude_approval(draft, turn, call, approved=False, reason="expired", expired=True)
                expired.append(call.tool_call.id)
            case CallStatus.QUEUED | CallStatus.HOST | CallStatus.DONE:
                continue
            case _:
                assert_never(call.status)
    if expired:
        commands.wake_after_expiry(draft, turn, expired)
    elif changed:
        advance_turn(draft, turn)


def _set_timer(draft: Draft, session_ttl_ms: int) -> None:
    """One timer per session, for its earliest deadline. A timer that fires early only looks and is set again, so a
    later deadline needs no write."""
    state, due = draft.state, _earliest_due(draft.state.turn)
    if session_ttl_ms and state.turn is None and state.idle_since_ms:
        due = state.idle_since_ms + session_ttl_ms
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
    due = _phase_due(turn)
    if turn.deadline_ms is None or turn.phase is TurnPhase.ABORTING:
        return due
    return turn.deadline_ms if due is None else min(due, turn.deadline_ms)


def _phase_due(turn: TurnState) -> int | None:
    """When what the turn waits for is overdue; None where it may wait for ever."""
    if turn.phase is TurnPhase.HOOK and turn.hook is not None:
        return turn.hook.due_ms
    if turn.phase is not TurnPhase.TOOLS and turn.phase is not TurnPhase.SUSPENDED:
        return turn.due_ms
    waiting = [call.due_ms for call in turn.calls if call.status in _WITH_DUE]
    return min(waiting, default=None)


_WITH_DUE = (CallStatus.RUNNING, CallStatus.BACKOFF, CallStatus.APPROVAL)

__all__ = ["Input", "Limits", "Start", "Transfer", "advance"]
