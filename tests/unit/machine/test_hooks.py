"""Hooks of an agent: when each is called, what its answer changes, and what becomes of one that fails or is lost."""

from __future__ import annotations

from typing import Any

import pytest

from support.machine import Session, call, texts
from turnmill.protocol.content import Message, ReasoningPart, TextPart, ToolCallPart, ToolResult
from turnmill.protocol.messages import CallWaiting, ToolTask
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, StopCondition, ToolSpec
from turnmill.runtime.effects import DispatchTool
from turnmill.runtime.hook_calls import GRACE_SECONDS, INJECTED_MAX, SIGNALS_MAX
from turnmill.runtime.machine import Limits

HOOK = HookSpec(name="look", timeout_seconds=30, start_timeout_seconds=10)
TOOLS = [ToolSpec(name="add"), ToolSpec(name="sub")]


def hooked(*points: str, **fields: Any) -> Session:
    hooks = dict.fromkeys(points, HOOK)
    session = Session(AgentSpec(name="agent", model="scripted:x", hooks=hooks, **fields), TOOLS, Limits(losses_max=3))  # type: ignore[arg-type]
    session.start("hello", metadata={"user": 7}, trace={"traceparent": "00-1"})
    return session


def with_calls(*points: str, names: tuple[str, ...] = ("add", "sub"), **fields: Any) -> Session:
    session = hooked(*points, **fields)
    session.answer("", [call(name, f"id_{name}", x=1) for name in names])
    return session


def points_called(session: Session) -> list[tuple[str | None, str]]:
    return [(task.hook, task.call) for task in session.tool_tasks]


# ---- the call of a hook


def test_a_hook_is_called_like_a_tool_in_its_own_queue() -> None:
    # TH-12
    session = hooked("before_step")
    dispatch = next(effect for effect in session.last.effects if isinstance(effect, DispatchTool))
    assert dispatch.queue == "hooks"
    assert dispatch.task == ToolTask(
        session_id="session",
        turn_id="turn-1",
        call="1.before_step.0",
        attempt=1,
        tool="look",
        tool_call_id="1.before_step.0",
        arguments={"step_number": 1, "messages": 1, "tools": ["add", "sub"]},
        agent_id="agent",
        step_number=1,
        idempotency_key="turn-1/1.before_step.0",
        timeout_seconds=30,
        start_by_ms=session.now_ms + 10_000,
        deadline_ms=session.now_ms + int((40 + GRACE_SECONDS) * 1000),
        metadata={"user": 7},
        trace={"traceparent": "00-1"},
        hook="before_step",
    )
    assert session.model_tasks == []
    session.answer_hook()
    assert len(session.model_tasks) == 1
    (finished,) = session.events(None, "hook.finished")
    assert (finished.point, finished.name, finished.duration, finished.error) == ("before_step", "look", 0.25, None)


def test_every_point_has_its_moment() -> None:
    # TH-12
    points = ("before_step", "after_step", "before_tool_call", "after_tool_call", "on_reasoning_event")
    session = hooked(*points, signals=HOOK, stop_when=[StopCondition(hook=HOOK)])
    session.answer_hook()
    parts = [ReasoningPart(text="hm", provider="p", data={"kind": "signature", "s": 1}), TextPart("I add")]
    message = session.model_reply("", [call("add"), call("sub")]).message
    assert message is not None
    assert not isinstance(message.content, str)
    session.answer(message=Message(role="assistant", content=[*parts, *message.content]))
    assert session.hook_task.arguments["events"] == [
        {"kind": "signature", "provider": "p", "text": "hm", "data": {"kind": "signature", "s": 1}}
    ]
    for _ in range(3):
        session.answer_hook()
    session.finish_call(1)
    session.finish_call(0)
    for _ in range(3):
        session.answer_hook()
    assert session.hook_task.hook == "stop_when"
    session.answer_hook()
    session.answer_hook()
    session.answer("done")
    session.answer_hook()
    session.answer_hook()
    assert session.event_types()[-1] == "turn.finished"
    assert points_called(session) == [
        ("before_step", "1.before_step.0"),
        ("on_reasoning_event", "1.on_reasoning_event.0"),
        ("before_tool_call", "1.before_tool_call.0"),
        ("before_tool_call", "1.before_tool_call.1"),
        (None, "1.0"),
        (None, "1.1"),
        ("after_tool_call", "1.after_tool_call.0"),
        ("after_tool_call", "1.after_tool_call.1"),
        ("after_step", "1.after_step.0"),
        ("stop_when", "1.stop_when.0"),
        ("before_step", "2.before_step.0"),
        ("after_step", "2.after_step.0"),
        ("signals", "2.signals.0"),
    ]


