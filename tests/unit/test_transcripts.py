"""Cuts of a transcript: at every point, no group is split, and what was replaced stays out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill.protocol.content import Message, TextPart, ToolCall, ToolCallPart, ToolResult, ToolResultPart
from turnmill.protocol.messages import Segment
from turnmill.runtime.transcripts import (
    closed_length,
    current_entries,
    cut_length,
    ranges_of,
    rewinding,
    rewound_view,
    without_rewind,
)


def said(text: str, turn: str = "a", role: Any = "user") -> Message:
    return Message(role=role, content=text, turn_id=turn)


def answered(step: int, turn: str = "a") -> Message:
    return Message(role="assistant", content="so", turn_id=turn, step=step)


def called(step: int, *ids: str, turn: str = "a") -> Message:
    calls = [ToolCallPart(ToolCall(id=call_id, name="t")) for call_id in ids]
    return Message(role="assistant", content=[TextPart("let me see"), *calls], turn_id=turn, step=step)


def resulted(step: int, *ids: str, turn: str = "a") -> Message:
    results = [ToolResultPart(ToolResult(tool_call_id=call_id, tool_name="t")) for call_id in ids]
    return Message(role="tool", content=list(results), turn_id=turn, step=step)


TWO_TURNS = [
    said("hi"),
    called(1, "c1", "c2"),
    resulted(1, "c1"),
    resulted(1, "c2"),
    said("steered"),
    called(2, "c1"),  # an id of its own step: models repeat them
    resulted(2, "c1"),
    answered(3),
    said("more", "b"),
    called(1, "c3", "c4", turn="b"),
    resulted(1, "c3", "c4", turn="b"),
    answered(2, "b"),
]


def test_no_cut_splits_a_group() -> None:  # AC-07
    lengths = [closed_length(TWO_TURNS[:end]) for end in range(len(TWO_TURNS) + 1)]
    assert lengths == [0, 1, 1, 1, 4, 5, 5, 7, 8, 9, 9, 11, 12]


def test_a_group_without_end_does_not_hold_up_what_follows() -> None:
    """Histories that a caller brings may hold calls that nobody ever answered."""
    messages = [said("hi"), called(1, "c1"), said("never mind"), answered(2), said("go on")]
    assert [closed_length(messages[:end]) for end in range(6)] == [0, 1, 1, 1, 4, 5]


GROUPS = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=6)


@given(GROUPS)
def test_every_cut_is_the_last_place_between_two_groups(groups: list[tuple[int, bool, bool]]) -> None:
    messages: list[Message] = []
    places = [0]
    for step, (calls, together, steered) in enumerate(groups, 1):
        if steered:
            messages.append(said("steered"))
            places.append(len(messages))
        ids = [f"c{number}" for number in range(calls)]
        messages.append(called(step, *ids))
        messages += [resulted(step, *ids)] if together and ids else [resulted(step, name) for name in ids]
        places.append(len(messages))
    for end in range(len(messages) + 1):
        assert closed_length(messages[:end]) == max(place for place in places if place <= end)


@pytest.mark.parametrize(
    ("turn", "step", "length"),
    [
        (None, None, 12),
        ("a", None, 8),
        ("a", 1, 4),
        ("a", 2, 7),
        ("a", 3, 8),
        ("b", 1, 11),
        ("b", 2, 12),
        ("b", None, 12),
    ],
)
def test_a_cut_at_a_turn_or_step(turn: str | None, step: int | None, length: int) -> None:
    assert cut_length(TWO_TURNS, turn, step) == length


def test_a_cut_leaves_out_what_is_under_way() -> None:
    open_group = TWO_TURNS[:10]
    assert cut_length(open_group) == 9
    assert cut_length(open_group, "b") == 9
    with pytest.raises(ValueError, match="step 1 of turn b still has calls without results"):
        cut_length(open_group, "b", 1)


def test_a_cut_that_is_nowhere_is_told() -> None:
    with pytest.raises(ValueError, match="turn c has no messages in the session's conversation"):
        cut_length(TWO_TURNS, "c")
    with pytest.raises(ValueError, match=r"turn a has no step 4; its steps: \[1, 2, 3\]"):
        cut_length(TWO_TURNS, "a", 4)
    with pytest.raises(ValueError, match="step 1 of which turn"):
        cut_length(TWO_TURNS, None, 1)


def test_what_a_turn_replaced_does_not_count() -> None:
    a, b, c = said("a"), said("b"), said("c")
    assert current_entries([a, b, c]) == [0, 1, 2]
    assert current_entries([a, b, rewinding(c, 1)]) == [0, 2]
    assert current_entries([a, b, rewinding(c, 1), said("d"), rewinding(said("e"), 2)]) == [0, 4]
    assert current_entries([a, b, rewinding(c, 0), said("d"), rewinding(said("e"), 3)]) == [2, 4]
    assert current_entries([a, rewinding(b, 1)]) == [0, 1]


def test_the_mark_can_be_taken_off() -> None:
    message = Message(role="user", content="x", metadata={"mine": 1})
    assert without_rewind(message) is message
    assert without_rewind(rewinding(message, 3)) == message


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=8))
def test_the_view_and_the_entries_that_count_say_the_same(turns: list[tuple[int, int]]) -> None:
    """The model sees the view, a fork takes the entries: both after any number of turns that went back."""
    messages: list[Message] = []
    view: list[Segment] = []
    view_end = 0
    for length, choice in turns:
        current = current_entries(messages)
        first = said("first")
        if choice < len(current):  # else the turn goes on from the end
            target = current[choice]
            view, view_end = rewound_view(view, view_end, target), len(messages)
            first = rewinding(first, target)
        messages += [first, *[said("next")] * (length - 1)]
        seen = [entry for number, start, end in view for entry in range(start, end) if number == 0]
        assert [*seen, *range(view_end, len(messages))] == current_entries(messages)


@pytest.mark.parametrize(
    ("index", "left"),
    [
        (70, [(1, 0, 1), (0, 50, 60), (0, 64, 70)]),
        (64, [(1, 0, 1), (0, 50, 60)]),
        (62, [(1, 0, 1), (0, 50, 60)]),
        (55, [(1, 0, 1), (0, 50, 55)]),
        (50, [(1, 0, 1)]),
        (30, [(0, 0, 30)]),  # in the middle of what was summarized
        (0, []),
    ],
)
def test_a_compacted_view_goes_back(index: int, left: list[Segment]) -> None:
    view: list[Segment] = [(1, 0, 1), (0, 50, 60)]
    assert rewound_view(view, 64, index) == left


def test_a_view_with_trimmed_results_goes_back() -> None:
    view: list[Segment] = [(0, 0, 3), (1, 0, 1), (0, 4, 9), (1, 1, 2)]
    assert rewound_view(view, 10, 10) == view
    assert rewound_view(view, 10, 9) == [(0, 0, 3), (1, 0, 1), (0, 4, 9)]
    assert rewound_view(view, 10, 4) == [(0, 0, 3), (1, 0, 1)]
    assert rewound_view(view, 10, 3) == [(0, 0, 3)]


def test_indices_as_ranges() -> None:
    assert ranges_of([]) == []
    assert ranges_of([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
