"""A session in memory: feeds messages to the machine, applies its effects, and objects to what must never happen.

    session = Session(AgentSpec(name="a", model="scripted:x"), tools=[ToolSpec(name="add")])
    session.start("What is 1 + 2?")
    session.answer(calls=[call("add", a=1, b=2)])
    session.finish_call(0, 3)
    session.answer("It is 3.")
    assert session.event_types()[-1] == "turn.finished"

It plays the store's and the workers' part, so a test only says who did what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from turnmill.protocol.content import (
    ErrorInfo,
    Message,
    Part,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.events import TERMINAL_EVENT_TYPES, Event
from turnmill.protocol.messages import (
    AbortTurn,
    Answer,
    ApprovalDecision,
    CallWaiting,
    CancelSteering,
    DecideApprovals,
    DeliveryLost,
    HandOff,
    ModelReply,
    ModelTask,
    ResumeTurn,
    StartTurn,
    SteerTurn,
    SubTurnEnded,
    TimerFired,
    ToolProgress,
    ToolReply,
    ToolTask,
)
from turnmill.protocol.messages import (
    DeleteSession as DeleteSessionCommand,
)
from turnmill.protocol.specs import AgentSpec, Plan, ToolSpec
from turnmill.runtime.effects import (
    Append,
    Cancel,
    Count,
    Decision,
    DeleteSession,
    DispatchModel,
    DispatchTool,
    Feed,
    Index,
    Keep,
    Publish,
    Record,
    Replace,
    Reply,
    Send,
    SetTimer,
)
from turnmill.runtime.machine import Input, Limits, Start, Transfer, advance
from turnmill.runtime.state import SessionState, decode_state, encode_state
from turnmill.workers.providers.scripted import history_fault

SESSION = "session"
PLAN = "plan"
AGENT = AgentSpec(name="agent", model="scripted:x")


def call(name: str, call_id: str | None = None, *, error: str | None = None, **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id or f"call_{name}", name=name, arguments=arguments, error=error)


def plan_of(agent: AgentSpec, tools: Sequence[ToolSpec] = ()) -> Plan:
    return Plan(agent=agent, tools={spec.name: spec for spec in tools})


class Session:
    """One session, its transcript, channels and outgoing tasks."""

    def __init__(
        self,
        agent: AgentSpec = AGENT,
        tools: Sequence[ToolSpec] = (),
        limits: Limits | None = None,
        *,
        others: Mapping[str, Plan] | None = None,
    ) -> None:
        """`others` are plans that a handoff may lead to, by their ids."""
        self.plans = {PLAN: plan_of(agent, tools), **(others or {})}
        self.limits = limits or Limits()
        self.state = SessionState()
        self.now_ms = 1_000_000
        self.timer_ms: int | None = None
        self.live: str | None = None
        self.transcript: list[Message] = []
        self.channels: dict[str, list[Event]] = {}
        self.closed: set[str] = set()
        self.records: dict[str, dict[str, Any]] = {}
        self.index: list[str] = []
        self.feed: list[Feed] = []
        self.tasks: list[ModelTask | ToolTask] = []
        self.replacements: list[Message] = []
        self.sent: list[Any] = []
        self.cancelled: dict[str, str] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.kept: list[str] = []
        self.deletions = 0
        self.counters: dict[str, int] = {}
        self.released: list[str] = []
        self.last = Decision(self.state, [])
        self.submitted = 0

    # --- messages

    def send(self, message: Input) -> Decision:
        """Have the machine decide, check what holds for every decision, and apply it."""
        before = encode_state(self.state)
        decision = advance(self.state, message, self.now_ms, SESSION, self.plans, self.limits)
        assert encode_state(self.state) == before, "the machine has changed the state it was given"
        assert decode_state(encode_state(decision.state)) == decision.state, "the state does not survive its encoding"
        self.last = decision
        if decision.new_turn is not None and decision.new_turn in self.records:
            self._count("duplicate_turn")  # the store refuses: the turn was known
            return decision
        if isinstance(message, TimerFired):
            self.timer_ms = None  # it has left the sorted set
        if decision.discarded is not None:
            assert decision.effects[0] == Count(decision.discarded)
            assert all(isinstance(effect, Reply) for effect in decision.effects[1:])
            assert decision.state is self.state
        self.state = decision.state
        self.live = decision.live if decision.live is not None else self.live
        for effect in decision.effects:
            self._apply(effect)
        self._check()
        return decision

    def start(
        self,
        *texts: str | Message,
        turn_id: str | None = None,
        problem: ErrorInfo | None = None,
        plan_id: str = PLAN,
        **fields: Any,
    ) -> str:
        """Submit a turn; its id."""
        self.submitted += 1
        turn_id = turn_id or f"turn-{self.submitted}"
        messages = [
            text if isinstance(text, Message) else Message(role="user", content=text) for text in texts or ("hello",)
        ]
        command = StartTurn(turn_id=turn_id, session_id=SESSION, agent="agent@1", messages=messages, **fields)
        self.send(Start(command, plan_id, problem))
        return turn_id

    def answer(self, text: str = "", calls: Sequence[ToolCall] = (), **fields: Any) -> Decision:
        """The model's reply to the task that stands out."""
        return self.send(self.model_reply(text, calls, **fields))

    def model_reply(self, text: str = "", calls: Sequence[ToolCall] = (), **fields: Any) -> ModelReply:
        content: str | list[Part] = text
        if calls:
            content = [*([TextPart(text)] if text else []), *[ToolCallPart(item) for item in calls]]
        values: dict[str, Any] = {
            "message": Message(role="assistant", content=content),
            "finish_reason": "tool_calls" if calls else "stop",
            "usage": Usage(input_tokens=10, output_tokens=5, total_tokens=15),
        }
        return self._addressed(ModelReply, self.model_task, {**values, **fields})

    def fail_model(self, kind: str = "provider_error", *, retryable: bool = True, **fields: Any) -> Decision:
        error = ErrorInfo(kind=kind, message=f"{kind}!", retryable=retryable, **fields)
        return self.send(self.model_reply(message=None, usage=None, finish_reason=None, error=error))

    def finish_call(self, index: int, value: Any = "done", **fields: Any) -> Decision:
        """A tool's reply to the newest attempt at a call of the running step."""
        return self.send(self.tool_reply(index, value, **fields))

    def tool_reply(self, index: int, value: Any = "done", **fields: Any) -> ToolReply:
        task = self.tool_task(index)
        result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result=value)
        return self._addressed(ToolReply, task, {"result": result, "duration_seconds": 0.25, **fields})

    def retry_call(self, index: int, *, message: str = "try again", **fields: Any) -> Decision:
        error = ErrorInfo(kind="tool_error", message=message, retryable=True, **fields)
        return self.finish_call(index, f"Error: execution failed ({message})", error=error)

    def progress(self, index: int, sequence: int, message: str = "on it", **fields: Any) -> Decision:
        values = {"sequence": sequence, "message": message, **fields}
        return self.send(self._addressed(ToolProgress, self.tool_task(index), values))

    def lose(self, task: ModelTask | ToolTask) -> Decision:
        return self.send(self._addressed(DeliveryLost, task, {}))

    def wait_for_worker(self, index: int, *, expired: bool = False) -> Decision:
        return self.send(self._addressed(CallWaiting, self.tool_task(index), {"expired": expired}))

    def fire_timer(self) -> Decision:
        """Let time pass until the session's timer is due."""
        assert self.timer_ms is not None, "no timer is set"
        self.now_ms = max(self.now_ms, self.timer_ms)
        return self.send(TimerFired(session_id=SESSION))

    def pass_time(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)

    # --- commands

    def steer(self, text: str | Message = "and this", steering_id: str = "", **fields: Any) -> str:
        """Say something to a turn, the one that was started last if none is named; the steering's id."""
        self.submitted += 1
        steering_id = steering_id or f"steering-{self.submitted}"
        message = text if isinstance(text, Message) else Message(role="user", content=text)
        values = {"turn_id": self.turn_id, "steering_id": steering_id, "message": message, **fields}
        self.send(SteerTurn(session_id=SESSION, **values))
        return steering_id

    def cancel_steering(self, steering_id: str, turn_id: str | None = None) -> Answer:
        return self.command(CancelSteering, turn_id=turn_id or self.turn_id, steering_id=steering_id)

    def abort(self, reason: str | None = None, turn_id: str | None = None) -> Answer:
        return self.command(AbortTurn, turn_id=turn_id or self.turn_id, reason=reason)

    def resume(
        self, results: Mapping[str, Any] | None = None, message: str | Message | None = None, **fields: Any
    ) -> Answer:
        """Give results by call id."""
        given = [ToolResult(tool_call_id=key, tool_name="", result=value) for key, value in (results or {}).items()]
        said = Message(role="user", content=message) if isinstance(message, str) else message
        return self.command(ResumeTurn, **{"turn_id": self.turn_id, "tool_results": given, "message": said, **fields})

    def decide(self, *, reason: str | None = None, **decisions: bool) -> Answer:
        """Approve or deny by call id."""
        items = [ApprovalDecision(tool_call_id=key, approved=value, reason=reason) for key, value in decisions.items()]
        return self.command(DecideApprovals, turn_id=self.turn_id, decisions=items)

    def delete(self) -> str:
        """Ask for the session's end; the request's id."""
        self.submitted += 1
        request_id = f"request-{self.submitted}"
        self.send(DeleteSessionCommand(session_id=SESSION, request_id=request_id))
        return request_id

    def command(self, kind: Any, **fields: Any) -> Answer:
        """Send a command that is answered at once; its answer."""
        self.submitted += 1
        request_id = fields.pop("request_id", f"request-{self.submitted}")
        before = len(self.answers.get(request_id, ()))
        self.send(kind(session_id=SESSION, request_id=request_id, **fields))
        assert len(self.answers.get(request_id, ())) == before + 1, "a command is answered once"
        return self.answers[request_id][-1]

    # --- hooks, sub-turns and handoffs

    @property
    def hook_task(self) -> ToolTask:
        """The newest task of a hook."""
        return [task for task in self.tool_tasks if task.hook is not None][-1]

    def answer_hook(self, decision: Any = None, **fields: Any) -> Decision:
        task = self.hook_task
        result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result=decision)
        return self.send(self._addressed(ToolReply, task, {"result": result, "duration_seconds": 0.25, **fields}))

    def fail_hook(self, message: str = "ValueError: no") -> Decision:
        return self.answer_hook(result=None, error=ErrorInfo(kind="hook_failed", message=message))

    @property
    def children(self) -> list[StartTurn]:
        """The commands that start sub-turns."""
        return [message for message in self.sent if isinstance(message, StartTurn)]

    def end_child(self, child: StartTurn, status: str = "finished", text: str = "", **fields: Any) -> Decision:
        parent = child.parent
        assert parent is not None
        return self.send(
            SubTurnEnded(
                session_id=parent.session_id,
                turn_id=parent.turn_id,
                call=parent.call,
                attempt=parent.attempt,
                child_turn_id=child.turn_id,
                status=status,
                text=text,
                **fields,
            )
        )

    def hand_over(
        self, plan_id: str = "", problem: ErrorInfo | None = None, command: HandOff | None = None
    ) -> Decision:
        """What the coordinator makes of the newest handoff: the plan of its agent, or why there is none."""
        newest = [message for message in self.sent if isinstance(message, HandOff)][-1]
        return self.send(Transfer(command or newest, plan_id, problem))

    # --- looks

    @property
    def model_tasks(self) -> list[ModelTask]:
        return [task for task in self.tasks if isinstance(task, ModelTask)]

    @property
    def model_task(self) -> ModelTask:
        """The newest model task."""
        return self.model_tasks[-1]

    @property
    def tool_tasks(self) -> list[ToolTask]:
        return [task for task in self.tasks if isinstance(task, ToolTask)]

    def tool_task(self, index: int) -> ToolTask:
        """The newest attempt at a call of the newest step that has one."""
        step = max(task.step_number for task in self.tool_tasks if task.turn_id == self.tool_tasks[-1].turn_id)
        return next(task for task in reversed(self.tool_tasks) if task.call == f"{step}.{index}")

    @property
    def turn_id(self) -> str:
        """The turn that was started last."""
        return next(reversed(self.channels))

    def events(self, turn_id: str | None = None, *types: str) -> list[Any]:
        events = self.channels.get(turn_id or self.turn_id, [])
        return [event for event in events if not types or event.type in types]

    def event_types(self, turn_id: str | None = None) -> list[str]:
        return [event.type for event in self.events(turn_id)]

    def results(self) -> list[ToolResult]:
        """All results in the transcript, in order."""
        return [result for message in self.transcript for result in message.tool_results]

    def result_texts(self) -> list[Any]:
        return [result.result for result in self.results()]

    # --- the store's part

    def _addressed(self, kind: Any, task: ModelTask | ToolTask, values: dict[str, Any]) -> Any:
        address = {"session_id": SESSION, "turn_id": task.turn_id, "call": task.call, "attempt": task.attempt}
        return kind(**{**address, **values})

    def _apply(self, effect: Any) -> None:
        match effect:
            case Publish():
                self._publish(effect)
            case Append(message):
                self.transcript.append(message)
            case Replace(message):
                self.replacements.append(message)
            case Send(message):
                if isinstance(message, StartTurn | HandOff):
                    parent = message.parent.turn_id if isinstance(message, StartTurn) and message.parent else ""
                    assert not {parent, message.turn_id} & set(self.cancelled), "something new behind a stop"
                self.sent.append(message)
            case Cancel():
                self.cancelled[effect.turn_id] = effect.reason
            case Reply(request_id, answer):
                self.answers.setdefault(request_id, []).append(answer)
            case Keep(keys):
                self.kept += keys
            case DeleteSession():
                self.transcript.clear()
                self.replacements.clear()
                self.kept.clear()
                self.deletions += 1
            case DispatchModel(task):
                self._dispatch_model(task)
            case DispatchTool(task):
                assert task.turn_id not in self.closed, "a call was handed out for a turn that has ended"
                assert task.turn_id not in self.cancelled, "a call was handed out behind a stop"
                self.tasks.append(task)
            case Record(turn_id, fields):
                self.records.setdefault(turn_id, {}).update(fields)
                self.released += [effect.releases] if effect.releases else []
            case Index(turn_id):
                self.index.append(turn_id)
            case Feed():
                self.feed.append(effect)
            case SetTimer(at_ms):
                self.timer_ms = at_ms
            case Count(name):
                self._count(name)
            case _:
                raise AssertionError(effect)

    def _publish(self, publish: Publish) -> None:
        if publish.opens:
            assert publish.turn_id not in self.channels, "a channel was opened twice"
            self.channels[publish.turn_id] = []
        assert publish.turn_id not in self.closed, f"{publish.event.type} behind the turn's end"
        assert publish.closes == (publish.event.type in TERMINAL_EVENT_TYPES)
        self.channels[publish.turn_id].append(publish.event)
        if publish.closes:
            self.closed.add(publish.turn_id)
            self._check_executions(publish.turn_id)

    def _dispatch_model(self, task: ModelTask) -> None:
        assert task.turn_id not in self.closed, "a model call was handed out for a turn that has ended"
        assert task.turn_id not in self.cancelled, "a model call was handed out behind a stop"
        assert task.messages <= len(self.transcript), "the task refers to messages that are not there"
        fault = history_fault(self.request_of(task))
        assert fault is None, fault
        assert (task.turn_id, task.call, task.attempt) not in [
            (old.turn_id, old.call, old.attempt) for old in self.model_tasks
        ], "an attempt was handed out twice"
        self.tasks.append(task)

    def request_of(self, task: ModelTask) -> list[Message]:
        """The conversation as a provider gets it."""
        lists = (self.transcript, self.replacements)
        seen = [message for number, first, end in task.view for message in lists[number][first:end]]
        seen += self.transcript[task.view_end : task.inject_at] if task.injected else []
        seen += task.injected
        return seen + self.transcript[max(task.view_end, task.inject_at if task.injected else 0) : task.messages]

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def _check(self) -> None:
        state, turn = self.state, self.state.turn
        assert state.length == len(self.transcript)
        assert state.timer_ms == self.timer_ms, "the state and the sorted set disagree about the timer"
        self._check_steering()
        open_channels = set(self.channels) - self.closed
        assert open_channels == ({turn.turn_id} if turn is not None else set())
        if turn is None:
            assert not state.queue, "a turn waits for nobody"
            assert self.timer_ms is None or self.limits.session_ttl_ms, "a timer is left behind"
            return
        assert turn.calls or turn.phase != "tools", "a step waits for no call"
        status = "suspended" if turn.phase == "suspended" else "running"
        assert self.records[turn.turn_id]["status"] == status
        waits_for_ever = turn.phase == "suspended" and turn.deadline_ms is None
        if not waits_for_ever or any(call.status == "approval" for call in turn.calls):
            assert self.timer_ms is not None, "a live turn has no timer: nothing would wake it"
        if turn.phase == "suspended":
            assert turn.failed_exchange or any(call.status in ("host", "approval") for call in turn.calls)

    def _check_steering(self) -> None:
        """Each message is claimed by one step, dropped with a reason, or pending."""
        pending = {queued.command.turn_id: queued.steering for queued in self.state.queue}
        if self.state.turn is not None:
            pending[self.state.turn.turn_id] = self.state.turn.steering
        for turn_id, events in self.channels.items():
            queued = [event.steering_id for event in events if event.type == "steering.queued"]
            settled = [event.steering_id for event in events if event.type in ("steering.applied", "steering.dropped")]
            waiting = [item.steering_id for item in pending.get(turn_id, ())]
            assert len(set(settled)) == len(settled), "a steering has two fates"
            assert sorted(queued) == sorted({*settled, *waiting} & set(queued)), "a steering was lost"
            assert not set(settled) & set(waiting), "a steering was settled and waits"

    def _check_executions(self, turn_id: str) -> None:
        """Every call that was told as started is told as finished, once."""
        events = [event for event in self.channels[turn_id] if event.type.startswith("tool_execution.")]
        started = {(event.step_number, event.index) for event in events if event.type == "tool_execution.started"}
        ended = [(event.step_number, event.index) for event in events if event.type == "tool_execution.finished"]
        assert sorted(started) == sorted(ended), "executions that started and ended differ"


def texts(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """A transcript in brief: roles with their text, call ids or result ids."""
    brief: list[tuple[str, Any]] = []
    for message in messages:
        ids = [part.tool_call.id for part in _parts(message, ToolCallPart)]
        ids += [part.tool_result.tool_call_id for part in _parts(message, ToolResultPart)]
        brief.append((message.role, ids if ids else message.text))
    return brief


def _parts(message: Message, kind: type[msgspec.Struct]) -> list[Any]:
    return [] if isinstance(message.content, str) else [part for part in message.content if isinstance(part, kind)]
