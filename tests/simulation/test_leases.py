"""Leases on a virtual clock: what a partition's owner believes while its connection and its take-over fail."""

from __future__ import annotations

import asyncio
import random

import pytest

from support.simulation.actors import Actor, bury
from support.simulation.environment import virtual
from support.simulation.loop import VirtualLoop
from support.simulation.network import Network, SimulatedEngine
from support.simulation.server import Server, Watch
from turnmill.protocol.keys import Keys
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.streams import RENEW_LEASE
from turnmill.runtime.leases import PartitionLeases

LEASE_SECONDS = 1.0


class Renewals(Watch):
    """Notes when the server runs the script that renews a lease."""

    def __init__(self) -> None:
        self.ran = asyncio.Event()

    def before_script(self, sha: bytes, keys: list[bytes], arguments: list[bytes]) -> None:
        if sha == RENEW_LEASE._sha.encode():
            self.ran.set()


@pytest.mark.parametrize("seed", range(5))
def test_a_partition_that_could_not_be_taken_over_is_given_up(seed: int) -> None:
    """A renewal that was under way as the take-over failed must not hold the lease for ever, without anybody who reads."""
    loop = VirtualLoop()
    with virtual(loop, seed):
        renewals = Renewals()
        network = Network(loop, Server(loop, renewals), random.Random(seed))
        actor = Actor("owner", "coordinator", network)
        try:
            readable = loop.run_until_complete(actor.spawn(_own_in_the_end(network, renewals)))
        finally:
            bury([actor])
    assert readable == [0]


async def _own_in_the_end(network: Network, renewals: Renewals) -> list[int]:
    engine = await SimulatedEngine(network, 1.0).connect()
    attempts = 0

    async def take_over(_: int) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await renewals.ran.wait()  # its reply is on the way
            raise RuntimeError("not now")

    async def hand_back(_: int) -> None:
        return

    leases = PartitionLeases(engine, Keys("x", 1), "owner", LEASE_SECONDS, ServerClock(engine), take_over, hand_back)
    until = asyncio.get_running_loop().time() + 4 * LEASE_SECONDS
    while asyncio.get_running_loop().time() < until and not leases.readable(0.0):
        await leases.beat()
        await asyncio.sleep(LEASE_SECONDS / 5)
    return leases.readable(0.0)
