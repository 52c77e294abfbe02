"""A worker's sign of life on a cluster: its key in each partition lives and fails with that partition's shard.

So each partition has a validity of its own. A shard that is down must not cost the worker what it holds in others: nodes
that did not answer come last in the next beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from turnmill.protocol.connection import Argument, Engine
from turnmill.protocol.link import split_urls, url_at
from turnmill.protocol.slots import Address, parse_slots, slot_of

from .liveness import RETRY_SECONDS, Liveness

_TIMEOUT_SECONDS_MAX = 1.0


def liveness(
    engine: Engine,
    alive_keys: Sequence[str],
    liveness_seconds: float,
    heartbeat_seconds: float,
    registration: tuple[str, str, Callable[[], bytes]],
) -> Liveness:
    """The heartbeat of a worker on this engine. `alive_keys` has one key for each partition, in their order."""
    kind = ClusterLiveness if engine.is_cluster else Liveness
    return kind(engine.url, alive_keys, liveness_seconds, heartbeat_seconds, registration)


class ClusterLiveness(Liveness):
    """The heartbeat thread of one worker process."""

    def __init__(
        self,
        url: str,
        alive_keys: Sequence[str],
        liveness_seconds: float,
        heartbeat_seconds: float,
        registration: tuple[str, str, Callable[[], bytes]],
    ) -> None:
        super().__init__(url, alive_keys, liveness_seconds, heartbeat_seconds, registration)
        self._valid = [0.0] * len(alive_keys)
        self._lapsed = [0] * len(alive_keys)

    def lapses_in(self, partition: int) -> int:
        return self._lapsed[partition] + (time.monotonic() > self._valid[partition])

    def is_valid_in(self, partition: int) -> bool:
        return time.monotonic() <= self._valid[partition]

    def _run(self) -> None:
        nodes = _Nodes(self._url, min(_TIMEOUT_SECONDS_MAX, self._liveness_seconds / 6))
        try:
            while not self._stop.is_set():
                self._stop.wait(self._heartbeat_seconds if self._beat_all(nodes) else RETRY_SECONDS)
            registry, worker_id, _ = self._registration
            nodes.run([*[("DEL", key) for key in self._alive_keys], ("HDEL", registry, worker_id)])
        finally:
            nodes.close()

    def _beat_all(self, nodes: _Nodes) -> bool:
        """Whether every partition has a fresh sign of life."""
        registry, worker_id, describe = self._registration
        lifetime_ms = int(self._liveness_seconds * 1000)
        commands: list[tuple[Argument, ...]] = [("SET", key, b"1", "PX", lifetime_ms) for key in self._alive_keys]
        # What is valid from when on: each was asked for after this moment.
        asked_at = time.monotonic()
        done = nodes.run([*commands, ("HSET", registry, worker_id, describe())])
        for partition, is_done in enumerate(done[: len(commands)]):
            if is_done:
                if self._valid[partition] and asked_at > self._valid[partition]:
                    self._lapsed[partition] += 1
                self._valid[partition] = asked_at + self._liveness_seconds
        if all(done[: len(commands)]):
            self._valid_until = asked_at + self._liveness_seconds
            self._first.set()
        return all(done)


class _Nodes:
    """Blocking connections to the primaries, for short idempotent commands from a thread."""

    def __init__(self, urls: str, timeout_seconds: float) -> None:
        self._urls = split_urls(urls)
        self._timeout_seconds = timeout_seconds
        self._map: list[tuple[int, int, Address]] = []
        self._clients: dict[Address, redis.Redis] = {}
        self._silent: set[Address] = set()

    def run(self, commands: Sequence[tuple[Argument, ...]]) -> list[bool]:
        """Each on the node of its key, once more where that has moved. Which of them were done."""
        done = [False] * len(commands)
        for _ in range(2):
            by_node: dict[Address | None, list[int]] = {}
            for number, command in enumerate(commands):
                if not done[number]:
                    by_node.setdefault(self._node_of(command[1]), []).append(number)
            for address in sorted(by_node, key=lambda each: each in self._silent):
                numbers = by_node[address]
                replies = self._ask(address, [commands[number] for number in numbers])
                for number, is_done in zip(numbers, replies, strict=True):
                    done[number] = is_done
            if all(done):
                break
            self._read_map()
        return done

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _node_of(self, key: Argument) -> Address | None:
        slot = slot_of(key)
        return next((address for first, last, address in self._map if first <= slot <= last), None)

    def _ask(self, address: Address | None, commands: Sequence[tuple[Argument, ...]]) -> list[bool]:
        if address is None:
            return [False] * len(commands)
        try:
            with self._client(address).pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
                replies = pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError):
            self._silent.add(address)
            return [False] * len(commands)
        self._silent.discard(address)
        return [not isinstance(reply, Exception) for reply in replies]

    def _read_map(self) -> None:
        """As a node tells it that answers."""
        known = sorted({address for _, _, address in self._map}, key=lambda each: each in self._silent)
        for address in [address for address in known if address not in self._silent]:
            with suppress(redis.RedisError, OSError):
                self._map = _slots(self._client(address), address)
                return
        for url in self._urls:
            client = self._connect(url)
            with suppress(redis.RedisError, OSError):
                where = client.connection_pool.connection_kwargs
                self._map = _slots(client, Address(where.get("host", "127.0.0.1"), int(where.get("port", 6379))))
                client.close()
                return
            client.close()

    def _client(self, address: Address) -> redis.Redis:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._connect(url_at(self._urls[0], *address))
        return client

    def _connect(self, url: str) -> redis.Redis:
        return redis.Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=self._timeout_seconds,
            socket_connect_timeout=self._timeout_seconds,
        )


def _slots(client: redis.Redis, asked: Address) -> list[tuple[int, int, Address]]:
    """CLUSTER SLOTS as it comes, without redis-py's own view of it."""
    connection: Any = client.connection_pool.get_connection()
    try:
        connection.send_command("CLUSTER", "SLOTS")
        return parse_slots(connection.read_response(), asked)
    finally:
        client.connection_pool.release(connection)
