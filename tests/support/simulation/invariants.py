"""What must hold, looked at while commands run and once more when everything has ended.

The looks during the run are the server's: what enters a stream, which commits land, what is taken from whom. Commits are
known from the inside too: what a coordinator believed when it decided is compared with what was there when it landed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import hiredis
import msgspec

import turnmill.runtime.partition
from turnmill.protocol.codec import MESSAGE_CODEC, TASK_CODEC
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.protocol.keys import is_task_queue
from turnmill.protocol.messages import DeliveryLost, TimerFired
from turnmill.protocol.streams import COMMIT_TURNS, DISPATCH_BACKLOG, FIRE_TIMERS, Script
from turnmill.runtime.effects import Append, Cancel, DeleteSession, DispatchModel, DispatchTool, Publish
from turnmill.runtime.partition import Partition
from turnmill.runtime.reclaimer import Reclaimer
from turnmill.runtime.state import SessionState, encode_state
from turnmill.runtime.store import SessionCommit, Store
from turnmill.workers import ToolContext

from .actors import Actor
from .faults import COPIED
from .loop import THREAD
from .server import Watch
from .streams import Id, Pending, Stream, text

if TYPE_CHECKING:
    from .world import World

_TERMINAL = frozenset(kind.encode() for kind in TERMINAL_EVENT_TYPES)
_PURITY_EVERY = 8
STOP_SECONDS = 1.2
"""How long a tool may go on behind its turn's stop on a worker that nothing keeps: a heartbeat, and some way."""
Attempt = tuple[str, str, int]


class Start:
    """A tool's function that was started."""

    __slots__ = ("actor", "at", "attempt", "ended_at", "tool")

    def __init__(self, actor: Actor, at: float, tool: str, attempt: Attempt) -> None:
        self.actor = actor
        self.at = at
        self.tool = tool
        self.attempt = attempt
        self.ended_at: float | None = None


