"""Who reads which partitions of a queue on a cluster."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from turnmill.workers.assignment import READERS, Member, assign

MEMBERS = st.lists(st.builds(Member, st.text("abcdef", min_size=1), st.integers(0, 40)), unique_by=lambda each: each.id)


@given(MEMBERS, st.integers(1, 64))
def test_each_partition_has_a_reader_and_no_more_than_it_may(members: list[Member], partitions: int) -> None:
    assigned = assign(members, partitions)
    readers = Counter(number for numbers in assigned.values() for number in numbers)
    assert set(readers) == (set(range(partitions)) if members else set())
    assert not members or max(readers.values()) <= min(READERS, len(members))
    assert all(len(set(numbers)) == len(numbers) for numbers in assigned.values())


@given(MEMBERS, st.integers(1, 64))
def test_nobody_gets_more_than_it_has_slots_for_while_others_have_some(members: list[Member], partitions: int) -> None:
    assigned = assign(members, partitions)
    if sum(min(member.capacity, partitions) for member in members) >= partitions * len(members):
        assert all(len(assigned[member.id]) <= member.capacity for member in members)


@given(st.permutations([Member(name, 8) for name in "abcdefgh"]))
def test_everybody_computes_the_same(members: list[Member]) -> None:
    assert assign(members, 16) == assign(sorted(members), 16)


def test_work_is_spread() -> None:
    """Eight equal workers have about equal shares; a small one among large ones has a small share; one alone has all."""
    assert {len(numbers) for numbers in assign([Member(name, 64) for name in "abcdefgh"], 16).values()} <= {7, 8, 9}
    assigned = assign([Member("large", 64), Member("larger", 128), Member("small", 1)], 16)
    assert {name: len(numbers) for name, numbers in assigned.items()} == {"large": 16, "larger": 16, "small": 1}
    assert assign([Member("alone", 1)], 16) == {"alone": list(range(16))}
