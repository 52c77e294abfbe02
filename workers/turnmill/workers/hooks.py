"""Hooks: functions of the application that look at a turn where it stands, and may change how it goes on.

A hook takes one argument and may be sync or async. What it is given and what it may return depends on where it stands:

    before_step          StepStartEvent          StepControl or None
    after_step           StepFinishEvent         -
    before_tool_call     BeforeToolCallEvent     BeforeToolCallResult or None
    after_tool_call      AfterToolCallEvent      AfterToolCallResult or None
    on_reasoning_event   ReasoningHookEvent      -
    a stop condition     list[StepResult]        bool, StopDecision or None
    an approval policy   ApprovalEvent           bool: whether a person must approve the call
    extract_signals      str, the final text     list

It runs in a worker that carries the application's code, and runs again when that worker dies. One that raises fails the
turn with its name. `@hook` gives a function a name, a queue or a timeout of its own; plain functions have the defaults.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

import msgspec

from turnmill.protocol.content import Message, ToolCall, ToolResult, Usage
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import HookSpec
from turnmill.protocol.step_results import StepResult

__all__ = [
    "AfterToolCallEvent",
    "AfterToolCallResult",
    "ApprovalEvent",
    "ApprovalPolicy",
    "BeforeToolCallEvent",
    "BeforeToolCallResult",
    "Hook",
    "HookEvent",
    "ReasoningHookEvent",
    "StepControl",
    "StepFinishEvent",
    "StepResult",
    "StepStartEvent",
    "StopDecision",
    "hook",
    "hook_for",
]

P = ParamSpec("P")
R = TypeVar("R")


# --- what hooks are given


class HookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn stands. `metadata` is what its caller gave it."""

    step_number: int
    session_id: str = ""
    turn_id: str = ""
    agent_id: str = ""
    metadata: dict[str, Any] = {}


class StepStartEvent(HookEvent, frozen=True, kw_only=True):
    """A model call is about to be made with these messages; `tools` are the names of those that it may call."""

    messages: list[Message]
    tools: list[str] = []


class StepFinishEvent(HookEvent, frozen=True, kw_only=True):
    """A step is over and stored."""

    step: StepResult
    usage: Usage | None = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return self.step.text


class BeforeToolCallEvent(HookEvent, frozen=True, kw_only=True):
    """A call is about to be run."""

    tool_call: ToolCall
    messages: list[Message]


class AfterToolCallEvent(HookEvent, frozen=True, kw_only=True):
    """A call has its result; it is not told to the model yet."""

    tool_call: ToolCall
    tool_result: ToolResult
    messages: list[Message]


class ReasoningHookEvent(HookEvent, frozen=True, kw_only=True):
    """A piece of the model's reasoning, after the model call that it belongs to. `kind`: summary, delta, signature, state."""

    kind: str
    provider: str = ""
    text: str | None = None
    data: dict[str, Any] = {}


class ApprovalEvent(HookEvent, frozen=True, kw_only=True):
    """A call that may need a person's approval."""

    tool_call: ToolCall


# --- what hooks return


class StepControl(msgspec.Struct, frozen=True):
    """Messages for this one model call, behind the conversation; or the end of the turn in place of the call."""

    inject_messages: Sequence[Message | dict[str, Any]] = ()
    stop: bool = False
    stop_reason: str | None = None


class BeforeToolCallResult(msgspec.Struct, frozen=True):
    """`block` keeps the call from being run, and tells the model the reason. `arguments` replace the call's. With `result`,
    which may be None too, the call is answered in its tool's place."""

    block: bool = False
    reason: str | None = None
    arguments: dict[str, Any] | None = None
    result: Any = msgspec.UNSET
    is_error: bool = False


class AfterToolCallResult(msgspec.Struct, frozen=True):
    """`result`, which may be None too, replaces the tool's; `terminate` ends the turn after this step."""

    result: Any = msgspec.UNSET
    is_error: bool | None = None
    terminate: bool = False
    terminate_reason: str | None = None


class StopDecision(msgspec.Struct, frozen=True):
    """The end of a turn, with a name and a reason for its termination; the name is the condition's where it is not given."""

    stop: bool = True
    name: str | None = None
    reason: str | None = None


# --- the hook itself


class Hook(Generic[P, R]):
    """A function with a name by which workers find it. Calling it calls the function."""

    def __init__(self, function: Callable[P, R], spec: HookSpec) -> None:
        update_wrapper(self, function)  # first, because it copies the function's attributes
        self.function = function
        self.spec = spec
        self.name = spec.name
        self.is_async = inspect.iscoroutinefunction(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Hook({self.name!r})"


ApprovalPolicy: TypeAlias = Callable[[ApprovalEvent], Any] | Hook[Any, Any]
"""Says of a call whether a person must approve it: returns a bool, or an awaitable of one."""


@overload
def hook(function: Callable[P, R], /) -> Hook[P, R]: ...


@overload
def hook(
    *,
    name: str | None = None,
    queue: str = "hooks",
    timeout: float | None = None,
    start_timeout: float | None = None,
) -> Callable[[Callable[P, R]], Hook[P, R]]: ...


def hook(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    queue: str = "hooks",
    timeout: float | None = None,
    start_timeout: float | None = None,
) -> Hook[P, R] | Callable[[Callable[P, R]], Hook[P, R]]:
    """Make a hook of a function, bare (`@hook`) or with its policy (`@hook(timeout=5)`).

    `timeout` bounds a run, `start_timeout` the wait for a worker, both in seconds. Workers with different applications
    need queues of their own, as for tools.
    """

    def define(function: Callable[P, R]) -> Hook[P, R]:
        title = getattr(function, "__name__", "") if name is None else name
        _check_name(title, function)
        if not valid_name(queue):
            raise DefinitionError(
                f"hook {title!r}: {queue!r} is no name for a queue: use letters, digits and _ . : @ -"
            )
        seconds = {
            "timeout_seconds": _positive(title, "timeout", timeout),
            "start_timeout_seconds": _positive(title, "start_timeout", start_timeout),
        }
        given = {key: value for key, value in seconds.items() if value is not None}
        return hook_for(function, HookSpec(name=title, queue=queue, **given))

    return define if function is None else define(function)


def hook_for(function: Any, spec: HookSpec) -> Hook[Any, Any]:
    """The hook of a function under a spec that was made elsewhere; a hook that has this spec is given back.

    Raises `DefinitionError` for what cannot be called with one argument.
    """
    if isinstance(function, Hook):
        return function if function.spec == spec else Hook(function.function, spec)
    if not callable(function) or isinstance(function, type):
        raise DefinitionError(f"the hook {spec.name!r} needs a function, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(f"the hook {spec.name!r} yields: it must return what it decides")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise DefinitionError(f"the hook {spec.name!r} must take one argument, its event: {error}") from error
    except ValueError:
        pass  # a function without a signature, such as a built-in one
    return Hook(function, spec)


def _check_name(name: Any, function: Any) -> None:
    if not isinstance(name, str) or not valid_name(name):
        raise DefinitionError(
            f"{name!r} is no name for the hook {function!r}: use 1 to 128 letters, digits and _ . : @ - (set name=...)"
        )


def _positive(name: str, option: str, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
        raise DefinitionError(f"hook {name!r}: {option} must be a number of seconds above 0, not {seconds!r}")
    return float(seconds)
