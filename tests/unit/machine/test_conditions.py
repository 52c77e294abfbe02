"""What ends a turn without an answer: conditions, custom ones among them, and the guards against going round in circles."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session, call, texts
from turnmill.protocol.content import ToolResult
from turnmill.protocol.specs import AgentSpec, HookSpec, OutputSpec, StopCondition, ToolSpec

ENOUGH = HookSpec(name="enough")
CHEAP = HookSpec(name="cheap")
TOOLS = [ToolSpec(name="add"), ToolSpec(name="sub")]


def session_with(**fields: Any) -> Session:
    session = Session(AgentSpec(name="agent", model="scripted:x", **fields), TOOLS)
    session.start()
    return session


def step(session: Session, *names: str, error: str | None = None, x: int = 1) -> None:
    """One step with calls, answered."""
    session.answer("", [call(name, x=x) for name in names])
    for index, name in enumerate(names):
        value = ToolResult(tool_call_id="", tool_name=name, result=error or 1, is_error=error is not None)
        session.finish_call(index, result=value)


# ---- custom conditions


def test_a_custom_condition_ends_the_turn_with_its_name_and_reason() -> None:
    # TH-11
    session = session_with(stop_when=[StopCondition(hook=ENOUGH)])
    step(session, "add")
    assert session.hook_task.arguments == {"step_number": 1, "first_message": 0, "end_message": 3}
    session.answer_hook({"stop": False})
    step(session, "sub")
    session.answer_hook({"stop": True, "reason": "all found"})
    finished = session.events()[-1]
    termination = finished.result.termination
    assert (finished.type, termination.kind) == ("turn.finished", "stop_condition")
    assert (termination.stop_condition, termination.reason) == ("enough", "all found")


def test_a_custom_condition_may_name_itself() -> None:
    session = session_with(stop_when=[StopCondition(hook=ENOUGH)])
    step(session, "add")
    session.answer_hook({"stop": True, "name": "budget"})
    assert session.events()[-1].result.termination.stop_condition == "budget"


def test_any_of_a_list_ends_the_turn_and_the_first_custom_one_wins() -> None:
    # TH-11
    session = session_with(stop_when=[StopCondition(hook=CHEAP), StopCondition(steps=9), StopCondition(hook=ENOUGH)])
    step(session, "add")
    session.answer_hook()
    assert (session.hook_task.tool, session.hook_task.call) == ("enough", "1.stop_when.2")
    session.answer_hook({"stop": True})
    assert session.events()[-1].result.termination.stop_condition == "enough"


def test_plain_conditions_need_no_code_and_come_first() -> None:
    # TH-11
    session = session_with(stop_when=[StopCondition(hook=ENOUGH), StopCondition(tool="sub")])
    step(session, "add", "sub")
    assert [task for task in session.tool_tasks if task.hook] == []
    termination = session.events()[-1].result.termination
    assert (termination.kind, termination.stop_condition) == ("stop_condition", "has_tool_call(sub)")


def test_conditions_look_at_steps_with_calls_alone() -> None:
    # TH-11
    session = session_with(stop_when=[StopCondition(hook=ENOUGH)], output=OutputSpec(schema={}))
    step(session, "add")
    session.answer_hook()
    session.answer("no JSON", output_error="no JSON")
    assert session.model_task.step_number == 3
    session.answer("{}")
    assert [task.call for task in session.tool_tasks if task.hook] == ["1.stop_when.0"]
    assert session.events()[-1].result.termination.kind == "completed"


def test_a_condition_that_fails_fails_the_turn_with_its_name_behind_the_durable_step() -> None:
    # TH-11
    session = session_with(stop_when=[StopCondition(hook=ENOUGH)])
    step(session, "add")
    session.fail_hook()
    failed = session.events()[-1]
    assert "'enough' (stop_when)" in failed.error
    assert failed.result.end_message == len(session.transcript) == 3
    assert session.event_types().count("step.finished") == 1


def test_steering_does_not_hold_up_a_condition() -> None:
    session = session_with(stop_when=[StopCondition(tool="add")])
    session.steer()
    step(session, "add")
    assert session.event_types()[-2:] == ["steering.dropped", "turn.finished"]


# ---- the same call again


def test_the_same_call_in_the_next_step_warns_the_model() -> None:
    session = session_with()
    step(session, "add")
    session.answer("", [call("add", x=1), call("sub", x=1)])
    session.steer("steering")
    session.finish_call(0)
    session.finish_call(1)
    notes = [message for message in session.transcript if message.metadata == {"turnmill": "loop_guard"}]
    assert [(note.role, note.turn_id) for note in notes] == [("user", "turn-1")]
    assert 'add({"x":1})' in notes[0].text
    assert "sub" not in notes[0].text
    assert texts(session.transcript)[-2:] == [("user", notes[0].text), ("user", "steering")]
    assert session.model_task.messages == len(session.transcript)


def test_other_arguments_another_step_between_or_the_option_bring_no_warning() -> None:
    for fields in ({}, {"warn_repeated_calls": False}):
        session = session_with(**fields)
        step(session, "add", x=1)
        step(session, "add", x=1 if fields else 2)
        step(session, "sub", x=1)
        step(session, "add", x=1)
        assert [message for message in session.transcript if message.metadata] == []


# ---- the same error again


def test_the_same_error_too_many_steps_in_a_row_stops_the_turn() -> None:
    session = session_with()
    for x in range(3):
        assert session.state.turn is not None
        step(session, "add", error="Error: no disk", x=x)
    failed = session.events()[-1]
    assert (failed.error_type, failed.termination.kind) == ("repeated_tool_error", "repeated_tool_error")
    assert failed.termination.tool_name == "add"
    assert failed.error == "add failed 3 times in a row: Error: no disk (repeated_errors_max=3)"
    assert failed.result.status == "failed"
    session.start("again")
    session.answer("fine")
    assert session.event_types()[-1] == "turn.finished"


@pytest.mark.parametrize(
    "between", [{"names": ("add",), "error": "Error: other"}, {"names": ("add",), "error": None}, {"names": ("sub",)}]
)
def test_another_error_or_success_between_begins_anew(between: dict[str, Any]) -> None:
    session = session_with()
    for x in range(2):
        step(session, "add", error="Error: no disk", x=x)
    step(session, *between.pop("names"), x=7, **between)
    for x in range(2):
        step(session, "add", error="Error: no disk", x=x)
    assert session.state.turn is not None


def test_the_guard_can_be_turned_off_or_tightened() -> None:
    session = session_with(repeated_errors_max=None)
    for x in range(5):
        step(session, "add", error="Error: no disk", x=x)
    assert session.state.turn is not None
    session = session_with(repeated_errors_max=1)
    step(session, "add", error="Error: no disk")
    assert session.events()[-1].error_type == "repeated_tool_error"
