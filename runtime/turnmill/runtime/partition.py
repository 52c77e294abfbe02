"""One partition in the hands of its coordinator: messages in, decisions committed.

A batch is folded: the messages of one session are decided in order on one state and land in one item of the script.
The cache of states is valid while nobody else commits; the version in every commit finds out if somebody did.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from functools import partial

from turnmill.protocol.acknowledgement import Acknowledgement
from turnmill.protocol.connection import Argument, Engine
from turnmill.protocol.dead_letters import displace_wrong_keys, is_wrong_type
from turnmill.protocol.errors import EngineError, EngineReplyError, EngineUnavailable, ErrorKind
from turnmill.protocol.keys import (
    COORDINATOR_GROUP,
    Keys,
    PartitionKeys,
    model_queue,
    pool_of_queue,
    tool_queue,
)
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import Answer, DeliveryLost, ModelReply
from turnmill.protocol.namespace import ServerClock
from turnmill.protocol.settings import Settings
from turnmill.protocol.specs import Plan, provider_of
from turnmill.protocol.streams import RENUMBER_STREAM, Delivery, create_groups, is_group_missing, is_transient

from .admission import Admission, load_changes
from .dispatch import DispatchWindow
from .door import Arrived, Door, Removal, in_place_of
from .effects import Count, Decision, DispatchModel, DispatchTool, Effect, Reply
from .fleet import PoolSlots
from .machine import Limits, Start, Transfer, advance
from .registry import Registry
from .state import BLANK, SessionState
from .store import STALE, TURN_EXISTS, Retention, SessionCommit, Source, Store, Versioned, fold
from .telemetry import RuntimeTelemetry

_log = get_logger(__name__)
_CACHED_SESSIONS_MAX = 20_000
_DAY_MS = 86_400_000
_CACHED_PLANS_MAX = 2_000
_TIMER_OVERDUE_MS = 5_000
"""A timer that has not fired by then is gone."""


def _known_turn(state: SessionState, start: Start) -> Decision:
    """A turn that is known already, and maybe ended: whoever asks again is told that it was accepted."""
    effects: list[Effect] = [Count("duplicate_turn")]
    if start.command.answer:
        effects.append(Reply(start.command.turn_id, Answer(turn_id=start.command.turn_id)))
    return Decision(state, effects, discarded="duplicate_turn")


def new_writer() -> str:
    """A name for one ownership of a partition, up to the next commit whose outcome is unknown, in the versions that it
    writes."""
    return secrets.token_hex(4)


def _time_of(entry_id: bytes) -> int:
    return int(entry_id[: entry_id.index(b"-")])


class Partition:
    """Decides and commits for one partition: one batch is decided while the one before is being committed."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        number: int,
        settings: Settings,
        secret: bytes,
        clock: ServerClock,
        slots: PoolSlots | None = None,
    ) -> None:
        """Partitions of one coordinator share the `slots`."""
        slots = slots or PoolSlots(engine, keys)
        self.keys: PartitionKeys = keys.partitions[number]
        self.number = number
        self._engine = engine
        self._clock = clock
        session_ttl_ms = (settings.session_ttl or 0) * 1000
        self._limits = Limits(
            settings.session_queue_max, settings.max_attempts, session_ttl_ms, settings.event_bytes_max
        )
        self._store = Store(engine, self.keys, secret, Retention.of(settings), settings.wire, new_writer())
        self._store.acknowledgement = Acknowledgement.of(settings)
        self._registry = Registry(engine, keys, settings.plan_ttl, settings.agent_ttl)
        self.window = DispatchWindow(engine, keys, self.keys, settings.dispatch_window, slots)
        self._admission = Admission(engine, self.keys, self.window, settings, len(keys.partitions))
        self._sessions: dict[str, Versioned] = {}
        self._plans: dict[str, Plan] = {}
        self._queues: set[str] = set()
        self._dead_letter_ttl_ms = settings.dead_letter_ttl * 1000
        self._deciding = asyncio.Lock()
        self._batches = 0
        self._held_back: dict[str, set[int]] = {}
        self._last: asyncio.Future[None] | None = None
        self.in_flight: set[tuple[str, bytes]] = set()
        self.counters: dict[str, int] = {}
        self._telemetry = RuntimeTelemetry()
        self._door = Door(
            engine, self.keys, len(keys.partitions), secret, self._count, clock.now_ms, settings.payload_bytes_max
        )

    def forget(self) -> None:
        """Drop what is cached: another owner may have written since, or the outcome of a commit is unknown. What is decided
        from now on is another writer's: a commit that is still on its way must not fit what is decided again meanwhile."""
        self._sessions.clear()
        self._store.writer = new_writer()
        self._admission.forget()

    async def take_over(self) -> None:
        """Get ready after the lease was taken."""
        self.forget()
        self._telemetry.forget()
        self._queues = await self._known_queues()
        await self.window.look(self._pools(), self._clock.now_ms())

    async def _known_queues(self) -> set[str]:
        try:
            return {name.decode() for name in await self._engine.call("SMEMBERS", self.keys.queues)}
        except EngineReplyError as error:
            if not is_wrong_type(error) or not await self.displace_wrong_keys():
                raise
            return set()

    async def settled(self) -> None:
        """Return when the batches under way are committed."""
        if self._last is not None:
            await asyncio.wait({self._last})
        self.forget()

    @property
    def task_streams(self) -> list[str]:
        """Every task stream that this partition has dispatched to."""
        return [self.keys.base + name for name in sorted(self._queues)]

    async def displace_wrong_keys(self, queues: Iterable[str] = ()) -> bool:
        """Move away what stands in place of a key of this partition and is of another type; whether anything did.
        `queues` are task queues beside those that it has dispatched to."""
        names = self._queues.union(queues)
        try:
            displaced = await displace_wrong_keys(self._engine, self.keys, names, self._dead_letter_ttl_ms)
            if self._queues and self.keys.queues in displaced:
                await self._engine.call("SADD", self.keys.queues, *self._queues)
        except EngineError as error:
            _log.warning("keys not looked at", partition=self.number, error=str(error))
            return False
        for name in displaced:
            _log.error("a key of another type was moved away, see the dead letters", key=name)
            self._count("displaced_keys")
        return bool(displaced)

    def use_secret(self, secret: bytes) -> None:
        """Tokens are made and checked with it from now on."""
        self._store.secret = self._door.secret = secret

    async def put_back(self) -> None:
        """What an engine that lost data does not have any more: the names of queues, and timers that are long overdue."""
        if self._queues:
            await self._engine.call("SADD", self.keys.queues, *self._queues)
        long_ago_ms = self._clock.now_ms() - _TIMER_OVERDUE_MS
        for session_id, (_, state, _) in list(self._sessions.items()):
            if state.timer_ms is not None and state.timer_ms < long_ago_ms:
                await self._engine.call("ZADD", self.keys.timers, "NX", state.timer_ms, session_id)

    async def look_at_window(self) -> None:
        await self.window.look(self._pools(), self._clock.now_ms())

    async def handle(self, deliveries: Sequence[Delivery], *, given_up: str | None = None) -> None:
        """Decide on a batch and commit it. Returns when everything in it is acknowledged. A message that was `given_up`
        becomes a dead letter with this reason, and its turn is told.

        The engine may go away in between: the batch is decided again then, on what was stored.
        """
        self.in_flight.update((delivery.stream, delivery.entry_id) for delivery in deliveries)
        previous, done = self._last, asyncio.get_running_loop().create_future()
        self._last = done
        self._batches += 1
        batch = self._batches
        try:
            await self._handle(deliveries, previous, batch, given_up)
            if self.window.has_backlog:
                await self._retrying(self.window.refill)
            await self._renumber(
                {d.stream for d in deliveries if _time_of(d.entry_id) > self._clock.now_ms() + _DAY_MS}
            )
        finally:
            self._hold_back(batch, set())
            self.in_flight.difference_update((delivery.stream, delivery.entry_id) for delivery in deliveries)
            done.set_result(None)

    async def _renumber(self, streams: set[str]) -> None:
        """Whoever may append may choose an id. One of the far future leaves no room for others, so the stream is made anew."""
        for stream in streams:
            _log.error("a stream had ids of the future, and gets new ones", stream=stream)
            self._count("renumbered_streams")
            arguments: list[Argument] = [COORDINATOR_GROUP, self._clock.now_ms() + _DAY_MS]
            await self._retrying(partial(RENUMBER_STREAM.run, self._engine, [stream], arguments))

    async def _handle(
        self,
        deliveries: Sequence[Delivery],
        previous: asyncio.Future[None] | None,
        batch: int,
        given_up: str | None = None,
    ) -> None:
        """The first round may be decided while the batch before is being committed; whatever must be decided again
        waits for that one, so that the order of arrival holds."""
        admitted = [(self._door.admit(delivery), delivery) for delivery in deliveries]
        arrived = [item for item, _ in admitted if isinstance(item, Arrived)]
        for item in arrived:
            self._note_completion(item)
        by_source = {item.source: delivery for item, delivery in admitted if isinstance(item, Arrived)}
        turned_away = [item for item, _ in admitted if not isinstance(item, Arrived)]
        turned_away += [item.letter for item in arrived if item.letter is not None]
        known: set[str] = set()
        if given_up is not None and arrived:
            arrived = await self._isolate_messages(arrived, by_source, given_up, previous, batch)
        while arrived:
            try:
                arrived = await self._commit(arrived, known, batch)
            except EngineUnavailable:
                self.forget()
                await self._engine.ready()
            except EngineReplyError as error:
                self.forget()
                if is_wrong_type(error) and await self.displace_wrong_keys():
                    pass  # it stood in the way of every message; what was not committed is tried again
                elif is_transient(error):
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
        why = f"session {item.session_id!r}: {reason}"
        await self._retrying(self._door.bury(by_source[item.source], why, kind=ErrorKind.INTERNAL))
        instead = in_place_of(item.message, reason)
        return [] if instead is None else [item._replace(message=instead)]

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
        results = await reply
        if self._telemetry.is_active:
            landed = [commit for commit, result in zip(commits, results, strict=True) if result > 0]
            self._telemetry.committed(landed, now_ms)
        for commit, result in zip(commits, results, strict=True):
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
                if isinstance(message, Transfer):
                    items[position] = item._replace(message=await self._resolve_transfer(message))
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
                problem = resolved.problem
                if resolved.plan is not None:
                    problem = await self._admission.refusal(message.command, resolved.plan.pool)
                items[position] = item._replace(message=Start(message.command, resolved.plan_id, problem))
            if session_id in self._sessions:
                await self._load_plans(self._sessions[session_id].state)
        return postponed

    async def _resolve_transfer(self, transfer: Transfer) -> Transfer:
        resolved = await self._registry.resolve_agent(self.keys, transfer.command.agent)
        if resolved.plan is not None:
            self._plans[resolved.plan_id] = resolved.plan
        return Transfer(transfer.command, resolved.plan_id, resolved.problem)

    async def _load_plans(self, state: SessionState) -> None:
        for plan_id in state.plan_ids:
            if plan_id not in self._plans:
                plan = await self._registry.load_plan(self.keys, plan_id)
                if plan is not None:
                    self._plans[plan_id] = plan

    def _decide(self, session_id: str, items: list[Arrived], now_ms: int, known: set[str]) -> SessionCommit:
        version, state, writer = self._sessions[session_id]
        before = state
        decisions = []
        changed = False
        for item in items:
            message = item.message
            if isinstance(message, Start) and message.command.turn_id in known:
                decisions.append(_known_turn(state, message))
                continue
            decision = advance(state, message, now_ms, session_id, self._plans, self._limits)
            changed = changed or decision.discarded is None
            state = decision.state
            decisions.append(decision)
        effects, live, new_turn = fold(decisions)
        changes = load_changes(before, state)
        if changes:
            effects += changes
            self._admission.note(changes)
        if state == BLANK:  # it has no record, so it has no version either
            del self._sessions[session_id]
        else:
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
            before,
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

    def _note_completion(self, item: Arrived) -> None:
        """A model task has left its stream: the window has room for another one."""
        message = item.message
        if not isinstance(message, ModelReply) and not (isinstance(message, DeliveryLost) and "." not in message.call):
            return
        cached = self._sessions.get(item.session_id)
        turn = cached.state.turn if cached else None
        plan = self._plans.get(turn.plan_id) if turn else None
        if plan is not None:
            self.window.completed(plan.pool, provider_of(plan.agent.model))

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
                elif is_wrong_type(error):
                    await self.displace_wrong_keys()
                await asyncio.sleep(0.2)
