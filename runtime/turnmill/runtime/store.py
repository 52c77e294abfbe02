"""Sessions in the engine: load their records, and commit decisions in one script, fenced by version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, assert_never

import msgspec

from turnmill.protocol.acknowledgement import NO_REPLICA
from turnmill.protocol.codec import WireFormat, encode_body
from turnmill.protocol.connection import Argument, Engine
from turnmill.protocol.keys import COORDINATOR_GROUP, PartitionKeys
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import ModelTask, StartTurn, SubTurnEnded, ToolTask
from turnmill.protocol.namespace import make_token
from turnmill.protocol.settings import Settings
from turnmill.protocol.streams import COMMIT_TURNS, publication_header

from .dispatch import Place
from .effects import (
    Append,
    Cancel,
    Count,
    Decision,
    DeleteSession,
    DispatchModel,
    DispatchTool,
    Effect,
    Feed,
    Index,
    Keep,
    Load,
    Publish,
    Record,
    Replace,
    Reply,
    Send,
    SetTimer,
)
from .state import BLANK, SessionState, decode_state, encode_state

_log = get_logger(__name__)
INBOX, RESULTS = 1, 2
"""The numbers of a partition's two source streams in the commit script."""
STALE = -1
TURN_EXISTS = -2
_APPEND_CHUNK = 1000
TOLD_MS = 60_000
"""How long a turn that was stopped because its session goes can be asked about."""
_encode_json = msgspec.json.Encoder().encode

_Single: TypeAlias = (
    DispatchModel
    | DispatchTool
    | Send
    | Replace
    | Cancel
    | Reply
    | Keep
    | Load
    | Record
    | Index
    | Feed
    | SetTimer
    | Count
)
"""Effects that are written one by one; the others are joined."""

AdmitModelTask: TypeAlias = Callable[[str, str], Place]
"""Where a task of a pool and a provider goes: into its stream, or into the backlog of its lane."""


class Versioned(NamedTuple):
    """A session's record, the version it was read at, and who wrote that."""

    version: int
    state: SessionState
    writer: str = ""


class Source(NamedTuple):
    """A message that a commit acknowledges."""

    stream: int
    entry_id: bytes


class SessionCommit(NamedTuple):
    """What was decided on one session's messages, folded in their order."""

    session_id: str
    expected_version: int
    state: SessionState | None
    sources: list[Source]
    effects: list[Effect]
    live: str | None
    new_turn: str | None
    expected_writer: str = ""
    before: SessionState | None = None
    """The state that it was decided on: what telemetry knows of a turn that ends."""


class Retention(NamedTuple):
    """How long things are kept after their end, in ms."""

    events_ms: int
    record_ms: int
    feed_length: int
    answer_ms: int = 300_000
    cancel_ms: int = 86_400_000

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        return cls(
            settings.event_ttl * 1000,
            settings.record_ttl * 1000,
            settings.feed_length,
            settings.answer_ttl * 1000,
            settings.cancel_ttl * 1000,
        )

    @property
    def of_deleted(self) -> Retention:
        """For turns that end with their session."""
        told_ms = min(TOLD_MS, self.events_ms)
        return self._replace(events_ms=told_ms, record_ms=told_ms)


def fold(decisions: Sequence[Decision]) -> tuple[list[Effect], str | None, str | None]:
    """The effects, the last change of `live` and the new turn of several decisions on one session."""
    effects: list[Effect] = []
    live = new_turn = None
    for decision in decisions:
        effects += decision.effects
        live = decision.live if decision.live is not None else live
        new_turn = decision.new_turn or new_turn
    return effects, live, new_turn


def _is_nothing(commit: SessionCommit) -> bool:
    """Whether a session that does not exist goes on not to exist."""
    return commit.expected_version == 0 and commit.state == BLANK


def _last_deletion(effects: Sequence[Effect]) -> int:
    """The place of the last deletion among the effects; -1 where there is none."""
    for position in range(len(effects) - 1, -1, -1):
        if effects[position].__class__ is DeleteSession:
            return position
    return -1


