"""What a namespace does right now, in one look that costs the engine little however much there is to do.

Rates come from the lifecycle feed, of the last ten seconds. Live turns are found by their timers: every live turn has one,
for its earliest deadline. The turns that are shown are the oldest among those whose deadline comes first, which in a small
namespace are all of them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import Keys, PartitionKeys
from turnmill.protocol.settings import Settings

from .dead_letters import count_letters
from .fleet import WorkerEntry, list_processes
from .queues import QueueReport, if_allowed, read_queues
from .state import SessionState, TurnPhase, decode_state

WINDOW_SECONDS = 10
_PAGE = 1000
_PAGES_MAX = 20
_TIMERS_MAX = 400
_STARTED, _FINISHED, _FAILED = "turn.started", "turn.finished", "turn.failed"


class LiveTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that has not ended. `doing` names its calls that are under way."""

    turn_id: str
    session_id: str
    agent_id: str
    phase: str
    step: int
    age_seconds: float
    doing: list[str] = []


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own figures; None where it does not tell."""

    address: str
    version: str | None = None
    latency_ms: float = 0.0
    memory_bytes: int | None = None
    memory_bytes_max: int | None = None
    operations_per_second: int | None = None
    clients: int | None = None


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """One look. Rates are per second, over the last `WINDOW_SECONDS`; `live_turns` is at least that many unless it
    `is_exact`."""

    at: float
    started_per_second: float
    finished_per_second: float
    failed_per_second: float
    live_turns: int
    live_turns_is_exact: bool
    suspended_turns: int
    dead_letters: int
    slowest: list[LiveTurn]
    queues: list[QueueReport]
    processes: list[WorkerEntry]
    engine: EngineReport

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        built["queues"] = [queue.to_dict() for queue in self.queues]
        return built


class ActivityMonitor:
    """Looks again and again; the feed is read from where the look before ended."""

    def __init__(self, engine: Engine, keys: Keys, settings: Settings) -> None:
        self._engine = engine
        self._keys = keys
        self._settings = settings
        self._cursors: dict[int, bytes] = {}
        self._counts: dict[int, Counter[str]] = {}
        self._since_ms = 0

    async def look(self, shown: int = 10) -> Activity:
        """The state now, with up to `shown` of the slowest live turns."""
        asked_at = time.perf_counter()
        seconds, microseconds = await self._engine.call("TIME")
        latency_ms = (time.perf_counter() - asked_at) * 1000
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        await asyncio.gather(*[self._read_feed(part, now_ms) for part in self._keys.partitions])
        found = await asyncio.gather(*[self._live_in(part) for part in self._keys.partitions])
        live = [item for part, _ in found for item in part]
        timers = [count for _, count in found]
        is_exact = all(count <= self._timers_max for count in timers)
        rates = self._rates(now_ms)
        return Activity(
            at=now_ms / 1000,
            started_per_second=rates[_STARTED],
            finished_per_second=rates[_FINISHED],
            failed_per_second=rates[_FAILED],
            # With a session_ttl idle sessions have timers too.
            live_turns=len(live) if is_exact or self._settings.session_ttl is not None else sum(timers),
            live_turns_is_exact=is_exact,
            suspended_turns=sum(state.turn.phase is TurnPhase.SUSPENDED for _, state in live if state.turn),
            dead_letters=await count_letters(self._engine, self._keys),
            slowest=heapq.nsmallest(shown, _described(live, now_ms), key=lambda turn: -turn.age_seconds),
            queues=await read_queues(self._engine, self._keys, self._settings),
            processes=await list_processes(self._engine, self._keys, self._settings),
            engine=await self._read_engine(latency_ms),
        )

    # ---- the feed

    async def _read_feed(self, part: PartitionKeys, now_ms: int) -> None:
        start = now_ms - WINDOW_SECONDS * 1000
        cursor = self._cursors.get(part.partition)
        if cursor is None:
            first = await if_allowed(self._engine.call("XRANGE", part.feed, "-", "+", "COUNT", 1), [])
            begun = int(first[0][0].partition(b"-")[0]) if first else start
            self._since_ms = max(self._since_ms, min(begun, now_ms - 1000))
            cursor = b"%d-0" % start
        for _ in range(_PAGES_MAX):
            asked = self._engine.call("XRANGE", part.feed, b"(" + cursor, "+", "COUNT", _PAGE)
            entries = await if_allowed(asked, [])
            for entry_id, fields in entries:
                second = int(entry_id.partition(b"-")[0]) // 1000
                self._counts.setdefault(second, Counter())[fields[1].decode()] += 1
                cursor = entry_id
            if len(entries) < _PAGE:
                break
        self._cursors[part.partition] = cursor

    def _rates(self, now_ms: int) -> dict[str, float]:
        now = now_ms // 1000
        for second in [each for each in self._counts if each <= now - WINDOW_SECONDS]:
            del self._counts[second]
        span = min(WINDOW_SECONDS, max(1.0, (now_ms - self._since_ms) / 1000))
        total: Counter[str] = sum(self._counts.values(), Counter())
        return {kind: total[kind] / span for kind in (_STARTED, _FINISHED, _FAILED)}

    # ---- live turns

    @property
    def _timers_max(self) -> int:
        return max(5, _TIMERS_MAX // len(self._keys.partitions))

    async def _live_in(self, part: PartitionKeys) -> tuple[list[tuple[str, SessionState]], int]:
        """Sessions with a live turn among those with the earliest timers, and the number of all timers."""
        counting = self._engine.call("ZCARD", part.timers)
        names = await if_allowed(self._engine.call("ZRANGE", part.timers, 0, self._timers_max - 1), [])
        sessions = [name.decode() for name in names]
        asked = [if_allowed(self._engine.call("HGET", part.session(name), "s"), None) for name in sessions]
        records = await asyncio.gather(*asked)
        live = []
        for name, record in zip(sessions, records, strict=True):
            state = _readable(record)
            if state is not None and state.turn is not None:
                live.append((name, state))
        return live, await counting

    # ---- the engine

    async def _read_engine(self, latency_ms: float) -> EngineReport:
        told: bytes = await if_allowed(self._engine.call("INFO"), b"")
        lines = (line.partition(":") for line in told.decode(errors="replace").splitlines())
        facts = {name: value for name, colon, value in lines if colon}

        def number(name: str) -> int | None:
            return int(facts[name]) if facts.get(name, "").isdigit() else None

        return EngineReport(
            address=self._engine.address,
            version=facts.get("valkey_version") or facts.get("redis_version"),
            latency_ms=latency_ms,
            memory_bytes=number("used_memory"),
            memory_bytes_max=number("maxmemory") or None,
            operations_per_second=number("instantaneous_ops_per_sec"),
            clients=number("connected_clients"),
        )


def _readable(record: bytes | None) -> SessionState | None:
    try:
        return decode_state(record) if record else None
    except (msgspec.DecodeError, ValueError):
        return None  # of a newer version


def _described(live: list[tuple[str, SessionState]], now_ms: int) -> list[LiveTurn]:
    described = []
    for session_id, state in live:
        turn = state.turn
        assert turn is not None
        doing = [call.tool_call.name for call in turn.calls if call.result is None and turn.phase is TurnPhase.TOOLS]
        described.append(
            LiveTurn(
                turn_id=turn.turn_id,
                session_id=session_id,
                agent_id=turn.agent_id,
                phase=turn.phase.value,
                step=turn.step,
                age_seconds=max(0.0, (now_ms - turn.started_ms) / 1000),
                doing=doing,
            )
        )
    return described
