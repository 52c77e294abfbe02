"""Tools: a function becomes a tool by its signature and docstring, and whatever it does becomes a result."""

import asyncio
import contextvars
import dataclasses
import enum
import functools
import gc
import math
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import AfterValidator, BaseModel, Field

from turnmill.protocol.content import FilePart, ImagePart, TextPart, ToolResult
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.specs import Approval
from turnmill.protocol.values import unpack_value
from turnmill.workers.tools import (
    AbortSignal,
    ToolContext,
    ToolExecutionContext,
    ToolOutcome,
    ToolOutput,
    ToolRetry,
    run_tool,
    tool,
)


def context_of(made: Any, **fields: Any) -> ToolContext:
    fields.setdefault("timeout_seconds", made.spec.timeout_seconds)
    return ToolContext(tool_call_id="call_1", tool_name=made.name, **fields)


async def run(made: Any, arguments: Any = None, **fields: Any) -> ToolOutcome:
    return await run_tool(made, {} if arguments is None else arguments, context_of(made, **fields))


async def text_of_error(made: Any, arguments: Any = None, **fields: Any) -> str:
    outcome = await run(made, arguments, **fields)
    assert outcome.result.is_error
    assert isinstance(outcome.result.result, str)
    return outcome.result.result


async def value_of(returned: Any) -> Any:
    @tool
    async def give() -> Any:
        return returned

    outcome = await run(give)
    assert not outcome.result.is_error, outcome.result
    return outcome.result.result


class Place(BaseModel):
    city: str
    country: str = "NO"


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Reading:
    at: datetime
    celsius: float


# --- definition


def test_a_bare_decorator_reads_name_description_and_schema() -> None:
    @tool
    async def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
        """Current weather in a city.

        Asks the nearest station.

        Args:
            city: The city's name.
            days: How many days ahead.
        """
        return f"{city} {days} {unit}"

    assert weather.spec.name == "weather"
    assert weather.spec.description == "Current weather in a city.\n\nAsks the nearest station."
    assert weather.spec.schema == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "description": "The city's name."},
            "days": {"type": "integer", "default": 1, "description": "How many days ahead."},
            "unit": {"enum": ["C", "F"], "type": "string", "default": "C"},
        },
        "required": ["city"],
    }
    assert weather.spec.timeout_seconds == 300
    assert weather.spec.max_attempts == 1


def test_arguments_of_the_decorator_are_the_policy() -> None:
    @tool(
        name="math.add",
        description="Adds.",
        timeout=2,
        start_timeout=5,
        retries=2,
        idempotent=True,
        on_lost="fail",
        approval=False,
        concurrency=3,
        queue="numbers",
    )
    def add(a: int, b: int) -> int:
        """Not this text."""
        return a + b

    spec = add.spec
    assert (spec.name, spec.description, spec.queue) == ("math.add", "Adds.", "numbers")
    assert (spec.timeout_seconds, spec.start_timeout_seconds, spec.max_attempts) == (2.0, 5.0, 3)
    assert (spec.idempotent, spec.on_lost, spec.approval, spec.concurrency) == (True, "fail", Approval(), 3)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)) == spec


async def test_calling_a_tool_calls_its_function() -> None:
    @tool
    async def double(number: int) -> int:
        return number * 2

    @tool
    def triple(number: int) -> int:
        """Three times."""
        return number * 3

    assert await double(4) == 8
    assert triple(number=4) == 12
    assert (triple.name, triple.__doc__) == ("triple", "Three times.")


def test_titles_are_stripped_but_a_parameter_named_title_stays() -> None:
    class Book(BaseModel):
        title: str
        kind: Annotated[str, Field(title="Kind of book")] = "novel"

    @tool
    def shelve(title: str, book: Book) -> None: ...

    assert set(shelve.spec.schema["properties"]) == {"title", "book"}
    assert set(shelve.spec.schema["$defs"]["Book"]["properties"]) == {"title", "kind"}
    assert "Kind of book" not in str(shelve.spec.schema)
    assert "'Title'" not in str(shelve.spec.schema)


