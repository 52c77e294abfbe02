"""The calls to an agent's own code: hooks, custom stop conditions, approval policies and the signal extractor.

One is under way at a time, and nothing else of the turn runs meanwhile. It is called like a tool, runs again when its
worker dies, and what it answers is applied here. A hook that fails, fails the turn with its name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo, Message, ToolResult
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import HookFinished
from turnmill.protocol.messages import CallWaiting, ToolReply, ToolTask
from turnmill.protocol.schemas import arguments_error
from turnmill.protocol.specs import HookPoint, HookSpec, Plan

from . import pairing
from .draft import Draft
from .effects import DispatchTool
from .endings import fail_turn, finish_turn
from .state import CallState, CallStatus, Halt, HookState, TurnPhase, TurnState

GRACE_SECONDS = 5.0
INJECTED_MAX = 50
SIGNALS_MAX = 1000


class _Injection(msgspec.Struct):
    inject_messages: list[Message] = []
    stop: bool = False
    stop_reason: str | None = None


class _BeforeCall(msgspec.Struct):
    block: bool = False
    reason: str | None = None
    arguments: dict[str, Any] | None = None
    has_result: bool = False
    result: Any = None
    is_error: bool = False


class _AfterCall(msgspec.Struct):
    has_result: bool = False
    result: Any = None
    is_error: bool | None = None
    terminate: bool = False
    terminate_reason: str | None = None


class _Stop(msgspec.Struct):
    stop: bool = False
    name: str | None = None
    reason: str | None = None


class _Policy(msgspec.Struct):
    required: bool = True


class _Signals(msgspec.Struct):
    signals: list[Any] = []


def hook_of(plan: Plan, point: HookPoint) -> HookSpec | None:
    hooks = plan.agent.hooks
    return hooks.get(point) if hooks else None


def call_hook(draft: Draft, turn: TurnState, point: str, spec: HookSpec, event: dict[str, Any], index: int = 0) -> None:
    turn.phase = TurnPhase.HOOK
    turn.hook = HookState(point, spec, {"step_number": turn.step, **event}, index)
    _dispatch(draft, turn, turn.hook)


def conversation(draft: Draft) -> dict[str, Any]:
    """Where a hook's worker finds the messages."""
    state = draft.state
    place: dict[str, Any] = {"messages": state.length}
    if state.view_end:
        place |= {"view": [list(segment) for segment in state.view], "view_end": state.view_end}
    return place


def is_for_hook(turn: TurnState | None, call: str, attempt: int) -> bool:
    """Whether a message is about the hook that is under way."""
    if turn is None or turn.hook is None or turn.phase is not TurnPhase.HOOK:
        return False
    return call == _name(turn, turn.hook) and attempt == turn.hook.attempt


def hook_lost(draft: Draft, turn: TurnState) -> None:
    """Its worker died: it runs again, as often as any call may be lost."""
    hook = turn.hook
    assert hook is not None
    hook.losses += 1
    if hook.losses >= draft.losses_max:
        return _fail(draft, turn, hook, f"it was lost with its worker {hook.losses} times (TURNMILL_MAX_ATTEMPTS)")
    hook.attempt += 1
    return _dispatch(draft, turn, hook)


def hook_waiting(draft: Draft, turn: TurnState, waiting: CallWaiting) -> None:
    hook = turn.hook
    assert hook is not None
    if not waiting.expired:
        return draft.discard("stale_finding")
    remedy = "start `turnmill worker tools APP` with its app"
    if waiting.paused is not None:
        remedy = f"it is paused ({waiting.paused}), `turnmill queue resume tool:{hook.spec.queue}`"
    text = (
        f"no worker took it from the queue {hook.spec.queue!r} within {hook.spec.start_timeout_seconds:g} s: {remedy}"
    )
    return _fail(draft, turn, hook, text)


def hook_overdue(draft: Draft, turn: TurnState) -> None:
    hook = turn.hook
    assert hook is not None
    _fail(draft, turn, hook, f"no answer within {hook.spec.timeout_seconds:g} s")


def hook_answered(draft: Draft, turn: TurnState, reply: ToolReply) -> bool:
    """Apply what the hook decided. Returns whether the turn goes on."""
    hook = turn.hook
    assert hook is not None
    if reply.error is not None or reply.result is None or reply.result.is_error:
        text = reply.error.message if reply.error else str(reply.result.result if reply.result else "it gave no result")
        _fail(draft, turn, hook, text, reply.duration_seconds)
        return False
    value = reply.result.result
    try:
        _publish_finished(draft, turn, hook, reply.duration_seconds)
        turn.hook = None
        _apply(draft, turn, hook, {} if value is None else value)
    except msgspec.ValidationError as error:
        _fail(draft, turn, hook, f"its answer does not fit: {error}", reply.duration_seconds, announced=True)
        return False
    return draft.state.turn is turn


def _apply(draft: Draft, turn: TurnState, hook: HookState, value: Any) -> None:
    match hook.point:
        case "before_step":
            _inject(draft, turn, msgspec.convert(value, _Injection))
        case "before_tool_call":
            _before_call(draft, turn, turn.calls[hook.index], msgspec.convert(value, _BeforeCall))
        case "after_tool_call":
            _after_call(turn, turn.calls[hook.index], msgspec.convert(value, _AfterCall))
        case "approval":
            turn.calls[hook.index].is_approved = not msgspec.convert(value, _Policy).required
        case "stop_when":
            stop = msgspec.convert(value, _Stop)
            if stop.stop:
                turn.halt = Halt("stop_condition", stop.name or hook.spec.name, stop.reason)
        case "signals":
            turn.signals = _signals(msgspec.convert(value, _Signals))
        case _:
            return  # after_step and on_reasoning_event only look


