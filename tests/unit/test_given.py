"""What callers hand over: messages, results and reasons that cannot be meant are refused where they are written."""

from __future__ import annotations

from typing import Any

import pytest

from turnmill.protocol.content import BlobRef, FilePart, ImagePart, Message, TextPart, ToolResult
from turnmill.protocol.errors import DefinitionError, NotInConversationError, TurnmillError
from turnmill.runtime.given import REASON_CHARACTERS_MAX, messages_of, reason_of, results_of, steering_of
from turnmill.runtime.idempotency import check_key
from turnmill.runtime.transcripts import cut_length

USER = Message(role="user", content="hello")
IMAGE = ImagePart(url="https://example.org/logo.png")
BLOB = BlobRef(key="blob:x", bytes=70_000)
BAD_PARTS = [ImagePart(), FilePart(), ImagePart(data=b"x", url="https://example.org"), FilePart(data=b"x", url="x")]


def test_a_turn_starts_with_a_text_parts_a_message_or_a_list_of_them() -> None:
    assert messages_of("hello") == [USER]
    assert messages_of([TextPart("look"), IMAGE]) == [Message(role="user", content=[TextPart("look"), IMAGE])]
    assert messages_of(USER) == [USER]
    assert messages_of((USER, USER)) == [USER, USER]
    interrupted = Message(role="assistant", content="")
    assert messages_of([USER, interrupted, USER]) == [USER, interrupted, USER]
    stored = Message(role="user", content=[TextPart("", BLOB), ImagePart(blob=BLOB)])
    assert messages_of([stored]) == [stored]


@pytest.mark.parametrize("given", [None, 5, b"x", [], ["a"], [USER, "a"], [USER, TextPart("a")], {"role": "user"}])
def test_anything_else_is_refused(given: Any) -> None:
    for take in (messages_of, steering_of):
        with pytest.raises(DefinitionError):
            take(given)


@pytest.mark.parametrize("content", ["", [], [TextPart("")], None, 5])
def test_what_says_nothing_is_refused(content: Any) -> None:
    for message in (Message(role="user", content=content), Message(role="system", content=content)):
        takes: list[tuple[Any, Any]] = [(messages_of, message), (messages_of, [USER, message]), (steering_of, message)]
        for take, given in takes:
            with pytest.raises(DefinitionError, match=r"empty|holds"):
                take(given)
    for take in (messages_of, steering_of):
        with pytest.raises(DefinitionError):
            take(content)


@pytest.mark.parametrize("part", BAD_PARTS)
def test_an_image_or_file_has_one_source(part: Any) -> None:
    for refused in (
        lambda: messages_of([part]),
        lambda: messages_of([USER, Message(role="user", content=[part])]),
        lambda: steering_of([TextPart("look"), part]),
        lambda: results_of([ToolResult(tool_call_id="a", tool_name="", content=[part])]),
    ):
        with pytest.raises(DefinitionError, match=r"(neither|both) data"):
            refused()


def test_a_live_turn_is_told_something_by_a_user_or_by_the_system() -> None:
    assert steering_of("hello", "system") == Message(role="system", content="hello")
    assert steering_of([IMAGE]) == Message(role="user", content=[IMAGE])
    for role in ("assistant", "tool", "bogus"):
        for given in ("hello", Message(role=role, content="hello")):  # type: ignore[arg-type]
            with pytest.raises(DefinitionError, match=role):
                steering_of(given, role)


def test_results_in_all_their_forms() -> None:
    rich = ToolResult(tool_call_id="d", tool_name="", content=[IMAGE])
    given = [{"tool_call_id": "a", "result": None}, {"tool_call_id": "b", "content": [IMAGE]}, rich]
    taken = results_of(given)
    assert [(result.tool_call_id, result.result, result.is_error, result.content) for result in taken] == [
        ("a", None, False, None),
        ("b", None, False, [IMAGE]),
        ("d", None, False, [IMAGE]),
    ]
    assert results_of({"a": {"x": 1}})[0].result == {"x": 1}
    (file,) = results_of({"a": b"raw"})
    assert (file.result, file.content) == (None, [FilePart(data=b"raw")])  # as from a tool of a worker


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"tool_call_id": "a"}, "has no 'result'"),
        ({"tool_call_id": "a", "is_error": True}, "has no 'result'"),
        ({"tool_call_id": "a", "result": 1, "is_error": "no"}, "is_error='no'"),
        ({"tool_call_id": "a", "result": 1, "is_error": None}, "is_error=None"),
        (ToolResult(tool_call_id="a", tool_name="", result=1, is_error=1), "is_error=1"),  # type: ignore[arg-type]
        ({"tool_call_id": "a", "content": "text"}, "content of 'a'"),
        ({"tool_call_id": "a", "results": 1}, "no field results"),
        ({"result": 1}, "is no tool result"),
        ("text", "is no tool result"),
    ],
)
def test_a_result_that_is_none_is_refused(item: Any, words: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        results_of([item])
    assert words in str(refused.value)


def test_a_long_reason_is_cut_where_it_is_given() -> None:
    assert (reason_of(None), reason_of("enough"), reason_of("x" * 4000)) == (None, "enough", "x" * 4000)
    assert reason_of("x" * 4001) == "x" * 3999 + "…"
    assert REASON_CHARACTERS_MAX == 4000
    with pytest.raises(DefinitionError, match="reason"):
        reason_of(5)


@pytest.mark.parametrize("key", [5, b"x", "", "x" * 513, "\ud800", None])
def test_what_is_no_idempotency_key_is_refused(key: Any) -> None:
    with pytest.raises(DefinitionError, match="idempotency key"):
        check_key(key)


@pytest.mark.parametrize(("turn", "step"), [("nobody", None), ("t", 9), (None, 1)])
def test_a_place_that_is_not_there_is_an_error_of_ours_and_of_values(turn: str | None, step: int | None) -> None:
    messages = [
        Message(role="user", content="a", turn_id="t"),
        Message(role="assistant", content="b", turn_id="t", step=1),
    ]
    with pytest.raises(NotInConversationError) as refused:
        cut_length(messages, turn, step)
    assert isinstance(refused.value, TurnmillError)
    assert isinstance(refused.value, ValueError)
