"""The simulator's command line: one seed, so many seeds, or so many minutes; `scripts/chaos simulate` calls it.

What a run does follows from its seed, so a violation is seen again with `--seed N --trace`.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from .faults import Profile
from .mutations import MUTATIONS, NOTICES, mutated
from .verdict import Violation
from .world import World

SEEDS_FILE = Path(__file__).with_name("seeds.json")
"""For each mutation a seed that showed it."""
SEARCHED_MAX = 300
"""How many seeds a mutation may take to be noticed, should its known one not do any more."""
_COLLECT_EVERY = 20
_SUMMARY = "summary "
_TRACED_LINES = 60


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _options(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings belongs to what a seed decides
        command = [sys.executable, "-m", "support.simulation", *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False).returncode
    if options.mutations:
        return _notice_all(options.processes, find=options.find)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**9)
    if options.processes > 1:
        return _share(options)
    return _run(options)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; without, a random one")
    parser.add_argument("--count", type=int, help="how many schedules (1)")
    parser.add_argument("--minutes", type=float, help="as many schedules as fit into this time")
    parser.add_argument("--processes", type=int, default=1, help="how many share the work")
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help="print what happened in each schedule")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="run without a rule; ends at the first violation")
    parser.add_argument("--mutations", action="store_true", help="see that each rule's absence is noticed")
    parser.add_argument("--find", action="store_true", help="with --mutations: note a seed for each")
    return parser.parse_args(arguments)


# ---- schedules


def _run(options: argparse.Namespace) -> int:
    started, cpu = time.monotonic(), time.process_time()
    failed, ran, faults = 0, 0, Counter[str]()
    for seed in _seeds(options, started):
        profile = NOTICES[options.mutation].profile if options.mutation else None
        world, violation = run_seed(seed, options.mutation, profile, traces=options.trace)
        ran += 1
        faults.update(world.faults.counts)
        if options.trace:
            print("\n".join(world.lines or ()))
        if violation is not None:
            failed += 1
            _tell(seed, world, violation, options)
            if options.mutation:
                break
        if ran % _COLLECT_EVERY == 0:
            del world
            gc.collect()
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    summary = {"schedules": ran, "violations": failed, "faults": dict(faults), "seconds": seconds, "cpu_seconds": cpu}
    if options.step > 1:
        print(_SUMMARY + json.dumps(summary), flush=True)
    else:
        print(_sentence(options.seed, summary), flush=True)
    return 1 if failed else 0


def run_seed(
    seed: int, mutation: str | None = None, profile: Profile | None = None, *, traces: bool = False
) -> tuple[World, str | None]:
    """One schedule: its world, and what was violated."""
    world = World(seed, profile=profile, traces=traces)
    try:
        with mutated(mutation):
            world.run()
    except Violation as violation:
        return world, str(violation)
    return world, None


def _seeds(options: argparse.Namespace, started: float) -> Iterator[int]:
    count = options.count or (1 if options.minutes is None else 10**9)
    until = started + 60 * (options.minutes or 10**6)
    for number in range(count):
        if time.monotonic() > until:
            return
        yield options.seed + number * options.step


def _tell(seed: int, world: World, violation: str, options: argparse.Namespace) -> None:
    faults = world.faults
    print(
        f"seed {seed}: {violation}",
        f"  faults: {faults.kinds} at {faults.focus} {faults.wire_kind}: {faults.counts}",
        sep="\n",
    )
    if not options.trace:
        again, _ = run_seed(
            seed, options.mutation, NOTICES[options.mutation].profile if options.mutation else None, traces=True
        )
        print(*(f"  {line[:200]}" for line in list(again.lines or ())[-_TRACED_LINES:]), sep="\n")
    mutation = f" --mutation {options.mutation}" if options.mutation else ""
    print(f"  again: scripts/chaos simulate --seed {seed}{mutation} --trace", flush=True)


def _share(options: argparse.Namespace) -> int:
    """The same with several processes, each with every so-many-th seed."""
    count = None if options.count is None else -(-options.count // options.processes)
    limits = ["--count", str(count)] if count is not None else ["--minutes", str(options.minutes or 1)]
    extra = ["--mutation", options.mutation] if options.mutation else []
    command = [sys.executable, "-m", "support.simulation", "--step", str(options.processes), *limits, *extra]
    running = [
        subprocess.Popen([*command, "--seed", str(options.seed + number)], stdout=subprocess.PIPE, text=True)
        for number in range(options.processes)
    ]
    total: dict[str, Any] = {"schedules": 0, "violations": 0, "faults": Counter(), "seconds": 0.0, "cpu_seconds": 0.0}
    for process in running:
        output, _ = process.communicate()
        for line in output.splitlines():
            if line.startswith(_SUMMARY):
                _add(total, json.loads(line.removeprefix(_SUMMARY)))
            else:
                print(line, flush=True)
        total["violations"] += process.returncode not in (0, 1)
    print(_sentence(options.seed, total), flush=True)
    return 1 if total["violations"] else 0


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name in ("schedules", "violations", "cpu_seconds"):
        total[name] += part[name]
    total["faults"].update(part["faults"])
    total["seconds"] = max(total["seconds"], part["seconds"])


def _sentence(seed: int, summary: dict[str, Any]) -> str:
    each = 1000 * summary["cpu_seconds"] / max(1, summary["schedules"])
    faults = ", ".join(f"{count} {name}" for name, count in sorted(summary["faults"].items()))
    return (
        f"{summary['schedules']} schedules from seed {seed} in {summary['seconds']:.1f} s ({each:.0f} ms of CPU each), "
        f"{summary['violations']} with violations; faults: {faults or 'none'}"
    )


# ---- mutations


def _notice_all(processes: int, *, find: bool) -> int:
    """For each rule: without it, a violation of the kind that is expected, at the known seed or soon."""
    known: dict[str, int] = json.loads(SEEDS_FILE.read_text()) if SEEDS_FILE.exists() else {}
    missed = []
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        noticed = pool.map(notice_of, NOTICES, [known.get(name) for name in NOTICES])
        for (name, notice), (seed, tried) in zip(NOTICES.items(), noticed, strict=True):
            if seed is None:
                missed.append(name)
                print(
                    f"{name}: {MUTATIONS[name].rule}: not noticed in {tried} schedules like {notice.profile}",
                    flush=True,
                )
            else:
                known[name] = seed
                print(f"{name}: noticed at seed {seed}, after {tried} schedules", flush=True)
    if find:
        SEEDS_FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    print(f"{len(NOTICES) - len(missed)} of {len(NOTICES)} mutations noticed; missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def notice_of(name: str, known: int | None) -> tuple[int | None, int]:
    """A seed at which the mutation is noticed, the known one first; and how many were tried."""
    profile, pattern = NOTICES[name]
    seeds = ([known] if known is not None else []) + list(range(1, SEARCHED_MAX + 1))
    for tried, seed in enumerate(seeds, 1):
        _, violation = run_seed(seed, name, profile)
        if violation is not None and re.search(pattern, violation):
            return seed, tried
        if tried % _COLLECT_EVERY == 0:
            gc.collect()
    return None, len(seeds)


if __name__ == "__main__":
    sys.exit(main())
