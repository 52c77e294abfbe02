"""The demo's main job, as `scripts/demo` runs it once the environment is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from support.commands import PATIENCE_SECONDS, environment
from support.replay_server import Answer, ReplayServer

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "scripts/demo.py"


def run_demo(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a directory of its own, which also takes the temporary data."""
    return subprocess.run(
        [sys.executable, str(DEMO)],
        cwd=directory,
        env=environment({"TMPDIR": str(directory), **variables}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_the_demo_shows_a_turn_of_separate_processes_and_cleans_up(short_directory: Path) -> None:
    done = run_demo(short_directory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scripted provider" in done.stdout
    assert "OPENAI_API_KEY" in done.stdout
    assert '→ weather(city="Oslo")' in done.stdout
    assert "asking the station in Lisbon" in done.stdout
    assert "Oslo has 4 degrees, rain" in done.stdout
    assert "✓ finished: 2 steps" in done.stdout
    assert list(short_directory.iterdir()) == []
    assert [process for process in psutil.process_iter(["cmdline"]) if _mentions(process, short_directory)] == []


async def test_with_a_key_the_demo_talks_to_that_provider(short_directory: Path) -> None:
    import asyncio

    chunk = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Take a coat."}}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    body = [f"data: {json.dumps(part)}\n\n".encode() for part in (chunk, end)]
    async with ReplayServer() as server:
        server.reply(Answer(chunks=[*body, b"data: [DONE]\n\n"]))
        done = await asyncio.to_thread(
            run_demo,
            short_directory,
            OPENAI_API_KEY="a-key",
            OPENAI_BASE_URL=server.url,
            TURNMILL_DEMO_MODEL="some-model",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Take a coat." in done.stdout
        assert "scripted" not in done.stdout
        assert server.requests[0].json["model"] == "some-model"
        assert {tool["function"]["name"] for tool in server.requests[0].json["tools"]} == {"weather", "packing_list"}


async def test_the_demo_fails_if_its_turn_does(short_directory: Path) -> None:
    import asyncio

    async with ReplayServer() as server:
        server.reply(Answer(chunks=[b'{"error": {"message": "no such key"}}'], status=401))
        done = await asyncio.to_thread(run_demo, short_directory, OPENAI_API_KEY="x", OPENAI_BASE_URL=server.url)
        assert done.returncode == 1
        assert "✗ failed" in done.stderr


def _mentions(process: psutil.Process, directory: Path) -> bool:
    return any(str(directory) in word for word in process.info["cmdline"] or [])
