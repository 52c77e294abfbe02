"""The simulator's command line in a process of its own: a run takes the clock from whoever shares its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(_TESTS)}
    command = [sys.executable, "-m", "support.simulation", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
