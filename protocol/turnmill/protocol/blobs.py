"""Large values under keys of their own, in the partition of the session that they belong to.

Whoever writes a message with a large value stores the value first, with a lifetime, and sends a reference (`BlobRef`).
The commit that takes the reference into the session keeps the blob from then on, and the session takes it along when it
is deleted. A blob that no commit ever refers to expires by itself. So a value crosses the wire once, however often the
state, the transcript and the events that refer to it are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from ulid import ULID

from .blob_refs import put_back, refs_of, refs_of_result, take_out
from .codec import BODY_BYTES_MAX
from .connection import Engine
from .content import BlobRef, Message, ToolResult
from .errors import MessageTooLarge
from .keys import PartitionKeys
from .streams import read_through

__all__ = ["resolve_messages", "resolve_result", "store_blob", "with_blobs"]

BLOB_LIFETIME_MS = 3_600_000
"""How long a blob waits for the commit that keeps it."""
V = TypeVar("V", Message, ToolResult)


async def store_blob(
    engine: Engine,
    partition_keys: PartitionKeys,
    data: bytes,
    media_type: str | None = None,
    lifetime_ms: int = BLOB_LIFETIME_MS,
) -> BlobRef:
    """Store a value for `lifetime_ms`, or until a commit keeps it. Raises `MessageTooLarge` above 64 MiB."""
    ref, stored = _store(engine, partition_keys, data, media_type, lifetime_ms)
    await stored
    return ref


async def with_blobs(
    engine: Engine, partition_keys: PartitionKeys, value: V, threshold: int, lifetime_ms: int = BLOB_LIFETIME_MS
) -> V:
    """The value with references in place of what is above `threshold` bytes, all of it stored.

    The same object comes back where nothing is that large; then nothing is sent. Raises `MessageTooLarge` above 64 MiB.
    """
    sent: list[Awaitable[object]] = []

    def store(data: bytes, media_type: str | None) -> BlobRef:
        ref, stored = _store(engine, partition_keys, data, media_type, lifetime_ms)
        sent.append(stored)
        return ref

    changed = take_out(value, threshold, store)
    if sent:
        await asyncio.gather(*sent)
    return changed


async def resolve_messages(engine: Engine, partition_keys: PartitionKeys, messages: list[Message]) -> list[Message]:
    """The messages with the values of their blobs; the same list where they have none.

    A blob that is gone becomes a text that says so, and the result that it was an error.
    """
    wanted = [key for message in messages for key in refs_of(message)]
    if not wanted:
        return messages
    values = await _load(engine, partition_keys, wanted)
    return [put_back(message, values) if refs_of(message) else message for message in messages]


async def resolve_result(engine: Engine, partition_keys: PartitionKeys, result: ToolResult) -> ToolResult:
    """The result with the values of its blobs, as `resolve_messages` does it."""
    wanted = refs_of_result(result)
    return put_back(result, await _load(engine, partition_keys, wanted)) if wanted else result


def _store(
    engine: Engine, partition_keys: PartitionKeys, data: bytes, media_type: str | None, lifetime_ms: int
) -> tuple[BlobRef, Awaitable[object]]:
    if len(data) > BODY_BYTES_MAX:
        raise MessageTooLarge(f"a value of {len(data)} bytes is above the limit of {BODY_BYTES_MAX}: pass it by URL")
    key = partition_keys.blob(str(ULID()).lower())
    ref = BlobRef(key=key.removeprefix(partition_keys.base), bytes=len(data), media_type=media_type)
    return ref, engine.call("SET", key, data, "PX", lifetime_ms)


async def _load(engine: Engine, partition_keys: PartitionKeys, keys: Iterable[str]) -> dict[str, bytes | None]:
    names = list(dict.fromkeys(keys))
    values = await read_through(engine, "MGET", *[partition_keys.base + name for name in names])
    return dict(zip(names, values, strict=True))
