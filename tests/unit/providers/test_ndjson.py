"""Lines of JSON from bytes: every split, line end, blank line and missing end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill.protocol.errors import MessageTooLarge
from turnmill.workers.providers.ndjson import NdjsonParser

BODY = '{"a":"é漢🚀"}\r\n\n \r\n{"b":"x\u2028y\u0085z\x0b\x0c"}\n\t{"c":1} \n{"d":2}'.encode()
LINES = ['{"a":"é漢🚀"}'.encode(), '{"b":"x\u2028y\u0085z\x0b\x0c"}'.encode(), b'{"c":1}', b'{"d":2}']


def parse(chunks: list[bytes]) -> list[bytes]:
    parser = NdjsonParser()
    lines = [line for chunk in chunks for line in parser.feed(chunk)]
    return lines + parser.close()


def test_lines_end_at_line_feeds_only() -> None:
    """U+2028, U+0085 and the like stand in valid JSON; blank lines mean nothing; the last line needs no end (AC-40)."""
    assert parse([BODY]) == LINES


def test_every_split_in_two_and_byte_by_byte_gives_the_same() -> None:
    for place in range(len(BODY) + 1):
        assert parse([BODY[:place], BODY[place:]]) == LINES, place
    assert parse([BODY[n : n + 1] for n in range(len(BODY))]) == LINES


@given(st.lists(st.integers(0, len(BODY)), max_size=8))
def test_any_split_gives_the_same(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(BODY)]
    assert parse([BODY[start:end] for start, end in itertools.pairwise(cuts)]) == LINES


def test_lines_are_given_as_soon_as_they_end() -> None:
    parser = NdjsonParser()
    assert parser.feed(b'{"a"') == []
    assert parser.feed(b":1}\n{") == [b'{"a":1}']
    assert parser.feed(b"}\n") == [b"{}"]
    assert parser.close() == []


def test_a_mark_of_byte_order_is_left_out() -> None:
    assert parse([b"\xef\xbb", b'\xbf{"a":1}\n\xef\xbb\xbf']) == [b'{"a":1}', b"\xef\xbb\xbf"]


def test_a_line_above_the_limit_is_refused_before_its_end() -> None:
    parser = NdjsonParser(line_bytes_max=10)
    assert parser.feed(b"1234567890\n123") == [b"1234567890"]
    parser.feed(b"4567890")
    with pytest.raises(MessageTooLarge, match="10 bytes"):
        parser.feed(b"1")
