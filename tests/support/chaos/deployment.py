"""An engine of one's own with a deployment on it, for tests that hit the engine or its connections."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio

from support.processes import Process, Processes
from support.proxy import Proxy
from support.stage import Stage, call, told
from turnmill.protocol.settings import load_settings
from turnmill.runtime.client import Client, open_client
from turnmill.runtime.turn import Turn

from . import app
from .effects import EFFECTS_VARIABLE, Effects
from .server import Server

APP = "support.chaos.app"
SETTINGS = {
    "lease_seconds": 1.0,
    "liveness_seconds": 1.0,
    "heartbeat_seconds": 0.3,
    "max_attempts": 50,
    "response_timeout": 2.0,
    "partitions": 4,
}
"""Times as short as a loaded machine of two cores allows."""


class Engine(NamedTuple):
    """A server, a namespace on it, and where the files of a deployment are."""

    server: Server
    namespace: str
    directory: Path
    settings: dict[str, Any]

    def start(self, processes: Processes, role: str, **settings: Any) -> Process:
        if role == "coordinator":
            return processes.coordinator(**settings)
        return processes.llm(APP, **settings) if role == "llm" else processes.tools(APP, queues=["default"], **settings)

    def effects(self) -> Effects:
        return Effects(self.directory / "effects")


class Deployment(NamedTuple):
    """`url` leads to the engine, through the proxy where there is one."""

    engine: Engine
    url: str
    proxy: Proxy | None
    stage: Stage

    @property
    def server(self) -> Server:
        return self.engine.server

    @property
    def client(self) -> Client:
        return self.stage.client

    def effects(self) -> Effects:
        return self.engine.effects()

    def start(self, role: str, **settings: Any) -> Process:
        return self.engine.start(self.stage.processes, role, **settings)

    async def ask(self, message: str, session: str = "session") -> Turn:
        return await self.client.turn(app.worker, message, session=session)

    async def everybody_is_there(self) -> None:
        """One turn has passed through every role."""
        turn = await self.ask(told([call("again")], answer="ready"), "before")
        assert (await turn.result()).answer == "ready"


@contextmanager
def engine(
    directory: Path,
    *,
    fsync: str = "everysec",
    deadline_seconds: float = 60.0,
    options: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    """The server alone. What tools do is recorded in the directory."""
    os.environ[EFFECTS_VARIABLE] = str(directory / "effects")
    os.environ[app.DEADLINE_VARIABLE] = str(deadline_seconds)
    with Server(directory / "engine", fsync=fsync, **(options or {})) as server:
        server.start()
        yield Engine(server, f"chaos-{uuid.uuid4().hex[:8]}", directory, {**SETTINGS, **settings})


@contextmanager
def processes_of(running: Engine, url: str | None = None) -> Iterator[Processes]:
    with Processes(url or running.server.url, running.namespace, running.directory, running.settings) as processes:
        yield processes


@asynccontextmanager
async def attached(
    running: Engine, processes: Processes, url: str | None = None, proxy: Proxy | None = None
) -> AsyncIterator[Deployment]:
    """A client of a deployment that is there."""
    url = url or running.server.url
    loaded = load_settings(redis_url=url, namespace=running.namespace, **running.settings)
    plain = redis.asyncio.Redis.from_url(url)
    try:
        async with open_client(url, loaded) as client:
            yield Deployment(running, url, proxy, Stage(client, plain, processes))
    finally:
        await plain.aclose()


@asynccontextmanager
async def deployment(directory: Path, *, through_proxy: bool = False, **options: Any) -> AsyncIterator[Deployment]:
    """An engine, and a client of it; processes are the caller's to start. The options are those of `engine`."""
    async with AsyncExitStack() as stack:
        running = stack.enter_context(engine(directory, **options))
        url, proxy = running.server.url, None
        if through_proxy:
            proxy = await Proxy("127.0.0.1", running.server.port).start()
            stack.push_async_callback(proxy.close)
            url = proxy.url
        processes = stack.enter_context(processes_of(running, url))
        yield await stack.enter_async_context(attached(running, processes, url, proxy))
