"""A conversation that is too long: shortened for the model, once or twice in a step, and whole in the transcript."""

from __future__ import annotations

from typing import Any

from support.machine import Session, call, texts
from turnmill.protocol.content import ErrorInfo, Message, Usage
from turnmill.protocol.specs import AgentSpec, Compaction, HookSpec, ToolSpec
from turnmill.runtime.effects import Decision

ADD = ToolSpec(name="add")
SUMMARY = Message(role="user", content="what was said before", metadata={"turnmill": "summary"})


def long_session(**fields: Any) -> Session:
    """Two turns done, which had 0 and 100 tokens, the third one live: the transcript holds five messages."""
    session = Session(AgentSpec(name="agent", model="scripted:x", **fields), [ADD])
    for number in range(2):
        session.start(f"question {number}")
        session.answer(f"answer {number}", usage=Usage(input_tokens=100 * number))
    session.start("question 2")
    return session


def shorten(session: Session, view: list[tuple[int, int, int]] | None = None, *replacements: Message) -> Decision:
    """The worker's reply to a compaction: replacements in place of the first four messages, the rest as it is."""
    length = session.model_task.messages
    view = view if view is not None else [(2, 0, len(replacements)), (0, 4, length)]
    return session.answer(message=None, view=view, replacements=list(replacements), usage=Usage(input_tokens=100))


# ---- the window is exceeded


def test_an_overflow_has_the_conversation_shortened_and_the_call_repeated() -> None:
    # AC-08
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    task = session.model_task
    assert (task.compact, task.overflow, task.attempt, task.step_number, task.messages) == (True, True, 2, 1, 5)
    assert session.live == ""
    shorten(session, None, SUMMARY)
    task = session.model_task
    assert (task.compact, task.overflow, task.attempt) == (False, False, 3)
    assert (task.view, task.view_end, task.messages) == ([(1, 0, 1), (0, 4, 5)], 5, 5)
    assert texts(session.request_of(task)) == [("user", "what was said before"), ("user", "question 2")]
    assert len(session.transcript) == 5
    assert session.event_types()[-2:] == ["context.compacted", "step.reset"]
    compacted = session.events(None, "context.compacted")[0]
    assert (compacted.reason, compacted.replacements) == ("overflow", 1)
    session.answer("answer 2")
    assert session.event_types()[-1] == "turn.finished"
    (attempt,) = session.events()[-1].result.attempts
    assert (attempt.outcome, attempt.usage) == ("compaction", Usage(input_tokens=100))


def test_the_shorter_view_stays_for_later_steps_and_turns() -> None:
    # AC-08
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    shorten(session, None, SUMMARY)
    session.answer("", [call("add")])
    session.finish_call(0)
    session.answer("done")
    session.start("question 3")
    assert texts(session.request_of(session.model_task)) == [
        ("user", "what was said before"),
        ("user", "question 2"),
        ("assistant", ["call_add"]),
        ("tool", ["call_add"]),
        ("assistant", "done"),
        ("user", "question 3"),
    ]


def test_a_second_overflow_shortens_more_and_a_third_fails_once() -> None:
    # AC-08
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    shorten(session, [(0, 2, 5)])
    session.fail_model("context_overflow", retryable=False)
    assert session.model_task.compact
    assert session.model_task.view == [(0, 2, 5)]
    shorten(session, [(2, 0, 1), (0, 4, 5)], SUMMARY)
    session.fail_model("context_overflow", retryable=False)
    assert session.events()[-1].error_type == "context_overflow"
    assert [type(task).__name__ for task in session.model_tasks].count("ModelTask") == 7
    session.start("short")
    session.answer("fine")
    assert session.event_types()[-1] == "turn.finished"


def test_replacements_are_placed_behind_those_that_there_were() -> None:
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    shorten(session, None, SUMMARY)
    session.fail_model("context_overflow", retryable=False)
    other = Message(role="user", content="even shorter")
    shorten(session, [(2, 0, 1), (1, 0, 1), (2, 1, 2)], other, other)
    assert session.model_task.view == [(1, 1, 2), (1, 0, 1), (1, 2, 3)]
    assert [message.text for message in session.request_of(session.model_task)] == [
        "even shorter",
        "what was said before",
        "even shorter",
    ]


def test_where_nothing_can_be_shortened_the_overflow_is_the_end() -> None:
    # AC-08
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    session.answer(message=None, view=None)
    failed = session.events()[-1]
    assert (failed.error_type, failed.error) == ("context_overflow", "context_overflow!")
    assert session.event_types().count("turn.failed") == 1
    assert session.state.view_end == 0


def test_a_compaction_that_fails_leaves_the_overflow() -> None:
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    session.fail_model("provider_error")
    assert session.events()[-1].error_type == "context_overflow"


def test_a_compaction_that_is_lost_is_repeated_and_one_that_is_overdue_is_tried_once_more() -> None:
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    session.lose(session.model_task)
    assert (session.model_task.compact, session.model_task.attempt) == (True, 3)
    session.pass_time(400)
    session.fire_timer()
    assert (session.model_task.compact, session.model_task.attempt) == (True, 4)
    session.pass_time(400)
    session.fire_timer()
    assert session.events()[-1].error_type == "context_overflow"


