"""A small deployment for many tests: one coordinator, one LLM worker and one tool worker, each a process of its own.

    fleet.start()
    async with fleet.client() as client: ...
    fleet.kill("llm"); fleet.start_role("llm")

Processes are started and ended by `support.processes`; here is what a shared deployment needs on top: waiting until it
is ready, and replacing one of its processes while turns are under way.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from turnmill.protocol.keys import Keys
from turnmill.protocol.settings import Settings, load_settings
from turnmill.runtime.client import Client, open_client

from .processes import Process, Processes
from .stage import SHORT
from .waiting import wait_until

ROLES = ("coordinator", "llm", "tools")
READY_SECONDS = 20.0


class Fleet:
    """As a context manager it ends all of its processes."""

    def __init__(self, redis_url: str, namespace: str, directory: Path, app: str, **settings: Any) -> None:
        values = {**SHORT, "partitions": 4, **settings}
        self.url = redis_url
        self.app = app
        self.settings: Settings = load_settings(redis_url=redis_url, namespace=namespace, **values)
        self.keys = Keys(namespace, self.settings.partitions)
        self.running: dict[str, Process] = {}
        self.processes = Processes(redis_url, namespace, directory, values)
        self._redis = redis.Redis.from_url(redis_url)
        self._shown: dict[str, int] = {}

    def start(self) -> None:
        """Start one process of each role, and wait until all of them serve."""
        for role in ROLES:
            self._start(role)
        for role in ROLES:
            self._await_ready(role)

    def start_role(self, role: str) -> Process:
        """Start another process of a role, and wait until it serves."""
        process = self._start(role)
        self._await_ready(role)
        return process

    def kill(self, role: str) -> None:
        """SIGKILL, as a machine that goes down."""
        self.running.pop(role).kill()

    def stop(self, role: str) -> None:
        """SIGTERM, as a deployment does; returns when the process has drained."""
        process = self.running.pop(role)
        process.terminate()
        wait_until(lambda: not process.is_alive, READY_SECONDS)

    def freeze(self, role: str) -> None:
        self.running[role].freeze()

    def thaw(self, role: str) -> None:
        self.running[role].thaw()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client with connections of its own."""
        async with open_client(self.url, self.settings) as client:
            yield client

    def open_gate(self, gate: str) -> None:
        self._redis.set(f"{self.keys.prefix}-play:open:{gate}", 1)

    def is_reached(self, gate: str, times: int = 1) -> bool:
        return int(self._redis.get(f"{self.keys.prefix}-play:reached:{gate}") or 0) >= times  # type: ignore[arg-type]

    def counter(self, name: str) -> int:
        """A counter of refused and dropped messages, over all partitions."""
        values: list[Any] = [self._redis.hget(keys.stats, name) for keys in self.keys.partitions]
        return sum(int(value or 0) for value in values)

    def new_log_lines(self) -> dict[str, list[str]]:
        """What each process has logged since the last call."""
        lines = {}
        for process in self.processes.all:
            text = process.log()
            lines[process.name] = text[self._shown.get(process.name, 0) :].splitlines()
            self._shown[process.name] = len(text)
        return lines

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redis.close()
        self.processes.__exit__(kind, error, trace)

    def _start(self, role: str) -> Process:
        match role:
            case "coordinator":
                process = self.processes.coordinator()
            case "llm":
                process = self.processes.llm(self.app)
            case _:
                process = self.processes.tools(self.app)
        self.running[role] = process
        return process

    def _await_ready(self, role: str) -> None:
        process = self.running[role]

        def ready() -> bool:
            assert process.is_alive, f"{process.name} has ended:\n{process.log()}"
            pid = process.popen.pid
            return self._holds_all_leases(pid) if role == "coordinator" else self._is_registered(pid)

        try:
            wait_until(ready, READY_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{process.name} is not ready:\n{process.log()}") from error

    def _holds_all_leases(self, pid: int) -> bool:
        owners: list[Any] = [self._redis.get(keys.lease) for keys in self.keys.partitions]
        return all(owner is not None and f"-{pid}-".encode() in owner for owner in owners)

    def _is_registered(self, pid: int) -> bool:
        workers: Any = self._redis.hvals(self.keys.workers)
        return any(json.loads(description)["pid"] == pid for description in workers)
