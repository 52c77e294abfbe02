"""An engine of a chaos run's own: on a TCP port, to be killed, started again, replicated and promoted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

import redis

from turnmill.runtime import embedded_launcher
from turnmill.runtime.embedded import server_binary

READY_SECONDS = 20.0
_POLL_SECONDS = 0.01


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process with a directory of its own. As a context manager it ends the process."""

    def __init__(self, directory: Path, *, fsync: str = "everysec", port: int | None = None, **options: str) -> None:
        """`options` are the server's, with `_` for `-`; `fsync` is `no` for a server without an append-only file."""
        self.directory = directory
        self.port = port or free_port()
        self._fsync = fsync
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        self._plain: redis.Redis | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Server:
        """Start it, from its data where there is some; returns when it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.process = self._spawn()
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(
                    f"the server did not start:\n{(self.directory / 'server.log').read_text()[-2000:]}"
                )
            time.sleep(_POLL_SECONDS)
        return self

    def _spawn(self) -> subprocess.Popen[bytes]:
        """From a thread that lasts as long as the server: the kernel ends it with the thread that forked it, and the
        caller's may be one of a pool."""
        launcher = [sys.executable, "-I", "-S", embedded_launcher.__file__, str(self.directory), str(os.getpid())]
        started: Future[subprocess.Popen[bytes]] = Future()

        def keep() -> None:
            with (self.directory / "server.log").open("ab") as log:
                process = subprocess.Popen(
                    [*launcher, *self._command()], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            started.set_result(process)
            process.wait()

        Thread(target=keep, name="chaos-server", daemon=True).start()
        return started.result(timeout=READY_SECONDS)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def ask(self, *command: Any) -> Any:
        """One command on a connection of its own."""
        if self._plain is None:
            self._plain = redis.Redis(port=self.port, socket_timeout=5.0)
        return self._plain.execute_command(*command)

    def set(self, **options: str | int) -> None:
        """CONFIG SET, with `_` for `-`."""
        for name, value in options.items():
            self.ask("CONFIG", "SET", name.replace("_", "-"), value)

    def information(self, section: str) -> dict[str, Any]:
        if self._plain is None:
            self.ask("PING")
        assert self._plain is not None
        found: dict[str, Any] = self._plain.info(section)
        return found

    def follow(self, port: int) -> None:
        """Become a replica of the server behind a port; returns when the data is there."""
        self.ask("REPLICAOF", "127.0.0.1", port)
        deadline = time.monotonic() + READY_SECONDS
        while self.information("replication").get("master_link_status") != "up":
            if time.monotonic() > deadline:
                raise AssertionError("the replica was not synchronized in time")
            time.sleep(_POLL_SECONDS)

    def promote(self) -> None:
        self.ask("REPLICAOF", "NO", "ONE")

    def copy_data(self, target: Path) -> None:
        """A copy of the append-only file as it stands now."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.directory / "appendonlydir", target)

    def restore_data(self, source: Path) -> None:
        """Only while it does not run."""
        shutil.rmtree(self.directory / "appendonlydir")
        shutil.copytree(source, self.directory / "appendonlydir")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _command(self) -> list[str]:
        persistence = ["--appendonly", "no"]
        if self._fsync != "no":
            persistence = ["--appendonly", "yes", "--appendfsync", self._fsync]
        options = [
            word
            for name, value in self._options.items()
            for word in (f"--{name.replace('_', '-')}", *(value.split() if " " in value else [value]))
        ]
        return [
            server_binary(),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""),
            *(
                "--maxmemory-policy",
                "noeviction",
                "--daemonize",
                "no",
                "--logfile",
                "",
                "--repl-diskless-sync-delay",
                "0",
            ),
            *persistence,
            *options,
        ]

    def _is_ready(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.RedisError:
            self._forget_connection()
            return False

    def _end(self, number: int) -> None:
        self._forget_connection()
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None

    def _forget_connection(self) -> None:
        if self._plain is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._plain.close()
            self._plain = None


async def in_thread(function: Any, *arguments: Any, **options: Any) -> Any:
    """A blocking step, while the event loop serves the proxy and the clients."""
    return await asyncio.to_thread(function, *arguments, **options)
