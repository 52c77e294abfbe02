"""Tools: a function becomes something that a model can call.

`@tool` reads a function once, where it is defined: its signature gives the JSON Schema, its docstring the descriptions,
the decorator's arguments the policy. What cannot work is a `DefinitionError` there, not a surprise in a turn.

`run_tool` carries out one attempt at one call. A tool's failure is content for the model, never a crash of the worker:
whatever a tool does (raise, exit, hang, return what has no JSON form) becomes a result that says so.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import msgspec
from pydantic import ValidationError

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.content import ErrorInfo, ToolResult
from turnmill.protocol.errors import DefinitionError, ErrorKind
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import Approval, HookSpec, OnLost, ToolSpec

from .child_process import ProcessResult
from .execution import CallStopped, RanOutOfTime, Run, bounded, describe, run_function
from .hooks import ApprovalPolicy, Hook, hook_for
from .tool_context import SendProgress, ToolContext, ToolExecutionContext
from .tool_results import ToolOutput, content_bytes, content_of, measured_value
from .tool_signature import Signature, read_signature

__all__ = [
    "AbortSignal",
    "ProcessResult",
    "SendProgress",
    "Tool",
    "ToolContext",
    "ToolExecutionContext",
    "ToolOutcome",
    "ToolOutput",
    "ToolRetry",
    "run_tool",
    "tool",
]

P = ParamSpec("P")
R = TypeVar("R")

APPROVALS = ("never", "always")
ARGUMENT_ERRORS_MAX = 10
TOOL_ERROR = "tool_error"
"""The error kind of an attempt that its tool asked to repeat."""


class ToolRetry(Exception):  # a request to try again, named as its author reads it: `raise ToolRetry(...)`
    """Raised by a tool: this attempt failed, another one may succeed. `retries=` on the tool says how many there are."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended: what a `ToolReply` needs, and the exception for the worker's log.

    `error` is set only where the tool asked for another attempt or was stopped; a plain failure is a result with
    `is_error`. `result_bytes` is about how long the result is on the wire.
    """

    result: ToolResult
    result_bytes: int
    duration_seconds: float
    error: ErrorInfo | None = None
    exception: BaseException | None = None


# --- defining a tool


class Tool(Generic[P, R]):
    """A function that models can call. Calling it calls the function, as if it had never been decorated."""

    def __init__(
        self,
        function: Callable[P, R],
        spec: ToolSpec,
        signature: Signature,
        approval_policy: Hook[Any, Any] | None = None,
    ) -> None:
        update_wrapper(self, function)  # first, because it copies the function's attributes
        self.function = function
        self.spec = spec
        self.name = spec.name
        self.is_async = inspect.iscoroutinefunction(function)
        self.context_parameter = signature.context
        self.approval_policy = approval_policy
        self._validate = signature.validate

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The function's keyword arguments. Raises pydantic's `ValidationError`, a `ValueError`, where they do not fit."""
        return self._validate(arguments)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    start_timeout: float | None = None,
    retries: int = 0,
    idempotent: bool = False,
    on_lost: OnLost | None = None,
    approval: bool | Literal["never", "always"] | ApprovalPolicy = "never",
    approval_timeout: float | None = None,
    idle_timeout: float | None = None,
    concurrency: int | None = None,
    isolation: Literal["process"] | None = None,
    queue: str | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    start_timeout: float | None = None,
    retries: int = 0,
    idempotent: bool = False,
    on_lost: OnLost | None = None,
    approval: bool | Literal["never", "always"] | ApprovalPolicy = "never",
    approval_timeout: float | None = None,
    idle_timeout: float | None = None,
    concurrency: int | None = None,
    isolation: Literal["process"] | None = None,
    queue: str | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Make a tool of a function, bare (`@tool`) or with its policy (`@tool(timeout=30, retries=2)`).

    `timeout` bounds one attempt, `start_timeout` the wait for a worker, both in seconds. `retries` are the attempts after
    the first one, made when the tool raises `ToolRetry`. `idempotent` and `on_lost` say whether a call may run again when
    its worker died. `concurrency` bounds the calls that run at the same time in one worker.

    `approval` says which calls wait for a person: none, all, or those for which a function says so that takes an
    `ApprovalEvent`; after `approval_timeout` seconds without a decision the call counts as denied. `idle_timeout` ends a
    call that has not reported progress for so many seconds.
    """

    def define(function: Callable[P, R]) -> Tool[P, R]:
        title = _tool_name(function, name)
        _check_isolation(title, isolation)
        approval_spec, policy_function = _approval(title, approval, approval_timeout)
        policy = {
            "timeout_seconds": _positive(title, "timeout", timeout),
            "start_timeout_seconds": _positive(title, "start_timeout", start_timeout),
            "max_attempts": _retries(title, retries) + 1,
            "idempotent": idempotent,
            "on_lost": _one_of(title, "on_lost", on_lost, (None, "retry", "fail")),
            "approval": approval_spec,
            "idle_timeout_seconds": _positive(title, "idle_timeout", idle_timeout),
            "concurrency": _concurrency(title, concurrency),
            "queue": _queue(title, queue),
        }
        given = {key: value for key, value in policy.items() if value is not None}
        return _define(function, title, description, given, policy_function)

    return define if function is None else define(function)


def _define(
    function: Callable[P, R],
    name: str,
    description: str | None,
    policy: dict[str, Any],
    approval: Hook[Any, Any] | None,
) -> Tool[P, R]:
    signature = read_signature(function, name)
    documented = signature.description if description is None else description
    spec = ToolSpec(name=name, description=documented, schema=signature.schema, **policy)
    return Tool(function, spec, signature, approval)


# --- reading the policy


def _tool_name(function: Callable[..., Any], name: str | None) -> str:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise DefinitionError(
            f"@tool needs a function, not {function!r}; write @tool or @tool(name=...) above a function"
        )
    title = function.__name__ if name is None else name
    if not isinstance(title, str) or not valid_name(title):
        raise DefinitionError(
            f"{title!r} is no name for a tool: use 1 to 128 letters, digits and _ . : @ - (set name=...)"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(
            f"tool {title!r} yields: a tool returns one value, and reports progress by its ToolContext"
        )
    return title


def _check_isolation(tool_name: str, isolation: str | None) -> None:
    if isolation == "process":
        raise DefinitionError(f"tool {tool_name!r}: isolation='process' is not available yet; it needs the rq extra")
    _one_of(tool_name, "isolation", isolation, (None,))


def _positive(tool_name: str, option: str, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
        raise DefinitionError(f"tool {tool_name!r}: {option} must be a number of seconds above 0, not {seconds!r}")
    return float(seconds)


def _retries(tool_name: str, retries: int) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise DefinitionError(f"tool {tool_name!r}: retries must be 0 or more, not {retries!r}")
    return retries


def _concurrency(tool_name: str, concurrency: int | None) -> int | None:
    if concurrency is not None and (
        isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1
    ):
        raise DefinitionError(f"tool {tool_name!r}: concurrency must be 1 or more, not {concurrency!r}")
    return concurrency


def _approval(tool_name: str, approval: Any, timeout: float | None) -> tuple[Approval, Hook[Any, Any] | None]:
    """The tool's approval, and the code of its policy where it has one."""
    seconds = _positive(tool_name, "approval_timeout", timeout) or Approval().timeout_seconds
    if callable(approval):
        hook = _policy_hook(tool_name, approval)
        return Approval(mode="policy", policy=hook.spec, timeout_seconds=seconds), hook
    wanted = ("always" if approval else "never") if isinstance(approval, bool) else approval
    return Approval(mode=_one_of(tool_name, "approval", wanted, APPROVALS), timeout_seconds=seconds), None


