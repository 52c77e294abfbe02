"""Server-sent events: any cut of the bytes gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill.protocol.errors import MessageTooLarge
from turnmill.workers.providers.sse import SseEvent, SseParser


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()


def data_of(*chunks: bytes) -> list[bytes]:
    return [event.data for event in parse(*chunks)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
def test_all_line_ends_of_the_standard_end_a_line(line_end: bytes) -> None:
    assert data_of(b"data: a\ndata: b\n\ndata: c\n\n".replace(b"\n", line_end)) == [b"a\nb", b"c"]


# AC-40
def test_a_line_end_cut_between_cr_and_lf_is_one() -> None:
    assert data_of(b"data: a\r", b"\n\r", b"\ndata: b\r", b"\n", b"\r\n") == [b"a", b"b"]


def test_an_event_ended_by_cr_does_not_wait_for_a_possible_lf() -> None:
    parser = SseParser()
    assert [event.data for event in parser.feed(b"data: a\r\r")] == [b"a"]
    assert [event.data for event in parser.feed(b"\ndata: b\n\n")] == [b"b"]


def test_nothing_but_cr_and_lf_ends_a_line() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg".encode()
    assert data_of(b"data: " + text + b"\n\n") == [text]


# AC-40
def test_characters_cut_anywhere_come_back_whole() -> None:
    text = "Grüße 你好 🌍".encode()
    assert data_of(*(bytes([byte]) for byte in b"data: " + text + b"\n\n")) == [text]


# AC-40
def test_comments_are_no_events_and_do_not_end_one() -> None:
    assert data_of(b": ping\n\ndata: a\n: ping\ndata: b\n\n:\n\n") == [b"a\nb"]


def test_one_space_behind_the_colon_belongs_to_the_syntax() -> None:
    assert data_of(b"data:a\n\ndata: b\n\ndata:  c \n\ndata\n\n") == [b"a", b"b", b" c ", b""]


def test_an_event_has_its_type_and_the_next_one_has_not() -> None:
    stream = b"event: error\nid: 7\nretry: 10\ndata: a\n\ndata: b\n\nevent: lonely\n\ndata: c\n\n"
    assert parse(stream) == [SseEvent(b"a", b"error"), SseEvent(b"b"), SseEvent(b"c")]


def test_fields_that_only_begin_like_data_are_others() -> None:
    assert data_of(b"database: a\ndata2\n data: b\n\n") == []


# AC-40
@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n", b"\n\n"])
def test_an_event_without_its_blank_line_is_delivered_at_the_end_and_once(end: bytes) -> None:
    assert data_of(b"data: a\n\ndata: b" + end) == [b"a", b"b"]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert data_of(b"\xef", b"\xbb", b"\xbfdata: a\n\n") == [b"a"]


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"a" * 200, b"data: aaaaaaaaaa\n" * 20, b"data\n" * 200, b": " + b"a" * 200],
    ids=["one line", "many lines", "empty lines", "a comment"],
)
def test_an_event_above_the_limit_is_refused(stream: bytes) -> None:
    parser = SseParser(event_bytes_max=100)
    with pytest.raises(MessageTooLarge, match="100 bytes"):
        for position in range(0, len(stream), 10):
            parser.feed(stream[position : position + 10])


def test_the_limit_is_for_one_event_not_for_the_stream() -> None:
    parser = SseParser(event_bytes_max=100)
    events = [event for _ in range(50) for event in parser.feed(b": comment\nevent: x\ndata: " + b"a" * 50 + b"\n\n")]
    assert len(events) == 50


def test_comments_between_the_lines_of_an_event_do_not_count() -> None:
    parser = SseParser(event_bytes_max=100)
    for _ in range(50):
        assert parser.feed(b": keep-alive\n") == []
    assert [event.data for event in parser.feed(b"data: a\n\n")] == [b"a"]


LINES = st.sampled_from(
    [
        b"data: {}",
        b"data:x",
        b"data",
        b"data: \xe2\x80\xa8\xf0\x9f\x8c\x8d",
        b": note",
        b"event: error",
        b"id: 1",
        b"",
        b"",
    ]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


# AC-40
@given(
    stream=STREAMS, tail=st.sampled_from([b"", b"data: tail", b"\r"]), cuts=st.lists(st.integers(0, 200), max_size=20)
)
def test_every_cut_gives_the_same_events(stream: bytes, tail: bytes, cuts: list[int]) -> None:
    stream += tail
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert parse(*pieces) == reference(stream)
    assert parse(*(bytes([byte]) for byte in stream)) == reference(stream)


def reference(stream: bytes) -> list[SseEvent]:
    """The rules once more, over the whole stream and as plainly as can be."""
    events, data, name = [], [], b""
    for line in [*stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), b""]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if line == b"":
            events += [SseEvent(b"\n".join(data), name)] if data else []
            data, name = [], b""
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return events
