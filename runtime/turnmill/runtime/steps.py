"""The life of a turn: its start, its steps, its calls and its end, as changes to a draft.

The machine decides which of these happens; nothing here looks at a message's envelope.
"""

from __future__ import annotations

import msgspec

from turnmill.protocol.content import ErrorInfo, Termination, ToolCall, ToolResult, Usage
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import (
    LIVE_EVENTS,
    Event,
    ReasoningDelta,
    StepFinished,
    StepReset,
    StepRetrying,
    StepStarted,
    StepSummary,
    TextDelta,
    ToolCallDelta,
    ToolCallReady,
    ToolCallStarted,
    ToolExecutionFinished,
    ToolExecutionStarted,
    ToolResultReady,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TurnSummary,
)
from turnmill.protocol.messages import ModelReply, ModelTask, StartTurn, ToolTask
from turnmill.protocol.specs import Plan, StopCondition

from . import pairing
from .draft import Draft
from .effects import DispatchModel, DispatchTool
from .state import CallState, CallStatus, TurnPhase, TurnState

LOSSES_MAX = 5
RATE_LIMIT_WAITS_MAX = 50
GRACE_SECONDS = 5.0
"""How long a worker's own deadline may pass before the machine's takes its place."""

_LIVE: dict[str, type[TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta]] = {
    kind.type: kind for kind in LIVE_EVENTS
}


# ---- start


def begin_turn(draft: Draft, command: StartTurn, plan_id: str, *, was_queued: bool = False) -> None:
    """Make the command's turn the live one and start its first step."""
    agent_id = command.agent.partition("@")[0]
    state = draft.state
    turn = TurnState(
        turn_id=command.turn_id,
        agent_id=agent_id,
        plan_id=plan_id,
        phase=TurnPhase.MODEL,
        started_ms=draft.now_ms,
        first_message=state.length,
        metadata=command.metadata,
        tenant=command.tenant,
        priority=command.priority,
        trace=command.trace,
    )
    state.turn = turn
    draft.record_started(command, was_queued=was_queued)
    started = TurnStarted(
        turn_id=command.turn_id,
        agent_id=agent_id,
        session_id=draft.session_id,
        messages=command.messages,
        created_at=draft.now_ms / 1000,
    )
    draft.open_channel(command.turn_id, started)
    draft.feed(command.turn_id, agent_id, started.type)
    for message in command.messages:
        draft.append(msgspec.structs.replace(message, turn_id=command.turn_id))
    if draft.plan_of(turn) is None:
        text = f"the plan {plan_id} of turn {turn.turn_id} is gone"
        return fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))
    return start_step(draft, turn)


def refuse_turn(draft: Draft, command: StartTurn, error: ErrorInfo) -> None:
    """Answer on the turn's own channel, so that whoever waits there is told."""
    draft.record_refused(command, error)
    failed = TurnFailed(
        error=error.message, error_type=error.kind, termination=Termination(kind="failed", error_type=error.kind)
    )
    draft.open_channel(command.turn_id, failed, closes=True)
    draft.feed(command.turn_id, command.agent.partition("@")[0], "turn.failed", error.kind)


# ---- the model's part of a step


def start_step(draft: Draft, turn: TurnState) -> None:
    turn.step += 1
    turn.step_first_message = draft.state.length
    turn.phase = TurnPhase.MODEL
    turn.attempt = 1
    turn.failures = turn.losses = turn.waits = 0
    turn.calls = []
    draft.publish(StepStarted(step_number=turn.step))
    dispatch_model(draft, turn)


def dispatch_model(draft: Draft, turn: TurnState) -> None:
    plan = draft.plan(turn)
    turn.due_ms = draft.now_ms + int((plan.agent.model_timeout_seconds + GRACE_SECONDS) * 1000)
    call = str(turn.step)
    task = ModelTask(
        session_id=draft.session_id,
        turn_id=turn.turn_id,
        call=call,
        attempt=turn.attempt,
        agent_id=turn.agent_id,
        plan=turn.plan_id,
        step_number=turn.step,
        messages=draft.state.length,
        deadline_ms=turn.due_ms,
        with_tools=not turn.final_answer,
        trace=turn.trace,
    )
    draft.live = f"{turn.turn_id}/{call}/{turn.attempt}"
    draft.effects.append(DispatchModel(task, plan.pool, turn.tenant, turn.priority))


