"""Blows on the engine that lose none of its data: no memory, no writes, foreign scripts, a kill with an append-only file."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import redis

from .server import Server, in_thread

if TYPE_CHECKING:
    from .run import Run

_MEGABYTE = 1024 * 1024


async def memory(run: Run) -> str:
    """No room for a while; nothing is evicted."""
    await in_thread(run.server.set, maxmemory=_MEGABYTE)
    await asyncio.sleep(run.random.uniform(0.5, 2.5))
    await free_memory(run)
    return "out of memory"


async def free_memory(run: Run) -> None:
    await in_thread(run.server.set, maxmemory=0, maxmemory_policy="noeviction")


async def misconf(run: Run) -> str:
    await refuse_writes(run.server)
    await asyncio.sleep(run.random.uniform(0.5, 2.5))
    await save_again(run)
    return "MISCONF"


async def refuse_writes(server: Server) -> None:
    """A background save fails, so the engine refuses writes; servers with save points do. Needs an engine with
    `enable_protected_configs`."""
    await in_thread(server.set, dir="/proc", save="3600 1", stop_writes_on_bgsave_error="yes")
    await in_thread(server.ask, "BGSAVE")
    deadline = time.monotonic() + 5.0
    while (await in_thread(server.information, "persistence"))["rdb_last_bgsave_status"] == "ok":
        assert time.monotonic() < deadline, "the background save did not fail"
        await asyncio.sleep(0.02)


async def save_again(run: Run) -> None:
    await save_again_on(run.server)


async def save_again_on(server: Server) -> None:
    await in_thread(server.set, stop_writes_on_bgsave_error="no", save="", dir=str(server.directory))


async def script(run: Run) -> str:
    if run.random.random() < 0.5:
        await in_thread(run.server.ask, "SCRIPT", "FLUSH", run.random.choice(["SYNC", "ASYNC"]))
        return "SCRIPT FLUSH"
    busy = asyncio.create_task(in_thread(_busy_script, run.server.port))
    await asyncio.sleep(run.random.uniform(0.2, 1.5))
    await in_thread(run.server.ask, "SCRIPT", "KILL")
    await busy
    return "SCRIPT KILL"


def _busy_script(port: int) -> None:
    client = redis.Redis(port=port, socket_timeout=30.0)
    try:
        client.execute_command("EVAL", "while true do end", 0)
    except redis.RedisError:
        return  # killed, as it should be
    finally:
        client.close()


async def restart(run: Run) -> str:
    """kill -9 of the engine, and a new process on the same data."""
    await in_thread(run.server.kill)
    await asyncio.sleep(run.random.choice([0.0, 0.3, 2.0]))
    await in_thread(run.server.start)
    return "kill -9 engine"
