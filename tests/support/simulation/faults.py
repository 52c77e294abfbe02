"""What goes wrong in a run. Each seed has some kinds of faults and not others, so that they are seen alone and together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from turnmill.protocol.codec import encode_body
from turnmill.protocol.content import Message, ToolResult
from turnmill.protocol.messages import ModelReply, ModelTask, ToolReply
from turnmill.protocol.streams import COMMIT_TURNS

from .actors import Actor

if TYPE_CHECKING:
    from .network import Wire
    from .world import World

KINDS = (
    "kill", "pause", "block", "cut", "stall", "black", "slow", "restart", "jump", "set_back", "drop_channel", "drain",
    "full", "repeat", "forge", "mute", "hold",
)  # fmt: skip
_WORKERS = ("llm", "tools")
COPIED = b"copied"
"""A field that marks entries which were added by a fault."""


class Profile(NamedTuple):
    """What happens in a run: the kinds of faults, the role that is mostly hit, and which of its connections."""

    kinds: tuple[str, ...]
    role: str | None = None
    wire: str | None = None


SHARP = (
    Profile(("stall", "kill"), "coordinator", "shared"),
    Profile(("hold",), "coordinator", "shared"),
    Profile(("pause",), "coordinator"),
    Profile(("pause", "stall"), "coordinator", "shared"),
    Profile(("kill",), "coordinator"),
    Profile(("kill", "pause"), "tools"),
    Profile(("kill", "block"), "llm"),
    Profile(("pause",), "tools"),
    Profile(("pause",), "llm"),
    Profile(("stall",), "tools", "reading"),
    Profile(("stall",), "tools", "shared"),
    Profile(("cut",), "llm", "shared"),
    Profile(("cut", "black"), "tools", "shared"),
    Profile(("cut", "stall"), "host", "shared"),
    Profile(("cut", "stall"), "coordinator", "reading"),
    Profile(("mute", "black"), "tools", "subscription"),
    Profile(("repeat", "slow")),
    Profile(("repeat", "forge")),
    Profile(("restart", "full")),
    Profile(("drain", "kill"), "tools"),
)
"""Two or three things that are worst together, at the place where they hurt."""


def random_profile(rng: random.Random) -> Profile:
    if rng.random() < 0.5:
        return rng.choice(SHARP)
    kinds = rng.sample(KINDS, rng.choice([0, 1, 2, 2, 3, 4]))
    role = rng.choice([None, "coordinator", "llm", "tools"])
    return Profile(tuple(kinds), role, rng.choice([None, None, "shared", "reading", "heartbeat", "subscription"]))


class Faults:
    """Chooses a fault every now and then for a few seconds, and mends everything behind that."""

    def __init__(self, world: World, rng: random.Random, profile: Profile | None = None) -> None:
        self.world = world
        self.rng = rng
        chosen = random_profile(rng)
        self.kinds, self.focus, self.wire_kind = profile or chosen
        self.seconds = rng.uniform(1.5, 3.0)
        self.every_seconds = rng.choice([0.1, 0.2, 0.4])
        self.longer_seconds = 0.0
        """How much longer than usual the last turn may take to end."""
        self.deleted_channels: set[str] = set()
        self.mute_chance = 0.0
        self.repeat_chance = self.forge_chance = 0.0
        self.counts: dict[str, int] = {}
        self.held: Wire | None = None
        self.doomed: Actor | None = None
        self._trouble_until = 0.0
        self._outsider = world.server.connect(lambda _: None)

    @property
    def forges(self) -> bool:
        return "forge" in self.counts

    async def run(self) -> None:
        loop, rng = self.world.loop, self.rng
        until = loop.time() + self.seconds
        if not self.kinds:
            return
        await asyncio.sleep(rng.uniform(0.0, 0.8))
        while loop.time() < until:
            kind = rng.choice(self.kinds)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            action: Callable[[], None] = getattr(self, f"_{kind}")
            action()
            await asyncio.sleep(rng.expovariate(1 / self.every_seconds))
        self._mend()

    def is_troubled(self, actor: Actor, since: float) -> bool:
        """Whether anything may have kept an actor from running, or from speaking to the server, since a time."""
        return max(actor.troubled_at, self._trouble_until) >= since

    def is_heart_troubled(self, actor: Actor, since: float) -> bool:
        """The same for its heartbeat."""
        return max(actor.heart_troubled_at, self._trouble_until) >= since

    def _mend(self) -> None:
        world = self.world
        world.network.is_down, world.server.is_full, world.network.slow_chance = False, False, 0.0
        self.mute_chance = self.repeat_chance = self.forge_chance = 0.0
        for actor in [*world.fleet, *world.hosts]:
            actor.countdown = 0
            if actor.is_paused:
                actor.resume()
        self.release(self.held)
        self.doomed = None
        for wire in list(world.network.wires):
            if wire.is_black:
                wire.cut()
        world.trace("everything is mended")

    # ---- the kinds

    def _some(self, *roles: str) -> Actor:
        rng, fleet = self.rng, self.world.fleet
        if roles:
            fleet = [actor for actor in fleet if actor.role in roles]
        focused = [actor for actor in fleet if actor.role == self.focus]
        return rng.choice(focused if focused and rng.random() < 0.85 else fleet)

    def _trouble(self, actor: Actor, seconds: float = 0.0, *, heart: bool = True) -> None:
        until = self.world.loop.time() + seconds + 1.0
        actor.troubled_at = max(actor.troubled_at, until)
        if heart:
            actor.heart_troubled_at = max(actor.heart_troubled_at, until)

    def _trouble_all(self, seconds: float) -> None:
        self._trouble_until = max(self._trouble_until, self.world.loop.time() + seconds + 1.0)

    def _soon(self, actor: Actor, action: Callable[[], None]) -> None:
        """Before one of its next steps: between any two of them."""
        if actor.countdown:
            return
        actor.in_steps(self.rng.randint(1, 40), action)

    def _kill(self) -> None:
        actor = self._some()
        if actor.role == "coordinator" and self.rng.random() < 0.5:
            self.doomed = actor
        else:
            self._soon(actor, lambda: self._end(actor))

    def _end(self, actor: Actor) -> None:
        self.world.trace(f"{actor} is killed")
        actor.kill()
        self.world.loop.call_later(self.rng.uniform(0.0, 0.5), self.world.replace, actor)

    def committed(self, actor: Actor) -> None:
        """A commit has landed: its coordinator may die before it does the next thing."""
        if actor is self.doomed and not actor.is_dead and not actor.countdown:
            self.doomed = None
            actor.in_steps(self.rng.randint(1, 5), lambda: self._end(actor))

    def _pause(self) -> None:
        actor = self._some() if self.rng.random() < 0.9 else self.rng.choice(self.world.hosts)
        self._stop(actor, self.rng.choice([0.05, 0.3, 1.2, 1.4, 1.7, 2.2]), actor.pause)

    def _block(self) -> None:
        actor = self._some(*_WORKERS)
        self._stop(actor, self.rng.choice([0.3, 1.0, 1.5]), actor.block)

    def _stop(self, actor: Actor, seconds: float, hold: Callable[[], None]) -> None:
        if actor.is_paused:
            return

        def begin() -> None:
            self.world.trace(f"{actor} stands still for {seconds} s")
            self._trouble(actor, seconds, heart=hold == actor.pause)
            hold()
            self.world.loop.call_later(seconds, self._go_on, actor)

        self._soon(actor, begin)

    def _go_on(self, actor: Actor) -> None:
        if actor.is_paused and not actor.is_dead:
            self.world.trace(f"{actor} goes on")
            actor.resume()

    def _wire(self, seconds: float) -> Wire | None:
        """Some connection of somebody alive, which is troubled from now on. Whoever loses a subscription alone is not: that
        it misses nothing then is what is claimed."""
        of_host = self.focus == "host" or self.rng.random() < 0.15
        actor = self.rng.choice(self.world.hosts) if of_host else self._some()
        wires = [wire for wire in self.world.network.wires if wire.actor is actor and not actor.is_dead]
        if not wires:
            return None
        chosen = [wire for wire in wires if wire.kind == self.wire_kind]
        wire = self.rng.choice(chosen if chosen and self.rng.random() < 0.85 else wires)
        if not wire.is_subscriber:
            self._trouble(wire.actor, seconds, heart=wire.thread.is_heart)
        return wire

    def _cut(self) -> None:
        wire = self._wire(0.0)
        if wire is not None:
            self.world.trace(f"{wire} is cut")
            self.world.loop.call_later(self.rng.uniform(0.0, 0.003), wire.cut)

    def _stall(self) -> None:
        seconds = self.rng.choice([0.1, 0.4, self.rng.uniform(0.8, 2.2)])
        wire = self._wire(seconds)
        if wire is not None:
            self.world.trace(f"{wire} stalls for {seconds} s")
            wire.stall(seconds)

    def _hold(self) -> None:
        """The worst of stalls: what an owner of a partition commits from now on arrives when another one has committed."""
        wires = [
            wire for wire in self.world.network.wires if wire.actor.role == "coordinator" and wire.kind == "shared"
        ]
        owning = [wire for wire in wires if wire.actor.process is not None and wire.actor.process._leases.readable(0.0)]
        if self.held is not None or not owning:
            return
        wire = self.held = self.rng.choice(owning)
        self._trouble(wire.actor, 4.0)
        self.world.trace(f"{wire} holds back its next commits")
        wire.holds_at = COMMIT_TURNS._sha.encode()
        self.world.loop.call_later(self.rng.uniform(1.0, 2.5), self.release, wire)

    def release(self, wire: Wire | None) -> None:
        if wire is not None and self.held is wire:
            self.world.trace(f"{wire} lets go")
            self.held, wire.holds_at = None, None
            wire.release()

    def _black(self) -> None:
        wire = self._wire(20.0)
        if wire is not None:
            self.world.trace(f"{wire} swallows everything")
            wire.is_black = True

    def _slow(self) -> None:
        network, seconds = self.world.network, self.rng.uniform(0.2, 1.5)
        network.slow_chance = self.rng.choice([0.05, 0.3])
        network.slow_seconds = self.rng.choice([0.05, 0.3, 0.6])
        self._trouble_all(seconds + 1.0)
        self.world.loop.call_later(seconds, setattr, network, "slow_chance", 0.0)

    def _restart(self) -> None:
        world, seconds = self.world, self.rng.uniform(0.0, 0.8)
        world.trace(f"the server restarts, away for {seconds:.2f} s")
        self._trouble_all(seconds + 1.0)
        world.network.is_down = True
        world.network.cut_all()
        world.server.flush_scripts()
        world.loop.call_later(seconds, setattr, world.network, "is_down", False)

    def _jump(self) -> None:
        seconds = self.rng.choice([-2.0, -0.5, 0.5, 1.0, 3.0])
        self.world.trace(f"the server's clock jumps by {seconds} s")
        self._trouble_all(max(1.0, seconds))
        self.longer_seconds += abs(seconds)
        self.world.invariants.clock_jumped()
        self.world.server.clock_offset_ms += int(seconds * 1000)

    def _set_back(self) -> None:
        """A group of the coordinators forgets how far it was."""
        self._trouble_all(1.0)
        keys = self.rng.choice(self.world.keys.partitions)
        stream = self.world.server.lookup(self.rng.choice([keys.inbox, keys.results]).encode())
        for group in stream.groups.values() if stream is not None else ():
            group.last_id = (0, 0)
            self.world.trace(f"a group of partition {keys.partition} is set back")

    def _drop_channel(self) -> None:
        live = self.world.invariants.live_channels()
        if live:
            turn_id = self.rng.choice(live)
            self.deleted_channels.add(turn_id)
            self.world.trace(f"the channel of {turn_id} is deleted")
            self.world.server.remove(self.world.keys.of_turn(turn_id).events(turn_id).encode())

    def _drain(self) -> None:
        actor = self._some()
        if actor.process is not None and not actor.is_stopping and not actor.is_paused:
            self.world.trace(f"{actor} is told to stop")
            actor.is_stopping = True
            self.world.loop.call_soon(actor.process.stop, context=actor.main.context)

    def _full(self) -> None:
        seconds = self.rng.uniform(0.1, 0.8)
        self.world.trace(f"the server's memory is full for {seconds:.2f} s")
        self._trouble_all(seconds + 1.0)
        self.world.server.is_full = True
        self.world.loop.call_later(seconds, setattr, self.world.server, "is_full", False)

    def _repeat(self) -> None:
        self.repeat_chance = 0.4

    def _forge(self) -> None:
        self.forge_chance = 0.4

    def arrived(self, key: bytes, kind: str, fields: list[bytes]) -> None:
        """What enters inbox and results may enter twice, and somebody may answer in the name of others."""
        if fields[1] == b"timer_fired" or COPIED in fields:
            return
        rng, loop = self.rng, self.world.loop
        if self.repeat_chance and rng.random() < self.repeat_chance:
            loop.call_later(rng.choice([0.0, 0.001, 0.05, 0.2, 0.5, 1.0]), self._add, key, fields)

    def handed_out(self, task: Any) -> None:
        """A task was given to a worker: somebody else may answer it first."""
        rng = self.rng
        if self.forge_chance and rng.random() < self.forge_chance:
            results = self.world.keys.of_turn(task.turn_id).results.encode()
            self.world.loop.call_later(rng.choice([0.0, 0.001, 0.05, 0.2]), self._add, results, _forged(task, rng))

    def _add(self, key: bytes, fields: list[bytes]) -> None:
        self.world.server.receive(self._outsider, [b"XADD", key, b"*", *fields, COPIED, b"1"])

    def _mute(self) -> None:
        """Publications get lost for a while."""
        self.mute_chance = self.rng.choice([0.5, 1.0])
        self.world.loop.call_later(self.rng.uniform(0.5, 2.0), setattr, self, "mute_chance", 0.0)


def _forged(task: Any, rng: random.Random) -> list[bytes]:
    """An answer in another's name: the right address with a wrong token, or a token with the address of another attempt."""
    wrong: dict[str, Any] = {"token": "0" * 24} if rng.random() < 0.6 else {"attempt": task.attempt + 1}
    if isinstance(task, ModelTask):
        reply: Any = task.answer(ModelReply, message=Message(role="assistant", content="forged"))
    else:
        result = ToolResult(tool_call_id=task.tool_call_id, tool_name=task.tool, result="forged")
        reply = task.answer(ToolReply, result=result)
    reply = msgspec.structs.replace(reply, **wrong)
    return [b"t", reply.type.encode(), b"d", encode_body(reply)]
