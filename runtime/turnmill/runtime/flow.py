"""What comes after what: the stages of a turn, one after the other, until something must be waited for.

    STEP -> BEFORE_STEP -> MODEL -> (calls) BEFORE_CALLS -> POLICIES -> TOOLS -> AFTER_CALLS -> CLOSE
         -> AFTER_STEP -> CONDITIONS -> STEP, or, behind an answer without calls, SIGNALS -> FINISH

Each stage either waits (for the model, tools, a hook, the host), or ends the turn, or names the next one. Stages for
hooks that an agent does not have cost a comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from turnmill.protocol.content import ErrorInfo, Message
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.messages import ModelReply
from turnmill.protocol.specs import AgentSpec, Plan

from .calls import approval_of, ask_for_approval, close_step, go_on, prepare_calls, take_over
from .draft import Draft
from .endings import drop_steering, fail_turn, finish_turn, publish_step_finished
from .hook_calls import call_hook, conversation, hook_of
from .state import CallState, CallStatus, Halt, Stage, TurnState
from .steps import accept_reply, ask_for_repair, dispatch_model, start_compaction, start_step, wants_compaction


def advance_turn(draft: Draft, turn: TurnState) -> None:
    """Go through the stages until the turn waits or has ended."""
    plans = draft.plans
    while draft.state.turn is turn and _STAGES[turn.stage](draft, turn, plans[turn.plan_id]):
        pass


def reply_arrived(draft: Draft, turn: TurnState, reply: ModelReply) -> None:
    """The model has answered the step."""
    agent = draft.plan(turn).agent
    message = accept_reply(draft, turn, reply)
    if not turn.is_final:
        prepare_calls(draft, turn, message.tool_calls)
        turn.stage, turn.position = Stage.BEFORE_CALLS, 0
    else:
        if turn.parent is not None or agent.signals is not None:
            turn.answer = message.text
        publish_step_finished(draft, turn)
        turn.stage = Stage.AFTER_STEP
        if agent.output is not None and reply.output_error is not None:
            if not ask_for_repair(draft, turn, agent, reply.output_error):
                return
            _look_past_conditions(turn, agent)
        elif reply.finish_reason == "pause" and agent.mode != "single_exchange":
            # The provider runs tools of its own, and goes on where the answer is sent back to it.
            _look_past_conditions(turn, agent)
    if not _call_reasoning_hook(draft, turn, message):
        advance_turn(draft, turn)


def _look_past_conditions(turn: TurnState, agent: AgentSpec) -> None:
    """Another step follows an answer: conditions look at steps with calls."""
    turn.is_final = False
    turn.position = len(agent.stop_when)


def _call_reasoning_hook(draft: Draft, turn: TurnState, message: Message) -> bool:
    """The hook that looks at reasoning, where there is one and any; the turn goes on behind it."""
    spec = hook_of(draft.plan(turn), "on_reasoning_event")
    parts = message.reasoning if spec is not None else []
    if spec is None or not parts:
        return False
    events = [
        {
            "kind": part.data.get("kind", "delta"),
            "provider": part.provider,
            "text": part.text or None,
            "data": part.data,
        }
        for part in parts
    ]
    call_hook(draft, turn, "on_reasoning_event", spec, {"events": events})
    return True


# ---- the stages; each returns whether the next one follows at once


def _step(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    """Another step, if there may be one."""
    agent = plan.agent
    if turn.step and (agent.mode == "auto" or not turn.answered):
        if turn.final_answer or (turn.step >= agent.max_steps and agent.on_limit == "error"):
            text = f"the turn took {turn.step} steps without an answer (max_steps={agent.max_steps})"
            fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.MAX_STEPS_REACHED, message=text))
            return False
        turn.final_answer = turn.step >= agent.max_steps
    if turn.next_plan_id:
        take_over(draft, turn)
        if draft.state.turn is not turn:
            return False
    start_step(draft, turn)
    turn.stage = Stage.BEFORE_STEP
    return True


def _before_step(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    turn.stage = Stage.MODEL
    spec = hook_of(plan, "before_step")
    if spec is None:
        return True
    tools = [] if turn.final_answer else list(plan.tools)
    call_hook(draft, turn, "before_step", spec, {**conversation(draft), "tools": tools})
    return False


def _model(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    if wants_compaction(draft, turn):
        start_compaction(draft, turn, "trigger")
    else:
        dispatch_model(draft, turn)
    return False


def _before_calls(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    """Every call's hook, one after the other, before any call runs."""
    spec = hook_of(plan, "before_tool_call")
    call = None if spec is None else _next_call(turn, CallStatus.QUEUED, CallStatus.HOST)
    if spec is None or call is None:
        turn.stage, turn.position = Stage.POLICIES, 0
        return True
    event = {**conversation(draft), "tool_call": msgspec.to_builtins(call.tool_call)}
    call_hook(draft, turn, "before_tool_call", spec, event, call.index)
    return False


