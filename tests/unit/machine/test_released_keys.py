"""The idempotency key of a turn that did not come to be is free again; the store lets go of it with the refusal."""

from __future__ import annotations

import pytest

from support.machine import Session
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.specs import AgentSpec, ToolSpec
from turnmill.runtime.machine import Limits

KEY = "idempotency:abc"
AGENT = AgentSpec(name="agent", model="scripted:x")


def busy(limit: int = 100, *tools: ToolSpec) -> Session:
    session = Session(AGENT, tools, Limits(queued_turns_max=limit))
    session.start("first", turn_id="turn-a")
    return session


@pytest.mark.parametrize("on_busy", ["reject", "queue"])
def test_a_refused_start_releases_its_key(on_busy: str) -> None:
    session = busy(limit=0)
    session.start(turn_id="turn-b", on_busy=on_busy, idempotency=KEY, answer=on_busy == "reject")
    assert session.released == [KEY]
    assert KEY not in session.records["turn-b"]


def test_a_start_for_which_there_is_no_room_releases_its_key() -> None:
    session = Session()
    problem = ErrorInfo(kind="too_many_turns", message="full", retry_after_seconds=1)
    session.start(turn_id="turn-a", idempotency=KEY, problem=problem)
    assert session.released == [KEY]


def test_a_turn_that_was_accepted_keeps_its_key() -> None:
    session = busy()
    session.start(turn_id="turn-b", idempotency=KEY)
    session.abort(turn_id="turn-b")
    assert session.released == []
    assert KEY in session.records["turn-b"]
    session.start(turn_id="turn-c", on_busy="steer", idempotency=KEY)
    assert session.released == []


def test_a_command_that_names_another_kind_of_key_releases_nothing() -> None:
    session = busy(limit=0)
    session.start(turn_id="turn-b", idempotency="session:s")
    assert session.released == []