def retry_model(draft: Draft, turn: TurnState) -> None:
    """The next attempt at the step's model call; what the last one published is void."""
    turn.attempt += 1
    turn.phase = TurnPhase.MODEL
    draft.publish(StepReset(step_number=turn.step, attempt=turn.attempt))
    dispatch_model(draft, turn)


def model_failed(draft: Draft, turn: TurnState, error: ErrorInfo) -> None:
    """Wait for the next attempt, or fail the turn. A rate limit is a wait and costs no attempt."""
    policy = draft.plan(turn).agent.retry
    limited = error.kind == ErrorKind.RATE_LIMITED and error.retryable and turn.waits < RATE_LIMIT_WAITS_MAX
    if limited:
        turn.waits += 1
    else:
        turn.failures += 1
    if not error.retryable or turn.failures >= policy.max_attempts:
        return fail_turn(draft, turn, error)
    delay_ms = draft.backoff_ms(policy, max(1, turn.waits if limited else turn.failures))
    if error.retry_after_seconds is not None:
        delay_ms = max(delay_ms, int(error.retry_after_seconds * 1000))
    turn.phase = TurnPhase.BACKOFF
    turn.due_ms = draft.now_ms + delay_ms
    draft.live = ""
    draft.publish(
        StepRetrying(
            step_number=turn.step,
            attempt=turn.attempt + 1,
            max_attempts=policy.max_attempts,
            delay=delay_ms / 1000,
            error=error.message,
        )
    )
    return None


def accept_reply(draft: Draft, turn: TurnState, reply: ModelReply) -> None:
    """The attempt is the step's answer: into the transcript, and on to its calls or to the end."""
    assert reply.message is not None
    message = pairing.with_unique_calls(reply.message)
    draft.live = ""
    for body in reply.tail:
        event = _live_event(body)
        if event is not None:
            draft.publish(event)
    turn.step_usage, turn.finish_reason = reply.usage, reply.finish_reason
    if reply.usage is not None:
        turn.usage = turn.usage + reply.usage
    calls = message.tool_calls
    turn.has_text = turn.has_text or bool(message.text)
    turn.has_tool_calls = turn.has_tool_calls or bool(calls)
    draft.append(
        msgspec.structs.replace(
            message, turn_id=turn.turn_id, step=turn.step, usage=reply.usage, finish_reason=reply.finish_reason
        )
    )
    if calls:
        return _start_calls(draft, turn, calls)
    _publish_step_finished(draft, turn)
    return finish_turn(draft, turn, "completed")


def _live_event(body: dict[str, object]) -> Event | None:
    """A live event of a reply's tail; one that is none is left out, its content is in the message anyway."""
    kind = _LIVE.get(str(body.get("type")))
    try:
        return msgspec.convert({key: value for key, value in body.items() if key != "type"}, kind) if kind else None
    except msgspec.ValidationError:
        return None


# ---- the calls of a step


def _start_calls(draft: Draft, turn: TurnState, calls: list[ToolCall]) -> None:
    plan = draft.plan(turn)
    turn.phase = TurnPhase.TOOLS
    turn.calls = [CallState(index, call) for index, call in enumerate(calls)]
    for state in turn.calls:
        draft.publish(ToolCallReady(step_number=turn.step, index=state.index, tool_call=state.tool_call))
    for state in turn.calls:
        refusal = _refusal(turn, plan, state)
        if refusal is not None:
            _settle(draft, turn, state, refusal)
    _go_on(draft, turn)


def _refusal(turn: TurnState, plan: Plan, call: CallState) -> ToolResult | None:
    """The result of a call that must not run, None for one that may."""
    tool_call = call.tool_call
    if turn.final_answer:
        return pairing.not_executed(tool_call, "this step has no tools: answer the user")
    if tool_call.name not in plan.tools:
        return pairing.unknown_tool(tool_call, sorted(plan.tools))
    if tool_call.error is not None:
        return pairing.invalid_arguments(tool_call)
    if call.index >= plan.agent.max_calls_per_step:
        return pairing.not_executed(tool_call, f"more than {plan.agent.max_calls_per_step} calls in one step")
    return None