async def test_any_parameter_name_is_possible() -> None:
    @tool
    async def odd(schema: str, model_config: str, _hidden: int, copy: bool = False) -> str:
        return f"{schema} {model_config} {_hidden} {copy}"

    assert (await run(odd, {"schema": "s", "model_config": "m", "_hidden": 1})).result.result == "s m 1 False"


def test_a_field_description_wins_over_the_docstring() -> None:
    @tool
    def find(words: Annotated[str, Field(description="From the field.", min_length=2)]) -> None:
        """Find.

        :param words: From the docstring.
        """

    assert find.spec.schema["properties"]["words"] == {
        "type": "string",
        "minLength": 2,
        "description": "From the field.",
    }


def test_the_context_is_hidden_from_the_schema() -> None:  # TH-13
    @tool
    def plain(ctx: ToolContext, city: str) -> None: ...

    @tool
    def optional(city: str, ctx: ToolExecutionContext | None = None) -> None: ...

    for made in (plain, optional):
        assert made.context_parameter == "ctx"
        assert set(made.spec.schema["properties"]) == {"city"}


def test_a_default_without_a_json_form_is_left_out_of_the_schema() -> None:
    marker = object()

    @tool
    def odd(value: Any = marker, place: Place = Place(city="Oslo")) -> None: ...  # noqa: B008

    assert "default" not in odd.spec.schema["properties"]["value"]
    assert odd.spec.schema["properties"]["place"]["default"] == {"city": "Oslo", "country": "NO"}


def annotated_with(annotations: dict[str, Any]) -> Any:
    def function(city: Any) -> None: ...

    function.__annotations__ = annotations
    return function


def two_contexts(one: ToolContext, two: ToolContext) -> None: ...
def positional_context(ctx: ToolContext, /) -> None: ...
def positional(city: str, /) -> None: ...
def variable(*cities: str) -> None: ...
def keywords(**cities: str) -> None: ...
def untyped(city) -> None: ...  # type: ignore[no-untyped-def]
def field_default(city: str = Field("Oslo")) -> None: ...
def unknown_class(city: AbortSignal) -> None: ...
def stream() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (two_contexts, "more than once: one, two"),
        (positional_context, "'ctx' is positional-only"),
        (positional, "'city' is positional-only"),
        (variable, r"\*args"),
        (keywords, r"\*\*kwargs"),
        (untyped, "'city' has no type"),
        (field_default, "Annotated"),
        (unknown_class, "cannot be validated"),
        (stream, "yields"),
        (annotated_with({"city": "Nowhere"}), "name 'Nowhere' is not defined.*TYPE_CHECKING"),
        (lambda: None, "'<lambda>' is no name"),
        (functools.partial(positional, "Oslo"), "needs a function"),
        ("weather", "needs a function"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        tool(function)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"name": "two words"}, "no name for a tool"),
        ({"name": ""}, "no name for a tool"),
        ({"queue": "a{b}"}, "no name for a queue"),
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": math.inf}, "timeout must be"),
        ({"start_timeout": -1}, "start_timeout must be"),
        ({"retries": -1}, "retries must be"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"on_lost": "wait"}, "on_lost='wait' is not one of"),
        ({"approval": "maybe"}, "approval='maybe' is not one of"),
        ({"isolation": "process"}, "not available yet.*rq extra"),
        ({"isolation": "container"}, "isolation='container'"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(policy: Any, message: str) -> None:
    def search(words: str) -> None: ...

    with pytest.raises(DefinitionError, match=message):
        tool(**policy)(search)


# --- arguments


@tool
async def count(word: str, times: int = 1) -> str:
    return " ".join([word] * times)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "word: Field required"),
        ({"word": 5}, "word: Input should be a valid string"),
        ({"word": "a", "times": "many"}, "times: Input should be a valid integer"),
        ({"word": "a", "other": 1}, "other: Extra inputs are not permitted"),
        (["a"], "Input should be a valid dictionary"),
    ],
)
async def test_arguments_that_do_not_fit_never_reach_the_tool(arguments: Any, message: str) -> None:  # LC-05
    ran = False

    @tool(name="count")
    async def watched(word: str, times: int = 1) -> None:
        nonlocal ran
        ran = True

    text = await text_of_error(watched, arguments)
    assert text.startswith("Error: invalid arguments for 'count': ")
    assert message in text
    assert not ran


