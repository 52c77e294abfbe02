"""Where a turn's time went: bars of its model calls and tool calls, from the times of its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from turnmill.protocol import events as e
from turnmill.protocol.streams import ChannelEvent

from .wording import call_text, clean, seconds_text, shortened

_NAME_WIDTH_MAX = 32
_BAR_WIDTH_MIN = 20

Timed: TypeAlias = tuple[ChannelEvent, e.Event]


class Span(msgspec.Struct, kw_only=True):
    """One bar. Times are in ms since the turn's first event. Until `spoke_ms` nothing was heard: waiting in a queue, or
    for the first token. `end_ms` is None while it goes on."""

    name: str
    kind: str
    begin_ms: int
    spoke_ms: int | None = None
    end_ms: int | None = None
    outcome: str = ""


def spans_of(events: Sequence[Timed]) -> list[Span]:
    """The spans in the order they began. What goes on at the last event has no end."""
    return _Reader(events[0][0].at_ms).read(events) if events else []


def draw(spans: Sequence[Span], width: int) -> Iterator[str]:
    """One line for each span: `.` while nothing was heard, `#` from then on, `>` where it goes on."""
    if not spans:
        yield "nothing has happened yet"
        return
    total = max(1, *(span.end_ms or span.spoke_ms or span.begin_ms for span in spans))
    names = min(_NAME_WIDTH_MAX, max(len(span.name) for span in spans))
    room = max(_BAR_WIDTH_MIN, width - names - 29)
    yield f"{'':{names}}  0 s{seconds_text(total / 1000):>{room - 3}}"
    for span in spans:
        yield f"{shortened(span.name, names):{names}}  {_bar(span, total, room)}  {_words(span)}".rstrip()


def _bar(span: Span, total: int, room: int) -> str:
    begin = min(room - 1, span.begin_ms * room // total)
    end = room if span.end_ms is None else max(begin + 1, -(-span.end_ms * room // total))
    spoke = end if span.spoke_ms is None else min(end, max(begin, span.spoke_ms * room // total))
    if span.end_ms is not None and spoke == end:
        spoke = end - 1
    bar = " " * begin + "." * (spoke - begin) + "#" * (end - spoke)
    return f"{bar[:-1] + '>' if span.end_ms is None else bar:{room}}"


def _words(span: Span) -> str:
    if span.end_ms is None:
        return "goes on"
    words = seconds_text((span.end_ms - span.begin_ms) / 1000)
    if span.kind == "model" and span.spoke_ms is not None:
        words += f", first word {seconds_text((span.spoke_ms - span.begin_ms) / 1000)}"
    return f"{words} {span.outcome}".rstrip()


class _Reader:
    """Turns events into spans."""

    def __init__(self, origin_ms: int) -> None:
        self._origin_ms = origin_ms
        self._spans: list[Span] = []
        self._model: Span | None = None
        self._tools: dict[tuple[int, int], Span] = {}
        self._names: dict[tuple[int, int], str] = {}

    def read(self, events: Sequence[Timed]) -> list[Span]:
        for raw, event in events:
            self._take(raw.at_ms - self._origin_ms, event)
        return self._spans

    def _take(self, at_ms: int, event: e.Event) -> None:
        match event:
            case e.StepStarted():
                self._begin_model(f"step {event.step_number}", at_ms)
            case e.TextDelta() | e.ReasoningDelta() | e.ToolCallStarted() | e.ToolCallDelta():
                if self._model is not None and self._model.spoke_ms is None:
                    self._model.spoke_ms = at_ms
            case e.StepRetrying():
                self._end_model(at_ms, "failed")
            case e.StepReset():
                self._end_model(at_ms, "lost")
                self._begin_model(f"step {event.step_number} attempt {event.attempt}", at_ms)
            case e.ToolCallReady():
                self._end_model(at_ms, "")
                self._names[event.step_number, event.index] = clean(call_text(event.tool_call))
            case e.ToolExecutionStarted():
                self._begin_tool(event, at_ms)
            case e.ToolExecutionProgress():
                self._speak(event, at_ms)
            case e.ToolExecutionFinished():
                self._end_tool(event, at_ms)
            case e.StepFinished() | e.TurnFinished() | e.TurnFailed():
                self._end_model(at_ms, "" if not isinstance(event, e.TurnFailed) else "failed")
            case _:
                return

    def _begin_model(self, name: str, at_ms: int) -> None:
        self._model = Span(name=name, kind="model", begin_ms=at_ms)
        self._spans.append(self._model)

    def _end_model(self, at_ms: int, outcome: str) -> None:
        if self._model is not None:
            self._model.end_ms, self._model.outcome = at_ms, outcome
            self._model = None

    def _begin_tool(self, event: e.ToolExecutionStarted, at_ms: int) -> None:
        place = event.step_number, event.index
        again = self._tools.pop(place, None)
        if again is not None:
            again.end_ms, again.outcome = at_ms, "lost"
        name = self._names.get(place, event.name) + (f" attempt {event.attempt}" if event.attempt > 1 else "")
        span = self._tools[place] = Span(name=f"  {name}", kind="tool", begin_ms=at_ms)
        self._spans.append(span)

    def _speak(self, event: e.ToolExecutionProgress, at_ms: int) -> None:
        span = self._tools.get((event.step_number, event.index))
        if span is not None and span.spoke_ms is None:
            span.spoke_ms = at_ms

    def _end_tool(self, event: e.ToolExecutionFinished, at_ms: int) -> None:
        span = self._tools.pop((event.step_number, event.index), None)
        if span is None:
            return
        span.end_ms = at_ms
        if span.spoke_ms is None:  # what the tool itself needed is known, even if it said nothing meanwhile
            span.spoke_ms = max(span.begin_ms, at_ms - int(event.duration * 1000))
        failed = event.error is not None or (event.tool_result is not None and event.tool_result.is_error)
        span.outcome = "aborted" if event.aborted else "failed" if failed else ""
