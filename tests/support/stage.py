"""A namespace under test: a client, a plain Redis client, the processes, and looks at what they left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio

from turnmill.protocol.codec import EVENT_CODEC
from turnmill.protocol.content import Message
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.protocol.keys import Keys
from turnmill.protocol.settings import load_settings
from turnmill.runtime.client import Client, open_client
from turnmill.runtime.turn import Turn
from turnmill.workers.providers.scripted import history_fault

from .processes import Processes
from .waiting import wait_until_async

SHORT = {"lease_seconds": 1.5, "liveness_seconds": 1.5, "heartbeat_seconds": 0.4}
"""Times as short as a loaded machine of two cores allows."""
PATIENCE_SECONDS = 40.0
"""How long a condition may take that has no other deadline; a healthy run needs a tenth of it."""
APP = "support.crash_app"


def told(*steps: list[dict[str, Any]], answer: str = "all done", delay: float = 0.0) -> str:
    """A message for the model `scripted:plan`; `delay` seconds pass between two of its events."""
    return json.dumps({"steps": list(steps), "answer": answer, "delay": delay})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": {"value": name, **arguments}}


class Stage:
    """What a test of processes works with."""

    def __init__(self, client: Client, plain: redis.asyncio.Redis, processes: Processes) -> None:
        self.client = client
        self.redis = plain
        self.processes = processes
        self.keys: Keys = client.keys
        self._play = f"{client.keys.prefix}-play:"

    async def open(self, gate: str) -> None:
        await self.redis.set(f"{self._play}open:{gate}", 1)

    async def reached(self, gate: str, times: int = 1) -> None:
        """Wait until a tool or model has come to its gate."""

        async def there() -> bool:
            return int(await self.redis.get(f"{self._play}reached:{gate}") or 0) >= times

        await wait_until_async(there, PATIENCE_SECONDS)

    async def effects(self, turn: Turn) -> dict[str, int]:
        """What each attempt at each call of a turn did: `2.0|1` is attempt 1 of the first call of step 2."""
        counts = await self.redis.hgetall(f"{self._play}effects")
        wanted = f"{turn.id}/"
        return {
            field.decode().removeprefix(wanted): int(count)
            for field, count in counts.items()
            if field.decode().startswith(wanted)
        }

    async def asked(self, session_id: str) -> list[dict[str, Any]]:
        """What a model that records it (`apps.offices`) was asked in a session, request by request."""
        return [json.loads(entry) for entry in await self.redis.lrange(f"{self._play}asked:{session_id}", 0, -1)]

    async def noted(self) -> list[Any]:
        """What hooks wrote down, in its order."""
        return [json.loads(entry) for entry in await self.redis.lrange(f"{self._play}noted", 0, -1)]

    async def event(self, turn: Turn, kind: str, **fields: Any) -> Any:
        """Wait for an event of a turn with these fields; the turn must not end before."""
        async for event in turn.events():
            if event.type == kind and all(getattr(event, name) == value for name, value in fields.items()):
                return event
        raise AssertionError(f"turn {turn.id} ended without {kind} {fields}")

    async def counter(self, name: str) -> int:
        """A counter of refused and dropped messages, over all partitions."""
        values = [int(await self.redis.hget(keys.stats, name) or 0) for keys in self.keys.partitions]
        return sum(values)

    async def told_events(self, turn_id: str) -> list[tuple[int, Any]]:
        """The channel as it stands in the engine."""
        entries = await self.redis.xrange(self.keys.of_turn(turn_id).events(turn_id))
        return [
            (int(entry_id.split(b"-")[1]), EVENT_CODEC.decode(fields[b"t"], fields[b"d"]))
            for entry_id, fields in entries
        ]

    async def assert_sound(self, turn_id: str) -> list[Any]:
        """What must hold for any turn that has ended, whatever happened to it. Returns its events."""
        numbered = await self.told_events(turn_id)
        problems = channel_problems(numbered)
        assert problems == [], f"{turn_id}: {problems}"
        return [event for _, event in numbered]

    async def assert_history(self, session_id: str) -> list[Message]:
        messages = await self.client.transcript(session_id)
        assert history_fault(messages) is None, messages
        return messages

    async def assert_idle(self) -> None:
        """Every queue is empty, and nothing is pending."""

        async def left() -> bool:
            return not await self.leftovers()

        try:
            await wait_until_async(left, PATIENCE_SECONDS)
        except AssertionError:
            raise AssertionError(f"left behind: {await self.leftovers()}") from None

    async def leftovers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keys in self.keys.partitions:
            queues = [keys.base + name.decode() for name in await self.redis.smembers(keys.queues)]
            for stream in (keys.inbox, keys.results, *queues):
                if not await self.redis.exists(stream):
                    continue
                groups = await self.redis.xinfo_groups(stream)
                pending = sum(group["pending"] for group in groups)
                length = await self.redis.xlen(stream)
                if length or pending:
                    found[stream] = {"length": length, "pending": pending}
        return found

    async def dead_letters(self) -> list[dict[bytes, bytes]]:
        found: list[dict[bytes, bytes]] = []
        for keys in self.keys.partitions:
            found += [fields for _, fields in await self.redis.xrange(keys.dead)]
        return found


def channel_problems(numbered: list[tuple[int, Any]]) -> list[str]:
    """What is wrong with a finished turn's channel."""
    problems = []
    numbers = [number for number, _ in numbered]
    events = [event for _, event in numbered]
    kinds = Counter(event.type for event in events)
    if numbers != list(range(1, len(numbers) + 1)):
        problems.append(f"numbers are not 1..{len(numbers)}: {numbers}")
    terminal = sum(kinds[kind] for kind in TERMINAL_EVENT_TYPES)
    if terminal != 1 or events[-1].type not in TERMINAL_EVENT_TYPES:
        problems.append(f"{terminal} terminal events, the last event is {events[-1].type if events else None}")
    results = [(event.step_number, event.index) for event in events if event.type == "tool_result"]
    if results != sorted(set(results)):
        problems.append(f"results are not once each in call order: {results}")
    finished = [(event.step_number, event.index) for event in events if event.type == "tool_execution.finished"]
    if len(finished) != len(set(finished)):
        problems.append(f"a call has finished twice: {finished}")
    return problems


@asynccontextmanager
async def open_stage(
    redis_url: str, namespace: str, directory: Path, *, partitions: int = 4, **settings: Any
) -> AsyncIterator[Stage]:
    """A fresh namespace with short times. Nothing is started yet; everything is ended at the end."""
    values = {**SHORT, "partitions": partitions, **settings}
    plain = redis.asyncio.Redis.from_url(redis_url)
    loaded = load_settings(redis_url=redis_url, namespace=namespace, **values)
    try:
        async with open_client(redis_url, loaded) as client:
            with Processes(redis_url, namespace, directory, values) as processes:
                yield Stage(client, plain, processes)
    finally:
        await plain.aclose()
