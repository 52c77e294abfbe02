"""One partition in the hands of its coordinator: messages in, decisions committed.

A batch is folded: the messages of one session are decided in order on one state and land in one item of the script.
The cache of states is valid while nobody else commits; the version in every commit finds out if somebody did.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from turnmill.protocol.codec import MESSAGE_CODEC, Unreadable
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import EngineReplyError, EngineUnavailable, ErrorKind
from turnmill.protocol.keys import (
    COORDINATOR_GROUP,
    Keys,
    PartitionKeys,
    is_task_queue,
    model_queue,
    partition_of_session,
    partition_of_turn,
    pool_of_queue,
    tool_queue,
)
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import DeliveryLost, ModelReply, StartTurn, TimerFired, ToolReply, UnreadableTask
from turnmill.protocol.namespace import ServerClock, make_token
from turnmill.protocol.settings import Settings
from turnmill.protocol.specs import Plan
from turnmill.protocol.streams import Delivery, create_groups, dead_letter, is_group_missing, is_transient

from .dispatch import DispatchWindow
from .effects import Count, Decision, DispatchModel, DispatchTool
from .machine import Input, Limits, Start, advance
from .registry import Registry
from .state import SessionState
from .store import INBOX, RESULTS, STALE, TURN_EXISTS, Retention, SessionCommit, Source, Store, Versioned, fold

_log = get_logger(__name__)
_CACHED_SESSIONS_MAX = 20_000
_CACHED_PLANS_MAX = 2_000


def new_writer() -> str:
    """A name for one ownership of a partition, in the versions that it writes."""
    return secrets.token_hex(4)


Removal: TypeAlias = Callable[[], Awaitable[None]]
"""Gets rid of an entry that is not decided on; may be repeated."""


def in_place_of(message: Input, reason: str) -> Input | None:
    """What is decided on in place of a message that could not be: its turn ends, or its call, with the reason."""
    error = ErrorInfo(kind=ErrorKind.INTERNAL, message=f"a message of this turn could not be handled: {reason}")
    match message:
        case Start(problem=None):
            return Start(msgspec.structs.replace(message.command, messages=[], metadata={}, overrides={}), "", error)
        case ModelReply(error=None) | ToolReply(error=None):
            kind = type(message)
            return kind(
                session_id=message.session_id,
                turn_id=message.turn_id,
                call=message.call,
                attempt=message.attempt,
                token=message.token,
                error=error,
            )
        case _:
            return None


class Arrived(NamedTuple):
    """A readable message and where it came from."""

    source: Source
    message: Input
    session_id: str


class Partition:
    """Decides and commits for one partition: one batch is decided while the one before is being committed."""

    def __init__(
        self, engine: Engine, keys: Keys, number: int, settings: Settings, secret: bytes, clock: ServerClock
    ) -> None:
        self.keys: PartitionKeys = keys.partitions[number]
        self.number = number
        self._partitions = len(keys.partitions)
        self._engine = engine
        self._secret = secret
        self._clock = clock
        self._limits = Limits(settings.session_queue_max, settings.max_attempts)
        retention = Retention(settings.event_ttl * 1000, settings.record_ttl * 1000, settings.feed_length)
        self._store = Store(engine, self.keys, secret, retention, settings.wire, new_writer())
        self._registry = Registry(engine, keys, settings.plan_ttl)
        self.window = DispatchWindow(engine, self.keys, settings.dispatch_window)
        self._sessions: dict[str, Versioned] = {}
        self._plans: dict[str, Plan] = {}
        self._queues: set[str] = set()
        self._deciding = asyncio.Lock()
        self._batches = 0
        self._held_back: dict[str, set[int]] = {}
        self._last: asyncio.Future[None] | None = None
        self.in_flight: set[tuple[str, bytes]] = set()
        self.counters: dict[str, int] = {}

    def forget(self) -> None:
        """Drop what is cached: another owner may have written since."""
        self._sessions.clear()

    async def take_over(self) -> None:
        """Get ready after the lease was taken."""
        self.forget()
        self._store.writer = new_writer()
        queues = await self._engine.call("SMEMBERS", self.keys.queues)
        self._queues = {name.decode() for name in queues}
        await self.window.look(self._pools())

    async def settled(self) -> None:
        """Return when the batches under way are committed."""
        if self._last is not None:
            await asyncio.wait({self._last})
        self.forget()

    @property
    def task_streams(self) -> list[str]:
        """Every task stream that this partition has dispatched to."""
        return [self.keys.base + name for name in sorted(self._queues)]

    async def look_at_window(self) -> None:
        await self.window.look(self._pools())

    async def handle(self, deliveries: Sequence[Delivery]) -> None:
        """Decide on a batch and commit it. Returns when everything in it is acknowledged.

        The engine may go away in between: the batch is decided again then, on what was stored.
        """
        self.in_flight.update((delivery.stream, delivery.entry_id) for delivery in deliveries)
        previous, done = self._last, asyncio.get_running_loop().create_future()
        self._last = done
        self._batches += 1
        batch = self._batches
        try:
            await self._handle(deliveries, previous, batch)
            if self.window.has_backlog:
                await self._retrying(self.window.refill)
        finally:
            self._hold_back(batch, set())
            self.in_flight.difference_update((delivery.stream, delivery.entry_id) for delivery in deliveries)
            done.set_result(None)

    async def _handle(self, deliveries: Sequence[Delivery], previous: asyncio.Future[None] | None, batch: int) -> None:
        """The first round may be decided while the batch before is being committed; whatever must be decided again
        waits for that one, so that the order of arrival holds."""
        admitted = [(self._admit(delivery), delivery) for delivery in deliveries]
        arrived = [item for item, _ in admitted if isinstance(item, Arrived)]
        by_source = {item.source: delivery for item, delivery in admitted if isinstance(item, Arrived)}
        turned_away = [item for item, _ in admitted if not isinstance(item, Arrived)]
        known: set[str] = set()
        while arrived:
            try:
                arrived = await self._commit(arrived, known, batch)
            except EngineUnavailable:
                self.forget()
                await self._engine.ready()
            except EngineReplyError as error:
                self.forget()
                if is_transient(error):
                    # Memory, a read-only replica, a script that was killed: what was not committed is tried again.
                    _log.warning("commit refused by the engine", partition=self.number, error=str(error))
                    await asyncio.sleep(0.2)
                else:
                    arrived = await self._isolate(arrived, by_source, str(error), previous, batch)
            except Exception as error:
                # A record that cannot be read, or a fault of ours: it must not stop the partition either.
                self.forget()
                _log.exception("decision failed", partition=self.number)
                arrived = await self._isolate(arrived, by_source, f"{type(error).__name__}: {error}", previous, batch)
            if arrived and previous is not None:
                await asyncio.wait({previous})
                previous = None
        for removal in turned_away:
            await self._retrying(removal)

    def _hold_back(self, batch: int, sessions: set[str]) -> None:
        """Say which sessions a batch has yet to decide on: later batches leave them alone until it has."""
        for session_id, batches in list(self._held_back.items()):
            if session_id not in sessions:
                batches.discard(batch)
                if not batches:
                    del self._held_back[session_id]
        for session_id in sessions:
            self._held_back.setdefault(session_id, set()).add(batch)

    def _comes_later(self, session_id: str, batch: int) -> bool:
        batches = self._held_back.get(session_id)
        return batches is not None and min(batches) < batch

    async def _isolate(
        self,
        arrived: list[Arrived],
        by_source: dict[Source, Delivery],
        reason: str,
        previous: asyncio.Future[None] | None,
        batch: int,
    ) -> list[Arrived]:
        """One session's broken data must not stop its partition: find the session, and bury its messages."""
        sessions = {item.session_id for item in arrived}
        if len(sessions) == 1:
            return await self._isolate_messages(arrived, by_source, reason, previous, batch)
        for session_id in sessions:
            mine = [by_source[item.source] for item in arrived if item.session_id == session_id]
            await self._handle(mine, previous, batch)
        return []

    async def _isolate_messages(
        self,
        arrived: list[Arrived],
        by_source: dict[Source, Delivery],
        reason: str,
        previous: asyncio.Future[None] | None,
        batch: int,
    ) -> list[Arrived]:
        """One by one, then; the one that cannot be decided on is a dead letter, and its turn is told what went wrong."""
        if len(arrived) > 1:
            for item in arrived:
                await self._handle([by_source[item.source]], previous, batch)
            return []
        item = arrived[0]
        await self._retrying(self._bury(by_source[item.source], f"session {item.session_id!r}: {reason}"))
        instead = in_place_of(item.message, reason)
        return [] if instead is None else [item._replace(message=instead)]

    # ---- the door: what may come in at all

    def _admit(self, delivery: Delivery) -> Arrived | Removal:
        """A readable message that may be decided on, or how to get rid of the entry."""
        source = Source(INBOX if delivery.stream == self.keys.inbox else RESULTS, delivery.entry_id)
        if delivery.fields is None:
            return self._drop(delivery, "deleted_while_pending")
        message: Any = MESSAGE_CODEC.decode_fields(delivery.fields)
        reason = self._objection(message, source)
        if reason is not None:
            return self._bury(delivery, reason)
        if isinstance(message, UnreadableTask):
            return self._bury_task(delivery, message)
        if isinstance(message, StartTurn):
            return Arrived(source, Start(message, ""), message.session_id)
        if isinstance(message, TimerFired):
            return Arrived(source, message, message.session_id)
        if message.token != make_token(self._secret, message.turn_id, message.call, message.attempt):
            return self._drop(delivery, "bad_token")
        if isinstance(message, ModelReply) or (isinstance(message, DeliveryLost) and "." not in message.call):
            self._left_stream(message.session_id)
        return Arrived(source, message, message.session_id)

    def _objection(self, message: object, source: Source) -> str | None:
        """Why an entry goes to the dead letters; None where it may be decided on."""
        if isinstance(message, Unreadable):
            return message.reason
        is_command = isinstance(message, StartTurn)
        if is_command != (source.stream == INBOX):
            return f"a {getattr(message, 'type', '?')} does not belong into this stream"
        session_id = getattr(message, "session_id", None)
        if session_id is not None and partition_of_session(session_id, self._partitions) != self.number:
            return f"session {session_id!r} does not belong to partition {self.number}"
        if isinstance(message, StartTurn) and partition_of_turn(message.turn_id) != self.number:
            return f"{message.turn_id!r} is not the id of a turn of partition {self.number}"
        return None

    def _bury(self, delivery: Delivery, reason: str) -> Removal:
        _log.warning("message moved to the dead letters", stream=delivery.stream, reason=reason)
        self._count("dead_letters")
        return lambda: dead_letter(self._engine, self.keys.dead, COORDINATOR_GROUP, delivery, reason=reason)

    def _bury_task(self, delivery: Delivery, report: UnreadableTask) -> Removal:
        queue = report.stream.removeprefix(self.keys.base)
        if queue == report.stream or not is_task_queue(queue):
            return self._bury(delivery, f"{report.stream!r} is no task stream of partition {self.number}")
        original = Delivery(
            report.stream, report.entry_id.encode(), {b"t": report.entry_type.encode(), b"d": report.entry_body}
        )
        _log.warning("task moved to the dead letters", stream=report.stream, reason=report.reason)
        self._count("dead_letters")

        async def move() -> None:
            await dead_letter(self._engine, self.keys.dead, COORDINATOR_GROUP, original, reason=report.reason)
            await self._acknowledge(delivery)

        return move

    def _drop(self, delivery: Delivery, counter: str) -> Removal:
        """Acknowledge what is not worth a decision, and count it."""
        self._count(counter)

        async def drop() -> None:
            await self._engine.call("HINCRBY", self.keys.stats, counter, 1)
            await self._acknowledge(delivery)

        return drop

    async def _acknowledge(self, delivery: Delivery) -> None:
        self._engine.call("XACK", delivery.stream, COORDINATOR_GROUP, delivery.entry_id)
        await self._engine.call("XDEL", delivery.stream, delivery.entry_id)

    # ---- decide and commit

    async def _commit(self, arrived: list[Arrived], known: set[str], batch: int) -> list[Arrived]:
        """One round: load, decide, commit. Returns what must be decided again.

        The states are cached as if the commit had landed, for the batch behind. If it is refused they are dropped, and
        what was decided on them meanwhile is refused as well: it expects a version that nobody wrote.
        """
        async with self._deciding:
            self._trim_caches()
            by_session: dict[str, list[Arrived]] = {}
            waiting = []
            for item in arrived:
                if self._comes_later(item.session_id, batch):
                    waiting.append(item)
                else:
                    by_session.setdefault(item.session_id, []).append(item)
            postponed = await self._prepare(by_session) + waiting
            self._hold_back(batch, {item.session_id for item in postponed})
            now_ms = self._clock.now_ms()
            commits = [self._decide(session_id, items, now_ms, known) for session_id, items in by_session.items()]
            await self._note_queues(commits)
            reply = self._store.commit(commits, now_ms, self.window.admit)
        again: list[Arrived] = []
        for commit, result in zip(commits, await reply, strict=True):
            if result == STALE:
                self._count("stale_commits")
            elif result == TURN_EXISTS:
                assert commit.new_turn is not None
                known.add(commit.new_turn)
            else:
                continue
            self._sessions.pop(commit.session_id, None)
            again += by_session[commit.session_id]
        again += postponed
        self._hold_back(batch, {item.session_id for item in again})
        return again

    async def _prepare(self, by_session: dict[str, list[Arrived]]) -> list[Arrived]:
        """Have every state and plan at hand that the decisions need; what is postponed to the next round."""
        await self._load_sessions(by_session)
        postponed = await self._resolve(by_session)
        # A refusal of the batch before may have dropped states meanwhile; nothing is awaited after this look.
        while any(session_id not in self._sessions for session_id in by_session):
            await self._load_sessions(by_session)
            for session_id in by_session:
                if session_id in self._sessions:
                    await self._load_plans(self._sessions[session_id].state)
        return postponed

    async def _load_sessions(self, by_session: dict[str, list[Arrived]]) -> None:
        missing = [session_id for session_id in by_session if session_id not in self._sessions]
        if missing:
            self._sessions.update(await self._store.load(missing))

    async def _resolve(self, by_session: dict[str, list[Arrived]]) -> list[Arrived]:
        """Give every start its plan, and have the plans at hand that the states name.

        The script guards one new turn for each item, so of several starts on one session the later ones are postponed.
        """
        postponed: list[Arrived] = []
        for session_id, items in by_session.items():
            starts = 0
            for position, item in enumerate(items):
                message = item.message
                if not isinstance(message, Start):
                    continue
                starts += 1
                if starts > 1:
                    postponed += items[position:]
                    del items[position:]
                    break
                if message.problem is not None:
                    continue
                resolved = await self._registry.resolve(self.keys, message.command)
                if resolved.plan is not None:
                    self._plans[resolved.plan_id] = resolved.plan
                items[position] = item._replace(message=Start(message.command, resolved.plan_id, resolved.problem))
            if session_id in self._sessions:
                await self._load_plans(self._sessions[session_id].state)
        return postponed

    async def _load_plans(self, state: SessionState) -> None:
        for plan_id in state.plan_ids:
            if plan_id not in self._plans:
                plan = await self._registry.load_plan(self.keys, plan_id)
                if plan is not None:
                    self._plans[plan_id] = plan

    def _decide(self, session_id: str, items: list[Arrived], now_ms: int, known: set[str]) -> SessionCommit:
        version, state, writer = self._sessions[session_id]
        decisions = []
        changed = False
        for item in items:
            message = item.message
            if isinstance(message, Start) and message.command.turn_id in known:
                decisions.append(Decision(state, [Count("duplicate_turn")], discarded="duplicate_turn"))
                continue
            decision = advance(state, message, now_ms, session_id, self._plans, self._limits)
            changed = changed or decision.discarded is None
            state = decision.state
            decisions.append(decision)
        effects, live, new_turn = fold(decisions)
        self._sessions[session_id] = Versioned(version + 1, state, self._store.writer)
        return SessionCommit(
            session_id,
            version,
            state if changed else None,
            [item.source for item in items],
            effects,
            live,
            new_turn,
            writer,
        )

    async def _note_queues(self, commits: list[SessionCommit]) -> None:
        """Remember every task stream before its first task, so that a later owner knows where to look for lost ones."""
        names = set()
        for commit in commits:
            for effect in commit.effects:
                if isinstance(effect, DispatchModel):
                    names.add(model_queue(effect.pool))
                elif isinstance(effect, DispatchTool):
                    names.add(tool_queue(effect.queue))
        new = names - self._queues
        if new:
            await self._engine.call("SADD", self.keys.queues, *new)
            self._queues |= new

    # ---- small things

    def _pools(self) -> set[str]:
        return {pool for name in self._queues if (pool := pool_of_queue(name)) is not None} | {"default"}

    def _left_stream(self, session_id: str) -> None:
        cached = self._sessions.get(session_id)
        turn = cached.state.turn if cached else None
        plan = self._plans.get(turn.plan_id) if turn else None
        if plan is not None:
            self.window.completed(plan.pool)

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def _trim_caches(self) -> None:
        while len(self._sessions) > _CACHED_SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        while len(self._plans) > _CACHED_PLANS_MAX:
            del self._plans[next(iter(self._plans))]

    async def _retrying(self, action: Removal) -> None:
        """Do something idempotent until the engine has answered."""
        while True:
            try:
                await action()
                return
            except EngineUnavailable:
                await self._engine.ready()
            except EngineReplyError as error:
                if is_group_missing(error):
                    await create_groups(self._engine, [self.keys.inbox, self.keys.results], COORDINATOR_GROUP)
                await asyncio.sleep(0.2)
