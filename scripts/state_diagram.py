"""Draws the machine's states from the machine itself, into docs/architecture.md: `state_diagram.py [--check]`.

It asks the machine for every message in every state that it can reach with a small set of them, and notes which phase
followed which. What the diagram shows is what the code does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from turnmill.protocol.content import ErrorInfo, Message, ToolCall, ToolCallPart, ToolResult
from turnmill.protocol.messages import (
    AbortTurn,
    ApprovalDecision,
    CallWaiting,
    DecideApprovals,
    DeliveryLost,
    ModelReply,
    ResumeTurn,
    StartTurn,
    TimerFired,
    ToolProgress,
    ToolReply,
)
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, Plan, RetryPolicy, ToolSpec
from turnmill.runtime.machine import Input, Start, advance
from turnmill.runtime.state import CallState, CallStatus, HookState, SessionState, TurnState

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- state diagram: made by scripts/state_diagram.py -->", "<!-- end of the state diagram -->"

RETRY = RetryPolicy(max_attempts=2)
PLANS = {
    "plain": Plan(
        agent=AgentSpec(name="a", model="scripted:a", tools=["safe", "once"], max_steps=2, retry=RETRY),
        tools={"safe": ToolSpec(name="safe", idempotent=True, max_attempts=2), "once": ToolSpec(name="once")},
    ),
    "careful": Plan(
        agent=AgentSpec(
            name="a",
            model="scripted:a",
            tools=["safe", "once"],
            max_steps=2,
            retry=RETRY,
            hooks={"before_step": HookSpec(name="look")},
            late_steering="drop",
        ),
        tools={
            "safe": ToolSpec(name="safe", approval=Approval(mode="always")),
            "once": ToolSpec(name="once", kind="host"),
        },
    ),
}


def shape(state: SessionState) -> object:
    """What makes two states the same for the diagram: all but times and attempts, which grow for ever."""
    turn = state.turn
    if turn is None:
        return None
    calls = [(call.status, call.failures, call.losses, call.waiting_announced) for call in turn.calls]
    hook = None if turn.hook is None else (turn.hook.point, turn.hook.losses)
    return turn.plan_id, turn.phase, turn.stage, turn.step, turn.failures, turn.losses, hook, tuple(calls)


def messages(state: SessionState) -> Iterator[tuple[str, Input, int]]:
    """Every kind of message that could come now, as (what it is called, the message, the time)."""
    command = StartTurn(turn_id="t0-1", session_id="s", agent="a@1", messages=[Message(role="user", content="go")])
    turn = state.turn
    if turn is None:
        for plan_id in PLANS:
            yield "start_turn", Start(command, plan_id), 0
        yield "start_turn (refused)", Start(command, "", ErrorInfo(kind="unknown_agent", message="no such agent")), 0
        return
    yield "abort_turn", AbortTurn(session_id="s", turn_id=turn.turn_id), 0
    yield "timer_fired", TimerFired(session_id="s"), state.timer_ms or 0
    yield from model_messages(turn)
    for call in turn.calls:
        yield from call_messages(turn, call)
    if turn.hook is not None:
        yield from hook_messages(turn, turn.hook)


def model_messages(turn: TurnState) -> Iterator[tuple[str, Input, int]]:
    model = {"session_id": "s", "turn_id": turn.turn_id, "call": str(turn.step), "attempt": turn.attempt}
    calls = [ToolCallPart(ToolCall(id="c0", name="safe")), ToolCallPart(ToolCall(id="c1", name="once"))]
    yield "model_reply (calls)", ModelReply(**model, message=Message(role="assistant", content=calls)), 0
    yield "model_reply (answer)", ModelReply(**model, message=Message(role="assistant", content="done")), 0
    for retryable, name in ((True, "retryable error"), (False, "error")):
        error = ErrorInfo(kind="provider_error", message="no", retryable=retryable)
        yield f"model_reply ({name})", ModelReply(**model, error=error), 0
    yield "delivery_lost", DeliveryLost(**model), 0


def call_messages(turn: TurnState, call: CallState) -> Iterator[tuple[str, Input, int]]:
    address = {"session_id": "s", "turn_id": turn.turn_id}
    tool = {**address, "call": f"{turn.step}.{call.index}", "attempt": call.attempt}
    result = ToolResult(tool_call_id=call.tool_call.id, tool_name=call.tool_call.name, result=1)
    yield "tool_reply", ToolReply(**tool, result=result), 0
    failed = ErrorInfo(kind="tool_error", message="no", retryable=True)
    yield "tool_reply (retryable error)", ToolReply(**tool, error=failed), 0
    yield "tool_progress", ToolProgress(**tool, sequence=call.progress_sequence + 1, message="half"), 0
    yield "delivery_lost", DeliveryLost(**tool), 0
    yield "call_waiting", CallWaiting(**tool), 0
    if call.status is CallStatus.HOST:
        yield "resume_turn", ResumeTurn(**address, request_id="", tool_results=[result]), 0
    if call.status is CallStatus.APPROVAL:
        for approved in (True, False):
            decision = ApprovalDecision(tool_call_id=call.tool_call.id, approved=approved)
            yield "decide_approvals", DecideApprovals(**address, request_id="", decisions=[decision]), 0


def hook_messages(turn: TurnState, hook: HookState) -> Iterator[tuple[str, Input, int]]:
    call = f"{turn.step}.{hook.point}.{hook.index}"
    address = {"session_id": "s", "turn_id": turn.turn_id, "call": call, "attempt": hook.attempt}
    result = ToolResult(tool_call_id=call, tool_name=hook.spec.name, result={})
    yield "tool_reply (hook)", ToolReply(**address, result=result), 0
    yield "tool_reply (failed hook)", ToolReply(**address, error=ErrorInfo(kind="hook_failed", message="no")), 0
    yield "delivery_lost", DeliveryLost(**address), 0


def explore() -> set[tuple[str, str, str]]:
    """All transitions between phases, as (from, message, to)."""
    found: set[tuple[str, str, str]] = set()
    seen: set[object] = set()
    waiting = [SessionState()]
    while waiting:
        state = waiting.pop()
        key = shape(state)
        if key in seen:
            continue
        seen.add(key)
        for name, message, now_ms in messages(state):
            decision = advance(state, message, now_ms, "s", PLANS)
            if decision.discarded is None:
                found.add((phase(state), name, phase(decision.state)))
                waiting.append(decision.state)
    return found


def phase(state: SessionState) -> str:
    return "idle" if state.turn is None else str(state.turn.phase)


def diagram() -> str:
    by_edge: dict[tuple[str, str], list[str]] = {}
    for before, name, after in sorted(explore()):
        by_edge.setdefault((before, after), []).append(name)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> idle"]
    lines += [f"    {before} --> {after}: {', '.join(names)}" for (before, after), names in sorted(by_edge.items())]
    return "\n".join([*lines, "```"])


def main() -> None:
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = f"{head}{BEGIN}\n{diagram()}\n{END}{tail}"
    if "--check" in sys.argv:
        if wanted != text:
            raise SystemExit("docs/architecture.md does not show the machine as it is: run scripts/state_diagram.py")
        return
    DOCUMENT.write_text(wanted)


if __name__ == "__main__":
    main()
