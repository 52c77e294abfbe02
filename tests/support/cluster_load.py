"""Turns in flight on a real cluster while slots move and primaries go away; afterwards everything is counted.

It is a run of `support.chaos` whose blows hit the cluster and, now and then, a process. `python -m support.cluster_load` is
behind `scripts/cluster`; a short run is a test.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis.asyncio

from turnmill.protocol.settings import load_settings
from turnmill.protocol.slots import slot_of
from turnmill.runtime.client import open_client

from .chaos import app, process_faults
from .chaos.deployment import SETTINGS, Deployment, Engine
from .chaos.effects import EFFECTS_VARIABLE
from .chaos.report import Plan, Report
from .chaos.run import Run
from .chaos.scenarios import Scenario
from .chaos.server import in_thread
from .cluster import Cluster, ClusterNode, stop_by_files
from .processes import Processes
from .stage import Stage

PARTITIONS = 16
TIMES = {**SETTINGS, "partitions": PARTITIONS}
DIRECTORY = Path(tempfile.gettempdir()) / "turnmill-cluster"
FIRST_PORT = 17_100
FROZEN_SECONDS = 2.0
"""How long a hanging primary goes on hanging when it was replaced: what clients had sent it is given up by then."""

Strike = Callable[[Run], Awaitable[str]]


@asynccontextmanager
async def open_cluster_stage(
    cluster: Cluster, namespace: str, directory: Path, **settings: Any
) -> AsyncIterator[Stage]:
    """A fresh namespace on a cluster. Its processes and clients are told all nodes; nothing is started yet."""
    values = {**settings, "partitions": PARTITIONS}
    plain = redis.asyncio.RedisCluster.from_url(cluster.url)
    loaded = load_settings(redis_url=cluster.urls, namespace=namespace, **values)
    try:
        async with open_client(cluster.urls, loaded) as client:
            with Processes(cluster.urls, namespace, directory, values) as processes:
                yield Stage(client, plain, processes)  # type: ignore[arg-type]
    finally:
        await plain.aclose()


class ClusterFaults:
    """What may happen to the cluster under a run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._one_at_a_time = threading.Lock()
        self.seconds_without_owner: list[float] = []

    async def settle(self, _run: Run) -> None:
        """Until the fault under way is over: a thread is not cancelled with its task."""
        await in_thread(self._one_at_a_time.acquire)
        self._one_at_a_time.release()

    async def move_slot(self, run: Run) -> str:
        """The slot of a partition moves to another primary, key by key."""
        await in_thread(self._alone, lambda: self._move(run, self.cluster.move_slot))
        return "slot moved"

    async def move_slot_whole(self, run: Run) -> str:
        await in_thread(self._alone, lambda: self._move(run, self.cluster.move_slot_whole))
        return "slot moved as a whole"

    def _move(self, run: Run, move: Callable[[int, ClusterNode], object]) -> None:
        slot = slot_of(run.random.choice(run.stage.keys.partitions).base)
        source = self.cluster.owner_of(slot)
        move(slot, run.random.choice([node for node in self.cluster.primaries() if node is not source]))

    async def fail_over(self, run: Run) -> str:
        """A replica takes over from a primary that lives."""

        def hand_over() -> None:
            self.cluster.fail_over(run.random.choice(self.cluster.primaries()))
            self.cluster.await_whole(replicated=True)

        await in_thread(self._alone, hand_over)
        return "failover"

    async def kill_primary(self, run: Run) -> str:
        """A primary dies; its replica takes over when the others agree that it is gone. It comes back as a replica."""

        def kill() -> None:
            dead = run.random.choice(self.cluster.primaries())
            replica, killed_at = self.cluster.replica_of(dead), time.monotonic()
            self.cluster.kill(dead)
            self.cluster.await_promotion(replica)
            self.cluster.await_whole()
            self.seconds_without_owner.append(time.monotonic() - killed_at)
            self.cluster.restart(dead)
            self.cluster.await_whole(replicated=True)

        await in_thread(self._alone, kill)
        return "kill -9 of a primary"

    async def freeze_primary(self, run: Run) -> str:
        """A primary hangs until its replica has taken over, and wakes up as one that was replaced."""

        def freeze() -> None:
            hanging = run.random.choice(self.cluster.primaries())
            replica, frozen_at = self.cluster.replica_of(hanging), time.monotonic()
            self.cluster.freeze(hanging)
            try:
                self.cluster.await_promotion(replica)
                self.seconds_without_owner.append(time.monotonic() - frozen_at)
                time.sleep(FROZEN_SECONDS)
            finally:
                self.cluster.thaw(hanging)
            self.cluster.await_whole(replicated=True)

        await in_thread(self._alone, freeze)
        return "primary frozen"

    def _alone(self, fault: Callable[[], None]) -> None:
        with self._one_at_a_time:
            fault()

    async def anything(self, run: Run) -> str:
        strike: Strike = run.random.choice(
            [
                self.move_slot,
                self.move_slot_whole,
                self.fail_over,
                self.kill_primary,
                self.freeze_primary,
                process_faults.kill,
            ]
        )
        return await strike(run)