class Store:
    """The sessions of one partition."""

    def __init__(
        self,
        engine: Engine,
        keys: PartitionKeys,
        secret: bytes,
        retention: Retention,
        wire: WireFormat,
        writer: str = "",
    ) -> None:
        """`writer` names this owner of the partition among all others."""
        self.writer = writer
        self.acknowledgement = NO_REPLICA
        self._engine = engine
        self._keys = keys
        self.secret = secret
        self._retention = retention
        self._wire: WireFormat = wire

    async def load(self, session_ids: Iterable[str]) -> dict[str, Versioned]:
        """The records of sessions, in one round trip; a session that is new has version 0."""
        wanted = list(session_ids)
        calls = [self._engine.call("HMGET", self._keys.session(name), "v", "s", "w") for name in wanted]
        replies = await asyncio.gather(*calls)
        return {
            name: Versioned(
                int(version or 0), decode_state(state) if state else SessionState(), (writer or b"").decode()
            )
            for name, (version, state, writer) in zip(wanted, replies, strict=True)
        }

    def commit(
        self, commits: Sequence[SessionCommit], now_ms: int, admit: AdmitModelTask
    ) -> Coroutine[Any, Any, list[int]]:
        """One script call for all. Gives for each the new version, `STALE` or `TURN_EXISTS`.

        Raises `EngineUnavailable` where the outcome is unknown: load again then, the version tells.
        """
        writer = _Writer(self._keys, self.secret, self._retention, self._wire, admit, f"{self.writer}-{now_ms}")
        for commit in commits:
            writer.add(commit)
        arguments = [COORDINATOR_GROUP, now_ms, len(commits), self.writer, *writer.arguments]
        committed = COMMIT_TURNS.run(self._engine, writer.keys, arguments)
        return self._acknowledged(committed) if self.acknowledgement.replicas else committed

    async def _acknowledged(self, committed: Coroutine[Any, Any, list[int]]) -> list[int]:
        """Nothing can be taken back where replicas are missing: the commit stands, and the log says so."""
        versions = await committed
        missing = await self.acknowledgement.missing(self._engine.node_of(self._keys.inbox))
        if missing:
            _log.warning("committed without enough replicas", missing=missing)
        return versions


