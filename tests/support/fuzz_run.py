"""Fuzzing with atheris: `scripts/chaos fuzz` calls `main`, with the arguments behind that word.

Each target of `fuzz_targets` runs in a process of its own, begins with its seeds and a corpus of former runs if there is
one, and looks for inputs that reach new code. An input that breaks one is written to the corpus directory and printed.

    scripts/chaos fuzz --seconds 600                 all targets, one after the other
    scripts/chaos fuzz --target envelope --seed 7    one of them
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MISSING = "atheris is not installed: .venv/bin/python -m pip install atheris (Linux and macOS, Python 3.11 to 3.13)"


def main(arguments: list[str]) -> int:
    from .fuzz_targets import SEEDS, TARGETS

    parser = argparse.ArgumentParser(prog="scripts/chaos fuzz", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="may be repeated; all without it")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--corpus", type=Path, default=None, help="a directory that keeps inputs from run to run")
    options = parser.parse_args(arguments)
    if find_spec("atheris") is None:
        print(_MISSING, file=sys.stderr)
        return 2
    names = options.target or list(TARGETS)
    seconds = max(1, int(options.seconds / len(names)))
    failed = []
    with tempfile.TemporaryDirectory(prefix="tm-fuzz-") as temporary:
        for name in names:
            corpus = (options.corpus or Path(temporary)) / name
            corpus.mkdir(parents=True, exist_ok=True)
            for number, seed in enumerate(SEEDS[name]):
                (corpus / f"seed-{number}").write_bytes(seed)
            if not _fuzz(name, corpus, seconds, options.seed):
                failed.append(name)
    print(f"fuzz: {len(names)} targets, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


def _fuzz(name: str, corpus: Path, seconds: int, seed: int) -> bool:
    """One target; whether it stood. Its last lines say what broke it."""
    roots = [ROOT / root for root in ("protocol", "runtime", "workers", "tests")]
    path = [*map(str, roots), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [
        sys.executable, "-m", "support.fuzz_run", name, str(corpus), f"-max_total_time={seconds}", f"-seed={seed}",
        "-max_len=4096", "-timeout=20", "-rss_limit_mb=2000", "-print_final_stats=1", f"-artifact_prefix={corpus}/",
    ]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = (ended.stdout + ended.stderr).splitlines()
    runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
    covered = next((line.split("cov: ")[1].split()[0] for line in reversed(lines) if "cov: " in line), "?")
    print(
        f"{name}: seed {seed}, {seconds} s, {runs} inputs, {covered} branches, {'sound' if ended.returncode == 0 else 'BROKEN'}"
    )
    if ended.returncode:
        print("\n".join(lines[-60:]))
        for path in corpus.glob("crash-*"):
            print(f"input: {path.read_bytes()!r}")
    return ended.returncode == 0


def _run_target(arguments: list[str]) -> None:
    """The process of one target: never returns, the library ends it."""
    import atheris  # type: ignore[import-not-found]

    name, *rest = arguments
    with atheris.instrument_imports(include=["turnmill"]):
        from .fuzz_targets import TARGETS
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *rest], target)
    atheris.Fuzz()


if __name__ == "__main__":
    _run_target(sys.argv[1:])
