"""The model's part of a turn: its start, the call of each step, and what becomes of the reply.

Nothing here looks at a message's envelope, and nothing decides what comes after the step: that is `flow`.
"""

from __future__ import annotations

import msgspec

from turnmill.protocol.content import AttemptUsage, ErrorInfo, Message, TextPart
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import (
    LIVE_EVENTS,
    ContextCompacted,
    Event,
    ReasoningDelta,
    SteeringApplied,
    SteeringQueued,
    StepReset,
    StepStarted,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    TurnStarted,
)
from turnmill.protocol.messages import Answer, ModelReply, ModelTask, Segment, StartTurn
from turnmill.protocol.specs import AgentSpec, Plan, provider_of

from . import pairing
from .calls import GRACE_SECONDS
from .draft import Draft
from .effects import DispatchModel, Replace
from .endings import fail_turn
from .state import QueuedTurn, SessionState, Stage, TurnPhase, TurnState
from .transcripts import rewinding, rewound_view

COMPACTIONS_MAX = 2
"""How often one step may shorten the conversation: trimmed, then summarized."""

_LIVE: dict[str, type[TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta]] = {
    kind.type: kind for kind in LIVE_EVENTS
}


# ---- start


def begin_turn(draft: Draft, queued: QueuedTurn, *, was_queued: bool = False) -> None:
    """Make the command's turn the live one. It has no step yet."""
    command = queued.command
    agent_id = command.agent.partition("@")[0]
    state = draft.state
    _rewind(state, command.rewind_to)
    turn = TurnState(
        turn_id=command.turn_id,
        agent_id=agent_id,
        plan_id=queued.plan_id,
        phase=TurnPhase.MODEL,
        started_ms=draft.now_ms,
        first_message=state.length,
        metadata=command.metadata,
        tenant=command.tenant,
        priority=command.priority,
        trace=command.trace,
        parent=command.parent,
        deadline_ms=command.deadline_ms,
        steering=queued.steering,
        steered=list(dict.fromkeys([*queued.steered, *(item.steering_id for item in queued.steering)])),
    )
    state.turn = turn
    plan = draft.plan_of(turn)
    messages = _messages(command, plan)
    draft.record_started(command, was_queued=was_queued)
    started = TurnStarted(
        turn_id=command.turn_id,
        agent_id=agent_id,
        session_id=draft.session_id,
        messages=messages,
        created_at=draft.now_ms / 1000,
        parent_turn_id=command.parent.turn_id if command.parent is not None else None,
    )
    draft.open_channel(command.turn_id, started)
    draft.feed(command.turn_id, agent_id, started.type)
    for item in queued.steering:
        draft.publish(SteeringQueued(steering_id=item.steering_id, message=item.message))
    if command.answer and not was_queued:
        draft.reply(command.turn_id, Answer(turn_id=command.turn_id))
    for index, message in enumerate(messages):
        if index == 0 and command.rewind_to is not None:
            message = rewinding(message, min(command.rewind_to, turn.first_message))
        draft.append(msgspec.structs.replace(message, turn_id=command.turn_id))
    if plan is None:
        text = f"the plan {queued.plan_id} of turn {turn.turn_id} is gone"
        return fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.STATE_LOST, message=text))
    if turn.deadline_ms is None and plan.agent.turn_timeout_seconds is not None:
        turn.deadline_ms = draft.now_ms + int(plan.agent.turn_timeout_seconds * 1000)
    return None


def _messages(command: StartTurn, plan: Plan | None) -> list[Message]:
    """The agent's prefix goes before a text, not before messages, which are used as they are."""
    if plan is None or not plan.agent.user_prompt_prefix or not command.is_text:
        return command.messages
    message, prefix = command.messages[0], plan.agent.user_prompt_prefix
    if isinstance(message.content, str):
        return [msgspec.structs.replace(message, content=prefix + message.content)]
    return [
        msgspec.structs.replace(message, content=[TextPart(prefix), *message.content])
    ]  # a large text, stored apart


def _rewind(state: SessionState, index: int | None) -> None:
    """Leave out of the model's view what the transcript holds from an entry on."""
    if index is None:
        return
    state.view = rewound_view(state.view, state.view_end, min(index, state.length))
    state.view_end = state.length


# ---- a step