async def test_many_argument_errors_are_cut_short() -> None:  # LC-05
    text = await text_of_error(count, {"word": "a", **{f"extra{number}": 1 for number in range(50)}})
    assert text.endswith("; and 40 more")


async def test_arguments_become_the_annotated_types() -> None:
    seen: list[Any] = []

    @tool
    async def note(place: Place, at: datetime, tags: set[str]) -> None:
        seen.extend([place, at, tags])

    await run(note, {"place": {"city": "Oslo"}, "at": "2025-01-01T00:00:00Z", "tags": ["a", "a"]})
    assert seen == [Place(city="Oslo"), datetime(2025, 1, 1, tzinfo=UTC), {"a"}]


def explode(value: str) -> str:
    raise RuntimeError("validator broke")


async def test_a_validator_that_breaks_is_an_argument_error() -> None:  # LC-05
    @tool
    async def fragile(value: Annotated[str, AfterValidator(explode)]) -> None: ...

    assert await text_of_error(fragile, {"value": "x"}) == "Error: invalid arguments for 'fragile': validator broke"


# --- errors


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("kaboom"), "kaboom"),
        (RuntimeError(), "RuntimeError"),
        (TimeoutError("the station is silent"), "the station is silent"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
async def test_whatever_a_tool_raises_becomes_a_result(
    error: BaseException, text: str, is_async: bool
) -> None:  # LC-04
    if is_async:

        @tool
        async def fail() -> None:
            raise error
    else:

        @tool
        def fail() -> None:
            raise error

    outcome = await run(fail)
    assert outcome.result == ToolResult(
        tool_call_id="call_1", tool_name="fail", result=f"Error: execution failed ({text})", is_error=True
    )
    assert outcome.error is None
    assert outcome.exception is error


async def test_tool_retry_asks_for_another_attempt() -> None:
    @tool(retries=1)
    async def busy() -> None:
        raise ToolRetry("try later", retry_after_seconds=2.5)

    outcome = await run(busy)
    assert outcome.result.result == "Error: execution failed (try later)"
    assert outcome.error is not None
    assert (outcome.error.retryable, outcome.error.retry_after_seconds) == (True, 2.5)


async def test_an_error_text_is_bounded_and_can_be_sent() -> None:
    @tool
    async def verbose() -> None:
        raise ValueError("\ud800" + "x" * 1_000_000)

    text = await text_of_error(verbose)
    assert len(text) < 5_000
    assert text.encode()


async def test_an_error_whose_text_breaks_is_still_an_error() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @tool
    async def fail() -> None:
        raise Broken

    assert await text_of_error(fail) == "Error: execution failed (Broken)"


# --- timeout and cancellation


@pytest.mark.parametrize(("seconds", "written"), [(0.05, "0.05"), (0.02, "0.02")])
async def test_an_async_tool_ends_at_its_timeout(seconds: float, written: str) -> None:  # LC-07
    @tool(timeout=seconds)
    async def hang(ctx: ToolContext) -> None:
        await asyncio.Event().wait()

    context = context_of(hang)
    outcome = await run_tool(hang, {}, context)
    assert outcome.result.result == f"Error: execution failed (timeout after {written} s)"
    assert outcome.result.is_error
    assert context.cancelled.is_set()
    assert context.cancelled.reason == "timeout"


async def test_a_whole_number_of_seconds_is_written_without_a_fraction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # LC-07
    @tool
    async def hang() -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_at", lambda when, callback, *args, **kw: loop.call_soon(callback, *args, **kw))
    assert await text_of_error(hang, timeout_seconds=2.0) == "Error: execution failed (timeout after 2 s)"


async def test_a_hung_thread_is_left_behind_and_told(caplog: pytest.LogCaptureFixture) -> None:  # LC-07
    release, threads, told = threading.Event(), [], []

    @tool(timeout=0.02)
    def hang(ctx: ToolContext) -> str:
        threads.append(threading.current_thread())
        release.wait(30)
        told.append(ctx.cancelled.is_set())
        return "late"

    outcomes = await asyncio.gather(run(hang), run(count, {"word": "a"}))
    assert outcomes[0].result.result == "Error: execution failed (timeout after 0.02 s)"
    assert outcomes[1].result.result == "a"
    assert threads[0].daemon
    release.set()
    await asyncio.to_thread(threads[0].join)
    assert told == [True]
    assert [record.getMessage() for record in caplog.records] == [
        "tool.late tool='hang' tool_call_id='call_1' failed=False"
    ]


async def test_many_hung_threads_do_not_stop_the_next_call() -> None:  # LC-07
    release = threading.Event()

    @tool(timeout=0.02)
    def hang() -> None:
        release.wait(30)

    @tool
    def quick() -> str:
        return "done"

    await asyncio.gather(*(run(hang) for _ in range(60)))
    assert (await run(quick)).result.result == "done"
    release.set()


async def test_what_a_tool_returns_in_answer_to_its_timeout_is_void() -> None:  # LC-07
    @tool(timeout=0.01)
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return "made up"

    @tool(timeout=0.01)
    async def rude() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("something else") from None
        return "never"

    for made in (stubborn, rude):
        assert await text_of_error(made) == "Error: execution failed (timeout after 0.01 s)"


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_cancellation_from_outside_passes_through(is_async: bool) -> None:
    running = asyncio.Event()
    loop = asyncio.get_running_loop()
    told = threading.Event()

    if is_async:

        @tool
        async def wait() -> None:
            running.set()
            try:
                await asyncio.Event().wait()
            finally:
                told.set()
    else:

        @tool
        def wait(ctx: ToolContext) -> None:
            loop.call_soon_threadsafe(running.set)
            if ctx.cancelled.wait_sync(30):
                told.set()

    task = asyncio.create_task(run(wait))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(told.wait, 30)


async def test_a_cancellation_that_the_tool_turns_into_an_error_still_passes_through() -> None:
    running = asyncio.Event()

    @tool
    async def convert() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("converted") from None

    task = asyncio.create_task(run(convert))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- threads


async def test_a_sync_tool_runs_in_a_thread_with_the_callers_context_variables() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("from the caller")

    @tool
    def look() -> list[Any]:
        seen = [variable.get(), threading.current_thread() is threading.main_thread()]
        variable.set("changed in the thread")
        return seen

    assert (await run(look)).result.result == ["from the caller", False]
    assert variable.get() == "from the caller"


async def test_a_coroutine_that_a_sync_wrapper_returns_runs_on_the_loop() -> None:
    async def inner() -> bool:
        return threading.current_thread() is threading.main_thread()

    @tool
    def wrapper() -> Any:
        return inner()

    assert (await run(wrapper)).result.result is True


async def test_stop_iteration_in_a_thread_is_an_error_result() -> None:
    @tool
    def exhaust() -> Any:
        return next(iter([]))

    assert (await text_of_error(exhaust)).startswith("Error: execution failed (")


# --- results


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        ("4 degrees", "4 degrees"),
        ("4 °C ☂", "4 °C ☂"),
        (5, 5),
        (2**53 + 1, 2**53 + 1),
        (9_223_372_036_854_775_807, 9_223_372_036_854_775_807),
        (0.1, 0.1),
        (True, True),
        (None, None),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        ((1, 2), [1, 2]),
        ({3}, [3]),
        (Place(city="Oslo"), {"city": "Oslo", "country": "NO"}),
        ([Place(city="Oslo")], [{"city": "Oslo", "country": "NO"}]),
        (Reading(datetime(2025, 1, 1, tzinfo=UTC), 4.5), {"at": "2025-01-01T00:00:00Z", "celsius": 4.5}),
        ({"span": timedelta(hours=1)}, {"span": "PT1H"}),
        ({1: "a"}, {"1": "a"}),
        (Colour.RED, "red"),
        (ToolResult(tool_call_id="a", tool_name="b", result=1), {"tool_call_id": "a", "tool_name": "b", "result": 1}),
    ],
)
async def test_values_come_out_as_json(returned: Any, value: Any) -> None:
    assert await value_of(returned) == value


