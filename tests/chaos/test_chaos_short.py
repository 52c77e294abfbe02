"""Short runs of scripts/chaos: processes, connections and the engine are hit while turns are in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.chaos import Plan, Report, run_chaos
from turnmill.protocol import subscription

pytestmark = pytest.mark.chaos
FEW = ("coordinator", "llm", "tools")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears nothing looks after a second, not after five."""
    monkeypatch.setattr(subscription, "SILENCE_SECONDS", 1.0)


async def survived(directory: Path, scenario: str, turns: int, every: float, **more: Any) -> Report:
    """Nothing is lost, doubled or left behind; whoever reads sees the events in order; no session is unusable."""
    plan = Plan(scenario, turns=turns, every=every, seconds=40.0, settle_seconds=40.0, **more)
    report = await run_chaos(directory, plan)
    print(report)
    assert report.wrong == [] and report.crashed == []
    assert (report.lost, report.duplicated, report.stuck) == (0, 0, 0)
    assert report.turns == turns and report.blows.total() > 0
    assert report.finished + report.told.total() >= turns
    return report


async def test_processes_are_killed_and_frozen(short_directory: Path) -> None:
    """AC-10, AC-18, AC-27, AC-32: every turn ends once with its own answer."""
    report = await survived(short_directory, "mixed", turns=100, every=0.5)
    assert report.finished == report.turns


@pytest.mark.parametrize(
    ("scenario", "turns", "every"),
    [("restart-everysec", 40, 0.8), ("failover-acknowledged", 16, 2.5)],
)
async def test_the_engine_dies(short_directory: Path, scenario: str, turns: int, every: float) -> None:
    """AC-18, AC-20: as long as the engine keeps its data, or a replica has it, every turn gives its answer."""
    report = await survived(short_directory, scenario, turns, every, roles=FEW)
    assert report.finished == report.turns
    assert report.repeated == 0


async def test_the_engine_is_flushed(short_directory: Path) -> None:
    """AC-21: a turn that was under way says that it was lost, the next ones work, and nobody fills a log meanwhile."""
    report = await survived(short_directory, "flushall", turns=40, every=0.8, roles=FEW)
    assert set(report.told) <= {
        "TurnLostError state_lost",
        "TurnFailedError state_lost",
        "TurnFailedError unknown_agent",
        "TurnFailedError unknown_tool",
    }
    assert report.log_kilobytes < 300
