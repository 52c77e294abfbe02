"""Every start that is told has exactly one end: with the real machine, in every outcome, also across coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.machine import SESSION, Session, call
from turnmill.protocol.content import Cost, ErrorInfo, ToolResult, Usage
from turnmill.protocol.errors import ConfigurationError, DefinitionError, Superseded
from turnmill.protocol.events import ReasoningDelta
from turnmill.protocol.messages import (
    AbortTurn,
    ApprovalDecision,
    DecideApprovals,
    DeleteSession,
    ModelReply,
    ModelTask,
    ResumeTurn,
    ToolReply,
    ToolTask,
)
from turnmill.protocol.settings import load_settings
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, RetryPolicy, ToolSpec
from turnmill.protocol.telemetry import TELEMETRY, Telemetry, TelemetryEvent
from turnmill.runtime.machine import Input
from turnmill.runtime.store import SessionCommit
from turnmill.runtime.telemetry import RuntimeTelemetry, current_trace, start_telemetry, subscribe
from turnmill.workers.telemetry import observed

TOOLS = [
    ToolSpec(name="plain"),
    ToolSpec(name="again", idempotent=True, max_attempts=3),
    ToolSpec(name="host", kind="host"),
    ToolSpec(name="asked", approval=Approval(mode="always")),
]
HOOKED = AgentSpec(
    name="agent",
    model="scripted:x",
    hooks={"before_step": HookSpec(name="inject"), "after_tool_call": HookSpec(name="look")},
)
METADATA = {"conversation": "c-1"}
TRACE = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}


class Told(Session):
    """A session whose commits are told. With `takes_over` each commit is another coordinator's, which knows nothing."""

    def __init__(self, *arguments: Any, takes_over: bool = False, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.told: list[TelemetryEvent] = []
        self.takes_over = takes_over
        self.telemetry = Telemetry()
        self.telemetry.subscribe(self.told.append)
        self.coordinator = RuntimeTelemetry(self.telemetry)

    def send(self, message: Input) -> Any:
        before = self.state
        decision = super().send(message)
        if decision.state is self.state:  # else the store has refused it
            state = None if decision.discarded is not None else decision.state
            commit = SessionCommit(SESSION, 1, state, [], decision.effects, None, None, before=before)
            if self.takes_over:
                self.coordinator = RuntimeTelemetry(self.telemetry)
            self.coordinator.committed([commit], self.now_ms)
        return decision

    def names(self, kind: str = "") -> list[str]:
        return [event.name for event in self.told if kind in ("", event.kind)]

    def newest(self, kind: str) -> TelemetryEvent:
        return next(event for event in reversed(self.told) if event.kind == kind)

    def answer_hook(self, **decision: Any) -> None:
        task = self.tool_tasks[-1]
        assert task.hook is not None
        result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result=decision)
        self.send(task.answer(ToolReply, result=result, duration_seconds=0.1))

    def abort(self, turn_id: str | None = None) -> None:
        self.send(AbortTurn(session_id=SESSION, turn_id=turn_id or self.turn_id, reason="enough"))


def open_spans(events: list[TelemetryEvent]) -> set[Any]:
    """What has started and not ended; objects to a second start, to an end without a start and to a bare end."""
    found: set[Any] = set()
    for event in events:
        key = event.kind, event.turn_id, event.call, event.attempt if event.kind in ("tool", "hook") else 0
        if event.is_start:
            assert key not in found, f"a second start: {event}"
            found.add(key)
        elif event.kind != "reasoning":
            assert event.is_end and event.duration_seconds is not None and event.duration_seconds >= 0
            assert key in found, f"an end without a start: {event}"
            found.remove(key)
    return found