def start_step(draft: Draft, turn: TurnState) -> None:
    """The next step, with the steering that came until now. Claimed is claimed, whatever a hook says then."""
    turn.step += 1
    turn.step_first_message = draft.state.length
    turn.attempt = 1
    turn.failures = turn.losses = turn.waits = turn.compactions = 0
    turn.calls, turn.injected = [], []
    turn.is_final = False
    turn.first_model = 0
    draft.publish(StepStarted(step_number=turn.step))
    if turn.warning:
        note = Message(role="user", content=turn.warning, turn_id=turn.turn_id, metadata={"turnmill": "loop_guard"})
        draft.append(note)
        turn.warning = ""
    turn.inject_at = draft.state.length
    claim_steering(draft, turn)


def claim_steering(draft: Draft, turn: TurnState) -> None:
    """What was said to the turn meanwhile becomes part of the conversation, for the model call that comes next."""
    for item in turn.steering:
        draft.append(msgspec.structs.replace(item.message, turn_id=turn.turn_id))
        draft.publish(SteeringApplied(steering_id=item.steering_id, step=turn.step))
    turn.steering = []


def dispatch_model(draft: Draft, turn: TurnState, *, compact: bool = False) -> None:
    plan = draft.plan(turn)
    state = draft.state
    turn.phase = TurnPhase.MODEL
    deadline_ms = draft.now_ms + int(plan.agent.model_timeout_seconds * 1000)
    turn.due_ms = deadline_ms + int(GRACE_SECONDS * 1000)  # behind the worker's own, which tells what the call has used
    call = str(turn.step)
    task = ModelTask(
        session_id=draft.session_id,
        turn_id=turn.turn_id,
        call=call,
        attempt=turn.attempt,
        agent_id=turn.agent_id,
        plan=turn.plan_id,
        step_number=turn.step,
        messages=state.length,
        deadline_ms=deadline_ms,
        with_tools=not turn.final_answer,
        metadata=turn.metadata,
        trace=turn.trace,
        view=state.view,
        view_end=state.view_end,
        injected=[] if compact else turn.injected,
        inject_at=turn.inject_at if turn.injected else 0,
        compact=compact,
        overflow=turn.overflow is not None,
        first_model=turn.first_model,
        tenant=turn.tenant,
    )
    draft.live = "" if compact else f"{turn.turn_id}/{call}/{turn.attempt}"
    draft.effects.append(DispatchModel(task, plan.pool, turn.tenant, turn.priority, provider_of(plan.agent.model)))


def retry_model(draft: Draft, turn: TurnState) -> None:
    """The next attempt at the step's model call; what the last one published is void."""
    turn.attempt += 1
    if turn.compacting:
        return dispatch_model(draft, turn, compact=True)
    draft.publish(StepReset(step_number=turn.step, attempt=turn.attempt))
    return dispatch_model(draft, turn)


def note_attempt(turn: TurnState, reply: ModelReply, outcome: str) -> None:
    """What an attempt without an answer used is paid for all the same."""
    if reply.usage is None and reply.cost is None:
        return
    attempt = AttemptUsage(
        step=turn.step,
        attempt=turn.attempt,
        outcome=outcome,
        usage=reply.usage,
        cost=reply.cost,
        model=reply.model,
    )
    turn.attempts = [*turn.attempts, attempt]
    _add_up(turn, reply)


def _add_up(turn: TurnState, reply: ModelReply) -> None:
    if reply.usage is not None:
        turn.usage = turn.usage + reply.usage
    if reply.cost is not None:
        turn.cost = reply.cost if turn.cost is None else turn.cost + reply.cost


def accept_reply(draft: Draft, turn: TurnState, reply: ModelReply) -> Message:
    """The attempt is the step's answer: into the transcript."""
    assert reply.message is not None
    message = pairing.with_unique_calls(reply.message)
    draft.live = ""
    for body in reply.tail:
        event = _live_event(body)
        if event is not None:
            draft.publish(event)
    turn.step_first_message = draft.state.length
    turn.step_usage, turn.step_cost, turn.finish_reason = reply.usage, reply.cost, reply.finish_reason
    if reply.usage is not None:
        draft.state.context_tokens = reply.usage.input_tokens + reply.usage.output_tokens
    _add_up(turn, reply)
    turn.has_text = turn.has_text or bool(message.text)
    turn.is_final = not message.tool_calls
    turn.has_tool_calls = turn.has_tool_calls or not turn.is_final
    turn.injected = []
    message = msgspec.structs.replace(
        message,
        turn_id=turn.turn_id,
        step=turn.step,
        usage=reply.usage,
        cost=reply.cost,
        finish_reason=reply.finish_reason,
        attempt=turn.attempt,
        model=message.model or reply.model,
    )
    draft.append(message)
    return message


