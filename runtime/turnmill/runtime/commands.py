"""What clients ask of a session besides a new turn: steer, stop, resume, approve, delete.

Every command is answered under its id, whether it changed something or not, and a command that comes twice changes
nothing the second time.
"""

from __future__ import annotations

import msgspec

from turnmill.protocol.content import ErrorInfo, Message
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import ApprovalDecided, SteeringDropped, SteeringQueued, TurnResumed
from turnmill.protocol.messages import (
    AbortTurn,
    Answer,
    ApprovalDecision,
    CancelSteering,
    DecideApprovals,
    DeleteSession,
    ResumeTurn,
    StartTurn,
    SteerTurn,
)

from . import pairing
from .calls import settle
from .draft import Draft
from .endings import abort_turn, drop_queued, host_calls, plan_lost
from .flow import advance_turn
from .state import CallState, CallStatus, QueuedTurn, SessionState, Steering, TurnPhase, TurnState
from .steps import claim_steering, retry_model

APPROVED, DENIED, EXPIRED = "approved", "denied", "expired"
STEERED_MAX = 200
"""How many ids of steering a turn remembers, to know a repeated command."""


def live_turn(draft: Draft, turn_id: str) -> TurnState | None:
    """The session's turn, if it is this one and may still be told something."""
    turn = draft.state.turn
    if turn is None or turn.turn_id != turn_id or turn.phase is TurnPhase.ABORTING:
        return None
    return turn


def _queued(state: SessionState, turn_id: str) -> QueuedTurn | None:
    return next((queued for queued in state.queue if queued.command.turn_id == turn_id), None)


def _refused(turn_id: str, kind: ErrorKind, text: str, pending: list[str] | None = None) -> Answer:
    error = ErrorInfo(kind=kind, message=text, pending=pending or [])
    return Answer(turn_id=turn_id, error=error, pending=pending or [])


def _full(turn_id: str, count: int) -> Answer:
    text = f"{count} messages wait for turn {turn_id} already (TURNMILL_SESSION_QUEUE_MAX)"
    return _refused(turn_id, ErrorKind.STEERING_FULL, text)


# ---- steering


def steer(draft: Draft, command: SteerTurn, pending_max: int) -> None:
    turn, queued = live_turn(draft, command.turn_id), _queued(draft.state, command.turn_id)
    if turn is None and queued is None:
        text = f"turn {command.turn_id} has ended: start another turn on the session"
        return draft.reply(command.steering_id, _refused(command.turn_id, ErrorKind.TURN_ENDED, text))
    fault = steering_fault(command.message)
    if fault is not None:
        return draft.reply(command.steering_id, _refused(command.turn_id, ErrorKind.BAD_REQUEST, fault))
    accepted = Answer(turn_id=command.turn_id, steering_id=command.steering_id)
    if command.mode == "queue":
        return _queue_next(draft, command, turn, queued, pending_max)
    waiting = turn.steering if turn is not None else queued.steering if queued is not None else []
    came = turn.steered if turn is not None else queued.steered if queued is not None else []
    known = {item.steering_id for item in waiting} | set(came)
    if command.steering_id not in known:
        if len(waiting) >= pending_max:
            return draft.reply(command.steering_id, _full(command.turn_id, len(waiting)))
        item = Steering(command.steering_id, command.message)
        if turn is not None:
            add_steering(draft, turn, item)
        elif queued is not None:
            draft.keep_blobs(item.message)
            index = draft.state.queue.index(queued)
            steered = [*queued.steered, item.steering_id][-STEERED_MAX:]
            changed = msgspec.structs.replace(queued, steering=[*queued.steering, item], steered=steered)
            draft.state.queue[index] = changed
    return draft.reply(command.steering_id, accepted)


def steering_fault(message: Message) -> str | None:
    """Why a message may not join a live turn; None where it may."""
    if message.role not in ("user", "system"):
        return f"a turn is told something by a user or by the system, not by the role {message.role!r}"
    return pairing.fault([message])


