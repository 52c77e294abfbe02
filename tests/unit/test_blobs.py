"""Large values by reference: what goes out comes back as it was, and what is gone is told, never a crash."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import JSON_VALUES
from turnmill.protocol.blob_refs import put_back, refs_of, refs_of_result, take_out, with_keys
from turnmill.protocol.blobs import resolve_messages, resolve_result, store_blob, with_blobs
from turnmill.protocol.codec import BODY_BYTES_MAX, decode_message, encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import (
    BlobRef,
    FilePart,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from turnmill.protocol.errors import MessageTooLarge
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.values import pack_value

THRESHOLD = 100
LARGE = "x" * 101
IMAGE = ImagePart(data=b"\x89PNG" + bytes(200), media_type="image/png")


class Shelf:
    """Where the pure functions put values, in place of an engine."""

    def __init__(self) -> None:
        self.values: dict[str, bytes | None] = {}
        self._numbers = itertools.count()

    def __call__(self, data: bytes, media_type: str | None) -> BlobRef:
        key = f"blob:{next(self._numbers)}"
        self.values[key] = data
        return BlobRef(key=key, bytes=len(data), media_type=media_type)


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
def keys(namespace: str) -> PartitionKeys:
    return Keys(namespace).partitions[2]


def result_of(value: Any = None, **fields: Any) -> ToolResult:
    return ToolResult(tool_call_id="c1", tool_name="read", result=value, **fields)


def message_of(*parts: Part, role: Any = "user") -> Message:
    return Message(role=role, content=list(parts))


# --- out and back in


TEXTS = st.text(max_size=300)
MEDIA = st.binary(max_size=300)
OUTPUT_PARTS = st.one_of(
    st.builds(TextPart, TEXTS),
    st.builds(ImagePart, data=st.none() | MEDIA, url=st.none() | TEXTS),
    st.builds(FilePart, data=st.none() | MEDIA, filename=st.none() | TEXTS),
)
RESULTS = st.builds(
    ToolResult,
    tool_call_id=TEXTS,
    tool_name=TEXTS,
    result=JSON_VALUES | TEXTS,
    is_error=st.booleans(),
    content=st.none() | st.lists(OUTPUT_PARTS, max_size=4),
)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXTS | st.lists(OUTPUT_PARTS | st.builds(ToolResultPart, RESULTS), max_size=4),
)


@given(MESSAGES, st.integers(0, 300))
def test_a_message_comes_back_as_it_was(message: Message, threshold: int) -> None:
    shelf = Shelf()
    out = take_out(message, threshold, shelf)
    assert sorted(refs_of(out)) == sorted(shelf.values)
    assert put_back(decode_message(encode_body(out)), shelf.values) == message


@given(RESULTS, st.integers(40, 300))
def test_what_stays_of_a_result_is_not_above_the_threshold(result: ToolResult, threshold: int) -> None:
    shelf = Shelf()
    out = take_out(result, threshold, shelf)
    assert out.result is None or len(msgspec.json.encode(out.result)) <= threshold
    parts: list[Any] = out.content or []
    inline = [part.text.encode() if isinstance(part, TextPart) else part.data or b"" for part in parts]
    assert sum(map(len, inline)) <= threshold
    assert put_back(out, shelf.values) == result


@given(RESULTS)
def test_what_is_small_stays_the_same_object(result: ToolResult) -> None:
    assert take_out(result, 100_000, Shelf()) is result


def test_many_small_parts_go_out_when_they_are_large_together() -> None:
    shelf = Shelf()
    out = take_out(result_of(content=[TextPart("a" * 60), TextPart("b" * 60), TextPart("c")]), THRESHOLD, shelf)
    assert [part.text for part in out.content or [] if isinstance(part, TextPart)] == ["", "", "c"]
    assert len(refs_of_result(out)) == 2


def test_the_text_of_a_model_stays_where_it_is() -> None:
    """The machine looks at it: whether a turn has text decides how it goes on."""
    shelf = Shelf()
    parts = [
        ReasoningPart(text=LARGE),
        TextPart(LARGE),
        ToolCallPart(ToolCall(id="c", name="n", arguments={"a": LARGE})),
    ]
    for message in (message_of(*parts, role="assistant"), Message(role="assistant", content=LARGE)):
        assert take_out(message, THRESHOLD, shelf) is message
    drawn = take_out(message_of(*parts, IMAGE, role="assistant"), THRESHOLD, shelf)
    assert drawn.text == LARGE
    assert refs_of(drawn) == ["blob:0"]


def test_each_reference_names_its_media_type() -> None:
    shelf = Shelf()
    out = take_out(message_of(IMAGE, FilePart(data=bytes(200)), TextPart(LARGE)), THRESHOLD, shelf)
    refs = [part.blob for part in out.content if isinstance(part, TextPart | ImagePart | FilePart)]
    assert [(ref.media_type, ref.bytes) for ref in refs if ref] == [
        ("image/png", 204),
        ("application/octet-stream", 200),
        ("text/plain", 101),
    ]
    assert take_out(result_of(LARGE), THRESHOLD, shelf).blob == BlobRef(
        key="blob:3", bytes=103, media_type="application/json"
    )


def test_keys_can_be_replaced() -> None:
    shelf = Shelf()
    parts: list[Part] = [IMAGE, ToolResultPart(result_of(LARGE, content=[IMAGE, TextPart("small")])), TextPart("t")]
    out = take_out(message_of(*parts, role="tool"), THRESHOLD, shelf)
    assert refs_of(out) == ["blob:0", "blob:2", "blob:1"]
    assert refs_of(with_keys(out, {"blob:0": "blob:a", "blob:2": "blob:b"})) == ["blob:a", "blob:b", "blob:1"]


def test_a_lost_value_is_told_and_is_no_crash() -> None:
    shelf = Shelf()
    given = message_of(IMAGE, ToolResultPart(result_of(LARGE)), TextPart(LARGE), role="tool")
    out = take_out(given, THRESHOLD, shelf)
    lost = put_back(out, {})
    assert [part.text for part in lost.content if isinstance(part, TextPart)] == [
        "[content of type image/png (204 bytes) is gone: it expired or was deleted]",
        "[content of type text/plain (101 bytes) is gone: it expired or was deleted]",
    ]
    (result,) = lost.tool_results
    assert result == result_of("Error: the result (103 bytes) is gone: it expired or was deleted", is_error=True)


def test_a_value_that_cannot_be_read_is_told() -> None:
    ref = BlobRef(key="blob:0", bytes=1)
    broken = put_back(result_of(blob=ref, content=[TextPart("", blob=ref)]), {"blob:0": b"\xff"})
    assert broken.is_error
    assert broken.result.startswith("Error: the result (1 bytes) cannot be read (")
    assert broken.content is not None
    assert "cannot be read" in broken.content[0].text  # type: ignore[union-attr]


# --- in the engine


async def test_values_expire_unless_they_are_kept(engine: Engine, keys: PartitionKeys) -> None:
    ref = await store_blob(engine, keys, b"data", "text/csv", lifetime_ms=5_000)
    assert (ref.bytes, ref.media_type) == (4, "text/csv")
    assert ref.key.startswith("blob:")
    key = keys.base + ref.key
    assert keys.blob(ref.key.removeprefix("blob:")) == key
    assert await engine.call("GET", key) == b"data"
    assert 0 < await engine.call("PTTL", key) <= 5_000


async def test_a_value_above_the_limit_is_refused(engine: Engine, keys: PartitionKeys) -> None:  # AC-39
    with pytest.raises(MessageTooLarge, match=r"67108865 bytes is above the limit of 67108864"):
        await store_blob(engine, keys, bytes(BODY_BYTES_MAX + 1))
    with pytest.raises(MessageTooLarge):
        await with_blobs(engine, keys, result_of("x" * BODY_BYTES_MAX), THRESHOLD)


async def test_messages_and_results_come_back(engine: Engine, keys: PartitionKeys) -> None:
    value = pack_value({"rows": [LARGE, b"\x00\xff"]})
    result = result_of(value, content=[IMAGE])
    out = await with_blobs(engine, keys, result, THRESHOLD)
    assert (out.result, len(refs_of_result(out))) == (None, 2)
    assert await resolve_result(engine, keys, out) == result

    messages = [Message(role="user", content=LARGE), message_of(ToolResultPart(out), role="tool"), message_of(IMAGE)]
    sent = [await with_blobs(engine, keys, message, THRESHOLD) for message in messages]
    assert sum(len(encode_body(message)) for message in sent) < 1000
    resolved = await resolve_messages(engine, keys, sent)
    assert resolved == [messages[0], message_of(ToolResultPart(result), role="tool"), messages[2]]


async def test_nothing_is_sent_where_nothing_is_large(engine: Engine, keys: PartitionKeys) -> None:
    engine.call = None  # type: ignore[method-assign, assignment]  # whoever sends something fails
    messages = [Message(role="user", content="hi"), message_of(ToolResultPart(result_of({"a": 1})), role="tool")]
    for message in messages:
        assert await with_blobs(engine, keys, message, THRESHOLD) is message
    assert await resolve_messages(engine, keys, messages) is messages
    result = result_of("small")
    assert await resolve_result(engine, keys, result) is result


async def test_a_reference_to_nothing_is_told(engine: Engine, keys: PartitionKeys) -> None:
    out = await with_blobs(engine, keys, result_of(LARGE), THRESHOLD)
    await engine.call("DEL", *[keys.base + key for key in refs_of_result(out)])
    (message,) = await resolve_messages(engine, keys, [message_of(ToolResultPart(out), role="tool")])
    assert message.tool_results[0].is_error
