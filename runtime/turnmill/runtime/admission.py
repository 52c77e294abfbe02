"""Which new turns a partition takes: not more than its pools and tenants may have waiting.

A refused turn is told at once, with the time after which another try makes sense; nothing that was accepted is dropped.
Sub-turns belong to turns that run, so they are always taken. Limits are the namespace's, shared out evenly among its
partitions.

How many turns a tenant has waiting or running stands in the partition's load, changed by the commits that make it so; the
owner keeps what it has read and decided since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.messages import StartTurn
from turnmill.protocol.settings import Settings

from .dispatch import DispatchWindow
from .effects import Load
from .state import SessionState, TurnPhase


class Admission:
    """The admission of one partition, as its owner sees it."""

    def __init__(
        self, engine: Engine, keys: PartitionKeys, window: DispatchWindow, settings: Settings, partitions: int
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._window = window
        self._depth_max = math.ceil(settings.pool_depth_max / partitions)
        self._tenant_max = (
            None if settings.tenant_turns_max is None else math.ceil(settings.tenant_turns_max / partitions)
        )
        self._loads: dict[str, int] = {}

    def forget(self) -> None:
        """Another owner may have changed the load since."""
        self._loads.clear()

    async def refusal(self, command: StartTurn, pool: str) -> ErrorInfo | None:
        """Why a new turn is not taken; None where it is."""
        if command.parent is not None:
            return None
        depth = self._window.depth(pool)
        if depth >= self._depth_max:
            text = (
                f"{depth} model calls of pool {pool!r} wait in partition {self._keys.partition}: more LLM workers, or a "
                "higher TURNMILL_POOL_DEPTH_MAX"
            )
            return self._refused(text, pool)
        if self._tenant_max is None or not command.tenant:
            return None
        turns = await self._load(command.tenant)
        if turns < self._tenant_max:
            return None
        text = (
            f"tenant {command.tenant!r} has {turns} turns waiting or running in partition {self._keys.partition} "
            "(TURNMILL_TENANT_TURNS_MAX)"
        )
        return self._refused(text, pool)

    def note(self, changes: Iterable[Load]) -> None:
        """What was decided, for the decisions behind it."""
        for change in changes:
            if change.tenant in self._loads:
                self._loads[change.tenant] += change.change

    def _refused(self, text: str, pool: str) -> ErrorInfo:
        seconds = round(self._window.drain_seconds(pool), 1)
        text = f"{text}; try again in {seconds:g} s"
        return ErrorInfo(kind=ErrorKind.TOO_MANY_TURNS, message=text, retryable=True, retry_after_seconds=seconds)

    async def _load(self, tenant: str) -> int:
        if tenant not in self._loads:
            self._loads[tenant] = int(await self._engine.call("HGET", self._keys.load, tenant) or 0)
        return self._loads[tenant]


def load_changes(before: SessionState, after: SessionState) -> list[Load]:
    """What a decision changes in the numbers of its tenants' turns. A turn that waits for its host or for a person is no
    load."""
    if before is after:
        return []
    was, now = _loads(before), _loads(after)
    if was == now:
        return []
    return [
        Load(tenant, now.get(tenant, 0) - was.get(tenant, 0))
        for tenant in {**was, **now}
        if now.get(tenant, 0) != was.get(tenant, 0)
    ]


def _loads(state: SessionState) -> dict[str, int]:
    loads: dict[str, int] = {}
    turn = state.turn
    if turn is not None and turn.tenant and turn.phase is not TurnPhase.SUSPENDED:
        loads[turn.tenant] = 1
    for queued in state.queue:
        if queued.command.tenant:
            loads[queued.command.tenant] = loads.get(queued.command.tenant, 0) + 1
    return loads
