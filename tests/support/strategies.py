"""Hypothesis strategies for the wire's structs, made from their type annotations: a new field or type is covered at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as shapes

FREE_FIELDS = frozenset({"result", "data", "arguments", "metadata", "overrides"})
"""Fields that hold whatever a user or a provider put there, bytes included."""

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=20)
NAMES = st.text("abc-_.1", min_size=1, max_size=8)
SPECIAL_KEYS = st.sampled_from(["$bytes", "$escaped", "type", ""])
PLAIN = st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and objects of the leaves, with the keys that the wire gives a meaning among them."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(TEXTS | SPECIAL_KEYS, inner, max_size=3)
            | st.dictionaries(SPECIAL_KEYS, inner, min_size=1, max_size=1)
        ),
        max_leaves=4,
    )


JSON_VALUES = nested(PLAIN)
FREE_VALUES = nested(PLAIN | st.binary(max_size=20))
_TYPES: dict[type, st.SearchStrategy[Any]] = {
    shapes.StrType: TEXTS,
    shapes.IntType: INTEGERS,
    shapes.FloatType: FLOATS,
    shapes.BoolType: st.booleans(),
    shapes.NoneType: st.none(),
    shapes.DecimalType: st.decimals(-(10**9), 10**9, places=8),
    shapes.BytesType: st.binary(max_size=40),
}


@cache
def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of a struct with every field filled in, or left to its default."""
    shape: Any = shapes.type_info(kind)
    required, optional = {}, {}
    for field in shape.fields:
        values = _values(field.type, FREE_VALUES if field.name in FREE_FIELDS else JSON_VALUES)
        (required if field.required else optional)[field.name] = values
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: shape.cls(**fields))


def _values(shape: Any, free: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    match shape:
        case shapes.AnyType():
            return free
        case shapes.StrType(pattern=str(pattern)):
            return st.builds(str.__add__, st.just(pattern.removeprefix("^")), TEXTS)
        case shapes.LiteralType():
            return st.sampled_from(shape.values)
        case shapes.TupleType():
            return st.tuples(*[_values(item, free) for item in shape.item_types])
        case shapes.ListType():
            return st.lists(_values(shape.item_type, free), max_size=2)
        case shapes.DictType():
            return st.dictionaries(TEXTS | SPECIAL_KEYS, _values(shape.value_type, free), max_size=2)
        case shapes.UnionType():
            return st.one_of([_values(member, free) for member in shape.types])
        case shapes.StructType():
            return structs(shape.cls)
        case _:
            return _TYPES[type(shape)]
