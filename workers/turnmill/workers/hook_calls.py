"""Carrying out a call to a hook: its event from the task and the transcript, the function, its decision for the machine.

A hook's task is a tool task whose arguments are the event. What needs the conversation says which entries, so the task
stays small however long the conversation is. Whatever goes wrong becomes an error of kind `hook_failed`.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar, cast

import msgspec

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.blobs import resolve_result
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, Message, ToolCall, ToolResult, Usage
from turnmill.protocol.errors import EngineError, ErrorKind
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.messages import Segment, ToolReply, ToolTask
from turnmill.protocol.step_results import StepResult, step_results, unpack_message
from turnmill.protocol.values import unpack_value

from .conversation import ConversationLost, read_conversation
from .execution import CallStopped, RanOutOfTime, Run, describe, run_function
from .hooks import (
    AfterToolCallEvent,
    AfterToolCallResult,
    ApprovalEvent,
    BeforeToolCallEvent,
    BeforeToolCallResult,
    Hook,
    ReasoningHookEvent,
    StepControl,
    StepFinishEvent,
    StepStartEvent,
    StopDecision,
)
from .tool_results import content_of, wire_value

T = TypeVar("T")


class _Facts(msgspec.Struct, frozen=True):
    """What the events of all points may say; each says its part."""

    step_number: int = 0
    messages: int = 0
    view: list[Segment] = []
    view_end: int = 0
    first_message: int = 0
    end_message: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None
    tools: list[str] = []
    tool_call: ToolCall | None = None
    tool_result: ToolResult | None = None
    events: list[dict[str, Any]] = []
    text: str = ""


class HookFailed(Exception):
    """A hook that gave no decision; the text is for the person who wrote it."""


async def call_hook(
    engine: Engine, keys: PartitionKeys, hook: Hook[Any, Any], task: ToolTask, cancelled: AbortSignal
) -> ToolReply:
    """Run a hook for its task. Raises `EngineError` where the conversation cannot be read, and nothing else but a
    cancellation."""
    started = time.perf_counter()
    try:
        events = await _Events(engine, keys, task).build()
        decision = await _decide(hook, task, events, cancelled)
    except CallStopped:
        info = ErrorInfo(kind=ErrorKind.ABORTED, message=cancelled.reason or "the turn was stopped")
        return task.answer(ToolReply, error=info, duration_seconds=time.perf_counter() - started)
    except EngineError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, HookFailed | ConversationLost) else _named(error)
        info = ErrorInfo(kind=ErrorKind.HOOK_FAILED, message=text)
        return task.answer(ToolReply, error=info, duration_seconds=time.perf_counter() - started)
    result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result=decision)
    return task.answer(ToolReply, result=result, duration_seconds=time.perf_counter() - started)


async def _decide(hook: Hook[Any, Any], task: ToolTask, events: list[Any], cancelled: AbortSignal) -> Any:
    """The decision about the last event; only reasoning comes in several, and is not decided about."""
    decision: Any = {}
    until = time.monotonic() + task.timeout_seconds
    for event in events:
        run = Run("hook", hook.name, task.call, max(0.0, until - time.monotonic()), cancelled)
        try:
            value, raised = await run_function(hook.function, hook.is_async, run, event)
        except RanOutOfTime:
            raise HookFailed(f"timeout after {task.timeout_seconds:.10g} s") from None
        if raised is not None:
            raise HookFailed(_named(raised))
        decision = wire_value(decision_of(task.hook or "", value))
    return decision


def _named(error: BaseException) -> str:
    text, kind = describe(error), type(error).__name__
    return text if text.startswith(kind) else f"{kind}: {text}"


# --- events


class _Events:
    """Makes a hook's argument of its task."""

    def __init__(self, engine: Engine, keys: PartitionKeys, task: ToolTask) -> None:
        self._engine = engine
        self._keys = keys
        self._task = task
        self._facts = msgspec.convert(task.arguments, _Facts)
        self._common: dict[str, Any] = {
            "step_number": self._facts.step_number or task.step_number,
            "session_id": task.session_id,
            "turn_id": task.turn_id,
            "agent_id": task.agent_id,
            "metadata": unpack_value(task.metadata),
        }

    async def build(self) -> list[Any]:
        facts, common = self._facts, self._common
        match self._task.hook:
            case "before_step":
                return [StepStartEvent(**common, messages=await self._conversation(), tools=facts.tools)]
            case "after_step":
                step = (await self._steps() or [StepResult(text="")])[-1]
                usage, reason = facts.usage or step.usage, facts.finish_reason or step.finish_reason
                return [StepFinishEvent(**common, step=step, usage=usage, finish_reason=reason)]
            case "before_tool_call":
                messages = await self._conversation()
                return [BeforeToolCallEvent(**common, tool_call=self._call(), messages=messages)]
            case "after_tool_call":
                messages, result = await self._conversation(), await self._result()
                return [AfterToolCallEvent(**common, tool_call=self._call(), tool_result=result, messages=messages)]
            case "on_reasoning_event":
                return [ReasoningHookEvent(**common, **_reasoning(event)) for event in facts.events]
            case "stop_when":
                return [await self._steps()]
            case "approval":
                return [ApprovalEvent(**common, tool_call=self._call())]
            case "signals":
                return [facts.text]
            case point:
                raise HookFailed(f"this worker knows no hook at {point!r}: it is older than its coordinator")

    async def _conversation(self) -> list[Message]:
        facts = self._facts
        messages = await read_conversation(
            self._engine, self._keys, self._task.session_id, facts.messages, facts.view, facts.view_end
        )
        return [unpack_message(message) for message in messages]

    async def _steps(self) -> list[StepResult]:
        """The steps in `[first_message, end_message)` of the transcript."""
        facts = self._facts
        messages = await read_conversation(
            self._engine, self._keys, self._task.session_id, facts.end_message, view_end=facts.first_message
        )
        return step_results(unpack_message(message) for message in messages)

    def _call(self) -> ToolCall:
        call = self._facts.tool_call
        if call is None:
            raise HookFailed("its task names no tool call")
        return msgspec.structs.replace(call, arguments=unpack_value(call.arguments))

    async def _result(self) -> ToolResult:
        result = self._facts.tool_result
        if result is None:
            raise HookFailed("its task has no tool result")
        result = await resolve_result(self._engine, self._keys, result)
        return msgspec.structs.replace(result, result=unpack_value(result.result))


