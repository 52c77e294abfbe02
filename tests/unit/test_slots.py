"""What a cluster's client computes."""

from __future__ import annotations

import pytest

from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.keys import Keys
from turnmill.protocol.link import split_urls, url_at
from turnmill.protocol.slots import Address, Refusal, key_of, parse_slots, refusal_of, slot_of


def test_slots_are_those_of_the_server() -> None:
    """The values are CLUSTER KEYSLOT's."""
    expected = {
        "123456789": 12739,
        "foo": 12182,
        "{user1000}.following": 3443,
        "foo{}{bar}": 8363,
        "foo{{bar}}zap": 4015,
    }
    assert {key: slot_of(key) for key in expected} == expected
    assert slot_of(b"foo") == slot_of("foo")


def test_all_keys_of_a_partition_share_a_slot() -> None:
    keys = Keys("any:prefix", 16)
    for part in keys.partitions:
        names = [
            part.inbox,
            part.results,
            part.timers,
            part.tool("a{b}"),
            part.turn("t0-x"),
            part.alive("w"),
            part.cancellations,
        ]
        assert len({slot_of(name) for name in names}) == 1
    assert len({slot_of(part.base) for part in keys.partitions}) == 16


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("SET k v", "k"),
        ("EVALSHA hash 2 k other argument", "k"),
        ("EVAL code 0 argument", None),
        ("XGROUP CREATE k group 0 MKSTREAM", "k"),
        ("XINFO GROUPS k", "k"),
        ("XREADGROUP GROUP g c COUNT 1 STREAMS k other > >", "k"),
        ("PUBSUB SHARDNUMSUB k", "k"),
        ("SPUBLISH k message", "k"),
        ("TIME", None),
        ("SCRIPT LOAD code", None),
        ("CONFIG GET maxmemory-policy", None),
    ],
)
def test_a_command_goes_by_its_first_key(command: str, key: str | None) -> None:
    assert key_of(command.split(" ")) == key


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("MOVED 3999 127.0.0.1:6381", Refusal("MOVED", 3999, Address("127.0.0.1", 6381))),
        ("ASK 3999 host.example:6381", Refusal("ASK", 3999, Address("host.example", 6381))),
        ("MOVED 1 [::1]:6381", Refusal("MOVED", 1, Address("::1", 6381))),
        ("MOVED 1 :6381", Refusal("MOVED", 1, Address("asked", 6381))),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Refusal("TRYAGAIN")),
        ("CLUSTERDOWN The cluster is down", Refusal("CLUSTERDOWN")),
        ("ERR Script attempted to access a non local key in a cluster node", None),
        ("WRONGTYPE Operation against a key", None),
    ],
)
def test_refusals_are_told_from_errors(text: str, refusal: Refusal | None) -> None:
    assert refusal_of(Exception(text), Address("asked", 1)) == refusal


def test_the_map_is_read_with_the_address_that_was_asked_where_a_node_does_not_know_its_own() -> None:
    reply = [[0, 5, [b"10.0.0.1", 6379, b"id", []], [b"10.0.0.2", 6379, b"id", []]], [6, 9, [None, 6380, b"id", []]]]
    assert parse_slots(reply, Address("asked", 1)) == [
        (0, 5, Address("10.0.0.1", 6379)),
        (6, 9, Address("asked", 6380)),
    ]


def test_urls_of_nodes_keep_user_password_and_options() -> None:
    url = "rediss://user:p%2Cw,x@first:6379/0?ssl_ca_certs=/ca.pem"
    assert url_at(url, "10.0.0.1", 7000) == "rediss://user:p%2Cw,x@10.0.0.1:7000/0?ssl_ca_certs=/ca.pem"
    assert url_at("redis://first:6379", "::1", 7000) == "redis://[::1]:7000"
    assert split_urls(f"{url}, redis://second:1") == [url, "redis://second:1"]
    with pytest.raises(ConfigurationError, match="unix"):
        url_at("unix:///some/socket", "10.0.0.1", 7000)
