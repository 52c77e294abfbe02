"""Tools that no worker runs: the turn rests until its host brings the results, in whatever pieces and order."""

from __future__ import annotations

import pytest

from support.machine import PLAN, Session, call, texts
from turnmill.protocol.content import Message, TextPart, ToolCall, ToolCallPart, ToolResult
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, OutputSpec, RetryPolicy, ToolSpec

AGENT = AgentSpec(name="agent", model="scripted:x")
EXCHANGE = AgentSpec(name="agent", model="scripted:x", mode="single_exchange", tools=["a", "b"])
HOST = [ToolSpec(name="a", kind="host"), ToolSpec(name="b", kind="host"), ToolSpec(name="work")]


def suspended(*names: str, agent: AgentSpec = AGENT) -> Session:
    session = Session(agent, HOST)
    session.start("question")
    session.answer("", [call(name, name) for name in names])
    return session


# ---- the rest


def test_a_call_of_a_host_tool_suspends_the_turn() -> None:
    # AE-04
    session = suspended("a", "b")
    event = session.events()[-1]
    assert (event.type, event.pending, event.approvals, event.error) == ("turn.suspended", ["a", "b"], [], None)
    assert (event.result.status, event.result.pending, event.result.signals) == ("suspended", ["a", "b"], [])
    assert event.result.termination.kind == "suspended"
    assert session.records[session.turn_id]["status"] == "suspended"
    assert session.tool_tasks == []
    assert session.timer_ms is None
    assert session.feed[-1].event == "turn.suspended"


def test_results_go_into_the_history_in_call_order_before_the_next_model_call() -> None:
    # AE-06
    session = suspended("a", "b")
    answer = session.resume({"b": 2, "a": 1})
    assert (answer.error, answer.pending) == (None, [])
    assert texts(session.transcript)[-2:] == [("tool", ["a"]), ("tool", ["b"])]
    assert session.result_texts() == [1, 2]
    assert session.records[session.turn_id]["status"] == "running"
    assert session.event_types()[-6:] == [
        "turn.suspended",
        "turn.resumed",
        "tool_result",
        "tool_result",
        "step.finished",
        "step.started",
    ]
    session.answer("done")
    assert session.events()[-1].result.status == "finished"


def test_a_resumed_turn_suspends_again_with_the_new_ids() -> None:
    # AE-07
    session = suspended("a")
    session.resume({"a": 1})
    session.answer("", [call("b", "b2")])
    assert session.events()[-1].pending == ["b2"]


def test_a_result_gets_its_calls_name_whatever_the_host_wrote() -> None:
    session = suspended("a")
    session.resume(tool_results=[ToolResult(tool_call_id="a", tool_name="?", result="no", is_error=True)])
    assert session.results() == [ToolResult(tool_call_id="a", tool_name="a", result="no", is_error=True)]


def test_a_turn_may_wait_for_ever_or_until_its_deadline() -> None:
    agent = AgentSpec(name="agent", model="scripted:x", turn_timeout_seconds=60)
    session = suspended("a", agent=agent)
    assert session.timer_ms is not None
    session.fire_timer()
    assert session.events()[-1].error_type == "deadline_exceeded"
    assert suspended("a").timer_ms is None


# ---- part of the results, wrong results


def test_partial_results_are_kept_and_the_rest_is_named() -> None:
    # AE-10
    session = suspended("a", "b")
    assert session.resume({"b": 2}).pending == ["a"]
    assert session.events()[-1].type == "turn.suspended"
    assert session.events()[-1].pending == ["a"]
    assert session.results() == []
    assert session.resume({"a": 1}).pending == []
    assert session.result_texts() == [1, 2]


def test_the_first_result_of_a_call_wins_and_the_answer_is_the_same() -> None:
    # AE-10
    session = suspended("a", "b")
    first = session.resume({"b": 2}, request_id="again")
    assert session.resume({"b": "changed"}, request_id="again") == first
    assert session.event_types().count("turn.resumed") == 1
    session.resume({"a": 1, "b": "changed"})
    assert session.result_texts() == [1, 2]


