"""Turns begin, wait for one another, or are refused."""

from __future__ import annotations

import msgspec
import pytest

from support.machine import AGENT, PLAN, SESSION, Session, texts
from turnmill.protocol.content import ErrorInfo, Message
from turnmill.protocol.events import TurnFailed, TurnStarted
from turnmill.protocol.messages import ModelTask, TimerFired
from turnmill.protocol.specs import AgentSpec
from turnmill.runtime.effects import DispatchModel, Publish, SetTimer
from turnmill.runtime.machine import Limits


def test_a_start_opens_the_channel_and_hands_out_the_first_model_call() -> None:
    session = Session()
    turn_id = session.start("Hello", metadata={"user": 7}, tenant="acme", priority=3)
    assert session.events() == [
        TurnStarted(
            turn_id=turn_id,
            agent_id="agent",
            session_id=SESSION,
            messages=[Message(role="user", content="Hello")],
            created_at=1000.0,
        ),
        session.events()[1],
    ]
    assert session.event_types() == ["turn.started", "step.started"]
    assert session.transcript == [Message(role="user", content="Hello", turn_id=turn_id)]
    assert session.model_task == ModelTask(
        session_id=SESSION,
        turn_id=turn_id,
        call="1",
        attempt=1,
        agent_id="agent",
        plan=PLAN,
        step_number=1,
        messages=1,
        metadata={"user": 7},
        tenant="acme",
        deadline_ms=1_000_000 + int(AGENT.model_timeout_seconds * 1000),
    )
    assert session.live == f"{turn_id}/1/1"
    assert session.last.new_turn == turn_id
    dispatch = next(effect for effect in session.last.effects if isinstance(effect, DispatchModel))
    assert (dispatch.pool, dispatch.tenant, dispatch.priority) == ("default", "acme", 3)
    assert session.records[turn_id] == {"session": SESSION, "agent": "agent", "status": "running", "created": "1000000"}
    assert session.index == [turn_id]


@pytest.mark.parametrize(
    ("agent", "pool"),
    [
        (AGENT, "default"),
        (AgentSpec(name="a", model="host:mine"), "host.mine"),
        (AgentSpec(name="a", model="host:mine", pool="gpu"), "gpu"),
    ],
)
def test_the_model_call_goes_to_the_agents_pool(agent: AgentSpec, pool: str) -> None:
    session = Session(agent)
    session.start()
    assert [effect.pool for effect in session.last.effects if isinstance(effect, DispatchModel)] == [pool]


def test_an_answer_ends_the_turn() -> None:  # LC-02
    session = Session()
    turn_id = session.start("Hi")
    session.answer("Hello!")
    assert session.event_types() == ["turn.started", "step.started", "step.finished", "turn.finished"]
    summary = session.events()[-1].result
    assert (summary.status, summary.steps, summary.first_message, summary.end_message) == ("finished", 1, 0, 2)
    assert summary.termination.kind == "completed"
    assert summary.usage.total_tokens == 15
    assert texts(session.transcript) == [("user", "Hi"), ("assistant", "Hello!")]
    assert session.records[turn_id]["status"] == "finished"
    assert session.state.turn is None
    assert session.live == ""


def test_an_empty_answer_is_an_answer() -> None:  # LC-02
    session = Session()
    session.start()
    session.answer("")
    assert session.events()[-1].type == "turn.finished"
    assert session.events()[-1].result.termination.has_text is False


def test_the_next_turn_goes_on_from_the_transcript() -> None:  # LC-12
    session = Session()
    session.start("one")
    session.answer("first")
    session.start("two")
    assert session.model_task.messages == 3
    session.answer("second")
    summary = session.events()[-1].result
    assert (summary.first_message, summary.end_message) == (2, 4)
    assert [role for role, _ in texts(session.transcript)] == ["user", "assistant"] * 2


