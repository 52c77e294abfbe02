"""How commands come to a client of the namespace.

With a Redis URL they connect to it. Without one they attach to the embedded server of the data directory, and start it
for themselves where it is not running: what happened there can be looked at without anything else being up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from turnmill.protocol.errors import EngineUnavailable
from turnmill.protocol.settings import Settings, load_settings

from ..client import Client, open_client
from ..embedded import ensure_server
from ..roles import keep_server, run_async
from .exits import CommandError, Exit
from .logs import configure_logging

if TYPE_CHECKING:
    from turnmill.workers.app import App


def command_settings(redis_url: str | None, namespace: str | None, *, quiet: bool = True) -> Settings:
    """The settings of a command, with logging set up by them."""
    settings = load_settings(redis_url=redis_url, namespace=namespace)
    configure_logging(settings, quiet=quiet)
    return settings


def run_command(command: Coroutine[Any, Any, int | None]) -> int:
    """Run a command on the loop; its exit code. Ctrl-C ends it as aborted."""
    try:
        return int(run_async(command) or Exit.OK)
    except KeyboardInterrupt:
        return Exit.USAGE


@asynccontextmanager
async def attached_client(settings: Settings, *, create: bool = False) -> AsyncIterator[Client]:
    """A client that runs nothing itself. Without `create` a data directory that is not there is an error."""
    if settings.redis_url is not None:
        async with open_client(settings.redis_url, settings) as client:
            yield client
        return
    if not create and not settings.data_dir.exists():
        raise EngineUnavailable(
            f"no Redis URL is set (TURNMILL_REDIS_URL), and no embedded server has ever run in {settings.data_dir}: "
            "start `turnmill dev APP` here"
        )
    async with kept_server(settings) as url, open_client(url, settings) as client:
        yield client


@asynccontextmanager
async def serving_client(
    settings: Settings, app_target: str | None, *, serve: bool = True
) -> AsyncIterator[tuple[Client, App | None]]:
    """A client, with the application's agents published, and a runtime in this process where nothing else would run the
    turn. That is without a Redis URL, when the embedded server of the directory has no coordinator, or an app was given.
    """
    from turnmill.workers.app import load_app

    from ..fleet import read_fleet
    from ..local import local_runtime
    from ..roles import publish_app

    app = load_app(app_target) if app_target else None
    async with attached_client(settings, create=True) as client:
        if app is not None:
            await publish_app(client.engine, client.keys, app)
        fleet = await read_fleet(client.engine, client.keys, settings)
        served = bool(fleet.coordinators) and app is None
        if settings.redis_url is not None or served or not serve:
            yield client, app
            return
        async with local_runtime(settings, app_target) as local:
            yield local, app


@asynccontextmanager
async def commanding_client(
    settings: Settings, app_target: str | None = None, *, serve: bool = True, takes_app: bool = False
) -> AsyncIterator[Client]:
    """A client for commands that a coordinator must answer. In a data directory where none is alive they are not sent: they
    would take effect by surprise, whenever one comes. `takes_app` says that an app may be brought along instead."""
    if app_target is not None and serve:
        async with serving_client(settings, app_target) as (client, _):
            yield client
        return
    async with attached_client(settings) as client:
        if settings.redis_url is None:
            await _require_coordinator(client, ", or say --app APP" if takes_app else "")
        yield client


async def _require_coordinator(client: Client, or_else: str) -> None:
    from ..fleet import read_fleet

    fleet = await read_fleet(client.engine, client.keys, client.settings)
    if not fleet.coordinators:
        raise CommandError(
            f"nothing was sent: no coordinator is alive in {client.settings.data_dir}; start `turnmill dev APP` here{or_else}",
            Exit.TIMEOUT,
        )


@asynccontextmanager
async def kept_server(settings: Settings) -> AsyncIterator[str]:
    """The URL of the engine. The embedded server is kept running until the end, also when its owner leaves."""
    if settings.redis_url is not None:
        yield settings.redis_url
        return
    server = await asyncio.to_thread(ensure_server, settings.data_dir)
    keeping = asyncio.create_task(keep_server(settings))
    try:
        yield server.url
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(server.stop)
