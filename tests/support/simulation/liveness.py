"""A worker's sign of life as a task of its heartbeat thread: the rules of `Liveness`, without a thread."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from turnmill.protocol.errors import EngineError, EngineUnavailable
from turnmill.workers.liveness import Liveness

from .loop import THREAD
from .network import SimulatedEngine

RETRY_SECONDS = 0.2
HEART_OF_ITS_OWN = True
"""A mutation makes the heartbeat share the event loop with what it speaks for."""


class SimulatedLiveness(Liveness):
    """`start` and `stop` are coroutines here: the virtual loop awaits what would run in a thread."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._stopping = asyncio.Event()
        self._written = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def start(self, timeout_seconds: float = 10.0) -> None:  # type: ignore[override]
        thread = THREAD.get()
        assert thread is not None
        actor = thread.actor
        loop = asyncio.get_running_loop()
        self._beating = loop.create_task(
            self._keep_beating(), context=(actor.heart if HEART_OF_ITS_OWN else actor.main).context.copy()
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._written.wait()
        except TimeoutError:
            self._stopping.set()
            raise EngineUnavailable(f"no heartbeat could be written within {timeout_seconds:g} s") from None

    async def stop(self) -> None:  # type: ignore[override]
        self._stopping.set()
        if self._beating is not None:
            await asyncio.wait({self._beating}, timeout=5.0)

    async def _keep_beating(self) -> None:
        thread = THREAD.get()
        assert thread is not None
        network = thread.actor.network
        link: Any = None
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(2.0 + self._liveness_seconds / 3):
                    if link is None or not link.is_open:
                        link = await SimulatedEngine(network, 60.0).open_link()
                async with asyncio.timeout(self._liveness_seconds / 3):
                    await self._write(link)
                pause = self._heartbeat_seconds
            except (EngineError, TimeoutError):
                if link is not None:
                    link.close()
                pause = RETRY_SECONDS
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        await self._go(link)

    async def _write(self, link: Any) -> None:
        asked_at = time.monotonic()
        registry, worker_id, describe = self._registration
        calls = [link.call("SET", key, b"1", "PX", int(self._liveness_seconds * 1000)) for key in self._alive_keys]
        calls.append(link.call("HSET", registry, worker_id, describe()))
        await asyncio.gather(*calls)
        if self._valid_until and asked_at > self._valid_until:
            self._lapses += 1
        self._valid_until = asked_at + self._liveness_seconds
        self._written.set()

    async def _go(self, link: Any) -> None:
        registry, worker_id, _ = self._registration
        try:
            if link is not None and link.is_open:
                await asyncio.gather(link.call("DEL", *self._alive_keys), link.call("HDEL", registry, worker_id))
                link.close()
        except EngineError:
            return
