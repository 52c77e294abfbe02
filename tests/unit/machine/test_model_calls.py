"""The model's part of a step: attempts, waits, timeouts and losses; only the attempt that stands out is heard."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import AGENT, SESSION, Session, call
from turnmill.protocol.content import Message, TextPart, ToolCall, ToolCallPart, Usage
from turnmill.protocol.events import StepReset, StepRetrying, TextDelta
from turnmill.protocol.messages import DeliveryLost, TimerFired
from turnmill.protocol.specs import AgentSpec, RetryPolicy, ToolSpec
from turnmill.runtime.machine import Limits
from turnmill.runtime.model_failures import RATE_LIMIT_WAITS_MAX
from turnmill.runtime.pairing import with_unique_calls
from turnmill.runtime.steps import GRACE_SECONDS

POLICY = RetryPolicy(max_attempts=3, initial_delay_seconds=1.0, max_delay_seconds=5.0, backoff=3.0)
RETRYING = AgentSpec(name="agent", model="scripted:x", retry=POLICY)


# --- errors


def test_a_retryable_error_is_a_wait_and_another_attempt() -> None:
    session = Session(RETRYING)
    turn_id = session.start()
    session.fail_model()
    assert session.events()[-1] == StepRetrying(
        step_number=1, attempt=2, max_attempts=3, delay=1.0, error="provider_error!"
    )
    assert session.live == ""  # between attempts nobody may publish
    assert len(session.model_tasks) == 1
    assert session.timer_ms == session.now_ms + 1000
    session.fire_timer()
    assert session.events()[-1] == StepReset(step_number=1, attempt=2)
    assert (session.model_task.attempt, session.model_task.call, session.model_task.messages) == (2, "1", 1)
    assert session.live == f"{turn_id}/1/2"
    session.answer("at last")
    assert session.event_types()[-1] == "turn.finished"


def test_the_wait_grows_up_to_its_limit_and_attempts_end() -> None:
    session = Session(AgentSpec(name="a", model="scripted:x", retry=RetryPolicy(
        max_attempts=5, initial_delay_seconds=1.0, max_delay_seconds=5.0, backoff=3.0)))  # fmt: skip
    session.start()
    for _ in range(4):
        session.fail_model()
        session.fire_timer()
    session.fail_model()
    assert [event.delay for event in session.events(None, "step.retrying")] == [1.0, 3.0, 5.0, 5.0]
    failed = session.events()[-1]
    assert (failed.type, failed.error_type, failed.error) == ("turn.failed", "provider_error", "provider_error!")
    assert failed.result.status == "failed"
    assert failed.termination == failed.result.termination


def test_an_error_that_no_attempt_can_help_fails_the_turn_at_once() -> None:
    session = Session(RETRYING)
    session.start()
    session.fail_model("authentication", retryable=False)
    assert session.event_types() == ["turn.started", "step.started", "turn.failed"]
    assert session.events()[-1].error_type == "authentication"
    assert session.timer_ms is None
    assert session.live == ""


def test_the_next_step_has_all_its_attempts() -> None:
    session = Session(RETRYING, [ToolSpec(name="add")])
    session.start()
    for _ in range(2):
        session.fail_model()
        session.fire_timer()
    session.answer(calls=[call("add")])
    session.finish_call(0)
    for _ in range(2):
        session.fail_model()
        session.fire_timer()
    session.answer("done")
    assert session.event_types()[-1] == "turn.finished"


def test_the_providers_own_time_is_waited_for() -> None:  # AC-49
    session = Session(RETRYING)
    session.start()
    session.fail_model("overloaded", retry_after_seconds=20.0)
    assert session.events()[-1].delay == 20.0
    assert session.timer_ms == session.now_ms + 20_000
    session.fire_timer()
    session.fail_model("overloaded", retry_after_seconds=0.1)
    assert session.events()[-1].delay == 3.0  # the longer of the two


def test_a_rate_limit_is_a_wait_and_costs_no_attempt() -> None:  # AC-49
    session = Session(AgentSpec(name="a", model="scripted:x", retry=RetryPolicy(max_attempts=2)))
    session.start()
    for _ in range(10):
        session.fail_model("rate_limited")
        session.fire_timer()
    session.fail_model()
    assert session.event_types()[-1] == "step.retrying"  # the first real failure
    session.fire_timer()
    session.fail_model()
    assert session.events()[-1].error_type == "provider_error"


def test_a_rate_limit_is_not_waited_for_without_end() -> None:
    session = Session(AgentSpec(name="a", model="scripted:x", retry=RetryPolicy(max_attempts=2)))
    session.start()
    failures = 0
    while session.state.turn is not None:
        failures += 1
        session.fail_model("rate_limited")
        if session.state.turn is not None:
            session.fire_timer()
    assert failures == RATE_LIMIT_WAITS_MAX + 2
    assert session.events()[-1].error_type == "rate_limited"


def test_a_rate_limit_that_will_not_pass_fails_the_turn() -> None:
    session = Session(RETRYING)
    session.start()
    session.fail_model("rate_limited", retryable=False)  # out of credit
    assert session.events()[-1].error_type == "rate_limited"


def test_a_reply_with_neither_message_nor_error_is_a_fault_of_the_worker() -> None:
    session = Session()
    session.start()
    session.answer(message=None)
    assert session.events()[-1].error_type == "internal"


# --- time


def test_a_model_call_that_is_never_answered_is_given_up_after_its_timeout() -> None:
    session = Session(AgentSpec(name="a", model="scripted:x", model_timeout_seconds=30, retry=POLICY))
    session.start()
    assert session.timer_ms == session.now_ms + int((30 + GRACE_SECONDS) * 1000)
    session.fire_timer()
    assert session.events()[-1].type == "step.retrying"
    assert "within 30 s" in session.events()[-1].error
    late = session.model_reply("too late")
    session.send(late)
    assert session.last.discarded == "stale_model_reply"  # AC-15
    session.fire_timer()
    assert session.model_task.attempt == 2
    session.send(late)
    assert session.last.discarded == "stale_model_reply"
    session.answer("in time")
    assert session.transcript[-1].text == "in time"


def test_timeouts_use_up_the_attempts() -> None:
    session = Session(AgentSpec(name="a", model="scripted:x", retry=RetryPolicy(max_attempts=2)))
    session.start()
    for _ in range(3):
        session.fire_timer()
    assert session.events()[-1].error_type == "timeout"


def test_a_timer_that_fires_early_only_looks() -> None:
    session = Session()
    session.start()
    session.pass_time(1)
    due = session.timer_ms
    session.send(TimerFired(session_id=SESSION))
    assert session.event_types() == ["turn.started", "step.started"]
    assert session.timer_ms == due


# --- losses


def test_a_lost_model_call_is_made_again_at_once() -> None:  # AC-33
    session = Session()
    turn_id = session.start()
    session.lose(session.model_task)
    assert session.event_types() == ["turn.started", "step.started", "step.reset"]
    assert session.model_task.attempt == 2
    assert session.live == f"{turn_id}/1/2"
    session.answer("from the second worker")
    assert session.event_types()[-1] == "turn.finished"


def test_a_model_call_that_kills_its_workers_ends_the_turn() -> None:
    session = Session(limits=Limits(losses_max=3))
    session.start()
    for _ in range(3):
        session.lose(session.model_task)
    assert session.events()[-1].error_type == "delivery_lost"
    assert "lost with its LLM worker 3 times" in session.events()[-1].error
    assert len(session.model_tasks) == 3


def test_losses_do_not_use_up_the_attempts_at_the_provider() -> None:
    session = Session(RETRYING)
    session.start()
    for _ in range(3):
        session.lose(session.model_task)
    session.fail_model()
    assert session.events()[-1].type == "step.retrying"


def test_a_loss_is_told_once() -> None:
    session = Session()
    session.start()
    task = session.model_task
    session.lose(task)
    session.lose(task)
    assert session.last.discarded == "stale_loss"
    session.fail_model()
    session.lose(session.model_task)  # its worker was lost after it had replied
    assert session.last.discarded == "stale_loss"


# --- what comes twice, late or from elsewhere


def test_the_first_reply_to_an_attempt_counts() -> None:  # AC-16
    session = Session(AGENT, [ToolSpec(name="add")])
    session.start()
    first, changed = session.model_reply("", [call("add")]), session.model_reply("something else")
    session.send(first)
    for repeated in (first, changed):
        state = session.state
        session.send(repeated)
        assert session.last.discarded == "stale_model_reply"
        assert session.state is state
    session.finish_call(0)
    session.answer("done")
    session.send(first)
    assert session.last.discarded == "stale_model_reply"
    assert session.counters == {"stale_model_reply": 3}


@pytest.mark.parametrize(
    "fields", [{"attempt": 2}, {"attempt": 0}, {"call": "2"}, {"call": "1.0"}, {"call": ""}, {"turn_id": "turn-9"}]
)
def test_a_reply_to_another_call_is_dropped(fields: dict[str, Any]) -> None:  # AC-15
    session = Session()
    session.start()
    session.send(session.model_reply("foreign", **fields))
    assert session.last.discarded == "stale_model_reply"
    session.send(DeliveryLost(**{"session_id": SESSION, "turn_id": "turn-1", "call": "1", "attempt": 1, **fields}))
    assert session.last.discarded == "stale_loss"


def test_a_reply_of_the_turn_before_does_not_reach_the_next_one() -> None:  # AC-15
    session = Session()
    session.start()
    late = session.model_reply("late")
    session.answer("first")
    session.start()
    session.send(late)
    assert session.last.discarded == "stale_model_reply"
    session.answer("second")
    assert [message.text for message in session.transcript] == ["hello", "first", "hello", "second"]


# --- the answer


def test_live_events_that_were_not_published_come_before_the_steps_end() -> None:
    session = Session()
    session.start()
    tail = [
        {"type": "text.delta", "text": "the ", "step_number": 1},
        {"type": "text.delta", "text": "end", "step_number": 1},
    ]
    session.answer("the end", tail=tail)
    assert session.events()[2:4] == [
        TextDelta(text="the ", step_number=1),
        TextDelta(text="end", step_number=1),
    ]
    assert session.event_types()[4:] == ["step.finished", "turn.finished"]


def test_a_tail_that_holds_no_live_event_is_left_out() -> None:
    """Its content is in the message anyway, and no worker may write a turn's end."""
    session = Session()
    session.start()
    tail: list[dict[str, Any]] = [{"type": "turn.finished"}, {"type": "text.delta", "text": 7}, {}, {"type": ["x"]}]
    session.answer("fine", tail=tail)
    assert session.event_types() == ["turn.started", "step.started", "step.finished", "turn.finished"]


