"""`turnmill provider check` and `provider ls` as their users have them."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from support.commands import CommandLine, json_lines
from support.replay_server import Answer, ReplayServer, replaying
from support.waiting import wait_until_async
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.keys import Keys
from turnmill.protocol.provider_leave import ProviderLimit, enter_provider, leave_provider

SECRET = "sk-not-to-be-seen"
ONE = ProviderLimit(concurrency=1)


def said(text: str) -> Answer:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return Answer(chunks=[b"data: " + msgspec.json.encode(chunk) + b"\n\ndata: [DONE]\n\n"])


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    with replaying() as server:
        yield server


@pytest.fixture
def turnmill(server: ReplayServer, short_directory: Path) -> CommandLine:
    """In a directory with an endpoint of its own, and without an engine."""
    toml = f'[providers.mine]\napi = "openai"\nbase_url = "{server.url}/v1"\napi_key_env = "MINE_KEY"\n'
    toml += '[models."mine:small"]\ncontext_window = 4096\nimages = false\n'
    (short_directory / "turnmill.toml").write_text(toml)
    return CommandLine(short_directory)


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


KEY = {"MINE_KEY": SECRET}


# ---- provider check


def test_check_prints_a_line_for_each_feature(turnmill: CommandLine, server: ReplayServer) -> None:
    server.reply(said("pong"))
    done = turnmill("provider", "check", "mine:small", "--option", "temperature=0", variables=KEY)
    assert done.returncode == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title == "mine:small  context window 4,096 tokens, no images"
    assert head.split() == ["FEATURE", "RESULT", "SECONDS", "SEEN"]
    assert [row.split("  ")[0] for row in rows][:2] == ["text", "not streamed"]
    assert len(rows) == 7
    assert rows[0].split()[1] == "ok"
    assert rows[0].endswith("'pong'")
    assert rows[3].split()[:2] == ["tool", "unsupported"]
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {SECRET}"}
    assert {request.json["temperature"] for request in server.requests} == {0}
    assert SECRET not in done.stdout + done.stderr


def test_check_is_for_programs_too_and_fails_where_text_does(turnmill: CommandLine, server: ReplayServer) -> None:
    server.reply(Answer(chunks=[f'{{"error": "no {SECRET}"}}'.encode()], status=401))
    done = turnmill("provider", "check", "mine:small", "--json", variables=KEY)
    assert done.returncode == 1
    rows = json_lines(done.stdout)
    assert rows[0]["feature"] == "text"
    assert {row["status"] for row in rows} == {"failed"}
    assert set(rows[0]) == {"model", "feature", "status", "seconds", "seen", "capabilities"}
    assert rows[0]["capabilities"] == {"context_window": 4096, "images": False}
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize("model", ["nobody:small", "small", "mine:"])
def test_check_of_an_unknown_provider_names_those_there_are(turnmill: CommandLine, model: str) -> None:
    done = turnmill("provider", "check", model, variables=KEY)
    assert done.returncode == 2
    assert "mine" in done.stderr
    assert "scripted" in done.stderr
    assert "[providers.<name>]" in done.stderr


def test_check_tries_models_of_an_application(turnmill: CommandLine) -> None:
    app = 'from turnmill.workers import model\n\n\n@model("echo")\nasync def echo(request):\n    yield "I am here"\n'
    (turnmill.directory / "app.py").write_text(app)
    done = turnmill("provider", "check", "host:echo", "--app", "app.py", variables=KEY)
    assert done.returncode == 0, done.stderr
    assert "'I am here'" in done.stdout


# ---- provider ls


def test_ls_without_an_engine_shows_what_this_environment_has(turnmill: CommandLine) -> None:
    variables = {"OPENAI_BASE_URL": f"https://me:{SECRET}@proxy.example/v1?key={SECRET}", "GROQ_API_KEY": SECRET}
    done = turnmill("provider", "ls", variables=variables)
    assert done.returncode == 0
    assert "no Redis URL is set" in done.stderr
    table, models = done.stdout.split("\n\n")
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert rows["PROVIDER"].split() == ["PROVIDER", "API", "BASE", "URL", "KEY", "STATE"]
    openai = ["openai", "openai-chat", "https://***@proxy.example/v1?***", "OPENAI_API_KEY", "(not", "set)", "ready"]
    assert rows["openai"].split() == openai
    assert rows["groq"].split()[2:] == ["https://api.groq.com/openai/v1", "GROQ_API_KEY", "ready"]
    assert rows["mine"].endswith("set MINE_KEY")
    assert "anthropic" not in rows
    assert models == "mine:small: context window 4,096 tokens, no images\n"
    assert SECRET not in done.stdout + done.stderr


def test_ls_tells_what_the_others_lack(turnmill: CommandLine) -> None:
    done = turnmill("provider", "ls", "--all", "--json", variables={**KEY, "AZURE_OPENAI_API_KEY": SECRET})
    rows = {row["provider"]: row for row in json_lines(done.stdout)}
    assert rows["anthropic"]["missing"] == "set ANTHROPIC_API_KEY or ANTHROPIC_BASE_URL"
    assert rows["azure"]["missing"] == "set AZURE_OPENAI_ENDPOINT"
    assert (rows["azure"]["key_is_set"], rows["azure"]["here"]) == (True, False)
    assert (rows["mine"]["here"], rows["mine"]["key_variable"]) == (True, "MINE_KEY")
    assert rows["mine"]["models"] == {"mine:small": {"context_window": 4096, "images": False}}
    assert {row["shared"] for row in rows.values()} == {None}


async def test_ls_with_an_engine_shows_what_all_workers_share(
    turnmill: CommandLine, engine: Engine, valkey_url: str, namespace: str
) -> None:
    line = CommandLine(turnmill.directory, redis_url=valkey_url, namespace=namespace)
    keys = Keys(namespace)
    with (turnmill.directory / "turnmill.toml").open("a") as toml:
        toml.write("[limits.mine]\nconcurrency = 1\ntokens_per_minute = 9000\n[limits.elsewhere]\n")
    line.variables["MINE_KEY"] = SECRET
    with line.started("worker", "llm"):
        await wait_until_async(lambda: engine.call("EXISTS", keys.limits), 40)
    for call in ("under-way", "waits"):
        await enter_provider(engine, keys.provider("mine"), ONE, call, "", 10)
    error = ErrorInfo(kind="overloaded", message=f"come back\nlater {os.getpid()}", retryable=True)
    await leave_provider(
        engine,
        keys.provider("scripted"),
        "ended",
        "",
        outcome="limited",
        wait_seconds=50,
        error=msgspec.json.encode(error),
    )

    rows = {row["provider"]: row for row in json_lines(line("provider", "ls", "--json").stdout)}
    limits = {"concurrency": 1, "requests_per_minute": None, "tokens_per_minute": 9000, "breaker_failures": 5}
    nothing = {"calls": 0, "waiting": 0, "held_back_until": None, "last_error": None}
    assert rows["mine"]["shared"] == {**nothing, "limits": limits, "calls": 1, "waiting": 1}
    held = rows["scripted"]["shared"]
    assert time.time() + 20 < held["held_back_until"] < time.time() + 60
    assert held["last_error"] == {"kind": "overloaded", "message": error.message}
    assert (rows["elsewhere"]["here"], rows["elsewhere"]["api"]) == (False, None)

    table = {text.split()[0]: text for text in line("provider", "ls").stdout.split("\n\n")[0].splitlines()}
    assert table["PROVIDER"].split()[-7:] == ["LIMITS", "CALLS", "WAITING", "HELD", "BACK", "LAST", "ERROR"]
    assert table["mine"].split("ready")[1].split() == ["1", "at", "once,", "9,000", "tokens/min", "1", "1"]
    assert f"overloaded: come back later {os.getpid()}" in table["scripted"]
    assert "only of workers elsewhere" in table["elsewhere"]


def test_ls_goes_on_where_the_engine_cannot_be_reached(turnmill: CommandLine) -> None:
    done = turnmill("provider", "ls", "--redis-url", "redis://127.0.0.1:1/0", variables=KEY)
    assert done.returncode == 0
    assert "cannot reach Redis or Valkey" in done.stderr
    assert "mine" in done.stdout
