"""The project's own code on a virtual clock and an in-memory engine, under random schedules of faults: nothing is violated.

What must hold is in `support.simulation.invariants` and `support.simulation.ending`; that the simulator would see it if it
did not is in `test_mutations`. A violation prints its seed and what happened before it.

Covers AC-13, AC-17 to AC-27 and AC-58 as far as a single engine goes.
"""

from __future__ import annotations

import pytest

from support.simulation.cli import run_seed
from support.simulation.command import simulate
from support.simulation.faults import Profile

SCHEDULES = 500
FIRST_SEED = 1


@pytest.mark.timeout(900)
def test_hundreds_of_random_schedules() -> None:
    """Every kind of fault, alone and together, at random moments between any two steps of any process."""
    run = simulate("--seed", str(FIRST_SEED), "--count", str(SCHEDULES), "--processes", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{SCHEDULES} schedules from seed {FIRST_SEED}" in run.stdout
    assert " 0 with violations" in run.stdout


def test_a_seed_decides_what_happens() -> None:
    """Twice the same steps at the same times, in two processes: a violation can be seen again."""
    first, second = (simulate("--seed", "305", "--trace").stdout.splitlines()[:-1] for _ in range(2))
    assert len(first) > 30
    assert first == second


LATE_READS = Profile(("stall",), "tools", "reading")
HELD_COMMITS = Profile(("hold",), "coordinator", "shared")


@pytest.mark.parametrize("seed", range(1, 25))
def test_a_task_found_pending_is_not_run_again_by_its_late_reply(seed: int) -> None:
    """A read's reply that comes after its entry was found pending, run and completed: the attempt was started twice."""
    _, violation = run_seed(seed, profile=LATE_READS)
    assert violation is None


@pytest.mark.parametrize("seed", range(1, 25))
def test_a_commit_of_unknown_outcome_does_not_land_on_what_was_decided_again(seed: int) -> None:
    """It comes late, over a connection that was given up: version and writer were those that it expected."""
    _, violation = run_seed(seed, profile=HELD_COMMITS)
    assert violation is None


def test_a_violation_is_told_with_its_seed_and_its_trace() -> None:
    """What somebody needs to see it again."""
    run = simulate("--seed", "1", "--mutation", "numbering")
    assert run.returncode == 1
    assert "seed 1: " in run.stdout
    assert "is due" in run.stdout
    assert "turn.started" in run.stdout or "commit " in run.stdout
    assert "scripts/chaos simulate --seed 1 --mutation numbering --trace" in run.stdout
