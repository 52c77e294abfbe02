"""An agent with more models than one: which error leads to the next one, at once or after a wait, and which ends the turn."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.specs import AgentSpec, RetryPolicy

POLICY = RetryPolicy(max_attempts=3, initial_delay_seconds=1.0)
CHAIN = AgentSpec(name="agent", model="a:x", fallbacks=["b:y", "c:z"], retry=POLICY)


def fail(
    session: Session, kind: str = "overloaded", *, retryable: bool = True, model: str = "a:x", **info: Any
) -> None:
    error = ErrorInfo(kind=kind, message=f"{kind}!", retryable=retryable, **info)
    session.send(session.model_reply(message=None, usage=None, finish_reason=None, error=error, model=model))


def test_an_outage_leads_to_the_next_model_at_once() -> None:
    """LC-15: the worker passes over the provider that failed, so the task says nothing of it."""
    session = Session(CHAIN)
    session.start()
    fail(session)
    assert [event.delay for event in session.events(None, "step.retrying")] == [0.0]
    assert (session.model_task.attempt, session.model_task.first_model) == (2, 0)
    session.answer("from b")
    assert session.event_types()[-1] == "turn.finished"


def test_when_all_have_failed_the_next_attempt_waits() -> None:
    session = Session(CHAIN)
    session.start()
    fail(session)
    fail(session)
    fail(session, "provider_error")
    assert [event.delay for event in session.events(None, "step.retrying")] == [0.0, 0.0]
    last = session.events()[-1]
    assert (last.type, last.error) == ("turn.failed", "provider_error!"), "LC-15: the last real error"


def test_each_model_has_a_chance_however_few_attempts_there_are() -> None:
    session = Session(AgentSpec(name="a", model="a:x", fallbacks=["b:y"], retry=RetryPolicy(max_attempts=1)))
    session.start()
    fail(session)
    session.answer("from b")
    assert session.event_types()[-1] == "turn.finished"


def test_a_rate_limit_leads_to_the_next_model_before_it_is_a_wait() -> None:
    """AC-49: none of them costs an attempt."""
    session = Session(CHAIN)
    session.start()
    for _ in range(3):
        fail(session, "rate_limited", retry_after_seconds=7.0)
    assert [event.delay for event in session.events(None, "step.retrying")] == [0.0, 0.0, 7.0]
    session.fire_timer()
    session.answer("at last")
    assert session.event_types()[-1] == "turn.finished"


@pytest.mark.parametrize("kind", ["authentication", "bad_request", "content_filter", "provider_error", "rate_limited"])
def test_an_error_that_would_come_again_leaves_that_model_out(kind: str) -> None:
    session = Session(CHAIN)
    session.start()
    fail(session, kind, retryable=False, model="a:x")
    assert session.model_task.first_model == 1
    fail(session, kind, retryable=False, model="c:z")  # b was passed over: it is held back
    assert session.events()[-1].type == "turn.failed"


def test_the_next_step_begins_with_the_first_model_again() -> None:
    session = Session(CHAIN)
    session.start()
    fail(session, "authentication", retryable=False, model="a:x")
    session.answer("from b")
    session.start("again")
    assert session.model_task.first_model == 0


@pytest.mark.parametrize("kind", ["state_lost", "internal", "event_limit"])
def test_what_is_no_models_fault_ends_the_turn(kind: str) -> None:
    session = Session(CHAIN)
    session.start()
    fail(session, kind, retryable=False)
    assert session.events()[-1].error_type == kind


def test_a_single_exchange_has_one_call_whatever_models_there_are() -> None:
    """AE-03."""
    session = Session(AgentSpec(name="a", model="a:x", fallbacks=["b:y"], mode="single_exchange"))
    session.start()
    fail(session)
    assert session.events()[-1].type == "turn.failed" and len(session.model_tasks) == 1