class _Writer:
    """Writes commits as the keys and arguments of the script."""

    def __init__(
        self,
        keys: PartitionKeys,
        secret: bytes,
        retention: Retention,
        wire: WireFormat,
        admit: AdmitModelTask,
        name: str,
    ) -> None:
        """`name` is this call's alone."""
        self._name = name
        self._names = keys
        self._secret = secret
        self._retention = retention
        self._wire: WireFormat = wire
        self._admit = admit
        self.keys: list[Argument] = [keys.inbox, keys.results]
        self._numbers: dict[str, int] = {keys.inbox: INBOX, keys.results: RESULTS}
        self.arguments: list[Argument] = []

    def add(self, commit: SessionCommit) -> None:
        arguments = self.arguments
        start = len(arguments)
        arguments += (
            0,  # the position of the next item, known at the end
            self._key(self._names.session(commit.session_id)),
            commit.expected_version,
            commit.expected_writer,
            self._key(self._names.turn(commit.new_turn)) if commit.new_turn else 0,
            "-" if commit.live is None else commit.live,
            b"" if commit.state is None or _is_nothing(commit) else encode_state(commit.state),
            len(commit.sources),
        )
        for source in commit.sources:
            arguments += source
        count_at = len(arguments)
        arguments.append(0)
        arguments[count_at] = self._effects(commit)
        arguments[start] = len(arguments) + 5  # behind the four arguments of the script itself, counted from 1

    def _key(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            self.keys.append(name)
            number = self._numbers[name] = len(self.keys)
        return number

    def _effects(self, commit: SessionCommit) -> int:
        """Write the effects; events of one turn become one append, and so do transcript entries. What every turn has
        comes first here and below: this is the hot path."""
        published: dict[str, list[Publish]] = {}
        appended: list[Append] = []
        deletion = _last_deletion(commit.effects)
        self._is_deletion = deletion >= 0
        self._owned_count = count = 0
        for position, effect in enumerate(commit.effects):
            kind = effect.__class__
            if kind is Publish:
                published.setdefault(effect.turn_id, []).append(effect)  # type: ignore[union-attr, arg-type]
            elif kind is Append:
                appended.append(effect)  # type: ignore[arg-type]
            elif kind is DeleteSession:
                appended = []
                self._delete(commit)
                count += 1
            elif position < deletion and (kind is Record or kind is Index):
                if kind is Record:
                    count += self._record_of_deleted(effect)  # type: ignore[arg-type]
            else:
                self._effect(commit.session_id, effect)  # type: ignore[arg-type]
                count += 1
        for turn_id, events in published.items():
            self._publish(turn_id, events, self._retention.of_deleted if deletion >= 0 else self._retention)
        if appended:
            count += self._append(self._names.transcript(commit.session_id), appended)
        return count + self._owned_count + len(published)

    def _effect(self, session_id: str, effect: _Single) -> None:
        """Write an effect that stands for itself: what plain turns have is here, the rest below."""
        arguments, names = self.arguments, self._names
        match effect:
            case Record(turn_id, fields, ends, releases):
                lifetime_ms = self._retention.record_ms if ends else 0
                self._record(turn_id, fields, lifetime_ms)
                self._release(turn_id, releases)
                if ends:
                    self._own(session_id, names.turn(turn_id), lifetime_ms)
            case DispatchModel():
                self._dispatch_model(effect)
            case Feed():
                entry = {
                    "turn_id": effect.turn_id,
                    "session_id": effect.session_id,
                    "agent_id": effect.agent_id,
                    "detail": effect.detail,
                }
                length = self._retention.feed_length
                arguments += ("F", self._key(names.feed), length, effect.event, _encode_json(entry))
            case SetTimer(at_ms):
                timer = ("R", self._key(names.timers)) if at_ms is None else ("T", self._key(names.timers), at_ms)
                arguments += (*timer, session_id)
            case DispatchTool(task, queue):
                arguments += ("X", self._key(names.tool(queue)), task.type, self._task(task))
            case Index(turn_id, created_ms):
                arguments += ("T", self._key(names.turns), created_ms, turn_id)
            case Send() | Cancel() | Reply() | Keep() | Replace() | Load() | Count():
                self._seldom(session_id, effect)
            case _:
                assert_never(effect)

    def _seldom(self, session_id: str, effect: Send | Cancel | Reply | Keep | Replace | Load | Count) -> None:
        arguments, names = self.arguments, self._names
        match effect:
            case Send():
                self._send(effect)
            case Cancel(turn_id, reason):
                marker, channel = self._key(names.cancel(turn_id)), self._key(names.cancellations)
                arguments += ("M", marker, channel, self._retention.cancel_ms, turn_id, reason)
            case Reply(request_id, answer):
                body = encode_body(answer, self._wire)
                header = publication_header([answer.type], [body])
                key = self._key(names.answer(request_id))
                arguments += ("E", key, 1, self._retention.answer_ms, 1, header, answer.type, body)
                if not self._is_deletion:
                    self._own(session_id, names.answer(request_id), self._retention.answer_ms)
            case Keep(keys):
                kept = [self._key(names.base + key) for key in keys]
                arguments += ("K", self._key(names.blobs(session_id)), len(keys), *kept, *keys)
            case Replace(message):
                arguments += ("L", self._key(names.replacements(session_id)), 1, encode_body(message, self._wire))
            case Load(tenant, change):
                arguments += ("I", self._key(names.load), tenant, change)
            case Count(name):
                arguments += ("N", self._key(names.stats), name)
            case _:
                assert_never(effect)

    def _delete(self, commit: SessionCommit) -> None:
        """The record stays where a new turn came in the same batch, behind the deletion."""
        names, session_id, state = self._names, commit.session_id, commit.state
        gone = [names.transcript(session_id), names.replacements(session_id), names.values(session_id)]
        if state is None or (state.turn is None and not state.length):
            gone.append(names.session(session_id))
        numbers = [self._key(name) for name in gone]
        # No two deletions may put aside under one name.
        name = f"{self._name}-{commit.expected_version}-{len(self.arguments)}"
        removal, removed_owned = names.removal(f"{name}:{session_id}"), names.removal(f"{name}-owned:{session_id}")
        aside = [self._key(key) for key in (names.owned(session_id), removal, removed_owned, names.removals)]
        self.arguments += ("D", self._key(names.blobs(session_id)), *aside, names.base, len(numbers), *numbers)

    def _record(self, turn_id: str, fields: Mapping[str, Argument], lifetime_ms: int) -> None:
        arguments = self.arguments
        arguments += ("H", self._key(self._names.turn(turn_id)), lifetime_ms, len(fields))
        for item in fields.items():
            arguments += item

    def _own(self, session_id: str, key: str, lifetime_ms: int) -> None:
        self._owned_count += 1
        name = key.removeprefix(self._names.base)
        self.arguments += ("O", self._key(self._names.owned(session_id)), lifetime_ms, name)

    def _release(self, turn_id: str, name: str) -> None:
        if name:
            self._owned_count += 1
            self.arguments += ("C", self._key(self._names.base + name), turn_id)

    def _record_of_deleted(self, effect: Record) -> int:
        """A turn that ends with its session is told for a moment, and listed no more; the number of effects."""
        if not effect.ends:
            self._record(effect.turn_id, effect.fields, 0)
            return 1
        self._record(effect.turn_id, effect.fields, self._retention.of_deleted.record_ms)
        self._release(effect.turn_id, effect.releases)
        self.arguments += ("R", self._key(self._names.turns), effect.turn_id)
        return 2

    def _dispatch_model(self, effect: DispatchModel) -> None:
        names, place = self._names, self._admit(effect.pool, effect.provider)
        lane, task = place.lane, effect.task
        if lane.provider:
            task = msgspec.structs.replace(task, provider=lane.provider)
        body = self._task(task)
        if not place.waits:
            self.arguments += ("X", self._key(names.model(effect.pool)), task.type, body)
            return
        backlog, clock = names.backlog(lane.name), names.backlog_clock(lane.name)
        self.arguments += ("B", self._key(backlog), self._key(clock), effect.tenant, effect.priority, body)

    def _task(self, task: ModelTask | ToolTask) -> bytes:
        """A task's body, with the token that its result must echo."""
        token = make_token(self._secret, task.turn_id, task.call, task.attempt)
        return encode_body(msgspec.structs.replace(task, token=token), self._wire)

    def _publish(self, turn_id: str, events: list[Publish], retention: Retention) -> None:
        # Only the first event of a turn opens its channel, and only the last one closes it.
        opens, closes = events[0].opens, events[-1].closes
        lifetime = retention.events_ms if closes else 0
        types = [publish.event.type for publish in events]
        bodies = [encode_body(publish.event, self._wire) for publish in events]
        key, header = self._key(self._names.events(turn_id)), publication_header(types, bodies)
        self.arguments += ("E", key, int(opens), lifetime, len(events), header, *types, *bodies)

    def _append(self, key: str, appended: list[Append]) -> int:
        """Write appends to one list; the number of effects."""
        chunks = [appended]
        if len(appended) > _APPEND_CHUNK:
            chunks = [appended[first : first + _APPEND_CHUNK] for first in range(0, len(appended), _APPEND_CHUNK)]
        for chunk in chunks:
            self.arguments += ("L", self._key(key), len(chunk))
            self.arguments += [encode_body(entry.message, self._wire) for entry in chunk]
        return len(chunks)

    def _send(self, effect: Send) -> None:
        """A command goes to the inbox; what a worker might have said, to the results. A sub-turn's parent is given with
        the token that its end must echo."""
        message, stream = effect.message, self._names.inbox
        if isinstance(message, SubTurnEnded):
            stream = self._names.results
        elif isinstance(message, StartTurn) and message.parent is not None:
            parent = message.parent
            token = make_token(self._secret, parent.turn_id, parent.call, parent.attempt)
            message = msgspec.structs.replace(message, parent=msgspec.structs.replace(parent, token=token))
        self.arguments += ("X", self._key(stream), message.type, encode_body(message, self._wire))
