"""A simulated deployment: one server, two of every role, one or two hosts, and the faults of a seed."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

from turnmill.protocol.errors import EngineError
from turnmill.protocol.keys import Keys
from turnmill.protocol.settings import Settings, load_settings

from . import application
from .actors import Actor, bury
from .environment import virtual
from .faults import Faults, Profile
from .invariants import Invariants
from .loop import THREAD, VirtualLoop
from .network import URL, Network
from .processes import open_client, run_role
from .server import Server
from .stories import Story
from .verdict import Violation

SETTINGS: dict[int, Settings] = {partitions: load_settings(
    redis_url=URL, namespace="sim", partitions=partitions, lease_seconds=1.0, liveness_seconds=0.8, heartbeat_seconds=0.25,
    response_timeout=1.0, max_attempts=50, dispatch_window=2, llm_concurrency=4, tool_concurrency=3,
) for partitions in (1, 2)}  # fmt: skip
ROLES = ("coordinator", "coordinator", "llm", "llm", "tools", "tools")
SETTLE_SECONDS = 30.0
"""A turn that has not ended in this time after the last fault is stuck."""
IDLE_SECONDS = 10.0
_STARTING_SECONDS = 3.0
"""A process that meets no engine, or a full one, at its start may give up."""
_LOOK_SECONDS = 0.05
_TRACED = 400


class World:
    """One run. `run` raises `Violation` where something is seen that must not be."""

    def __init__(self, seed: int, *, profile: Profile | None = None, traces: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(f"world {seed}")
        self.loop = VirtualLoop()
        self.settings = SETTINGS[self.rng.choice([1, 2])]
        self.keys = Keys(self.settings.namespace, self.settings.partitions)
        self.invariants = Invariants(self)
        self.server = Server(self.loop, self.invariants)
        self.network = Network(self.loop, self.server, random.Random(f"network {seed}"))
        self.fleet: list[Actor] = []
        self.hosts: list[Actor] = []
        self.buried: list[Actor] = []
        self.stories: list[Story] = []
        self.faults = Faults(self, random.Random(f"faults {seed}"), profile)
        self.violations: list[str] = []
        self.lines: deque[str] | None = deque(maxlen=_TRACED) if traces else None
        self._started = 0

    # ---- the run

    def run(self) -> None:
        """From an empty server to the last check."""
        with virtual(self.loop, self.seed), self.invariants.attached():
            application.note_with(self.invariants.tool_noted)
            self.loop.set_exception_handler(self._on_error)
            try:
                self.loop.run_until_complete(self._main())
            except Violation:
                raise
            except Exception as error:
                raise Violation(f"{type(error).__name__}: {error}") from error
            finally:
                application.note_with(None)
                bury([*self.fleet, *self.hosts, *self.buried])
                self.loop.close()

    async def _main(self) -> None:
        for role in ROLES:
            self.start(role)
        host = Actor("host", "host", self.network)
        self.hosts.append(host)
        count, sessions = self.rng.choice([2, 4, 6, 8]), self.rng.choice([2, 3, 5])
        self.stories = [
            Story(self, number, random.Random(f"story {self.seed} {number}"), sessions) for number in range(count)
        ]
        hosting = host.spawn(self._host(host))
        faults = self.loop.create_task(self.faults.run())
        await self._until(hosting, faults)
        await self._settle(hosting)
        self.invariants.check_end()
        self._raise()

    async def _host(self, actor: Actor) -> None:
        while True:
            try:
                client = await open_client(actor, self.settings)
                break
            except EngineError:
                await asyncio.sleep(0.1)
        while not self.server.lookup(self.keys.agents.encode()):
            await asyncio.sleep(0.02)
        await asyncio.gather(*[story.run(client) for story in self.stories])

    async def _until(self, hosting: asyncio.Task[None], faults: asyncio.Task[None]) -> None:
        while not faults.done():
            await asyncio.sleep(_LOOK_SECONDS)
            self._raise()
            if hosting.done() and hosting.exception() is not None:
                hosting.result()
        faults.result()

    async def _settle(self, hosting: asyncio.Task[None]) -> None:
        """Nothing is disturbed any more: every turn must end now, and nothing may be left behind."""
        until = self.loop.time() + SETTLE_SECONDS + self.faults.longer_seconds
        while not hosting.done():
            if self.loop.time() > until:
                stuck = [story for story in self.stories if story.turn is not None and not story.ended]
                told = ", ".join(f"{story.turn.id if story.turn else '?'}" for story in stuck) or "nothing was started"
                self.violate(f"stuck: {told} has not ended {SETTLE_SECONDS:g} s after the last fault")
                self._raise()
            await asyncio.sleep(_LOOK_SECONDS)
            self._raise()
        hosting.result()
        until = self.loop.time() + IDLE_SECONDS + self.faults.longer_seconds
        while left := self.invariants.leftovers():
            if self.loop.time() > until:
                self.violate(f"left behind: {left}")
                self._raise()
            await asyncio.sleep(4 * _LOOK_SECONDS)
            self._raise()

    # ---- actors

    def start(self, role: str) -> Actor:
        self._started += 1
        actor = Actor(f"{role}-{self._started}", role, self.network)
        self.fleet.append(actor)
        actor.spawn(self._live(actor))
        self.trace(f"{actor} starts")
        return actor

    async def _live(self, actor: Actor) -> None:
        """A process and who starts it again: one that cannot reach the server at its start tries later, one that was
        drained is followed by another."""
        while True:
            began_at = self.loop.time()
            try:
                await run_role(actor, self.settings)
                break
            except EngineError as error:
                if actor.is_stopping:
                    break
                if self.loop.time() - began_at > _STARTING_SECONDS and not self.faults.is_troubled(actor, began_at):
                    self.violate(f"{actor} ended by itself: {error!r}")
                    raise
                await asyncio.sleep(0.1)
            except Exception as error:
                if not actor.is_dead:
                    self.violate(f"{actor} ended by itself: {error!r}")
                raise
        if not actor.is_stopping:
            self.violate(f"{actor} ended by itself")
        self.loop.call_later(0.0, self.replace, actor, context=_nobody())

    def replace(self, actor: Actor) -> None:
        """Another one of its role in its place."""
        if actor in self.fleet:
            self.fleet.remove(actor)
            if not actor.is_dead:
                actor.kill()
            self.buried.append(actor)
            self.start(actor.role)

    # ---- what is seen

    def accepted(self, story: Story) -> None:
        self.trace(f"accepted {story.turn.id if story.turn else '?'}: {story!r}")

    def may_lose_channel(self, turn_id: str) -> bool:
        return turn_id in self.faults.deleted_channels

    def violate(self, text: str) -> None:
        """Something must not be. The run ends at its next look."""
        self.violations.append(text)
        self.trace(f"VIOLATION {text}")

    def trace(self, text: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.loop.time() - 1000:9.4f}  {text}")

    def _raise(self) -> None:
        if self.violations:
            raise Violation("\n".join(self.violations[:10]))

    def _on_error(self, loop: Any, context: dict[str, Any]) -> None:
        thread = THREAD.get()
        if thread is None or not thread.actor.is_dead:
            self.violate(f"unhandled: {context.get('message')} {context.get('exception')!r}")


def _nobody() -> Any:
    import contextvars

    return contextvars.Context()
