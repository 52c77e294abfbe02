"""What tools did, in a file: one line for each effect, appended by whichever process, never through the engine."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

EFFECTS_VARIABLE = "CHAOS_EFFECTS"


class Effect(NamedTuple):
    """One effect of one attempt at one call. `call` is `<turn>/<step>.<index>`."""

    call: str
    attempt: int
    tool: str
    value: str


def take_effect(effect: Effect) -> None:
    """Append it, in one write: lines of several processes do not mix."""
    line = f"{effect.call} {effect.attempt} {effect.tool} {effect.value}\n".encode()
    descriptor = os.open(os.environ[EFFECTS_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


class Effects:
    """All effects of a run, by call and attempt."""

    def __init__(self, path: Path) -> None:
        self.of_call: dict[str, Counter[int]] = {}
        self.total = 0
        self.tools: dict[str, str] = {}
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            call, attempt, tool, _value = line.split(" ", 3)
            self.of_call.setdefault(call, Counter())[int(attempt)] += 1
            self.tools[call] = tool
            self.total += 1
