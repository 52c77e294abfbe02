"""Which worker reads which partitions of a queue, on a cluster, where a read is about one partition.

Every worker computes the same from the same members, so nobody has to be asked. First each partition gets one reader, then
a few more, so that a reader that dies is not missed and load is shared. A worker is given a partition for every slot at
the most, unless the first round demands more of it. It does no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

READERS = 4
"""Readers of a partition, where there are so many workers with free slots. Each is a blocked connection, and an entry that
is added wakes all of them."""


class Member(NamedTuple):
    """A worker that reads a queue. `capacity` is how many partitions it has slots for."""

    id: str
    capacity: int


def assign(members: Sequence[Member], partitions: int, readers: int = READERS) -> dict[str, list[int]]:
    """The partitions of each member by its id. Each partition has a reader, if there is a member at all."""
    assigned: dict[str, list[int]] = {member.id: [] for member in members}
    for turn in range(min(readers, len(members))):
        for partition in range(partitions):
            member = _reader(members, assigned, partition, is_needed=turn == 0)
            if member is not None:
                assigned[member.id].append(partition)
    return {name: sorted(numbers) for name, numbers in assigned.items()}


def _reader(
    members: Sequence[Member], assigned: dict[str, list[int]], partition: int, *, is_needed: bool
) -> Member | None:
    """The one with the smallest share of its capacity in use; a hash decides between equals."""
    best: tuple[float, str] | None = None
    chosen = None
    for member in members:
        used = assigned[member.id]
        if partition in used or (len(used) >= member.capacity and not is_needed):
            continue
        rank = (len(used) / max(1, member.capacity), _hash(member.id, partition))
        if best is None or rank < best:
            best, chosen = rank, member
    return chosen


def _hash(name: str, partition: int) -> str:
    return hashlib.blake2b(f"{name}/{partition}".encode(), digest_size=8).hexdigest()
