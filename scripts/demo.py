"""The demo's main job: start the processes, run one turn, print its events as they come, and clean up.

The embedded Valkey keeps its data in a temporary directory, so that two demos, or a demo beside `turnmill dev`, do not
meet. The exit code is 0 only if the turn has finished.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from turnmill.protocol.errors import TurnmillError
from turnmill.protocol.settings import Settings, load_settings
from turnmill.runtime.cli.attachment import kept_server
from turnmill.runtime.cli.dev import role_environment, roles_for
from turnmill.runtime.cli.exits import Exit, explain
from turnmill.runtime.cli.logs import configure_logging
from turnmill.runtime.cli.rendering import Transcript
from turnmill.runtime.cli.watching import Watch
from turnmill.runtime.client import Client, open_client
from turnmill.runtime.fleet import read_fleet
from turnmill.runtime.roles import run_async
from turnmill.runtime.supervisor import Supervisor
from turnmill.workers.app import App, load_app

APP = str(Path(__file__).resolve().parent.parent / "examples/weather.py")
QUESTION = "What do I pack for three days in Oslo and Lisbon?"
START_SECONDS = 30.0
TURN_SECONDS = 120.0
DRAIN_SECONDS = 5.0

console = Console(soft_wrap=True, highlight=False)


def main() -> int:
    question = " ".join(sys.argv[1:]) or QUESTION
    directory = Path(tempfile.mkdtemp(prefix="turnmill-demo-"))
    try:
        settings = load_settings(redis_url="embedded", data_dir=directory, namespace="demo")
        configure_logging(settings, quiet=True)
        app = load_app(APP)
        describe(app)
        return run_async(demo(settings, app, question))
    except (TurnmillError, TimeoutError, KeyboardInterrupt) as error:
        return explain(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def describe(app: App) -> None:
    model = app.agent_specs["assistant"].model
    if model.startswith("scripted:"):
        console.print(
            "Model: the scripted provider, which needs no key. For a real one: OPENAI_API_KEY=... scripts/demo "
            "(OPENAI_BASE_URL for another server, TURNMILL_DEMO_MODEL for another model)"
        )
    else:
        console.print(f"Model: {model} at {os.environ.get('OPENAI_BASE_URL') or 'its usual address'}")


async def demo(settings: Settings, app: App, question: str) -> int:
    stop_on_sigterm()
    async with kept_server(settings) as url:
        environment = {**role_environment(settings, url), "TURNMILL_LOG_LEVEL": "warning"}
        supervisor = Supervisor(
            roles_for(APP),
            environment,
            drain_seconds=DRAIN_SECONDS,
            on_line=lambda name, line: console.print(f"{name:11} | {line}", style="dim", markup=False),
            on_notice=lambda name, line: console.print(f"{name:11} | {line}", style="yellow", markup=False),
        )
        try:
            await supervisor.start()
            async with open_client(url, settings) as client:
                await until_ready(client, supervisor)
                return await one_turn(client, question)
        finally:
            await supervisor.stop()


def stop_on_sigterm() -> None:
    """End as with Ctrl-C: the processes are stopped and the data is removed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def until_ready(client: Client, supervisor: Supervisor) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            fleet = await read_fleet(client.engine, client.keys, client.settings)
            if fleet.coordinators and fleet.of_role("llm") and fleet.of_role("tools"):
                break
            await asyncio.sleep(0.05)
    names = {"coordinator": "coordinator", "llm": "LLM worker", "tools": "tool worker"}
    running = ", ".join(f"{names[name]} (pid {pid})" for name, pid in supervisor.pids.items())
    console.print(f"Processes: {running}, Valkey at {client.engine.address}")


async def one_turn(client: Client, question: str) -> int:
    console.print(f"\n> {question}", style="bold", markup=False)
    turn = await client.turn("assistant", question)
    async with asyncio.timeout(TURN_SECONDS):
        code = await Watch(client, turn, Transcript()).follow()
    if code is Exit.OK:
        console.print("\nEvery line came over the turn's channel, which any process can follow and resume.")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except asyncio.CancelledError:  # SIGTERM
        sys.exit(Exit.USAGE)
