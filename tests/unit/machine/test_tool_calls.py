"""The calls of a step: each gets exactly one result, in call order, before the next model call."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import AGENT, Session, call, texts
from turnmill.protocol.content import ErrorInfo, ToolCall, ToolResult
from turnmill.protocol.messages import ToolReply, ToolTask
from turnmill.protocol.specs import AgentSpec, RetryPolicy, ToolSpec
from turnmill.runtime.effects import DispatchTool
from turnmill.runtime.machine import Limits
from turnmill.runtime.steps import GRACE_SECONDS

A, B, C = (ToolSpec(name=name, timeout_seconds=30, start_timeout_seconds=10) for name in "abc")
SEQUENTIAL = AgentSpec(name="agent", model="scripted:x", tool_execution="sequential")
EXECUTION_TYPES = ("tool_execution.started", "tool_execution.finished", "tool_result")


def calls_of(*names: str) -> list[ToolCall]:
    return [call(name, f"id_{name}") for name in names]


def at_calls(*names: str, agent: AgentSpec = AGENT, tools: list[ToolSpec] | None = None, **limits: int) -> Session:
    """A session whose turn has just been answered with these calls."""
    session = Session(agent, [A, B, C] if tools is None else tools, Limits(**limits))
    session.start()
    session.answer("", calls_of(*names))
    return session


def running(session: Session) -> list[str]:
    return [task.call for task in session.tool_tasks]


# --- one call


def test_a_call_is_handed_to_its_tools_queue_with_all_it_needs() -> None:
    slow = ToolSpec(name="slow", queue="gpu", timeout_seconds=30, start_timeout_seconds=10)
    session = Session(AGENT, [slow])
    turn_id = session.start(metadata={"user": 7}, trace={"traceparent": "00-1"})
    session.answer("", [call("slow", "id_1", x=1)])
    dispatch = next(effect for effect in session.last.effects if isinstance(effect, DispatchTool))
    assert dispatch.queue == "gpu"
    assert dispatch.task == ToolTask(
        session_id="session",
        turn_id=turn_id,
        call="1.0",
        attempt=1,
        tool="slow",
        tool_call_id="id_1",
        arguments={"x": 1},
        agent_id="agent",
        step_number=1,
        idempotency_key=f"{turn_id}/1.0",
        timeout_seconds=30,
        start_by_ms=session.now_ms + 10_000,
        deadline_ms=session.now_ms + 10_000 + 30_000 + int(GRACE_SECONDS * 1000),
        metadata={"user": 7},
        trace={"traceparent": "00-1"},
    )


def test_the_agents_timeout_goes_before_the_tools() -> None:
    session = at_calls("a", agent=AgentSpec(name="agent", model="scripted:x", tool_timeout_seconds=2.5))
    assert session.tool_task(0).timeout_seconds == 2.5


def test_the_result_stands_before_the_next_model_call() -> None:  # LC-01
    session = at_calls("a")
    session.finish_call(0, 5)
    assert texts(session.transcript) == [("user", "hello"), ("assistant", ["id_a"]), ("tool", ["id_a"])]
    assert session.result_texts() == [5]
    assert (session.model_task.step_number, session.model_task.messages) == (2, 3)
    session.answer("five")
    assert session.events()[-1].result.steps == 2


def test_the_order_of_events_in_a_step_with_a_call() -> None:  # TH-05
    session = at_calls("a")
    session.progress(0, 1)
    session.finish_call(0)
    session.answer("done")
    assert session.event_types() == [
        "turn.started",
        "step.started",
        "tool_call.ready",
        "tool_execution.started",
        "tool_execution.progress",
        "tool_execution.finished",
        "tool_result",
        "step.finished",
        "step.started",
        "step.finished",
        "turn.finished",
    ]
    step = session.events(None, "step.finished")[0].step
    assert (step.first_message, step.end_message) == (1, 3)


# --- several calls


def test_parallel_calls_are_handed_out_together() -> None:  # LC-06
    session = at_calls("a", "b", "c")
    assert running(session) == ["1.0", "1.1", "1.2"]


def test_events_tell_completion_order_and_results_call_order() -> None:  # LC-06 AC-41 TH-05
    session = at_calls("a", "b", "c")
    session.finish_call(2, "third")
    session.progress(0, 1)
    session.finish_call(1, "second")
    assert len(session.model_tasks) == 1
    session.finish_call(0, "first")
    finished = [event.name for event in session.events(None, "tool_execution.finished")]
    assert finished == ["c", "b", "a"]
    assert [event.tool_call_id for event in session.events(None, "tool_result")] == ["id_a", "id_b", "id_c"]
    assert session.result_texts() == ["first", "second", "third"]
    types = session.event_types()
    assert types.index("tool_result") > max(n for n, name in enumerate(types) if name == "tool_execution.finished")
    assert len(session.model_tasks) == 2


def test_sequential_calls_run_one_after_the_other() -> None:  # LC-06
    session = at_calls("a", "b", "c", agent=SEQUENTIAL)
    assert running(session) == ["1.0"]
    session.finish_call(0, "first")
    assert running(session) == ["1.0", "1.1"]
    session.finish_call(1, "second")
    session.finish_call(2, "third")
    assert session.result_texts() == ["first", "second", "third"]
    started = [(event.type, event.index) for event in session.events(None, *EXECUTION_TYPES[:2])]
    assert started == [
        (kind, index) for index in range(3) for kind in ("tool_execution.started", "tool_execution.finished")
    ]


def test_sequential_calls_go_on_behind_one_that_fails_or_may_not_run() -> None:  # LC-06 LC-07
    session = Session(SEQUENTIAL, [A, B])
    session.start()
    session.answer("", [call("x", "id_x"), call("a", "id_a"), call("b", "id_b")])
    assert running(session) == ["1.1"]
    session.fire_timer()  # a's deadline
    assert running(session) == ["1.1", "1.2"]
    session.finish_call(2, "fine")
    assert session.result_texts() == [
        "Error: unknown tool 'x'. Available: a, b",
        "Error: execution failed (timeout after 30 s)",
        "fine",
    ]


def test_the_same_tool_may_be_called_twice_in_a_step() -> None:
    session = Session(AGENT, [A])
    session.start()
    session.answer("", [call("a", "one", x=1), call("a", "two", x=2)])
    session.finish_call(1, "second")
    session.finish_call(0, "first")
    assert [(result.tool_call_id, result.result) for result in session.results()] == [
        ("one", "first"),
        ("two", "second"),
    ]


def test_a_result_stands_under_its_calls_own_id_whatever_the_worker_wrote() -> None:
    session = at_calls("a")
    session.finish_call(0, result=ToolResult(tool_call_id="forged", tool_name="b", result=1, is_error=True))
    assert session.results() == [ToolResult(tool_call_id="id_a", tool_name="a", result=1, is_error=True)]


# --- calls that must not run


def test_an_unknown_tool_is_told_to_the_model_and_its_siblings_run() -> None:  # LC-05 AC-51
    session = at_calls("a", "x", "b", tools=[A, B])
    assert running(session) == ["1.0", "1.2"]
    assert [event.index for event in session.events(None, "tool_execution.started")] == [0, 2]
    session.finish_call(0, 1)
    session.finish_call(2, 3)
    assert session.result_texts() == [1, "Error: unknown tool 'x'. Available: a, b", 3]
    assert session.results()[1].is_error


def test_an_agent_without_tools_says_so() -> None:  # LC-05
    session = at_calls("x", tools=[])
    assert session.result_texts() == ["Error: unknown tool 'x'. Available: none"]


def test_invalid_arguments_never_reach_the_tool() -> None:  # LC-05
    session = Session(AGENT, [A, B])
    session.start()
    session.answer("", [call("a", "one", error='"city" is a required property'), call("b", "two", x=1)])
    assert running(session) == ["1.1"]
    session.finish_call(1, "ok")
    assert session.result_texts() == [
        "Error: invalid arguments for 'a': \"city\" is a required property",
        "ok",
    ]


def test_a_step_whose_calls_may_all_not_run_goes_on_at_once() -> None:
    session = at_calls("x", "y", tools=[A])
    assert session.tool_tasks == []
    assert session.model_task.step_number == 2
    assert [event.type for event in session.events(None, *EXECUTION_TYPES)] == ["tool_result", "tool_result"]
    assert session.events(None, "tool_call.ready")[1].tool_call.name == "y"


def test_calls_beyond_the_limit_of_a_step_are_answered_and_not_run() -> None:
    session = at_calls("a", "b", "c", agent=AgentSpec(name="agent", model="scripted:x", max_calls_per_step=2))
    assert running(session) == ["1.0", "1.1"]
    session.finish_call(0)
    session.finish_call(1)
    assert session.result_texts()[2] == "Error: not executed (more than 2 calls in one step)"


# --- attempts


def retrying(**policy: Any) -> Session:
    tool = ToolSpec(name="a", max_attempts=3)
    agent = AgentSpec(name="agent", model="scripted:x", retry=RetryPolicy(initial_delay_seconds=1, backoff=2, **policy))
    return at_calls("a", "b", agent=agent, tools=[tool, B])


def test_a_tool_that_asks_for_it_is_tried_again_after_a_wait() -> None:
    session = retrying()
    session.retry_call(0)
    assert session.timer_ms == session.now_ms + 1000
    assert [event.type for event in session.events(None, "tool_execution.finished")] == []
    session.fire_timer()
    task = session.tool_task(0)
    assert (task.attempt, task.idempotency_key) == (2, f"{task.turn_id}/1.0")
    assert session.events()[-1].attempt == 2
    session.finish_call(0, "at last")
    session.finish_call(1, "other")
    assert session.result_texts() == ["at last", "other"]


def test_the_last_attempts_error_is_the_result() -> None:
    session = retrying()
    waits = []
    for _ in range(2):
        session.retry_call(0)
        assert session.state.timer_ms is not None
        waits.append(session.state.timer_ms - session.now_ms)
        session.fire_timer()
    session.retry_call(0, message="still broken")
    session.finish_call(1)
    assert waits == [1000, 2000]
    assert session.result_texts()[0] == "Error: execution failed (still broken)"


def test_a_tools_own_time_is_waited_for() -> None:
    session = retrying()
    session.retry_call(0, retry_after_seconds=7.0)
    assert session.state.turn is not None
    assert session.state.turn.calls[0].due_ms == session.now_ms + 7000


def test_a_tool_without_retries_fails_at_once() -> None:
    session = at_calls("a")
    session.retry_call(0, message="kaboom")
    assert session.result_texts() == ["Error: execution failed (kaboom)"]


def test_an_error_without_a_result_becomes_one() -> None:
    session = at_calls("a", "b")
    session.finish_call(0, result=None)
    session.finish_call(1, result=None, error=ErrorInfo(kind="unknown_tool", message="no such tool"))
    assert session.result_texts() == [
        "Error: execution failed (the worker sent no result)",
        "Error: execution failed (no such tool)",
    ]


# --- time


def test_a_call_without_reply_ends_at_its_deadline_and_its_siblings_go_on() -> None:  # LC-07 AC-24
    session = at_calls("a", "b")
    session.finish_call(1, "in time")
    assert session.events()[-1].type == "tool_execution.finished"
    assert session.timer_ms == session.tool_task(0).deadline_ms
    session.fire_timer()
    assert session.result_texts() == ["Error: execution failed (timeout after 30 s)", "in time"]
    assert session.model_task.step_number == 2


def test_the_late_result_is_counted_and_never_in_the_history() -> None:  # LC-07 AC-15
    session = at_calls("a", "c", tools=[A, ToolSpec(name="c", timeout_seconds=500)])
    late = session.tool_reply(0, "late")
    session.fire_timer()
    session.send(late)
    assert session.last.discarded == "late_tool_reply"
    session.finish_call(1, "c")
    session.send(late)
    assert session.last.discarded == "stale_tool_reply"
    session.answer("done")
    session.send(late)
    assert session.last.discarded == "stale_tool_reply"
    assert session.result_texts() == ["Error: execution failed (timeout after 30 s)", "c"]


# --- repetitions and strangers


def test_the_first_result_counts_also_if_it_comes_changed() -> None:  # AC-16
    session = at_calls("a", "b")
    session.finish_call(0, "first")
    for value in ("first", "changed"):
        state = session.state
        session.finish_call(0, value)
        assert session.last.discarded == "late_tool_reply"
        assert session.state is state
    session.finish_call(1, "b")
    assert session.result_texts() == ["first", "b"]


def test_a_result_of_an_earlier_attempt_is_stale() -> None:  # AC-15
    session = retrying()
    earlier = session.tool_reply(0, "from attempt 1")
    session.retry_call(0)
    session.send(earlier)  # while the next attempt waits
    assert session.last.discarded == "stale_tool_reply"
    session.fire_timer()
    session.send(earlier)
    assert session.last.discarded == "stale_tool_reply"
    session.finish_call(0, "from attempt 2")
    session.finish_call(1)
    assert session.result_texts()[0] == "from attempt 2"


@pytest.mark.parametrize(
    "name", ["", "1", "1.", ".0", "1.9", "2.0", "0.0", "1.-1", "1.0.0", "1.x", "1.²", "01.0", "1." + "9" * 5000]
)
def test_a_result_for_what_is_no_call_of_the_step_is_stale(name: str) -> None:  # AC-15
    session = at_calls("a")
    session.finish_call(0, call=name)
    assert session.last.discarded == "stale_tool_reply"


def test_a_result_while_the_model_speaks_is_stale() -> None:
    session = Session(AGENT, [A])
    turn_id = session.start()
    session.send(ToolReply(session_id="session", turn_id=turn_id, call="1.0", attempt=1))
    assert session.last.discarded == "stale_tool_reply"


# --- progress


def test_progress_is_published_once_and_in_order() -> None:
    session = at_calls("a")
    session.progress(0, 1, "one", data={"percent": 10})
    session.progress(0, 1, "one")
    assert session.last.discarded == "stale_progress"
    session.progress(0, 3, "three")
    session.progress(0, 2, "two")
    assert session.last.discarded == "stale_progress"
    events = session.events(None, "tool_execution.progress")
    assert [(event.message, event.data, event.tool_call_id) for event in events] == [
        ("one", {"percent": 10}, "id_a"),
        ("three", {}, "id_a"),
    ]


def test_progress_counts_anew_in_each_attempt_and_ends_with_the_call() -> None:
    session = retrying()
    session.progress(0, 5)
    session.retry_call(0)
    session.progress(0, 6)
    assert session.last.discarded == "stale_progress"
    session.fire_timer()
    session.progress(0, 1)
    assert session.last.discarded is None
    session.finish_call(0)
    session.progress(0, 2)
    assert session.last.discarded == "stale_progress"


# --- losses


@pytest.mark.parametrize(
    "spec",
    [ToolSpec(name="a", idempotent=True), ToolSpec(name="a", on_lost="retry")],
    ids=["idempotent", "on_lost"],
)
def test_a_lost_call_that_may_run_again_is_handed_out_again(spec: ToolSpec) -> None:
    session = at_calls("a", tools=[spec])
    task = session.tool_task(0)
    session.lose(task)
    assert session.tool_task(0).attempt == 2
    assert session.tool_task(0).idempotency_key == task.idempotency_key
    session.lose(task)
    assert session.last.discarded == "stale_loss"
    session.finish_call(0, "once")
    assert session.result_texts() == ["once"]


@pytest.mark.parametrize(
    "spec",
    [ToolSpec(name="a"), ToolSpec(name="a", idempotent=True, on_lost="fail")],
    ids=["default", "on_lost"],
)
def test_a_lost_call_that_may_not_run_again_has_an_unknown_outcome(spec: ToolSpec) -> None:  # AC-03
    session = at_calls("a", "b", tools=[spec, B])
    session.lose(session.tool_task(0))
    assert len(session.tool_tasks) == 2
    session.finish_call(1)
    assert session.results()[0].is_error
    assert "whether it took effect is unknown" in session.result_texts()[0]


def test_a_call_that_kills_its_workers_is_given_up() -> None:
    session = at_calls("a", tools=[ToolSpec(name="a", idempotent=True)], losses_max=3)
    for _ in range(3):
        session.lose(session.tool_task(0))
    assert len(session.tool_tasks) == 3
    assert "unknown" in session.result_texts()[0]


def test_losses_do_not_use_up_the_tools_own_attempts() -> None:
    session = at_calls("a", tools=[ToolSpec(name="a", idempotent=True, max_attempts=2)])
    session.lose(session.tool_task(0))
    session.retry_call(0)
    session.fire_timer()
    assert session.tool_task(0).attempt == 3


# --- nobody takes the call


def test_waiting_for_a_worker_is_announced_once() -> None:  # AC-25
    session = at_calls("a")
    session.wait_for_worker(0)
    event = session.events()[-1]
    assert (event.type, event.name, event.queue) == ("tool_execution.waiting", "a", "default")
    session.wait_for_worker(0)
    assert session.last.discarded == "stale_finding"
    session.finish_call(0, "picked up")
    assert session.result_texts() == ["picked up"]
    session.wait_for_worker(0)
    assert session.last.discarded == "stale_finding"


def test_a_call_that_nobody_takes_ends_at_its_start_timeout() -> None:  # AC-25
    session = at_calls("a", "b")
    session.wait_for_worker(0)
    session.wait_for_worker(0, expired=True)
    session.finish_call(1)
    assert session.result_texts()[0] == (
        "Error: execution failed (no worker took the call within 10 s; it did not take effect)"
    )
    assert session.model_task.step_number == 2
