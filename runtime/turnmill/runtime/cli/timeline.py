"""Where a turn's time went: bars of its model calls, tool calls, hooks and rests, from the times of its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    for the first token. `end_ms` is None while it goes on. `kind`: model, tool, hook, or rest (the turn is suspended).
    `depth` is 0 for the steps of the turn itself, 1 for their calls, 2 for the steps of sub-turns, which have a `turn_id`."""

    name: str
    kind: str
    begin_ms: int
    spoke_ms: int | None = None
    end_ms: int | None = None
    outcome: str = ""
    depth: int = 0
    turn_id: str | None = None


def spans_of(events: Sequence[Timed], sub_turns: Mapping[str, Sequence[Timed]] | None = None) -> list[Span]:
    """The spans in the order they began; those of a sub-turn stand behind the call that started it. What goes on at the
    last event has no end. `sub_turns` are the events of turns below, by their ids."""
    return _Reader(events[0][0].at_ms, sub_turns or {}).read(events) if events else []


def draw(spans: Sequence[Span], width: int) -> Iterator[str]:
    """One line for each span: `.` while nothing was heard, `#` from then on, `>` where it goes on."""
    if not spans:
        yield "nothing has happened yet"
        return
    total = max(1, *(span.end_ms or span.spoke_ms or span.begin_ms for span in spans))
    names = min(_NAME_WIDTH_MAX, max(len(span.name) + 2 * span.depth for span in spans))
    room = max(_BAR_WIDTH_MIN, width - names - 29)
    yield f"{'':{names}}  0 s{seconds_text(total / 1000):>{room - 3}}"
    for span in spans:
        name = "  " * span.depth + shortened(span.name, max(8, names - 2 * span.depth))
        yield f"{name:{names}}  {_bar(span, total, room)}  {_words(span)}".rstrip()


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

    def __init__(
        self, origin_ms: int, sub_turns: Mapping[str, Sequence[Timed]], turn_id: str | None = None, depth: int = 0
    ) -> None:
        self._origin_ms = origin_ms
        self._sub_turns = sub_turns
        self._turn_id = turn_id
        self._depth = depth
        self._spans: list[Span] = []
        self._model: Span | None = None
        self._rest: Span | None = None
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
            case e.SubTurnStarted():
                self._sub_turn(event)
            case e.HookFinished():
                self._hook(event, at_ms)
            case e.TurnSuspended():
                self._end_model(at_ms, "failed" if event.error is not None else "")
                self._rest = self._add(Span(name="suspended", kind="rest", begin_ms=at_ms))
            case e.TurnResumed():
                self._end_rest(at_ms)
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
                self._end_rest(at_ms)
            case _:
                return

    def _add(self, span: Span) -> Span:
        """The span, in its depth: calls below their step, and steps of sub-turns below their call."""
        span.depth = self._depth + (span.kind in ("tool", "hook"))
        span.turn_id = self._turn_id
        self._spans.append(span)
        return span

    def _begin_model(self, name: str, at_ms: int) -> None:
        self._model = self._add(Span(name=name, kind="model", begin_ms=at_ms))

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
        self._tools[place] = self._add(Span(name=name, kind="tool", begin_ms=at_ms))

    def _sub_turn(self, event: e.SubTurnStarted) -> None:
        reader = _Reader(self._origin_ms, self._sub_turns, event.turn_id, self._depth + 2)
        self._spans += reader.read(self._sub_turns.get(event.turn_id, ()))

    def _hook(self, event: e.HookFinished, at_ms: int) -> None:
        begin_ms = max(0, at_ms - int(event.duration * 1000))
        span = self._add(Span(name=f"{event.point} {event.name}", kind="hook", begin_ms=begin_ms))
        span.spoke_ms, span.end_ms = begin_ms, at_ms
        span.outcome = "" if event.error is None else "failed"

    def _end_rest(self, at_ms: int) -> None:
        if self._rest is not None:
            self._rest.end_ms, self._rest = at_ms, None

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
