"""`python -m support.chaos`: see scripts/chaos."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from .report import Plan, Report
from .run import run_chaos
from .scenarios import SCENARIOS


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["simulate"]:
        from support.simulation.cli import main as simulate

        return int(simulate(arguments[1:]) or 0)
    if arguments[:1] == ["slow-readers"]:
        from .slow_readers import main as flood

        return flood(arguments[1:])
    if arguments[:1] == ["pending"]:
        from .pending import main as find

        return find(arguments[1:])
    if arguments[:1] == ["retention"]:
        from support.retention_run import main as retain

        return int(retain(arguments[1:]) or 0)
    options = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    reports = [_run(name, options) for name in names]
    if len(reports) > 1:
        print(_table(reports))
    return 0 if all(report.is_sound for report in reports) else 1


def _parsed(arguments: list[str]) -> argparse.Namespace:
    about = "\n".join(f"  {name:22} {scenario.about}" for name, scenario in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Hit a deployment while turns run, then count what was lost, doubled or left behind.",
        epilog=f"scenarios:\n{about}\n  {'all':22} one after the other\n\n"
        "also: scripts/chaos simulate | retention | slow-readers | pending (with --help)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", default="mixed", choices=[*SCENARIOS, "all"], metavar="SCENARIO")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no turn after that")
    parser.add_argument("--every", type=float, default=None, help="seconds between two blows, on average")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--keep", action="store_true", help="keep the directory with logs, effects and the engine's data"
    )
    return parser.parse_args(arguments)


def _run(name: str, options: argparse.Namespace) -> Report:
    print(f"{name}: seed {options.seed}", flush=True)
    plan = Plan(name, options.turns, options.in_flight, options.seconds, options.every, options.seed)
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    try:
        report = asyncio.run(run_chaos(directory, plan))
    finally:
        if options.keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    print(report, flush=True)
    return report


def _table(reports: list[Report]) -> str:
    """In the form in which docs/benchmarks.md has it."""
    lines = [
        "| scenario | turns | faults | lost | duplicated | stuck | told as lost | repeated |",
        "|---|" + "---|" * 7,
    ]
    for report in reports:
        cells = [
            report.scenario, report.turns, report.blows.total(), report.lost, report.duplicated, report.stuck,
            report.told.total(), report.repeated,
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
