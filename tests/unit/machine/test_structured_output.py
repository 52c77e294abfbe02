"""An answer of a wanted form: one that is not is told to the model, as often as the agent says, and then fails."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session, call, texts
from turnmill.protocol.specs import AgentSpec, HookSpec, OutputSpec, StopCondition, ToolSpec


def typed(repairs: int = 1, **fields: Any) -> Session:
    output = OutputSpec(schema={"type": "object"}, repairs=repairs)
    session = Session(AgentSpec(name="agent", model="scripted:x", output=output, **fields), [ToolSpec(name="add")])
    session.start("question")
    return session


def test_an_answer_of_the_right_form_is_marked() -> None:
    # LC-16
    session = typed()
    session.answer('{"x": 1}')
    assert session.events()[-1].result.is_json is True


def test_an_answer_of_the_wrong_form_gets_one_more_round() -> None:
    # LC-16
    session = typed()
    session.answer("x is 1", output_error="no JSON object")
    note = session.transcript[-1]
    assert (note.role, note.metadata) == ("user", {"turnmill": "output_repair"})
    assert "no JSON object" in note.text
    assert session.model_task.step_number == 2
    assert session.event_types()[-2:] == ["step.finished", "step.started"]
    session.answer('{"x": 1}')
    result = session.events()[-1].result
    assert (result.is_json, result.steps, result.termination.kind) == (True, 2, "completed")


@pytest.mark.parametrize("repairs", [0, 1, 2])
def test_the_rounds_are_counted(repairs: int) -> None:
    # LC-16
    session = typed(repairs)
    for _ in range(repairs + 1):
        session.answer("no", output_error="no JSON object")
    failed = session.events()[-1]
    assert (failed.error_type, failed.result.steps) == ("output_invalid", repairs + 1)
    assert "no JSON object" in failed.error
    assert failed.result.is_json is False


def test_there_is_no_round_beyond_the_limit_of_steps() -> None:
    session = typed(max_steps=1)
    session.answer("no", output_error="no JSON object")
    assert session.events()[-1].error_type == "output_invalid"


def test_calls_come_before_the_form_is_looked_at() -> None:
    session = typed()
    session.answer("let me see", [call("add")], output_error="no JSON object")
    session.finish_call(0, 3)
    session.answer("{}")
    assert session.events()[-1].result.is_json is True


def test_steering_joins_the_repair() -> None:
    session = typed()
    session.steer("in short")
    session.answer("no", output_error="no JSON object")
    assert [role for role, _ in texts(session.transcript)] == ["user", "assistant", "user", "user"]
    assert session.transcript[-1].text == "in short"


def test_hooks_and_signals_see_the_repaired_answer() -> None:
    hook = HookSpec(name="look")
    session = typed(hooks={"after_step": hook}, signals=hook)
    session.answer("no", output_error="no JSON object")
    session.answer_hook()
    session.answer("{}")
    session.answer_hook()
    assert session.hook_task.arguments["text"] == "{}"


def test_a_turn_that_ended_otherwise_gave_no_json() -> None:
    session = typed(stop_when=[StopCondition(tool="add")])
    session.answer("", [call("add")])
    session.finish_call(0)
    assert session.events()[-1].result.is_json is False


def test_an_agent_without_a_form_takes_any_answer() -> None:
    session = Session()
    session.start()
    session.answer("text", output_error="whatever a worker says")
    assert session.events()[-1].result.is_json is False
