"""Dead letters as operators handle them: look, put back, drop.

Letters of all partitions are one list, newest first. Putting back is one script per stream, so that a letter goes once
also where two people ask for it at the same time, and nothing is ever in neither place.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.dead_letters import LIST_DEAD_LETTERS, REPLAY_DEAD_LETTERS, letter_name
from turnmill.protocol.keys import Keys, PartitionKeys, is_task_queue

_NAME = re.compile(r"(\d{1,4})-(\d{1,20}-\d{1,20})\Z")
_PAGE = 50
_PREVIEW_BYTES = 4096
_OWN_FIELDS = frozenset({b"reason", b"from", b"id", b"attempts", b"absent", b"displaced", b"t", b"d"})
REPLAYED, DROPPED, GONE = "replayed", "dropped", "gone"

Change: TypeAlias = Callable[[Engine, Keys, Sequence[str]], Coroutine[Any, Any, dict[str, str]]]
"""Does something to letters by their ids, and says what became of each."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that nobody could decide on. `at` is when it was given up, in seconds of the engine's clock; `queue` is
    the stream it came from, behind the partition, such as `inbox` or `tool:default`. `body` are its original bytes, of a
    list only the first of `body_bytes`."""

    id: str
    partition: int
    at: float
    reason: str
    queue: str
    entry_id: str
    attempts: int
    type: str
    body: bytes
    body_bytes: int
    fields: dict[str, bytes] = {}
    """The entry's other fields, such as its version `v`."""
    displaced: str | None = None
    """Of a key that stood in place of a stream: the name it has now. Nobody can replay that."""

    @property
    def is_whole(self) -> bool:
        return len(self.body) == self.body_bytes

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be put back; None where it can."""
        if self.displaced is not None:
            return f"it is no message but a key of type {self.type}, kept as {self.displaced}"
        if self.queue not in ("inbox", "results") and not is_task_queue(self.queue):
            return f"it came from {self.queue!r}, which is no stream of messages here"
        return None


async def list_letters(
    engine: Engine, keys: Keys, *, limit: int | None = 100, reason: str | None = None
) -> list[DeadLetter]:
    """The newest letters whose reason contains a text, newest first, with the beginnings of their bodies."""
    found = await asyncio.gather(*[_newest(engine, part, limit, reason) for part in keys.partitions])
    letters = sorted((letter for part in found for letter in part), key=lambda each: (each.at, each.id), reverse=True)
    return letters[:limit]


async def read_letters(engine: Engine, keys: Keys, names: Iterable[str]) -> list[DeadLetter]:
    """Letters by their ids, whole, without those that are not there. Raises `ValueError` for what is no letter's id."""
    places = [(name, *_place(keys, name)) for name in names]
    replies = await asyncio.gather(*[engine.call("XRANGE", part.dead, at, at) for _, part, at in places])
    return [
        _letter(part, reply[0][0], pairs(reply[0][1]))
        for (_, part, _), reply in zip(places, replies, strict=True)
        if reply
    ]


async def count_letters(engine: Engine, keys: Keys) -> int:
    return sum(await asyncio.gather(*[engine.call("XLEN", part.dead) for part in keys.partitions]))


async def replay_letters(engine: Engine, keys: Keys, names: Sequence[str]) -> dict[str, str]:
    """Put letters back into the streams they came from. What became of each: `replayed`, `gone` (somebody else was
    faster), or why it cannot be."""
    outcome = dict.fromkeys(names, GONE)
    by_stream: dict[tuple[int, str], list[DeadLetter]] = {}
    for letter in await _headers(engine, keys, names):
        if letter.obstacle is not None:
            outcome[letter.id] = letter.obstacle
        else:
            by_stream.setdefault((letter.partition, letter.queue), []).append(letter)
    for (number, queue), letters in by_stream.items():
        part = keys.partitions[number]
        ids = [letter.id.partition("-")[2] for letter in letters]
        for entry_id in await REPLAY_DEAD_LETTERS.run(engine, [part.dead, part.base + queue], ids):
            outcome[letter_name(number, entry_id)] = REPLAYED
    return outcome