def test_the_message_carries_its_step_turn_usage_and_finish_reason() -> None:
    session = Session()
    turn_id = session.start()
    usage = Usage(input_tokens=3, output_tokens=4, total_tokens=7)
    session.answer("hi", usage=usage, finish_reason="length")
    assert session.transcript[-1] == Message(
        role="assistant", content="hi", turn_id=turn_id, step=1, usage=usage, finish_reason="length"
    )
    step = session.events()[-2].step
    assert (step.first_message, step.end_message, step.finish_reason, step.usage) == (1, 2, "length", usage)
    assert session.events()[-1].result.finish_reason == "length"


def test_usage_is_summed_over_steps_and_may_be_unknown() -> None:  # LC-14
    session = Session(AGENT, [ToolSpec(name="add")])
    session.start()
    session.answer("", [call("add")], usage=Usage(input_tokens=10, output_tokens=5))
    session.finish_call(0)
    session.answer("", [call("add", "c2")], usage=None)
    session.finish_call(0)
    session.answer("3", usage=Usage(input_tokens=12, output_tokens=6, reasoning_tokens=2))
    finished = [event.usage for event in session.events(None, "step.finished")]
    assert finished == [
        Usage(input_tokens=10, output_tokens=5),
        None,
        Usage(input_tokens=12, output_tokens=6, reasoning_tokens=2),
    ]
    assert session.events()[-1].result.usage == Usage(input_tokens=22, output_tokens=11, reasoning_tokens=2)


