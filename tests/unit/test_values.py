"""Free values: bytes and look-alikes come back as they were, and what has no JSON form is refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given

from support.strategies import FREE_VALUES, JSON_VALUES
from turnmill.protocol.values import DEPTH_MAX, pack_value, unpack_value


@given(FREE_VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert unpack_value(pack_value(value)) == value


@given(FREE_VALUES)
def test_a_packed_value_survives_both_wires(value: Any) -> None:
    packed = pack_value(value)
    assert msgspec.json.decode(msgspec.json.encode(packed)) == packed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed)) == packed


@given(JSON_VALUES)
def test_unpacking_never_raises(value: Any) -> None:
    """A model's arguments are unpacked too, and nobody packed them."""
    unpack_value(value)


@pytest.mark.parametrize("text", ["abc", "a", "é", "AA=", "\x00"])
def test_an_object_that_only_looks_like_bytes_stays_an_object(text: str) -> None:
    assert unpack_value({"$bytes": text}) == {"$bytes": text}


def test_the_written_form_is_stable() -> None:
    assert pack_value(b"\x00\xff") == {"$bytes": "AP8="}
    assert pack_value({"$bytes": "AP8="}) == {"$escaped": {"$bytes": "AP8="}}
    assert pack_value({"$bytes": "AP8=", "more": 1}) == {"$bytes": "AP8=", "more": 1}
    assert pack_value((1, bytearray(b"a"), memoryview(b"a"))) == [1, {"$bytes": "YQ=="}, {"$bytes": "YQ=="}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan]])
def test_a_number_without_json_form_is_refused(value: Any) -> None:  # AC-56
    with pytest.raises(ValueError, match="has no JSON form"):
        pack_value(value)


@pytest.mark.parametrize(("value", "name"), [(object(), "object"), ({1: "a"}, "key of type int"), ({"a": {1}}, "set")])
def test_a_type_without_json_form_is_refused(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        pack_value(value)


def test_nesting_is_bounded() -> None:  # AC-56
    def nest(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    assert unpack_value(pack_value(nest(DEPTH_MAX))) == nest(DEPTH_MAX)
    with pytest.raises(ValueError, match=f"deeper than {DEPTH_MAX}"):
        pack_value(nest(DEPTH_MAX + 1))
    with pytest.raises(ValueError, match="deeper than"):
        pack_value({"a": nest(5_000)})
