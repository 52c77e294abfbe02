"""Blows on connections, through the proxy or by the engine itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .server import in_thread

if TYPE_CHECKING:
    from .run import Run


async def reset(run: Run) -> str:
    assert run.proxy is not None
    run.proxy.reset(run.random.choice([0.2, 0.5, 1.0]), run.random)
    return "reset"


async def black_hole(run: Run) -> str:
    """Everything for a while, or some connections for ever."""
    assert run.proxy is not None
    if run.random.random() < 0.5:
        run.proxy.forget(0.4, run.random)
        return "black hole of some connections"
    run.proxy.black_hole()
    await asyncio.sleep(run.random.choice([0.3, 1.0, 3.0]))
    run.proxy.pass_on()
    return "black hole of all connections"


async def delay(run: Run) -> str:
    assert run.proxy is not None
    run.proxy.delay_seconds = run.random.uniform(0.02, 0.3)
    await asyncio.sleep(1.0)
    run.proxy.delay_seconds = 0.0
    return "delay"


async def pass_on(run: Run) -> None:
    assert run.proxy is not None
    run.proxy.delay_seconds = 0.0
    run.proxy.pass_on()


async def client_kill(run: Run) -> str:
    kind = run.random.choice(["normal", "pubsub", "one", "one"])
    if kind != "one":
        await in_thread(run.server.ask, "CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        return f"CLIENT KILL TYPE {kind}"
    clients = await in_thread(run.server.ask, "CLIENT", "LIST")
    number = run.random.choice(_ids(clients))
    await in_thread(run.server.ask, "CLIENT", "KILL", "ID", number, "SKIPME", "yes")
    return "CLIENT KILL ID"


def _ids(clients: object) -> list[str]:
    if isinstance(clients, bytes):
        clients = clients.decode()
    if isinstance(clients, str):
        return [line.split("id=", 1)[1].split(" ", 1)[0] for line in clients.splitlines() if line]
    assert isinstance(clients, list)  # redis-py has parsed it
    return [str(client["id"]) for client in clients]