def test_results_that_come_again_behind_the_step_are_answered_as_before() -> None:
    # AE-10
    session = suspended("a")
    first = session.resume({"a": 1}, request_id="again")
    assert session.resume({"a": 1}, request_id="again") == first
    assert session.result_texts() == [1]


@pytest.mark.parametrize("given", [{"x": 1}, {"a": 1, "x": 2}])
def test_an_unknown_id_is_refused_as_a_whole(given: dict[str, int]) -> None:
    # AE-10
    session = suspended("a", "b")
    before = session.state
    answer = session.resume(given)
    assert answer.error is not None
    assert (answer.error.kind, answer.error.pending, answer.pending) == ("unknown_tool_result", ["a", "b"], ["a", "b"])
    assert "x" in answer.error.message
    assert session.state == before


def test_results_are_refused_where_nothing_waits() -> None:
    # AE-10
    session = Session(AGENT, HOST)
    session.start()
    for _ in range(2):
        answer = session.resume({"a": 1})
        assert answer.error is not None
        assert answer.error.kind == "no_pending_tools"
        session.answer("done")
    answer = session.resume()
    assert answer.error is not None
    assert answer.error.kind == "no_pending_tools"


def test_an_empty_resumption_is_told_what_is_missing() -> None:
    # AE-05
    session = suspended("a", "b")
    for message in (None, "hello?"):
        answer = session.resume(message=message)
        assert answer.error is not None
        assert (answer.error.kind, answer.pending) == ("tool_results_required", ["a", "b"])
    assert session.event_types()[-1] == "turn.suspended"


# ---- messages while it rests


@pytest.mark.parametrize("on_busy", ["queue", "reject", "steer"])
def test_a_message_while_calls_wait_is_refused(on_busy: str) -> None:
    # AE-05
    session = suspended("b", "a")
    before = session.state
    turn_id = session.start("hello?", on_busy=on_busy, answer=True)
    (failed,) = session.events(turn_id)
    assert (failed.error_type, failed.pending, failed.result) == ("tool_results_required", ["b", "a"], None)
    (answer,) = session.answers[turn_id]
    assert answer.error is not None
    assert (answer.turn_id, answer.error.pending) == ("turn-1", ["b", "a"])
    assert session.state == before
    assert len(session.model_tasks) == 1


def test_a_person_who_must_approve_is_named_in_the_refusal() -> None:
    agent = AgentSpec(name="agent", model="scripted:x")
    session = Session(agent, [ToolSpec(name="a", approval=Approval(mode="always"))])
    session.start()
    session.answer("", [call("a", "a")])
    (failed,) = session.events(session.start("hello?"))
    assert (failed.error_type, failed.pending) == ("approval_required", ["a"])


def test_interrupting_stops_the_turn_that_rests() -> None:
    session = suspended("a")
    session.start("instead", on_busy="interrupt")
    assert session.events("turn-1")[-1].aborted is True
    assert session.event_types() == ["turn.started", "step.started"]


def test_a_message_with_the_results_is_steering_behind_them() -> None:
    # AE-11
    session = suspended("a", "b")
    session.resume({"a": 1}, message="and hurry", request_id="r1")
    session.resume({"a": 1}, message="and hurry", request_id="r1")
    session.resume({"b": 2})
    assert texts(session.transcript)[-3:] == [("tool", ["a"]), ("tool", ["b"]), ("user", "and hurry")]
    (applied,) = session.events(None, "steering.applied")
    assert (applied.steering_id, applied.step) == ("r1", 2)


def test_a_message_that_would_break_the_conversation_is_refused_with_its_results() -> None:
    session = suspended("a")
    orphan = Message(role="assistant", content=[TextPart("x"), ToolCallPart(ToolCall(id="x", name="a"))])
    results = [ToolResult(tool_call_id="a", tool_name="a", result=1)]
    answer = session.resume(tool_results=results, message=orphan)
    assert answer.error is not None
    assert answer.error.kind == "bad_request"
    assert session.results() == []


# ---- mixed steps


