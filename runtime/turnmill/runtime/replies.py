"""What workers and sub-turns say of what they were given, and what the coordinator finds out about them.

Which attempt may still be answered is part of the state: a result of another attempt is late or a repetition, and is
counted and dropped. A stopped turn takes what is said of it too, for its history's sake.
"""

from __future__ import annotations

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import ToolExecutionProgress, ToolExecutionWaiting
from turnmill.protocol.messages import (
    Addressed,
    CallWaiting,
    DeliveryLost,
    ModelReply,
    SubTurnEnded,
    ToolProgress,
    ToolReply,
)

from . import pairing
from .calls import dispatch_call, end_call, note_progress, sub_turn_ended
from .draft import Draft, encode_json
from .endings import end_if_stopped, fail_turn, plan_lost, settle_stopped
from .flow import advance_turn, reply_arrived
from .hook_calls import hook_answered, hook_lost, hook_waiting, is_for_hook
from .model_failures import model_failed
from .state import CallState, CallStatus, TurnPhase, TurnState
from .steps import end_compaction, keep_partial, retry_model

_EVENT_BYTES = 200
"""What an event has beside what is said in it, about."""
RETRY_AFTER_SECONDS_MAX = 3600.0
"""How long a tool may put its next attempt off."""
_WITH_CALLS = (TurnPhase.TOOLS, TurnPhase.SUSPENDED, TurnPhase.ABORTING)


def model_reply(draft: Draft, reply: ModelReply) -> None:
    turn = turn_of(draft, reply)
    awaited = turn is not None and turn.phase in (TurnPhase.MODEL, TurnPhase.ABORTING) and not turn.calls
    if turn is None or not awaited or reply.call != str(turn.step) or reply.attempt != turn.attempt:
        return draft.discard("stale_model_reply")
    if turn.phase is TurnPhase.ABORTING:
        keep_partial(draft, turn, reply)
        return end_if_stopped(draft, turn)
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    if turn.compacting:
        return end_compaction(draft, turn, reply)
    if reply.error is not None or reply.message is None:
        error = reply.error or ErrorInfo(kind=ErrorKind.INTERNAL, message="a model reply without message or error")
        return model_failed(draft, turn, error, reply)
    return reply_arrived(draft, turn, reply)


def tool_reply(draft: Draft, reply: ToolReply) -> None:
    turn = turn_of(draft, reply)
    if turn is not None and is_for_hook(turn, reply.call, reply.attempt):
        if draft.plan_of(turn) is None:
            return plan_lost(draft, turn)
        if hook_answered(draft, turn, reply):
            advance_turn(draft, turn)
        return None
    call = call_of(turn, reply.call)
    if turn is None or call is None:
        return draft.discard("stale_tool_reply")
    if call.status is not CallStatus.RUNNING or call.attempt != reply.attempt:
        return draft.discard("late_tool_reply" if call.status is CallStatus.DONE else "stale_tool_reply")
    if turn.phase is TurnPhase.ABORTING:
        return _stopped_call(draft, turn, call, reply)
    plan = draft.plan_of(turn)
    if plan is None:
        return plan_lost(draft, turn)
    if reply.error is not None and reply.error.retryable:
        call.failures += 1
        if call.failures < plan.tools[call.tool_call.name].max_attempts:
            call.status = CallStatus.BACKOFF
            delay_ms = draft.backoff_ms(plan.agent.retry, call.failures)
            call.due_ms = draft.now_ms + max(delay_ms, _retry_after_ms(reply.error))
            return None
    result = reply.result
    if result is None:
        text = reply.error.message if reply.error else "the worker sent no result"
        result = pairing.error_result(call.tool_call, f"execution failed ({text})")
    end_call(draft, turn, call, result, reply.duration_seconds)
    return advance_turn(draft, turn)


def _retry_after_ms(error: ErrorInfo) -> int:
    asked = error.retry_after_seconds or 0.0
    return int(min(asked, RETRY_AFTER_SECONDS_MAX) * 1000) if asked > 0 else 0  # MessagePack has NaN, too


def _stopped_call(draft: Draft, turn: TurnState, call: CallState, reply: ToolReply) -> None:
    """A call of a stopped turn: its own result if it had one, else that it was stopped."""
    ran = reply.result is not None and reply.error is None
    if ran and reply.result is not None:
        draft.keep_blobs(reply.result)
        settle_stopped(draft, turn, call, reply.result, reply.duration_seconds, ran=True)
    else:
        result = pairing.stopped(call.tool_call, turn.abort_reason or "")
        settle_stopped(draft, turn, call, result, reply.duration_seconds)
    end_if_stopped(draft, turn)


