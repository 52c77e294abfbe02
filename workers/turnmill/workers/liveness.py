"""A worker's sign of life, from a thread: a tool that blocks the event loop must not cost the worker its lease.

The liveness key is set before the first read and refreshed after that. What the event loop asks here is whether the
worker's claim to what it read was ever in doubt (a freeze, a clock jump, a lost engine): then it must look at what it
still owns before it starts anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from turnmill.protocol.errors import EngineUnavailable

RETRY_SECONDS = 0.2


class Liveness:
    """The heartbeat thread of one worker process."""

    def __init__(
        self,
        url: str,
        alive_keys: Sequence[str],
        liveness_seconds: float,
        heartbeat_seconds: float,
        registration: tuple[str, str, Callable[[], bytes]],
    ) -> None:
        """`registration` is the workers' registry, this worker's id, and what to write there."""
        self._url = url
        self._alive_keys = list(alive_keys)
        self._liveness_seconds = liveness_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._registration = registration
        self._stop = threading.Event()
        self._first = threading.Event()
        self._valid_until = 0.0
        self._lapses = 0
        self._thread = threading.Thread(target=self._run, name="turnmill-heartbeat", daemon=True)

    def start(self, timeout_seconds: float = 10.0) -> None:
        """Returns when the first beat is written. Raises `EngineUnavailable` where it is not."""
        self._thread.start()
        if not self._first.wait(timeout_seconds):
            self._stop.set()
            raise EngineUnavailable(f"no heartbeat could be written within {timeout_seconds:g} s")

    @property
    def lapses(self) -> int:
        """How often the liveness ran out. Compare before and after a read: a difference puts its entries in doubt."""
        return self._lapses + (time.monotonic() > self._valid_until)

    @property
    def is_valid(self) -> bool:
        return time.monotonic() <= self._valid_until

    def lapses_in(self, _partition: int) -> int:
        """The same for what was read from one partition."""
        return self.lapses

    def is_valid_in(self, _partition: int) -> bool:
        return self.is_valid

    def stop(self) -> None:
        """Take the sign of life away, so that what is left is reclaimed soon."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        client = redis.Redis.from_url(
            self._url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=self._liveness_seconds / 3,
            socket_connect_timeout=2.0,
        )
        try:
            while not self._stop.is_set():
                try:
                    self._beat(client)
                    pause = self._heartbeat_seconds
                except (redis.RedisError, OSError):
                    pause = RETRY_SECONDS
                self._stop.wait(pause)
            self._leave(client)
        finally:
            client.close()

    def _beat(self, client: redis.Redis) -> None:
        asked_at = time.monotonic()
        registry, worker_id, describe = self._registration
        lifetime_ms = int(self._liveness_seconds * 1000)
        with client.pipeline(transaction=False) as pipeline:
            for key in self._alive_keys:
                pipeline.set(key, b"1", px=lifetime_ms)
            pipeline.hset(registry, worker_id, describe())
            replies = pipeline.execute(raise_on_error=False)
            if any(isinstance(reply, OutOfMemoryError) for reply in replies):
                # An engine without room takes nothing new, and lets a sign of life that is there last longer.
                for key in self._alive_keys:
                    pipeline.pexpire(key, lifetime_ms)
                if not all(pipeline.execute()):
                    raise OutOfMemoryError("no sign of life can be written")
                replies = []
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        if self._valid_until and asked_at > self._valid_until:
            self._lapses += 1
        self._valid_until = asked_at + self._liveness_seconds
        self._first.set()

    def _leave(self, client: redis.Redis) -> None:
        registry, worker_id, _ = self._registration
        try:
            client.delete(*self._alive_keys)
            client.hdel(registry, worker_id)
        except (redis.RedisError, OSError):
            return  # the keys expire by themselves
