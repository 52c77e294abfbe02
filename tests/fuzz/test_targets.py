"""Whatever comes from outside is read, or refused with a reason: bytes that nobody has thought of, and half-right ones.

CI gives each target a few hundred inputs; `scripts/chaos fuzz` runs as long as one likes, and looks for new code.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.fuzz_targets import SEEDS, TARGETS
from support.mutation import mutated

PACE = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HARD = [
    b"", b"\x00", b"[" * 100_000, b'{"a":' * 50_000, b"{" * 5000 + b"}" * 5000, b"\x91" * 100_000, b"\xc1", b"\xdd\xff\xff\xff\xff",
    b'{"a":1e400}', b'{"a":' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}", "\u2028\x85".encode(), b'"\\ud800"', b"\xff" * 3000,
    b"data: " * 3000, b"1" * 5000 + b"\n", b"a = [" * 3000, b"a.b.c.d = 1\n" * 100, b"\r\n" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_hard_values_are_handled(name: str) -> None:
    for data in (*SEEDS[name], *HARD, *(seed[: len(seed) // 2] for seed in SEEDS[name])):
        TARGETS[name](data)
    for data in HARD:  # behind a head that leads further in
        TARGETS[name](b"tool_reply\n" + data)
        TARGETS[name](b"data: " + data + b"\n\n")


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_handled(name: str) -> None:
    @PACE
    @given(st.binary(max_size=300))
    def check(data: bytes) -> None:
        TARGETS[name](data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_half_right_bytes_are_handled(name: str) -> None:
    """The seeds with pieces changed, moved, repeated and left out: they get further than noise does."""

    @PACE
    @given(st.sampled_from(SEEDS[name]), st.integers(0, 2**32))
    def check(seed: bytes, chance: int) -> None:
        TARGETS[name](mutated(seed, random.Random(chance)))

    check()
