"""The calls of a step: which may run, who runs them, their results, and the step's close.

A call is for a tool worker, for the host (the turn suspends), for another agent (a sub-turn), or changes the agent (a
handoff). Approval comes before any of it.
"""

from __future__ import annotations

import hashlib
from zlib import crc32

import msgspec

from turnmill.protocol.content import ErrorInfo, Message, ToolCall, ToolResult
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import (
    AgentChanged,
    ApprovalRequested,
    SubTurnFinished,
    SubTurnStarted,
    ToolCallReady,
    ToolExecutionFinished,
    ToolExecutionStarted,
    ToolResultReady,
)
from turnmill.protocol.keys import child_turn_id, session_name
from turnmill.protocol.messages import HandOff, Parent, StartTurn, SubTurnEnded, ToolTask
from turnmill.protocol.specs import Approval, Plan, StopCondition, ToolSpec
from turnmill.protocol.trace_context import child_trace

from . import pairing
from .draft import Draft, encode_json
from .effects import DispatchTool, Keep, Send
from .endings import (
    abort_child,
    call_text,
    child_session,
    depth_limit,
    fail_turn,
    plan_lost,
    publish_step_finished,
    suspend_turn,
)
from .state import CallState, CallStatus, Halt, TurnPhase, TurnState

GRACE_SECONDS = 5.0
"""How long a worker's own deadline may pass before the machine's takes its place."""
HANDOFF_SECONDS = 30.0


def prepare_calls(draft: Draft, turn: TurnState, calls: list[ToolCall]) -> None:
    """The calls of a reply: all are told, and those that must not run have their result."""
    plan = draft.plan(turn)
    turn.calls = [CallState(index, call) for index, call in enumerate(calls)]
    turn.answered = []
    for state in turn.calls:
        draft.publish(ToolCallReady(step_number=turn.step, index=state.index, tool_call=state.tool_call))
    for state in turn.calls:
        if plan.agent.mode == "single_exchange":
            state.status = CallStatus.HOST
            continue
        refusal = _refusal(turn, plan, state)
        if refusal is not None:
            settle(draft, turn, state, refusal)


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


def approval_of(plan: Plan, call: CallState) -> Approval:
    """The tool's approval, or what the agent or the turn says in its place."""
    name = call.tool_call.name
    return plan.agent.approvals.get(name) or plan.tools[name].approval


def ask_for_approval(draft: Draft, turn: TurnState, call: CallState) -> None:
    seconds = approval_of(draft.plan(turn), call).timeout_seconds
    call.status = CallStatus.APPROVAL
    call.due_ms = draft.now_ms + int(seconds * 1000)
    draft.publish(
        ApprovalRequested(
            step_number=turn.step, index=call.index, tool_call=call.tool_call, expires_at=call.due_ms / 1000
        )
    )


# ---- hand out


def go_on(draft: Draft, turn: TurnState) -> bool:
    """Hand out what may run. Returns whether every call has its result; suspends a turn in which nothing runs."""
    sequential = draft.plan(turn).agent.tool_execution == "sequential"
    was_suspended = turn.phase is TurnPhase.SUSPENDED
    turn.phase = TurnPhase.TOOLS
    for call in turn.calls:
        if call.status is CallStatus.QUEUED:
            _hand_out(draft, turn, call)
        if sequential and call.status is not CallStatus.DONE:
            break
    if all(call.status is CallStatus.DONE for call in turn.calls):
        return True
    if not any(call.status in (CallStatus.RUNNING, CallStatus.BACKOFF) for call in turn.calls):
        if was_suspended:
            turn.phase = TurnPhase.SUSPENDED
        else:
            suspend_turn(draft, turn)
    return False


def _hand_out(draft: Draft, turn: TurnState, call: CallState) -> None:
    spec = draft.plan(turn).tools[call.tool_call.name]
    match spec.kind:
        case "worker":
            dispatch_call(draft, turn, call)
        case "host":
            call.status = CallStatus.HOST
        case "agent":
            _start_sub_turn(draft, turn, call, spec)
        case "handoff":
            _hand_off(draft, turn, call, spec)


def call_deadline_seconds(plan: Plan, call: CallState) -> float:
    """How long an attempt at a call may run, from its start."""
    return plan.agent.tool_timeout_seconds or plan.tools[call.tool_call.name].timeout_seconds


def dispatch_call(draft: Draft, turn: TurnState, call: CallState) -> None:
    plan = draft.plan(turn)
    spec = plan.tools[call.tool_call.name]
    timeout_seconds = call_deadline_seconds(plan, call)
    start_by_ms = draft.now_ms + int(spec.start_timeout_seconds * 1000)
    call.status = CallStatus.RUNNING
    call.deadline_ms = call.due_ms = start_by_ms + int((timeout_seconds + GRACE_SECONDS) * 1000)
    call.progress_sequence = call.progress_bytes = 0
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
        idle_timeout_seconds=spec.idle_timeout_seconds,
    )
    _publish_started(draft, turn, call)
    draft.effects.append(DispatchTool(task, spec.queue))


