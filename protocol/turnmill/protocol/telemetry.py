"""What a process tells about its own work: an event at the start and at the end of everything that takes time.

Whoever wants to know calls `subscribe`. Events are told in the process in which they happen, at once and in order:
`turn`, `step`, `tool` and `hook` by the coordinator, `model`, `tool_run`, `hook_run` and `reasoning.delta` by the worker.
Every `.start` is followed by exactly one `.stop` or `.exception`, whatever becomes of the turn.

Without a subscriber nothing is built: whoever tells looks at `TELEMETRY.is_active` first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from .content import Cost, ErrorInfo, Usage
from .errors import DefinitionError
from .logs import get_logger

TelemetryName: TypeAlias = Literal[
    "turn.start",
    "turn.stop",
    "turn.exception",
    "step.start",
    "step.stop",
    "step.exception",
    "model.start",
    "model.stop",
    "model.exception",
    "tool.start",
    "tool.stop",
    "tool.exception",
    "tool_run.start",
    "tool_run.stop",
    "tool_run.exception",
    "hook.start",
    "hook.stop",
    "hook.exception",
    "hook_run.start",
    "hook_run.stop",
    "hook_run.exception",
    "reasoning.delta",
]
Status: TypeAlias = Literal["ok", "error", "halted"]

_log = get_logger(__name__)


class TelemetryEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One start, one end (`stop`: it came to an end of its own; `exception`: it was cut short), or reasoning as it comes.

    `turn_id` is the run's id. `at` and `started_at` are Unix times in seconds: `at` is when it happened, `started_at` when
    the turn, step or call began. `duration_seconds` and `status` stand on ends: `ok`, `error`, or `halted` for what was
    stopped or waits for its host. It counts from the `.start` before, so a suspended turn's waiting is no part of it.
    """

    name: TelemetryName
    turn_id: str
    session_id: str
    agent_id: str
    at: float
    started_at: float
    step: int = 0
    call: str = ""
    """The call's name on the wire: `2` is the model call of step 2, `2.0` its first tool call."""
    attempt: int = 1
    subject: str = ""
    """The tool's, the hook's or the model's name."""
    tool_call_id: str = ""
    duration_seconds: float | None = None
    status: Status | None = None
    usage: Usage | None = None
    """On `step` and `model` ends of that call, on `turn` ends of all steps."""
    cost: Cost | None = None
    metadata: dict[str, Any] = {}
    """The caller's, as given to the turn; never a provider's."""
    error: ErrorInfo | None = None
    trace: dict[str, str] = {}
    """The caller's W3C trace context."""
    details: dict[str, Any] = {}
    """What only some events have; docs/telemetry.md lists it. Content (arguments, results, reasoning) is only here."""

    @property
    def kind(self) -> str:
        """`turn`, `step`, `model`, `tool`, `tool_run`, `hook`, `hook_run` or `reasoning`."""
        return self.name.partition(".")[0]

    @property
    def is_start(self) -> bool:
        return self.name.endswith(".start")

    @property
    def is_end(self) -> bool:
        return self.status is not None


Callback: TypeAlias = Callable[[TelemetryEvent], object]


class Telemetry:
    """The subscribers of one process."""

    __slots__ = ("_callbacks", "is_active")

    def __init__(self) -> None:
        self.is_active = False
        self._callbacks: tuple[Callback, ...] = ()

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Have `callback` called with every event of this process; returns what ends that.

        It is called on the event loop, so it must be quick. What it raises is logged and disturbs nobody.
        """
        if not callable(callback):
            raise DefinitionError(f"telemetry goes to a function, not to a {type(callback).__name__}")
        if inspect.iscoroutinefunction(callback):
            raise DefinitionError("telemetry goes to a plain function: an async one would never be awaited")
        entry: Callback = lambda event: callback(event)  # noqa: E731  # an identity of its own for each subscription
        self._set((*self._callbacks, entry))
        return lambda: self._set(tuple(known for known in self._callbacks if known is not entry))

    def emit(self, event: TelemetryEvent) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                _log.exception("a telemetry callback failed", telemetry=event.name, turn=event.turn_id)

    def _set(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks
        self.is_active = bool(callbacks)


TELEMETRY = Telemetry()
"""This process's."""
subscribe = TELEMETRY.subscribe
