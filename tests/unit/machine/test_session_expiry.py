"""The end of an idle session: after its time without a turn, and never of one that has something to do."""

from __future__ import annotations

import pytest

from support.machine import Session, call
from turnmill.protocol.content import ErrorInfo, Message
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.messages import TimerFired
from turnmill.protocol.specs import ToolSpec
from turnmill.runtime.machine import Limits
from turnmill.runtime.state import BLANK, SessionState

TTL_MS = 60_000
TOOLS = [ToolSpec(name="host", kind="host")]
EXPIRING = Limits(session_ttl_ms=TTL_MS)


@pytest.fixture
def session() -> Session:
    return Session(tools=TOOLS, limits=EXPIRING)


def fire(session: Session, seconds: float = 0) -> None:
    """A timer's message, whether one is set or not: it may be late, early or a repetition."""
    session.pass_time(seconds)
    session.send(TimerFired(session_id="session"))


def test_an_idle_session_is_removed_when_its_time_is_over(session: Session) -> None:
    session.start()
    session.answer("done")
    assert session.timer_ms == session.now_ms + TTL_MS
    session.fire_timer()
    assert (session.state, session.deletions, session.transcript) == (BLANK, 1, [])
    assert session.timer_ms is None


def test_without_the_setting_it_stays() -> None:
    session = Session()
    session.start()
    session.answer("done")
    assert session.timer_ms is None
    fire(session, 10**6)
    assert session.deletions == 0


def test_an_early_timer_only_looks(session: Session) -> None:
    session.start()
    session.answer("done")
    due = session.timer_ms
    fire(session, TTL_MS / 1000 - 0.001)
    assert (session.deletions, session.timer_ms) == (0, due)
    fire(session, 0.001)
    assert session.deletions == 1


def test_a_turn_that_came_before_the_timer_keeps_the_session(session: Session) -> None:
    session.start()
    session.answer("done")
    session.pass_time(TTL_MS / 1000)
    session.start("more")
    fire(session)
    assert session.deletions == 0
    session.answer("done again")
    assert [message.text for message in session.transcript] == ["hello", "done", "more", "done again"]
    assert session.state.idle_since_ms == session.now_ms
    session.fire_timer()
    assert session.deletions == 1


def test_a_turn_that_comes_behind_it_begins_a_new_session(session: Session) -> None:
    session.start()
    session.answer("done")
    session.fire_timer()
    session.start("more")
    session.answer("done again")
    assert [message.text for message in session.transcript] == ["more", "done again"]
    assert session.deletions == 1


def test_a_suspended_turn_keeps_its_session(session: Session) -> None:
    session.start()
    session.answer("", [call("host")])
    assert session.timer_ms is None
    fire(session, 100 * TTL_MS)
    assert session.deletions == 0
    session.resume({"call_host": "yes"})
    session.answer("done")
    assert session.timer_ms == session.now_ms + TTL_MS


def test_turns_that_wait_keep_it_too(session: Session) -> None:
    session.start()
    session.start("second")
    session.answer("done")
    fire(session, TTL_MS / 1000)
    assert session.deletions == 0
    assert session.state.idle_since_ms == 0


def test_a_turn_that_is_refused_does_not_prolong_it(session: Session) -> None:
    session.start()
    session.answer("done")
    since = session.state.idle_since_ms
    session.pass_time(30)
    session.start(problem=ErrorInfo(kind=ErrorKind.UNKNOWN_AGENT, message="nobody"))
    assert session.state.idle_since_ms == since


def test_a_session_that_never_came_to_be_leaves_nothing_to_remove(session: Session) -> None:
    session.start(problem=ErrorInfo(kind=ErrorKind.UNKNOWN_AGENT, message="nobody"))
    session.abort(turn_id="turn-x")
    fire(session)
    assert session.state == BLANK
    assert (session.deletions, session.timer_ms) == (0, None)


def test_a_fork_is_idle_from_the_first_look_on(session: Session) -> None:
    """A fork's record is written by its client, which notes no time; its timer is due at once."""
    session.state, session.transcript = SessionState(length=1), [Message(role="user", content="hello")]
    fire(session)
    assert (session.deletions, session.timer_ms) == (0, session.now_ms + TTL_MS)
    session.fire_timer()
    assert session.deletions == 1


def test_a_longer_time_holds_at_once(session: Session) -> None:
    session.start()
    session.answer("done")
    session.limits = Limits(session_ttl_ms=3 * TTL_MS)
    fire(session, TTL_MS / 1000)
    assert (session.deletions, session.timer_ms) == (0, session.state.idle_since_ms + 3 * TTL_MS)


def test_a_time_that_was_taken_back_holds_at_once(session: Session) -> None:
    session.start()
    session.answer("done")
    session.limits = Limits()
    fire(session, TTL_MS / 1000)
    assert (session.deletions, session.timer_ms) == (0, None)


def test_a_turn_that_ends_in_the_decision_that_begins_it_counts() -> None:
    session = Session(limits=EXPIRING)
    session.start(plan_id="gone")
    assert session.state.turn is None
    assert (session.state.length, session.timer_ms) == (1, session.now_ms + TTL_MS)
