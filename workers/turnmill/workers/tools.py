"""Tools: a function becomes something that a model can call.

`@tool` reads a function once, where it is defined: its signature gives the JSON Schema, its docstring the descriptions,
the decorator's arguments the policy. What cannot work is a `DefinitionError` there, not a surprise in a turn.

`run_tool` carries out one attempt at one call. A tool's failure is content for the model, never a crash of the worker:
whatever a tool does (raise, exit, hang, return what has no JSON form) becomes a result that says so. Only a cancellation
that comes from outside passes through, because it is addressed to the worker.

An async tool runs in the caller's task. A sync tool runs in a thread of its own, not in a bounded pool: no thread can be
stopped from outside, and a hung one must not take the slot of the next call. It sees `context.cancelled` instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import update_wrapper
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import msgspec
from pydantic import ValidationError

from turnmill.protocol.content import ErrorInfo, ToolResult
from turnmill.protocol.errors import DefinitionError, ErrorKind
from turnmill.protocol.keys import valid_name
from turnmill.protocol.logs import get_logger
from turnmill.protocol.specs import OnLost, ToolSpec

from .tool_context import AbortSignal, SendProgress, ToolContext, ToolExecutionContext, call_in_loop
from .tool_results import ToolOutput, content_of, wire_value
from .tool_signature import Signature, read_signature

__all__ = [
    "AbortSignal",
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
ERROR_TEXT_CHARACTERS_MAX = 4_000
ARGUMENT_ERRORS_MAX = 10
TOOL_ERROR = "tool_error"
"""The error kind of an attempt that its tool asked to repeat."""

_log = get_logger("turnmill.tools")
CANCELLATION_GRACE_SECONDS = 1.0
"""How long a cancelled tool may take to clean up before it is left behind."""


class ToolRetry(Exception):  # a request to try again, named as its author reads it: `raise ToolRetry(...)`
    """Raised by a tool: this attempt failed, another one may succeed. `retries=` on the tool says how many there are."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended: what a `ToolReply` needs, and the exception for the worker's log.

    `error` is set only where the tool asked for another attempt; a plain failure is a result with `is_error`.
    """

    result: ToolResult
    duration_seconds: float
    error: ErrorInfo | None = None
    exception: BaseException | None = None


# --- defining a tool


class Tool(Generic[P, R]):
    """A function that models can call. Calling it calls the function, as if it had never been decorated."""

    def __init__(self, function: Callable[P, R], spec: ToolSpec, signature: Signature) -> None:
        update_wrapper(self, function)  # first, because it copies the function's attributes
        self.function = function
        self.spec = spec
        self.name = spec.name
        self.is_async = inspect.iscoroutinefunction(function)
        self.context_parameter = signature.context
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
    approval: bool | Literal["never", "always"] = "never",
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
    approval: bool | Literal["never", "always"] = "never",
    concurrency: int | None = None,
    isolation: Literal["process"] | None = None,
    queue: str | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Make a tool of a function, bare (`@tool`) or with its policy (`@tool(timeout=30, retries=2)`).

    `timeout` bounds one attempt, `start_timeout` the wait for a worker, both in seconds. `retries` are the attempts after
    the first one, made when the tool raises `ToolRetry`. `idempotent` and `on_lost` say whether a call may run again when
    its worker died. `concurrency` bounds the calls that run at the same time in one worker.
    """

    def define(function: Callable[P, R]) -> Tool[P, R]:
        title = _tool_name(function, name)
        _check_isolation(title, isolation)
        policy = {
            "timeout_seconds": _positive(title, "timeout", timeout),
            "start_timeout_seconds": _positive(title, "start_timeout", start_timeout),
            "max_attempts": _retries(title, retries) + 1,
            "idempotent": idempotent,
            "on_lost": _one_of(title, "on_lost", on_lost, (None, "retry", "fail")),
            "approval": _approval(title, approval),
            "concurrency": _concurrency(title, concurrency),
            "queue": _queue(title, queue),
        }
        return _define(function, title, description, {key: value for key, value in policy.items() if value is not None})

    return define if function is None else define(function)


def _define(function: Callable[P, R], name: str, description: str | None, policy: dict[str, Any]) -> Tool[P, R]:
    signature = read_signature(function, name)
    documented = signature.description if description is None else description
    return Tool(function, ToolSpec(name=name, description=documented, schema=signature.schema, **policy), signature)


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


def _approval(tool_name: str, approval: bool | str) -> str:
    """A tool that asks for approval must not run without it: refused as long as nobody could give it."""
    wanted = ("always" if approval else "never") if isinstance(approval, bool) else approval
    _one_of(tool_name, "approval", wanted, APPROVALS)
    if wanted != "never":
        raise DefinitionError(f"tool {tool_name!r}: approval={approval!r} is not available yet")
    return "never"


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

    A tool that swallows its cancellation is left behind after a short grace, so that it costs no slot; what it returns
    then is void.
    """
    started = time.perf_counter()
    try:
        keywords = tool.validate(arguments)
    except Exception as error:  # pydantic's, or what a validator of the user's own types raises
        return _failure(
            context, tool, started, f"Error: invalid arguments for '{tool.name}': {_argument_errors(error)}", error
        )
    if tool.context_parameter is not None:
        keywords[tool.context_parameter] = context
    run = tool.function(**keywords) if tool.is_async else _run_in_thread(tool, keywords, context)
    try:
        value, raised = await _within(run, tool, context)
    except _TimedOut:
        return _timed_out(context, tool, started)
    if raised is not None:
        return _failed(context, tool, started, raised)
    return _succeeded(context, tool, started, value)


class _TimedOut(Exception):
    """The call's time is over. Not a `TimeoutError`: a tool may raise that itself."""