def add_steering(draft: Draft, turn: TurnState, item: Steering) -> None:
    turn.steering = [*turn.steering, item]
    turn.steered = [*turn.steered, item.steering_id][-STEERED_MAX:]
    draft.keep_blobs(item.message)
    draft.publish(SteeringQueued(steering_id=item.steering_id, message=item.message))


def _queue_next(
    draft: Draft, command: SteerTurn, turn: TurnState | None, queued: QueuedTurn | None, pending_max: int
) -> None:
    """The message becomes a turn of its own behind this one, with the same agent and options."""
    state = draft.state
    accepted = Answer(turn_id=command.turn_id, steering_id=command.steering_id)
    is_known = state.turn is not None and command.steering_id in (state.turn.turn_id, *state.turn.steered)
    is_known = is_known or (queued is not None and command.steering_id in queued.steered)
    if not is_known and _queued(state, command.steering_id) is None:
        if len(state.queue) >= pending_max:
            text = f"{len(state.queue)} turns wait on the session already (TURNMILL_SESSION_QUEUE_MAX)"
            return draft.reply(command.steering_id, _refused(command.turn_id, ErrorKind.STEERING_FULL, text))
        like = turn if turn is not None else queued
        assert like is not None
        options = like.command if isinstance(like, QueuedTurn) else like
        next_turn = StartTurn(
            turn_id=command.steering_id,
            session_id=command.session_id,
            agent=like.command.agent if isinstance(like, QueuedTurn) else like.agent_id,
            messages=[command.message],
            metadata=options.metadata,
            tenant=options.tenant,
            priority=options.priority,
            trace=options.trace,
        )
        if turn is not None:
            turn.steered = [*turn.steered, command.steering_id][-STEERED_MAX:]
        elif queued is not None:
            steered = [*queued.steered, command.steering_id][-STEERED_MAX:]
            state.queue[state.queue.index(queued)] = msgspec.structs.replace(queued, steered=steered)
        state.queue.append(QueuedTurn(next_turn, like.plan_id))
        draft.keep_blobs(command.message)
        draft.record_queued(next_turn)
    return draft.reply(command.steering_id, accepted)


def cancel_steering(draft: Draft, command: CancelSteering) -> None:
    turn, state = live_turn(draft, command.turn_id), draft.state
    removed = False
    if turn is not None and any(item.steering_id == command.steering_id for item in turn.steering):
        turn.steering = [item for item in turn.steering if item.steering_id != command.steering_id]
        draft.publish(SteeringDropped(steering_id=command.steering_id, reason="cancelled"))
        removed = True
    for index, queued in enumerate(state.queue):
        if queued.command.turn_id == command.steering_id:
            del state.queue[index]
            drop_queued(draft, queued, "cancelled")
            removed = True
            break
        if any(item.steering_id == command.steering_id for item in queued.steering):
            rest = [item for item in queued.steering if item.steering_id != command.steering_id]
            state.queue[index] = msgspec.structs.replace(queued, steering=rest)
            removed = True
    draft.reply(command.request_id, Answer(turn_id=command.turn_id, done=removed))


# ---- stop


def abort(draft: Draft, command: AbortTurn) -> None:
    """Stop a turn that is live or waits; of one that has ended nothing changes."""
    turn, queued = draft.state.turn, _queued(draft.state, command.turn_id)
    found = True
    if turn is not None and turn.turn_id == command.turn_id:
        abort_turn(draft, turn, command.reason)
    elif queued is not None:
        draft.state.queue.remove(queued)
        drop_queued(draft, queued, command.reason or "the turn was stopped")
    else:
        found = False
    draft.reply(command.request_id, Answer(turn_id=command.turn_id, done=found))


