"""Messages to bytes and back.

An entry of a stream has the field `t` (the message's type) and `d` (its body); `v` is the protocol version and is left
out while it is 1. The envelope is read before the body: a type or version that is not known here is a value
(`Unreadable`), not a crash, and the caller decides what becomes of it.

Bodies are JSON or MessagePack objects. The first byte tells: a JSON object begins with `{` (0x7b) or white space, a
MessagePack map with 0x80-0x8f, 0xde or 0xdf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from .content import Message
from .errors import MessageTooLarge
from .events import EVENTS, Event, EventBody
from .messages import COMMANDS, FINDINGS, RESULTS, TASKS, Addressed, Answer, AnyMessage, Body, UnreadableTask
from .values import pack_value, unpack_value

WireFormat: TypeAlias = Literal["json", "msgpack"]
PROTOCOL_VERSION = 1
BODY_BYTES_MAX = 64 * 1024 * 1024
"""No message may be larger; what people send is held to the setting `payload_bytes_max` well before that."""

TYPE_FIELD = b"t"
BODY_FIELD = b"d"
VERSION_FIELD = b"v"

_ENCODE_JSON = msgspec.json.Encoder().encode
_ENCODE_MSGPACK = msgspec.msgpack.Encoder().encode
T = TypeVar("T", bound="Body | EventBody")


class Unreadable(msgspec.Struct, frozen=True):
    """An entry that is no message of ours: why, and its bytes as they came."""

    type: ClassVar[str] = "unreadable"
    reason: str
    entry_type: str
    body: bytes


def encode_body(body: msgspec.Struct, wire: WireFormat = "json", bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The bytes of a body. Raises `MessageTooLarge` above `bytes_max`."""
    encoded = _ENCODE_JSON(body) if wire == "json" else _ENCODE_MSGPACK(body)
    if len(encoded) > bytes_max:
        raise MessageTooLarge(
            f"a {getattr(body, 'type', type(body).__name__)} of {len(encoded)} bytes is above the limit of {bytes_max}: "
            "pass large content by reference"
        )
    return encoded


def is_msgpack(body: bytes) -> bool:
    return body[:1] >= b"\x80"


class Codec(Generic[T]):
    """Decodes the bodies of a set of message kinds."""

    def __init__(self, kinds: Iterable[type[Any]]) -> None:
        self._json = {kind.type.encode(): msgspec.json.Decoder(kind) for kind in kinds}
        self._msgpack = {kind.type.encode(): msgspec.msgpack.Decoder(kind) for kind in kinds}

    def decode(self, kind: bytes, body: bytes) -> T | Unreadable:
        decoders: Any = self._msgpack if body[:1] >= b"\x80" else self._json
        decoder = decoders.get(kind)
        if decoder is None:
            return unreadable(f"unknown type {_printable(kind)!r}", kind, body)
        try:
            return cast("T", decoder.decode(body))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return unreadable(f"not a {_printable(kind)}: {error}", kind, body)

    def decode_fields(self, fields: Mapping[bytes, bytes]) -> T | Unreadable:
        """An entry's fields to a message; envelope first."""
        kind, body = fields.get(TYPE_FIELD, b""), fields.get(BODY_FIELD, b"")
        version = fields.get(VERSION_FIELD)
        if version is not None and version != b"1":
            return unreadable(
                f"protocol version {_printable(version)}, this process speaks {PROTOCOL_VERSION}", kind, body
            )
        if not kind or not body:
            return unreadable("the entry lacks the field " + ("t" if not kind else "d"), kind, body)
        if len(body) > BODY_BYTES_MAX:
            return unreadable(f"{len(body)} bytes are above the limit of {BODY_BYTES_MAX}", kind, body)
        return self.decode(kind, body)


_ADDRESS_JSON = msgspec.json.Decoder(Addressed)
_ADDRESS_MSGPACK = msgspec.msgpack.Decoder(Addressed)


def read_address(body: bytes) -> Addressed | None:
    """In whose name a task or a result comes, of a body that may be unreadable otherwise."""
    try:
        return _ADDRESS_MSGPACK.decode(body) if is_msgpack(body) else _ADDRESS_JSON.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def unreadable(reason: str, kind: bytes, body: bytes) -> Unreadable:
    return Unreadable(reason, _printable(kind), body)