def test_finished(session: Callable[..., Told]) -> None:  # LC-13
    told = session()
    told.start(metadata=METADATA, trace=TRACE)
    told.pass_time(1)
    told.answer(calls=[call("plain", x=1)], cost=Cost(total=Decimal("0.25")))
    told.pass_time(2)
    told.finish_call(0)
    told.pass_time(1)
    told.answer("done")
    assert told.names() == [
        "turn.start",
        "step.start",
        "tool.start",
        "tool.stop",
        "step.stop",
        "step.start",
        "step.stop",
        "turn.stop",
    ]
    assert open_spans(told.told) == set()
    assert {event.turn_id for event in told.told} == {"turn-1"}
    assert all(event.metadata == METADATA and event.trace == TRACE and event.agent_id == "agent" for event in told.told)
    end = told.newest("turn")
    assert (end.status, end.duration_seconds, end.details["outcome"], end.details["steps"]) == (
        "ok",
        4.0,
        "finished",
        2,
    )
    assert end.usage == Usage(input_tokens=20, output_tokens=10, total_tokens=30)


def test_a_step_s_cost_is_told_as_it_ends(session: Callable[..., Told]) -> None:  # LC-13
    told = session()
    told.start()
    told.answer(calls=[call("plain")], cost=Cost(total=Decimal("0.25")))
    assert "step.stop" not in told.names()
    told.finish_call(0)
    step = next(event for event in told.told if event.name == "step.stop")
    assert step.cost == Cost(total=Decimal("0.25")) and step.usage is not None and step.step == 1
    assert step.details["tool_calls"] == 1
    assert "turn.stop" not in told.names()


def test_a_call_tells_its_arguments_and_its_result() -> None:
    told = Told(tools=TOOLS)
    told.start()
    told.answer(calls=[call("plain", "id-1", x=1)])
    told.pass_time(3)
    told.finish_call(0, {"found": 7})
    start, end = [event for event in told.told if event.kind == "tool"]
    assert (start.subject, start.tool_call_id, start.call, start.step) == ("plain", "id-1", "1.0", 1)
    assert start.details["arguments"] == {"x": 1}
    assert (end.status, end.duration_seconds, end.details["run_seconds"]) == ("ok", 3.0, 0.25)
    assert end.details["result"] == {"found": 7}


def test_failed_in_mid_step(session: Callable[..., Told]) -> None:  # LC-13
    told = session(AgentSpec(name="agent", model="scripted:x", retry=RetryPolicy(max_attempts=1)))
    told.start(metadata=METADATA)
    told.fail_model()
    assert told.names() == ["turn.start", "step.start", "step.exception", "turn.exception"]
    end = told.newest("turn")
    assert end.status == "error" and end.error is not None and end.error.kind == "provider_error"
    assert end.metadata == METADATA


def test_a_provider_call_that_is_repeated_leaves_one_step(session: Callable[..., Told]) -> None:
    told = session()
    told.start()
    told.fail_model()
    told.fire_timer()
    told.lose(told.model_task)
    told.answer("done")
    assert told.names() == ["turn.start", "step.start", "step.stop", "turn.stop"]
    assert told.newest("step").details["attempts"] == 3


def test_aborted_while_tools_run(session: Callable[..., Told]) -> None:  # LC-13
    told = session()
    told.start()
    told.answer(calls=[call("plain", "a"), call("again", "b")])
    told.finish_call(0)
    told.abort()
    told.fire_timer()
    assert open_spans(told.told) == set()
    assert told.names("tool") == ["tool.start", "tool.start", "tool.stop", "tool.exception"]
    assert [told.newest(kind).status for kind in ("tool", "step", "turn")] == ["halted"] * 3
    assert told.names()[-2:] == ["step.exception", "turn.exception"]
    assert told.newest("turn").details["outcome"] == "aborted"