def answered_by_sub_turn(draft: Draft, ended: SubTurnEnded) -> None:
    turn = turn_of(draft, ended)
    call = call_of(turn, ended.call)
    fits = call is not None and call.status is CallStatus.RUNNING and call.child_turn_id == ended.child_turn_id
    if turn is None or call is None or not fits:
        return draft.discard("stale_sub_turn")
    if turn.phase is TurnPhase.ABORTING:
        ran = ended.status == "finished"
        stopped = pairing.stopped(call.tool_call, turn.abort_reason or "")
        result = sub_turn_ended(draft, turn, call, ended)
        settle_stopped(draft, turn, call, result if ran else stopped, ran=ran)
        return end_if_stopped(draft, turn)
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    end_call(draft, turn, call, sub_turn_ended(draft, turn, call, ended))
    return advance_turn(draft, turn)


def tool_progress(draft: Draft, progress: ToolProgress) -> None:
    turn = turn_of(draft, progress)
    call = call_of(turn, progress.call)
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
    size = len(progress.message) + len(encode_json(progress.data)) + _EVENT_BYTES
    if call.progress_bytes + size > draft.event_bytes_max:
        return draft.discard("progress_over_limit")
    call.progress_sequence = progress.sequence
    call.progress_bytes += size
    if draft.plan_of(turn) is not None:
        note_progress(draft, turn, call)
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


def delivery_lost(draft: Draft, lost: DeliveryLost) -> None:
    turn = turn_of(draft, lost)
    if turn is None:
        return draft.discard("stale_loss")
    if turn.phase is TurnPhase.ABORTING:
        return _lost_when_stopped(draft, turn, lost)
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    if is_for_hook(turn, lost.call, lost.attempt):
        return hook_lost(draft, turn)
    if turn.phase is TurnPhase.MODEL and lost.call == str(turn.step) and lost.attempt == turn.attempt:
        return _model_lost(draft, turn)
    call = call_of(turn, lost.call)
    if call is None or call.status is not CallStatus.RUNNING or call.attempt != lost.attempt:
        return draft.discard("stale_loss")
    return _call_lost(draft, turn, call)


def _lost_when_stopped(draft: Draft, turn: TurnState, lost: DeliveryLost) -> None:
    """Whoever had it is gone: a stopped turn waits for it no longer."""
    call = call_of(turn, lost.call)
    if call is not None and call.status is CallStatus.RUNNING and call.attempt == lost.attempt:
        settle_stopped(draft, turn, call, pairing.stopped(call.tool_call, turn.abort_reason or ""))
    elif turn.calls or lost.call != str(turn.step) or lost.attempt != turn.attempt:
        return draft.discard("stale_loss")
    return end_if_stopped(draft, turn)


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
    end_call(draft, turn, call, pairing.outcome_unknown(call.tool_call))
    return advance_turn(draft, turn)


def call_waiting(draft: Draft, waiting: CallWaiting) -> None:
    turn = turn_of(draft, waiting)
    if turn is not None and is_for_hook(turn, waiting.call, waiting.attempt):
        return hook_waiting(draft, turn, waiting)
    call = call_of(turn, waiting.call)
    if (
        turn is None
        or turn.phase is TurnPhase.ABORTING
        or call is None
        or call.status is not CallStatus.RUNNING
        or call.attempt != waiting.attempt
    ):
        return draft.discard("stale_finding")
    plan = draft.plan_of(turn)
    if plan is None:
        return plan_lost(draft, turn)
    spec = plan.tools[call.tool_call.name]
    if waiting.expired:
        end_call(draft, turn, call, pairing.not_started(call.tool_call, spec.start_timeout_seconds, waiting.paused))
        return advance_turn(draft, turn)
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
            paused=waiting.paused,
        )
    )
    return None


# ---- looks


def turn_of(draft: Draft, message: Addressed) -> TurnState | None:
    turn = draft.state.turn
    return turn if turn is not None and turn.turn_id == message.turn_id else None


def call_of(turn: TurnState | None, name: str) -> CallState | None:
    """The call of a wire name such as `2.0`: the first call of step 2."""
    if turn is None or turn.phase not in _WITH_CALLS:
        return None
    step, _, index = name.partition(".")
    if step != str(turn.step) or not index.isdecimal() or len(index) > 4 or int(index) >= len(turn.calls):
        return None
    return turn.calls[int(index)]