def _publish_started(draft: Draft, turn: TurnState, call: CallState) -> None:
    draft.publish(
        ToolExecutionStarted(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            name=call.tool_call.name,
            attempt=call.attempt,
        )
    )


def note_progress(draft: Draft, turn: TurnState, call: CallState) -> None:
    """A sign of life moves the idle deadline, not the other one. The machine's stands behind the worker's own."""
    idle_seconds = draft.plan(turn).tools[call.tool_call.name].idle_timeout_seconds
    if idle_seconds is not None:
        call.due_ms = min(call.deadline_ms, draft.now_ms + int((idle_seconds + GRACE_SECONDS) * 1000))


# ---- sub-turns and handoffs


def _start_sub_turn(draft: Draft, turn: TurnState, call: CallState, spec: ToolSpec) -> None:
    agent = draft.plan(turn).agent
    depth = turn.parent.depth + 1 if turn.parent is not None else 1
    max_depth = depth_limit(draft, turn)
    if depth > max_depth or turn.sub_turns >= agent.max_sub_turns:
        limit = f"max_depth={max_depth}" if depth > max_depth else f"max_sub_turns={agent.max_sub_turns}"
        return settle(draft, turn, call, pairing.not_executed(call.tool_call, f"{ErrorKind.SUB_TURN_LIMIT}: {limit}"))
    turn.sub_turns += 1
    name = f"{turn.step}.{call.index}"
    call.status, call.child_turn_id = CallStatus.RUNNING, child_turn_id(turn.turn_id, name)
    call.due_ms = draft.now_ms + int(call_deadline_seconds(draft.plan(turn), call) * 1000)
    if turn.deadline_ms is not None:
        call.due_ms = min(call.due_ms, turn.deadline_ms)
    session_id, agent_id = child_session(draft.session_id, call), (spec.agent or spec.name).partition("@")[0]
    _publish_started(draft, turn, call)
    draft.publish(
        SubTurnStarted(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            turn_id=call.child_turn_id,
            session_id=session_id,
            agent_id=agent_id,
        )
    )
    command = StartTurn(
        turn_id=call.child_turn_id,
        session_id=session_id,
        agent=spec.agent or spec.name,
        messages=[Message(role="user", content=_sub_turn_message(call.tool_call))],
        metadata=turn.metadata,
        tenant=turn.tenant,
        priority=turn.priority,
        trace=child_trace(turn.trace, turn.turn_id, name, call.attempt),
        parent=Parent(
            session_id=draft.session_id,
            turn_id=turn.turn_id,
            call=name,
            attempt=call.attempt,
            depth=depth,
            max_depth=max_depth,
        ),
        deadline_ms=call.due_ms,
    )
    draft.effects.append(Send(command))
    # Gone with the session that it belongs to.
    draft.effects.append(Keep([session_name(session_id)]))
    return None


def _sub_turn_message(call: ToolCall) -> str:
    message = call.arguments.get("message")
    return message if isinstance(message, str) else msgspec.json.encode(call.arguments).decode()


def sub_turn_ended(draft: Draft, turn: TurnState, call: CallState, ended: SubTurnEnded) -> ToolResult:
    """What the model is told of a sub-turn's end."""
    draft.publish(
        SubTurnFinished(
            step_number=turn.step,
            index=call.index,
            tool_call_id=call.tool_call.id,
            turn_id=ended.child_turn_id,
            status=ended.status,
        )
    )
    if ended.status == "finished":
        return ToolResult(tool_call_id=call.tool_call.id, tool_name=call.tool_call.name, result=ended.text)
    reason = ended.error.message if ended.error is not None else ended.status
    return pairing.error_result(call.tool_call, f"execution failed (the agent's turn {ended.status}: {reason})")


def _hand_off(draft: Draft, turn: TurnState, call: CallState, spec: ToolSpec) -> None:
    others = [other for other in turn.calls if other is not call and is_handoff(draft, turn, other)]
    if any(other.status is CallStatus.RUNNING for other in others) or turn.next_plan_id:
        return settle(draft, turn, call, pairing.not_executed(call.tool_call, "the turn goes to another agent already"))
    call.status = CallStatus.RUNNING
    call.due_ms = draft.now_ms + int(HANDOFF_SECONDS * 1000)
    name = f"{turn.step}.{call.index}"
    _publish_started(draft, turn, call)
    command = HandOff(session_id=draft.session_id, turn_id=turn.turn_id, call=name, agent=spec.agent or spec.name)
    draft.effects.append(Send(command))
    return None


def is_handoff(draft: Draft, turn: TurnState, call: CallState) -> bool:
    spec = draft.plan(turn).tools.get(call.tool_call.name)
    return spec is not None and spec.kind == "handoff"


# ---- results