def test_suspended_and_resumed(session: Callable[..., Told]) -> None:  # LC-13
    told = session()
    told.start(metadata=METADATA)
    told.pass_time(1)
    told.answer(calls=[call("plain", "a"), call("host", "b")])
    told.finish_call(0)
    assert open_spans(told.told) == set(), "nothing is open while a turn waits for its host"
    rest = told.newest("turn")
    assert (rest.name, rest.status, rest.details["outcome"]) == ("turn.stop", "halted", "suspended")
    told.pass_time(1000)
    told.send(
        ResumeTurn(
            session_id=SESSION,
            turn_id="turn-1",
            request_id="r",
            tool_results=[ToolResult(tool_call_id="b", tool_name="host", result=1)],
        )
    )
    told.pass_time(2)
    told.answer("done")
    assert open_spans(told.told) == set()
    assert told.names("turn") == ["turn.start", "turn.stop", "turn.start", "turn.stop"]
    assert told.names("step") == ["step.start", "step.stop"] * 3
    assert told.names("tool") == ["tool.start", "tool.stop"] * 2
    end = told.newest("turn")
    if not told.takes_over:  # whoever took over does not know when it was resumed
        assert end.duration_seconds == 2.0, "what the host took is not the turn's time"
    assert end.at - end.started_at == pytest.approx(1003)
    assert end.metadata == METADATA


def test_stopped_while_suspended(session: Callable[..., Told]) -> None:
    told = session()
    told.start()
    told.answer(calls=[call("host")])
    told.abort()
    assert open_spans(told.told) == set()
    assert told.names("turn") == ["turn.start", "turn.stop", "turn.start", "turn.exception"]
    assert told.newest("turn").details["outcome"] == "aborted"


@pytest.mark.parametrize("approved", [True, False])
def test_a_call_that_waits_for_approval(session: Callable[..., Told], approved: bool) -> None:
    told = session()
    told.start()
    told.answer(calls=[call("asked", "a")])
    assert open_spans(told.told) == set()
    decisions = [ApprovalDecision(tool_call_id="a", approved=approved)]
    told.send(DecideApprovals(session_id=SESSION, turn_id="turn-1", request_id="r", decisions=decisions))
    if approved:
        told.finish_call(0)
    told.answer("done")
    assert open_spans(told.told) == set()
    assert told.names("tool") == ["tool.start", "tool.stop"]
    assert told.newest("tool").status == ("ok" if approved else "error")


def test_attempts_at_a_call_are_told_apart(session: Callable[..., Told]) -> None:  # LC-13
    told = session()
    told.start()
    told.answer(calls=[call("again")])
    told.pass_time(1)
    told.retry_call(0)
    assert open_spans([event for event in told.told if event.kind == "tool"]) == set(), "it waits, nothing runs"
    told.fire_timer()
    told.lose(told.tool_task(0))
    told.finish_call(0)
    told.answer("done")
    assert open_spans(told.told) == set()
    assert told.names("tool") == ["tool.start", "tool.exception"] * 2 + ["tool.start", "tool.stop"]
    assert [event.attempt for event in told.told if event.kind == "tool"] == [1, 1, 2, 2, 3, 3]


def test_lost_and_late_calls_have_an_end(session: Callable[..., Told]) -> None:  # LC-13
    told = session()
    told.start()
    told.answer(calls=[call("plain", "a"), call("plain", "b"), call("plain", "c")])
    told.lose(told.tool_task(0))
    told.wait_for_worker(1, expired=True)
    while told.model_task.step_number == 1:
        told.fire_timer()
    assert told.names("tool") == ["tool.start"] * 3 + ["tool.stop"] * 3
    assert {event.status for event in told.told if event.name == "tool.stop"} == {"error"}


@pytest.mark.parametrize(("name", "problem"), [("missing", None), ("plain", "no JSON")])
def test_a_call_that_must_not_run_is_told_as_one_that_failed(name: str, problem: str | None) -> None:
    told = Told(tools=TOOLS)
    told.start()
    told.answer(calls=[call(name, error=problem)])
    start, end = [event for event in told.told if event.kind == "tool"]
    assert (start.name, end.name, end.status, end.details["executed"]) == ("tool.start", "tool.stop", "error", False)


