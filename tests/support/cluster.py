"""A real cluster on this machine: three primaries and three replicas on ports of loopback, for tests and scripts/cluster.

    with Cluster(directory) as cluster:
        cluster.url                                  # any node
        cluster.move_slot(slot, cluster.primaries()[1])
        cluster.fail_over(node); cluster.kill(node); cluster.restart(node)

It is put together with commands (MEET, ADDSLOTSRANGE, REPLICATE), as `redis-cli --cluster create` does it, and each node
is the server that the embedded mode would run.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from turnmill.protocol.slots import SLOTS
from turnmill.runtime import embedded_launcher
from turnmill.runtime.embedded import server_binary

from .waiting import wait_until

PRIMARIES = 3
NODE_TIMEOUT_MS = 1000
SETTLE_SECONDS = 20.0
_BUS = 10_000
"""The port of the cluster's own bus is so much above a node's port."""
_HOST = "127.0.0.1"


@dataclass(eq=False)
class ClusterNode:
    """One server. `process` is None where another process started it."""

    port: int
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    id: str = ""

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(host=_HOST, port=self.port, socket_timeout=5)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ask(self, *command: Any) -> Any:
        with self.client as client:
            return _plain(client, *command)


def _plain(client: redis.Redis, *command: Any) -> Any:
    """A command and its reply as it comes, without redis-py's views of it."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*command)
        return connection.read_response()
    finally:
        client.connection_pool.release(connection)