def test_text_in_parts_is_text() -> None:
    session = Session()
    session.start()
    session.answer(message=Message(role="assistant", content=[TextPart("a"), TextPart("b")]))
    assert session.events()[-1].result.termination.has_text
    assert session.transcript[-1].text == "ab"


def test_calls_that_share_an_id_are_told_apart() -> None:
    """A result must tell which call it answers, and strict providers refuse a history in which it does not."""
    parts = [ToolCallPart(ToolCall(id=name, name="add")) for name in ("same", "same", "", "same_1")]
    message = with_unique_calls(Message(role="assistant", content=parts))
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 4
    assert ids[0] == "same"
    assert with_unique_calls(message) is message


# --- a provider that pauses


def test_an_answer_that_pauses_is_sent_back_and_goes_on() -> None:
    """The provider runs tools of its own; its message goes back as it came, and the next step is its answer."""
    session = Session(AGENT)
    session.start()
    session.answer("I look it up.", finish_reason="pause")
    assert (session.model_task.step_number, session.model_task.messages) == (2, 2)
    session.answer("Here it is.")
    assert session.event_types()[-1] == "turn.finished"
    assert [message.role for message in session.transcript] == ["user", "assistant", "assistant"]


def test_an_answer_that_pauses_for_ever_meets_the_limit() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x", max_steps=2))
    session.start()
    for _ in range(2):
        session.answer("Still at it.", finish_reason="pause")
    assert session.events()[-1].error_type == "max_steps_reached"


def test_a_single_exchange_is_over_when_it_pauses() -> None:
    """AE-03."""
    session = Session(AgentSpec(name="agent", model="scripted:x", mode="single_exchange"))
    session.start()
    session.answer("I look it up.", finish_reason="pause")
    assert session.event_types()[-1] == "turn.finished"
