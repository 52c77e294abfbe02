"""Calls that wait for a person: asked together, decided in any order, run once each or told to the model as not run."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session, call
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, ToolSpec

ALWAYS = Approval(mode="always", timeout_seconds=600)
POLICY = Approval(mode="policy", policy=HookSpec(name="judge"))
AGENT = AgentSpec(name="agent", model="scripted:x")
TOOLS = [
    ToolSpec(name="pay", approval=ALWAYS),
    ToolSpec(name="maybe", approval=POLICY),
    ToolSpec(name="free"),
    ToolSpec(name="host", kind="host"),
    ToolSpec(name="careful_host", kind="host", approval=ALWAYS),
    ToolSpec(name="expert", kind="agent", approval=ALWAYS),
]


def asked(*names: str, agent: AgentSpec = AGENT, tools: list[ToolSpec] = TOOLS) -> Session:
    """A turn that was just answered with calls of ids c0, c1, ..."""
    session = Session(agent, tools)
    session.start("do it", metadata={"user": 7})
    session.answer("", [call(name, f"c{index}") for index, name in enumerate(names)])
    return session


def decided(session: Session) -> list[tuple[str, bool, Any]]:
    return [(event.tool_call_id, event.approved, event.reason) for event in session.events(None, "approval.decided")]


def running(session: Session) -> list[str]:
    return [task.tool_call_id for task in session.tool_tasks if task.hook is None]


# ---- asking


def test_all_calls_that_need_a_person_are_asked_for_at_once() -> None:
    session = asked("pay", "pay")
    requested = session.events(None, "approval.requested")
    assert [event.tool_call.id for event in requested] == ["c0", "c1"]
    assert requested[0].expires_at == (session.now_ms + 600_000) / 1000
    event = session.events()[-1]
    assert (event.type, event.pending, event.approvals) == ("turn.suspended", [], ["c0", "c1"])
    assert event.result.approvals == ["c0", "c1"]
    assert session.tool_tasks == []
    assert session.timer_ms is not None


def test_calls_that_need_nobody_run_meanwhile() -> None:
    session = asked("pay", "free")
    assert running(session) == ["c1"]
    assert "turn.suspended" not in session.event_types()
    session.finish_call(1)
    assert session.events()[-1].approvals == ["c0"]


def test_an_approved_call_runs_also_while_others_do() -> None:
    session = asked("pay", "free")
    assert session.decide(c0=True).pending == []
    assert running(session) == ["c1", "c0"]
    assert "turn.resumed" not in session.event_types()


def test_a_host_and_a_person_are_waited_for_together() -> None:
    session = asked("pay", "host", "careful_host")
    event = session.events()[-1]
    assert (event.pending, event.approvals) == (["c1"], ["c0", "c2"])
    session.decide(c2=True)
    assert session.events()[-1].pending == ["c1", "c2"]
    session.resume({"c1": 1, "c2": 2})
    session.decide(c0=False)
    assert session.result_texts()[1:] == [1, 2]


def test_a_sub_turn_starts_when_it_is_approved() -> None:
    session = asked("expert")
    assert session.children == []
    session.decide(c0=True)
    assert len(session.children) == 1


# ---- deciding


def test_decisions_in_reverse_order_give_one_history_in_call_order() -> None:
    # AC-04
    session = asked("pay", "pay", "pay", "pay")
    assert session.decide(c3=True).pending == ["c0", "c1", "c2"]
    assert session.decide(reason="too much", c2=False).pending == ["c0", "c1"]
    assert session.decide(c1=True).pending == ["c0"]
    session.finish_call(3, "three")
    session.finish_call(1, "one")
    assert len(session.transcript) == 2
    session.pass_time(600)
    session.fire_timer()
    assert running(session) == ["c3", "c1"]
    assert session.result_texts() == [
        "Error: not executed (the approval expired)",
        "one",
        "Error: not executed (a person denied the call: too much)",
        "three",
    ]
    assert decided(session) == [
        ("c3", True, None),
        ("c2", False, "too much"),
        ("c1", True, None),
        ("c0", False, "expired"),
    ]
    assert len(session.transcript) == 6


def test_deciding_on_one_leaves_the_others_as_they_were() -> None:
    # AC-48
    session = asked("pay", "pay", "pay")
    session.decide(c1=True)
    assert session.event_types().count("approval.requested") == 3
    assert running(session) == ["c1"]
    session.finish_call(1, "one")
    event = session.events()[-1]
    assert (event.type, event.approvals) == ("turn.suspended", ["c0", "c2"])
    session.decide(c0=True, c2=True)
    assert running(session) == ["c1", "c0", "c2"]
    assert session.event_types().count("approval.requested") == 3


def test_the_first_decision_on_a_call_stands() -> None:
    session = asked("pay", "pay")
    session.decide(c0=True)
    answer = session.decide(c0=False)
    assert (answer.error and answer.error.kind, answer.pending) == ("already_decided", ["c1"])
    session.decide(c1=False)
    assert decided(session) == [("c0", True, None), ("c1", False, None)]
    assert running(session) == ["c0"]


@pytest.mark.parametrize("ids", [{"x": True}, {"c0": True, "x": True}, {}])
def test_an_unknown_call_is_refused_as_a_whole(ids: dict[str, bool]) -> None:
    session = asked("pay")
    answer = session.decide(**ids)
    assert answer.error is not None
    assert (answer.error.kind, answer.pending) == ("no_pending_approval", ["c0"])
    assert decided(session) == []


def test_a_call_that_nobody_was_asked_about_is_refused() -> None:
    session = asked("free")
    answer = session.decide(c0=True)
    assert answer.error is not None
    assert answer.error.kind == "no_pending_approval"
    session.finish_call(0)
    session.answer("done")
    answer = session.decide(c0=True)
    assert answer.error is not None
    assert answer.error.kind == "no_pending_approval"


def test_denied_calls_go_back_to_the_model_without_a_worker() -> None:
    session = asked("pay")
    session.decide(c0=False)
    assert session.tool_tasks == []
    assert session.result_texts() == ["Error: not executed (a person denied the call)"]
    assert session.model_task.step_number == 2
    assert [event.type for event in session.events(None, "turn.resumed", "tool_result")] == [
        "turn.resumed",
        "tool_result",
    ]
    session.answer("then not")
    assert session.events()[-1].result.termination.last_tool_error is not None


def test_expiry_wakes_a_turn_and_lets_the_rest_wait() -> None:
    longer = ToolSpec(name="longer", approval=Approval(mode="always", timeout_seconds=1200))
    session = asked("pay", "longer", tools=[*TOOLS, longer])
    session.pass_time(600)
    session.fire_timer()
    assert decided(session) == [("c0", False, "expired")]
    assert session.events()[-1].approvals == ["c1"]
    session.decide(c1=True)
    session.finish_call(1, "late")
    assert session.result_texts() == ["Error: not executed (the approval expired)", "late"]


def test_calls_one_after_the_other_are_asked_for_together_and_run_in_order() -> None:
    agent = AgentSpec(name="agent", model="scripted:x", tool_execution="sequential")
    session = asked("free", "pay", "pay", "free", agent=agent)
    assert session.event_types().count("approval.requested") == 2
    session.decide(c2=True)
    assert running(session) == ["c0"]
    session.finish_call(0)
    assert session.events()[-1].approvals == ["c1"]
    session.decide(c1=False)
    assert running(session) == ["c0", "c2"]
    session.finish_call(2)
    assert running(session) == ["c0", "c2", "c3"]


# ---- who must be asked


def test_a_policy_says_of_each_call_whether_a_person_is_needed() -> None:
    session = asked("maybe", "free", "maybe")
    assert session.hook_task.arguments["tool_call"]["id"] == "c0"
    assert session.hook_task.arguments["metadata"] == {"user": 7}
    assert running(session) == []
    session.answer_hook({"required": False})
    assert session.hook_task.arguments["tool_call"]["id"] == "c2"
    session.answer_hook({"required": True})
    assert running(session) == ["c0", "c1"]
    assert [event.tool_call.id for event in session.events(None, "approval.requested")] == ["c2"]
    finished = session.events(None, "hook.finished")
    assert [(event.point, event.name, event.tool_call_id) for event in finished] == [
        ("approval", "judge", "c0"),
        ("approval", "judge", "c2"),
    ]


def test_a_policy_that_fails_fails_the_turn_with_its_name() -> None:
    session = asked("maybe")
    session.fail_hook("KeyError: 'limit'")
    failed = session.events()[-1]
    assert failed.error_type == "hook_failed"
    assert "'judge' (approval)" in failed.error
    assert session.result_texts() == ["Error: not executed (the turn failed: hook_failed)"]


def test_a_policy_without_a_word_asks_the_person() -> None:
    session = asked("maybe")
    session.answer_hook(None)
    assert session.events()[-1].approvals == ["c0"]


@pytest.mark.parametrize(
    ("approvals", "tool", "waits"),
    [
        ({"pay": Approval()}, "pay", False),
        ({"free": ALWAYS}, "free", True),
        ({"maybe": Approval()}, "maybe", False),
        ({"other": ALWAYS}, "free", False),
    ],
)
def test_the_turns_own_word_stands_above_the_tools(approvals: dict[str, Approval], tool: str, waits: bool) -> None:
    session = asked(tool, agent=AgentSpec(name="agent", model="scripted:x", approvals=approvals))
    assert (session.event_types()[-1] == "turn.suspended") is waits
    assert running(session) == ([] if waits else ["c0"])


def test_calls_that_must_not_run_are_not_asked_about() -> None:
    session = Session(AGENT, TOOLS)
    session.start()
    session.answer("", [call("pay", "c0", error="no JSON"), call("unknown", "c1")])
    assert "approval.requested" not in session.event_types()
    assert session.model_task.step_number == 2


def test_an_approved_call_that_is_lost_is_not_asked_about_again() -> None:
    tool = ToolSpec(name="pay", approval=ALWAYS, idempotent=True)
    session = asked("pay", tools=[tool])
    session.decide(c0=True)
    session.lose(session.tool_task(0))
    assert session.tool_task(0).attempt == 2
    assert session.event_types().count("approval.requested") == 1
