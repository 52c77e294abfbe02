"""A short run of scripts/chaos: every role is killed and frozen while turns are in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chaos import Plan, run_chaos


@pytest.mark.chaos
async def test_turns_survive_kills_and_freezes(valkey_url: str, short_directory: Path) -> None:
    """AC-10, AC-18, AC-27, AC-32: every turn ends once with its own answer; nothing is lost, doubled or left behind."""
    report = await run_chaos(valkey_url, short_directory, Plan(turns=500, in_flight=48, seconds=25, kill_every=0.8))
    print(report)
    assert report.wrong == [] and report.crashed == []
    assert report.finished == report.turns > 0
    assert (report.lost, report.duplicated, report.stuck) == (0, 0, 0)
    assert sum(report.blows.values()) > 0