_LEFT_BEHIND: set[asyncio.Task[Any]] = set()


async def _within(
    run: Coroutine[Any, Any, Any], tool: Tool[..., Any], context: ToolContext
) -> tuple[Any, BaseException | None]:
    """What a run returns or raises, in a task of its own: it can be left behind, whatever it does with its cancellation."""
    task = asyncio.get_running_loop().create_task(_caught(run))
    try:
        done, _ = await asyncio.wait({task}, timeout=context.timeout_seconds)
    except asyncio.CancelledError:
        context.cancelled.set("cancelled")
        await _leave(task, tool, context)
        raise
    if done:
        return task.result()
    context.cancelled.set(ErrorKind.TIMEOUT)
    await _leave(task, tool, context)
    raise _TimedOut


async def _caught(run: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """A tool that exits, or is interrupted, must not take its worker along: errors are values from here on."""
    try:
        return await run, None
    except GeneratorExit:  # this coroutine is being closed, nobody takes an outcome
        raise
    except BaseException as error:
        return None, error


async def _leave(task: asyncio.Task[Any], tool: Tool[..., Any], context: ToolContext) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCELLATION_GRACE_SECONDS)
    if not task.done():
        _LEFT_BEHIND.add(task)
        task.add_done_callback(_LEFT_BEHIND.discard)
        _log.warning("tool.stuck", tool=tool.name, tool_call_id=context.tool_call_id)


def _succeeded(context: ToolContext, tool: Tool[..., Any], started: float, value: Any) -> ToolOutcome:
    try:
        content = content_of(value)
        result = ToolResult(
            tool_call_id=context.tool_call_id,
            tool_name=tool.name,
            result=wire_value(value) if content is None else None,
            content=content,
        )
    except Exception as error:  # what a value's own serializers raise is unknown
        reason = f"Error: execution failed (the result of '{tool.name}' cannot be sent: {_describe(error)})"
        return _failure(context, tool, started, reason, error)
    return ToolOutcome(result=result, duration_seconds=time.perf_counter() - started)


def _failed(context: ToolContext, tool: Tool[..., Any], started: float, error: BaseException) -> ToolOutcome:
    reason = _describe(error)
    info = None
    if isinstance(error, ToolRetry):
        info = ErrorInfo(kind=TOOL_ERROR, message=reason, retryable=True, retry_after_seconds=error.retry_after_seconds)
    return _failure(context, tool, started, f"Error: execution failed ({reason})", error, info)


def _timed_out(context: ToolContext, tool: Tool[..., Any], started: float) -> ToolOutcome:
    context.cancelled.set(ErrorKind.TIMEOUT)
    return _failure(context, tool, started, f"Error: execution failed (timeout after {context.timeout_seconds:.10g} s)")


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
        duration_seconds=time.perf_counter() - started,
        error=error,
        exception=exception,
    )


def _argument_errors(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return _describe(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" if item["loc"] else item["msg"] for item in found]
    if len(texts) > ARGUMENT_ERRORS_MAX:
        texts = [*texts[:ARGUMENT_ERRORS_MAX], f"and {len(texts) - ARGUMENT_ERRORS_MAX} more"]
    return _bounded("; ".join(texts))


def _describe(error: BaseException) -> str:
    """An error's own words, with its type where they say nothing alone."""
    try:
        text = str(error)
    except Exception:  # an error whose text cannot be made is still an error
        text = ""
    if not text:
        return type(error).__name__
    return _bounded(text if isinstance(error, Exception) else f"{type(error).__name__}: {text}")


def _bounded(text: str) -> str:
    """At most `ERROR_TEXT_CHARACTERS_MAX` characters that the wire can carry."""
    if len(text) > ERROR_TEXT_CHARACTERS_MAX:
        text = text[: ERROR_TEXT_CHARACTERS_MAX - 1] + "…"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# --- threads


async def _run_in_thread(tool: Tool[..., Any], keywords: dict[str, Any], context: ToolContext) -> Any:
    """Run a sync function in a new daemon thread that sees the caller's context variables."""
    loop = context._loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    variables = contextvars.copy_context()

    def body() -> None:
        value, error = None, None
        try:
            value = variables.run(tool.function, **keywords)
        except BaseException as raised:  # judged on the loop, where it cannot end the thread with a traceback
            error = raised
        call_in_loop(loop, deliver, value, error)

    def deliver(value: Any, error: BaseException | None) -> None:
        if ended.done():
            _log.warning("tool.late", tool=tool.name, tool_call_id=context.tool_call_id, failed=error is not None)
        else:
            ended.set_result((value, error))

    threading.Thread(target=body, name=f"tool-{tool.name}", daemon=True).start()
    value, error = await ended
    if error is not None:
        raise error
    # A decorator without `async` around an async function gives a coroutine: it belongs on the loop.
    return await value if inspect.iscoroutine(value) else value
