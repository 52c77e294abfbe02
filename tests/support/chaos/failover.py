"""The primary is killed under load and its replica takes over; the proxy leads clients there.

On one machine a replica is hardly ever behind. So replication goes through a proxy of its own that holds it up: what the
primary took in the last moments is lost with it, as on a network.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support.proxy import Proxy

from .server import Server, in_thread

if TYPE_CHECKING:
    from .run import Run

REPLICATION_DELAY_SECONDS = 0.05


async def add_replica(run: Run) -> None:
    """The primary gets a replica; while it catches up nothing is held up."""
    number = len(list(run.directory.glob("replica-*")))
    replica = Server(run.directory / f"replica-{number}")
    await in_thread(replica.start)
    run.replica = replica
    if run.replication is not None:
        await run.replication.close()
    run.replication = await Proxy("127.0.0.1", run.server.port).start()
    await in_thread(replica.follow, run.replication.port)
    run.replication.delay_seconds = REPLICATION_DELAY_SECONDS


async def fail_over(run: Run) -> str:
    primary, replica = run.server, run.replica
    assert replica is not None and run.proxy is not None
    await in_thread(primary.kill)
    await asyncio.sleep(run.random.uniform(0.0, 1.0))
    await in_thread(replica.promote)
    run.proxy.lead_to(replica.port)
    run.server = replica
    await add_replica(run)
    return "failover"
