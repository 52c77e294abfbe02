"""Published messages of a channel: several events in one payload, whatever bytes their bodies hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill.protocol.streams import parse_publication, publication_header

KINDS = st.sampled_from(["text.delta", "turn.finished", "tool_call.started"])
EVENTS = st.lists(st.tuples(KINDS, st.binary(max_size=50)), min_size=1, max_size=5)


def publication(first: int, at_ms: int, events: list[tuple[str, bytes]]) -> bytes:
    """As the scripts write it."""
    kinds, bodies = [kind for kind, _ in events], [body for _, body in events]
    header = f"{first} {at_ms} {publication_header(kinds, bodies)}\n"
    return header.encode() + b"".join(bodies)


@given(st.integers(1, 2**53), st.integers(0, 2**45), EVENTS)
def test_events_are_numbered_on_from_the_first(first: int, at_ms: int, events: list[tuple[str, bytes]]) -> None:
    expected = [(first + place, kind.encode(), at_ms, body) for place, (kind, body) in enumerate(events)]
    assert parse_publication(publication(first, at_ms, events)) == expected


def test_a_body_may_look_like_a_publication() -> None:
    body = b'{"text":"\n"}\n8 1 text.delta 2\n{}'
    payload = b"7 1 text.delta %d text.delta 2\n%b{}" % (len(body), body)
    assert parse_publication(payload) == [(7, b"text.delta", 1, body), (8, b"text.delta", 1, b"{}")]


@pytest.mark.parametrize("payload", [b"", b"1 2 text.delta 3", b"x 1\n"])
def test_what_is_no_publication_raises(payload: bytes) -> None:
    with pytest.raises(ValueError):
        parse_publication(payload)
