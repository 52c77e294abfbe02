"""A few roles as processes of their own: started together, started again when they die, stopped together.

Each child leads a process group, so that Ctrl-C of the terminal reaches the supervisor alone, which stops the children
in its own way: SIGTERM, the drain, and SIGKILL for whoever is left. What children write comes line by line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

_BACKOFF_SECONDS = (0.5, 10.0)
_STABLE_SECONDS = 10.0
_KILL_AFTER_SECONDS = 2.0
_USAGE = 2

Report = Callable[[str, str], None]
"""Takes a role's name and one line: what the role wrote."""


class RoleCommand(NamedTuple):
    """A role: its name, the command line behind `turnmill`, and whether it holds the application's code."""

    name: str
    arguments: list[str]
    has_app: bool = False


class Supervisor:
    """Keeps the processes of roles alive, from `start` to `stop`."""

    def __init__(
        self,
        roles: Sequence[RoleCommand],
        environment: Mapping[str, str],
        *,
        drain_seconds: float,
        on_line: Report,
        on_notice: Report,
        waits_for_change: bool = False,
    ) -> None:
        """`on_line` gets what roles write, `on_notice` what happens to them. With `waits_for_change` a role that ends
        with a mistake of its user's (exit code 2) is started again by `reload` alone."""
        self._environment = {**environment, "PYTHONUNBUFFERED": "1"}
        self._drain_seconds = drain_seconds
        self._on_line = on_line
        self._on_notice = on_notice
        self._waits_for_change = waits_for_change
        self._roles = list(roles)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._leaving: set[asyncio.subprocess.Process] = set()
        self._changed = {role.name: asyncio.Event() for role in roles}
        self._keepers: list[asyncio.Task[None]] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def pids(self) -> dict[str, int]:
        """The running process of each role."""
        return {name: process.pid for name, process in self._processes.items()}

    async def start(self) -> None:
        for role in self._roles:
            await self._spawn(role)
            self._keepers.append(asyncio.create_task(self._keep(role)))

    async def reload(self) -> None:
        """Replace the processes that hold the application's code. The old ones finish what they have begun."""
        for role in self._roles:
            if role.has_app:
                self._changed[role.name].set()

    async def stop(self) -> None:
        """Drain all and return when all are gone: at the latest when the drain time is over."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        processes = [*self._processes.values(), *self._leaving]
        for process in processes:
            _send(process, signal.SIGTERM)
        ends = [asyncio.create_task(process.wait()) for process in processes]
        if ends:
            _, late = await asyncio.wait(ends, timeout=self._drain_seconds + _KILL_AFTER_SECONDS)
            if late:
                self.kill()
                await asyncio.wait(late)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=1.0)

    def kill(self) -> None:
        """End everything at once."""
        for process in [*self._processes.values(), *self._leaving]:
            _send(process, signal.SIGKILL)

    # ---- one role

    async def _keep(self, role: RoleCommand) -> None:
        """Start a role again whenever it ends, and replace it when its code has changed."""
        delay, delay_max = _BACKOFF_SECONDS
        changed = self._changed[role.name]
        while True:
            process = self._processes[role.name]
            born = time.monotonic()
            if await _first(process.wait(), changed.wait()):
                code = process.returncode or 0
                delay = _BACKOFF_SECONDS[0] if time.monotonic() - born > _STABLE_SECONDS else delay
                await self._pause(role, code, delay)
                delay = min(delay * 2, delay_max)
            else:
                self._on_notice(role.name, "starts again with the changed code")
                self._leave(process)
                delay = _BACKOFF_SECONDS[0]
            changed.clear()
            await self._spawn(role)

    async def _pause(self, role: RoleCommand, code: int, delay: float) -> None:
        changed = self._changed[role.name]
        if code == _USAGE and role.has_app and self._waits_for_change:
            self._on_notice(role.name, "ended with code 2; it starts again when the code changes")
            await changed.wait()
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._on_notice(role.name, f"{how}; it starts again in {delay:g} s")
        await _first(asyncio.sleep(delay), changed.wait())

    async def _spawn(self, role: RoleCommand) -> None:
        command = [sys.executable, "-m", "turnmill.runtime.supervised", str(os.getpid()), *role.arguments]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        self._processes[role.name] = process
        pump = asyncio.create_task(self._pump(role.name, process))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    def _leave(self, process: asyncio.subprocess.Process) -> None:
        self._leaving.add(process)
        _send(process, signal.SIGTERM)
        waiting = asyncio.create_task(self._left(process))
        self._pumps.add(waiting)
        waiting.add_done_callback(self._pumps.discard)

    async def _left(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._leaving.discard(process)

    async def _pump(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Lines of any length, whole."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._on_line(name, line.decode(errors="replace"))
        if rest:
            self._on_line(name, rest.decode(errors="replace"))


async def _first(one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object]) -> bool:
    """Wait for either; whether it was the first one."""
    tasks = [asyncio.create_task(item) for item in (one, other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        try:
            process.send_signal(number)
        except ProcessLookupError:
            return
