"""What is said to a turn while it runs: claimed in order at the next step, taken back, dropped, never lost."""

from __future__ import annotations

import pytest

from support.machine import SESSION, Session, call, plan_of, texts
from turnmill.protocol.content import BlobRef, Message, TextPart, ToolCall, ToolCallPart
from turnmill.protocol.messages import SteerTurn
from turnmill.protocol.specs import AgentSpec, HookSpec, ToolSpec
from turnmill.runtime.machine import Limits

AGENT = AgentSpec(name="agent", model="scripted:x")
ADD = ToolSpec(name="add")


def test_steering_is_claimed_behind_the_results_and_before_the_next_model_call() -> None:
    # TH-07, AC-46
    session = Session(tools=[ADD])
    session.start("1 + 2?")
    in_flight = session.model_task
    first = session.steer("be brief")
    session.answer(calls=[call("add", a=1)])
    second = session.steer("and kind", message=Message(role="system", content="and kind"))
    assert session.model_task is in_flight
    assert [entry.steering_id for entry in session.state.turn.steering] == [first, second]  # type: ignore[union-attr]
    session.finish_call(0, 3)
    assert texts(session.transcript) == [
        ("user", "1 + 2?"),
        ("assistant", ["call_add"]),
        ("tool", ["call_add"]),
        ("user", "be brief"),
        ("system", "and kind"),
    ]
    assert session.model_task.messages == 5
    assert [(event.steering_id, event.step) for event in session.events(None, "steering.applied")] == [
        (first, 2),
        (second, 2),
    ]
    assert all(message.turn_id == session.turn_id for message in session.transcript)
    types = session.event_types()
    assert types.index("step.started", 2) < types.index("steering.applied")


def test_steering_is_answered_under_its_id() -> None:
    session = Session()
    turn_id = session.start()
    steering_id = session.steer()
    (answer,) = session.answers[steering_id]
    assert (answer.turn_id, answer.steering_id, answer.error) == (turn_id, steering_id, None)


def test_parts_of_steering_are_kept() -> None:
    # TH-07: multimodal content
    session = Session(tools=[ADD])
    session.start()
    parts = Message(role="user", content=[TextPart("look"), TextPart(" here")])
    session.steer(parts)
    session.answer(calls=[call("add")])
    session.finish_call(0)
    assert session.transcript[-1].content == parts.content


def test_a_repeated_command_changes_nothing_also_behind_the_claim() -> None:
    session = Session(tools=[ADD])
    session.start()
    session.steer("once", "s1")
    session.steer("once", "s1")
    session.answer(calls=[call("add")])
    session.finish_call(0)
    session.steer("once", "s1")
    assert [message.text for message in session.transcript].count("once") == 1
    assert session.event_types().count("steering.queued") == 1
    assert [answer.error for answer in session.answers["s1"]] == [None] * 3


def test_a_message_that_is_taken_back_is_never_said() -> None:
    # TH-08
    session = Session(tools=[ADD])
    session.start()
    kept, cancelled = session.steer("kept"), session.steer("cancelled")
    assert session.cancel_steering(cancelled).done is True
    assert session.cancel_steering(cancelled).done is False
    session.answer(calls=[call("add")])
    session.finish_call(0)
    assert session.cancel_steering(kept).done is False
    assert [message.text for message in session.transcript if message.role == "user"] == ["hello", "kept"]
    (dropped,) = session.events(None, "steering.dropped")
    assert (dropped.steering_id, dropped.reason) == (cancelled, "cancelled")
    session.steer("cancelled", cancelled)
    assert session.state.turn is not None
    assert session.state.turn.steering == []


def test_cancelling_what_is_unknown_or_of_an_ended_turn_is_answered() -> None:
    session = Session()
    session.start()
    assert session.cancel_steering("nothing").done is False
    session.answer("done")
    assert session.cancel_steering("nothing").done is False


# ---- behind the final answer


