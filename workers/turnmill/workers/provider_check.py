"""What a live endpoint can do, tried with the calls that turns make: text, stream, tools, structured output, abort.

Each try is a real call or two through the provider that an LLM worker would use, and ends as `ok`, as `failed`, or as
`unsupported`: the endpoint refused the request as such, or the model did not do what it was asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from turnmill.protocol.content import Message, ToolCall, ToolResult, ToolResultPart
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import TextDelta
from turnmill.protocol.specs import AgentSpec, OutputSpec, Plan, ToolSpec

from .model_call import Heard, call_model
from .output_check import OutputCheck
from .providers.base import Completed, Live, Provider, ProviderError, ProviderRequest

Status = Literal["ok", "failed", "unsupported"]
TEXT = "text"
_GIVE_UP = frozenset({ErrorKind.AUTHENTICATION, ErrorKind.TIMEOUT})
"""What text has failed with, everything else would fail with as well, at the same cost of time."""
_ONE_PIECE_LENGTH_MAX = 30
_WORDS_LENGTH_MAX = 80
_PIECES_BEFORE_ABORT = 2
"""One may be all there is: an answer that came as a whole."""

WEATHER = ToolSpec(
    name="get_weather",
    description="The weather in a city, now.",
    schema={
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city's name."}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CITY = OutputSpec(
    name="city",
    schema={
        "type": "object",
        "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
        "required": ["name", "country"],
        "additionalProperties": False,
    },
)


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One feature. `seen` says in a few words what came."""

    feature: str
    status: Status
    seconds: float
    seen: str


class Unsupported(Exception):
    """The endpoint answered, but not with what was asked for."""


class Failed(Exception):
    """What came cannot be used."""


async def check_provider(
    provider: Provider, model: str, options: Mapping[str, Any], seconds_max: float
) -> AsyncIterator[Tried]:
    """Try each feature of a model, one after the other: the first is `text`. `model` is its name behind the prefix,
    `seconds_max` the time for each."""
    tries = _Tries(provider, model, dict(options))
    gave_up = ""
    for feature, attempt in tries.by_feature().items():
        if gave_up:
            yield Tried(feature=feature, status="failed", seconds=0.0, seen=f"not tried, as {TEXT} failed: {gave_up}")
            continue
        begun = time.monotonic()
        status, seen, kind = await _outcome(attempt, seconds_max)
        if feature == TEXT and status != "ok":
            status, gave_up = "failed", kind if kind in _GIVE_UP else ""
        yield Tried(feature=feature, status=status, seconds=time.monotonic() - begun, seen=seen)


async def _outcome(attempt: Callable[[], Awaitable[str]], seconds_max: float) -> tuple[Status, str, str]:
    """How a try ended, what was seen, and the kind of its error."""
    try:
        async with asyncio.timeout(seconds_max):
            return "ok", await attempt(), ""
    except TimeoutError:
        return "failed", f"no end within {seconds_max:g} s", ErrorKind.TIMEOUT
    except Unsupported as error:
        return "unsupported", str(error), ""
    except Failed as error:
        return "failed", str(error), ""
    except ProviderError as error:
        status: Status = "unsupported" if error.info.kind == ErrorKind.BAD_REQUEST else "failed"
        return status, f"{error.info.kind}: {error.info.message}", error.info.kind