def keep_partial(draft: Draft, turn: TurnState, reply: ModelReply) -> None:
    """What the model had said when the turn was stopped: its text stays in the history as an interrupted answer."""
    note_attempt(turn, reply, ErrorKind.ABORTED)
    message = reply.message
    if message is None:
        return
    if isinstance(message.content, str):
        content, text = message.content, message.content
    else:
        # Calls that were never made have no result, and reasoning without its answer may be refused by its provider.
        text = message.text
        content = text
    if not text:
        return
    turn.has_text = True
    turn.finish_reason = ErrorKind.ABORTED
    draft.append(
        msgspec.structs.replace(
            message,
            content=content,
            turn_id=turn.turn_id,
            step=turn.step,
            finish_reason=ErrorKind.ABORTED,
            attempt=turn.attempt,
            metadata={**message.metadata, "turnmill": "interrupted"},
        )
    )


def _live_event(body: dict[str, object]) -> Event | None:
    """A live event of a reply's tail; one that is none is left out, its content is in the message anyway."""
    kind = _LIVE.get(str(body.get("type")))
    try:
        return msgspec.convert({key: value for key, value in body.items() if key != "type"}, kind) if kind else None
    except msgspec.ValidationError:
        return None


# ---- an answer of a wanted form


def ask_for_repair(draft: Draft, turn: TurnState, agent: AgentSpec, problem: str) -> bool:
    """Tell the model what is wrong with its answer. Returns False where it has had its chances: the turn has failed."""
    assert agent.output is not None
    # A single exchange has one provider call, right or wrong.
    if agent.mode == "single_exchange" or turn.repairs >= agent.output.repairs or turn.step >= agent.max_steps:
        text = f"the answer is not the JSON that was asked for: {problem}"
        fail_turn(draft, turn, ErrorInfo(kind=ErrorKind.OUTPUT_INVALID, message=text))
        return False
    turn.repairs += 1
    text = f"Your answer is not valid: {problem}. Answer again, with nothing but JSON that fits the schema."
    draft.append(Message(role="user", content=text, turn_id=turn.turn_id, metadata={"turnmill": "output_repair"}))
    return True


# ---- a shorter conversation


def wants_compaction(draft: Draft, turn: TurnState) -> bool:
    """Whether the conversation is to be shortened before the turn's first step."""
    trigger = draft.plan(turn).agent.compaction.trigger_tokens
    return trigger is not None and turn.step == 1 and turn.compactions == 0 and draft.state.context_tokens >= trigger


def start_compaction(draft: Draft, turn: TurnState, reason: str, error: ErrorInfo | None = None) -> None:
    turn.compactions += 1
    turn.compacting, turn.overflow = reason, error
    if error is not None:
        turn.attempt += 1
    dispatch_model(draft, turn, compact=True)


def end_compaction(draft: Draft, turn: TurnState, reply: ModelReply) -> None:
    """Take the shorter view, and make the model call it was for. Where nothing could be shortened, the overflow stands."""
    reason, overflow = turn.compacting, turn.overflow
    turn.compacting, turn.overflow = "", None
    note_attempt(turn, reply, "compaction")
    state = draft.state
    if reply.view is not None and reply.error is None:
        state.view = [_placed(segment, state.replaced) for segment in reply.view]
        state.view_end = turn.inject_at = state.length
        for message in reply.replacements:
            draft.effects.append(Replace(message))
        state.replaced += len(reply.replacements)
        state.context_tokens = 0
        draft.publish(
            ContextCompacted(
                step_number=turn.step,
                reason="trigger" if reason == "trigger" else "overflow",
                replacements=len(reply.replacements),
            )
        )
    elif overflow is not None:
        return fail_turn(draft, turn, _still_too_long(overflow, reply))
    else:
        state.context_tokens = 0  # nothing to shorten: not asked again before the next reply says so
    turn.attempt += 1
    turn.stage = Stage.MODEL
    if overflow is not None:
        draft.publish(StepReset(step_number=turn.step, attempt=turn.attempt))
    return dispatch_model(draft, turn)


def _still_too_long(overflow: ErrorInfo, reply: ModelReply) -> ErrorInfo:
    """The provider's word, and why nothing could be made shorter."""
    if reply.error is None:
        return overflow
    return msgspec.structs.replace(overflow, message=f"{overflow.message} ({reply.error.message})")


def _placed(segment: Segment, replaced: int) -> Segment:
    """A segment of new replacements (list 2 of a reply) by its place among all of them."""
    kind, first, end = segment
    return (1, first + replaced, end + replaced) if kind == 2 else segment
