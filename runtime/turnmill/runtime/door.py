"""The door of a partition: what may be decided on, and what becomes of the rest.

An entry comes in if it can be read, belongs here, and, from a worker, carries the token of its attempt. What cannot be read
is a dead letter; what is forged or empty is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from turnmill.protocol.codec import (
    BODY_BYTES_MAX,
    BODY_FIELD,
    MESSAGE_CODEC,
    TYPE_FIELD,
    VERSION_FIELD,
    Unreadable,
    is_msgpack,
    read_address,
)
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.dead_letters import Refusal, bury
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.keys import (
    COORDINATOR_GROUP,
    PartitionKeys,
    is_task_queue,
    partition_of_session,
    partition_of_turn,
    valid_name,
    valid_session_id,
)
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import (
    COMMANDS,
    Addressed,
    HandOff,
    ModelReply,
    StartTurn,
    ToolProgress,
    ToolReply,
    UnreadableTask,
)
from turnmill.protocol.namespace import make_token
from turnmill.protocol.streams import Delivery, acknowledge

from .machine import Input, Start, Transfer
from .store import INBOX, RESULTS, Source

_log = get_logger(__name__)

REPLIES: dict[bytes, type[ModelReply] | type[ToolReply]] = {
    kind.type.encode(): kind for kind in (ModelReply, ToolReply)
}
_FROM_WORKERS = frozenset({*REPLIES, ToolProgress.type.encode(), UnreadableTask.type.encode()})
_COMMANDS = frozenset(COMMANDS)
_COMMAND_TYPES = frozenset(kind.type.encode() for kind in COMMANDS)
Removal: TypeAlias = Callable[[], Awaitable[None]]
"""Gets rid of an entry that is not decided on; may be repeated."""


def in_place_of(message: Input, reason: str) -> Input | None:
    """What is decided on in place of a message that could not be: its turn ends, or its call, with the reason."""
    error = ErrorInfo(kind=ErrorKind.INTERNAL, message=f"a message of this turn could not be handled: {reason}")
    match message:
        case Start(problem=None):
            return Start(msgspec.structs.replace(message.command, messages=[], metadata={}, overrides={}), "", error)
        case ModelReply(error=None) | ToolReply(error=None):
            return message.answer(type(message), error=error)
        case _:
            return None


class _CommandIds(NamedTuple):
    """What a command says of itself and its sender, whatever else is wrong with it."""

    turn_id: str
    session_id: str
    agent: str
    answered_as: str
    """The id under which the sender waits for an answer; empty where it does not."""


def _command_ids(fields: Mapping[bytes, bytes]) -> _CommandIds | None:
    kind, body, version = fields.get(TYPE_FIELD, b""), fields.get(BODY_FIELD, b""), fields.get(VERSION_FIELD, b"1")
    if version != b"1" or kind not in _COMMAND_TYPES:
        return None
    try:
        packed = is_msgpack(body)
        said = msgspec.msgpack.decode(body, type=dict) if packed else msgspec.json.decode(body, type=dict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    names = ("turn_id", "session_id", "agent", "request_id", "steering_id")
    turn_id, session_id, agent, *ids = [value if isinstance(value := said.get(name), str) else "" for name in names]
    waiting = next(filter(None, ids), turn_id if said.get("answer") is True else "")
    return _CommandIds(turn_id, session_id, agent or "?", waiting if valid_name(waiting) else "")


def refusal_of(fields: Mapping[bytes, bytes], kind: str) -> Refusal | None:
    """To whom the answer to a command goes that cannot be decided on; None where nobody waits, or nobody knows who."""
    ids = _command_ids(fields)
    return Refusal(ids.answered_as, ids.turn_id, kind) if ids is not None and ids.answered_as else None


class Arrived(NamedTuple):
    """A readable message and where it came from."""

    source: Source
    message: Input
    session_id: str
    letter: Removal | None = None
    """Where the message stands for one that could not be read: makes that a dead letter, after the commit."""


class Door:
    """Lets entries of one partition in. It decides at once; what it turns away is removed later, by what it returns."""

    def __init__(
        self,
        engine: Engine,
        keys: PartitionKeys,
        partitions: int,
        secret: bytes,
        count: Callable[[str], None],
        now_ms: Callable[[], int],
        result_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        """What workers send may have `result_bytes_max` bytes."""
        self._engine = engine
        self._keys = keys
        self._partitions = partitions
        self.secret = secret
        self._count = count
        self._now_ms = now_ms
        self._result_bytes_max = result_bytes_max

    def admit(self, delivery: Delivery) -> Arrived | Removal:
        """A readable message that may be decided on, or how to get rid of the entry."""
        source = Source(INBOX if delivery.stream == self._keys.inbox else RESULTS, delivery.entry_id)
        if delivery.fields is None:
            return self._drop(delivery, "deleted_while_pending")
        reason = self._too_large(delivery.fields, source)
        message: Any = None if reason is not None else MESSAGE_CODEC.decode_fields(delivery.fields)
        reason = reason or self._objection(message, source)
        if reason is not None:
            return self._answer_in_place(delivery, source, reason) or self.bury(delivery, reason)
        if isinstance(message, UnreadableTask):
            return self._bury_task(delivery, message)
        if isinstance(message, StartTurn):
            return Arrived(source, Start(message, ""), message.session_id)
        if isinstance(message, HandOff):
            return Arrived(source, Transfer(message, ""), message.session_id)
        if not isinstance(message, Addressed):
            return Arrived(source, message, message.session_id)
        if message.token != make_token(self.secret, message.turn_id, message.call, message.attempt):
            return self._drop(delivery, "bad_token")
        worker_message: Any = message
        return Arrived(source, worker_message, message.session_id)

    def _answer_in_place(self, delivery: Delivery, source: Source, reason: str) -> Arrived | None:
        """A worker's reply that cannot be read, but says in whose name it comes: its call ends now with the reason, and
        not at its deadline. The reply itself is a dead letter."""
        fields = delivery.fields or {}
        if source.stream == INBOX:
            return self._refuse_start(delivery, source, reason)
        kind = REPLIES.get(fields.get(TYPE_FIELD, b"")) if source.stream == RESULTS else None
        address = read_address(fields.get(BODY_FIELD, b"")) if kind is not None else None
        if kind is None or address is None or not self._is_genuine(address):
            return None
        error = ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=f"the worker's answer could not be read: {reason}")
        letter = self.bury(delivery, reason, is_acknowledged=True)
        return Arrived(source, address.answer(kind, error=error), address.session_id, letter)

    def _refuse_start(self, delivery: Delivery, source: Source, reason: str) -> Arrived | None:
        """A start that cannot be read, but says which turn it means: whoever waits for that turn sees it fail."""
        fields = delivery.fields or {}
        ids = _command_ids(fields)
        if ids is None or fields[TYPE_FIELD] != StartTurn.type.encode():
            return None
        is_ours = partition_of_turn(ids.turn_id) == self._keys.partition and valid_session_id(ids.session_id)
        if not is_ours or partition_of_session(ids.session_id, self._partitions) != self._keys.partition:
            return None
        command = StartTurn(
            turn_id=ids.turn_id, session_id=ids.session_id, agent=ids.agent, messages=[], answer=bool(ids.answered_as)
        )
        error = ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=f"the turn's command could not be read: {reason}")
        letter = self.bury(delivery, reason, is_acknowledged=True, is_answered=True)
        return Arrived(source, Start(command, "", error), ids.session_id, letter)

    def _is_genuine(self, address: Addressed) -> bool:
        """Whether it comes from here, and belongs here."""
        token = make_token(self.secret, address.turn_id, address.call, address.attempt)
        return (
            address.token == token
            and partition_of_session(address.session_id, self._partitions) == self._keys.partition
        )

    def _too_large(self, fields: Mapping[bytes, bytes], source: Source) -> str | None:
        """Workers hold themselves to the limit; one that does not must not fill transcripts and channels."""
        size = sum(map(len, fields.values()))
        limit = self._result_bytes_max
        if source.stream != RESULTS or size <= limit or fields.get(TYPE_FIELD, b"") not in _FROM_WORKERS:
            return None
        if fields[TYPE_FIELD] == UnreadableTask.type.encode() and size <= 2 * limit:
            return None  # it repeats a task, in base64
        return f"{size} bytes are above the limit of {limit} (TURNMILL_PAYLOAD_BYTES_MAX)"

    def _objection(self, message: object, source: Source) -> str | None:
        """Why an entry goes to the dead letters; None where it may be decided on."""
        if isinstance(message, Unreadable):
            return message.reason
        is_command = message.__class__ in _COMMANDS
        if is_command != (source.stream == INBOX):
            return f"a {getattr(message, 'type', '?')} does not belong into this stream"
        session_id = getattr(message, "session_id", None)
        if session_id is not None and partition_of_session(session_id, self._partitions) != self._keys.partition:
            return f"session {session_id!r} does not belong to partition {self._keys.partition}"
        if isinstance(message, StartTurn) and partition_of_turn(message.turn_id) != self._keys.partition:
            return f"{message.turn_id!r} is not the id of a turn of partition {self._keys.partition}"
        return None

    def bury(
        self,
        delivery: Delivery,
        reason: str,
        *,
        origin: Delivery | None = None,
        kind: str = ErrorKind.BAD_REQUEST,
        is_acknowledged: bool = False,
        is_answered: bool = False,
    ) -> Removal:
        """Makes it a dead letter, or what it reports of (`origin`). Who waits for the answer to a command is told, with
        an error of `kind`, if the command's id can be read."""
        buried = origin or delivery
        _log.warning("message moved to the dead letters", stream=buried.stream, reason=reason)
        self._count("dead_letters")
        waits = delivery.stream == self._keys.inbox and not is_answered
        refusal = refusal_of(delivery.fields or {}, kind) if waits else None

        async def move() -> None:
            await bury(
                self._engine,
                self._keys,
                delivery,
                reason,
                now_ms=self._now_ms(),
                origin=origin,
                refusal=refusal,
                is_acknowledged=is_acknowledged,
            )

        return move

    def _bury_task(self, delivery: Delivery, report: UnreadableTask) -> Removal:
        queue = report.stream.removeprefix(self._keys.base)
        if queue == report.stream or not is_task_queue(queue):
            return self.bury(delivery, f"{report.stream!r} is no task stream of partition {self._keys.partition}")
        address = read_address(report.entry_body)
        if address is not None and not self._is_genuine(address):
            # Somebody would put it back into that stream some day, as a task of ours.
            return self.bury(delivery, "it reports of a task that was not made here")
        fields = {TYPE_FIELD: report.entry_type.encode(), BODY_FIELD: report.entry_body}
        fields |= {name.encode(): value for name, value in report.entry_fields.items()}
        fields = {name: value for name, value in fields.items() if value or name not in (TYPE_FIELD, BODY_FIELD)}
        origin = Delivery(report.stream, report.entry_id.encode(), fields)
        return self.bury(delivery, report.reason, origin=origin)

    def _drop(self, delivery: Delivery, counter: str) -> Removal:
        """Acknowledge what is not worth a decision, and count it."""
        self._count(counter)

        async def drop() -> None:
            await self._engine.call("HINCRBY", self._keys.stats, counter, 1)
            await self._acknowledge(delivery)

        return drop

    async def _acknowledge(self, delivery: Delivery) -> None:
        await acknowledge(self._engine, delivery, COORDINATOR_GROUP)