class _Tries:
    """The features of one model, each as a coroutine function that returns what it saw."""

    def __init__(self, provider: Provider, model: str, options: dict[str, Any]) -> None:
        self._provider = provider
        self._model = model
        self._options = options
        agent = AgentSpec(name="provider-check", model=model, output=CITY)
        self._check = OutputCheck(Plan(agent=agent, tools={WEATHER.name: WEATHER}))

    def by_feature(self) -> dict[str, Callable[[], Awaitable[str]]]:
        return {
            TEXT: self._text,
            "not streamed": self._not_streamed,
            "stream": self._stream,
            "tool": self._tool,
            "parallel tools": self._parallel_tools,
            "structured output": self._structured_output,
            "abort": self._abort,
        }

    async def _text(self) -> str:
        return _told(await self._ask("Reply with the single word: pong"))

    async def _not_streamed(self) -> str:
        return _told(await self._ask("Reply with the single word: pong", options={"stream": False}))

    async def _stream(self) -> str:
        begun, times, texts = time.monotonic(), list[float](), list[str]()

        def take(item: Live) -> None:
            times.append(time.monotonic())
            if isinstance(item, TextDelta):
                texts.append(item.text)

        completed = await self._ask("Write the numbers from one to twenty as words, and nothing else.", take)
        _told(completed)
        if "".join(texts) != completed.message.text:
            raise Failed("the pieces are not the text of the answer")
        if len(times) < 2 and len(completed.message.text) > _ONE_PIECE_LENGTH_MAX:
            raise Unsupported(f"{len(completed.message.text)} characters came in one piece")
        rate = _tokens_per_second(completed, times)
        return f"{len(times)} pieces, the first after {times[0] - begun:.2f} s{rate}"

    async def _tool(self) -> str:
        """A call by name, or, where that is not to be had, one of the model's own choice; then its result goes back."""
        question = Message(role="user", content="What is the weather in Paris? Use the tool.")
        try:
            called, remark = await self._call(question, WEATHER.name), ""
        except (Unsupported, ProviderError) as error:
            if isinstance(error, ProviderError) and error.info.kind != ErrorKind.BAD_REQUEST:
                raise
            called = await self._call(question, None)
            remark = f"; not when the call is forced: {error}"
        calls = self._usable(called)
        results: list[Any] = [
            ToolResultPart(ToolResult(tool_call_id=call.id, tool_name=call.name, result="18 degrees, sunny"))
            for call in calls
        ]
        history = [question, called.message, Message(role="tool", content=results)]
        answer = await self._ask(history, tools=[WEATHER])
        then = "called again" if answer.message.tool_calls else _told(answer)
        return f"{_call_words(calls[0])}, and with its result: {then}{remark}"

    async def _call(self, question: Message, choice: str | None) -> Completed:
        completed = await self._ask([question], tools=[WEATHER], tool_choice=choice)
        if not completed.message.tool_calls:
            raise Unsupported(f"no call, but {_words(completed.message.text) or 'nothing'}")
        return completed

    async def _parallel_tools(self) -> str:
        question = "What is the weather in Paris, and what in Rome? Call the tool for both at the same time."
        completed = await self._call(Message(role="user", content=question), None)
        calls = self._usable(completed)
        if len(calls) < 2:
            raise Unsupported(f"one call at a time: {_call_words(calls[0])}")
        return f"{len(calls)} calls at once: {', '.join(map(_call_words, calls))}"

    async def _structured_output(self) -> str:
        question = "Tell of Paris as JSON: its name and its country."
        completed = await self._ask(question, output_schema=CITY.schema, output_name=CITY.name)
        fault = self._check.answer_error(completed.message)
        if fault is not None:
            raise Unsupported(f"{fault}: {_words(completed.message.text)}")
        return _told(completed)

    async def _abort(self) -> str:
        """Leave an answer in the middle, as the abort of a turn does. The endpoint then has to answer the next call."""
        stream = self._provider.stream(self._request("Write the numbers from one to five hundred as words."))
        pieces = 0
        try:
            async for item in stream:
                if isinstance(item, Completed):
                    raise Unsupported("the whole answer came at once: there was nothing to leave")
                pieces += isinstance(item, Live)
                if pieces == _PIECES_BEFORE_ABORT:
                    break
        finally:
            begun = time.monotonic()
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        closed, begun = time.monotonic() - begun, time.monotonic()
        await self._text()
        return f"left in {closed * 1000:.0f} ms, and the next call was answered in {time.monotonic() - begun:.2f} s"

    def _usable(self, completed: Completed) -> list[ToolCall]:
        """The calls, whose arguments fit. Raises `Failed`."""
        calls = self._check.with_checked_calls(completed.message).tool_calls
        for call in calls:
            if call.name != WEATHER.name:
                raise Failed(f"a call of {call.name!r}, which is no tool of this request")
            if call.error is not None:
                raise Failed(f"a call that cannot be run: {call.error}")
        return calls

    async def _ask(
        self, said: str | list[Message], take: Callable[[Live], object] = lambda _: None, **fields: Any
    ) -> Completed:
        request = self._request(said, **fields)
        return await call_model(self._provider, request, Heard(self._model), take)

    def _request(self, said: str | list[Message], options: Mapping[str, Any] | None = None, **fields: Any) -> Any:
        messages = [Message(role="user", content=said)] if isinstance(said, str) else said
        return ProviderRequest(
            model=self._model, messages=messages, options={**self._options, **(options or {})}, **fields
        )


def _told(completed: Completed) -> str:
    """The answer's text, shortened. Raises `Failed` where there is none."""
    words = _words(completed.message.text)
    if not words:
        raise Failed(f"an answer without text (finish reason {completed.finish_reason})")
    return words


def _words(text: str) -> str:
    text = " ".join(text.split())
    short = text if len(text) <= _WORDS_LENGTH_MAX else text[: _WORDS_LENGTH_MAX - 1] + "…"
    return repr(short) if short else ""


def _call_words(call: ToolCall) -> str:
    return f"{call.name}(city={call.arguments.get('city')!r})"


def _tokens_per_second(completed: Completed, times: list[float]) -> str:
    seconds = times[-1] - times[0]
    if completed.usage is None or completed.usage.output_tokens < 2 or seconds <= 0:
        return ""
    return f", {completed.usage.output_tokens / seconds:.0f} tokens/s"
