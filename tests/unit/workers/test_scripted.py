"""The scripted provider: the request alone decides what is played, and every request leaves a trace."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from turnmill.protocol.content import (
    ErrorInfo,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.errors import ConfigurationError, DefinitionError
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.scripted import Call, Reply, Script, ScriptedProvider, history_fault, load_scripts

USER = Message(role="user", content="Oslo")


def asked(*ids: str) -> Message:
    return Message(role="assistant", content=[ToolCallPart(ToolCall(id=name, name="weather")) for name in ids])


def answered(*ids: str, result: Any = "4 degrees") -> Message:
    return Message(
        role="tool",
        content=[ToolResultPart(ToolResult(tool_call_id=name, tool_name="weather", result=result)) for name in ids],
    )


def request_of(*messages: Message, model: str = "test", **fields: Any) -> ProviderRequest:
    return ProviderRequest(model=model, messages=list(messages or (USER,)), **fields)


async def play(replies: Any, request: ProviderRequest | None = None, *, strict: bool = False) -> list[Any]:
    provider = ScriptedProvider([Script("test", replies, strict)])
    return [event async for event in provider.stream(request or request_of())]


async def completed(replies: Any, request: ProviderRequest | None = None) -> Completed:
    last = (await play(replies, request))[-1]
    assert isinstance(last, Completed)
    return last


async def failure(replies: Any, request: ProviderRequest | None = None, *, strict: bool = False) -> ErrorInfo:
    with pytest.raises(ProviderError) as caught:
        await play(replies, request, strict=strict)
    return caught.value.info


# --- what a reply becomes


async def test_a_text_is_streamed_and_then_complete() -> None:
    usage = Usage(input_tokens=10, output_tokens=5)
    events = await play([Reply(chunks=["4 deg", "rees"], usage=usage)], request_of(step_number=2))
    assert events == [
        TextDelta(text="4 deg", step_number=2),
        TextDelta(text="rees", step_number=2),
        Completed(message=Message(role="assistant", content="4 degrees"), finish_reason="stop", usage=usage),
    ]


async def test_a_text_can_be_split_into_a_number_of_chunks() -> None:
    events = await play([Reply(text="abcdefg", chunks=3)])
    assert [event.text for event in events[:-1]] == ["ab", "cd", "efg"]
    assert len(await play([Reply(text="ab", chunks=100)])) == 3


async def test_an_empty_reply_is_a_success() -> None:
    assert await play([Reply()]) == [Completed(message=Message(role="assistant", content=""), finish_reason="stop")]


async def test_reasoning_text_and_calls_come_in_this_order() -> None:
    reply = Reply(
        text="Let me see.",
        reasoning="Look it up.",
        tool_calls=[Call("weather", {"city": "Oslo"}, id="call_1", metadata={"signature": "s"})],
    )
    events = await play([reply])
    call = ToolCall(id="call_1", name="weather", arguments={"city": "Oslo"}, metadata={"signature": "s"})
    assert events == [
        ReasoningDelta(kind="delta", text="Look it up.", provider="scripted", step_number=1),
        TextDelta(text="Let me see.", step_number=1),
        ToolCallStarted(step_number=1, index=0, tool_call_id="call_1", name="weather"),
        ToolCallDelta(step_number=1, index=0, tool_call_id="call_1", arguments_delta='{"city":"Oslo"}'),
        Completed(
            message=Message(
                role="assistant",
                content=[
                    ReasoningPart(text="Look it up.", provider="scripted"),
                    TextPart("Let me see."),
                    ToolCallPart(call),
                ],
            ),
            finish_reason="tool_calls",
        ),
    ]


async def test_reasoning_with_provider_state_is_kept_as_it_is() -> None:
    parts = [ReasoningPart(text="a", provider="x", data={"signature": "s"}), ReasoningPart(provider="x", data={"e": 1})]
    events = await play([Reply(text="done", reasoning=parts)])
    assert [event.kind for event in events[:2]] == ["delta", "state"]
    assert events[-1].message.reasoning == parts


async def test_calls_can_come_whole() -> None:
    """As from a provider that does not stream them: the message has them, no live event told of them."""
    (completed,) = await play([Reply(tool_calls=[Call("add", {"a": 1})], fragments=0)])
    assert isinstance(completed, Completed)
    assert [call.name for call in completed.message.tool_calls] == ["add"]


async def test_calls_can_come_in_interleaved_fragments() -> None:
    calls = [Call("weather", {"city": "Oslo"}), Call("weather", {"city": "Bergen"}), Call("time")]
    events = await play([Reply(tool_calls=calls, fragments=3)])
    assert [event.index for event in events[:3]] == [0, 1, 2]
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [delta.index for delta in deltas] == [0, 1, 2, 0, 1, 2, 0, 1]
    joined = ["".join(delta.arguments_delta or "" for delta in deltas if delta.index == index) for index in range(3)]
    assert joined == ['{"city":"Oslo"}', '{"city":"Bergen"}', "{}"]


async def test_arguments_that_are_no_object_are_an_error_of_the_call() -> None:  # LC-05
    for text in ('{"city": ', "[1]"):
        (call,) = (await completed([Reply(tool_calls=[Call("weather", text)])])).message.tool_calls
        assert call.arguments == {}
        assert call.error is not None
        assert call.error.startswith("the arguments are no JSON object")


async def test_generated_ids_are_stable_and_differ_along_a_transcript() -> None:
    replies = [Reply(tool_calls=[Call("weather"), Call("weather")])]
    first = [call.id for call in (await completed(replies, request_of(attempt=1))).message.tool_calls]
    again = [call.id for call in (await completed(replies, request_of(attempt=2))).message.tool_calls]
    later = await completed(replies, request_of(USER, asked(*first), answered(*first)))
    assert first == again
    assert len({*first, *(call.id for call in later.message.tool_calls)}) == 4


async def test_the_finish_reason_can_be_given() -> None:
    assert (await completed([Reply(text="...", finish="length")])).finish_reason == "length"


# --- which reply


async def test_the_reply_is_chosen_by_the_assistant_messages_after_the_last_user_message() -> None:
    replies = [Reply(text="one"), Reply(text="two"), Reply(text="three")]
    histories = {
        "one": (Message(role="system", content="x"), USER, asked("a"), answered("a"), USER),
        "two": (USER, asked("a"), answered("a")),
        "three": (USER, *(message for name in "abcde" for message in (asked(name), answered(name)))),
    }
    for text, messages in histories.items():
        assert (await completed(replies, request_of(*messages))).message.text == text


async def test_an_attempt_can_have_a_reply_of_its_own() -> None:
    broken = Reply(error=ErrorInfo(kind="overloaded", message="busy", retryable=True))
    replies = [Reply(attempts=[broken, Reply(text="ok")])]
    assert (await failure(replies, request_of(attempt=1))).kind == "overloaded"
    for attempt in (2, 3):
        assert (await completed(replies, request_of(attempt=attempt))).message.text == "ok"


async def test_functions_make_replies() -> None:
    async def waiting(request: ProviderRequest) -> Reply:
        return Reply(text=f"waited for {request.model}")

    def short(request: ProviderRequest) -> Reply:
        return Reply(text=str(len(request.messages)))

    assert (await completed(short)).message.text == "1"
    assert (await completed([waiting, Reply(text="second")])).message.text == "waited for test"
    assert (await completed([Reply(), short], request_of(USER, asked("a"), answered("a")))).message.text == "3"


async def test_a_function_that_fails_is_a_provider_error() -> None:
    def broken(request: ProviderRequest) -> Reply:
        raise ValueError("no idea")

    def refusing(request: ProviderRequest) -> Reply:
        raise ProviderError(ErrorInfo(kind="rate_limited", message="slow down", retryable=True))

    assert (await failure(broken)).message == "script 'test' failed: no idea"
    assert (await failure(lambda request: "text")).message == "script 'test' failed: it gave a str, not a Reply"
    assert (await failure(refusing)).retryable


# --- filling in


async def test_texts_and_arguments_take_the_input_and_the_results() -> None:
    history = (USER, asked("a", "b"), answered("a", result='4 "degrees"'), answered("b", result={"rain": True}))
    reply = Reply(
        text="${input}: ${results[0]}, ${results[1]}, ${result}, ${results[7]}, ${other}",
        tool_calls=[
            Call("note", {"say": ["${results[0]}"], "count": 1}),
            Call("note", '{"say": "${results[0]}"}'),
        ],
    )
    message = (await completed([reply], request_of(*history))).message
    assert message.text == 'Oslo: 4 "degrees", {"rain":true}, {"rain":true}, ${results[7]}, ${other}'
    assert [call.arguments for call in message.tool_calls] == [
        {"say": ['4 "degrees"'], "count": 1},
        {"say": '4 "degrees"'},
    ]


async def test_rich_results_fill_in_their_text() -> None:
    rich = ToolResult(tool_call_id="a", tool_name="weather", content=[TextPart("4 "), TextPart("degrees")])
    history = (USER, asked("a"), Message(role="tool", content=[ToolResultPart(rich)]))
    assert (await completed([Reply(text="${result}")], request_of(*history))).message.text == "4 degrees"


async def test_what_is_filled_in_is_not_filled_again() -> None:
    user = Message(role="user", content="${input}${result}")
    assert (await completed([Reply(text="<${input}>")], request_of(user))).message.text == "<${input}${result}>"


# --- failures


async def test_an_error_comes_first_or_after_some_events() -> None:
    error = ErrorInfo(kind="rate_limited", message="slow down", retryable=True, status=429, retry_after_seconds=2.0)
    assert await failure([Reply(text="never", error=error)]) == error
    provider = ScriptedProvider([Script("test", [Reply(chunks=["a", "b", "c"], error=error, error_after_chunks=2)])])
    seen = []
    with pytest.raises(ProviderError):
        async for event in provider.stream(request_of()):
            seen.append(event)
    assert [event.text for event in seen] == ["a", "b"]  # type: ignore[union-attr]


async def test_a_cut_stream_is_never_a_short_success() -> None:
    error = await failure([Reply(text="half a sen", cut=True)])
    assert (error.kind, error.retryable) == ("stream_broken", True)


async def test_an_unknown_script_is_named_with_those_there_are() -> None:
    error = await failure([Reply()], request_of(model="other"))
    assert (error.kind, error.message) == ("bad_request", "no script 'other'. Available: test")


# --- the strict model


@pytest.mark.parametrize(
    "history",
    [
        [],
        [USER],
        [Message(role="system", content="x"), USER, asked("a", "b"), answered("a", "b"), USER],
        [USER, asked("a", "b"), answered("a"), answered("b"), Message(role="assistant", content="done"), USER],
    ],
)
def test_a_history_whose_calls_are_answered_has_no_fault(history: list[Message]) -> None:
    assert history_fault(history) is None


@pytest.mark.parametrize(
    ("history", "fault"),
    [
        ([USER, asked("a")], "the history ends without the result of 'a'"),
        ([USER, asked("a", "b"), answered("a")], "the history ends without the result of 'b'"),
        ([USER, asked("a"), USER], "message 2: a user message where the result of 'a' is expected"),
        ([USER, asked("a"), USER, answered("a")], "message 2: a user message where the result of 'a' is expected"),
        ([USER, asked("a", "b"), answered("a"), USER], "message 3: a user message where the result of 'b' is expected"),
        ([USER, asked("a", "b"), answered("b", "a")], "message 2: the result of 'b' where 'a' is expected"),
        ([USER, asked("a"), answered("a", "a")], "message 2: the result of 'a' answers no open call"),
        ([USER, asked("a"), answered("a"), answered("a")], "message 3: the result of 'a' answers no open call"),
        ([USER, answered("a")], "message 1: the result of 'a' answers no open call"),
        ([USER, asked("a", "a"), answered("a", "a")], "message 1: two tool calls have the same id"),
        ([USER, asked("a"), Message(role="tool", content="4")], "message 2: a tool message without a result"),
        ([Message(role="user", content=asked("a").content)], "message 0: a user message holds the tool call 'a'"),
        ([USER, asked("a"), Message(role="user", content=answered("a").content)], "message 2: a user message holds the result of 'a'"),
    ],
)  # fmt: skip
def test_every_gap_in_a_history_is_a_fault(history: list[Message], fault: str) -> None:
    assert history_fault(history) == fault


async def test_a_strict_script_rejects_what_a_lenient_one_takes() -> None:
    request = request_of(USER, asked("a"), USER)
    assert (await completed([Reply(text="fine")], request)).message.text == "fine"
    error = await failure([Reply(text="fine")], request, strict=True)
    assert (error.kind, error.status, error.retryable) == ("bad_request", 400, False)
    assert "the result of 'a' is expected" in error.message


# --- the record


async def test_every_request_is_recorded_with_its_end(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    scripts = [
        Script("test", [Reply(text="hello", chunks=2)]),
        Script("strict", [Reply()], strict=True),
        Script("slow", [Reply(text="x", first_delay_seconds=60)]),
    ]
    provider = ScriptedProvider(scripts, log_path=log)

    assert [event async for event in provider.stream(request_of(turn_id="t0-x", session_id="s"))]

    with pytest.raises(ProviderError):
        await anext(aiter(provider.stream(request_of(USER, asked("a"), model="strict"))))

    left: Any = provider.stream(request_of())
    assert await anext(left) == TextDelta(text="he", step_number=1)
    assert provider.requests[-1].outcome == "open"
    await left.aclose()

    task = asyncio.ensure_future(anext(aiter(provider.stream(request_of(model="slow")))))
    await asyncio.sleep(0)
    assert provider.requests[-1].closed_at is None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    unread: Any = provider.stream(request_of())
    while not isinstance(await anext(unread), Completed):
        pass
    await unread.aclose()

    await provider.close()
    outcomes = ["finished", "error", "closed", "cancelled", "finished"]
    assert [entry.outcome for entry in provider.requests] == outcomes
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == outcomes
    assert lines[0]["messages"] == [{"role": "user", "content": "Oslo"}]
    assert (lines[0]["turn_id"], lines[0]["session_id"], lines[0]["model"]) == ("t0-x", "s", "test")
    assert lines[0]["opened_at"] <= lines[0]["closed_at"]


async def test_several_providers_append_to_one_log(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    for _ in range(2):
        provider = ScriptedProvider([Script("test", [Reply()])], log_path=log)
        assert [event async for event in provider.stream(request_of())]
        await provider.close()
        await provider.close()
    assert len(log.read_text().splitlines()) == 2


async def test_the_memory_of_requests_is_bounded() -> None:
    provider = ScriptedProvider([Script("test", [Reply()])], requests_max=2)
    for step_number in range(3):
        assert [event async for event in provider.stream(request_of(step_number=step_number))]
    assert [entry.request.step_number for entry in provider.requests] == [1, 2]


async def test_delays_are_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await play([Reply(chunks=["a", "b", "c"], first_delay_seconds=1.0, delay_seconds=0.5)])
    assert slept == [1.0, 0.5, 0.5]


# --- writing scripts


def test_scripts_are_loaded_from_json(tmp_path: Path) -> None:
    path = tmp_path / "scripts.json"
    path.write_text(
        json.dumps(
            {
                "weather": {
                    "strict": True,
                    "replies": [
                        {"tool_calls": [{"name": "weather", "arguments": {"city": "${input}"}, "id": "call_1"}]},
                        {"text": "${result}", "usage": {"input_tokens": 3}, "reasoning": [{"text": "hm"}]},
                    ],
                },
                "flaky": {
                    "replies": [{"attempts": [{"error": {"kind": "overloaded", "message": "busy"}}, {"text": "ok"}]}]
                },
            }
        )
    )
    assert load_scripts(path) == [
        Script(
            "weather",
            [
                Reply(tool_calls=[Call("weather", {"city": "${input}"}, id="call_1")]),
                Reply(text="${result}", usage=Usage(input_tokens=3), reasoning=[ReasoningPart(text="hm")]),
            ],
            strict=True,
        ),
        Script(
            "flaky", [Reply(attempts=[Reply(error=ErrorInfo(kind="overloaded", message="busy")), Reply(text="ok")])]
        ),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not as expected"),
        ("[]", "Expected `object`"),
        ('{"a": {}}', "missing required field `replies`"),
        ('{"a": {"replies": []}}', "script 'a' needs a list of at least one reply"),
        ('{"a b": {"replies": [{}]}}', "'a b' is no name"),
        ('{"a": {"replies": [{"txt": "x"}]}}', r"unknown field `txt` - at `\$\[\.\.\.\]\.replies\[0\]`"),
        ('{"a": {"replies": [{"fragments": -1}]}}', "at least 0"),
        ('{"a": {"replies": [{"text": "x", "chunks": ["x"]}]}}', "either `text` or a list"),
        ('{"a": {"replies": [{"text": "x", "attempts": [{}]}]}}', "nothing else"),
    ],
)
def test_a_broken_script_file_says_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "scripts.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        load_scripts(path)


def test_a_missing_script_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.json: No such file"):
        load_scripts(tmp_path / "nowhere.json")


@pytest.mark.parametrize("replies", [[], Reply(), ["text"], None])
def test_a_script_without_replies_is_refused(replies: Any) -> None:
    with pytest.raises(DefinitionError, match="script 'test'"):
        Script("test", replies)
