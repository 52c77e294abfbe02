"""The provider `scripted`: plays replies that were written down, for rehearsals, tests and benchmarks.

Which reply is played depends on the request alone: its number is the count of assistant messages after the last user
message, clamped to the last reply. So a retry, another worker or a restart plays the same one. Texts and arguments may
hold `${input}` (the last user message's text), `${results[0]}` and `${result}` (the first and the last of the tool
results that the request ends with).

A strict script rejects, as real providers do, a history in which a tool call lacks its result; one with a window, what is
longer than that.

Scripts are Python objects in the application, or a JSON file: `{"<name>": {"strict": false, "replies": [{"text": "hi"}]}}`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from turnmill.protocol.content import (
    Cost,
    ErrorInfo,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    Usage,
)
from turnmill.protocol.errors import ConfigurationError, DefinitionError, ErrorKind
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from turnmill.protocol.keys import valid_name
from turnmill.workers.models import generated_call_id
from turnmill.workers.sendable import sendable_call

from .base import Completed, Live, ProviderError, ProviderRequest, Streamed
from .scripted_checks import history_fault as history_fault
from .scripted_checks import refuse_overflow, result_text

REQUESTS_MAX = 10_000
"""Requests that a provider remembers; the oldest are forgotten first."""

Outcome: TypeAlias = Literal["open", "finished", "error", "cancelled", "closed"]


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of a reply. `arguments` is an object, or the text that the model gave in its place, which may be broken.

    Without an `id` one is made that is the same in every attempt.
    """

    name: str
    arguments: dict[str, Any] | str = {}
    id: str | None = None
    metadata: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model answers to one request: reasoning, then text, then tool calls.

    `chunks` are the pieces the text comes in: the pieces themselves, or into how many `text` is split. `fragments` splits
    each call's arguments, the calls' fragments interleaved; 0 gives calls whole, without live events. Delays are before the
    first event and between events. `error` comes first, or after `error_after_chunks` events; `cut` ends the stream without
    a finish. `attempts` are replies for the first, second, ... attempt at the request, the last one for all further ones.
    `usage` comes with the end, or after `usage_after_chunks` events, then also where the call fails or is stopped; `cost` is
    what this provider says of it.
    """

    text: str = ""
    chunks: list[str] | int = 1
    reasoning: str | list[ReasoningPart] = ""
    tool_calls: list[Call] = []
    fragments: int = 1
    usage: Usage | None = None
    usage_after_chunks: int | None = None
    cost: Cost | None = None
    finish: str | None = None
    delay_seconds: float = 0.0
    first_delay_seconds: float = 0.0
    error: ErrorInfo | None = None
    error_after_chunks: int = 0
    cut: bool = False
    attempts: list[Reply] = []

    def __post_init__(self) -> None:
        if self.text and isinstance(self.chunks, list):
            raise ValueError("a reply has either `text` or a list of `chunks`")
        if self.fragments < 0 or (isinstance(self.chunks, int) and self.chunks < 1):
            raise ValueError("`chunks` is at least 1, `fragments` at least 0")
        if self.attempts and msgspec.structs.replace(self, attempts=[]) != Reply():
            raise ValueError("a reply with `attempts` has nothing else: write it into the attempts")


ReplyFunction: TypeAlias = Callable[[ProviderRequest], Reply | Awaitable[Reply]]


class Script(msgspec.Struct, frozen=True):
    """A model by its replies. A function, in place of all replies or of one, makes the reply from the request; an async
    one may wait, which lets a test hold a model call without sleeping.

    With a `window` longer requests fail as `context_overflow`: characters of the system prompt and of the messages' texts,
    arguments and results.
    """

    name: str
    replies: Sequence[Reply | ReplyFunction] | ReplyFunction
    strict: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if not valid_name(self.name):
            raise DefinitionError(f"{self.name!r} is no name for a script: use 1 to 128 letters, digits and _ . : @ -")
        if callable(self.replies):
            return
        if not isinstance(self.replies, Sequence) or not self.replies:
            raise DefinitionError(f"script {self.name!r} needs a list of at least one reply, or a function")
        for reply in self.replies:
            if not (isinstance(reply, Reply) or callable(reply)):
                raise DefinitionError(f"script {self.name!r}: {reply!r} is neither a Reply nor a function")

    async def reply_to(self, request: ProviderRequest) -> Reply:
        """The reply for this request and attempt."""
        reply: Any = self.replies
        if not callable(reply):
            reply = reply[min(reply_number(request.messages), len(reply) - 1)]
        if callable(reply):
            reply = reply(request)
            if isinstance(reply, Awaitable):
                reply = await reply
        if not isinstance(reply, Reply):
            raise TypeError(f"it gave a {type(reply).__name__}, not a Reply")
        return reply.attempts[min(request.attempt, len(reply.attempts)) - 1] if reply.attempts else reply


class Recorded(msgspec.Struct):
    """One request that came, and how its stream ended: `closed` means that its reader went away."""

    request: ProviderRequest
    opened_at: float
    closed_at: float | None = None
    outcome: Outcome = "open"


class ScriptedProvider:
    """Plays scripts by name, and remembers what it was asked.

    With a `log_path` every request is also appended there when its stream ends, as one line of JSON, so that a test sees
    what models in other processes were asked.
    """

    def __init__(
        self, scripts: Iterable[Script] = (), *, log_path: str | Path | None = None, requests_max: int = REQUESTS_MAX
    ) -> None:
        self.scripts = {script.name: script for script in scripts}
        self.requests: deque[Recorded] = deque(maxlen=requests_max)
        self._log_path = Path(log_path) if log_path is not None else None
        self._log_file: int | None = None

    async def stream(self, request: ProviderRequest) -> AsyncIterator[Streamed]:
        recorded = Recorded(request=request, opened_at=time.time())
        self.requests.append(recorded)
        outcome: Outcome = "error"
        try:
            script = self._find(request.model)
            _refuse_fault(script, request)
            if script.window is not None:
                refuse_overflow(request, script.window)
            reply = await _reply(script, request)
            message, events = _render(reply, request)
            if reply.error is not None:
                events = events[: reply.error_after_chunks]
            if reply.first_delay_seconds:
                await asyncio.sleep(reply.first_delay_seconds)
            for number, event in enumerate(_with_spent(reply, events)):
                if number and reply.delay_seconds:
                    await asyncio.sleep(reply.delay_seconds)
                yield event
            _fail_as_written(reply)
            outcome = "finished"
            yield Completed(message=message, finish_reason=_finish_reason(reply), usage=reply.usage, cost=reply.cost)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except GeneratorExit:
            outcome = "finished" if outcome == "finished" else "closed"
            raise
        finally:
            recorded.outcome, recorded.closed_at = outcome, time.time()
            self._log(recorded)

    async def close(self) -> None:
        if self._log_file is not None:
            os.close(self._log_file)
            self._log_file = None

    def _find(self, name: str) -> Script:
        script = self.scripts.get(name)
        if script is None:
            known = ", ".join(sorted(self.scripts)) or "none"
            raise _error(ErrorKind.BAD_REQUEST, f"no script {name!r}. Available: {known}")
        return script

    def _log(self, recorded: Recorded) -> None:
        if self._log_path is None:
            return
        if self._log_file is None:
            self._log_file = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # One write per line: what several processes append does not mix.
        os.write(self._log_file, msgspec.json.encode(_summary(recorded)) + b"\n")


def load_scripts(path: str | Path) -> list[Script]:
    """The scripts of a JSON file. Raises `ConfigurationError` that says what is wrong where."""
    try:
        content = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, _ScriptEntry])
    except OSError as error:
        raise ConfigurationError(f"cannot read the scripts in {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the scripts in {path} are not as expected: {error}") from error
    try:
        return [Script(name, entry.replies, entry.strict, entry.window) for name, entry in content.items()]
    except DefinitionError as error:
        raise ConfigurationError(f"the scripts in {path} are not as expected: {error}") from error


class _ScriptEntry(msgspec.Struct, forbid_unknown_fields=True):
    replies: list[Reply]
    strict: bool = False
    window: int | None = None


# --- reading the request


def reply_number(messages: Sequence[Message]) -> int:
    """How many model calls this exchange has had: assistant messages after the last user message."""
    number = 0
    for message in reversed(messages):
        if message.role == "user":
            break
        number += message.role == "assistant"
    return number


def _refuse_fault(script: Script, request: ProviderRequest) -> None:
    fault = history_fault(request.messages) if script.strict else None
    if fault is not None:
        raise _error(ErrorKind.BAD_REQUEST, f"invalid history: {fault}", status=400)


async def _reply(script: Script, request: ProviderRequest) -> Reply:
    try:
        return await script.reply_to(request)
    except ProviderError:
        raise
    except Exception as error:  # a reply function's own
        reason = str(error) or type(error).__name__
        raise _error(ErrorKind.PROVIDER_ERROR, f"script {script.name!r} failed: {reason}") from error


def _error(kind: ErrorKind, message: str, *, status: int | None = None, retryable: bool = False) -> ProviderError:
    return ProviderError(ErrorInfo(kind=kind, message=message, status=status, retryable=retryable))


# --- rendering the reply


def _render(reply: Reply, request: ProviderRequest) -> tuple[Message, list[Live]]:
    """The whole message, and the events it comes in."""
    step_number = request.step_number
    chunks = _chunks(reply, request)
    reasoning = _reasoning(reply, request)
    events: list[Live] = [_told(part, step_number) for part in reasoning]
    events.extend(TextDelta(text=chunk, step_number=step_number) for chunk in chunks)
    if not reasoning and not reply.tool_calls:
        return Message(role="assistant", content="".join(chunks)), events
    parts: list[Part] = [*reasoning]
    if chunks:
        parts.append(TextPart("".join(chunks)))
    calls = [_call(call, index, request) for index, call in enumerate(reply.tool_calls)]
    parts.extend(ToolCallPart(call) for call, _ in calls)
    if reply.fragments:
        events.extend(_call_events(calls, reply.fragments, step_number))
    return Message(role="assistant", content=parts), events


def _chunks(reply: Reply, request: ProviderRequest) -> list[str]:
    if isinstance(reply.chunks, list):
        return [_filled(chunk, request) for chunk in reply.chunks if chunk]
    return _split(_filled(reply.text, request), reply.chunks)


def _reasoning(reply: Reply, request: ProviderRequest) -> list[ReasoningPart]:
    if isinstance(reply.reasoning, list):
        return reply.reasoning
    return [ReasoningPart(text=_filled(reply.reasoning, request), provider="scripted")] if reply.reasoning else []


def _told(part: ReasoningPart, step_number: int) -> ReasoningDelta:
    return ReasoningDelta(
        kind="delta" if part.text else "state",
        text=part.text or None,
        provider=part.provider,
        data=part.data,
        step_number=step_number,
    )


def _call(call: Call, index: int, request: ProviderRequest) -> tuple[ToolCall, str]:
    """The call, and the text that its arguments stream as."""
    call_id = call.id or generated_call_id(request, index)
    if isinstance(call.arguments, str):
        text = _filled(call.arguments, request, _json_inside)
        arguments, error = _parsed(text)
    else:
        given = sendable_call(ToolCall(id=call_id, name=call.name, arguments=call.arguments))
        arguments, error = given.arguments, given.error
        text = msgspec.json.encode(arguments).decode()
        if "${" in text:
            arguments = _filled_value(arguments, request)
            text = msgspec.json.encode(arguments).decode()
    return ToolCall(id=call_id, name=call.name, arguments=arguments, metadata=call.metadata, error=error), text


def _parsed(text: str) -> tuple[dict[str, Any], str | None]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any]), None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        return {}, f"the arguments are no JSON object: {error}"


def _call_events(calls: list[tuple[ToolCall, str]], fragments: int, step_number: int) -> list[Live]:
    events: list[Live] = [
        ToolCallStarted(step_number=step_number, index=index, tool_call_id=call.id, name=call.name)
        for index, (call, _) in enumerate(calls)
    ]
    split = [_split(text, fragments) for _, text in calls]
    for turn in range(fragments):
        for index, pieces in enumerate(split):
            if turn < len(pieces):
                call_id = calls[index][0].id
                events.append(
                    ToolCallDelta(
                        step_number=step_number, index=index, tool_call_id=call_id, arguments_delta=pieces[turn]
                    )
                )
    return events


def _split(text: str, count: int) -> list[str]:
    """The text in at most `count` pieces of about the same length, none of them empty."""
    if count == 1 or not text:
        return [text] if text else []
    count = min(count, len(text))
    return [text[len(text) * number // count : len(text) * (number + 1) // count] for number in range(count)]


def _with_spent(reply: Reply, events: list[Live]) -> Sequence[Streamed]:
    """The events, with what the call has cost by then where the script says so."""
    if reply.usage_after_chunks is None:
        return events
    place = min(reply.usage_after_chunks, len(events))
    spent = [known for known in (reply.usage, reply.cost) if known is not None]
    return [*events[:place], *spent, *events[place:]]


def _finish_reason(reply: Reply) -> str:
    return reply.finish or ("tool_calls" if reply.tool_calls else "stop")


def _fail_as_written(reply: Reply) -> None:
    if reply.error is not None:
        raise ProviderError(reply.error, reply.usage)
    if reply.cut:
        raise _error(ErrorKind.STREAM_BROKEN, "the stream ended without a finish reason", retryable=True)


# --- filling in

_PLACEHOLDER = re.compile(r"\$\{(?:(input)|(result)|results\[(\d+)\])\}")


def _filled(text: str, request: ProviderRequest, escape: Callable[[str], str] = str) -> str:
    """The text with its placeholders replaced; one that has no value stays, for a reader to see."""
    if "${" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return escape(_last_input(request))
        results = _last_results(request)
        number = int(match[3]) if match[3] else len(results) - 1
        return escape(result_text(results[number])) if 0 <= number < len(results) else match[0]

    return _PLACEHOLDER.sub(value, text)


def _filled_value(value: Any, request: ProviderRequest) -> Any:
    match value:
        case str():
            return _filled(value, request)
        case dict():
            return {key: _filled_value(item, request) for key, item in value.items()}
        case list():
            return [_filled_value(item, request) for item in value]
        case _:
            return value


def _json_inside(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1]


def _last_input(request: ProviderRequest) -> str:
    return next((message.text for message in reversed(request.messages) if message.role == "user"), "")


def _last_results(request: ProviderRequest) -> list[ToolResult]:
    """The results after the last assistant message, in call order."""
    start = len(request.messages)
    while start and request.messages[start - 1].role != "assistant":
        start -= 1
    return [result for message in request.messages[start:] for result in message.tool_results]


def _summary(recorded: Recorded) -> dict[str, Any]:
    request = recorded.request
    summary = {
        "model": request.model,
        "turn_id": request.turn_id,
        "session_id": request.session_id,
        "step_number": request.step_number,
        "attempt": request.attempt,
        "system": request.system,
        "tools": [tool.name for tool in request.tools],
        "tool_choice": request.tool_choice,
        "options": request.options,
        "messages": request.messages,
        "opened_at": recorded.opened_at,
        "closed_at": recorded.closed_at,
        "outcome": recorded.outcome,
    }
    for name in ("reasoning", "output_schema"):
        value = getattr(request, name)
        if value is not None:
            summary[name] = value
    return summary