def test_hooks(session: Callable[..., Told]) -> None:
    told = session(HOOKED)
    told.start()
    told.answer_hook()
    told.answer(calls=[call("plain", "a")])
    told.finish_call(0)
    told.answer_hook()
    told.lose(told.tool_tasks[-1])  # the second step's first hook
    told.answer_hook(stop=True)
    assert open_spans(told.told) == set()
    ends = [(event.subject, event.name) for event in told.told if event.kind == "hook" and event.is_end]
    assert ends == [
        ("inject", "hook.stop"),
        ("look", "hook.stop"),
        ("inject", "hook.exception"),
        ("inject", "hook.stop"),
    ]
    assert told.names()[-2:] == ["step.stop", "turn.stop"]
    assert [told.newest("step").status, told.newest("turn").status] == ["halted", "ok"]


def test_a_hook_that_fails_or_is_stopped(session: Callable[..., Told]) -> None:
    for outcome in ("failed", "aborted"):
        told = session(HOOKED)
        told.start()
        if outcome == "failed":
            error = ErrorInfo(kind="hook_failed", message="kaboom")
            told.send(told.tool_tasks[-1].answer(ToolReply, error=error))
        else:
            told.abort()
        assert open_spans(told.told) == set()
        assert told.names("hook") == ["hook.start", "hook.exception"]
        assert told.newest("hook").status == ("error" if outcome == "failed" else "halted")


def test_a_refused_turn_is_told(session: Callable[..., Told]) -> None:
    told = session()
    told.start(problem=ErrorInfo(kind="unknown_agent", message="?"))
    assert told.names() == ["turn.start", "turn.exception"]
    assert told.newest("turn").details["refused"] and told.newest("turn").agent_id == "agent"


def test_queued_turns_keep_their_metadata(session: Callable[..., Told]) -> None:
    told = session()
    told.start()
    told.start(metadata=METADATA)
    told.start(metadata={"conversation": "c-2"})
    told.abort("turn-3")
    assert told.newest("turn").metadata == {"conversation": "c-2"}
    told.answer("first")
    told.answer("second")
    assert open_spans(told.told) == set()
    assert told.newest("turn").turn_id == "turn-2" and told.newest("turn").metadata == METADATA


def test_a_deleted_session_ends_its_turn(session: Callable[..., Told]) -> None:
    told = session()
    told.start()
    told.answer(calls=[call("plain")])
    told.send(DeleteSession(session_id=SESSION, request_id="r"))
    if told.state.turn is not None:
        told.fire_timer()
    assert open_spans(told.told) == set()


@pytest.mark.parametrize("takes_over", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_course_of_events(takes_over: bool, data: st.DataObject) -> None:  # LC-13
    """Whatever happens, in whatever order, and whoever coordinates."""
    told = Told(data.draw(st.sampled_from([AgentSpec(name="agent", model="scripted:x"), HOOKED])), TOOLS)
    told.takes_over = takes_over
    told.start()
    for _ in range(data.draw(st.integers(0, 12))):
        _something_happens(told, data)
    while told.state.turn is not None:
        told.abort(told.state.turn.turn_id)
        if told.state.turn is not None and told.timer_ms is not None:
            told.fire_timer()
    assert open_spans(told.told) == set()


def _something_happens(told: Told, data: st.DataObject) -> None:
    turn = told.state.turn
    if turn is None:
        told.start()
        return
    tools = [task for task in told.tool_tasks if task.turn_id == turn.turn_id]
    task: Any = data.draw(st.sampled_from([*tools[-3:], told.model_task])) if told.model_tasks else tools[-1]
    error = data.draw(
        st.sampled_from([None, None, ErrorInfo(kind="x", message="?", retryable=data.draw(st.booleans()))])
    )
    what = data.draw(st.sampled_from(["reply", "reply", "reply", "reply", "lose", "timer", "abort", "resume", "time"]))
    if what == "time":
        told.pass_time(1)
    elif what == "timer" and told.timer_ms is not None:
        told.fire_timer()
    elif what == "abort":
        told.abort(turn.turn_id)
    elif what == "resume":
        results = [ToolResult(tool_call_id="host", tool_name="host", result=1)]
        told.send(ResumeTurn(session_id=SESSION, turn_id=turn.turn_id, request_id="r", tool_results=results))
        decisions = [ApprovalDecision(tool_call_id="asked", approved=data.draw(st.booleans()))]
        told.send(DecideApprovals(session_id=SESSION, turn_id=turn.turn_id, request_id="r", decisions=decisions))
    elif what == "lose":
        told.lose(task)
    elif isinstance(task, ToolTask):
        result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result={})
        told.send(task.answer(ToolReply, result=None if error else result, error=error))
    else:
        names = data.draw(
            st.lists(st.sampled_from(["plain", "again", "host", "asked", "missing"]), max_size=3, unique=True)
        )
        reply = told.model_reply("text", [call(name, name) for name in names])
        failed = task.answer(ModelReply, error=error)
        told.send(failed if error else task.answer(ModelReply, message=reply.message, usage=reply.usage))