def test_a_list_of_messages_is_used_as_it_is() -> None:  # LC-12
    session = Session()
    session.start(Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    assert texts(session.transcript) == [("system", "Be brief."), ("user", "Hi")]
    assert session.model_task.messages == 2


# --- one turn at a time


def test_turns_wait_in_the_order_of_the_inbox() -> None:  # AC-47
    session = Session()
    ids = [session.start(f"message {number}") for number in range(20)]
    assert session.records[ids[1]]["status"] == "queued"
    assert list(session.channels) == ids[:1]  # a channel is opened when its turn begins
    for number, turn_id in enumerate(ids):
        assert session.turn_id == turn_id
        session.answer(f"answer {number}")
    assert list(session.channels) == ids
    assert session.index == ids
    assert texts(session.transcript) == [
        entry for n in range(20) for entry in (("user", f"message {n}"), ("assistant", f"answer {n}"))
    ]
    assert session.state.queue == []


def test_a_queued_turn_begins_in_the_commit_that_ends_the_one_before() -> None:  # AC-47
    session = Session()
    first, second = session.start("one"), session.start("two")
    session.pass_time(3)
    decision = session.answer("done")
    published = [(effect.turn_id, effect.event.type) for effect in decision.effects if isinstance(effect, Publish)]
    assert published == [
        (first, "step.finished"),
        (first, "turn.finished"),
        (second, "turn.started"),
        (second, "step.started"),
    ]
    assert session.live == f"{second}/1/1"
    assert session.events(second)[0].created_at == 1003.0
    assert session.records[second]["status"] == "running"


def test_a_failed_turn_lets_the_next_one_begin() -> None:  # AC-47
    session = Session()
    session.start("one")
    second = session.start("two")
    session.fail_model(retryable=False)
    assert session.turn_id == second
    session.answer("fine")
    assert session.events(second)[-1].type == "turn.finished"


def test_the_queue_is_bounded_and_the_refusal_stands_in_the_turns_own_channel() -> None:
    session = Session(limits=Limits(queued_turns_max=2))
    ids = [session.start() for _ in range(3)]
    state = session.state
    refused = session.start()
    assert session.state == state
    assert session.channels[refused] == [session.events(refused)[0]]
    failed = session.events(refused)[0]
    assert isinstance(failed, TurnFailed)
    assert failed.error_type == "queue_full"
    assert failed.result is None
    assert "TURNMILL_SESSION_QUEUE_MAX" in failed.error
    assert session.records[refused]["status"] == "failed"
    for _ in ids:
        session.answer("ok")
    assert session.closed == {*ids, refused}


# --- known turns


def test_a_turn_that_runs_or_waits_is_not_started_again() -> None:
    session = Session()
    running, waiting = session.start(), session.start()
    for known in (running, waiting):
        state = session.state
        session.start("again", turn_id=known)
        assert session.last.discarded == "duplicate_turn"
        assert session.state is state
    assert session.counters == {"duplicate_turn": 2}


def test_a_turn_that_has_ended_is_guarded_by_its_record() -> None:
    """The state forgets ended turns; the decision names the turn that must be new, and the store looks."""
    session = Session()
    turn_id = session.start()
    session.answer("done")
    session.start("again", turn_id=turn_id)
    assert session.last.new_turn == turn_id
    assert session.counters == {"duplicate_turn": 1}
    assert len(session.transcript) == 2


# --- what cannot run


def test_a_turn_whose_agent_cannot_be_resolved_is_refused() -> None:
    session = Session()
    problem = ErrorInfo(kind="unknown_agent", message="no agent 'x' is published")
    refused = session.start(problem=problem)
    assert session.channels[refused] == [session.events(refused)[0]]
    failed = session.events(refused)[0]
    assert (failed.error, failed.error_type) == ("no agent 'x' is published", "unknown_agent")
    assert failed.termination.kind == "failed"
    assert msgspec.json.decode(session.records[refused]["error"])["kind"] == "unknown_agent"
    assert session.transcript == []
    assert session.tasks == []
    session.start()
    session.answer("works")
    assert session.event_types()[-1] == "turn.finished"


def test_a_refusal_leaves_the_running_turn_alone() -> None:
    session = Session()
    running = session.start()
    session.start(problem=ErrorInfo(kind="unknown_agent", message="?"))
    assert session.state.turn is not None
    assert session.state.turn.turn_id == running
    session.answer("done")
    assert session.events(running)[-1].type == "turn.finished"


def test_a_queued_turn_whose_plan_is_gone_fails_and_the_next_one_begins() -> None:
    session = Session()
    session.start("one")
    lost = session.start("two", plan_id="gone")
    last = session.start("three")
    session.answer("done")
    assert session.event_types(lost) == ["turn.started", "turn.failed"]
    assert session.events(lost)[-1].error_type == "state_lost"
    assert session.turn_id == last
    session.answer("done")
    assert session.events(last)[-1].type == "turn.finished"


def test_a_long_queue_of_lost_plans_is_no_crash() -> None:
    session = Session(limits=Limits(queued_turns_max=400))
    session.start("one")
    ids = [session.start(plan_id="gone") for _ in range(400)]
    session.answer("done")
    assert {session.events(turn_id)[-1].error_type for turn_id in ids} == {"state_lost"}


def test_a_turn_whose_plan_is_lost_in_the_middle_ends_as_state_lost() -> None:  # AC-21
    session = Session()
    session.start()
    plan = session.plans.pop(PLAN)
    session.answer("an answer")
    assert session.events()[-1].error_type == "state_lost"
    session.plans[PLAN] = plan
    session.start("again")
    session.answer("fine")
    assert session.event_types()[-1] == "turn.finished"


def test_a_timer_that_finds_no_turn_does_nothing() -> None:
    session = Session()
    session.start()
    session.answer("done")
    decision = session.send(TimerFired(session_id=SESSION))
    assert [effect for effect in decision.effects if not isinstance(effect, SetTimer)] == []
