"""Dead letters: messages that nobody could decide on, with the reason and all that they came with.

A letter is an entry of its partition's stream `dead`. Its fields:

| field | what |
|---|---|
| `reason` | why nobody could decide on it |
| `from`, `id` | the stream and the entry it was |
| `attempts` | how often it was delivered before it was given up, earlier lives included |
| `t`, `d` | type and body as they came; empty where `absent` names them |
| `field:<name>` | any other field of the entry, up to 100 |
| `left_out` | how many more there were |
| `displaced` | of a key that stood in place of a stream: where it is now; `t` is its type |

Its name is `<partition>-<entry id>`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from .codec import BODY_FIELD, TYPE_FIELD
from .connection import Argument, Engine
from .content import ErrorInfo
from .keys import COORDINATOR_GROUP, WORKER_GROUP, PartitionKeys, is_task_queue
from .messages import Answer
from .streams import Delivery, Script

BURY_MESSAGE = Script("bury_message")
REPLAY_DEAD_LETTERS = Script("replay_dead_letters")
LIST_DEAD_LETTERS = Script("list_dead_letters")
DISPLACE_KEY = Script("displace_key")

ATTEMPTS_FIELD = b"attempts"
_KEPT = (TYPE_FIELD, BODY_FIELD)
_LETTERS_MAX = 100_000
_VALUE_BYTES_MAX = 64 * 1024
_ANSWER_TTL_MS = 300_000
_OTHER_FIELDS_MAX = 100
_NAME_HERE = "{letter}"


class Refusal(msgspec.Struct, frozen=True):
    """What the sender of a command is told, and under which id it waits."""

    request_id: str
    turn_id: str
    kind: str


def letter_name(partition: int, entry_id: bytes) -> str:
    return f"{partition}-{entry_id.decode()}"


async def bury(
    engine: Engine,
    keys: PartitionKeys,
    delivery: Delivery,
    reason: str,
    *,
    now_ms: int = 0,
    origin: Delivery | None = None,
    refusal: Refusal | None = None,
    is_acknowledged: bool = False,
) -> None:
    """Move a message of the coordinator's to the dead letters, once, and tell its sender. `origin` is what it reports
    of, where that is the letter: its worker has completed that itself. With `is_acknowledged` a commit has taken it off
    its stream already."""
    buried = origin or delivery
    fields = dict(buried.fields or {})
    names: list[Argument] = [delivery.stream, keys.dead]
    head = tail = b""
    if refusal is not None:
        names.append(keys.answer(refusal.request_id))
        head, tail = _answer(refusal, reason)
    earlier = _number(fields.pop(ATTEMPTS_FIELD, b"0"))
    arguments: list[Argument] = [
        COORDINATOR_GROUP, delivery.entry_id, _LETTERS_MAX, int(is_acknowledged), earlier, now_ms,
        _ANSWER_TTL_MS, head, tail, f"{keys.partition}-", "reason", reason, "from", buried.stream, "id", buried.entry_id,
    ]  # fmt: skip
    await BURY_MESSAGE.run(engine, names, [*arguments, *_letter_fields(fields)])


def is_wrong_type(error: Exception) -> bool:
    """Whether the engine found a key of another type than was expected."""
    return "WRONGTYPE" in str(error)


async def displace_wrong_keys(engine: Engine, keys: PartitionKeys, queues: Iterable[str], ttl_ms: int) -> list[str]:
    """Move away what stands in place of the partition's own keys and is of another type; `queues` are its task queues.
    It is kept for `ttl_ms`. Returns the names of the keys."""
    wanted = {keys.dead: ("stream", ""), keys.inbox: ("stream", COORDINATOR_GROUP)}
    wanted |= {keys.results: ("stream", COORDINATOR_GROUP), keys.feed: ("stream", "")}
    wanted |= {keys.base + name: ("stream", WORKER_GROUP) for name in queues if is_task_queue(name)}
    wanted |= {keys.timers: ("zset", ""), keys.turns: ("zset", ""), keys.queues: ("set", ""), keys.stats: ("hash", "")}
    displaced = []
    for name, (kind, group) in wanted.items():
        where = keys.displaced(f"{name.removeprefix(keys.base)}:{secrets.token_hex(4)}")
        if await DISPLACE_KEY.run(engine, [name, keys.dead, where], [kind, group, _VALUE_BYTES_MAX, ttl_ms]):
            displaced.append(name)
    return displaced


def _letter_fields(fields: dict[bytes, bytes]) -> list[Argument]:
    written: list[Argument] = []
    for name in _KEPT:
        written += (name, fields.get(name, b""))
    absent = [name for name in _KEPT if name not in fields]
    if absent:
        written += ("absent", b" ".join(absent))
    others = [(name, value) for name, value in fields.items() if name not in _KEPT]
    for name, value in others[:_OTHER_FIELDS_MAX]:
        written += (b"field:" + name, value)
    if len(others) > _OTHER_FIELDS_MAX:
        written += ("left_out", len(others) - _OTHER_FIELDS_MAX)
    return written


def _answer(refusal: Refusal, reason: str) -> tuple[bytes, bytes]:
    """The answer's body before and behind the letter's name, which only the script knows."""
    said = f"the command could not be handled ({reason}); it is the dead letter {_NAME_HERE}"
    error = ErrorInfo(kind=refusal.kind, message=said)
    body: Any = msgspec.json.encode(Answer(turn_id=refusal.turn_id, error=error))
    head, _, tail = body.rpartition(_NAME_HERE.encode())
    return head, tail


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) < 10 else 0