@pytest.mark.parametrize(
    "returned",
    [
        {"raw": b"\x00\xff"},
        [b"\x00", {"deep": b"\xff"}],
        {"$bytes": "looks like bytes"},
    ],
)
async def test_bytes_inside_values_are_marked_and_come_back(returned: Any) -> None:
    assert unpack_value(await value_of(returned)) == returned


async def test_bytes_beside_values_of_other_types_are_marked_too() -> None:
    packed = await value_of({"raw": b"\xff", "at": datetime(2025, 1, 1, tzinfo=UTC)})
    assert unpack_value(packed) == {"raw": b"\xff", "at": "2025-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        (b"\x89PNG", [FilePart(data=b"\x89PNG")]),
        (bytearray(b"ab"), [FilePart(data=b"ab")]),
        (ImagePart(data=b"\x89PNG", media_type="image/png"), [ImagePart(data=b"\x89PNG", media_type="image/png")]),
        ([TextPart("a"), FilePart(url="file:///a")], [TextPart("a"), FilePart(url="file:///a")]),
        (ToolOutput(content=[TextPart("a"), ImagePart(url="x")]), [TextPart("a"), ImagePart(url="x")]),
    ],
)
async def test_rich_results_are_content(returned: Any, content: Any) -> None:
    @tool
    async def give() -> Any:
        return returned

    outcome = await run(give)
    assert outcome.result == ToolResult(tool_call_id="call_1", tool_name="give", content=content)


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (object(), "Unable to serialize unknown type"),
        (math.nan, "nan has no JSON form"),
        ({"a": math.inf}, "inf has no JSON form"),
        (2**64, "can't serialize ints"),
        ("\ud800", "surrogates not allowed"),
        ({"a": "\ud800"}, "surrogates not allowed"),
        (cyclic(), "nested deeper than 200 levels"),
        ({1: "a", "1": "b"}, "two keys"),
        (ToolOutput(content=["text"]), "ToolOutput holds a str"),  # type: ignore[list-item]
    ],
    ids=["object", "nan", "infinity", "integer", "surrogate", "surrogate in it", "cycle", "two keys", "output"],
)
async def test_a_result_that_cannot_be_sent_is_an_error_result(returned: Any, reason: str) -> None:
    @tool
    async def give() -> Any:
        return returned

    text = await text_of_error(give)
    assert text.startswith("Error: execution failed (the result of 'give' cannot be sent: ")
    assert reason in text


