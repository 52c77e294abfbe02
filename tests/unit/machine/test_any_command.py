"""Whatever clients, hosts, people, hooks and sub-turns say, at whatever moment: the same rules hold.

Agents with random features, and every command and finding there is, also repeated and with ids that mean nothing. Each
command is answered once for each time that it comes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from support.machine import PLAN, SESSION, Session, plan_of
from support.schedules import Schedule, address
from turnmill.protocol.content import ErrorInfo, Message, ReasoningPart, TextPart, ToolCall, ToolCallPart, ToolResult
from turnmill.protocol.messages import (
    AbortTurn,
    ApprovalDecision,
    CancelSteering,
    DecideApprovals,
    DeleteSession,
    HandOff,
    ModelReply,
    ModelTask,
    Parent,
    ResumeTurn,
    StartTurn,
    SteerTurn,
    SubTurnEnded,
    ToolReply,
)
from turnmill.protocol.specs import (
    AgentSpec,
    Approval,
    Compaction,
    HookSpec,
    OutputSpec,
    RetryPolicy,
    StopCondition,
    ToolSpec,
)
from turnmill.runtime.machine import Limits, Start, Transfer
from turnmill.runtime.transcripts import closed_length
from turnmill.workers.providers.scripted import history_fault

HOOK = HookSpec(name="hook", timeout_seconds=20, start_timeout_seconds=5)
POINTS = ["before_step", "after_step", "before_tool_call", "after_tool_call", "on_reasoning_event"]
ALWAYS = Approval(mode="always", timeout_seconds=100)
POLICY = Approval(mode="policy", policy=HOOK, timeout_seconds=3000)
TOOLS = [
    ToolSpec(name="plain"),
    ToolSpec(name="again", idempotent=True, max_attempts=2),
    ToolSpec(name="host", kind="host"),
    ToolSpec(name="pay", approval=ALWAYS),
    ToolSpec(name="careful_host", kind="host", approval=POLICY),
    ToolSpec(name="expert", kind="agent", timeout_seconds=100),
    ToolSpec(name="transfer", kind="handoff", agent="other"),
]
OTHER = AgentSpec(name="other", model="scripted:x", max_steps=3, hooks={"before_step": HOOK})
AGENTS = st.builds(
    AgentSpec,
    name=st.just("agent"),
    model=st.just("scripted:x"),
    max_steps=st.integers(1, 5),
    on_limit=st.sampled_from(["error", "final_answer"]),
    stop_when=st.lists(st.sampled_from([StopCondition(steps=4), StopCondition(hook=HOOK)]), max_size=2),
    tool_execution=st.sampled_from(["parallel", "sequential"]),
    retry=st.sampled_from([RetryPolicy(), RetryPolicy(max_attempts=1)]),
    hooks=st.one_of(
        st.just({}), st.sets(st.sampled_from(POINTS)).map(lambda points: dict.fromkeys(sorted(points), HOOK))
    ),
    signals=st.sampled_from([None, None, HOOK]),
    approvals=st.sampled_from([{}, {}, {"pay": Approval(), "plain": ALWAYS}, {"again": POLICY}]),
    mode=st.sampled_from(["auto", "auto", "auto", "single_exchange"]),
    late_steering=st.sampled_from(["step", "step", "drop"]),
    repeated_errors_max=st.sampled_from([None, 1, 3]),
    compaction=st.sampled_from([Compaction(), Compaction(trigger_tokens=1)]),
    output=st.sampled_from([None, None, OutputSpec(schema={}), OutputSpec(schema={}, repairs=0)]),
    turn_timeout_seconds=st.sampled_from([None, None, 300.0]),
    max_sub_turns=st.sampled_from([1, 20]),
    max_depth=st.sampled_from([0, 1, 4]),
)
PARENT = Parent(session_id="top", turn_id="top", call="1.0", attempt=1, depth=1)
ORPHAN = Message(role="assistant", content=[ToolCallPart(ToolCall(id="orphan", name="plain"))])
SAID = st.sampled_from([Message(role="user", content="said"), Message(role="system", content="said"), ORPHAN])
ON_BUSY = st.sampled_from(["queue", "queue", "reject", "steer", "interrupt"])
DECISIONS: dict[str, list[Any]] = {
    "before_step": [
        {},
        {"inject_messages": [{"role": "system", "content": "injected"}]},
        {"inject_messages": [{"role": "tool", "content": "broken"}]},
        {"stop": True, "stop_reason": "enough"},
    ],
    "after_step": [{}],
    "before_tool_call": [
        {},
        {"block": True, "reason": "no"},
        {"arguments": {"changed": 1}},
        {"has_result": True, "result": 7, "is_error": True},
    ],
    "after_tool_call": [{}, {"has_result": True, "result": "changed"}, {"is_error": True}, {"terminate": True}],
    "on_reasoning_event": [{}],
    "stop_when": [{}, {"stop": True, "name": "enough"}],
    "approval": [{"required": False}, {"required": True}, {}],
    "signals": [{"signals": [1]}, {"signals": 1}],
}


class AnyCommand(Schedule):
    names = [spec.name for spec in TOOLS] + ["missing"]  # not changed

    @initialize(agent=AGENTS, queued=st.integers(0, 3), losses=st.integers(1, 4))
    def begin(self, agent: AgentSpec, queued: int, losses: int) -> None:
        others = {"other": plan_of(OTHER, [ToolSpec(name="transfer", kind="handoff", agent="agent"), *TOOLS[:3]])}
        self.session = Session(agent, TOOLS, Limits(queued, losses), others=others)
        self.commands: list[Any] = []
        self.awaited: dict[str, int] = {}
        self.turns = 0
        self.session.start()

    def command(self, command: Any, request_id: str) -> None:
        """Send a command that asks for an answer."""
        self.commands.append((command, request_id))
        is_known = isinstance(command, Start) and command.command.turn_id in self.session.records
        state = self.session.state
        live = {queued.command.turn_id for queued in state.queue} | ({state.turn.turn_id} if state.turn else set())
        self.session.send(command)
        if not is_known or command.command.turn_id in live:
            self.awaited[request_id] = self.awaited.get(request_id, 0) + 1

    def new_id(self, kind: str) -> str:
        self.turns += 1
        return f"{kind}-{self.turns}"

    def turn_id(self, data: st.DataObject) -> str:
        state = self.session.state
        newest = [state.turn.turn_id] * 3 if state.turn else []
        newest += [queued.command.turn_id for queued in state.queue]
        return str(data.draw(st.sampled_from([*newest, *sorted(self.session.records)[-3:], "nobody"])))

    # --- commands

    @rule(data=st.data(), on_busy=ON_BUSY, answer=st.booleans(), said=SAID, is_child=st.booleans())
    def start_any(self, data: st.DataObject, on_busy: str, answer: bool, said: Message, is_child: bool) -> None:
        messages = [said] * data.draw(st.integers(1, 2))
        cuts = [index for index in range(len(self.session.transcript) + 1) if self._is_cut(index)]
        command = StartTurn(
            turn_id=self.new_id("start"),
            session_id=SESSION,
            agent="agent",
            messages=messages,
            on_busy=on_busy,  # type: ignore[arg-type]
            answer=answer,
            parent=PARENT if is_child else None,
            rewind_to=data.draw(st.sampled_from([None, None, *cuts])),
            deadline_ms=data.draw(st.sampled_from([None, None, self.session.now_ms + 50_000])),
        )
        if answer:
            self.command(Start(command, PLAN), command.turn_id)
        else:
            self.session.send(Start(command, PLAN))

    @rule(data=st.data(), said=SAID, mode=st.sampled_from(["steer", "steer", "queue"]))
    def steer(self, data: st.DataObject, said: Message, mode: str) -> None:
        steering_id, turn_id = self.new_id("steering"), self.turn_id(data)
        self.command(
            SteerTurn(session_id=SESSION, turn_id=turn_id, steering_id=steering_id, message=said, mode=mode),  # type: ignore[arg-type]
            steering_id,
        )

    @rule(data=st.data())
    def cancel_steering(self, data: st.DataObject) -> None:
        ids = [request_id for command, request_id in self.commands if isinstance(command, SteerTurn)][-4:]
        steering_id, request_id = data.draw(st.sampled_from([*ids, "nothing"])), self.new_id("request")
        values = {"session_id": SESSION, "turn_id": self.turn_id(data), "request_id": request_id}
        self.command(CancelSteering(**values, steering_id=steering_id), request_id)

    @rule(data=st.data(), reason=st.sampled_from([None, "enough"]))
    def abort(self, data: st.DataObject, reason: str | None) -> None:
        request_id = self.new_id("request")
        values = {"session_id": SESSION, "turn_id": self.turn_id(data), "request_id": request_id}
        self.command(AbortTurn(**values, reason=reason), request_id)

    @rule(data=st.data(), said=st.none() | SAID)
    def resume(self, data: st.DataObject, said: Message | None) -> None:
        request_id = self.new_id("request")
        results = [ToolResult(tool_call_id=item, tool_name="", result=1) for item in self._some_calls(data, "host")]
        values = {"session_id": SESSION, "turn_id": self.turn_id(data), "request_id": request_id}
        self.command(ResumeTurn(**values, tool_results=results, message=said), request_id)

    @rule(data=st.data(), approved=st.booleans())
    def decide(self, data: st.DataObject, approved: bool) -> None:
        request_id = self.new_id("request")
        ids = self._some_calls(data, "approval")
        decisions = [ApprovalDecision(tool_call_id=item, approved=approved) for item in ids]
        values = {"session_id": SESSION, "turn_id": self.turn_id(data), "request_id": request_id}
        self.command(DecideApprovals(**values, decisions=decisions), request_id)

    @rule(is_meant=st.sampled_from([False, False, True]))
    def delete(self, is_meant: bool) -> None:
        if is_meant:
            request_id = self.new_id("request")
            self.command(DeleteSession(session_id=SESSION, request_id=request_id), request_id)

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def repeat_command(self, data: st.DataObject) -> None:
        command, request_id = data.draw(st.sampled_from(self.commands[-6:]))
        if isinstance(command, SteerTurn) and command.mode == "queue" and command.steering_id in self.session.closed:
            return  # no client sends it behind its cancellation
        self.command(command, request_id)

    # --- what only some agents have

    def model_reply(self, data: st.DataObject, task: ModelTask, text: str, made: list[ToolCall]) -> ModelReply:
        if task.compact:
            cuts = [index for index in range(task.messages + 1) if self._is_cut(index)]
            cut = data.draw(st.sampled_from([None, *cuts]))
            view = None if cut is None else [(2, 0, 1), (0, cut, task.messages)]
            short = [] if cut is None else [Message(role="user", content="short")]
            return self.session.model_reply(message=None, view=view, replacements=short)
        parts = [ReasoningPart(text="hm")] if data.draw(st.booleans()) else []
        content: Any = [*parts, TextPart(text), *[ToolCallPart(item) for item in made]]
        problem = data.draw(st.sampled_from([None, None, "no JSON"]))
        return self.session.model_reply(message=Message(role="assistant", content=content), output_error=problem)

    @precondition(lambda self: any(task.hook for task in self.session.tool_tasks))
    @rule(data=st.data(), fails=st.sampled_from([False] * 7 + [True]))
    def answer_hook(self, data: st.DataObject, fails: bool) -> None:
        hooks = [task for task in self.session.tool_tasks if task.hook]
        task = data.draw(st.sampled_from([hooks[-1]] * 4 + hooks[-3:]))
        error = ErrorInfo(kind="hook_failed", message="ValueError: no") if fails else None
        decision = data.draw(st.sampled_from(DECISIONS[task.hook or ""]))
        result = ToolResult(tool_call_id=task.call, tool_name=task.tool, result=decision)
        self.send(ToolReply(**address(task), result=result, error=error))

    @precondition(lambda self: self.session.children)
    @rule(data=st.data(), status=st.sampled_from(["finished", "failed", "aborted"]), turn_id=st.none() | st.just("x"))
    def end_child(self, data: st.DataObject, status: str, turn_id: str | None) -> None:
        child = data.draw(st.sampled_from(self.session.children[-3:]))
        assert child.parent is not None
        error = None if status == "finished" else ErrorInfo(kind=status, message="?")
        values = {
            "session_id": SESSION,
            "turn_id": child.parent.turn_id,
            "call": child.parent.call,
            "attempt": child.parent.attempt,
        }
        self.session.send(
            SubTurnEnded(**values, child_turn_id=turn_id or child.turn_id, status=status, text="42", error=error)
        )

    @precondition(lambda self: any(isinstance(message, HandOff) for message in self.session.sent))
    @rule(data=st.data(), plan_id=st.sampled_from(["other", PLAN, "gone", ""]))
    def hand_over(self, data: st.DataObject, plan_id: str) -> None:
        asked = [message for message in self.session.sent if isinstance(message, HandOff)]
        problem = None if plan_id else ErrorInfo(kind="unknown_agent", message="?")
        self.session.send(Transfer(data.draw(st.sampled_from(asked[-2:])), plan_id, problem))

    @rule(data=st.data())
    def command_without_a_plan(self, data: st.DataObject) -> None:
        kept, plan_id = self.session.plans, data.draw(st.sampled_from([PLAN, "other"]))
        self.session.plans = {name: plan for name, plan in kept.items() if name != plan_id}
        said = Message(role="user", content="said")
        if plan_id == PLAN or (self.session.state.turn and self.session.state.turn.plan_id == plan_id):
            self.resume(data, said)
            self.decide(data, True)
            self.steer(data, said, "steer")
        self.fire()
        self.session.plans = kept

    # --- what must hold

    @invariant()
    def every_command_is_answered_each_time_it_comes(self) -> None:
        if not hasattr(self, "awaited"):
            return
        deletions = self.session.state.deletions
        for request_id, count in self.awaited.items():
            assert len(self.session.answers.get(request_id, ())) == count - deletions.count(request_id), request_id

    @invariant()
    def every_call_is_decided_on_at_most_once(self) -> None:
        for events in self.session.channels.values() if hasattr(self, "session") else ():
            asked = [event.tool_call.id for event in events if event.type == "approval.requested"]
            decided = [event.tool_call_id for event in events if event.type == "approval.decided"]
            assert len(set(asked)) == len(asked)
            assert len(set(decided)) == len(decided)
            assert set(decided) <= set(asked)

    def teardown(self) -> None:
        super().teardown()
        assert not self.session.state.deletions
        self.session.start("and the view?")
        assert history_fault(self.session.request_of(self.session.model_task)) is None

    # --- helpers

    def _is_cut(self, index: int) -> bool:
        """Whether the transcript may be cut there."""
        return closed_length(self.session.transcript[:index]) == index

    def _some_calls(self, data: st.DataObject, status: str) -> list[str]:
        turn = self.session.state.turn
        calls = turn.calls if turn is not None else []
        meant = [call.tool_call.id for call in calls if call.status == status]
        known = [call.tool_call.id for call in calls] + (turn.answered if turn is not None else [])
        return list(data.draw(st.one_of(st.just(meant), st.lists(st.sampled_from([*meant, *known, "x"]), max_size=4))))


AnyCommand.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyCommand = AnyCommand.TestCase
