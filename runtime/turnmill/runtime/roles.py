"""Composition root: the processes of a deployment, each from settings to a running loop.

This module and `local` are the only ones of the runtime that know the workers.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import ConfigurationError, EngineError, EngineReplyError
from turnmill.protocol.keys import Keys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.namespace import open_namespace
from turnmill.protocol.settings import Settings
from turnmill.workers.app import App, load_app
from turnmill.workers.tool_worker import ToolWorker

from .coordinator import Coordinator
from .registry import publish
from .telemetry import start_telemetry

if TYPE_CHECKING:
    from turnmill.workers.providers.base import ProviderSet

_log = get_logger(__name__)
_PUBLISH_SECONDS = 15.0
_SERVER_LOOK_SECONDS = 1.0
_DRAIN_GRACE_SECONDS = 3.0
_EXIT_SECONDS = 5.0
"""What a process takes at most to close its loop and threads when its role is over."""


class Role(Protocol):
    """Something that runs until it is told to stop."""

    def stop(self) -> None: ...

    async def run(self) -> None: ...


@asynccontextmanager
async def open_engine(settings: Settings) -> AsyncIterator[tuple[Engine, Keys]]:
    """The engine and the namespace of a process. Without a Redis URL it attaches to the embedded server."""
    url, keeping = settings.redis_url, None
    if url is None:
        url = await asyncio.to_thread(embedded_url, settings)
        keeping = asyncio.create_task(keep_server(settings))
    try:
        engine = await Engine(url, response_timeout_seconds=settings.response_timeout).connect()
        try:
            namespace = await open_namespace(engine, settings.namespace, settings.partitions)
            yield engine, namespace.keys
        finally:
            await engine.close()
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


def embedded_url(settings: Settings) -> str:
    """Start the embedded server, or attach to the one that runs in `data_dir`."""
    from .embedded import ensure_server

    return ensure_server(Path(settings.data_dir)).url


async def keep_server(settings: Settings) -> None:
    """The embedded server goes with the process that started it: whoever still needs it starts it again."""
    while True:
        await asyncio.sleep(_SERVER_LOOK_SECONDS)
        try:
            await asyncio.to_thread(embedded_url, settings)
        except EngineError as error:
            _log.warning("the embedded server is gone", error=str(error))


async def run_coordinator(settings: Settings) -> None:
    async with open_engine(settings) as (engine, keys):
        await _serve(await Coordinator.create(engine, keys, settings), settings)


async def run_llm_worker(settings: Settings, target: str | None, pools: list[str], concurrency: int | None) -> None:
    app = load_app(target) if target else None
    async with open_engine(settings) as (engine, keys):
        await _serve(build_llm_worker(engine, keys, settings, app, pools, concurrency), settings)


async def run_tool_worker(settings: Settings, target: str, queues: list[str], concurrency: int | None) -> None:
    app = load_app(target)
    if not app.tools and not app.agents and not app.hooks:
        raise ConfigurationError(f"{target} defines no tool: decorate functions with @tool")
    async with open_engine(settings) as (engine, keys):
        is_publisher = await _may_publish(engine, keys, app)
        worker = ToolWorker(
            engine, keys, settings, app.tools, hooks=app.hooks, queues=queues or None, concurrency=concurrency
        )
        keeping = asyncio.create_task(_keep_published(engine, keys, app, worker) if is_publisher else asyncio.sleep(0))
        try:
            await _serve(worker, settings)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _may_publish(engine: Engine, keys: Keys, app: App) -> bool:
    """Publish the app, where the access list of the engine's user lets it."""
    try:
        await publish_app(engine, keys, app)
        return True
    except EngineReplyError as error:
        if not str(error).startswith("NOPERM"):
            raise
        _log.info("agents and tools are left to others to publish: the engine's user may not", error=str(error))
        return False


async def _keep_published(engine: Engine, keys: Keys, app: App, worker: ToolWorker) -> None:
    """Publish again now and then: a registry that was lost comes back while the workers live."""
    while True:
        await asyncio.sleep(_PUBLISH_SECONDS)
        try:
            await worker.register()
            await publish_app(engine, keys, app)
        except EngineError as error:
            _log.warning("agents and tools not published", error=str(error))


def build_llm_worker(
    engine: Engine, keys: Keys, settings: Settings, app: App | None, pools: list[str], concurrency: int | None
) -> Role:
    """An LLM worker with the models and scripts of an app; each model function has a pool of its own."""
    providers = open_providers(settings, app)
    from turnmill.workers.llm_worker import LLMWorker

    served = (pools or ["default"]) + [f"host.{model.name}" for model in (app.models.values() if app else ())]
    return LLMWorker(engine, keys, settings, providers, pools=served, concurrency=concurrency)


def open_providers(settings: Settings, app: App | None) -> ProviderSet:
    """Every provider that an LLM worker with these settings, this app and this environment can speak to."""
    try:
        from turnmill.workers.providers.catalog import build_providers
    except ImportError as error:
        raise ConfigurationError(f"an LLM worker needs `pip install turnmill[llm]`: {error}") from error
    scripts, models = (app.scripts.values(), app.models.values()) if app else ((), ())
    return build_providers(settings, scripts, models)


async def publish_app(engine: Engine, keys: Keys, app: App) -> None:
    await publish(engine, keys, app.agent_specs.values(), app.tool_specs.values())


def tune_collector() -> None:
    """What was imported lives as long as the process, and messages die young without cycles: look for cycles seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


async def _serve(role: Role, settings: Settings) -> None:
    """Run with the telemetry of the settings, until SIGTERM or SIGINT."""
    stop_telemetry = start_telemetry(settings.telemetry)
    code = 1
    try:
        await _run_until_signal(role, settings)
        code = 0
    finally:
        # It sends what is left, and blocks while it does: nothing else runs any more.
        stop_telemetry()
        _exit_within(_EXIT_SECONDS, code)


def _exit_within(seconds: float, code: int) -> None:
    """End the process even if a user's function keeps it: a task that swallows cancellations, a thread that hangs.

    The role has handed everything back or answered it, so nothing is lost by not waiting for such a function.
    """

    def end() -> None:
        _log.warning("functions that could not be stopped were left in mid-run", waited_seconds=seconds)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


async def _run_until_signal(role: Role, settings: Settings) -> None:
    """Until SIGTERM or SIGINT, then drain; a second signal, or the end of the drain's time, ends at once."""
    tune_collector()
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(role.run())
    signals = 0
    enough = asyncio.Event()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            enough.set()
            return
        role.stop()
        loop.call_later(settings.drain_timeout + _DRAIN_GRACE_SECONDS, enough.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    waiting = asyncio.ensure_future(enough.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not running.done():
        _log.warning("ended before the drain was over")
    while not running.done():
        # More than once: what it does on its way out may wait for an engine that is gone.
        running.cancel()
        await asyncio.wait({running}, timeout=1.0)
    if not running.cancelled():
        running.result()


def loop_factory() -> Any:
    """uvloop where there is one."""
    try:
        import uvloop

        return uvloop.new_event_loop
    except ImportError:
        return None


def run_async(main: Any) -> Any:
    """Run a coroutine on the fastest loop at hand."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
