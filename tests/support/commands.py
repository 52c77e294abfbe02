"""The command line as its users have it: `turnmill` in processes of its own, with only the variables that a test gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.waiting import wait_until

PATIENCE_SECONDS = 60.0
_NOT_INHERITED = ("TURNMILL_", "OPENAI_")


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The surroundings without anything that would change what the command line does."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_INHERITED) and name not in ("REDIS_URL", "PORT", "FORCE_COLOR", "NO_COLOR")
    }
    roots = [path for path in sys.path if path and Path(path).is_absolute()]
    return {**inherited, "PYTHONPATH": os.pathsep.join(roots), "PYTHONUNBUFFERED": "1", **(variables or {})}


class CommandLine:
    """Runs `turnmill` in a directory."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory = directory
        self.variables = {f"TURNMILL_{name.upper()}": value for name, value in settings.items()}

    def __call__(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "turnmill.runtime", *arguments],
            cwd=self.directory,
            env=environment({**self.variables, **(variables or {})}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    @contextmanager
    def started(self, *arguments: str, program: list[str] | None = None) -> Iterator[Started]:
        """A command that goes on; what is left of it at the end is killed."""
        command = program or [sys.executable, "-m", "turnmill.runtime"]
        log_path = self.directory / f"{'-'.join(arguments[:2]).replace('/', '_')}-{os.urandom(3).hex()}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.directory,
                env=environment(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started = Started(process, log_path)
        try:
            yield started
        except BaseException:
            print(f"--- {' '.join(arguments)}", started.output(), sep="\n")
            raise
        finally:
            process.kill()
            process.wait()


class Started:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process = process
        self._log_path = log_path

    def output(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until the text has been written so often."""
        wait_until(lambda: self.output().count(text) >= times or self.process.poll() is not None, PATIENCE_SECONDS)
        assert self.output().count(text) >= times, f"ended with {self.process.returncode}: {self.output()}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