def test_steering_while_the_final_answer_streams_starts_one_more_step() -> None:
    session = Session()
    session.start()
    steering_id = session.steer("one more thing")
    session.answer("the answer")
    assert session.state.turn is not None
    assert session.events(None, "steering.applied")[0].step == 2
    assert texts(session.transcript)[-2:] == [("assistant", "the answer"), ("user", "one more thing")]
    session.answer("the other answer")
    assert session.event_types()[-1] == "turn.finished"
    assert session.events()[-1].result.steps == 2
    assert [event.steering_id for event in session.events(None, "steering.applied")] == [steering_id]


def test_late_steering_may_be_dropped_by_option() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x", late_steering="drop"))
    session.start()
    steering_id = session.steer()
    session.answer("the answer")
    assert session.event_types()[-2:] == ["steering.dropped", "turn.finished"]
    (dropped,) = session.events(None, "steering.dropped")
    assert (dropped.steering_id, dropped.reason) == (steering_id, "the final answer had begun (late_steering=drop)")


@pytest.mark.parametrize("on_limit", ["error", "final_answer"])
def test_late_steering_gets_no_step_beyond_the_limit(on_limit: str) -> None:
    agent = AgentSpec(name="agent", model="scripted:x", max_steps=1, on_limit=on_limit)  # type: ignore[arg-type]
    session = Session(agent)
    session.start()
    session.steer()
    session.answer("the answer")
    assert session.event_types()[-2:] == ["steering.dropped", "turn.finished"]
    assert session.events()[-1].result.termination.kind == "completed"


def test_late_steering_is_seen_behind_the_hooks_of_the_end_too() -> None:
    hook = HookSpec(name="look")
    agent = AgentSpec(name="agent", model="scripted:x", hooks={"after_step": hook}, signals=HookSpec(name="signals"))
    session = Session(agent)
    session.start()
    session.answer("first")
    session.answer_hook()
    assert session.hook_task.hook == "signals"
    session.steer("wait")
    session.answer_hook({"signals": ["early"]})
    assert session.model_task.step_number == 2
    session.answer("second")
    session.answer_hook()
    session.answer_hook({"signals": ["late"]})
    assert session.events()[-1].result.signals == ["late"]


def test_a_signal_extractor_is_not_asked_about_an_answer_that_steering_follows() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x", signals=HookSpec(name="signals")))
    session.start()
    session.steer()
    session.answer("first")
    assert session.tool_tasks == []
    assert session.model_task.step_number == 2


# ---- limits and refusals


def test_pending_steering_is_bounded() -> None:
    session = Session(limits=Limits(queued_turns_max=2))
    session.start()
    session.steer()
    session.steer()
    refused = session.steer()
    (answer,) = session.answers[refused]
    assert answer.error is not None
    assert answer.error.kind == "steering_full"
    assert "TURNMILL_SESSION_QUEUE_MAX" in answer.error.message
    assert session.event_types().count("steering.queued") == 2


@pytest.mark.parametrize("how", ["finished", "failed", "aborted", "aborting", "unknown"])
def test_a_turn_that_has_ended_is_not_steered(how: str) -> None:
    session = Session()
    session.start()
    if how == "finished":
        session.answer("done")
    elif how == "failed":
        session.fail_model(retryable=False)
    elif how == "aborted":
        session.abort()
        session.fire_timer()
    elif how == "aborting":
        session.abort()
    steering_id = session.steer(turn_id="nobody" if how == "unknown" else session.turn_id)
    (answer,) = session.answers[steering_id]
    assert answer.error is not None
    assert answer.error.kind == "turn_ended"


@pytest.mark.parametrize("how", ["failed", "aborted", "conditions"])
def test_what_no_step_claimed_is_given_back_with_the_end(how: str) -> None:
    # AC-46
    session = Session(AgentSpec(name="agent", model="scripted:x", max_steps=1), [ADD])
    session.start()
    session.steer("a")
    if how == "failed":
        session.fail_model(retryable=False)
    elif how == "aborted":
        session.abort()
        session.fire_timer()
    else:
        session.answer(calls=[call("add")])
        session.finish_call(0)
    assert session.event_types()[-2:] == ["steering.dropped", "turn.failed"]