async def load(faults: ClusterFaults, directory: Path, plan: Plan, strike: Strike, every: float) -> Report:
    """Turns under blows of `faults`; every turn must give its answer. The effects of its tools are kept in a file."""
    cluster = faults.cluster
    os.environ[EFFECTS_VARIABLE] = str(directory / "effects")
    scenario = Scenario("a cluster", strike, every=every, finish=faults.settle)
    os.environ[app.DEADLINE_VARIABLE] = str(scenario.deadline_seconds)
    namespace = f"cluster-{uuid.uuid4().hex[:8]}"
    async with (
        open_cluster_stage(cluster, namespace, directory, **TIMES) as stage,
        open_client(cluster.urls, stage.client.settings) as readers,
    ):
        nobody: Any = None  # the faults know the servers
        deployed = Deployment(Engine(nobody, namespace, directory, {}), cluster.urls, None, stage)
        return await Run(plan, scenario, deployed, readers)()


# ---- scripts/cluster


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/cluster", description=__doc__.split("\n")[0] if __doc__ else "")
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("start", help="start three primaries and three replicas on loopback; prints the URL")
    start.add_argument("--port", type=int, default=FIRST_PORT, help="of the first node")
    verbs.add_parser("stop", help="stop them, and forget their data")
    loading = verbs.add_parser("load", help="turns on a cluster of its own, under slot moves, failovers and kills")
    loading.add_argument("--turns", type=int, default=1000)
    loading.add_argument("--in-flight", type=int, default=48)
    loading.add_argument("--seconds", type=float, default=600.0, help="start no turn after that")
    loading.add_argument("--every", type=float, default=3.0, help="seconds between two faults, on average")
    loading.add_argument(
        "--fault",
        choices=["anything", "move_slot", "move_slot_whole", "fail_over", "kill_primary", "freeze_primary", "none"],
        default="anything",
    )
    loading.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    match options.verb:
        case "start":
            cluster = Cluster(DIRECTORY, options.port, owned=False)
            cluster.start()
            print(cluster.url)
            return 0
        case "stop":
            print(f"{stop_by_files(DIRECTORY)} nodes stopped")
            shutil.rmtree(DIRECTORY, ignore_errors=True)
            return 0
        case _:
            return _load(options)


async def _nothing(_run: Run) -> str:
    await asyncio.sleep(3600)
    return "nothing"


def _load(options: argparse.Namespace) -> int:
    print(f"seed {options.seed}", flush=True)
    plan = Plan("cluster", options.turns, options.in_flight, options.seconds, None, options.seed)
    with _scratch() as directory, Cluster(directory / "cluster") as cluster:
        faults = ClusterFaults(cluster)
        strike = _nothing if options.fault == "none" else getattr(faults, options.fault)
        report = asyncio.run(load(faults, directory, plan, strike, options.every))
    print(report)
    gaps = faults.seconds_without_owner
    if gaps:
        print(f"without a primary for {min(gaps):.2f} to {max(gaps):.2f} s behind a kill")
    return 0 if report.is_sound else 1


@contextmanager
def _scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