class Invariants(Watch):
    """The looks of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.channels: dict[str, list[tuple[int, bytes, bytes]]] = {}
        self.ended: dict[str, float] = {}
        self.stopped_at: dict[str, float] = {}
        self.transcripts: dict[str, list[Any]] = {}
        self.starts: list[Start] = []
        self.lost_at: dict[Attempt, float] = {}
        self.jumped_at = -1.0
        self.liveness_ms = 800
        self._states: dict[str, bytes] = {}
        self._commits: dict[bytes, tuple[Actor, list[SessionCommit]]] = {}
        self._committing: list[SessionCommit] = []
        self._holders: dict[Attempt, tuple[bytes, int]] = {}
        self._started: dict[Attempt, Start] = {}
        self._attempts: dict[tuple[str, str], set[int]] = {}
        self._armed: Counter[str] = Counter()
        self._kinds: dict[bytes, tuple[str, str]] = {}
        self.running_script = b""
        self._decisions = 0
        self._handled: set[tuple[Actor, str, bytes]] = set()
        self._names: dict[str, Script] = {}

    def clock_jumped(self) -> None:
        self.jumped_at = self.world.loop.time()

    # ---- from the inside

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Look over the shoulders of stores, partitions and the machine while a world runs."""
        commit, run, advance, handle = Store.commit, Script.run, turnmill.runtime.partition.advance, Partition.handle
        invariants = self

        def watched_commit(store: Store, commits: Any, *args: Any, **keywords: Any) -> Any:
            invariants._committing = list(commits)
            return commit(store, commits, *args, **keywords)

        def watched_run(script: Script, engine: Any, keys: Any, arguments: Any) -> Any:
            if script is COMMIT_TURNS:
                thread = THREAD.get()
                assert thread is not None
                sent = thread.actor, invariants._committing
                invariants._commits[hiredis.pack_command(tuple(arguments))] = sent
            return run(script, engine, keys, arguments)

        async def watched_handle(partition: Partition, deliveries: Any) -> None:
            thread = THREAD.get()
            assert thread is not None
            # Its own reply may come late, or a group that was set back hand out again what is in flight: that is decided twice,
            # and harmless. Without such trouble nobody takes up what it is about already.
            is_calm = not invariants.world.faults.is_troubled(thread.actor, invariants.world.loop.time() - 3.0)
            for delivery in deliveries:
                name = thread.actor, delivery.stream, delivery.entry_id
                if name in invariants._handled and is_calm:
                    invariants._see(
                        f"{delivery.entry_id.decode()} of {delivery.stream} is handled twice by {thread.actor}"
                    )
                invariants._handled.add(name)
            await handle(partition, deliveries)

        claim = Reclaimer._claim_all

        async def watched_claim(reclaimer: Reclaimer, partition: Partition, stream: str, consumer: str) -> None:
            if consumer == reclaimer._consumer:
                invariants._see(f"{consumer} adopts what it is about itself, of {stream}")
            await claim(reclaimer, partition, stream, consumer)

        Store.commit, Script.run, Partition.handle = watched_commit, watched_run, watched_handle  # type: ignore[method-assign]
        Reclaimer._claim_all = watched_claim  # type: ignore[method-assign]
        turnmill.runtime.partition.advance = self._checked(advance)  # type: ignore[assignment]
        try:
            yield
        finally:
            Store.commit, Script.run, Partition.handle = commit, run, handle  # type: ignore[method-assign]
            Reclaimer._claim_all = claim  # type: ignore[method-assign]
            turnmill.runtime.partition.advance = advance

    def _checked(self, advance: Callable[..., Any]) -> Callable[..., Any]:
        """Every now and then a decision is made twice: equal inputs, equal decisions, and the input is left as it was."""

        def checked(state: SessionState, message: Any, now_ms: int, *args: Any, **keywords: Any) -> Any:
            decision = advance(state, message, now_ms, *args, **keywords)
            self._decisions += 1
            if self._decisions % _PURITY_EVERY == 0:
                before = encode_state(state)
                again = advance(state, message, now_ms, *args, **keywords)
                if again != decision or encode_state(state) != before:
                    self._see(f"the machine decides differently on the same {type(message).__name__}")
            return decision

        return checked

    # ---- scripts

    def before_script(self, sha: bytes, keys: list[bytes], arguments: list[bytes]) -> None:
        self.running_script = sha

    def after_script(self, sha: bytes, keys: list[bytes], arguments: list[bytes], reply: Any) -> None:
        self.running_script = b""
        if sha == COMMIT_TURNS._sha.encode():
            sent = self._commits.pop(hiredis.pack_command(tuple(arguments)), None)
            if sent is None:
                self._see("a commit that no store has sent")
                return
            for commit, version in zip(sent[1], reply, strict=True):
                if version > 0:
                    self._landed(commit)
            self._let_go(sent[1])
            self.world.faults.committed(sent[0])
        elif sha == FIRE_TIMERS._sha.encode() and self.world.lines is not None and reply[0]:
            self.world.trace(f"{reply[0]} timers fire")

    def _let_go(self, commits: list[SessionCommit]) -> None:
        """Somebody else was faster than an owner whose commits on the same sessions are held back, or that owner itself, over
        another connection: now they come."""
        faults = self.world.faults
        if faults.held is None or not faults.held.is_holding:
            return
        sessions = {commit.session_id for commit in commits}
        for sender, others in self._commits.values():
            if sender is faults.held.actor and any(commit.session_id in sessions for commit in others):
                self.world.loop.call_soon(faults.release, faults.held)
                return

    def _landed(self, commit: SessionCommit) -> None:
        """Decided on what is there: not on what was there, nor on what somebody believed to be there."""
        world, session = self.world, commit.session_id
        known = self._states.get(session)
        believed = encode_state(commit.before or SessionState())
        if known is not None and known != believed:
            self._see(f"a stale commit landed on {session}: it was decided on another state")
        if world.lines is not None:
            world.trace(f"commit {session}: {[type(effect).__name__ for effect in commit.effects]}")
        transcript = self.transcripts.setdefault(session, [])
        for effect in commit.effects:
            kind = effect.__class__
            if kind is Append:
                transcript.append(effect.message)  # type: ignore[union-attr]
            elif kind is DispatchTool or kind is DispatchModel:
                self._dispatched(effect.task)  # type: ignore[union-attr]
            elif kind is Cancel:
                self.stopped_at.setdefault(effect.turn_id, world.loop.time())  # type: ignore[union-attr]
            elif kind is Publish and effect.closes:  # type: ignore[union-attr]
                self.ended.setdefault(effect.turn_id, world.loop.time())  # type: ignore[union-attr]
            elif kind is DeleteSession:
                transcript.clear()
        if commit.state is not None:
            self._states[session] = encode_state(commit.state)
        else:
            self._states[session] = believed

    def _dispatched(self, task: Any) -> None:
        if task.turn_id in self.ended:
            self._see(f"{task.turn_id}/{task.call} is dispatched behind the turn's end")
        if task.turn_id in self.stopped_at:
            self._see(f"{task.turn_id}/{task.call} is dispatched behind the turn's stop")

    # ---- streams

    def added(self, key: bytes, entry_id: Id, fields: list[bytes]) -> None:
        kind, name = self._kind(key)
        if kind == "channel":
            self._told(name, entry_id, fields)
        elif kind == "results" or kind == "inbox":
            self._arrived(key, kind, fields)

    def _told(self, turn_id: str, entry_id: Id, fields: list[bytes]) -> None:
        events = self.channels.setdefault(turn_id, [])
        number, type_ = entry_id[1], fields[1]
        if entry_id[0] != 0 or number != len(events) + 1:
            self._see(f"{turn_id}: event {text(entry_id).decode()} where 0-{len(events) + 1} is due")
        if events and events[-1][1] in _TERMINAL:
            self._see(f"{turn_id}: {type_.decode()} behind its end")
        events.append((number, type_, fields[3]))

    def _arrived(self, key: bytes, kind: str, fields: list[bytes]) -> None:
        type_ = fields[1]
        if COPIED in fields:
            return
        if type_ == b"delivery_lost":
            self._delivery_lost(MESSAGE_CODEC.decode(b"delivery_lost", fields[3]))
        elif type_ == b"timer_fired":
            fired: Any = MESSAGE_CODEC.decode(b"timer_fired", fields[3])
            assert isinstance(fired, TimerFired)
            self._armed[fired.session_id] -= 1
            if self._armed[fired.session_id] < 0:
                self._see(f"the timer of {fired.session_id} fires again")
        self.world.faults.arrived(key, kind, fields)

    def _delivery_lost(self, lost: Any) -> None:
        assert isinstance(lost, DeliveryLost)
        attempt = lost.turn_id, lost.call, lost.attempt
        now = self.world.loop.time()
        holder = self._holders.get(attempt)
        if holder is None:
            self._see(f"{attempt} is told as lost, and nobody holds it")
            return
        del self._holders[attempt]
        self.lost_at.setdefault(attempt, now)
        consumer, delivered_ms = holder
        idle = self.world.server.now_ms() - delivered_ms
        keys = self.world.keys.of_turn(lost.turn_id)
        if self.world.server.lookup(keys.alive(consumer.decode()).encode()) is not None:
            self._see(f"{attempt} is taken from {consumer.decode()}, which is alive")
        actor = next((one for one in self.world.fleet if self._worker_id(one) == consumer.decode()), None)
        if actor is not None and self._beats(actor):
            self._see(f"{attempt} is taken from {actor}, whose heart beats")
        if idle < self.liveness_ms:
            self._see(f"{attempt} is taken {idle} ms after it was delivered")

    def _worker_id(self, actor: Actor) -> str:
        return getattr(getattr(actor.process, "consumer", None), "worker_id", "")

    def _beats(self, actor: Actor) -> bool:
        """Whether nothing has kept its sign of life from the server, whatever its event loop does."""
        since = self.world.loop.time() - 3 * self.liveness_ms / 1000
        return not (actor.is_dead or actor.is_stopping or self.world.faults.is_heart_troubled(actor, since))

    def delivered(self, key: bytes, entry_id: Id, pending: Pending) -> None:
        if self._kind(key)[0] != "tasks":
            return
        stream = self.world.server.lookup(key)
        fields = stream.entries[entry_id]
        task: Any = TASK_CODEC.decode(fields[1], fields[3])
        self._holders[task.turn_id, task.call, task.attempt] = pending.consumer, pending.delivered_ms
        self.world.faults.handed_out(task)

    def claimed(self, key: bytes, entry_id: Id, consumer: bytes, idle_ms: int) -> None:
        """A worker that leaves makes what it holds look long idle."""
        if self._kind(key)[0] == "tasks":
            fields = self.world.server.lookup(key).entries[entry_id]
            task: Any = TASK_CODEC.decode(fields[1], fields[3])
            self._holders[task.turn_id, task.call, task.attempt] = consumer, self.world.server.now_ms() - idle_ms

    def acknowledged(self, key: bytes, entry_id: Id) -> None:
        kind, _ = self._kind(key)
        if kind == "tasks" and not self.running_script:
            fields = self.world.server.lookup(key).entries.get(entry_id)
            if fields is not None:
                task: Any = TASK_CODEC.decode(fields[1], fields[3])
                self._holders.pop((task.turn_id, task.call, task.attempt), None)

    def armed(self, key: bytes, members: list[bytes]) -> None:
        if self._kind(key)[0] == "timers":
            for member in members:
                self._armed[member.decode()] += 1

    def expiring(self, key: bytes) -> None:
        kind, turn_id = self._kind(key)
        if kind == "channel":
            events = self.channels.get(turn_id, [])
            if not events or events[-1][1] not in _TERMINAL:
                self._see(f"the channel of {turn_id} is to expire while the turn is live")

    def _kind(self, key: bytes) -> tuple[str, str]:
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._kind_of(key.decode())
        return found

    def _kind_of(self, key: str) -> tuple[str, str]:
        for keys in self.world.keys.partitions:
            if not key.startswith(keys.base):
                continue
            for kind in ("inbox", "results", "timers"):
                if key == getattr(keys, kind):
                    return kind, ""
            name = key.removeprefix(keys.base)
            if is_task_queue(name):
                return "tasks", name
            if name.startswith("turn:") and name.endswith(":events"):
                return "channel", name.split(":")[1]
        return "", ""

    # ---- tools

    def tool_noted(self, event: str, context: ToolContext) -> None:
        """A tool's function has started, or has ended."""
        thread = THREAD.get()
        assert thread is not None
        actor, now = thread.actor, self.world.loop.time()
        turn_id, _, call = context.idempotency_key.partition("/")
        attempt = turn_id, call, context.attempt
        if event == "ended":
            if not actor.is_dead:
                self._started[attempt].ended_at = now
            return
        self.world.trace(f"{actor} starts {context.tool_name} {attempt}")
        if attempt in self._started:
            self._see(
                f"{attempt} of {context.tool_name} is started twice: by {self._started[attempt].actor} and {actor}"
            )
        attempts = self._attempts.setdefault((turn_id, call), set())
        attempts.add(context.attempt)
        if context.tool_name == "once" and len(attempts) > 1:
            self._see(f"{turn_id}/{call} may not be repeated, and is")
        lost_at = self.lost_at.get(attempt)
        if lost_at is not None and lost_at < actor.resumed_at <= actor.read_at and self.jumped_at < 0:
            self._see(f"{actor} starts {attempt}, which was taken from it while it stood still")
        start = self._started[attempt] = Start(actor, now, context.tool_name, attempt)
        self.starts.append(start)

    # ---- the end

    def loses_publication(self) -> bool:
        faults = self.world.faults
        return bool(faults.mute_chance) and faults.rng.random() < faults.mute_chance

    def live_channels(self) -> list[str]:
        return [turn_id for turn_id in self.channels if turn_id not in self.ended]

    def leftovers(self) -> dict[str, Any]:
        """What stands in queues, is pending, or waits for its time."""
        found: dict[str, Any] = {}
        server = self.world.server
        for key, value in list(server.data.items()):
            kind, _ = self._kind(key)
            if isinstance(value, Stream) and kind in ("inbox", "results", "tasks"):
                pending = sum(len(group.pending) for group in value.groups.values())
                if value.ids or pending:
                    found[key.decode()] = {"length": len(value.ids), "pending": pending}
            elif (kind == "timers" or b":backlog:" in key) and len(value):
                found[key.decode()] = list(value)
        return found

    def check_end(self) -> None:
        from .ending import Ending

        for problem in Ending(self.world, self).problems():
            self._see(problem)

    def _see(self, problem: str) -> None:
        self.world.violate(problem)


def encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


__all__ = ["DISPATCH_BACKLOG", "STOP_SECONDS", "Invariants", "Start"]
