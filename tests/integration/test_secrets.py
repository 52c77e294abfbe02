"""Nothing secret leaves the environment of a process: not into keys, values, events, logs, or what commands print."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from apps.guarded import APP, guarded
from support.commands import CommandLine
from support.replay_server import Answer, ReplayServer, replaying
from support.stage import PATIENCE_SECONDS, Stage, open_stage, told
from support.users import Users, open_users
from support.waiting import wait_until_async
from turnmill.protocol.errors import TurnFailedError
from turnmill.runtime import Agent

KEY = "sk-proj-0123456789-of-the-provider"
PASSWORD = "the-password-of-the-engine"
OTHER = "another-secret-of-the-environment"
SECRETS = (KEY, PASSWORD, OTHER)


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


@pytest.fixture
async def users(valkey_url: str, namespace: str) -> AsyncIterator[Users]:
    async with open_users(valkey_url, namespace) as opened:
        yield opened


def chunk(text: str) -> bytes:
    body = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()


def unkind_answers(server: ReplayServer) -> None:
    """An answer; then servers that repeat the key to whoever asks, in a body and in an event; then none at all."""
    refusal = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}. Bearer {KEY}"}}).encode()
    event = f"data: {refusal.decode()}\n\n".encode()
    answers = [
        Answer([chunk("hello")]),
        Answer([refusal], status=401),
        Answer([event]),
        Answer([event]),
        Answer([event]),
    ]
    server.reply(*answers, Answer(is_silent=True))


async def everything(client: redis.asyncio.Redis, prefix: str) -> AsyncIterator[tuple[str, bytes]]:
    """Every key of the namespace with its value, as the server dumps it in replies."""
    reads = {
        b"string": ["GET"], b"hash": ["HGETALL"], b"list": ["LRANGE", 0, -1], b"set": ["SMEMBERS"],
        b"zset": ["ZRANGE", 0, -1], b"stream": ["XRANGE", "-", "+"],
    }  # fmt: skip
    async for key in client.scan_iter(f"{prefix}*"):
        command, *rest = reads[await client.type(key)]
        yield key.decode(), repr(await client.execute_command(command, key, *rest)).encode()


async def test_secrets_of_the_environment_are_nowhere(
    stage: Stage, users: Users, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {role: await users.add(role, password=PASSWORD) for role in ("coordinator", "llm", "client")}
    urls["tools"] = await users.add("tools", "mail", "looks", "honest", password=PASSWORD, hooks=True)
    with replaying() as server:
        unkind_answers(server)
        base = server.url + "/v1"
        for name, value in {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": base, "SECRET_THING": OTHER}.items():
            monkeypatch.setenv(name, value)
        # Secrets are in the names of lines that fail, too: everything is logged.
        stage.processes.coordinator(redis_url=urls["coordinator"], log_level="debug")
        stage.processes.llm(APP, redis_url=urls["llm"], log_level="debug")
        stage.processes.tools(APP, redis_url=urls["tools"], log_level="debug")
        outputs = await _turns(stage)
        stage.processes.start("lost", [sys.executable, "-m", "turnmill.runtime", "worker", "llm"],
                              {"TURNMILL_REDIS_URL": f"redis://someone:{PASSWORD}@127.0.0.1:1/0"})  # fmt: skip
        await wait_until_async(lambda: not stage.processes.all[-1].is_alive, PATIENCE_SECONDS)
        assert any(KEY in request.headers.get("authorization", "") for request in server.requests)
        outputs |= await asyncio.to_thread(_printed, CommandLine(short_directory), urls["client"], stage, base)
    for process in stage.processes.all:
        outputs[process.name] = process.log()
    assert "reason" in outputs["a failed turn"] or "Incorrect" in outputs["a failed turn"]
    found = [f"{secret} in {name}: {text}" for name, text in outputs.items() for secret in SECRETS if secret in text]
    async for key, value in everything(stage.redis, stage.keys.prefix):
        found += [f"{secret} in {key}: {value!r}" for secret in SECRETS if secret.encode() in value or secret in key]
    assert not found, "\n".join(found)


async def _turns(stage: Stage) -> dict[str, str]:
    """Turns that finish and turns that fail; what their callers were told."""
    speaker = Agent("speaker", "openai:gpt-of-tests", retry={"max_attempts": 1})
    outputs = {}
    await stage.client.publish(guarded, speaker)
    turn = await stage.client.turn(guarded, told([{"name": "send", "arguments": {"value": "x"}}]), session="w")
    outputs["a turn"] = repr(await asyncio.wait_for(turn.result(), PATIENCE_SECONDS))
    for number in range(4):
        turn = await stage.client.turn(speaker, "hello", session=f"s{number}")
        try:
            outputs[f"answer {number}"] = repr(await asyncio.wait_for(turn.result(), PATIENCE_SECONDS))
        except TurnFailedError as error:
            outputs["a failed turn" if number == 1 else f"failure {number}"] = f"{error} {error.result!r}"
    outputs["ids"] = turn.id
    return outputs


def _printed(command: CommandLine, url: str, stage: Stage, base_url: str) -> dict[str, str]:
    command.variables |= {"TURNMILL_REDIS_URL": url, "TURNMILL_NAMESPACE": stage.keys.prefix}
    surroundings = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": base_url, "SECRET_THING": OTHER}
    outputs: dict[str, str] = {}
    lines: list[list[str]] = [
        ["config"],
        ["doctor"],
        ["ls"],
        ["worker", "ls"],
        ["queue", "ls"],
        ["session", "show", "s1"],
    ]
    lines += [[*line, "--json"] for line in lines]
    for arguments in lines:
        variables: dict[str, Any] = {**surroundings, "TURNMILL_LOG_LEVEL": "debug"}
        shown = command(*arguments, variables=variables)
        outputs[" ".join(arguments)] = shown.stdout + shown.stderr
    failed = command(
        "ls", variables={"TURNMILL_REDIS_URL": f"redis://u:{PASSWORD}@127.0.0.1:1/0", "TURNMILL_LOG_LEVEL": "debug"}
    )
    outputs["an engine that is not there"] = failed.stdout + failed.stderr
    refused = command("ls", variables={"TURNMILL_REDIS_URL": f"redis://u:{PASSWORD}x@127.0.0.1:notaport/0"})
    outputs["a wrong URL"] = refused.stdout + refused.stderr
    assert os.environ["OPENAI_API_KEY"] == KEY
    return outputs