def delete_session(draft: Draft, command: DeleteSession) -> None:
    """Stop what is live and drop what waits; the rest is done when nothing is left (see `machine`)."""
    state = draft.state
    state.deletions = [*state.deletions, command.request_id]
    for queued in state.queue:
        drop_queued(draft, queued, "the session was deleted")
    state.queue = []
    if state.turn is not None:
        abort_turn(draft, state.turn, "the session was deleted")


# ---- the host's results


def resume(draft: Draft, command: ResumeTurn, pending_max: int) -> None:
    """Take results of calls that no worker runs; the first result of a call wins."""
    turn = live_turn(draft, command.turn_id)
    answer = _resume_problem(command, turn, pending_max)
    if answer is not None or turn is None:
        return draft.reply(command.request_id, answer or Answer(turn_id=command.turn_id))
    taken = []
    for result in command.tool_results:
        call = _call_by_id(turn, result.tool_call_id)
        if call is not None and call.status is CallStatus.HOST:
            settle(draft, turn, call, result)
            taken.append(call.tool_call.id)
    turn.answered = [*turn.answered, *taken]
    if command.message is not None and command.request_id not in turn.steered:
        add_steering(draft, turn, Steering(command.request_id, command.message))
    draft.reply(command.request_id, Answer(turn_id=turn.turn_id, pending=host_calls(turn)))
    if turn.phase is TurnPhase.SUSPENDED and (taken or turn.failed_exchange is not None):
        _wake(draft, turn, taken)
    elif taken and turn.phase is TurnPhase.TOOLS:
        _go_on(draft, turn)
    return None


def _resume_problem(command: ResumeTurn, turn: TurnState | None, pending_max: int) -> Answer | None:
    if turn is None:
        text = f"turn {command.turn_id} waits for no result: it has ended"
        return _refused(command.turn_id, ErrorKind.NO_PENDING_TOOLS, text)
    fault = steering_fault(command.message) if command.message is not None else None
    if fault is not None:
        return _refused(command.turn_id, ErrorKind.BAD_REQUEST, fault)
    if command.message is not None and command.request_id not in turn.steered and len(turn.steering) >= pending_max:
        return _full(command.turn_id, len(turn.steering))
    pending = host_calls(turn)
    ids = [result.tool_call_id for result in command.tool_results]
    unknown = [call_id for call_id in ids if call_id not in pending and call_id not in turn.answered]
    if not pending and turn.failed_exchange is None and (unknown or not ids):
        text = f"turn {command.turn_id} waits for no result of its host"
        return _refused(command.turn_id, ErrorKind.NO_PENDING_TOOLS, text)
    if unknown:
        text = f"no call {', '.join(unknown)} waits for a result; pending: {', '.join(pending) or 'none'}"
        return _refused(command.turn_id, ErrorKind.UNKNOWN_TOOL_RESULT, text, pending)
    if not ids and turn.failed_exchange is None:
        text = f"turn {command.turn_id} waits for the results of {', '.join(pending)}"
        return _refused(command.turn_id, ErrorKind.TOOL_RESULTS_REQUIRED, text, pending)
    return None


def _wake(draft: Draft, turn: TurnState, call_ids: list[str]) -> None:
    """Leave the rest: what is still missing suspends the turn again."""
    draft.publish(TurnResumed(tool_call_ids=call_ids))
    draft.record_status(turn.turn_id, "running")
    draft.feed(turn.turn_id, turn.agent_id, TurnResumed.type)
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    if turn.failed_exchange is not None:
        turn.failed_exchange = None
        claim_steering(draft, turn)
        return retry_model(draft, turn)
    turn.phase = TurnPhase.TOOLS
    return advance_turn(draft, turn)


def _go_on(draft: Draft, turn: TurnState) -> None:
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    return advance_turn(draft, turn)


def _call_by_id(turn: TurnState, call_id: str) -> CallState | None:
    return next((call for call in turn.calls if call.tool_call.id == call_id), None)


