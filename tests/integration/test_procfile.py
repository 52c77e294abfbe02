"""`honcho start` in a clone: the Procfile's processes find each other on one embedded server."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from support.commands import CommandLine
from support.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


def test_honcho_starts_a_deployment(short_directory: Path, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    # What an activated environment gives, also where the tests run without an installation.
    (commands / "turnmill").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m turnmill.runtime "$@"\n')
    (commands / "turnmill").chmod(0o755)
    line = CommandLine(short_directory, data_dir=str(short_directory / "data"))
    line.variables["PATH"] = f"{commands}:/usr/bin:/bin"
    honcho = ["/bin/sh", "-c", f'cd "{REPOSITORY}" && exec "{sys.executable}" -m honcho start']
    with line.started(program=honcho) as started:
        started.wait_for("worker started", 2)
        started.wait_for("partition taken over", 4)
        done = line("run", "assistant", "What do I pack?", "--timeout", "30")
        assert done.returncode == 0, done.stderr + started.output()
        assert "✓ finished" in done.stdout
        children = psutil.Process(started.process.pid).children(recursive=True)
        assert "valkey-server" in [child.name() for child in children]
        started.stop()
        wait_until(lambda: not [child for child in children if _is_alive(child)])


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
