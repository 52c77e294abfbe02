"""Random schedules for the machine: clients, workers, clocks and losses, played by hypothesis.

`Schedule` plays what every turn has: starts, replies, progress, losses, timers, and whatever comes late, twice or from
elsewhere. `support.machine.Session` objects to every decision that breaks a rule; what must hold over time is checked
here. Tests derive from it and say which agents there are.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.machine import AGENT, PLAN, SESSION, Session, plan_of
from turnmill.protocol.content import ErrorInfo, Message, ToolCall, ToolResult
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.protocol.messages import (
    CallWaiting,
    DeliveryLost,
    ModelReply,
    ModelTask,
    TimerFired,
    ToolProgress,
    ToolReply,
    ToolTask,
)
from turnmill.workers.providers.scripted import history_fault

NAMES = ["plain", "patient", "again", "missing"]
ERRORS = st.builds(
    ErrorInfo,
    kind=st.sampled_from(["provider_error", "rate_limited", "timeout", "context_overflow"]),
    message=st.just("?"),
    retryable=st.booleans(),
    retry_after_seconds=st.sampled_from([None, 0.0, 40.0]),
)
WHERE = st.sampled_from(["1", "2", "1.0", "1.1", "2.0", "9.9", "", "x", "1.x", "1." + "9" * 30, "1.before_step.0"])


class Schedule(RuleBasedStateMachine):
    """A subclass's `initialize` rule sets `session`."""

    names = NAMES
    session: Session

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []
        self.heard: set[Any] = set()
        self.calls_made = 0

    def send(self, message: Any) -> None:
        """Whatever a worker says is heard only for the newest attempt, and a result of an attempt only once."""
        self.sent.append(message)
        known = attempt_of(message) in self.heard or self._is_superseded(message)
        decision = self.session.send(message)
        if known:
            assert decision.discarded is not None, message
        elif decision.discarded is None and isinstance(message, ModelReply | ToolReply | DeliveryLost):
            self.heard.add(attempt_of(message))

    # --- clients

    @rule(gone=st.booleans(), problem=st.sampled_from([None, None, ErrorInfo(kind="unknown_agent", message="?")]))
    def start(self, gone: bool, problem: ErrorInfo | None) -> None:
        self.session.start(plan_id="gone" if gone and problem is None else PLAN, problem=problem)

    @precondition(lambda self: self.session.records)
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(sorted(self.session.records)))
        before = self.session.transcript.copy()
        self.session.start("again", turn_id=known)
        assert self.session.transcript == before

    # --- LLM workers

    @precondition(lambda self: self.session.model_tasks)
    @rule(data=st.data(), text=st.sampled_from(["", "text"]))
    def answer(self, data: st.DataObject, text: str) -> None:
        task = self.task(data, ModelTask)
        names = st.lists(st.tuples(st.sampled_from(self.names), st.sampled_from([None] * 3 + ["bad"])), max_size=5)
        made = []
        for name, error in data.draw(names):
            self.calls_made += 1
            made.append(ToolCall(id=f"id{self.calls_made}", name=name, error=error))
        self.send(addressed(self.model_reply(data, task, text, made), task))

    def model_reply(self, data: st.DataObject, task: ModelTask, text: str, made: list[ToolCall]) -> ModelReply:
        return self.session.model_reply(text, made)

    @precondition(lambda self: self.session.model_tasks)
    @rule(data=st.data(), error=ERRORS)
    def fail(self, data: st.DataObject, error: ErrorInfo) -> None:
        task = self.task(data, ModelTask)
        self.send(addressed(self.session.model_reply(message=None, error=error), task))

    # --- tool workers

    @precondition(lambda self: self.session.tool_tasks)
    @rule(data=st.data(), error=st.none() | ERRORS, with_result=st.booleans())
    def finish_call(self, data: st.DataObject, error: ErrorInfo | None, with_result: bool) -> None:
        task = self.task(data, ToolTask)
        result = ToolResult(tool_call_id="whatever", tool_name="any", result=1) if with_result else None
        self.send(ToolReply(**address(task), result=result, error=error))

    @precondition(lambda self: self.session.tool_tasks)
    @rule(data=st.data(), sequence=st.integers(0, 3))
    def progress(self, data: st.DataObject, sequence: int) -> None:
        self.send(ToolProgress(**address(self.task(data, ToolTask)), sequence=sequence, message="on it"))

    # --- the coordinator's findings, the clock

    @precondition(lambda self: self.session.tasks)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.send(DeliveryLost(**address(self.task(data, object))))

    @precondition(lambda self: self.session.tool_tasks)
    @rule(data=st.data(), expired=st.booleans())
    def wait_for_worker(self, data: st.DataObject, expired: bool) -> None:
        self.send(CallWaiting(**address(self.task(data, ToolTask)), expired=expired))

    @rule(seconds=st.sampled_from([0, 1, 10, 400, 3600]))
    def pass_time(self, seconds: int) -> None:
        self.session.pass_time(seconds)

    @rule()
    def fire(self) -> None:
        self.session.send(TimerFired(session_id=SESSION))

    @precondition(lambda self: self.session.timer_ms is not None)
    @rule()
    def fire_when_due(self) -> None:
        self.session.fire_timer()

    # --- what nobody should send

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.send(data.draw(st.sampled_from(self.sent)))

    @rule(where=WHERE, attempt=st.integers(-1, 3), turn=st.integers(0, 4))
    def speak_out_of_turn(self, where: str, attempt: int, turn: int) -> None:
        place: dict[str, Any] = {
            "session_id": SESSION, "turn_id": f"turn-{turn}", "call": where, "attempt": attempt,
        }  # fmt: skip
        message = Message(role="assistant", content="stray")
        for stray in (
            ModelReply(**place, message=message),
            ToolReply(**place),
            ToolProgress(**place, sequence=1, message="?"),
            CallWaiting(**place),
            DeliveryLost(**place),
        ):
            self.session.send(stray)

    @rule()
    def lose_the_plan(self) -> None:
        plan = self.session.plans.pop(PLAN)
        self.fire()
        self.session.plans[PLAN] = plan

    # --- what must hold

    @invariant()
    def every_started_turn_has_at_most_one_end(self) -> None:
        for turn_id, events in self.session.channels.items():
            ends = sum(event.type in TERMINAL_EVENT_TYPES for event in events)
            assert ends == (turn_id in self.session.closed)

    @invariant()
    def every_call_has_at_most_one_result(self) -> None:
        ids = [result.tool_call_id for result in self.session.results()]
        assert len(ids) == len(set(ids))

    def teardown(self) -> None:
        """Time alone ends every turn but one that rests, and then the session works."""
        if not hasattr(self, "session"):
            return
        session = self.session
        for _ in range(3000):
            turn = session.state.turn
            if turn is None:
                break
            if session.timer_ms is None:
                assert turn.phase == "suspended"
                session.abort(turn_id=turn.turn_id)
            else:
                session.fire_timer()
        assert session.state.turn is None, "a turn does not end by its timers"
        assert set(session.channels) == session.closed == set(session.records)
        assert history_fault(session.transcript) is None
        session.plans[PLAN] = plan_of(AGENT)
        session.start("one more")
        session.answer("works")
        assert session.event_types()[-1] == "turn.finished"

    # --- helpers

    def _is_superseded(self, message: Any) -> bool:
        attempts = [task.attempt for task in self.session.tasks if attempt_of(task)[:2] == attempt_of(message)[:2]]
        return message.attempt < max(attempts)

    def task(self, data: st.DataObject, kind: type) -> Any:
        """Mostly one of the newest tasks, else any of them: those are answered late, twice or out of order."""
        tasks = [task for task in self.session.tasks if isinstance(task, kind)]
        newest = [task for task in tasks if self.session.state.turn and task.turn_id == self.session.state.turn.turn_id]
        return data.draw(st.sampled_from(newest[-4:] or tasks) | st.sampled_from(tasks))


def attempt_of(message: Any) -> Any:
    return message.turn_id, message.call, message.attempt


def address(task: Any) -> dict[str, Any]:
    return {"session_id": SESSION, "turn_id": task.turn_id, "call": task.call, "attempt": task.attempt}


def addressed(message: Any, task: Any) -> Any:
    """The message in the name of a task."""
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**{**values, **address(task)})