# ---- approvals


def decide_approvals(draft: Draft, command: DecideApprovals) -> None:
    turn = live_turn(draft, command.turn_id)
    problem = _approval_problem(command, turn)
    if problem is not None or turn is None:
        return draft.reply(command.request_id, problem or Answer(turn_id=command.turn_id))
    decided = [item for item in command.decisions if _decide(draft, turn, item)]
    draft.reply(command.request_id, Answer(turn_id=turn.turn_id, pending=waiting_approvals(turn)))
    if not decided:
        return None
    if turn.phase is TurnPhase.SUSPENDED:
        return _wake(draft, turn, [item.tool_call_id for item in decided])
    return _go_on(draft, turn)


def waiting_approvals(turn: TurnState | None) -> list[str]:
    calls = turn.calls if turn is not None else []
    return [call.tool_call.id for call in calls if call.status is CallStatus.APPROVAL]


def _approval_problem(command: DecideApprovals, turn: TurnState | None) -> Answer | None:
    """Why the decisions are refused, all of them. The first decision on a call stands; to repeat it is no mistake."""
    turn_id, waiting = command.turn_id, waiting_approvals(turn)
    others = f"waiting: {', '.join(waiting) or 'none'}"
    asked = {call.tool_call.id: call for call in turn.calls if _was_asked(call)} if turn is not None else {}
    unknown = [item.tool_call_id for item in command.decisions if item.tool_call_id not in asked]
    if unknown or not command.decisions:
        text = f"{', '.join(unknown) or 'no call'} of turn {turn_id} waits for no approval; {others}"
        return _refused(turn_id, ErrorKind.NO_PENDING_APPROVAL, text, waiting)
    wanted = {item.tool_call_id: item.approved for item in command.decisions}
    if any(wanted[item.tool_call_id] is not item.approved for item in command.decisions):
        return _refused(turn_id, ErrorKind.BAD_REQUEST, "a call is to be approved and denied", waiting)
    otherwise = [
        f"{call_id} has been {asked[call_id].decided}"
        if asked[call_id].decided != EXPIRED
        else f"{call_id} has expired"
        for call_id, approved in wanted.items()
        if asked[call_id].decided and (asked[call_id].decided == APPROVED) is not approved
    ]
    if otherwise:
        text = f"the first decision stands: {', '.join(otherwise)} already; {others}"
        return _refused(turn_id, ErrorKind.ALREADY_DECIDED, text, waiting)
    return None


def _was_asked(call: CallState) -> bool:
    return call.status is CallStatus.APPROVAL or bool(call.decided)


def _decide(draft: Draft, turn: TurnState, decision: ApprovalDecision) -> bool:
    call = _call_by_id(turn, decision.tool_call_id)
    if call is None or call.status is not CallStatus.APPROVAL:
        return False
    conclude_approval(draft, turn, call, approved=decision.approved, reason=decision.reason)
    return True


def conclude_approval(
    draft: Draft, turn: TurnState, call: CallState, *, approved: bool, reason: str | None, expired: bool = False
) -> None:
    """Let a call run, or give it the result that tells why it did not."""
    draft.publish(
        ApprovalDecided(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            approved=approved,
            reason=reason,
        )
    )
    call.due_ms = 0
    call.decided = APPROVED if approved else EXPIRED if expired else DENIED
    if approved:
        call.is_approved, call.status = True, CallStatus.QUEUED
        return
    word = "the approval expired" if expired else "a person denied the call"
    text = word if not reason or expired else f"{word}: {reason}"
    pairing.settle(call, pairing.not_executed(call.tool_call, text))
    turn.last_tool_error = text


def wake_after_expiry(draft: Draft, turn: TurnState, call_ids: list[str]) -> None:
    if turn.phase is TurnPhase.SUSPENDED:
        _wake(draft, turn, call_ids)
    else:
        _go_on(draft, turn)
