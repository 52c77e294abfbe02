"""A simulator that is too kind proves nothing: without any one of the rules, it finds a violation of the expected kind.

The rules are those of the design: each fence, each piece of atomicity, each policy (`support.simulation.mutations`). A
mutation is looked for at the seed that showed it last, and then at up to 300 others.
"""

from __future__ import annotations

import json

import pytest

from simulation.test_schedules import simulate
from support.simulation.cli import SEEDS_FILE
from support.simulation.mutations import MUTATIONS, NOTICES


@pytest.mark.timeout(900)
def test_the_absence_of_every_rule_is_noticed() -> None:
    """Mutation by mutation, each with a profile of faults under which it shows."""
    run = simulate("--mutations", "--processes", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(NOTICES)} of {len(NOTICES)} mutations noticed" in run.stdout
    assert set(json.loads(SEEDS_FILE.read_text())) == set(NOTICES), "note seeds with --mutations --find"


def test_every_rule_has_its_words() -> None:
    """Each is told as a rule, and none is listed twice."""
    rules = [mutation.rule for mutation in MUTATIONS.values()]
    assert all(rules)
    assert set(MUTATIONS) == set(NOTICES)
