"""What becomes of a step whose model call failed: another attempt, another model, a shorter conversation, or the turn's end.

A retryable error is tried again after a while, and at once where the agent has a fallback: the LLM worker passes over a
provider that is held back. An error that would come again from the same model leads to the next one only.
"""

from __future__ import annotations

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import StepRetrying
from turnmill.protocol.messages import ModelReply
from turnmill.protocol.specs import AgentSpec

from .draft import Draft
from .endings import fail_turn, suspend_turn
from .state import TurnPhase, TurnState
from .steps import COMPACTIONS_MAX, note_attempt, retry_model, start_compaction

RATE_LIMIT_WAITS_MAX = 50
_OF_THE_MODEL = frozenset(
    {
        ErrorKind.AUTHENTICATION,
        ErrorKind.BAD_REQUEST,
        ErrorKind.CONTENT_FILTER,
        ErrorKind.PROVIDER_ERROR,
        ErrorKind.RATE_LIMITED,
        ErrorKind.STREAM_BROKEN,
    }
)
"""Errors that another model may not have, though the same one would have them again."""


def model_failed(draft: Draft, turn: TurnState, error: ErrorInfo, reply: ModelReply | None = None) -> None:
    """Go on in some way, or fail the turn. A rate limit is a wait and costs no attempt."""
    if reply is not None:
        note_attempt(turn, reply, error.kind)
    agent = draft.plan(turn).agent
    if agent.mode == "single_exchange":
        return _exchange_failed(draft, turn, error)
    if error.kind == ErrorKind.CONTEXT_OVERFLOW and turn.compactions < COMPACTIONS_MAX:
        return start_compaction(draft, turn, "overflow", error)
    if not error.retryable:
        if not _passes_on(agent, turn, error, reply):
            return fail_turn(draft, turn, error)
        return _again(draft, turn, error, reply, 0)
    limited = error.kind == ErrorKind.RATE_LIMITED and turn.waits < RATE_LIMIT_WAITS_MAX
    if limited:
        turn.waits += 1
    else:
        turn.failures += 1
    if turn.failures >= _attempts_max(agent):
        return fail_turn(draft, turn, error)
    if turn.failures + turn.waits <= len(agent.fallbacks) - turn.first_model:
        return _again(draft, turn, error, reply, 0)
    delay_ms = draft.backoff_ms(agent.retry, max(1, turn.waits if limited else turn.failures))
    if error.retry_after_seconds is not None:
        delay_ms = max(delay_ms, int(error.retry_after_seconds * 1000))
    return _again(draft, turn, error, reply, delay_ms)


def _exchange_failed(draft: Draft, turn: TurnState, error: ErrorInfo) -> None:
    """One command, one provider call. Behind a host's results the turn rests as before, and `resume` repeats the call."""
    if not turn.answered:
        return fail_turn(draft, turn, error)
    turn.failed_exchange = error
    draft.live = ""
    return suspend_turn(draft, turn, error)


def _attempts_max(agent: AgentSpec) -> int:
    """Each model has a chance, however few attempts there are."""
    return max(agent.retry.max_attempts, 1 + len(agent.fallbacks))


def _passes_on(agent: AgentSpec, turn: TurnState, error: ErrorInfo, reply: ModelReply | None) -> bool:
    """Whether another model is left for the step, and go on with that."""
    if error.kind not in _OF_THE_MODEL:
        return False
    models = [agent.model, *agent.fallbacks]
    left = models[turn.first_model :]
    asked = left.index(reply.model) if reply is not None and reply.model in left else 0
    turn.first_model += asked + 1
    return turn.first_model < len(models)


def _again(draft: Draft, turn: TurnState, error: ErrorInfo, reply: ModelReply | None, delay_ms: int) -> None:
    draft.live = ""
    draft.publish(
        StepRetrying(
            step_number=turn.step,
            attempt=turn.attempt + 1,
            max_attempts=_attempts_max(draft.plan(turn).agent),
            delay=delay_ms / 1000,
            error=error.message,
            usage=reply.usage if reply is not None else None,
            cost=reply.cost if reply is not None else None,
        )
    )
    if delay_ms == 0:
        return retry_model(draft, turn)
    turn.phase = TurnPhase.BACKOFF
    turn.due_ms = draft.now_ms + delay_ms
    return None
