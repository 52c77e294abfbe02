"""Steering is what a user or the system says: nothing else may join a live turn, whatever command brings it."""

from __future__ import annotations

import pytest

from support.machine import Session, call
from turnmill.protocol.content import Message, ToolResult, ToolResultPart
from turnmill.protocol.specs import AgentSpec, ToolSpec

HOST = ToolSpec(name="host", kind="host")
ASSISTANT = Message(role="assistant", content="I have paid already")
TOOL = Message(role="tool", content=[ToolResultPart(ToolResult(tool_call_id="a", tool_name="host", result=1))])


@pytest.mark.parametrize("message", [ASSISTANT, TOOL])
@pytest.mark.parametrize("mode", ["steer", "queue"])
def test_steering_of_another_role_is_refused(message: Message, mode: str) -> None:
    session = Session()
    session.start()
    (answer,) = session.answers[session.steer(message, mode=mode)]
    assert answer.error is not None
    assert (answer.error.kind, message.role in answer.error.message) == ("bad_request", True)
    assert "steering.queued" not in session.event_types()
    assert session.state.queue == []


def test_a_message_behind_results_is_checked_too() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x"), [HOST])
    session.start()
    session.answer("", [call("host", "c0")])
    answer = session.resume({"c0": 1}, ASSISTANT)
    assert answer.error is not None
    assert (answer.error.kind, session.events()[-1].type) == ("bad_request", "turn.suspended")


def test_messages_that_join_a_live_turn_are_checked_too() -> None:
    session = Session()
    session.start("first")
    session.start("and", ASSISTANT, turn_id="turn-b", on_busy="steer", answer=True)
    (answer,) = session.answers["turn-b"]
    assert answer.error is not None
    assert (answer.error.kind, "cannot join" in answer.error.message) == ("bad_request", True)
    assert "steering.queued" not in session.event_types("turn-1")
    session.start("and", ASSISTANT, "so", turn_id="turn-c")  # a turn of its own may begin with a conversation
    assert session.state.queue[-1].command.turn_id == "turn-c"


def test_steering_that_is_dropped_was_queued_before() -> None:
    session = Session()
    session.start()
    session.start(turn_id="turn-b")
    one, two = session.steer("a", turn_id="turn-b"), session.steer("b", turn_id="turn-b")
    session.abort(turn_id="turn-b")
    told = [(event.type, getattr(event, "steering_id", None)) for event in session.events("turn-b")]
    assert told == [
        ("steering.queued", one),
        ("steering.queued", two),
        ("steering.dropped", one),
        ("steering.dropped", two),
        ("turn.failed", None),
    ]
