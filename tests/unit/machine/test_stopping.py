"""Stopping a turn: at any time, as often as one likes, with one end, and a history that every provider accepts."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest

from support.machine import SESSION, Session, call, texts
from turnmill.protocol.content import Cost, ErrorInfo, Message, ReasoningPart, TextPart, ToolCallPart, Usage
from turnmill.protocol.messages import AbortTurn
from turnmill.protocol.specs import AgentSpec, Approval, Compaction, HookSpec, ToolSpec
from turnmill.runtime.effects import Cancel, Send

HOOK = HookSpec(name="look")
POINTS = ("before_step", "after_step", "before_tool_call", "after_tool_call")
AGENT = AgentSpec(name="agent", model="scripted:x")
HOOKED = AgentSpec(name="agent", model="scripted:x", hooks=dict.fromkeys(POINTS, HOOK), signals=HOOK)  # type: ignore[arg-type]
TOOLS = [
    ToolSpec(name="add", max_attempts=3),
    ToolSpec(name="ask", approval=Approval(mode="always")),
    ToolSpec(name="policy", approval=Approval(mode="policy", policy=HOOK)),
    ToolSpec(name="host", kind="host"),
    ToolSpec(name="expert", kind="agent"),
    ToolSpec(name="transfer", kind="handoff", agent="other"),
]


def with_calls(*names: str, agent: AgentSpec = AGENT) -> Session:
    session = Session(agent, TOOLS)
    session.start()
    session.answer("let me see", [call(name) for name in names])
    return session


def hooked(*points: str) -> Session:
    """A turn of an agent with all hooks, which have answered up to the last of `points`."""
    session = Session(HOOKED, TOOLS)
    session.start()
    for point in points:
        assert session.hook_task.hook == point
        session.answer_hook({} if point != "approval" else {"required": False})
        if point == "before_step":
            session.answer("hm", [call("policy")] if "before_tool_call" in points else [])
        if point == "approval":
            session.finish_call(0)
    return session


def finished(session: Session) -> None:
    """The turn was stopped, once, and the session takes the next one."""
    last = session.events()[-1]
    assert (last.type, last.aborted, last.termination.kind) == ("turn.failed", True, "aborted")
    assert session.records[session.turn_id]["status"] == "aborted"
    assert session.live == ""
    session.plans["plan"] = type(session.plans["plan"])(agent=AGENT)
    session.start("and now?")
    session.answer("fine")
    assert session.event_types()[-1] == "turn.finished"


# ---- in every phase


def test_a_model_call_is_told_to_stop_and_has_a_moment() -> None:
    # TH-09, AC-42
    session = Session()
    turn_id = session.start()
    assert session.abort("enough").done is True
    assert session.cancelled == {turn_id: "enough"}
    assert session.live == ""  # no text behind the stop
    assert session.event_types() == ["turn.started", "step.started"]
    session.fire_timer()
    failed = session.events()[-1]
    assert (failed.error, failed.error_type, failed.termination.reason) == ("enough", "aborted", "enough")
    finished(session)


def test_partial_text_and_usage_are_kept() -> None:
    # AC-42, AC-53
    session = Session()
    session.start()
    session.abort("enough")
    session.pass_time(1)
    cost = Cost(total=Decimal("0.01"))
    session.answer("Once upon", usage=Usage(input_tokens=9, output_tokens=2), cost=cost, model="m", finish_reason=None)
    kept = session.transcript[-1]
    assert (kept.role, kept.text, kept.finish_reason) == ("assistant", "Once upon", "aborted")
    assert kept.metadata == {"turnmill": "interrupted"}
    result = session.events()[-1].result
    (attempt,) = result.attempts
    assert (attempt.step, attempt.attempt, attempt.outcome, attempt.model) == (1, 1, "aborted", "m")
    assert attempt.usage == Usage(input_tokens=9, output_tokens=2)
    assert (result.usage.output_tokens, result.cost, result.end_message) == (2, cost, 2)
    assert result.termination.has_text is True
    assert session.event_types()[-2:] == ["step.started", "turn.failed"]
    finished(session)


def test_usage_that_is_unknown_is_absent() -> None:
    # AC-53
    session = Session()
    session.start()
    session.abort()
    session.answer(message=None, usage=None, error=ErrorInfo(kind="aborted", message="stopped"))
    assert session.events()[-1].result.attempts == []
    assert len(session.transcript) == 1


def test_of_a_partial_answer_only_text_is_kept() -> None:
    # AC-02: a call that was never made has no result
    session = Session(tools=TOOLS)
    session.start()
    session.abort()
    parts = [ReasoningPart(text="hm"), TextPart("I will"), ToolCallPart(call("add"))]
    session.answer(message=Message(role="assistant", content=parts))
    assert texts(session.transcript)[-1] == ("assistant", "I will")
    assert session.transcript[-1].reasoning == []
    finished(session)


def test_an_answer_that_says_nothing_leaves_no_message() -> None:
    session = Session()
    session.start()
    session.abort()
    session.answer("")
    assert len(session.transcript) == 1


def test_the_partial_text_comes_too_late_behind_the_grace() -> None:
    session = Session()
    session.start()
    session.abort()
    assert session.timer_ms == session.now_ms + 2000
    session.fire_timer()
    session.answer("late")
    assert session.counters == {"stale_model_reply": 1}
    assert len(session.transcript) == 1


def test_a_lost_model_call_is_not_waited_for() -> None:
    session = Session()
    session.start()
    session.abort()
    session.lose(session.model_task)
    finished(session)


def test_a_turn_in_backoff_ends_at_once() -> None:
    session = Session()
    session.start()
    session.fail_model()
    session.abort()
    finished(session)


def test_every_open_call_gets_an_honest_result() -> None:
    # AC-02, AC-03
    session = Session(AGENT, [*TOOLS, ToolSpec(name="add2", max_attempts=2)])
    session.start()
    session.answer("", [call(name) for name in ("add", "add2", "ask", "host", "add")])
    session.finish_call(0, 3)
    session.retry_call(1)
    session.abort("enough")
    while session.state.turn is not None:
        session.fire_timer()
    unknown = "Error: stopped (enough); whether the call took effect is unknown"
    assert session.result_texts() == [
        3,
        unknown,
        "Error: not executed (stopped: enough)",
        "Error: not executed (stopped: enough)",
        unknown,
    ]
    finished_events = session.events(None, "tool_execution.finished")
    assert [(event.index, event.aborted, event.error) for event in finished_events] == [
        (0, False, None),
        (1, True, "enough"),
        (4, True, "enough"),
    ]
    finished(session)


def test_results_that_come_in_the_grace_are_kept_and_the_last_one_ends_the_turn() -> None:
    # AC-02
    session = with_calls("add", "add")
    session.abort("enough")
    session.finish_call(1, 4)
    assert session.state.turn is not None
    session.finish_call(0, error=ErrorInfo(kind="aborted", message="stopped"), result=None)
    assert session.result_texts() == ["Error: stopped (enough); whether the call took effect is unknown", 4]
    finished(session)


def test_a_lost_call_is_not_waited_for() -> None:
    session = with_calls("add")
    session.abort()
    session.lose(session.tool_task(0))
    finished(session)


def test_a_retryable_error_of_a_stopped_call_is_its_end() -> None:
    session = with_calls("add")
    session.abort()
    session.retry_call(0)
    finished(session)


@pytest.mark.parametrize("name", ["ask", "host"])
def test_a_suspended_turn_ends_at_once(name: str) -> None:
    session = with_calls(name)
    assert session.event_types()[-1] == "turn.suspended"
    session.abort()
    assert session.result_texts() == ["Error: not executed (stopped: the turn was stopped)"]
    finished(session)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ("before_step",),
        ("before_step", "after_step"),
        ("before_step", "before_tool_call"),
        ("before_step", "before_tool_call", "approval"),
        ("before_step", "before_tool_call", "approval", "after_tool_call"),
    ],
)
def test_a_turn_is_stopped_while_a_hook_runs(points: tuple[str, ...]) -> None:
    # AC-43
    session = hooked(*points)
    assert session.state.turn is not None
    if session.state.turn.phase == "hook":
        task = session.hook_task
        session.abort("enough")
        assert session.cancelled[session.turn_id] == "enough"
        assert session.state.turn is None
        assert task is session.hook_task
        session.answer_hook()
        assert session.counters == {"stale_tool_reply": 1}
    else:
        session.abort("enough")
        session.fire_timer()
    finished(session)


def test_a_compaction_is_stopped() -> None:
    agent = AgentSpec(name="agent", model="scripted:x", compaction=Compaction(trigger_tokens=0))
    session = Session(agent)
    session.start()
    assert session.model_task.compact
    session.abort()
    finished(session)


def test_a_turn_whose_plan_is_gone_can_be_stopped() -> None:
    session = with_calls("expert")
    plan = session.plans.pop("plan")
    session.abort()
    session.fire_timer()
    session.plans["plan"] = plan
    finished(session)


# ---- sub-turns and handoffs


def test_sub_turns_are_stopped_too_and_waited_for() -> None:
    # AC-44
    session = with_calls("expert", "add")
    (child,) = session.children
    session.abort("enough")
    assert session.sent[-1] == AbortTurn(session_id=child.session_id, turn_id=child.turn_id, reason="enough")
    assert session.timer_ms == session.now_ms + 2000 + 4 * 1000  # a second for each level that may lie below
    session.finish_call(1, 3)
    assert session.state.turn is not None
    session.end_child(child, "aborted", error=ErrorInfo(kind="aborted", message="enough"))
    assert session.result_texts() == ["Error: stopped (enough); whether the call took effect is unknown", 3]
    assert session.events(None, "sub_turn.finished")[0].status == "aborted"
    finished(session)


def test_a_sub_turn_that_had_finished_has_its_result() -> None:
    session = with_calls("expert")
    session.abort()
    session.end_child(session.children[0], text="42")
    assert session.result_texts() == ["42"]
    finished(session)


def test_an_open_handoff_is_not_waited_for() -> None:
    session = with_calls("transfer")
    session.abort()
    session.hand_over("plan")
    assert session.state.turn is None
    finished(session)


# ---- repetition, order


ENDS: list[tuple[str, Callable[[Session], object]]] = [
    ("finished", lambda session: session.answer("done")),
    ("failed", lambda session: session.fail_model(retryable=False)),
]


@pytest.mark.parametrize(("kind", "end"), ENDS)
def test_a_stop_behind_the_end_changes_nothing(kind: str, end: Callable[[Session], object]) -> None:
    # AC-43, AC-45
    session = Session()
    turn_id = session.start()
    end(session)
    before = session.event_types()
    assert session.abort().done is False
    assert session.abort(turn_id="never-heard-of").done is False
    assert session.event_types() == before
    assert session.records[turn_id]["status"] == kind


def test_a_stop_may_be_repeated_and_the_first_reason_stands() -> None:
    # AC-45
    session = with_calls("add")
    assert session.abort("first").done is True
    decision = session.abort("second")
    assert decision.done is True
    assert not [effect for effect in session.last.effects if isinstance(effect, Cancel | Send)]
    session.fire_timer()
    assert session.events()[-1].error == "first"


def test_nothing_is_started_behind_a_stop() -> None:
    session = with_calls("add", "add")
    session.abort()
    tasks = list(session.tasks)
    session.finish_call(0)
    session.finish_call(1)
    assert session.tasks == tasks


def test_a_turn_that_waits_is_stopped_without_having_started() -> None:
    # AC-45
    session = Session()
    session.start()
    session.start(turn_id="turn-b", answer=True)
    assert len(session.answers["turn-b"]) == 1
    assert session.abort("not needed", "turn-b").done is True
    (failed,) = session.events("turn-b")
    assert (failed.aborted, failed.error, failed.result) == (True, "not needed", None)
    assert session.records["turn-b"]["status"] == "aborted"
    assert len(session.answers["turn-b"]) == 1, "its command was answered when it was accepted"
    assert session.abort(turn_id="turn-b").done is False
    session.answer("done")
    assert session.state.turn is None


def test_the_next_turn_starts_when_the_stopped_one_has_ended() -> None:
    session = with_calls("add")
    session.start("next", turn_id="turn-b")
    session.abort(turn_id="turn-1")
    assert "turn-b" not in session.channels
    session.finish_call(0)
    assert session.event_types("turn-b") == ["turn.started", "step.started"]
    assert texts(session.transcript)[-2:] == [("tool", ["call_add"]), ("user", "next")]


def test_a_stop_without_a_request_is_not_answered() -> None:
    session = Session()
    turn_id = session.start()
    session.send(AbortTurn(session_id=SESSION, turn_id=turn_id))
    assert session.answers == {}


def test_a_deadline_closes_the_provider_call_and_says_what_became_of_calls() -> None:
    # AC-03
    agent = AgentSpec(name="agent", model="scripted:x", turn_timeout_seconds=10)
    session = Session(agent)
    turn_id = session.start()
    session.fire_timer()
    assert session.cancelled == {turn_id: "the turn's time is over"}
    assert session.events()[-1].error_type == "deadline_exceeded"
    session = with_calls("add", "ask", "host", agent=agent)
    session.fire_timer()
    assert session.result_texts() == [
        "Error: stopped (the turn failed: deadline_exceeded); whether the call took effect is unknown",
        "Error: not executed (the turn failed: deadline_exceeded)",
        "Error: not executed (the turn failed: deadline_exceeded)",
    ]