def test_without_reasoning_its_hook_is_not_called() -> None:
    session = hooked("on_reasoning_event")
    session.answer("no thoughts")
    assert session.tool_tasks == []
    assert session.event_types()[-1] == "turn.finished"


def test_after_step_is_told_what_the_step_was() -> None:
    session = with_calls("after_step", names=("add",))
    session.finish_call(0)
    assert session.hook_task.arguments == {
        "step_number": 1,
        "first_message": 1,
        "end_message": 3,
        "finish_reason": "tool_calls",
        "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
    }
    session.answer_hook({"whatever": 1})
    assert session.model_task.step_number == 2


# ---- before a step


def test_injected_messages_are_for_this_call_alone_and_come_before_steering() -> None:
    # TH-12
    session = hooked("before_step")
    session.answer_hook()
    session.steer("steering")
    session.answer("first")
    session.answer_hook({"inject_messages": [{"role": "system", "content": "injected"}]})
    task = session.model_task
    assert task.injected == [Message(role="system", content="injected")]
    assert texts(session.request_of(task)) == [
        ("user", "hello"),
        ("assistant", "first"),
        ("system", "injected"),
        ("user", "steering"),
    ]
    assert "injected" not in [message.text for message in session.transcript]
    session.fail_model()
    session.fire_timer()
    assert session.model_task.injected == task.injected
    session.steer("more")
    session.answer("second")
    session.answer_hook()
    assert session.model_task.injected == []
    assert session.model_task.inject_at == 0