def _reasoning(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": event.get("kind", "delta"),
        "provider": event.get("provider", ""),
        "text": event.get("text"),
        "data": unpack_value(event.get("data", {})),
    }


# --- decisions


def decision_of(point: str, value: Any) -> dict[str, Any]:
    """What a hook returned, as the machine reads it. Raises `HookFailed` for what does not fit its place."""
    match point:
        case "before_step":
            control = _as(StepControl, value)
            injected = [msgspec.to_builtins(_message(item)) for item in control.inject_messages]
            return {"inject_messages": injected, "stop": bool(control.stop), "stop_reason": control.stop_reason}
        case "before_tool_call":
            before = _as(BeforeToolCallResult, value)
            return {**_fields(before), **_replacement(before.result), "arguments": _arguments(before.arguments)}
        case "after_tool_call":
            after = _as(AfterToolCallResult, value)
            return {**_fields(after), **_replacement(after.result)}
        case "stop_when":
            if value is None or isinstance(value, bool):
                return {"stop": bool(value)}
            return _fields(_as(StopDecision, value))
        case "approval":
            if not isinstance(value, bool):
                raise HookFailed(f"an approval policy returns True or False, not {_kind(value)}")
            return {"required": value}
        case "signals":
            if not isinstance(value, list | tuple | None):
                raise HookFailed(f"extract_signals returns a list, not {_kind(value)}")
            return {"signals": list(value or ())}
        case _:
            return {}


def _as(kind: type[T], value: Any) -> T:
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if isinstance(value, dict):
        try:
            return kind(**value)
        except TypeError as error:
            raise HookFailed(f"it returned a dict that is no {kind.__name__}: {error}") from None
    raise HookFailed(f"it returned {_kind(value)}, not a {kind.__name__} or None")


def _fields(decision: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(decision, name) for name in decision.__struct_fields__ if name != "result"}


def _replacement(result: Any) -> dict[str, Any]:
    if result is msgspec.UNSET:
        return {"has_result": False}
    if content_of(result) is not None:
        raise HookFailed("a hook's result must be a JSON value; only tools return texts, images and files as parts")
    return {"has_result": True, "result": result}


def _arguments(arguments: Any) -> dict[str, Any] | None:
    if arguments is not None and not isinstance(arguments, dict):
        raise HookFailed(f"a call's arguments are a dict, not {_kind(arguments)}")
    return cast("dict[str, Any] | None", arguments)


def _message(item: Any) -> Message:
    if isinstance(item, Message):
        return item
    try:
        return msgspec.convert(item, Message)
    except msgspec.ValidationError as error:
        raise HookFailed(f"an injected message is no message: {error}") from None


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