@pytest.fixture(params=[False, True], ids=["one coordinator", "another one for each commit"])
def session(request: pytest.FixtureRequest) -> Callable[..., Told]:
    def make(agent: AgentSpec | None = None) -> Told:
        return Told(agent or AgentSpec(name="agent", model="scripted:x"), TOOLS, takes_over=request.param)

    return make


def test_turns_out_of_sight_are_dropped_and_adopted_again() -> None:
    first = Told(tools=TOOLS)
    first.coordinator = RuntimeTelemetry(first.telemetry, turns_max=1)
    first.start(turn_id="one")
    second = Told(tools=TOOLS)
    second.coordinator = first.coordinator
    second.start(turn_id="two")  # takes the one place
    first.answer(calls=[call("plain")])
    first.finish_call(0)
    first.answer("done")
    second.answer("done")
    assert open_spans(first.told) == set()


# ---- workers


@pytest.fixture
def heard() -> Any:
    events: list[TelemetryEvent] = []
    unsubscribe = subscribe(events.append)
    yield events
    unsubscribe()


MODEL_TASK = ModelTask(
    session_id="s",
    turn_id="t",
    call="1",
    attempt=2,
    agent_id="agent",
    plan="p",
    step_number=1,
    messages=1,
    deadline_ms=0,
    metadata=METADATA,
    trace=TRACE,
)
TOOL_TASK = ToolTask(
    session_id="s",
    turn_id="t",
    call="1.0",
    attempt=1,
    tool="add",
    tool_call_id="id-1",
    arguments={"a": 1},
    agent_id="agent",
    step_number=1,
    idempotency_key="k",
    timeout_seconds=1,
    start_by_ms=0,
    deadline_ms=0,
    metadata=METADATA,
)


def test_a_model_call(heard: list[TelemetryEvent]) -> None:  # LC-13
    usage, cost = Usage(input_tokens=3), Cost(total=Decimal(1))
    with observed("model", MODEL_TASK) as span:
        span.subject = "scripted:x"
        span.live(ReasoningDelta(kind="delta", text="let me compute"))
        span.reply(MODEL_TASK.answer(ModelReply, usage=usage, cost=cost, finish_reason="stop", model="x-1"))
    assert [event.name for event in heard] == ["model.start", "reasoning.delta", "model.stop"]
    assert all(event.metadata == METADATA and event.trace == TRACE and event.turn_id == "t" for event in heard)
    assert heard[1].details == {"text": "let me compute", "kind": "delta"}
    end = heard[-1]
    assert (end.status, end.usage, end.cost, end.subject, end.attempt) == ("ok", usage, cost, "scripted:x", 2)
    assert end.details["finish_reason"] == "stop" and end.details["response_model"] == "x-1"
    assert end.details["time_to_first_chunk_seconds"] >= 0


