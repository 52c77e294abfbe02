"""What people read of events: every kind of event has its line, sub-turns stand apart, and commands carry real ids."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from rich.console import Console

from turnmill.protocol import events as e
from turnmill.protocol.content import AttemptUsage, Cost, ErrorInfo, Message, Termination, ToolCall, ToolResult, Usage
from turnmill.protocol.errors import CommandRefusedError
from turnmill.protocol.streams import ChannelEvent
from turnmill.runtime.cli.next_commands import after_refusal, after_suspension
from turnmill.runtime.cli.rendering import Transcript
from turnmill.runtime.cli.timeline import Timed, draw, spans_of
from turnmill.runtime.cli.wording import attempt_text, cost_text, summary_facts, table_lines
from turnmill.runtime.sub_turns import SubTurnEvent

CALL = ToolCall(id="c1", name="pay", arguments={"amount": 5})
SUMMARY = e.TurnSummary(
    turn_id="t1", session_id="s", agent_id="a", status="finished", steps=2, usage=Usage(total_tokens=40),
    started_at=1.0, ended_at=2.5, first_message=0, end_message=4, termination=Termination(kind="completed"),
)  # fmt: skip
PLACE: dict[str, Any] = {"step_number": 1, "index": 0, "tool_call_id": "c1"}


class Screen:
    """A transcript on two consoles of memory."""

    def __init__(self) -> None:
        self._out, self._errors = io.StringIO(), io.StringIO()
        self.transcript = Transcript(
            Console(file=self._out, soft_wrap=True, highlight=False),
            Console(file=self._errors, soft_wrap=True, highlight=False),
        )

    def show(self, *events: e.Event | SubTurnEvent) -> list[str]:
        for number, event in enumerate(events, 1):
            self.transcript.show(number, event)
        self.transcript.close()
        return self._out.getvalue().splitlines()

    def failures(self) -> list[str]:
        return self._errors.getvalue().splitlines()


def below(event: e.Event, turn_id: str = "t2") -> SubTurnEvent:
    return SubTurnEvent(turn_id=turn_id, session_id="s/1", agent_id="b", event=event)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (e.TurnResumed(tool_call_ids=["c1", "c2"]), "▶ resumed with c1, c2"),
        (e.TurnResumed(), "▶ resumed"),
        (e.TurnSuspended(pending=["c1"]), "‖ suspended: it waits for the results of pay(amount=5) c1"),
        (e.TurnSuspended(pending=[], approvals=["c1"]), "‖ suspended: it waits for approval of pay(amount=5) c1"),
        (
            e.TurnSuspended(pending=["c9"], approvals=["c1"]),
            "‖ suspended: it waits for the results of c9; it waits for approval of pay(amount=5) c1",
        ),
        (
            e.TurnSuspended(pending=["c1"], error=ErrorInfo(kind="overloaded", message="busy")),
            "‖ suspended: the provider call failed: busy (overloaded)",
        ),
        (
            e.SteeringQueued(steering_id="x1", message=Message(role="system", content="be\nbrief")),
            "» steering queued (system): be brief  x1",
        ),
        (e.SteeringApplied(steering_id="x1", step=3), "» steering applied in step 3  x1"),
        (e.SteeringDropped(steering_id="x1", reason="cancelled"), "» steering dropped: cancelled  x1"),
        (e.ApprovalRequested(step_number=1, index=0, tool_call=CALL), "  ? pay(amount=5) waits for approval  c1"),
        (e.ApprovalDecided(**PLACE, approved=True), "  ? pay(amount=5) approved"),
        (e.ApprovalDecided(**PLACE, approved=False, reason="too much"), "  ? pay(amount=5) denied: too much"),
        (e.AgentChanged(step_number=1, agent_id="b", from_agent_id="a"), "⇒ a hands over to b"),
        (
            e.HookFinished(step_number=1, point="before_step", name="a.guard", duration=0.25),
            "  ∘ before_step a.guard 0.2 s",
        ),
        (
            e.HookFinished(step_number=1, point="stop_when", name="enough", error="ValueError: no"),
            "  ∘ stop_when enough 0 ms: ValueError: no",
        ),
        (
            e.ContextCompacted(step_number=2, reason="overflow", replacements=1),
            "≈ conversation shortened (the model's window was exceeded): 1 message in place of older ones",
        ),
        (e.SubTurnFinished(**PLACE, turn_id="t2", status="failed"), "  ↲ t2 failed"),
        (
            e.SubTurnStarted(**PLACE, turn_id="t2", session_id="s/1", agent_id="b"),
            "  ↳ b  t2  session s/1",
        ),
    ],
)
def test_every_event_has_its_line(event: e.Event, line: str) -> None:
    lines = Screen().show(e.ToolCallReady(step_number=1, index=0, tool_call=CALL), event)
    assert lines[1:] == [line]


def test_what_a_tool_says_does_not_steer_the_terminal() -> None:
    event = e.SteeringDropped(steering_id="x", reason="a\x1b[2Jb")
    assert Screen().show(event) == ["» steering dropped: a[2Jb  x"]


def test_sub_turns_stand_behind_bars_and_their_text_is_not_mixed() -> None:
    screen = Screen()
    started = e.SubTurnStarted(**PLACE, turn_id="t2", session_id="s/1", agent_id="b")
    deeper = e.SubTurnStarted(**PLACE, turn_id="t3", session_id="s/2", agent_id="c")
    lines = screen.show(
        e.TextDelta(text="Mine"),
        started,
        below(e.TextDelta(text="Its\nown")),
        below(deeper),
        below(e.TextDelta(text="deep"), "t3"),
        below(e.TextDelta(text="er"), "t3"),
        below(e.TurnFailed(error="broken", error_type="internal")),
        e.TextDelta(text="Mine again"),
        e.TurnFinished(result=SUMMARY),
    )
    assert lines == [
        "Mine",
        "  ↳ b  t2  session s/1",
        "│ Its",
        "│ own",
        "│   ↳ c  t3  session s/2",
        "│ │ deeper",
        "│ ✗ failed: broken (internal)",
        "Mine again",
        "✓ finished: 2 steps, 40 tokens, 1.5 s  t1",
    ]
    assert screen.failures() == [], "the failure of a sub-turn is not the end of what is watched"


def test_costs_are_told_where_they_are_known() -> None:
    cost = Cost(total=Decimal("0.00120"), source="provider")
    assert summary_facts(msgspec.structs.replace(SUMMARY, cost=cost)) == "2 steps, 40 tokens, 0.0012 USD, 1.5 s"
    assert summary_facts(msgspec.structs.replace(SUMMARY, cost=Cost())) == "2 steps, 40 tokens, 1.5 s"
    assert cost_text(Cost(total=Decimal("1E+2"))) == "100 USD"
    assert cost_text(Cost(currency="", source="mixed")) == "unknown"
    attempt = AttemptUsage(step=1, attempt=2, outcome="rate_limited", usage=Usage(total_tokens=9), cost=cost)
    assert attempt_text(attempt) == "step 1 attempt 2: rate_limited, 9 tokens, 0.0012 USD"


def test_a_table_is_as_wide_as_what_is_in_it() -> None:
    assert list(table_lines([["A", "B"], ["long", ""], ["x", "y"]])) == ["A     B", "long", "x     y"]


def test_commands_that_go_on_quote_what_a_provider_invented() -> None:
    (line,) = after_suspension("t1", ["a b", "c;d"], [])
    assert line == "give the results: `turnmill resume t1 --result 'a b'=@FILE --result 'c;d'=@FILE`"
    both = list(after_suspension("t1", ["c1"], ["c2"]))
    assert both[1] == "decide: `turnmill approve t1 c2`, or `turnmill deny t1 ...`"
    (failed,) = after_suspension("t1", ["c1"], [], ErrorInfo(kind="overloaded", message="busy"))
    assert failed == "the provider call failed; `turnmill resume t1` repeats it"


@pytest.mark.parametrize(
    ("kind", "pending", "command"),
    [
        ("tool_results_required", ("c1",), "turnmill resume t1 --result c1=@FILE"),
        ("unknown_tool_result", ("c1",), "turnmill resume t1 --result c1=@FILE"),
        ("approval_required", ("c1", "c2"), "turnmill approve t1 c1 c2"),
        ("no_pending_approval", (), "turnmill show t1"),
        ("already_decided", ("c2",), "turnmill show t1"),
        ("no_pending_tools", (), "turnmill show t1"),
        ("turn_ended", (), "turnmill show t1"),
        ("idempotency_conflict", (), "turnmill show t1"),
        ("session_busy", (), "turnmill tail t1"),
        ("steering_full", (), "turnmill tail t1"),
    ],
)
def test_every_refusal_has_a_next_command(kind: str, pending: tuple[str, ...], command: str) -> None:
    assert after_refusal(CommandRefusedError("no", kind=kind, turn_id="t1", pending=pending)) == command
    assert after_refusal(CommandRefusedError("no", kind=kind)) is None


# ---- timeline


def timed(*events: tuple[int, e.Event]) -> list[Timed]:
    return [(ChannelEvent(number, b"", at_ms, b""), event) for number, (at_ms, event) in enumerate(events, 1)]


def test_the_timeline_shows_sub_turns_hooks_and_rests() -> None:
    parent = timed(
        (1000, e.StepStarted(step_number=1)),
        (1100, e.ToolCallReady(step_number=1, index=0, tool_call=ToolCall(id="c1", name="b"))),
        (1100, e.ToolExecutionStarted(**PLACE, name="b")),
        (1100, e.SubTurnStarted(**PLACE, turn_id="t2", session_id="s/1", agent_id="b")),
        (1400, e.SubTurnFinished(**PLACE, turn_id="t2", status="finished")),
        (1400, e.ToolExecutionFinished(**PLACE, name="b", tool_result=ToolResult(tool_call_id="c1", tool_name="b"))),
        (1600, e.HookFinished(step_number=1, point="after_step", name="a.look", duration=0.1)),
        (1700, e.TurnSuspended(pending=["c2"])),
        (1900, e.TurnResumed(tool_call_ids=["c2"])),
    )
    child = timed((1200, e.StepStarted(step_number=1)), (1300, e.TurnFinished(result=SUMMARY)))
    spans = spans_of(parent, {"t2": child})
    assert [(span.name, span.kind, span.depth, span.begin_ms, span.end_ms) for span in spans] == [
        ("step 1", "model", 0, 0, 100),
        ("b()", "tool", 1, 100, 400),
        ("step 1", "model", 2, 200, 300),
        ("after_step a.look", "hook", 1, 500, 600),
        ("suspended", "rest", 0, 700, 900),
    ]
    assert [span.turn_id for span in spans] == [None, None, "t2", None, None]
    lines = list(draw(spans, 100))
    assert lines[2].startswith("  b() ")
    assert lines[3].startswith("    step 1 ")
