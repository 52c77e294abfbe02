"""A real language model, small and on this machine, through the whole runtime: every role is a process of its own.

It is there once `scripts/local_model --build-only` has run, which takes minutes; without it these tests skip.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from apps import small_talk as app
from support.fleet import Fleet
from support.waiting import wait_until
from turnmill.runtime import Turn, TurnAbortedError
from turnmill.runtime.client import Client
from turnmill.runtime.results import TurnResult

pytestmark = pytest.mark.local_model

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/local_model"
READY_SECONDS = 60.0
PATIENCE_SECONDS = 100.0
LEFT_SECONDS = 20.0
"""How soon the server answers somebody else after its client has left. All of that answer would take twice as long on a fast
machine, and much longer on others."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where the model's server listens."""
    checked = subprocess.run([SCRIPT, "--check"], capture_output=True, text=True)
    if checked.returncode != 0:
        pytest.skip(checked.stderr.strip())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([SCRIPT, "--port", str(number)], stdout=log, stderr=subprocess.STDOUT)

        def told() -> str:
            log.seek(0)
            return log.read()

        try:
            wait_until(lambda: "ready on" in told() or process.poll() is not None, READY_SECONDS)
            assert process.poll() is None, told()
            yield number
        finally:
            process.terminate()
            process.wait(READY_SECONDS)


@pytest.fixture(scope="module")
def fleet(port: int, valkey_url: str) -> Iterator[Fleet]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    toml = f'[providers.local]\napi = "openai"\nbase_url = "http://127.0.0.1:{port}/v1"\n'
    (directory / "turnmill.toml").write_text(toml)
    with Fleet(valkey_url, f"test-{uuid.uuid4().hex[:12]}", directory, "apps.small_talk") as fleet:
        fleet.start()
        yield fleet
    shutil.rmtree(directory)


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with fleet.client() as client:
        yield client


async def end(turn: Turn) -> TurnResult:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def test_a_conversation(client: Client, session: str) -> None:
    """What was said before is part of what the model answers to."""
    turn = await client.turn(app.talker, "What is the capital of France?", session=session)
    pieces = [event.text async for event in turn.events() if event.type == "text.delta"]
    first = await end(turn)
    assert "Paris" in str(first.answer)
    assert len(pieces) > 3, "it came word by word"
    assert "".join(pieces) == first.answer

    second = await end(await client.turn(app.talker, "Which city did you just name?", session=session))
    assert "Paris" in str(second.answer)
    transcript = await client.transcript(session)
    assert [message.role for message in transcript] == ["user", "assistant", "user", "assistant"]


async def test_a_call_of_a_named_tool(client: Client, session: str) -> None:
    """`tool_choice` names it; the worker runs it, and the model is asked once more with what it gave."""
    result = await end(await client.turn(app.caller, "What is the weather in Oslo?", session=session))
    asked, called, told, answered = await client.transcript(session)
    assert asked.role == "user"
    (call,) = called.tool_calls
    assert (call.name, call.error) == ("weather", None)
    assert "Oslo" in call.arguments["city"]
    (given,) = told.tool_results
    assert given.result == f"{call.arguments['city']}: 4 degrees, rain"
    assert answered.text == result.answer != ""


async def test_an_abort_in_the_middle_frees_the_server(client: Client) -> None:
    """It works on one request at a time: another one is answered only when it has noticed that nobody listens."""
    turn = await client.turn(app.rambler, "Write a very long story about a king, with many chapters.")
    heard = 0
    async for event in turn.events():
        heard += event.type == "text.delta"
        if heard == 5:
            break
    await turn.abort("enough")
    with pytest.raises(TurnAbortedError) as stopped:
        await end(turn)
    assert stopped.value.result is not None
    begun = time.monotonic()
    other = await end(await client.turn(app.talker, "What is the capital of France?"))
    assert "Paris" in str(other.answer)
    assert time.monotonic() - begun < LEFT_SECONDS