@pytest.mark.parametrize(
    ("decision", "problem"),
    [
        ({"inject_messages": [{"role": "user", "content": "x"}] * (INJECTED_MAX + 1)}, "51 messages"),
        ({"inject_messages": [{"role": "tool", "content": "x"}]}, "holds no result"),
        ({"inject_messages": "x"}, "array"),
        ({"inject_messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
        ([], "array"),
    ],
)
def test_injections_that_do_not_fit_fail_the_turn(decision: Any, problem: str) -> None:
    session = hooked("before_step")
    session.answer_hook(decision)
    failed = session.events()[-1]
    assert failed.error_type == "hook_failed"
    assert "'look' (before_step)" in failed.error
    assert problem in failed.error
    assert session.model_tasks == []


def test_a_hook_may_stop_the_turn_before_its_first_model_call() -> None:
    session = hooked("before_step")
    steering_id = session.steer()
    session.answer_hook({"stop": True, "stop_reason": "budget"})
    finished = session.events()[-1]
    termination = finished.result.termination
    assert (finished.type, termination.kind, termination.reason) == ("turn.finished", "hook_stop", "budget")
    assert (termination.provider_finish_reason, termination.final_step_number) == ("stop", 0)
    assert session.model_tasks == []
    assert "step.finished" not in session.event_types()
    assert session.events(None, "steering.dropped")[0].steering_id == steering_id


def test_steering_that_was_claimed_stays_claimed_when_a_hook_stops_the_turn() -> None:
    session = hooked("before_step")
    session.answer_hook()
    session.steer("more")
    session.answer("first")
    session.answer_hook({"stop": True})
    termination = session.events()[-1].result.termination
    assert (termination.kind, termination.final_step_number) == ("hook_stop", 1)
    assert session.event_types().count("steering.applied") == 1
    assert "steering.dropped" not in session.event_types()


# ---- before a call


def test_hooks_of_all_calls_come_before_any_call_runs() -> None:
    session = with_calls("before_tool_call")
    assert session.hook_task.arguments["tool_call"] == {"id": "id_add", "name": "add", "arguments": {"x": 1}}
    session.answer_hook()
    assert session.hook_task.arguments["tool_call"]["id"] == "id_sub"
    assert [task for task in session.tool_tasks if task.hook is None] == []
    session.answer_hook()
    assert [task.tool for task in session.tool_tasks if task.hook is None] == ["add", "sub"]


def test_a_hook_blocks_a_call_and_its_siblings_run() -> None:
    session = with_calls("before_tool_call")
    session.answer_hook({"block": True, "reason": "not today"})
    session.answer_hook()
    session.finish_call(1, 2)
    assert session.result_texts() == ["Error: not executed (not today)", 2]
    executions = [event.index for event in session.events(None, "tool_execution.started", "tool_execution.finished")]
    assert executions == [1, 1]
    session.answer("done")
    assert session.events()[-1].result.termination.last_tool_error == "Error: not executed (not today)"


def test_a_blocked_call_without_a_reason_says_who_blocked_it() -> None:
    session = with_calls("before_tool_call", names=("add",))
    session.answer_hook({"block": True})
    assert session.result_texts() == ["Error: not executed (a hook blocked the call)"]


def test_changed_arguments_are_what_runs_and_the_history_keeps_what_the_model_said() -> None:
    session = with_calls("before_tool_call", names=("add",))
    session.answer_hook({"arguments": {"x": 2}})
    assert session.tool_task(0).arguments == {"x": 2}
    assert session.transcript[1].tool_calls[0].arguments == {"x": 1}


def test_a_person_is_asked_about_the_changed_arguments() -> None:
    agent = AgentSpec(
        name="agent",
        model="scripted:x",
        hooks={"before_tool_call": HOOK},
        approvals={"add": Approval(mode="always")},
    )
    session = Session(agent, TOOLS)
    session.start()
    session.answer("", [call("add", "c0", x=1)])
    session.answer_hook({"arguments": {"x": 2}})
    assert session.events(None, "approval.requested")[0].tool_call.arguments == {"x": 2}


@pytest.mark.parametrize(
    ("decision", "result"),
    [
        ({"has_result": True, "result": [1]}, ToolResult(tool_call_id="id_add", tool_name="add", result=[1])),
        ({"has_result": True, "result": None}, ToolResult(tool_call_id="id_add", tool_name="add")),
        (
            {"has_result": True, "result": "no", "is_error": True},
            ToolResult(tool_call_id="id_add", tool_name="add", result="no", is_error=True),
        ),
    ],
)
def test_a_hook_answers_in_a_calls_place(decision: dict[str, Any], result: ToolResult) -> None:
    session = with_calls("before_tool_call", names=("add",))
    session.answer_hook(decision)
    assert session.results() == [result]
    assert [task for task in session.tool_tasks if task.hook is None] == []
    assert session.model_task.step_number == 2


def test_a_call_that_is_refused_anyway_has_no_hook() -> None:
    session = with_calls("before_tool_call", names=("unknown",))
    assert session.tool_tasks == []


# ---- after a call


def test_a_changed_result_is_what_the_model_and_the_event_see() -> None:
    session = with_calls("after_tool_call")
    session.finish_call(1, "two")
    session.finish_call(0, "one")
    event = session.hook_task.arguments
    assert event["tool_result"] == {"tool_call_id": "id_add", "tool_name": "add", "result": "one"}
    session.answer_hook({"has_result": True, "result": "ONE"})
    session.answer_hook({"has_result": True, "result": None, "is_error": True})
    assert session.results() == [
        ToolResult(tool_call_id="id_add", tool_name="add", result="ONE"),
        ToolResult(tool_call_id="id_sub", tool_name="sub", is_error=True),
    ]
    assert [event.tool_result.result for event in session.events(None, "tool_result")] == ["ONE", None]
    assert [event.tool_result.result for event in session.events(None, "tool_execution.finished")] == ["two", "one"]


def test_a_hook_may_make_an_error_of_a_result_and_the_other_way_round() -> None:
    session = with_calls("after_tool_call")
    session.finish_call(0, "one")
    wrong = ToolResult(tool_call_id="id_sub", tool_name="sub", result="Error: no", is_error=True)
    session.finish_call(1, result=wrong)
    session.answer_hook({"is_error": True})
    session.answer_hook({"is_error": False})
    assert [result.is_error for result in session.results()] == [True, False]


def test_the_first_hook_that_ends_the_turn_wins_and_beats_stop_conditions() -> None:
    session = with_calls("after_tool_call", stop_when=[StopCondition(tool="add"), StopCondition(hook=HOOK)])
    session.finish_call(0)
    session.finish_call(1)
    session.answer_hook({"terminate": True, "terminate_reason": "found"})
    session.answer_hook({"terminate": True, "terminate_reason": "too late"})
    finished = session.events()[-1]
    termination = finished.result.termination
    assert (finished.type, termination.kind) == ("turn.finished", "tool_terminated")
    assert (termination.tool_name, termination.reason, termination.stop_condition) == ("add", "found", None)
    assert len(session.results()) == 2
    assert not [task for task in session.tool_tasks if task.hook == "stop_when"]


def test_a_hook_that_ends_the_turn_beats_the_guard_against_repeated_errors() -> None:
    session = hooked("after_tool_call", repeated_errors_max=1)
    session.answer("", [call("add")])
    session.finish_call(0, result=ToolResult(tool_call_id="", tool_name="", result="Error", is_error=True))
    session.answer_hook({"terminate": True})
    assert session.events()[-1].result.termination.kind == "tool_terminated"


def test_blocked_calls_have_their_hook_behind_too() -> None:
    session = with_calls("before_tool_call", "after_tool_call", names=("add",))
    session.answer_hook({"block": True})
    assert session.hook_task.hook == "after_tool_call"


# ---- failures and losses


@pytest.mark.parametrize(
    "point", ["before_step", "after_step", "before_tool_call", "after_tool_call", "on_reasoning_event"]
)
def test_a_hook_that_fails_fails_the_turn_with_its_name(point: str) -> None:
    # TH-12
    session = hooked(point)
    if point != "before_step":
        session.answer(message=Message(role="assistant", content=[ReasoningPart(text="hm"), ToolCallPart(call("add"))]))
    if point in ("after_step", "after_tool_call"):
        session.finish_call(0)
    session.fail_hook("ValueError: no")
    failed = session.events()[-1]
    assert failed.error == f"the hook 'look' ({point}) failed: ValueError: no"
    assert (failed.error_type, failed.termination.kind) == ("hook_failed", "failed")
    assert session.events(None, "hook.finished")[-1].error == "ValueError: no"
    session.start("again")
    assert session.state.turn is not None


def test_a_hook_without_a_result_fails() -> None:
    session = hooked("before_step")
    session.answer_hook(result=None)
    assert "it gave no result" in session.events()[-1].error


def test_a_lost_hook_runs_again_and_only_the_newest_attempt_counts() -> None:
    # TH-12
    session = hooked("before_step")
    first = session.hook_task
    session.lose(first)
    assert (session.hook_task.call, session.hook_task.attempt) == (first.call, 2)
    session.lose(first)
    assert session.counters == {"stale_loss": 1}
    session.answer_hook(attempt=1, call=first.call)
    assert session.model_tasks == []
    session.answer_hook()
    assert len(session.model_tasks) == 1
    session.answer_hook()
    assert session.counters == {"stale_loss": 1, "stale_tool_reply": 2}


def test_a_hook_that_is_always_lost_fails_the_turn() -> None:
    session = hooked("before_step")
    for _ in range(3):
        session.lose(session.hook_task)
    assert "lost with its worker 3 times (TURNMILL_MAX_ATTEMPTS)" in session.events()[-1].error


def test_an_overdue_hook_fails_the_turn() -> None:
    session = hooked("before_step")
    session.fire_timer()
    assert "no answer within 30 s" in session.events()[-1].error


def test_a_hook_that_nobody_takes_fails_the_turn_and_says_what_to_start() -> None:
    session = hooked("before_step")
    address = {"session_id": "session", "turn_id": "turn-1", "call": session.hook_task.call, "attempt": 1}
    session.send(CallWaiting(**address))  # type: ignore[arg-type]
    assert session.counters == {"stale_finding": 1}
    session.send(CallWaiting(**address, expired=True))  # type: ignore[arg-type]
    assert (
        "no worker took it from the queue 'hooks' within 10 s: start `turnmill worker tools"
        in session.events()[-1].error
    )


def test_too_many_signals_are_refused() -> None:
    session = Session(AgentSpec(name="agent", model="scripted:x", signals=HOOK))
    session.start()
    session.answer("done")
    session.answer_hook({"signals": [1] * (SIGNALS_MAX + 1)})
    assert f"{SIGNALS_MAX + 1} signals" in session.events()[-1].error