def _go_on(draft: Draft, turn: TurnState) -> None:
    """Hand out what may run; close the step when every call has its result."""
    sequential = draft.plan(turn).agent.tool_execution == "sequential"
    for call in turn.calls:
        if call.status is CallStatus.QUEUED:
            dispatch_call(draft, turn, call)
        if sequential and call.status is not CallStatus.DONE:
            break
    if all(call.status is CallStatus.DONE for call in turn.calls):
        _close_step(draft, turn)


def call_deadline_seconds(plan: Plan, call: CallState) -> float:
    """How long an attempt at a call may run, from its start."""
    return plan.agent.tool_timeout_seconds or plan.tools[call.tool_call.name].timeout_seconds


def dispatch_call(draft: Draft, turn: TurnState, call: CallState) -> None:
    plan = draft.plan(turn)
    spec = plan.tools[call.tool_call.name]
    timeout_seconds = call_deadline_seconds(plan, call)
    start_by_ms = draft.now_ms + int(spec.start_timeout_seconds * 1000)
    call.status = CallStatus.RUNNING
    call.due_ms = start_by_ms + int((timeout_seconds + GRACE_SECONDS) * 1000)
    call.progress_sequence = 0
    name = f"{turn.step}.{call.index}"
    task = ToolTask(
        session_id=draft.session_id,
        turn_id=turn.turn_id,
        call=name,
        attempt=call.attempt,
        tool=call.tool_call.name,
        tool_call_id=call.tool_call.id,
        arguments=call.tool_call.arguments,
        agent_id=turn.agent_id,
        step_number=turn.step,
        idempotency_key=f"{turn.turn_id}/{name}",
        timeout_seconds=timeout_seconds,
        start_by_ms=start_by_ms,
        deadline_ms=call.due_ms,
        metadata=turn.metadata,
        trace=turn.trace,
    )
    draft.publish(
        ToolExecutionStarted(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            name=call.tool_call.name,
            attempt=call.attempt,
        )
    )
    draft.effects.append(DispatchTool(task, spec.queue))


def end_call(draft: Draft, turn: TurnState, call: CallState, result: ToolResult, duration_seconds: float = 0.0) -> None:
    """A call that ran, or was to run, has its result: tell it, and go on with the step."""
    error = str(result.result)[:500] if result.is_error else None
    draft.publish(
        ToolExecutionFinished(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            name=call.tool_call.name,
            tool_result=result,
            duration=duration_seconds,
            error=error,
        )
    )
    _settle(draft, turn, call, result)
    _go_on(draft, turn)


def _settle(draft: Draft, turn: TurnState, call: CallState, result: ToolResult) -> None:
    pairing.settle(call, result)
    if result.is_error:
        turn.last_tool_error = str(result.result)[:500]


def _close_step(draft: Draft, turn: TurnState) -> None:
    """Results into the transcript in call order, in one append; then the next step, or the end."""
    for call in turn.calls:
        assert call.result is not None
        draft.publish(
            ToolResultReady(
                step_number=turn.step, index=call.index, tool_call_id=call.tool_call.id, tool_result=call.result
            )
        )
    for message in pairing.closing_messages(turn.calls, turn.turn_id, turn.step):
        draft.append(message)
    _publish_step_finished(draft, turn)
    agent = draft.plan(turn).agent
    called = {call.tool_call.name for call in turn.calls}
    turn.calls = []
    for condition in agent.stop_when:
        if _holds(condition, turn.step, called):
            return finish_turn(draft, turn, _stop_kind(condition), condition)
    if turn.final_answer or (turn.step >= agent.max_steps and agent.on_limit == "error"):
        text = f"the turn took {turn.step} steps without an answer (max_steps={agent.max_steps})"
        return fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.MAX_STEPS_REACHED, message=text))
    turn.final_answer = turn.step >= agent.max_steps
    return start_step(draft, turn)


