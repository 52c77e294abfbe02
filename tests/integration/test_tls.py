"""`rediss://` URLs, with the parameters of redis-py: every kind of process speaks TLS, and says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apps.guarded import APP, watched
from support.commands import CommandLine
from support.processes import REPOSITORY, Processes
from support.stage import PATIENCE_SECONDS, SHORT, Stage, open_stage, told
from support.tls import OTHER_CA, Terminator, tls_in_front
from support.users import PASSWORD, Users, open_users
from support.waiting import wait_until_async
from turnmill.protocol.errors import EngineUnavailable
from turnmill.protocol.settings import load_settings
from turnmill.runtime.client import open_client

FOREIGN = REPOSITORY / "tests/conformance/foreign_worker.py"


@pytest.fixture
async def tls(valkey_url: str) -> AsyncIterator[Terminator]:
    async with tls_in_front(valkey_url) as terminator:
        yield terminator


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


@pytest.fixture
async def users(valkey_url: str, namespace: str) -> AsyncIterator[Users]:
    async with open_users(valkey_url, namespace) as opened:
        yield opened


def url_of(tls: Terminator, users: Users, role: str) -> str:
    name = next(name for name in users.names if name.startswith(f"{role}."))
    return tls.url(credentials=f"{name}:{PASSWORD}@")


async def test_turns_run_over_tls(stage: Stage, users: Users, tls: Terminator) -> None:
    """Every process, its heartbeat thread too, with the access list of its role; a client and its live events."""
    for role, queues, options in (
        ("coordinator", (), {}),
        ("llm", (), {}),
        ("tools", ("mail", "looks", "honest"), {"hooks": True}),
        ("foreign-tools", ("foreign",), {"publish": True}),
        ("client", (), {}),
    ):
        await users.add(role, *queues, **options)
    stage.processes.coordinator(redis_url=url_of(tls, users, "coordinator"))
    stage.processes.llm(APP, redis_url=url_of(tls, users, "llm"))
    stage.processes.tools(APP, redis_url=url_of(tls, users, "tools"))
    foreign = {"TURNMILL_REDIS_URL": url_of(tls, users, "foreign-tools"), "WORKER_NAME": users.names[3]}
    stage.processes.start("foreign", [sys.executable, str(FOREIGN)], foreign)

    async def alive() -> bool:
        for process in stage.processes.all:
            assert process.is_alive, process.log()
        return int(await stage.redis.hlen(stage.keys.workers)) == 4

    await wait_until_async(alive, PATIENCE_SECONDS)
    url = url_of(tls, users, "client")
    async with open_client(url, load_settings(redis_url=url, namespace=stage.keys.prefix)) as client:
        step = [{"name": name, "arguments": {"value": name}} for name in ("send", "tally")]
        step.append({"name": "bulk", "arguments": {"value": "x", "size": 300_000}})
        step.append({"name": "count_letters", "arguments": {"text": "abc"}})
        turn = await client.turn(watched, told(step), session="s")
        events = [event async for event in turn.events()]
        assert events[-1].type == "turn.finished"
        await beaten(
            stage, next(name for name in await stage.redis.hkeys(stage.keys.workers) if name.startswith(b"tools."))
        )
    assert tls.connections >= 12


async def beaten(stage: Stage, worker: bytes) -> None:
    """Until the heartbeat thread has written over its own connection, for longer than a sign of life lasts."""

    async def seen_at() -> float:
        return float(json.loads(await stage.redis.hget(stage.keys.workers, worker))["seen_at"])

    first = await seen_at()

    async def later() -> bool:
        return await seen_at() > first + SHORT["liveness_seconds"]

    await wait_until_async(later, PATIENCE_SECONDS)
    assert await stage.redis.exists(stage.keys.partitions[0].alive(worker.decode()))


async def start(kind: str, processes: Processes, url: str) -> str:
    process = {
        "coordinator": lambda: processes.coordinator(redis_url=url),
        "llm": lambda: processes.llm(APP, redis_url=url),
        "tools": lambda: processes.tools(APP, redis_url=url),
    }[kind]()
    await wait_until_async(lambda: not process.is_alive, PATIENCE_SECONDS)
    return process.log()


@pytest.mark.parametrize("kind", ["coordinator", "llm", "tools"])
async def test_a_certificate_of_an_unknown_authority_ends_a_process_with_the_reason(
    kind: str, stage: Stage, tls: Terminator
) -> None:
    log = await start(kind, stage.processes, tls.url(OTHER_CA, credentials="user:a-password-of-tests@"))
    assert "certificate verify failed" in log
    assert "TURNMILL_REDIS_URL" in log
    assert "a-password-of-tests" not in log


async def test_a_client_is_told_what_is_wrong_with_tls(tls: Terminator, valkey_url: str, short_directory: Path) -> None:
    """The authority, the name, a missing file, no TLS where there should be some: each says what it is."""
    wrong = {
        tls.url(OTHER_CA): "certificate verify failed",
        tls.url(host="127.0.0.1"): "certificate verify failed: IP address mismatch",
        tls.url(Path("/nowhere/ca.pem")): "/nowhere/ca.pem",
        tls.url().replace("rediss://", "redis://").partition("?")[0]: "TLS",
    }
    for url, said in wrong.items():
        settings = load_settings(redis_url=url)
        with pytest.raises(EngineUnavailable) as caught:
            async with open_client(url, settings):
                pass
        assert said in str(caught.value), (url, str(caught.value))
        assert "TURNMILL_REDIS_URL" in str(caught.value)
    shown = await asyncio.to_thread(CommandLine(short_directory, redis_url=tls.url(OTHER_CA)), "ls")
    assert shown.returncode == 4
    assert "certificate verify failed" in shown.stderr
    assert "Traceback" not in shown.stderr


async def test_the_command_line_works_over_tls(tls: Terminator, short_directory: Path, namespace: str) -> None:
    command = CommandLine(short_directory, redis_url=tls.url(), namespace=namespace)
    shown = await asyncio.to_thread(command, "doctor")
    assert shown.returncode == 0, shown.stderr
    assert "rediss://localhost" in shown.stdout
