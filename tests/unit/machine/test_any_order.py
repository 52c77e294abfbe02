"""Whatever comes, in whatever order: the machine never raises, and no session is left that cannot go on.

Hypothesis plays clients, workers, clocks and losses at random: valid messages, repetitions, late ones and foreign ones.
`support.machine.Session` objects to every decision that breaks a rule (a history that providers refuse, work for a turn
that has ended, two ends, a live turn without a timer); what must hold over time is checked here.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.machine import PLAN, SESSION, Session
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
from turnmill.protocol.specs import AgentSpec, RetryPolicy, StopCondition, ToolSpec
from turnmill.runtime.machine import Limits
from turnmill.workers.providers.scripted import history_fault

TOOLS = [
    ToolSpec(name="plain"),
    ToolSpec(name="patient", max_attempts=3, timeout_seconds=5, start_timeout_seconds=1),
    ToolSpec(name="again", idempotent=True),
]
NAMES = st.sampled_from(["plain", "patient", "again", "missing"])
CALLS = st.lists(st.tuples(NAMES, st.sampled_from([None, None, None, "bad arguments"])), max_size=5)
AGENTS = st.builds(
    AgentSpec,
    name=st.just("agent"),
    model=st.just("scripted:x"),
    max_steps=st.integers(1, 4),
    on_limit=st.sampled_from(["error", "final_answer"]),
    stop_when=st.lists(
        st.sampled_from([StopCondition(steps=2), StopCondition(steps=3), StopCondition(tool="again")]), max_size=2
    ),
    tool_execution=st.sampled_from(["parallel", "sequential"]),
    tool_timeout_seconds=st.sampled_from([None, 2.0]),
    max_calls_per_step=st.sampled_from([2, 64]),
    retry=st.sampled_from([RetryPolicy(), RetryPolicy(max_attempts=1), RetryPolicy(max_attempts=5, backoff=1.0)]),
    model_timeout_seconds=st.sampled_from([3.0, 600.0]),
)
ERRORS = st.builds(
    ErrorInfo,
    kind=st.sampled_from(["provider_error", "rate_limited", "timeout"]),
    message=st.just("?"),
    retryable=st.booleans(),
    retry_after_seconds=st.sampled_from([None, 0.0, 40.0]),
)
WHERE = st.sampled_from(["1", "2", "1.0", "1.1", "2.0", "9.9", "", "x", "1.x", "1." + "9" * 30])


class AnyOrder(RuleBasedStateMachine):
    @initialize(agent=AGENTS, queued=st.integers(0, 3), losses=st.integers(1, 4))
    def begin(self, agent: AgentSpec, queued: int, losses: int) -> None:
        self.session = Session(agent, TOOLS, Limits(queued, losses))
        self.sent: list[Any] = []
        self.heard: set[Any] = set()
        self.calls_made = 0

    def send(self, message: Any) -> None:
        """Whatever a worker says is heard only for the newest attempt, and a result of an attempt only once."""
        self.sent.append(message)
        known = self._attempt(message) in self.heard or self._is_superseded(message)
        decision = self.session.send(message)
        if known:
            assert decision.discarded is not None, message
        elif decision.discarded is None and isinstance(message, ModelReply | ToolReply | DeliveryLost):
            self.heard.add(self._attempt(message))

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
    @rule(data=st.data(), calls=CALLS, text=st.sampled_from(["", "text"]))
    def answer(self, data: st.DataObject, calls: list[Any], text: str) -> None:
        task = self._task(data, ModelTask)
        made = []
        for name, error in calls:
            self.calls_made += 1
            made.append(ToolCall(id=f"id{self.calls_made}", name=name, error=error))
        reply = self.session.model_reply(text, made)
        self.send(self._for(reply, task))

    @precondition(lambda self: self.session.model_tasks)
    @rule(data=st.data(), error=ERRORS)
    def fail(self, data: st.DataObject, error: ErrorInfo) -> None:
        self.send(self._for(self.session.model_reply(message=None, error=error), self._task(data, ModelTask)))

    # --- tool workers

    @precondition(lambda self: self.session.tool_tasks)
    @rule(data=st.data(), error=st.none() | ERRORS, with_result=st.booleans())
    def finish_call(self, data: st.DataObject, error: ErrorInfo | None, with_result: bool) -> None:
        task = self._task(data, ToolTask)
        result = ToolResult(tool_call_id="whatever", tool_name="any", result=1) if with_result else None
        self.send(self._for(ToolReply(**_address(task), result=result, error=error), task))

    @precondition(lambda self: self.session.tool_tasks)
    @rule(data=st.data(), sequence=st.integers(0, 3))
    def progress(self, data: st.DataObject, sequence: int) -> None:
        self.send(ToolProgress(**_address(self._task(data, ToolTask)), sequence=sequence, message="on it"))

    # --- the coordinator's findings, the clock

    @precondition(lambda self: self.session.tasks)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.send(DeliveryLost(**_address(self._task(data, object))))

    @precondition(lambda self: self.session.tool_tasks)
    @rule(data=st.data(), expired=st.booleans())
    def wait_for_worker(self, data: st.DataObject, expired: bool) -> None:
        self.send(CallWaiting(**_address(self._task(data, ToolTask)), expired=expired))

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
        address: dict[str, Any] = {
            "session_id": SESSION, "turn_id": f"turn-{turn}", "call": where, "attempt": attempt,
        }  # fmt: skip
        message = Message(role="assistant", content="stray")
        for stray in (
            ModelReply(**address, message=message),
            ToolReply(**address),
            ToolProgress(**address, sequence=1, message="?"),
            CallWaiting(**address),
            DeliveryLost(**address),
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
        """Time alone ends every turn, and then the session works."""
        if not hasattr(self, "session"):
            return
        session = self.session
        for _ in range(2000):
            if session.state.turn is None:
                break
            session.fire_timer()
        assert session.state.turn is None, "a turn does not end by its timers"
        assert set(session.channels) == session.closed == set(session.records)
        assert history_fault(session.transcript) is None
        session.start("one more")
        session.answer("works")
        assert session.event_types()[-1] == "turn.finished"

    # --- helpers

    def _attempt(self, message: Any) -> Any:
        return message.turn_id, message.call, message.attempt

    def _is_superseded(self, message: Any) -> bool:
        attempts = [
            task.attempt for task in self.session.tasks if self._attempt(task)[:2] == self._attempt(message)[:2]
        ]
        return message.attempt < max(attempts)

    def _task(self, data: st.DataObject, kind: type) -> Any:
        """Mostly one of the newest tasks, else any of them: those are answered late, twice or out of order."""
        tasks = [task for task in self.session.tasks if isinstance(task, kind)]
        newest = [task for task in tasks if self.session.state.turn and task.turn_id == self.session.state.turn.turn_id]
        return data.draw(st.sampled_from(newest[-4:] or tasks) | st.sampled_from(tasks))

    def _for(self, message: Any, task: Any) -> Any:
        return type(message)(**{**_fields(message), **_address(task)})


def _address(task: Any) -> dict[str, Any]:
    return {"session_id": SESSION, "turn_id": task.turn_id, "call": task.call, "attempt": task.attempt}


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


AnyOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