def _holds(condition: StopCondition, step: int, called: set[str]) -> bool:
    if condition.steps is not None:
        return step >= condition.steps
    return condition.tool in called


def _stop_kind(condition: StopCondition) -> str:
    return "step_limit" if condition.steps is not None else "stop_condition"


def _publish_step_finished(draft: Draft, turn: TurnState) -> None:
    summary = StepSummary(
        step_number=turn.step,
        first_message=turn.step_first_message,
        end_message=draft.state.length,
        finish_reason=turn.finish_reason,
        usage=turn.step_usage,
    )
    draft.publish(StepFinished(step_number=turn.step, step=summary, usage=turn.step_usage))


# ---- the end


def finish_turn(draft: Draft, turn: TurnState, kind: str, condition: StopCondition | None = None) -> None:
    reason = f"Reached the step limit of {condition.steps}" if condition and condition.steps else None
    termination = _termination(turn, kind, reason=reason, stop_condition=condition.name if condition else None)
    summary = _summary(draft, turn, "finished", termination)
    _end_turn(draft, turn, "finished", summary, TurnFinished(result=summary))


def fail_turn(draft: Draft, turn: TurnState, error: ErrorInfo) -> None:
    """End the turn with an error. Calls without a result get one, so that the session stays usable."""
    for call in turn.calls:
        if call.status is not CallStatus.DONE:
            never_ran = call.status is CallStatus.QUEUED
            filler = pairing.not_executed(call.tool_call, "the turn failed") if never_ran else None
            pairing.settle(call, filler or pairing.outcome_unknown(call.tool_call))
    for message in pairing.closing_messages(turn.calls, turn.turn_id, turn.step):
        draft.append(message)
    turn.calls = []
    draft.live = ""
    termination = _termination(turn, "failed", error_type=error.kind, message=error.message)
    summary = msgspec.structs.replace(_summary(draft, turn, "failed", termination), error=error)
    failed = TurnFailed(error=error.message, error_type=error.kind, termination=termination, result=summary)
    _end_turn(draft, turn, "failed", summary, failed)


def _end_turn(draft: Draft, turn: TurnState, status: str, summary: TurnSummary, event: Event) -> None:
    draft.close_channel(turn.turn_id, event)
    draft.record_ended(turn.turn_id, status, summary)
    draft.feed(turn.turn_id, turn.agent_id, event.type, summary.termination.kind)
    draft.state.turn = None
    if not draft.begins_next:
        _begin_next(draft)


def _begin_next(draft: Draft) -> None:
    """A queued turn may end at once, because its plan is lost; it leaves the next one to this loop."""
    draft.begins_next = True
    while draft.state.queue and draft.state.turn is None:
        queued = draft.state.queue.pop(0)
        begin_turn(draft, queued.command, queued.plan_id, was_queued=True)
    draft.begins_next = False


def _termination(
    turn: TurnState,
    kind: str,
    *,
    reason: str | None = None,
    stop_condition: str | None = None,
    error_type: str | None = None,
    message: str | None = None,
) -> Termination:
    return Termination(
        kind=kind,
        provider_finish_reason=turn.finish_reason,
        reason=reason,
        stop_condition=stop_condition,
        final_step_number=turn.step,
        has_text=turn.has_text,
        has_tool_calls=turn.has_tool_calls,
        last_tool_error=turn.last_tool_error,
        error_type=error_type,
        message=message,
    )


def _summary(draft: Draft, turn: TurnState, status: str, termination: Termination) -> TurnSummary:
    return TurnSummary(
        turn_id=turn.turn_id,
        session_id=draft.session_id,
        agent_id=turn.agent_id,
        status="finished" if status == "finished" else "failed",
        steps=turn.step,
        usage=turn.usage if turn.usage is not None else Usage(),
        started_at=turn.started_ms / 1000,
        ended_at=draft.now_ms / 1000,
        first_message=turn.first_message,
        end_message=draft.state.length,
        termination=termination,
        finish_reason=turn.finish_reason,
    )