def _policy_hook(tool_name: str, policy: Any) -> Hook[Any, Any]:
    """A plain function is named after its tool, so that each tool may have one."""
    return policy if isinstance(policy, Hook) else hook_for(policy, HookSpec(name=f"{tool_name}.approval"))


def _queue(tool_name: str, queue: str | None) -> str | None:
    if queue is not None and not (isinstance(queue, str) and valid_name(queue)):
        raise DefinitionError(
            f"tool {tool_name!r}: {queue!r} is no name for a queue: use letters, digits and _ . : @ -"
        )
    return queue


def _one_of(tool_name: str, option: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise DefinitionError(f"tool {tool_name!r}: {option}={value!r} is not one of {choices}")
    return value


# --- running a tool


async def run_tool(tool: Tool[..., Any], arguments: Mapping[str, Any], context: ToolContext) -> ToolOutcome:
    """One attempt at one call, within `context.timeout_seconds`. Raises nothing but a cancellation from outside.

    When `context.cancelled` is set before the tool has ended, the outcome is an error of kind `aborted`.
    """
    started = time.perf_counter()
    try:
        keywords = tool.validate(arguments)
    except Exception as error:  # pydantic's, or what a validator of the user's own types raises
        text = f"Error: invalid arguments for '{tool.name}': {_argument_errors(error)}"
        return _failure(context, tool, started, text, error)
    if tool.context_parameter is not None:
        keywords[tool.context_parameter] = context
    if not tool.is_async:
        context._loop = asyncio.get_running_loop()
    run = Run(
        "tool",
        tool.name,
        context.tool_call_id,
        context.timeout_seconds,
        context.cancelled,
        context.idle_timeout_seconds,
    )
    context._on_progress = run.progress
    try:
        value, raised = await run_function(tool.function, tool.is_async, run, **keywords)
    except RanOutOfTime as error:
        return _failure(context, tool, started, f"Error: execution failed ({error})")
    except CallStopped:
        return _stopped(context, tool, started)
    if raised is not None:
        return _failed(context, tool, started, raised)
    return _succeeded(context, tool, started, value)


def _succeeded(context: ToolContext, tool: Tool[..., Any], started: float, value: Any) -> ToolOutcome:
    try:
        content, plain = content_of(value), None
        if content is None:
            plain, size = measured_value(value)
        else:
            size = content_bytes(content)
    except Exception as error:  # what a value's own serializers raise is unknown
        reason = f"Error: execution failed (the result of '{tool.name}' cannot be sent: {describe(error)})"
        return _failure(context, tool, started, reason, error)
    result = ToolResult(tool_call_id=context.tool_call_id, tool_name=tool.name, result=plain, content=content)
    return ToolOutcome(result=result, result_bytes=size, duration_seconds=time.perf_counter() - started)


def _failed(context: ToolContext, tool: Tool[..., Any], started: float, error: BaseException) -> ToolOutcome:
    reason = describe(error)
    info = None
    if isinstance(error, ToolRetry):
        info = ErrorInfo(kind=TOOL_ERROR, message=reason, retryable=True, retry_after_seconds=error.retry_after_seconds)
    return _failure(context, tool, started, f"Error: execution failed ({reason})", error, info)


def _stopped(context: ToolContext, tool: Tool[..., Any], started: float) -> ToolOutcome:
    reason = context.cancelled.reason or "the turn was stopped"
    info = ErrorInfo(kind=ErrorKind.ABORTED, message=reason)
    return _failure(context, tool, started, f"Error: aborted ({reason})", error=info)


def _failure(
    context: ToolContext,
    tool: Tool[..., Any],
    started: float,
    text: str,
    exception: BaseException | None = None,
    error: ErrorInfo | None = None,
) -> ToolOutcome:
    return ToolOutcome(
        result=ToolResult(tool_call_id=context.tool_call_id, tool_name=tool.name, result=text, is_error=True),
        result_bytes=len(text),
        duration_seconds=time.perf_counter() - started,
        error=error,
        exception=exception,
    )


def _argument_errors(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return describe(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" if item["loc"] else item["msg"] for item in found]
    if len(texts) > ARGUMENT_ERRORS_MAX:
        texts = [*texts[:ARGUMENT_ERRORS_MAX], f"and {len(texts) - ARGUMENT_ERRORS_MAX} more"]
    return bounded("; ".join(texts))