@dataclass
class Cluster:
    """As a context manager it starts a cluster and ends it."""

    directory: Path
    first_port: int | None = None
    owned: bool = True
    """Whether the servers end with this process."""
    nodes: list[ClusterNode] = field(default_factory=list)
    _launching: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.nodes[0].port}/0"

    @property
    def urls(self) -> str:
        """All nodes, so that a process finds the cluster whichever of them is down."""
        return ",".join(f"redis://{_HOST}:{node.port}/0" for node in self.nodes)

    def start(self) -> None:
        ports = free_ports(2 * PRIMARIES, self.first_port)
        self.nodes = [ClusterNode(port, self.directory / str(port)) for port in ports]
        for node in self.nodes:
            self.launch(node)
        for node in self.nodes:
            wait_until(lambda node=node: _answers(node), SETTLE_SECONDS)  # type: ignore[misc]
            node.id = node.ask("CLUSTER", "MYID").decode()
        self._put_together()

    def launch(self, node: ClusterNode) -> None:
        """From a thread that lasts: the kernel's signal, which ends an owned server with its owner, is about the thread."""
        node.directory.mkdir(parents=True, exist_ok=True)
        node.process = self._launching.submit(self._launch, node).result()

    def _launch(self, node: ClusterNode) -> subprocess.Popen[bytes]:
        owner = os.getpid() if self.owned else embedded_launcher.NO_OWNER
        launcher = [sys.executable, "-I", "-S", embedded_launcher.__file__, str(node.directory), str(owner)]
        with (node.directory / "server.log").open("ab") as log:
            return subprocess.Popen(
                launcher + _command(node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _put_together(self) -> None:
        primaries, replicas = self.nodes[:PRIMARIES], self.nodes[PRIMARIES:]
        share = SLOTS // PRIMARIES
        for number, node in enumerate(primaries):
            last = SLOTS - 1 if number == PRIMARIES - 1 else (number + 1) * share - 1
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.ask("CLUSTER", "ADDSLOTSRANGE", number * share, last)
        for one in self.nodes:
            for other in self.nodes:
                if one is not other:
                    one.ask("CLUSTER", "MEET", _HOST, other.port)
        for node in self.nodes:
            wait_until(lambda node=node: _knows(node, len(self.nodes)), SETTLE_SECONDS)  # type: ignore[misc]
        for primary, replica in zip(primaries, replicas, strict=True):
            replica.ask("CLUSTER", "REPLICATE", primary.id)
        self.await_whole(replicated=True)

    def await_whole(self, *, replicated: bool = False) -> None:
        """Until all living nodes say that every slot has an owner, and its replicas follow."""

        def whole() -> bool:
            alive = [node for node in self.nodes if node.process is None or node.is_alive]
            states = [_information(node.ask("CLUSTER", "INFO")) for node in alive]
            if any(state.get("cluster_state") != "ok" for state in states):
                return False
            following = [_information(node.ask("INFO", "replication")) for node in alive]
            if any(each["role"] == "slave" and each["master_link_status"] != "up" for each in following):
                return False
            return not replicated or all(
                each["role"] == "slave" or each["connected_slaves"] != "0" for each in following
            )

        wait_until(whole, SETTLE_SECONDS)

    # ---- what happens to a cluster

    def primaries(self) -> list[ClusterNode]:
        """The nodes that own slots now, by the map of one that is alive."""
        return [self._node(port) for port in sorted({int(primary[1]) for _, _, primary, *_ in self._slots()})]

    def owner_of(self, slot: int) -> ClusterNode:
        for first, last, primary, *_ in self._slots():
            if first <= slot <= last:
                return self._node(int(primary[1]))
        raise AssertionError(f"slot {slot} has no owner")

    def replica_of(self, primary: ClusterNode) -> ClusterNode:
        for node in self.nodes:
            if node is not primary and node.is_alive:
                information = _information(node.ask("INFO", "replication"))
                if information["role"] == "slave" and int(information["master_port"]) == primary.port:
                    return node
        raise AssertionError(f"{primary.port} has no replica")

    def move_slot(self, slot: int, target: ClusterNode, *, keys_at_once: int = 5) -> int:
        """Move a slot key by key, as `redis-cli --cluster reshard` does; the number of keys moved."""
        source, moved = self.owner_of(slot), 0
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, keys_at_once):
            source.ask("MIGRATE", _HOST, target.port, "", 0, 5000, "KEYS", *keys)
            moved += len(keys)
        for node in (target, source, *self.primaries()):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        return moved

    def move_slot_whole(self, slot: int, target: ClusterNode) -> None:
        """The same as one step, as Valkey 9 does it."""
        self.owner_of(slot).ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
        wait_until(lambda: self.owner_of(slot) is target, SETTLE_SECONDS)

    def fail_over(self, primary: ClusterNode) -> ClusterNode:
        """Its replica takes over in an orderly way; returns the new primary."""
        replica = self.replica_of(primary)
        replica.ask("CLUSTER", "FAILOVER")
        self.await_promotion(replica)
        self.await_whole()
        return replica

    def await_promotion(self, replica: ClusterNode) -> None:
        wait_until(lambda: _information(replica.ask("INFO", "replication"))["role"] == "master", SETTLE_SECONDS)

    def freeze(self, node: ClusterNode) -> None:
        assert node.process is not None
        node.process.send_signal(signal.SIGSTOP)

    def thaw(self, node: ClusterNode) -> None:
        assert node.process is not None
        node.process.send_signal(signal.SIGCONT)

    def kill(self, node: ClusterNode) -> None:
        """SIGKILL, as a machine that goes down."""
        assert node.process is not None
        node.process.kill()
        node.process.wait()

    def restart(self, node: ClusterNode) -> None:
        """It comes back, as a replica where it was taken over from."""
        self.launch(node)
        wait_until(lambda: _answers(node), SETTLE_SECONDS)

    def stop(self) -> None:
        for node in self.nodes:
            if node.is_alive:
                assert node.process is not None
                node.process.kill()
        for node in self.nodes:
            if node.process is not None:
                node.process.wait()
        self._launching.shutdown()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _slots(self) -> list[Any]:
        for node in self.nodes:
            if node.process is None or node.is_alive:
                slots: list[Any] = node.ask("CLUSTER", "SLOTS")
                return slots
        raise AssertionError("no node is alive")

    def _node(self, port: int) -> ClusterNode:
        return next(node for node in self.nodes if node.port == port)


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Ports that nobody has, with the ports of the bus above them."""
    if first is not None:
        return list(range(first, first + count))
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        if port not in found and _is_free(port) and _is_free(port + _BUS):
            found.append(port)
    return found


def stop_by_files(directory: Path) -> int:
    """End the servers whose pids stand in a directory's locks; the number ended."""
    ended = 0
    for lock in directory.glob(f"*/{embedded_launcher.LOCK_NAME}"):
        try:
            os.kill(int(lock.read_text()), signal.SIGTERM)
            ended += 1
        except (ValueError, ProcessLookupError):
            continue
    return ended


def _command(node: ClusterNode) -> list[str]:
    return [
        server_binary(),
        *("--port", str(node.port), "--bind", _HOST, "--dir", str(node.directory), "--logfile", ""),
        *("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
        *(
            "--cluster-replica-validity-factor",
            "0",
            "--repl-diskless-sync-delay",
            "0",
            "--repl-ping-replica-period",
            "1",
        ),
        *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"),
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind((_HOST, port))
        except OSError:
            return False
    return True


def _answers(node: ClusterNode) -> bool:
    try:
        return bool(node.ask("PING") == b"PONG")
    except redis.RedisError:
        return False


def _knows(node: ClusterNode, count: int) -> bool:
    lines = node.ask("CLUSTER", "NODES").decode().splitlines()
    return len(lines) == count and not any("handshake" in line for line in lines)


def _information(reply: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in reply.decode().split("\r\n") if ":" in line)