# --- the context


async def test_the_context_tells_of_the_call() -> None:  # TH-13
    seen: list[ToolContext] = []

    @tool
    async def look(ctx: ToolContext) -> None:
        seen.append(ctx)

    await run(
        look,
        turn_id="t0-x",
        session_id="s",
        agent_id="assistant",
        step_number=2,
        attempt=3,
        idempotency_key="t0-x/2.0",
        metadata={"user": 42},
        timeout_seconds=60.0,
    )
    (context,) = seen
    assert (context.turn_id, context.session_id, context.agent_id) == ("t0-x", "s", "assistant")
    assert (context.tool_call_id, context.tool_name) == ("call_1", "look")
    assert (context.step_number, context.attempt, context.idempotency_key) == (2, 3, "t0-x/2.0")
    assert context.metadata["user"] == 42
    with pytest.raises(TypeError):
        context.metadata["user"] = 43  # type: ignore[index]
    assert context.deadline.tzinfo is UTC
    assert timedelta(seconds=50) < context.deadline - datetime.now(UTC) <= timedelta(seconds=60)
    assert 50 < context.remaining_seconds <= 60
    assert not context.cancelled.is_set()


async def test_remaining_seconds_do_not_follow_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:  # TH-13
    context = ToolContext(timeout_seconds=60)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert 50 < context.remaining_seconds <= 60


