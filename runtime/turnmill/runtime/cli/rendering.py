"""A turn's events for a person's eyes: text as it comes, everything else as one line for each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, assert_never

import msgspec
from rich.console import Console
from rich.text import Text

from turnmill.protocol import events as e
from turnmill.protocol.codec import event_to_dict
from turnmill.protocol.content import TextPart, ToolCall, ToolResult, Usage

_VALUE_LENGTH_MAX = 60
_RESULT_LENGTH_MAX = 200
# What a model or a tool says must not steer the terminal.
_CONTROL_CHARACTERS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class EventView(Protocol):
    """Shows events, one by one."""

    def show(self, number: int, event: e.Event) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One event per line: its dict form, and its number as `seq`."""

    def show(self, number: int, event: e.Event) -> None:
        line = msgspec.json.encode({"seq": number, **event_to_dict(event)})
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        return


class Transcript:
    """Rendered like a chat. A failure's last line goes to stderr, so that it is seen where the output is not."""

    def __init__(self, console: Console | None = None, errors: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._errors = errors or Console(stderr=True, soft_wrap=True, highlight=False)
        self._calls: dict[tuple[int, int], ToolCall] = {}
        self._is_inside_line = False
        self._turn_id = ""

    def show(self, number: int, event: e.Event) -> None:
        match event:
            case e.TextDelta():
                self._inline(event.text)
            case e.ReasoningDelta():
                self._inline(event.text or "", "dim italic")
            case e.TurnStarted():
                self._turn_id = event.turn_id
                self._line(f"● {event.agent_id}  {event.turn_id}  session {event.session_id}", "bold")
            case e.StepStarted():
                self._line(f"step {event.step_number}", "dim")
            case e.StepRetrying():
                text = f"attempt {event.attempt} of {event.max_attempts} in {event.delay:g} s"
                self._line(f"↻ step {event.step_number} failed: {event.error}; {text}", "yellow")
            case e.StepReset():
                text = f"↻ step {event.step_number} begins again (attempt {event.attempt}); what it said above is void"
                self._line(text, "yellow")
            case e.StepFinished() | e.ToolCallStarted() | e.ToolCallDelta() | e.ToolResultReady():
                return
            case e.TurnFinished() | e.TurnFailed():
                self._ending(event)
            case e.TurnSuspended():
                self._line(f"‖ suspended: it waits for the results of {', '.join(event.pending)}", "magenta")
            case e.TurnResumed():
                self._line("▶ resumed", "magenta")
            case e.SteeringQueued():
                self._line(f"» steering queued: {event.message.text}", "magenta")
            case e.SteeringApplied():
                self._line(f"» steering applied in step {event.step}", "magenta")
            case e.SteeringDropped():
                self._line(f"» steering dropped: {event.reason}", "magenta")
            case _:
                self._tool(event)

    def close(self) -> None:
        """End the line that is open."""
        if self._is_inside_line:
            self._console.print()
            self._is_inside_line = False

    # ---- tools

    def _tool(
        self,
        event: e.ToolCallReady
        | e.ToolExecutionStarted
        | e.ToolExecutionWaiting
        | e.ToolExecutionProgress
        | e.ToolExecutionFinished
        | e.ApprovalRequested
        | e.ApprovalDecided,
    ) -> None:
        match event:
            case e.ToolCallReady():
                self._calls[event.step_number, event.index] = event.tool_call
                self._line(f"  → {call_text(event.tool_call)}", "cyan")
                if event.tool_call.error:
                    self._line(f"    not run: {event.tool_call.error}", "red")
            case e.ToolExecutionStarted():
                if event.attempt > 1:
                    self._line(f"  ↻ {self._label(event)} attempt {event.attempt}", "yellow")
            case e.ToolExecutionWaiting():
                text = f"no worker takes its queue {event.queue!r}: start `turnmill worker tools APP`"
                self._line(f"  … {self._label(event)} waits: {text}", "yellow")
            case e.ToolExecutionProgress():
                self._line(f"  · {self._label(event)} {event.message}", "dim")
            case e.ToolExecutionFinished():
                self._finished(event)
            case e.ApprovalRequested():
                self._line(f"  ? {call_text(event.tool_call)} waits for approval", "magenta")
            case e.ApprovalDecided():
                self._line(f"  ? {'approved' if event.approved else 'denied'}: {event.reason or ''}", "magenta")
            case _:
                assert_never(event)

    def _finished(self, event: e.ToolExecutionFinished) -> None:
        head = f"  ← {self._label(event)} {seconds_text(event.duration)}"
        if event.aborted:
            self._line(f"{head}: aborted", "yellow")
            return
        text = event.error if event.tool_result is None else result_text(event.tool_result)
        is_error = event.error is not None or (event.tool_result is not None and event.tool_result.is_error)
        self._line(f"{head}: {shortened(text or '', _RESULT_LENGTH_MAX)}", "red" if is_error else "green")

    def _label(self, event: Any) -> str:
        """The call as it was asked for, so that parallel calls of one tool are told apart."""
        call = self._calls.get((event.step_number, event.index))
        return call_text(call) if call is not None else str(event.name)

    # ---- the end

    def _ending(self, event: e.TurnFinished | e.TurnFailed) -> None:
        summary = event.result
        facts = summary_facts(summary) if summary is not None else ""
        turn_id = summary.turn_id if summary is not None else self._turn_id
        if isinstance(event, e.TurnFinished):
            kind = event.result.termination.kind
            how = "finished" if kind == "completed" else f"finished ({kind})"
            self._line("  ".join(filter(None, [f"✓ {how}: {facts}", turn_id])), "bold green")
            return
        self.close()
        word = "aborted" if event.aborted else "failed"
        text = f"✗ {word}: {event.error} ({event.error_type})"
        self._print(self._errors, "  ".join(filter(None, [text, facts, turn_id])), "bold red")

    # ---- output

    def _inline(self, text: str, style: str = "") -> None:
        text = clean(text)
        if text:
            self._console.print(Text(text, style=style), end="")
            self._console.file.flush()
            self._is_inside_line = not text.endswith("\n")

    def _line(self, text: str, style: str) -> None:
        self.close()
        self._print(self._console, text, style)

    def _print(self, console: Console, text: str, style: str) -> None:
        console.print(Text(" ".join(clean(text).split("\n")), style=style))
        console.file.flush()


def clean(text: str) -> str:
    """Without control characters, except for tab and line feed."""
    return text.translate(_CONTROL_CHARACTERS)


def shortened(text: str, length_max: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


def call_text(call: ToolCall) -> str:
    """`weather(city="Oslo")`."""
    return f"{call.name}({arguments_text(call.arguments)})"


def arguments_text(arguments: Mapping[str, Any]) -> str:
    encoded = [(name, msgspec.json.encode(value, enc_hook=repr).decode()) for name, value in arguments.items()]
    return ", ".join(f"{name}={shortened(value, _VALUE_LENGTH_MAX)}" for name, value in encoded)


def result_text(result: ToolResult) -> str:
    if result.content is not None:
        return "".join(
            part.text if isinstance(part, TextPart) else f"[{type(part).__name__}]" for part in result.content
        )
    if isinstance(result.result, str):
        return result.result
    return msgspec.json.encode(result.result, enc_hook=repr).decode()


def summary_facts(summary: e.TurnSummary) -> str:
    """`2 steps, 413 tokens, 1.9 s`."""
    steps = f"{summary.steps} step" + ("" if summary.steps == 1 else "s")
    return f"{steps}, {tokens_text(summary.usage)}, {seconds_text(summary.ended_at - summary.started_at)}"


def tokens_text(usage: Usage) -> str:
    total = usage.total_tokens or usage.input_tokens + usage.output_tokens
    return f"{total} tokens" if total else "no token count"


def seconds_text(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