async def drop_letters(engine: Engine, keys: Keys, names: Sequence[str]) -> dict[str, str]:
    """Delete letters, and what they stand for where that is a key. Each: `dropped`, or `gone`."""
    outcome = dict.fromkeys(names, GONE)
    for letter in await _headers(engine, keys, names):
        part = keys.partitions[letter.partition]
        if await engine.call("XDEL", part.dead, letter.id.partition("-")[2]):
            outcome[letter.id] = DROPPED
        if letter.displaced is not None and letter.displaced.startswith(part.base):
            await engine.call("UNLINK", letter.displaced)
    return outcome


async def letter_pages(engine: Engine, keys: Keys, reason: str | None = None) -> AsyncIterator[list[str]]:
    """The ids of all letters that are there now, in pages: what comes meanwhile, such as one that was put back and is
    given up again, is not among them."""
    seconds, microseconds = await engine.call("TIME")
    newest = f"{int(seconds) * 1000 + int(microseconds) // 1000}"
    for part in keys.partitions:
        async for page in _pages(engine, part, reason, newest):
            if page:
                yield [letter.id for letter in page]


async def _newest(engine: Engine, part: PartitionKeys, limit: int | None, reason: str | None) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    async for page in _pages(engine, part, reason, "+"):
        letters += page
        if limit is not None and len(letters) >= limit:
            break
    return letters


async def _pages(
    engine: Engine, part: PartitionKeys, reason: str | None, newest: str, preview_bytes: int = _PREVIEW_BYTES
) -> AsyncIterator[list[DeadLetter]]:
    while True:
        rows = await LIST_DEAD_LETTERS.run(engine, [part.dead], [newest, _PAGE, preview_bytes])
        letters = [_letter(part, entry_id, pairs(fields), size) for entry_id, fields, size in rows]
        yield [letter for letter in letters if reason is None or reason in letter.reason]
        if len(rows) < _PAGE:
            return
        newest = "(" + rows[-1][0].decode()


async def _headers(engine: Engine, keys: Keys, names: Sequence[str]) -> list[DeadLetter]:
    """Letters by their ids, with the beginnings of their bodies."""
    places = [_place(keys, name) for name in names]
    calls = [LIST_DEAD_LETTERS.run(engine, [part.dead], [at, 1, _PREVIEW_BYTES]) for part, at in places]
    found = []
    for (part, at), rows in zip(places, await asyncio.gather(*calls), strict=True):
        if rows and rows[0][0].decode() == at:
            found.append(_letter(part, rows[0][0], pairs(rows[0][1]), rows[0][2]))
    return found


def check_name(keys: Keys, name: str) -> None:
    """Raises `ValueError` for what is no letter's id."""
    _place(keys, name)


def _place(keys: Keys, name: str) -> tuple[PartitionKeys, str]:
    match = _NAME.match(name)
    if match is None or int(match[1]) >= len(keys.partitions):
        raise ValueError(f"{name!r} is no dead letter's id: <partition>-<time>-<number>")
    return keys.partitions[int(match[1])], match[2]


def _letter(part: PartitionKeys, entry_id: bytes, fields: dict[bytes, Any], size: int | None = None) -> DeadLetter:
    body = fields.get(b"d", b"")
    attempts = fields.get(b"attempts", b"1")
    displaced = fields.get(b"displaced")
    return DeadLetter(
        id=letter_name(part.partition, entry_id),
        partition=part.partition,
        at=int(entry_id.partition(b"-")[0]) / 1000,
        reason=_text(fields.get(b"reason", b"?")),
        queue=_text(fields.get(b"from", b"?")).removeprefix(part.base),
        entry_id=_text(fields.get(b"id", b"")),
        attempts=int(attempts) if attempts.isdigit() else 1,
        type=_text(fields.get(b"t", b"")),
        body=body,
        body_bytes=len(body) if size is None else size,
        fields={_text(name).removeprefix("field:"): value for name, value in fields.items() if name not in _OWN_FIELDS},
        displaced=None if displaced is None else _text(displaced),
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