async def test_progress_goes_to_the_sender() -> None:  # TH-13
    sent: list[tuple[str, dict[str, Any]]] = []

    async def send(message: str, data: dict[str, Any]) -> None:
        sent.append((message, data))

    @tool
    async def on_the_loop(ctx: ToolContext) -> None:
        await ctx.progress("asking")
        await ctx.progress("half", {"done": 0.5, "raw": b"\xff"})

    @tool
    def in_a_thread(ctx: ToolContext) -> None:
        ctx.progress_sync("from the thread", {"done": 1})

    await run(on_the_loop, send_progress=send)
    outcome = await run(in_a_thread, send_progress=send)
    assert not outcome.result.is_error
    assert sent == [
        ("asking", {}),
        ("half", {"done": 0.5, "raw": {"$bytes": "/w=="}}),
        ("from the thread", {"done": 1}),
    ]


async def test_progress_without_a_message_is_a_mistake() -> None:  # TH-13
    with pytest.raises(ValueError, match="message"):
        await ToolContext().progress("")
    with pytest.raises(ValueError, match="message"):
        ToolContext().progress_sync("")


async def test_progress_after_the_end_reaches_nobody() -> None:  # TH-13
    async def send(message: str, data: dict[str, Any]) -> None:
        raise AssertionError(message)

    context = ToolContext(send_progress=send)
    context.cancelled.set()
    await context.progress("late")
    context.progress_sync("late")


async def test_progress_sync_on_the_loop_is_refused_instead_of_a_deadlock() -> None:  # TH-13
    async def send(message: str, data: dict[str, Any]) -> None: ...

    @tool
    async def confused(ctx: ToolContext) -> None:
        ctx.progress_sync("hello")

    assert "await context.progress" in await text_of_error(confused, send_progress=send)


async def test_the_abort_signal_wakes_tasks_and_threads() -> None:  # TH-13
    signal = AbortSignal()
    task = asyncio.create_task(signal.wait())
    thread = asyncio.create_task(asyncio.to_thread(signal.wait_sync, 30))
    await asyncio.sleep(0)
    assert not signal.is_set()
    await asyncio.to_thread(signal.set, "stop")
    signal.set("again")
    await task
    assert await thread
    await signal.wait()
    assert signal.wait_sync()
    assert signal.reason == "stop"


async def test_a_waiter_that_gives_up_leaves_nothing_behind() -> None:
    signal = AbortSignal()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(signal.wait(), 0.01)
    assert not signal.wait_sync(0.001)
    assert signal._wakers == []


def test_a_thread_that_outlives_its_loop_is_quiet() -> None:  # LC-07
    release, threads = threading.Event(), []

    @tool(timeout=0.01)
    def hang() -> None:
        threads.append(threading.current_thread())
        release.wait(30)

    asyncio.run(run(hang))
    release.set()
    threads[0].join()
    gc.collect()  # what is left unawaited or unretrieved would warn here, and a warning fails the test


async def test_a_tool_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:  # LC-07
    monkeypatch.setattr("turnmill.workers.execution.CANCELLATION_GRACE_SECONDS", 0.01)
    release = asyncio.Event()
    swallowed = asyncio.Event()

    @tool(timeout=0.02)
    async def stubborn() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                swallowed.set()
        return "late"

    outcome = await asyncio.wait_for(run(stubborn), 10)
    assert outcome.result.result == "Error: execution failed (timeout after 0.02 s)"
    assert swallowed.is_set()
    release.set()
