"""Names of keys: one hash tag per partition, and nobody's name meets another's."""

from __future__ import annotations

import inspect
import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill.protocol.keys import (
    Keys,
    PartitionKeys,
    new_turn_id,
    partition_of_session,
    partition_of_turn,
    valid_name,
    valid_session_id,
)

SESSIONS = st.from_regex(r"[^\s{}]{1,30}\Z", fullmatch=True).filter(valid_session_id)


def named_keys(keys: PartitionKeys) -> list[str]:
    """Every key of a partition: its fixed ones, and each of the others for a few names."""
    fixed = [getattr(keys, name) for name in PartitionKeys.__slots__ if name not in ("base", "partition")]
    makers = [name for name, _ in inspect.getmembers(PartitionKeys, inspect.isfunction) if not name.startswith("_")]
    made = []
    for maker in makers:
        parameters = len(inspect.signature(getattr(keys, maker)).parameters)
        made += [getattr(keys, maker)(*[name] * parameters) for name in ("a", "b.c", "x-1")]
    return [*fixed, keys.cancellations, *made]


def test_all_keys_of_a_partition_share_its_hash_tag() -> None:
    """A script may only touch keys of one slot, and a cluster hashes what stands between the first braces."""
    for number in (0, 3, 63):
        keys = Keys("tm:test", 64).partitions[number]
        assert {re.search(r"\{([^}]*)\}", key)[1] for key in named_keys(keys)} == {str(number)}  # type: ignore[index]


def test_no_two_keys_have_the_same_name() -> None:
    keys = Keys("tm", 2)
    names = [*named_keys(keys.partitions[0]), *named_keys(keys.partitions[1])]
    names += [value for name, value in vars(keys).items() if isinstance(value, str) and name != "prefix"]
    assert len(set(names)) == len(names)


def test_names_that_other_languages_rely_on() -> None:
    keys = Keys("tm", 4).partitions[2]
    assert keys.inbox == "tm:{2}:inbox"
    assert keys.results == "tm:{2}:results"
    assert keys.model("default") == "tm:{2}:model:default"
    assert keys.tool("slow") == "tm:{2}:tool:slow"
    assert keys.alive("w-1") == "tm:{2}:alive:w-1"
    assert keys.cancel("t2-x") == "tm:{2}:cancel:t2-x"
    assert keys.cancellations == "tm:{2}:cancel"
    assert keys.events("t2-x") == "tm:{2}:turn:t2-x:events"
    assert keys.dead == "tm:{2}:dead"
    assert keys.feed == "tm:{2}:feed"
    shared = Keys("tm", 4)
    assert (shared.tools, shared.agents, shared.workers) == ("tm:tools", "tm:agents", "tm:workers")


@pytest.mark.parametrize("suffix", [":transcript", ":clock", ":events", "/child", ":session"])
def test_no_session_or_pool_is_named_so_that_it_meets_anothers_keys(suffix: str) -> None:
    keys = Keys("tm", 1).partitions[0]
    names = [maker(name) for name in ("a", f"a{suffix}") for maker in (keys.session, keys.transcript)]
    names += [maker(name) for name in ("a", f"a{suffix}") for maker in (keys.backlog, keys.backlog_clock)]
    assert len(set(names)) == len(names)


@given(SESSIONS, st.integers(1, 1024))
def test_a_sessions_partition_is_the_crc_of_its_root(session: str, partitions: int) -> None:
    number = partition_of_session(session, partitions)
    assert number == zlib.crc32(session.split("/")[0].encode()) % partitions
    assert partition_of_session(f"{session}/child/grandchild", partitions) == number
    assert Keys("tm", partitions).of_session(session).partition == number


@given(st.integers(0, 9999))
def test_a_turns_id_carries_its_partition(partition: int) -> None:
    assert partition_of_turn(new_turn_id(partition)) == partition


def test_turn_ids_do_not_repeat_and_sort_by_time() -> None:
    ids = [new_turn_id(1) for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert ids[0][:10] <= ids[-1][:10]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "t1",
        "t1-",
        "t1-short",
        "x1-01h0000000000000000000000",
        "t-01h000000000000000000000",
        "t1-01H0000000000000000000000X",
        "t1-01h0000000000000000000000\n",
        "t12345-01h000000000000000000000",
    ],
)
def test_what_is_no_turn_id_has_no_partition(name: str) -> None:
    assert partition_of_turn(name) is None
    with pytest.raises(ValueError, match="is not the id of a turn"):
        Keys("tm", 4).of_turn(name)


def test_a_turn_of_a_larger_namespace_is_refused() -> None:
    assert Keys("tm", 8).of_turn(new_turn_id(7)).partition == 7
    with pytest.raises(ValueError, match="namespace of 4 partitions"):
        Keys("tm", 4).of_turn(new_turn_id(7))


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("weather", True),
        ("a.b:c@1-2_3", True),
        ("x" * 128, True),
        ("", False),
        ("x" * 129, False),
        ("with space", False),
        ("{tag}", False),
        ("naïve", False),
        ("end\n", False),
    ],
)
def test_names_of_tools_agents_queues_and_pools(name: str, valid: bool) -> None:
    assert valid_name(name) is valid


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("user-42", True),
        ("root/child", True),
        ("ünï:✓", True),
        ("s" * 256, True),
        ("", False),
        ("s" * 257, False),
        ("a b", False),
        ("a\n", False),
        ("{0}", False),
    ],
)
def test_names_of_sessions(name: str, valid: bool) -> None:
    assert valid_session_id(name) is valid