def _inject(draft: Draft, turn: TurnState, decision: _Injection) -> None:
    if decision.stop:
        turn.finish_reason = "stop"
        return finish_turn(draft, turn, Halt("hook_stop", reason=decision.stop_reason))
    count = len(decision.inject_messages)
    if count > INJECTED_MAX:
        raise msgspec.ValidationError(f"{count} messages are more than {INJECTED_MAX}")
    fault = pairing.fault(decision.inject_messages)
    if fault is not None:
        raise msgspec.ValidationError(fault)
    turn.injected = decision.inject_messages
    return None


def _signals(decision: _Signals) -> list[Any]:
    if len(decision.signals) > SIGNALS_MAX:
        raise msgspec.ValidationError(f"{len(decision.signals)} signals are more than {SIGNALS_MAX}")
    return decision.signals


def _before_call(draft: Draft, turn: TurnState, call: CallState, decision: _BeforeCall) -> None:
    if decision.arguments is not None:
        error = None if decision.block or decision.has_result else _misfit(draft, turn, call, decision.arguments)
        call.tool_call = msgspec.structs.replace(call.tool_call, arguments=decision.arguments, error=error)
    if call.tool_call.error is not None and call.status is CallStatus.QUEUED:
        pairing.settle(call, pairing.invalid_arguments(call.tool_call))
    elif decision.block:
        pairing.settle(call, pairing.not_executed(call.tool_call, decision.reason or "a hook blocked the call"))
    elif decision.has_result:
        pairing.settle(
            call,
            ToolResult(
                tool_call_id=call.tool_call.id,
                tool_name=call.tool_call.name,
                result=decision.result,
                is_error=decision.is_error,
            ),
        )
    if call.result is not None and call.result.is_error:
        turn.last_tool_error = str(call.result.result)[:500]


def _misfit(draft: Draft, turn: TurnState, call: CallState, arguments: dict[str, Any]) -> str | None:
    """Why a tool could not take what a hook made of a call's arguments; None where it can, or its host runs the loop."""
    name = call.tool_call.name
    spec = draft.plan(turn).tools.get(name)
    if spec is None or call.status is not CallStatus.QUEUED:
        return None
    try:
        return arguments_error(spec.schema, arguments, f"tool {name!r}")
    except ImportError:
        text = "the arguments that it changed cannot be checked: install turnmill[llm] where the coordinators run"
    except ValueError as error:  # of the schema, or of a value that is nested too deep
        text = str(error)
    raise msgspec.ValidationError(text)


def _after_call(turn: TurnState, call: CallState, decision: _AfterCall) -> None:
    assert call.result is not None
    if decision.has_result:
        call.result = ToolResult(
            tool_call_id=call.result.tool_call_id,
            tool_name=call.result.tool_name,
            result=decision.result,
            is_error=call.result.is_error if decision.is_error is None else decision.is_error,
        )
    elif decision.is_error is not None:
        call.result = msgspec.structs.replace(call.result, is_error=decision.is_error)
    if call.result.is_error:
        turn.last_tool_error = str(call.result.result)[:500]
    if decision.terminate and turn.halt is None:  # the first one wins
        turn.halt = Halt("tool_terminated", call.tool_call.name, decision.terminate_reason)


def _dispatch(draft: Draft, turn: TurnState, hook: HookState) -> None:
    spec, name = hook.spec, _name(turn, hook)
    start_by_ms = draft.now_ms + int(spec.start_timeout_seconds * 1000)
    hook.due_ms = start_by_ms + int((spec.timeout_seconds + GRACE_SECONDS) * 1000)
    task = ToolTask(
        session_id=draft.session_id,
        turn_id=turn.turn_id,
        call=name,
        attempt=hook.attempt,
        tool=spec.name,
        tool_call_id=name,
        arguments=hook.event,
        agent_id=turn.agent_id,
        step_number=turn.step,
        idempotency_key=f"{turn.turn_id}/{name}",
        timeout_seconds=spec.timeout_seconds,
        start_by_ms=start_by_ms,
        deadline_ms=hook.due_ms,
        metadata=turn.metadata,
        trace=turn.trace,
        hook=hook.point,
    )
    draft.effects.append(DispatchTool(task, spec.queue))


def _name(turn: TurnState, hook: HookState) -> str:
    return f"{turn.step}.{hook.point}.{hook.index}"


def _publish_finished(
    draft: Draft, turn: TurnState, hook: HookState, duration_seconds: float, error: str | None = None
) -> None:
    is_about_call = hook.point in ("before_tool_call", "after_tool_call", "approval")
    draft.publish(
        HookFinished(
            step_number=turn.step,
            point=hook.point,
            name=hook.spec.name,
            tool_call_id=turn.calls[hook.index].tool_call.id if is_about_call else None,
            duration=duration_seconds,
            error=error,
        )
    )


def _fail(
    draft: Draft,
    turn: TurnState,
    hook: HookState,
    reason: str,
    duration_seconds: float = 0.0,
    *,
    announced: bool = False,
) -> None:
    if not announced:
        _publish_finished(draft, turn, hook, duration_seconds, reason[:500])
    turn.hook = None
    text = f"the hook {hook.spec.name!r} ({hook.point}) failed: {reason}"
    fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.HOOK_FAILED, message=text))