@pytest.mark.parametrize(("kind", "status"), [("rate_limited", "error"), ("aborted", "halted")])
def test_a_model_call_that_fails_or_is_stopped(heard: list[TelemetryEvent], kind: str, status: str) -> None:
    with observed("model", MODEL_TASK) as span:
        error = ErrorInfo(kind=kind, message="?")
        span.reply(MODEL_TASK.answer(ModelReply, error=error, usage=Usage(input_tokens=1)))
    assert [event.name for event in heard] == ["model.start", "model.exception"]
    assert (heard[-1].status, heard[-1].error, heard[-1].usage) == (status, error, Usage(input_tokens=1))


@pytest.mark.parametrize(
    ("raised", "status"),
    [(ValueError("kaboom"), "error"), (Superseded("late"), "halted"), (asyncio.CancelledError(), "halted")],
)
def test_what_raises_has_an_end_too(heard: list[TelemetryEvent], raised: BaseException, status: str) -> None:
    with pytest.raises(type(raised)), observed("tool", TOOL_TASK):
        raise raised
    assert [event.name for event in heard] == ["tool_run.start", "tool_run.exception"]
    assert heard[-1].status == status


def test_a_run_of_a_tool_and_of_a_hook(heard: list[TelemetryEvent]) -> None:
    with observed("tool", TOOL_TASK) as span:
        result = ToolResult(tool_call_id="id-1", tool_name="add", result="Error: no", is_error=True)
        span.reply(TOOL_TASK.answer(ToolReply, result=result))
    assert [event.name for event in heard] == ["tool_run.start", "tool_run.stop"]
    assert (heard[0].subject, heard[0].details, heard[1].status) == ("add", {"arguments": {"a": 1}}, "error")
    heard.clear()
    with observed("tool", ToolTask(**{**_fields(TOOL_TASK), "hook": "before_step"})):
        pass
    assert [event.name for event in heard] == ["hook_run.start", "hook_run.stop"]
    assert heard[0].details == {"point": "before_step"}


def _fields(task: ToolTask) -> dict[str, Any]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


# ---- subscribers


def test_a_callback_that_raises_disturbs_nobody(heard: list[TelemetryEvent]) -> None:
    def fail(_event: TelemetryEvent) -> None:
        raise RuntimeError("kaboom")

    first, second = subscribe(fail), subscribe(heard.append)
    with observed("tool", TOOL_TASK):
        pass
    first()
    second()
    assert [event.name for event in heard] == ["tool_run.start", "tool_run.start", "tool_run.stop", "tool_run.stop"]


def test_nobody_listens_nothing_is_built() -> None:
    assert not TELEMETRY.is_active and not RuntimeTelemetry().is_active
    with observed("tool", TOOL_TASK) as span:
        assert not span.is_active
        span.reply(TOOL_TASK.answer(ToolReply))
    unsubscribe = subscribe(print)
    assert RuntimeTelemetry().is_active
    unsubscribe()
    unsubscribe()
    assert not TELEMETRY.is_active


def test_what_is_no_plain_function_is_refused() -> None:
    async def asynchronous(_event: TelemetryEvent) -> None: ...

    with pytest.raises(DefinitionError, match="async"):
        subscribe(asynchronous)
    with pytest.raises(DefinitionError, match="not to a str"):
        subscribe("print")  # type: ignore[arg-type]


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNMILL_TELEMETRY", "builtins:print")
    assert load_settings().telemetry == "builtins:print"
    assert load_settings(telemetry="otel").telemetry == "otel"
    with pytest.raises(ConfigurationError, match="module:function"):
        load_settings(telemetry="everything")
    start_telemetry("none")()
    assert not TELEMETRY.is_active
    stop = start_telemetry("builtins:print")
    assert TELEMETRY.is_active
    stop()
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        start_telemetry("nowhere.to.be.found:function")
    with pytest.raises(ConfigurationError, match="not a function"):
        start_telemetry("builtins:__name__")


def test_without_a_span_there_is_no_trace() -> None:
    assert current_trace() == {}