def test_worker_tools_run_at_once_and_the_turn_rests_only_for_the_host() -> None:
    # AE-12
    session = suspended("work", "a", "work")
    assert [task.call for task in session.tool_tasks] == ["1.0", "1.2"]
    assert "turn.suspended" not in session.event_types()
    session.finish_call(2, "w2")
    session.finish_call(0, "w0")
    assert session.events()[-1].pending == ["a"]
    session.resume({"a": 1})
    assert session.result_texts() == ["w0", 1, "w2"]


def test_the_host_may_answer_while_other_tools_run() -> None:
    # AE-12
    session = suspended("work", "a", "b")
    assert session.resume({"a": 1}).pending == ["b"]
    assert "turn.resumed" not in session.event_types()
    assert session.resume({"b": 2}).pending == []
    session.finish_call(0, "w")
    assert "turn.suspended" not in session.event_types()
    assert session.result_texts() == ["w", 1, 2]


def test_calls_one_after_the_other_rest_one_after_the_other() -> None:
    agent = AgentSpec(name="agent", model="scripted:x", tool_execution="sequential")
    session = suspended("a", "work", "b", agent=agent)
    assert session.events()[-1].pending == ["a"]
    answer = session.resume({"b": 2})
    assert answer.error is not None
    assert answer.error.kind == "unknown_tool_result"
    session.resume({"a": 1})
    session.finish_call(1, "w")
    assert session.events()[-1].pending == ["b"]
    session.resume({"b": 2})
    assert session.result_texts() == [1, "w", 2]


# ---- one exchange for each command


def test_an_exchange_hands_all_calls_to_the_host_whoever_runs_their_tools() -> None:
    # AE-03, AE-04
    session = Session(EXCHANGE, HOST)
    session.start("question")
    calls = [call("a", "1"), call("work", "2"), call("unknown", "3"), call("b", "4", error="no JSON")]
    session.answer("", calls)
    assert session.events()[-1].pending == ["1", "2", "3", "4"]
    assert session.tool_tasks == []
    session.resume({"1": 1, "2": 2, "3": 3, "4": 4})
    assert len(session.model_tasks) == 2
    session.answer("answer")
    assert session.events()[-1].result.status == "finished"
    assert len(session.model_tasks) == 2


def test_exchanges_are_the_hosts_to_count() -> None:
    agent = AgentSpec(name="agent", model="scripted:x", mode="single_exchange", max_steps=1, tools=["a"])
    session = Session(agent, HOST)
    session.start()
    for step in range(1, 6):
        session.answer("", [call("a", f"a{step}", n=1)])
        assert session.events()[-1].pending == [f"a{step}"]
        session.resume({f"a{step}": "Error: the same"})
    session.answer("done")
    assert session.events()[-1].result.steps == 6


def test_a_first_exchange_that_fails_ends_its_turn_and_the_session_stays_usable() -> None:
    # AE-09
    session = Session(EXCHANGE, HOST)
    session.start()
    session.fail_model()
    assert session.events()[-1].error_type == "provider_error"
    session.start("again")
    session.answer("fine")
    assert session.event_types()[-1] == "turn.finished"


def test_an_exchange_that_fails_behind_results_rests_and_is_repeated() -> None:
    # AE-09, AE-03
    session = suspended("a", "b", agent=EXCHANGE)
    session.resume({"a": 1, "b": 2})
    session.fail_model("overloaded")
    event = session.events()[-1]
    assert (event.type, event.pending, event.error.kind) == ("turn.suspended", ["a", "b"], "overloaded")
    assert event.result.error.kind == "overloaded"
    assert len(session.model_tasks) == 2
    refused = session.events(session.start("hello?"))[-1]
    assert (refused.error_type, refused.pending) == ("tool_results_required", ["a", "b"])
    answer = session.resume({"a": 1, "b": 2}, turn_id="turn-1")
    assert answer.error is None
    assert len(session.model_tasks) == 3
    assert session.model_task.attempt == 2
    assert session.result_texts() == [1, 2]
    session.answer("done")
    assert session.events("turn-1")[-1].type == "turn.finished"


