"""An agent as a tool of another one, and a turn that goes on with another agent."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import PLAN, SESSION, Session, call, plan_of, texts
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.keys import child_turn_id
from turnmill.protocol.messages import AbortTurn, HandOff, Parent, StartTurn, SubTurnEnded
from turnmill.protocol.specs import AgentSpec, ToolSpec
from turnmill.runtime.effects import Send

AGENT = AgentSpec(name="agent", model="scripted:x", tools=["expert", "add", "transfer", "other"])
OTHER = AgentSpec(name="other", model="scripted:other", tools=["back"])
TOOLS = [
    ToolSpec(name="expert", kind="agent", agent="expert@v1", timeout_seconds=100),
    ToolSpec(name="add"),
    ToolSpec(name="transfer", kind="handoff", agent="other@v1"),
    ToolSpec(name="other", kind="handoff", agent="third"),
]
OTHERS = {"other": plan_of(OTHER, [ToolSpec(name="back", kind="handoff", agent="agent")])}


def at_calls(*names: str, agent: AgentSpec = AGENT, **fields: Any) -> Session:
    session = Session(agent, TOOLS, others=OTHERS)
    session.start("question", **fields)
    session.answer("", [call(name, f"c{index}", message="sub-question") for index, name in enumerate(names)])
    return session


# ---- sub-turns


def test_a_call_of_an_agent_starts_a_turn_on_a_session_below() -> None:
    parent = Parent(session_id="top", turn_id="top-turn", call="1.0", attempt=1, depth=1)
    fields = {"metadata": {"user": 7}, "tenant": "acme", "priority": 3, "parent": parent}
    session = at_calls("expert", **fields)
    (child,) = session.children
    name = child_turn_id(session.turn_id, "1.0")
    assert child.turn_id == name
    assert child.session_id == f"session/{name.partition('-')[2]}"
    assert child.agent == "expert@v1"
    assert texts(child.messages) == [("user", "sub-question")]
    assert (child.metadata, child.tenant, child.priority) == ({"user": 7}, "acme", 3)
    own = Parent(session_id=SESSION, turn_id=session.turn_id, call="1.0", attempt=1, depth=2, max_depth=4)
    assert child.parent == own
    assert child.deadline_ms == session.now_ms + 100_000
    started = session.events(None, "sub_turn.started")[0]
    assert (started.turn_id, started.session_id, started.agent_id) == (child.turn_id, child.session_id, "expert")
    assert f"session:{child.session_id}" in session.kept
    again = at_calls("expert", **fields)
    assert again.children == session.children


def test_arguments_without_a_message_are_told_as_they_are() -> None:
    session = Session(AGENT, TOOLS)
    session.start()
    session.answer("", [call("expert", x=1)])
    assert texts(session.children[0].messages) == [("user", '{"x":1}')]


def test_the_answer_of_a_sub_turn_is_the_calls_result() -> None:
    session = at_calls("expert", "add")
    session.end_child(session.children[0], text="42")
    session.finish_call(1, 3)
    assert session.result_texts() == ["42", 3]
    assert session.events(None, "sub_turn.finished")[0].status == "finished"
    assert session.model_task.step_number == 2


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_a_sub_turn_that_gave_no_answer_is_an_error_for_the_model(status: str) -> None:
    session = at_calls("expert")
    session.end_child(session.children[0], status, error=ErrorInfo(kind="x", message="no such agent"))
    assert session.result_texts() == [f"Error: execution failed (the agent's turn {status}: no such agent)"]
    assert session.results()[0].is_error is True


def test_only_the_calls_own_sub_turn_answers_it_and_once() -> None:
    session = at_calls("expert", "add")
    (child,) = session.children
    session.end_child(child.__class__(**{**_fields(child), "turn_id": "somebody"}))
    session.end_child(child, text="42")
    session.end_child(child, text="43")
    session.finish_call(1)
    session.end_child(child, text="44")
    assert session.result_texts()[0] == "42"
    assert session.counters == {"stale_sub_turn": 3}


def test_a_sub_turn_that_takes_too_long_is_stopped() -> None:
    session = at_calls("expert")
    (child,) = session.children
    session.fire_timer()
    assert session.result_texts() == ["Error: execution failed (timeout after 100 s)"]
    stop = session.sent[-1]
    assert isinstance(stop, AbortTurn)
    assert (stop.session_id, stop.turn_id) == (child.session_id, child.turn_id)


def test_the_deadline_is_passed_on() -> None:
    agent = AgentSpec(name="agent", model="scripted:x", turn_timeout_seconds=10)
    session = at_calls("expert", agent=agent)
    assert session.children[0].deadline_ms == 1_010_000
    session.fire_timer()
    assert session.events()[-1].error_type == "deadline_exceeded"
    assert [type(message) for message in session.sent] == [StartTurn, AbortTurn]


@pytest.mark.parametrize(
    ("limits", "text"), [({"max_depth": 0}, "max_depth=0"), ({"max_sub_turns": 1}, "max_sub_turns=1")]
)
def test_depth_and_number_of_sub_turns_are_limited(limits: dict[str, int], text: str) -> None:
    agent = AgentSpec(name="agent", model="scripted:x", **limits)  # type: ignore[arg-type]
    session = at_calls("expert", "expert", agent=agent)
    for child in session.children:
        session.end_child(child, text="42")
    assert session.result_texts()[-1] == f"Error: not executed (sub_turn_limit: {text})"
    assert len(session.children) == (0 if "max_depth" in limits else 1)


def test_the_number_is_counted_over_the_whole_turn() -> None:
    session = at_calls("expert", agent=AgentSpec(name="agent", model="scripted:x", max_sub_turns=1))
    session.end_child(session.children[0], text="42")
    session.answer("", [call("expert", x=2)])
    assert len(session.children) == 1
    assert session.model_task.step_number == 3


def test_a_turn_below_is_one_level_deeper() -> None:
    parent = Parent(session_id="top", turn_id="top", call="1.0", attempt=1, depth=4)
    session = at_calls("expert", parent=parent)
    assert session.children == []
    assert "max_depth=4" in session.result_texts()[0]


@pytest.mark.parametrize(("own", "told", "children"), [(4, 1, 0), (1, 4, 1), (0, 2, 1)])
def test_the_uppermost_turn_says_how_deep_those_below_may_go(own: int, told: int, children: int) -> None:
    parent = Parent(session_id="top", turn_id="top", call="1.0", attempt=1, depth=1, max_depth=told)
    session = at_calls("expert", parent=parent, agent=AgentSpec(name="agent", model="scripted:x", max_depth=own))
    assert len(session.children) == children
    if children:
        assert session.children[0].parent is not None
        assert (session.children[0].parent.depth, session.children[0].parent.max_depth) == (2, told)
    else:
        assert f"max_depth={told}" in session.result_texts()[0]


# ---- a sub-turn's own end


PARENT = Parent(session_id="top", turn_id="top-turn", call="3.1", attempt=2, depth=1, token="secret")


def ended(session: Session) -> SubTurnEnded:
    (message,) = [message for message in session.sent if isinstance(message, SubTurnEnded)]
    assert (message.session_id, message.turn_id, message.call) == ("top", "top-turn", "3.1")
    assert (message.attempt, message.token) == (2, "secret")
    return message


def test_a_sub_turn_tells_its_parent_what_it_answered() -> None:
    session = Session()
    session.start(parent=PARENT, turn_id="child")
    session.answer("42")
    assert (ended(session).status, ended(session).text, ended(session).child_turn_id) == ("finished", "42", "child")
    assert session.events()[-1].result.parent_turn_id == "top-turn"


@pytest.mark.parametrize("how", ["failed", "aborted", "refused", "queued"])
def test_a_sub_turn_tells_its_parent_that_it_has_no_answer(how: str) -> None:
    session = Session()
    if how == "queued":
        session.start()
    problem = ErrorInfo(kind="unknown_agent", message="?") if how == "refused" else None
    session.start(parent=PARENT, turn_id="child", problem=problem)
    if how == "failed":
        session.fail_model(retryable=False)
    if how in ("aborted", "queued"):
        session.abort(turn_id="child")
    if how == "aborted":
        session.fire_timer()
    message = ended(session)
    assert message.status == ("failed" if how in ("failed", "refused") else "aborted")
    assert message.error is not None


# ---- handoffs


def test_the_turn_goes_on_with_another_agent() -> None:
    session = at_calls("transfer")
    assert session.sent == [HandOff(session_id=SESSION, turn_id=session.turn_id, call="1.0", agent="other@v1")]
    session.hand_over("other")
    assert session.result_texts() == ["The conversation goes on with other."]
    changed = session.events(None, "agent.changed")[0]
    assert (changed.agent_id, changed.from_agent_id) == ("other", "agent")
    task = session.model_task
    assert (task.plan, task.agent_id, task.step_number) == ("other", "other", 2)
    assert session.state.plan_ids == {"other"}
    session.answer("I am the other")
    assert session.events()[-1].result.agent_id == "other"


def test_the_new_agent_comes_with_the_next_step_and_not_before() -> None:
    session = at_calls("transfer", "add")
    session.hand_over("other")
    assert session.state.plan_ids == {PLAN, "other"}
    assert "agent.changed" not in session.event_types()
    session.finish_call(1)
    assert session.model_task.plan == "other"


def test_an_agent_that_is_unknown_is_an_error_for_the_model() -> None:
    session = at_calls("transfer")
    session.hand_over(problem=ErrorInfo(kind="unknown_agent", message="no agent 'other'"))
    assert session.result_texts() == ["Error: execution failed (no agent 'other')"]
    assert session.model_task.plan == PLAN


@pytest.mark.parametrize("sequential", [False, True])
def test_a_turn_goes_to_one_agent_at_a_time(sequential: bool) -> None:
    agent = AgentSpec(name="agent", model="scripted:x", tool_execution="sequential" if sequential else "parallel")
    session = at_calls("transfer", "other", agent=agent)
    session.hand_over("other")
    assert len([message for message in session.sent if isinstance(message, HandOff)]) == 1
    assert session.result_texts()[1] == "Error: not executed (the turn goes to another agent already)"


def test_agents_that_hand_over_to_each_other_reach_the_limit_of_steps() -> None:
    session = at_calls("transfer")
    for step in range(1, 10):
        session.hand_over("other" if step % 2 else PLAN)
        assert session.model_task.plan == ("other" if step % 2 else PLAN)
        session.answer("", [call("back" if step % 2 else "transfer", f"c{step}", n=step)])
    session.hand_over(PLAN)
    failed = session.events()[-1]
    assert (failed.error_type, failed.result.steps) == ("max_steps_reached", 10)


def test_an_agent_whose_plan_is_gone_fails_the_turn() -> None:
    session = at_calls("transfer", "add")
    session.hand_over("other")
    del session.plans["other"]
    session.finish_call(1)
    assert session.events()[-1].error_type == "state_lost"


def test_a_handoff_that_nobody_answers_is_overdue() -> None:
    session = at_calls("transfer")
    session.fire_timer()
    assert session.result_texts() == ["Error: execution failed (no agent within 30 s)"]
    session.hand_over("other")
    assert session.counters == {"stale_transfer": 1}
    assert session.model_task.plan == PLAN


def test_a_handoff_that_was_not_asked_for_is_refused() -> None:
    session = at_calls("transfer", "add")
    for name, turn_id in (("1.1", "turn-1"), ("1.0", "nobody"), ("9.9", "turn-1")):
        session.hand_over("other", command=HandOff(session_id=SESSION, turn_id=turn_id, call=name, agent="other"))
    assert session.counters == {"stale_transfer": 3}


def test_a_turn_that_is_told_to_stop_does_not_go_on_with_another_agent() -> None:
    session = at_calls("transfer")
    session.hand_over("other")
    session.abort()
    session.fire_timer()
    assert session.events()[-1].aborted is True
    assert not [effect for effect in session.last.effects if isinstance(effect, Send)]


def _fields(message: StartTurn) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}
