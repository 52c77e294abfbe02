"""Real processes of a deployment, to be killed, frozen and stopped by tests.

`Processes` starts roles of one namespace as processes of their own (this file is also their main program), keeps what
they log in files, and prints the ends of these files when the test that owns it fails. A coordinator may be started with
a `hold`: it stops for ever at that point, so that a kill hits it there and not by luck.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = [REPOSITORY / "protocol", REPOSITORY / "runtime", REPOSITORY / "workers", REPOSITORY / "tests"]
LOG_TAIL_LINES = 40
HELD = "held at "
"""What a held process writes to its log when it has come to its point."""
_PR_SET_PDEATHSIG = 1


class Process:
    """One process, alive or not."""

    def __init__(self, name: str, role: str, popen: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.role = role
        self.popen = popen
        self.log_path = log_path

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.popen.kill()
        self.popen.wait()

    def freeze(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def is_held(self) -> bool:
        return HELD in self.log()


class Processes:
    """The processes of one namespace. As a context manager it ends all of them."""

    def __init__(self, redis_url: str, namespace: str, directory: Path, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        self._variables = {
            "TURNMILL_REDIS_URL": redis_url,
            "TURNMILL_NAMESPACE": namespace,
            **{f"TURNMILL_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.all: list[Process] = []

    def coordinator(self, *, hold: str | None = None, **settings: Any) -> Process:
        """`hold` is a point of `_install_hold`, such as `before_commit:2`."""
        return self.role("coordinator", settings, hold=hold)

    def llm(
        self, target: str | None, *, pools: list[str] | None = None, concurrency: int | None = None, **settings: Any
    ) -> Process:
        return self.role("llm", settings, target=target, names=pools or [], concurrency=concurrency)

    def tools(
        self, target: str, *, queues: list[str] | None = None, concurrency: int | None = None, **settings: Any
    ) -> Process:
        return self.role("tools", settings, target=target, names=queues or [], concurrency=concurrency)

    def role(self, role: str, settings: Mapping[str, Any], **what: Any) -> Process:
        variables = {f"TURNMILL_{name.upper()}": str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "support.processes", json.dumps({"role": role, **what})]
        return self.start(role, command, variables)

    def start(self, role: str, command: list[str], variables: Mapping[str, str] | None = None) -> Process:
        """Any program, with the namespace's settings in its environment."""
        name = f"{role}-{len(self.all)}"
        log_path = self._directory / f"{name}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNMILL_")}
        environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(map(str, ROOTS)),
            "PYTHONUNBUFFERED": "1",
            **self._variables,
            **(variables or {}),
        }
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._directory,
            )
        process = Process(name, role, popen, log_path)
        self.all.append(process)
        return process

    def end_all(self) -> None:
        for process in self.all:
            if process.is_alive:
                process.popen.kill()
        for process in self.all:
            process.popen.wait()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()
        if error is not None:
            for process in self.all:
                lines = process.log().splitlines()[-LOG_TAIL_LINES:]
                print(f"--- {process.name} (exit code {process.popen.returncode})", *lines, sep="\n")


# --- the main program of a role


def _main() -> None:
    what = json.loads(sys.argv[1])
    if sys.platform == "linux":  # a test run that dies leaves nobody behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from turnmill.protocol.settings import load_settings
    from turnmill.runtime import roles
    from turnmill.runtime.cli.logs import configure_logging

    if what.get("hold"):
        _install_hold(what["hold"])
    settings = load_settings()
    configure_logging(settings)
    match what["role"]:
        case "coordinator":
            roles.run_async(roles.run_coordinator(settings))
        case "llm":
            roles.run_async(roles.run_llm_worker(settings, what["target"], what["names"], what["concurrency"]))
        case "tools":
            roles.run_async(roles.run_tool_worker(settings, what["target"], what["names"], what["concurrency"]))
        case other:
            raise SystemExit(f"no role {other!r}")


def _install_hold(hold: str) -> None:
    """Stop for ever at the n-th passage of a point.

    before_commit, after_commit: of a batch of messages, by the coordinator's store;
    before_take, after_take: of a dead worker's entries;
    after_claim: of a dead coordinator's messages, before they are handled.
    """
    from turnmill.runtime.partition import Partition
    from turnmill.runtime.reclaimer import Reclaimer
    from turnmill.runtime.store import Store

    point, _, count = hold.partition(":")
    owner: Any
    owner, name = {
        "before_commit": (Store, "commit"),
        "after_commit": (Store, "commit"),
        "before_take": (Reclaimer, "_take"),
        "after_take": (Reclaimer, "_take"),
        "after_claim": (Partition, "handle"),
    }[point]
    original = getattr(owner, name)
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        passed += 1
        if passed == int(count or 1):
            print(HELD + hold, flush=True)
            time.sleep(3600)  # the whole process, not this task alone

    async def held(*args: Any, **kwargs: Any) -> Any:
        if point == "before_commit" or (point == "before_take" and await _is_lost(*args)):
            pass_by()
        if point == "after_claim" and _is_claimed():
            pass_by()
        result = await original(*args, **kwargs)
        if point == "after_commit" or (point == "after_take" and result > 0):
            pass_by()
        return result

    setattr(owner, name, held)


async def _is_lost(reclaimer: Any, partition: Any, _stream: str, consumer: str) -> bool:
    """Whether the owner of the entries shows no sign of life; the reclaimer looks at living ones too."""
    return not await reclaimer._engine.call("EXISTS", partition.keys.alive(consumer))


def _is_claimed() -> bool:
    """Whether `Partition.handle` is called by the reclaimer rather than by the reader."""
    task = asyncio.current_task()
    coroutine = task.get_coro() if task is not None else None
    return "_every" in repr(coroutine) or "_take" in repr(coroutine)


if __name__ == "__main__":
    _main()