def _policies(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    """Ask the policies of calls that have one, then a person for every call that needs it."""
    careful = [
        call for call in turn.calls if call.status is CallStatus.QUEUED and approval_of(plan, call).mode != "never"
    ]
    for call in careful:
        policy = approval_of(plan, call).policy
        if policy is not None and call.index >= turn.position:
            turn.position = call.index + 1
            event = {"tool_call": msgspec.to_builtins(call.tool_call), "metadata": turn.metadata}
            call_hook(draft, turn, "approval", policy, event, call.index)
            return False
    for call in careful:
        if not call.is_approved:
            ask_for_approval(draft, turn, call)
    turn.stage = Stage.TOOLS
    return True


def _tools(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    if not go_on(draft, turn):
        return False
    turn.stage, turn.position = Stage.AFTER_CALLS, 0
    return True


def _after_calls(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    """Every result's hook in call order, once all of them are there."""
    spec = hook_of(plan, "after_tool_call")
    call = None if spec is None else _next_call(turn, CallStatus.DONE)
    if spec is None or call is None:
        turn.stage = Stage.CLOSE
        return True
    event = {
        **conversation(draft),
        "tool_call": msgspec.to_builtins(call.tool_call),
        "tool_result": msgspec.to_builtins(call.result),
    }
    call_hook(draft, turn, "after_tool_call", spec, event, call.index)
    return False


def _next_call(turn: TurnState, *statuses: CallStatus) -> CallState | None:
    """The next call that stands so, from the position on."""
    for call in turn.calls[turn.position :]:
        turn.position = call.index + 1
        if call.status in statuses:
            return call
    return None


def _close(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    turn.stage, turn.position = Stage.AFTER_STEP, 0
    return close_step(draft, turn)


def _after_step(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    turn.stage = Stage.SIGNALS if turn.is_final else Stage.CONDITIONS
    spec = hook_of(plan, "after_step")
    if spec is None:
        return True
    event = {
        "first_message": turn.step_first_message,
        "end_message": draft.state.length,
        "finish_reason": turn.finish_reason,
        "usage": None if turn.step_usage is None else msgspec.to_builtins(turn.step_usage),
    }
    call_hook(draft, turn, "after_step", spec, event)
    return False


def _conditions(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    """What ends a turn after a step with calls: a hook's word first, then conditions in their order."""
    agent = plan.agent
    if turn.halt is None and agent.mode == "auto":
        while turn.position < len(agent.stop_when):
            condition = agent.stop_when[turn.position]
            turn.position += 1
            if condition.hook is not None:
                event = {"first_message": turn.first_message, "end_message": draft.state.length}
                call_hook(draft, turn, "stop_when", condition.hook, event, turn.position - 1)
                return False
    if turn.halt is not None:
        finish_turn(draft, turn, turn.halt)
        return False
    turn.stage = Stage.STEP
    return True


def _signals(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    turn.stage = Stage.FINISH
    spec = plan.agent.signals
    if spec is None or _goes_on_with_steering(turn, plan):
        return True
    call_hook(draft, turn, "signals", spec, {"text": turn.answer})
    return False


def _finish(draft: Draft, turn: TurnState, plan: Plan) -> bool:
    """The answer is given, unless something was said meanwhile: then there is one more step."""
    if _goes_on_with_steering(turn, plan):
        turn.signals = []
        turn.stage = Stage.STEP
        return True
    if turn.steering and plan.agent.late_steering == "drop":
        drop_steering(draft, turn, "the final answer had begun (late_steering=drop)")
    finish_turn(draft, turn, Halt("completed"))
    return False


def _goes_on_with_steering(turn: TurnState, plan: Plan) -> bool:
    if not turn.steering or turn.final_answer:
        return False
    agent = plan.agent
    return agent.late_steering == "step" and agent.mode == "auto" and turn.step < agent.max_steps


_STAGES: dict[Stage, Callable[[Draft, TurnState, Plan], bool]] = {
    Stage.STEP: _step,
    Stage.BEFORE_STEP: _before_step,
    Stage.MODEL: _model,
    Stage.BEFORE_CALLS: _before_calls,
    Stage.POLICIES: _policies,
    Stage.TOOLS: _tools,
    Stage.AFTER_CALLS: _after_calls,
    Stage.CLOSE: _close,
    Stage.AFTER_STEP: _after_step,
    Stage.CONDITIONS: _conditions,
    Stage.SIGNALS: _signals,
    Stage.FINISH: _finish,
}
assert set(_STAGES) == set(Stage)