def end_call(draft: Draft, turn: TurnState, call: CallState, result: ToolResult, duration_seconds: float = 0.0) -> None:
    """A call that ran, or was to run, has its result: tell it."""
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
    settle(draft, turn, call, result)


def settle(draft: Draft, turn: TurnState, call: CallState, result: ToolResult) -> None:
    pairing.settle(call, result)
    draft.keep_blobs(result)
    if result.is_error:
        turn.last_tool_error = str(result.result)[:500]


def call_overdue(draft: Draft, turn: TurnState, call: CallState) -> ToolResult:
    """The result of a running call whose time is over."""
    spec = draft.plan(turn).tools[call.tool_call.name]
    if call.child_turn_id:
        abort_child(draft, turn, call, "the call that it answers has timed out")
    if spec.kind == "handoff":
        return pairing.error_result(call.tool_call, f"execution failed (no agent within {HANDOFF_SECONDS:g} s)")
    if spec.idle_timeout_seconds is not None and call.due_ms < call.deadline_ms:
        return pairing.error_result(
            call.tool_call, f"execution failed (no progress for {spec.idle_timeout_seconds:g} s)"
        )
    return pairing.timed_out(call.tool_call, call_deadline_seconds(draft.plan(turn), call))


# ---- the step's close


def close_step(draft: Draft, turn: TurnState) -> bool:
    """Results into the transcript in call order, in one append. Returns whether the turn goes on."""
    for call in turn.calls:
        assert call.result is not None
        draft.publish(
            ToolResultReady(
                step_number=turn.step, index=call.index, tool_call_id=call.tool_call.id, tool_result=call.result
            )
        )
    for message in pairing.closing_messages(turn.calls, turn.turn_id, turn.step):
        draft.append(message)
    calls, turn.calls = turn.calls, []
    publish_step_finished(draft, turn)
    if draft.plan(turn).agent.mode == "single_exchange":
        return True
    if turn.halt is None and _is_stuck(draft, turn, calls):
        return False
    if turn.halt is None:
        turn.halt = _plain_condition(draft.plan(turn).agent.stop_when, turn.step, calls)
    _warn_of_repetition(draft, turn, calls)
    return True


def _plain_condition(conditions: list[StopCondition], step: int, calls: list[CallState]) -> Halt | None:
    """The first condition that holds, of those that need no code. Custom ones come behind, in a stage of their own."""
    called = {call.tool_call.name for call in calls}
    for condition in conditions:
        if condition.hook is not None:
            continue
        if condition.steps is not None and step >= condition.steps:
            return Halt("step_limit", condition.name, f"Reached the step limit of {condition.steps}")
        if condition.tool is not None and condition.tool in called:
            return Halt("stop_condition", condition.name)
    return None


def _is_stuck(draft: Draft, turn: TurnState, calls: list[CallState]) -> bool:
    """Whether the turn ended because a tool failed in the same way too many steps in a row."""
    limit = draft.plan(turn).agent.repeated_errors_max
    failed = [call for call in calls if call.result is not None and call.result.is_error]
    if limit is None or not failed:
        turn.errors_in_a_row = {}
        return False
    counts = {}
    for call in failed:
        assert call.result is not None
        key = _digest(call.tool_call.name, str(call.result.result))
        counts[key] = turn.errors_in_a_row.get(key, 0) + 1
        if counts[key] >= limit:
            text = f"{call.tool_call.name} failed {limit} times in a row: {str(call.result.result)[:300]}"
            error = ErrorInfo(kind=ErrorKind.REPEATED_TOOL_ERROR, message=f"{text} (repeated_errors_max={limit})")
            fail_turn(draft, turn, error, Halt("repeated_tool_error", call.tool_call.name))
            return True
    turn.errors_in_a_row = counts
    return False


def _warn_of_repetition(draft: Draft, turn: TurnState, calls: list[CallState]) -> None:
    """Have the next step tell the model that it made the same call as in the step before."""
    if not draft.plan(turn).agent.warn_repeated_calls:
        return
    digests = [crc32(encode_json(call.tool_call.arguments), crc32(call.tool_call.name.encode())) for call in calls]
    repeated = [call for call, digest in zip(calls, digests, strict=True) if digest in turn.last_calls]
    turn.last_calls = digests
    if repeated:
        names = ", ".join(dict.fromkeys(call_text(call.tool_call)[:200] for call in repeated))
        turn.warning = (
            f"You made the same call as in the step before: {names}. Its result will not change. "
            "Use what you have, change the arguments, or answer."
        )


def _digest(*words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=6).hexdigest()


def take_over(draft: Draft, turn: TurnState) -> None:
    """The next step is another agent's."""
    turn.plan_id, turn.next_plan_id = turn.next_plan_id, ""
    if draft.plan_of(turn) is None:
        return plan_lost(draft, turn)
    agent = draft.plan(turn).agent
    changed = AgentChanged(step_number=turn.step, agent_id=agent.name, from_agent_id=turn.agent_id)
    turn.agent_id = agent.name
    return draft.publish(changed)
