"""A turn that comes while another one is live: it waits, is refused, joins, or takes its place."""

from __future__ import annotations

import pytest

from support.machine import PLAN, Session, call, plan_of, texts
from turnmill.protocol.content import BlobRef, ErrorInfo, Message, TextPart
from turnmill.protocol.specs import AgentSpec, ToolSpec
from turnmill.runtime.machine import Limits

AGENT = AgentSpec(name="agent", model="scripted:x")
ADD = ToolSpec(name="add")


def busy(limit: int = 100) -> Session:
    session = Session(AGENT, [ADD], Limits(queued_turns_max=limit))
    session.start("first", turn_id="turn-a")
    return session


def kind_of(session: Session, turn_id: str) -> str:
    (answer,) = session.answers[turn_id]
    return "accepted" if answer.error is None else answer.error.kind


# ---- queue


def test_turns_run_one_after_the_other_in_accepted_order() -> None:
    # AC-47
    session = busy()
    ids = [session.start(f"question {number}") for number in range(20)]
    order = []
    for _ in range(21):
        assert session.state.turn is not None
        order.append(session.state.turn.turn_id)
        session.answer("done")
    assert order == ["turn-a", *ids]
    asked = [message.text for message in session.transcript if message.role == "user"]
    assert asked == ["first", *[f"question {number}" for number in range(20)]]


def test_a_turn_that_waits_is_answered_when_it_is_accepted_and_not_again() -> None:
    session = busy()
    session.start(turn_id="turn-b", answer=True)
    assert kind_of(session, "turn-b") == "accepted"
    session.answer("done")
    assert session.state.turn is not None
    assert session.state.turn.turn_id == "turn-b"
    assert len(session.answers["turn-b"]) == 1


def test_a_turn_on_an_idle_session_is_answered_whatever_its_policy() -> None:
    for on_busy in ("queue", "reject", "steer", "interrupt"):
        session = Session()
        session.start(turn_id="turn-a", on_busy=on_busy, answer=True)
        (answer,) = session.answers["turn-a"]
        assert (answer.turn_id, answer.error, answer.steering_id) == ("turn-a", None, None)


def test_the_queue_is_bounded() -> None:
    # AC-47
    session = busy(limit=1)
    session.start(turn_id="turn-b", answer=True)
    session.start(turn_id="turn-c", answer=True)
    assert (kind_of(session, "turn-b"), kind_of(session, "turn-c")) == ("accepted", "queue_full")
    assert session.events("turn-c")[-1].error_type == "queue_full"


# ---- reject


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_turn_may_be_refused_where_another_is_live(is_stopping: bool) -> None:
    # AC-47
    session = busy()
    if is_stopping:
        session.abort()
    session.start(turn_id="turn-b", on_busy="reject", answer=True)
    (answer,) = session.answers["turn-b"]
    assert answer.error is not None
    assert (answer.error.kind, answer.turn_id) == ("session_busy", "turn-a")
    assert session.records["turn-b"]["status"] == "failed"
    assert session.event_types("turn-b") == ["turn.failed"]
    session.answer("done")
    assert session.state.turn is None


def test_what_is_refused_keeps_none_of_its_large_values() -> None:
    session = busy()
    large = Message(role="user", content=[TextPart("", BlobRef(key="blob:x", bytes=9))])
    session.start(large, on_busy="reject")
    session.start(large, problem=ErrorInfo(kind="unknown_agent", message="?"))
    assert session.kept == []
    session.start(large)
    assert session.kept == ["blob:x"]


# ---- steer


def test_a_turn_may_become_steering_of_the_live_one() -> None:
    # AC-47
    session = busy()
    session.start("one", "two", turn_id="turn-b", on_busy="steer", answer=True)
    (answer,) = session.answers["turn-b"]
    assert (answer.turn_id, answer.steering_id, answer.error) == ("turn-a", "turn-b", None)
    assert "turn-b" not in session.channels
    assert "turn-b" not in session.records
    session.answer("", [call("add")])
    session.finish_call(0)
    assert texts(session.transcript)[-2:] == [("user", "one"), ("user", "two")]
    applied = [event.steering_id for event in session.events("turn-a", "steering.applied")]
    assert applied == ["turn-b", "turn-b.1"]


