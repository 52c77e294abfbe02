"""The end of a session: what is live is stopped, what waits is told, and then nothing is left."""

from __future__ import annotations

from support.machine import Session, call
from turnmill.protocol.content import BlobRef, Message, TextPart, ToolResult
from turnmill.protocol.specs import AgentSpec, ToolSpec
from turnmill.runtime.effects import DeleteSession
from turnmill.runtime.state import SessionState

TOOLS = [ToolSpec(name="add"), ToolSpec(name="host", kind="host"), ToolSpec(name="expert", kind="agent")]
LARGE = Message(role="user", content=[TextPart("", BlobRef(key="blob:x", bytes=9))])


def test_an_idle_session_is_gone_at_once() -> None:
    session = Session()
    session.start()
    session.answer("done")
    request = session.delete()
    assert [answer.done for answer in session.answers[request]] == [True]
    assert session.state == SessionState()
    assert (session.transcript, session.deletions) == ([], 1)


def test_a_session_that_never_was_can_be_deleted() -> None:
    session = Session()
    request = session.delete()
    assert [answer.done for answer in session.answers[request]] == [True]


def test_a_live_turn_is_stopped_first_and_turns_that_wait_do_not_start() -> None:
    session = Session(tools=TOOLS)
    session.start()
    session.answer("", [call("add"), call("expert")])
    session.start(turn_id="turn-b")
    request = session.delete()
    assert session.cancelled["turn-1"] == "the session was deleted"
    assert session.events("turn-b")[-1].aborted is True
    assert request not in session.answers
    session.finish_call(0)
    session.end_child(session.children[0], "aborted")
    assert session.events("turn-1")[-1].aborted is True
    assert [answer.done for answer in session.answers[request]] == [True]
    assert session.state == SessionState()


def test_a_turn_that_rests_or_has_nothing_under_way_does_not_hold_it_up() -> None:
    session = Session(tools=TOOLS)
    session.start()
    session.answer("", [call("host")])
    session.delete()
    assert session.deletions == 1
    assert session.transcript == []
    assert session.events("turn-1")[-1].aborted is True


def test_a_stopped_turn_that_says_nothing_is_waited_for_no_longer_than_its_grace() -> None:
    session = Session()
    session.start()
    request = session.delete()
    session.fire_timer()
    assert [answer.done for answer in session.answers[request]] == [True]
    assert session.timer_ms is None


def test_whoever_asks_meanwhile_is_answered_too() -> None:
    session = Session()
    session.start()
    requests = [session.delete(), session.delete()]
    session.fire_timer()
    assert [len(session.answers[request]) for request in requests] == [1, 1]
    assert session.deletions == 1


def test_a_turn_that_comes_behind_the_deletion_begins_a_new_session() -> None:
    session = Session()
    session.start("old")
    session.delete()
    session.start("new", turn_id="turn-b")
    session.answer("partial")
    assert [message.text for message in session.transcript] == ["new"]
    assert session.model_task.messages == 1
    assert session.event_types("turn-b") == ["turn.started", "step.started"]
    effects = session.last.effects
    assert DeleteSession() in effects
    session.answer("done")
    assert session.events("turn-b")[-1].result.first_message == 0


def test_large_values_of_a_turn_behind_the_deletion_outlive_it() -> None:
    session = Session()
    session.start("old")
    session.delete()
    session.start(LARGE, turn_id="turn-b")
    session.steer(LARGE, turn_id="turn-b")
    assert session.kept == []
    session.fire_timer()
    assert session.kept == ["blob:x", "blob:x"]


def test_nothing_of_a_shortened_conversation_is_left() -> None:
    session = Session()
    session.start("old")
    session.fail_model("context_overflow", retryable=False)
    session.answer(message=None, view=[(2, 0, 1)], replacements=[Message(role="user", content="short")])
    session.answer("done")
    session.delete()
    assert session.replacements == []
    session.start("new")
    task = session.model_task
    assert (task.view, task.view_end) == ([], 0)
    session.fail_model("context_overflow", retryable=False)
    session.answer(message=None, view=[(2, 0, 1)], replacements=[Message(role="user", content="short")])
    assert session.model_task.view == [(1, 0, 1)]


def test_late_words_of_a_deleted_session_change_nothing() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x"), TOOLS)
    session.start()
    session.answer("", [call("add")])
    late = session.tool_reply(0, result=ToolResult(tool_call_id="", tool_name="", result=1))
    session.delete()
    session.fire_timer()
    session.send(late)
    assert session.counters == {"stale_tool_reply": 1}
    assert session.abort(turn_id="turn-1").done is False
