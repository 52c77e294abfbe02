"""How turns end: by an answer, a stop condition, a limit or an error; and the session works on after each."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session, call, texts
from turnmill.protocol.specs import AgentSpec, RetryPolicy, StopCondition, ToolSpec
from turnmill.runtime.effects import SetTimer
from turnmill.workers.providers.scripted import history_fault

ADD, OTHER = ToolSpec(name="add"), ToolSpec(name="other")


def agent(**fields: Any) -> AgentSpec:
    return AgentSpec(name="agent", model="scripted:x", **fields)


def take_step(session: Session, tool: str = "add") -> None:
    """A step with one call."""
    session.answer("thinking ", [call(tool, f"id_{session.model_task.step_number}")])
    session.finish_call(0, "3")


def assert_session_works(session: Session) -> None:
    assert history_fault(session.transcript) is None
    session.start("again")
    session.answer("works")
    assert session.event_types()[-1] == "turn.finished"


# --- max_steps


def test_a_turn_that_never_answers_fails_at_its_limit_with_what_it_had() -> None:  # LC-03 AC-06
    session = Session(agent(max_steps=2), [ADD])
    session.start()
    take_step(session)
    take_step(session)
    failed = session.events()[-1]
    assert (failed.type, failed.error_type) == ("turn.failed", "max_steps_reached")
    assert failed.error == "the turn took 2 steps without an answer (max_steps=2)"
    assert (failed.result.status, failed.result.steps) == ("failed", 2)
    assert (failed.result.first_message, failed.result.end_message) == (0, 5)
    assert failed.result.usage.total_tokens == 30
    assert (failed.termination.kind, failed.termination.has_tool_calls) == ("failed", True)
    assert [role for role, _ in texts(session.transcript)] == ["user", "assistant", "tool", "assistant", "tool"]
    assert session.event_types()[-3:] == ["tool_result", "step.finished", "turn.failed"]
    assert_session_works(session)


def test_an_answer_in_the_last_step_is_in_time() -> None:
    session = Session(agent(max_steps=2), [ADD])
    session.start()
    take_step(session)
    session.answer("done")
    assert session.events()[-1].result.termination.kind == "completed"


def test_a_final_answer_is_asked_for_without_tools() -> None:  # LC-03
    session = Session(agent(max_steps=2, on_limit="final_answer"), [ADD])
    session.start()
    take_step(session)
    assert session.model_task.with_tools
    take_step(session)
    assert (session.model_task.step_number, session.model_task.with_tools) == (3, False)
    session.answer("all I know")
    result = session.events()[-1].result
    assert (result.status, result.steps, result.termination.kind) == ("finished", 3, "completed")
    assert_session_works(session)


def test_a_model_that_calls_tools_in_place_of_its_final_answer_fails() -> None:  # LC-03 AC-06
    session = Session(agent(max_steps=1, on_limit="final_answer"), [ADD])
    session.start()
    take_step(session)
    session.answer("", [call("add", "again")])
    assert len(session.tool_tasks) == 1
    assert session.result_texts()[-1] == "Error: not executed (this step has no tools: answer the user)"
    assert session.events()[-1].error_type == "max_steps_reached"
    assert_session_works(session)


def test_the_final_call_has_no_tools_in_any_attempt() -> None:
    session = Session(agent(max_steps=1, on_limit="final_answer", retry=RetryPolicy(max_attempts=3)), [ADD])
    session.start()
    take_step(session)
    session.fail_model()
    session.fire_timer()
    session.lose(session.model_task)
    assert [task.with_tools for task in session.model_tasks] == [True, False, False, False]


# --- stop conditions


def test_a_step_count_finishes_the_turn() -> None:  # LC-03 TH-11
    session = Session(agent(max_steps=2, stop_when=[StopCondition(steps=2)]), [ADD])
    session.start()
    take_step(session)
    take_step(session)
    finished = session.events()[-1]
    assert finished.type == "turn.finished"
    termination = finished.result.termination
    assert (termination.kind, termination.stop_condition) == ("step_limit", "step_count_is(2)")
    assert termination.reason == "Reached the step limit of 2"
    assert finished.result.steps == 2
    assert_session_works(session)


@pytest.mark.parametrize(("tool", "steps"), [("other", 2), ("add", 1)])
def test_a_named_call_finishes_the_turn_after_its_step(tool: str, steps: int) -> None:  # TH-11
    session = Session(agent(stop_when=[StopCondition(tool=tool)]), [ADD, OTHER])
    session.start()
    take_step(session, "add")
    if steps == 2:
        take_step(session, "other")
    termination = session.events()[-1].result.termination
    assert (termination.kind, termination.stop_condition) == ("stop_condition", f"has_tool_call({tool})")
    assert session.event_types()[-2:] == ["step.finished", "turn.finished"]
    assert_session_works(session)


def test_any_condition_of_a_list_is_enough_and_the_first_is_named() -> None:  # TH-11
    conditions = [StopCondition(steps=5), StopCondition(tool="add"), StopCondition(steps=1)]
    session = Session(agent(stop_when=conditions), [ADD])
    session.start()
    take_step(session)
    assert session.events()[-1].result.termination.stop_condition == "has_tool_call(add)"


def test_a_stop_condition_waits_for_all_results() -> None:
    session = Session(agent(stop_when=[StopCondition(tool="add")]), [ADD, OTHER])
    session.start()
    session.answer("", [call("add"), call("other")])
    session.finish_call(0)
    assert session.state.turn is not None
    session.finish_call(1)
    assert session.event_types()[-1] == "turn.finished"
    assert len(session.results()) == 2


# --- failing in the middle


def test_calls_without_a_result_get_one_when_the_turn_fails() -> None:  # AC-03
    session = Session(agent(), [ADD, OTHER])
    session.start()
    session.answer("", [call("add"), call("other")])
    session.finish_call(1, "other's")
    plans = dict(session.plans)
    session.plans.clear()
    session.finish_call(0)
    assert session.events()[-1].error_type == "state_lost"
    assert [result.tool_call_id for result in session.results()] == ["call_add", "call_other"]
    assert "unknown" in session.result_texts()[0]
    assert session.result_texts()[1] == "other's"
    session.plans.update(plans)
    assert_session_works(session)


def test_the_last_tool_error_is_kept_for_the_termination() -> None:
    session = Session(agent(), [ADD])
    session.start()
    session.answer("", [call("missing", "one")])
    session.answer("", [call("add", "two")])
    session.finish_call(0, 3)
    session.answer("done")
    assert session.events()[-1].result.termination.last_tool_error == "Error: unknown tool 'missing'. Available: add"


# --- the timer


def test_one_timer_is_set_for_the_earliest_deadline_and_moved_only_forward() -> None:
    """A later deadline needs no write: the timer fires, looks, and is set again."""

    def timers(session: Session) -> list[int | None]:
        return [effect.at_ms for effect in session.last.effects if isinstance(effect, SetTimer)]

    slow, fast = ToolSpec(name="add", timeout_seconds=500), ToolSpec(name="other", timeout_seconds=50)
    session = Session(agent(model_timeout_seconds=1000), [slow, fast])
    session.start()
    assert timers(session) == [session.state.timer_ms]
    session.answer("", [call("add"), call("other")])
    assert timers(session) == [session.tool_task(1).deadline_ms]  # earlier than the model's
    session.finish_call(1)
    assert timers(session) == []  # add's deadline is later: left alone
    session.progress(0, 1)
    assert timers(session) == []
    session.fire_timer()
    assert timers(session) == [session.tool_task(0).deadline_ms]
    session.finish_call(0)
    assert timers(session) == []  # the next model call's deadline is later still
    session.answer("done")
    assert timers(session) == [None]
