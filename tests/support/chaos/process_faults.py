"""Blows on processes: kill -9, SIGSTOP and SIGCONT."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support.processes import Process

if TYPE_CHECKING:
    from .run import Run

FROZEN_MAX = 2
FREEZE_SECONDS = (1.2, 2.5)
"""Longer than the liveness and the lease of the runs."""


async def kill(run: Run) -> str:
    place = run.random.randrange(len(run.fleet))
    process = run.fleet[place]
    run.frozen.discard(process)
    process.kill()
    run.fleet[place] = run.start(process.role)
    return f"kill -9 {process.role}"


async def freeze(run: Run) -> str:
    free = [process for process in run.fleet if process not in run.frozen]
    if len(run.frozen) >= FROZEN_MAX or not free:
        return "freeze put off"
    process = run.random.choice(free)
    run.frozen.add(process)
    process.freeze()
    asyncio.get_running_loop().call_later(run.random.uniform(*FREEZE_SECONDS), _thaw, run, process)
    return f"freeze {process.role}"


async def kill_or_freeze(run: Run) -> str:
    return await (freeze(run) if run.random.random() < 0.5 else kill(run))


async def thaw_all(run: Run) -> None:
    for process in list(run.frozen):
        _thaw(run, process)


def _thaw(run: Run, process: Process) -> None:
    run.frozen.discard(process)
    if process.is_alive:
        process.thaw()
