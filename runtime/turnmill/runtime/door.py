"""The door of a partition: what may be decided on, and what becomes of the rest.

An entry comes in if it can be read, belongs here, and, from a worker, carries the token of its attempt. What cannot be read
is a dead letter; what is forged or empty is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from turnmill.protocol.codec import BODY_FIELD, MESSAGE_CODEC, TYPE_FIELD, Unreadable, read_address
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.keys import (
    COORDINATOR_GROUP,
    PartitionKeys,
    is_task_queue,
    partition_of_session,
    partition_of_turn,
)
from turnmill.protocol.logs import get_logger
from turnmill.protocol.messages import (
    COMMANDS,
    Addressed,
    HandOff,
    ModelReply,
    StartTurn,
    ToolReply,
    UnreadableTask,
)
from turnmill.protocol.namespace import make_token
from turnmill.protocol.streams import Delivery, acknowledge, dead_letter

from .machine import Input, Start, Transfer
from .store import INBOX, RESULTS, Source

_log = get_logger(__name__)

REPLIES: dict[bytes, type[ModelReply] | type[ToolReply]] = {
    kind.type.encode(): kind for kind in (ModelReply, ToolReply)
}
_COMMANDS = frozenset(COMMANDS)
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
        self, engine: Engine, keys: PartitionKeys, partitions: int, secret: bytes, count: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._partitions = partitions
        self._secret = secret
        self._count = count

    def admit(self, delivery: Delivery) -> Arrived | Removal:
        """A readable message that may be decided on, or how to get rid of the entry."""
        source = Source(INBOX if delivery.stream == self._keys.inbox else RESULTS, delivery.entry_id)
        if delivery.fields is None:
            return self._drop(delivery, "deleted_while_pending")
        message: Any = MESSAGE_CODEC.decode_fields(delivery.fields)
        reason = self._objection(message, source)
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
        if message.token != make_token(self._secret, message.turn_id, message.call, message.attempt):
            return self._drop(delivery, "bad_token")
        worker_message: Any = message
        return Arrived(source, worker_message, message.session_id)

    def _answer_in_place(self, delivery: Delivery, source: Source, reason: str) -> Arrived | None:
        """A worker's reply that cannot be read, but says in whose name it comes: its call ends now with the reason, and
        not at its deadline. The reply itself is a dead letter."""
        fields = delivery.fields or {}
        kind = REPLIES.get(fields.get(TYPE_FIELD, b"")) if source.stream == RESULTS else None
        address = read_address(fields.get(BODY_FIELD, b"")) if kind is not None else None
        if kind is None or address is None or not self._is_genuine(address):
            return None
        error = ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=f"the worker's answer could not be read: {reason}")
        return Arrived(source, address.answer(kind, error=error), address.session_id, self.bury(delivery, reason))

    def _is_genuine(self, address: Addressed) -> bool:
        """Whether it comes from here, and belongs here."""
        token = make_token(self._secret, address.turn_id, address.call, address.attempt)
        return (
            address.token == token
            and partition_of_session(address.session_id, self._partitions) == self._keys.partition
        )

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

    def bury(self, delivery: Delivery, reason: str) -> Removal:
        _log.warning("message moved to the dead letters", stream=delivery.stream, reason=reason)
        self._count("dead_letters")
        return lambda: dead_letter(self._engine, self._keys.dead, COORDINATOR_GROUP, delivery, reason=reason)

    def _bury_task(self, delivery: Delivery, report: UnreadableTask) -> Removal:
        queue = report.stream.removeprefix(self._keys.base)
        if queue == report.stream or not is_task_queue(queue):
            return self.bury(delivery, f"{report.stream!r} is no task stream of partition {self._keys.partition}")
        original = Delivery(
            report.stream, report.entry_id.encode(), {b"t": report.entry_type.encode(), b"d": report.entry_body}
        )
        _log.warning("task moved to the dead letters", stream=report.stream, reason=report.reason)
        self._count("dead_letters")

        async def move() -> None:
            await dead_letter(self._engine, self._keys.dead, COORDINATOR_GROUP, original, reason=report.reason)
            await self._acknowledge(delivery)

        return move

    def _drop(self, delivery: Delivery, counter: str) -> Removal:
        """Acknowledge what is not worth a decision, and count it."""
        self._count(counter)

        async def drop() -> None:
            await self._engine.call("HINCRBY", self._keys.stats, counter, 1)
            await self._acknowledge(delivery)

        return drop

    async def _acknowledge(self, delivery: Delivery) -> None:
        await acknowledge(self._engine, delivery, COORDINATOR_GROUP)