def unreadable_report(task: Unreadable, stream: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> UnreadableTask:
    """What a worker says of a task that it cannot read: the whole entry."""
    others = {name: value for name, value in fields.items() if name not in (TYPE_FIELD, BODY_FIELD)}
    return UnreadableTask(
        stream=stream,
        entry_id=entry_id.decode(),
        reason=task.reason,
        entry_type=task.entry_type,
        entry_body=task.body,
        entry_fields={name.decode("utf-8", "replace"): value for name, value in others.items()},
    )


def _printable(value: bytes) -> str:
    return value[:64].decode("utf-8", "backslashreplace")


MESSAGE_CODEC: Codec[Any] = Codec((*COMMANDS, *RESULTS, *FINDINGS))
"""What the coordinator reads."""
TASK_CODEC: Codec[Any] = Codec(TASKS)
"""What workers read."""
ANSWER_CODEC: Codec[Any] = Codec((Answer,))
"""What whoever sent a command reads."""
EVENT_CODEC: Codec[Any] = Codec(EVENTS)
"""What watchers read."""

_EVENT_BY_TYPE: dict[str, type[EventBody]] = {kind.type: kind for kind in EVENTS}
_MESSAGE_KINDS: tuple[type[Body], ...] = (*COMMANDS, *TASKS, *RESULTS, *FINDINGS, Answer)
_MESSAGE_BY_TYPE: dict[str, type[Body]] = {kind.type: kind for kind in _MESSAGE_KINDS}


def event_to_wire(event: Event, wire: WireFormat = "json") -> tuple[bytes, bytes]:
    """The fields `t` and `d` of an event whose free values may hold bytes."""
    return event.type.encode(), encode_body(_map_free(event, pack_value), wire)


def event_from_wire(kind: bytes, body: bytes) -> Event | Unreadable:
    """The event of an entry's fields, bytes in free values restored."""
    event = EVENT_CODEC.decode(kind, body)
    if b"$bytes" in body or b"$escaped" in body:
        event = _map_free(event, unpack_value)
    return cast("Event | Unreadable", event)


def event_to_dict(event: Event) -> dict[str, Any]:
    """The JSON-compatible form of an event: `{"type": ..., <fields>}`; bytes as base64 where the type says bytes, and as
    `{"$bytes": ...}` in free values."""
    return {"type": event.type, **msgspec.to_builtins(_map_free(event, pack_value))}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The event of a dict form. Raises `ValueError` for an unknown type or fields that do not fit."""
    kind = _EVENT_BY_TYPE.get(data.get("type", ""))
    if kind is None:
        raise ValueError(f"unknown event type {data.get('type')!r}")
    body = {key: value for key, value in data.items() if key != "type"}
    return cast("Event", _map_free(msgspec.convert(body, kind), unpack_value))


def message_to_dict(message: AnyMessage) -> dict[str, Any]:
    return {"type": message.type, **msgspec.to_builtins(_map_free(message, pack_value))}


def message_from_dict(data: Mapping[str, Any]) -> AnyMessage:
    kind = _MESSAGE_BY_TYPE.get(data.get("type", ""))
    if kind is None:
        raise ValueError(f"unknown message type {data.get('type')!r}")
    body = {key: value for key, value in data.items() if key != "type"}
    return cast("AnyMessage", _map_free(msgspec.convert(body, kind), unpack_value))


_FREE_FIELDS = frozenset({"result", "data", "arguments", "metadata", "overrides", "signals"})
S = TypeVar("S")


def _map_free(value: S, change: Any) -> S:
    """A copy with `change` applied to every free-form field, whatever struct it stands in."""
    if isinstance(value, list):
        return cast("S", [_map_free(item, change) for item in value])
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {}
    for name in value.__struct_fields__:
        item = getattr(value, name)
        typed = isinstance(item, msgspec.Struct) or (name == "data" and isinstance(item, bytes))  # an image's, a file's
        free = name in _FREE_FIELDS and not typed
        fields[name] = change(item) if free else _map_free(item, change)
    return cast("S", type(value)(**fields))


_MESSAGE_JSON = msgspec.json.Decoder(Message)
_MESSAGE_MSGPACK = msgspec.msgpack.Decoder(Message)


def decode_message(body: bytes) -> Message:
    """One entry of a transcript. Raises `msgspec.DecodeError` for bytes that are none."""
    return _MESSAGE_MSGPACK.decode(body) if is_msgpack(body) else _MESSAGE_JSON.decode(body)