def test_replies_of_attempts_before_are_stale() -> None:
    session = long_session()
    early = session.model_reply("early")
    session.fail_model("context_overflow", retryable=False)
    session.send(early)
    late = session.model_reply(message=None, view=[])
    shorten(session, None, SUMMARY)
    session.send(late)
    assert session.counters == {"stale_model_reply": 2}
    assert session.model_task.view == [(1, 0, 1), (0, 4, 5)]


def test_an_overflow_in_a_later_step_spares_steering_and_results() -> None:
    session = long_session()
    session.answer("", [call("add")])
    session.steer("and quickly")
    session.finish_call(0)
    session.fail_model("context_overflow", retryable=False)
    shorten(session, None, SUMMARY)
    assert texts(session.request_of(session.model_task))[1:] == [
        ("user", "question 2"),
        ("assistant", ["call_add"]),
        ("tool", ["call_add"]),
        ("user", "and quickly"),
    ]


def test_injected_messages_come_behind_what_was_shortened() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x", hooks={"before_step": HookSpec(name="look")}))
    session.start("question")
    session.answer_hook({"inject_messages": [{"role": "system", "content": "injected"}]})
    session.fail_model("context_overflow", retryable=False)
    assert session.model_task.injected == []
    shorten(session, [(2, 0, 1)], SUMMARY)
    task = session.model_task
    assert (task.inject_at, [message.text for message in task.injected]) == (task.view_end, ["injected"])


# ---- before a turn


def test_a_long_conversation_is_shortened_before_a_turns_first_step() -> None:
    # AC-07
    session = long_session(compaction=Compaction(trigger_tokens=10))
    task = session.model_task
    assert (task.compact, task.overflow, task.attempt) == (True, False, 1)
    shorten(session, None, SUMMARY)
    assert "step.reset" not in session.event_types()
    assert session.events(None, "context.compacted")[0].reason == "trigger"
    assert session.model_task.attempt == 2
    session.answer("", [call("add")])
    session.finish_call(0)
    assert not session.model_task.compact, "only at the boundary of turns"


def test_a_short_conversation_is_left_alone() -> None:
    session = long_session(compaction=Compaction(trigger_tokens=101))
    assert not session.model_task.compact


def test_a_turn_goes_on_where_nothing_could_be_shortened_before_it() -> None:
    for fields in ({"view": None}, {"error": ErrorInfo(kind="provider_error", message="no")}):
        session = long_session(compaction=Compaction(trigger_tokens=10))
        session.answer(message=None, **fields)
        assert not session.model_task.compact
        assert session.model_task.view_end == 0
        session.answer("answer 2")
        assert session.event_types()[-1] == "turn.finished"


def test_a_turn_goes_on_where_the_compaction_before_it_is_overdue() -> None:
    session = long_session(compaction=Compaction(trigger_tokens=10))
    session.pass_time(400)
    session.fire_timer()
    session.fire_timer()
    assert not session.model_task.compact
    session.answer("answer 2")
    assert session.event_types()[-1] == "turn.finished"


def test_an_overflow_behind_the_boundarys_compaction_may_shorten_once_more() -> None:
    session = long_session(compaction=Compaction(trigger_tokens=10))
    shorten(session, [(0, 2, 5)])
    session.fail_model("context_overflow", retryable=False)
    assert (session.model_task.compact, session.model_task.overflow) == (True, True)
    shorten(session, None, SUMMARY)
    session.answer("answer 2")
    assert session.event_types()[-1] == "turn.finished"


# ---- going back


def test_a_rewound_conversation_and_a_shortened_one_go_together() -> None:
    # AC-07
    session = long_session()
    session.fail_model("context_overflow", retryable=False)
    shorten(session, None, SUMMARY)
    session.answer("answer 2")
    session.start("question 2, better", rewind_to=4)
    assert texts(session.request_of(session.model_task)) == [
        ("user", "what was said before"),
        ("user", "question 2, better"),
    ]
    session.answer("answer 2, better")
    session.start("question 1, better", rewind_to=2)
    assert texts(session.request_of(session.model_task)) == [
        ("user", "question 0"),
        ("assistant", "answer 0"),
        ("user", "question 1, better"),
    ]
    session.fail_model("context_overflow", retryable=False)
    shorten(session, [(2, 0, 1), (0, 8, 9)], Message(role="user", content="shorter"))
    assert [message.text for message in session.request_of(session.model_task)] == ["shorter", "question 1, better"]
    assert len(session.transcript) == 9


def test_a_turn_may_go_back_to_the_beginning() -> None:
    session = long_session()
    session.answer("answer 2")
    session.start("all over", rewind_to=0)
    assert texts(session.request_of(session.model_task)) == [("user", "all over")]
    assert session.transcript[6].metadata == {"turnmill.rewind_to": 0}