def test_a_message_that_would_break_the_conversation_is_refused() -> None:
    session = Session()
    session.start()
    orphan = Message(role="assistant", content=[ToolCallPart(ToolCall(id="x", name="add"))])
    (answer,) = session.answers[session.steer(orphan)]
    assert answer.error is not None
    assert answer.error.kind == "bad_request"
    assert session.event_types().count("steering.queued") == 0


def test_a_turn_that_starts_with_half_a_group_is_refused() -> None:
    session = Session()
    turn_id = session.start(
        Message(role="user", content="go on"),
        Message(role="assistant", content=[ToolCallPart(ToolCall(id="x", name="add"))]),
    )
    (failed,) = session.events(turn_id)
    assert failed.error_type == "bad_request"
    assert session.transcript == []


# ---- turns that wait


def test_a_turn_that_waits_may_be_steered_before_it_starts() -> None:
    session = Session(tools=[ADD])
    session.start("first")
    session.start("second", turn_id="turn-b")
    one, two = session.steer("a", turn_id="turn-b"), session.steer("b", turn_id="turn-b")
    session.steer("a", one, turn_id="turn-b")
    assert session.cancel_steering(two, "turn-b").done is True
    session.answer("done")
    assert session.event_types("turn-b") == ["turn.started", "steering.queued", "step.started", "steering.applied"]
    assert [message.text for message in session.transcript] == ["first", "done", "second", "a"]
    session.steer("a", one, turn_id="turn-b")
    assert session.event_types("turn-b").count("steering.queued") == 1


def test_steering_of_a_turn_that_never_starts_is_given_back() -> None:
    # AC-46
    session = Session()
    session.start()
    session.start(turn_id="turn-b")
    steering_id = session.steer(turn_id="turn-b")
    assert session.abort(turn_id="turn-b").done is True
    assert session.event_types("turn-b") == ["steering.queued", "steering.dropped", "turn.failed"]
    assert [event.steering_id for event in session.events("turn-b")[:2]] == [steering_id] * 2


def test_queue_mode_makes_the_message_the_next_turn() -> None:
    session = Session()
    session.start("first", metadata={"user": 7}, tenant="acme", priority=2, trace={"traceparent": "t"})
    steering_id = session.steer("later", mode="queue")
    session.steer("later", steering_id, mode="queue")
    assert len(session.state.queue) == 1
    session.answer("done")
    turn = session.state.turn
    assert turn is not None
    assert (turn.turn_id, turn.metadata, turn.tenant, turn.priority) == (steering_id, {"user": 7}, "acme", 2)
    assert turn.trace == {"traceparent": "t"}
    assert texts(session.transcript)[-1] == ("user", "later")


def test_queue_mode_behind_a_turn_that_waits_has_its_options() -> None:
    session = Session(others={"other": plan_of(AGENT)})
    session.start("first")
    session.start("second", turn_id="turn-b", plan_id="other", tenant="acme", metadata={"user": 7})
    steering_id = session.steer("third", turn_id="turn-b", mode="queue")
    queued = session.state.queue[-1]
    assert (queued.command.turn_id, queued.plan_id) == (steering_id, "other")
    assert (queued.command.tenant, queued.command.metadata) == ("acme", {"user": 7})


def test_queue_mode_is_bounded_and_can_be_taken_back() -> None:
    session = Session(limits=Limits(queued_turns_max=1))
    session.start("first")
    steering_id = session.steer("later", mode="queue")
    refused = session.steer("too much", mode="queue")
    assert [answer.error.kind for answer in session.answers[refused] if answer.error] == ["steering_full"]
    assert session.cancel_steering(steering_id).done is True
    assert session.events(steering_id)[-1].aborted is True
    session.steer("later", steering_id, mode="queue")
    assert session.state.queue == []
    session.answer("done")
    assert session.state.turn is None


def test_large_steering_is_kept_for_a_turn_that_waits() -> None:
    session = Session()
    session.start()
    session.start(turn_id="turn-b")
    blob = BlobRef(key="blob:x", bytes=10)
    large = Message(role="user", content=[TextPart("", blob)])
    session.send(SteerTurn(session_id=SESSION, turn_id="turn-b", steering_id="s", message=large))
    assert session.kept == ["blob:x"]