def test_a_repeated_turn_that_became_steering_is_answered_as_before() -> None:
    session = busy()
    for _ in range(2):
        session.start(turn_id="turn-b", on_busy="steer", answer=True)
    first, second = session.answers["turn-b"]
    assert first == second
    assert session.event_types("turn-a").count("steering.queued") == 1


def test_joining_is_bounded_like_steering() -> None:
    session = busy(limit=1)
    session.start(turn_id="turn-b", on_busy="steer", answer=True)
    session.start(turn_id="turn-c", on_busy="steer", answer=True)
    assert (kind_of(session, "turn-b"), kind_of(session, "turn-c")) == ("accepted", "queue_full")


def test_nobody_joins_a_turn_that_is_being_stopped() -> None:
    session = busy(limit=1)
    session.abort()
    session.start("next", turn_id="turn-b", on_busy="steer", answer=True)
    session.start(turn_id="turn-c", on_busy="steer", answer=True)
    assert (kind_of(session, "turn-b"), kind_of(session, "turn-c")) == ("accepted", "queue_full")
    session.fire_timer()
    assert session.event_types("turn-b") == ["turn.started", "step.started"]


# ---- interrupt


def test_a_turn_may_take_the_live_ones_place() -> None:
    # AC-47
    session = busy()
    session.start("waits", turn_id="turn-b")
    session.start("now", turn_id="turn-c", on_busy="interrupt", answer=True)
    assert kind_of(session, "turn-c") == "accepted"
    assert session.cancelled == {"turn-a": "interrupted by turn turn-c"}
    session.answer("so far")
    assert session.events("turn-a")[-1].aborted is True
    assert session.event_types("turn-c") == ["turn.started", "step.started"]
    session.answer("done")
    assert session.event_types("turn-b") == ["turn.started", "step.started"]
    assert [message.text for message in session.transcript] == ["first", "so far", "now", "done", "waits"]
    assert len(session.answers["turn-c"]) == 1


def test_where_nothing_runs_the_place_is_free_at_once() -> None:
    session = busy()
    session.fail_model()
    session.start("now", turn_id="turn-b", on_busy="interrupt")
    assert session.events("turn-a")[-1].aborted is True
    assert session.event_types("turn-b") == ["turn.started", "step.started"]


# ---- repetitions, plans


@pytest.mark.parametrize("on_busy", ["queue", "reject", "steer", "interrupt"])
def test_a_turn_that_is_known_is_not_started_again(on_busy: str) -> None:
    # AC-14
    session = busy()
    session.start(turn_id="turn-b")
    transcript = list(session.transcript)
    for known in ("turn-a", "turn-b"):
        session.start(turn_id=known, on_busy=on_busy, answer=True)
        (answer,) = session.answers[known]
        assert (answer.turn_id, answer.error) == (known, None)
    assert session.counters == {"duplicate_turn": 2}
    assert session.transcript == transcript
    assert [queued.command.turn_id for queued in session.state.queue] == ["turn-b"]


def test_a_turn_whose_plan_went_while_it_waited_fails_and_the_next_one_runs() -> None:
    session = Session(others={"other": plan_of(AGENT)})
    session.start("first")
    lost = session.start("lost", plan_id="other")
    last = session.start("last", plan_id=PLAN)
    del session.plans["other"]
    session.answer("done")
    assert session.events(lost)[-1].error_type == "state_lost"
    assert session.event_types(last) == ["turn.started", "step.started"]
    assert session.state.turn is not None


def test_a_start_that_became_steering_is_known_when_it_comes_again_behind_the_turns_end() -> None:
    """Sent twice by a caller whose first reply was lost: its message is in one step, and not a turn of its own as well."""
    session = busy()
    session.start("also this", turn_id="turn-b", on_busy="steer", answer=True)
    session.answer("first answer")
    session.answer("second answer")
    assert session.state.turn is None
    session.start("also this", turn_id="turn-b", on_busy="steer", answer=True)
    assert session.state.turn is None
    assert [message.text for message in session.transcript if message.role == "user"] == ["first", "also this"]
    assert [(answer.turn_id, answer.steering_id) for answer in session.answers["turn-b"]] == [("turn-a", "turn-b")] * 2