def test_a_failed_exchange_is_repeated_without_results_and_with_what_was_said_meanwhile() -> None:
    session = suspended("a", agent=EXCHANGE)
    session.resume({"a": 1})
    session.fail_model()
    session.steer("by the way")
    answer = session.resume({"x": 1})
    assert answer.error is not None
    assert answer.error.kind == "unknown_tool_result"
    session.resume(message="go on")
    assert texts(session.transcript)[-2:] == [("user", "by the way"), ("user", "go on")]
    assert session.model_task.messages == len(session.transcript)
    assert "steering.dropped" not in session.event_types()
    session.answer("done")
    assert session.event_types()[-1] == "turn.finished"


def test_an_exchange_is_not_repeated_by_itself() -> None:
    # AE-03
    agent = AgentSpec(name="agent", model="scripted:x", mode="single_exchange", retry=RetryPolicy(max_attempts=5))
    session = Session(agent)
    session.start()
    session.fail_model(retryable=True)
    assert len(session.model_tasks) == 1
    assert session.state.turn is None


def test_a_host_cannot_answer_before_the_hooks_have() -> None:
    hook = HookSpec(name="look")
    agent = AgentSpec(name="agent", model="scripted:x", mode="single_exchange", hooks={"before_tool_call": hook})
    session = suspended("a", "b", agent=agent)
    answer = session.resume({"a": 1})
    assert answer.error is not None
    assert answer.error.kind == "no_pending_tools"
    session.answer_hook({"block": True, "reason": "no"})
    session.answer_hook()
    assert session.events()[-1].pending == ["b"]
    session.resume({"b": 2})
    assert session.result_texts() == ["Error: not executed (no)", 2]


def test_an_exchange_whose_calls_are_all_blocked_goes_round_as_often_as_other_turns() -> None:
    hook = HookSpec(name="look")
    agent = AgentSpec(
        name="agent", model="scripted:x", mode="single_exchange", hooks={"before_tool_call": hook}, max_steps=2
    )
    session = Session(agent, HOST)
    session.start()
    for step in range(1, 3):
        session.answer("", [call("a", f"a{step}")])
        session.answer_hook({"block": True})
    assert session.events()[-1].error_type == "max_steps_reached"


def test_signals_are_taken_from_the_final_text_alone() -> None:
    # AE-08
    agent = AgentSpec(name="agent", model="scripted:x", mode="single_exchange", signals=HookSpec(name="signals"))
    session = suspended("a", agent=agent)
    assert session.tool_tasks == []
    session.resume({"a": 1})
    session.answer("final")
    assert session.hook_task.arguments == {"step_number": 2, "text": "final"}
    session.answer_hook({"signals": ["x", {"y": 1}]})
    assert session.events()[-1].result.signals == ["x", {"y": 1}]


def test_without_an_extractor_there_are_no_signals() -> None:
    # AE-01, AE-08
    session = Session(EXCHANGE)
    session.start()
    session.answer("text")
    assert session.events()[-1].result.signals == []
    assert session.plans[PLAN].agent.signals is None


def test_an_answer_of_the_wrong_form_is_not_repaired_in_a_single_exchange() -> None:
    # AE-03, LC-16: one command, one provider call
    agent = AgentSpec(
        name="agent", model="scripted:x", mode="single_exchange", max_steps=1, output=OutputSpec(schema={})
    )
    session = suspended("a", agent=agent)
    session.resume({"a": 1})
    calls = len(session.model_tasks)
    session.answer("no JSON", output_error="no JSON")
    assert session.events()[-1].error_type == "output_invalid"
    assert len(session.model_tasks) == calls


def test_a_history_too_long_is_an_exchanges_error() -> None:
    # AE-03, AE-09
    session = suspended("a", agent=EXCHANGE)
    session.resume({"a": 1})
    session.fail_model("context_overflow", retryable=False)
    assert session.events()[-1].type == "turn.suspended"
    assert session.events()[-1].error.kind == "context_overflow"
    assert not any(task.compact for task in session.model_tasks)
