"""Decisions on calls: the first stands, and whoever comes with another one is told so."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session, call
from turnmill.protocol.messages import ApprovalDecision, DecideApprovals
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, ToolSpec

ALWAYS = Approval(mode="always", timeout_seconds=600)
AGENT = AgentSpec(name="agent", model="scripted:x")
TOOLS = [
    ToolSpec(name="pay", approval=ALWAYS),
    ToolSpec(name="maybe", approval=Approval(mode="policy", policy=HookSpec(name="judge"))),
    ToolSpec(name="free"),
    ToolSpec(name="patient", approval=Approval(mode="always", timeout_seconds=6000)),
]


def asked(*names: str, **fields: Any) -> Session:
    """A turn that was just answered with calls of ids c0, c1, ..."""
    session = Session(AGENT, TOOLS)
    session.start("do it")
    session.answer("", [call(name, f"c{index}", **fields) for index, name in enumerate(names)])
    return session


def refused(session: Session, **decisions: bool) -> tuple[str, str]:
    answer = session.decide(**decisions)
    assert answer.error is not None
    return answer.error.kind, answer.error.message


def running(session: Session) -> list[str]:
    return [task.tool_call_id for task in session.tool_tasks if task.hook is None]


@pytest.mark.parametrize(("first", "words"), [(True, "c0 has been approved"), (False, "c0 has been denied")])
def test_another_decision_is_refused_and_says_what_was_decided(first: bool, words: str) -> None:
    session = asked("pay", "pay")
    session.decide(c0=first)
    kind, text = refused(session, c0=not first)
    assert (kind, words in text, "waiting: c1" in text) == ("already_decided", True, True)
    assert session.decide(c0=first).error is None
    assert len(session.events(None, "approval.decided")) == 1


def test_a_refused_decision_decides_on_nothing_else() -> None:
    session = asked("pay", "pay")
    session.decide(c0=True)
    assert refused(session, c0=False, c1=False)[0] == "already_decided"
    assert session.decide(c0=True, c1=True).error is None
    assert running(session) == ["c0", "c1"]


def test_a_decision_on_a_call_that_ran_is_known_as_long_as_its_step() -> None:
    session = asked("pay", "pay")
    session.decide(c0=True)
    session.finish_call(0, "Error: no", error=None)
    assert session.decide(c0=True).error is None
    assert refused(session, c0=False)[0] == "already_decided"


def test_what_has_expired_cannot_be_approved_any_more() -> None:
    session = asked("pay", "patient")
    session.pass_time(600)
    session.fire_timer()
    kind, text = refused(session, c0=True)
    assert (kind, "c0 has expired" in text) == ("already_decided", True)
    assert session.decide(c0=False).error is None


def test_both_at_once_is_neither() -> None:
    session = asked("pay")
    decisions = [ApprovalDecision(tool_call_id="c0", approved=approved) for approved in (True, False)]
    session.send(DecideApprovals(session_id="session", turn_id="turn-1", request_id="r", decisions=decisions))
    (answer,) = session.answers["r"]
    assert answer.error is not None
    assert (answer.error.kind, session.events()[-1].approvals) == ("bad_request", ["c0"])


@pytest.mark.parametrize("approved", [True, False])
def test_a_call_that_nobody_was_asked_about_is_refused_also_while_others_wait(approved: bool) -> None:
    session = asked("pay", "free", "unknown")
    for other in ("c1", "c2", "c9"):
        kind, text = refused(session, **{other: approved})
        assert (kind, other in text, "waiting: c0" in text) == ("no_pending_approval", True, True)
        assert refused(session, **{"c0": approved, other: approved})[0] == "no_pending_approval"
    session.finish_call(1)
    assert refused(session, c1=approved)[0] == "no_pending_approval"
    assert session.events(None, "approval.decided") == []


def test_a_call_that_its_policy_let_pass_is_not_decided_on() -> None:
    session = asked("maybe", "pay")
    session.answer_hook({"required": False})
    assert refused(session, c0=True)[0] == "no_pending_approval"
