"""The lifecycle feed: which turns start and end in a whole namespace, for monitors.

Every partition has a feed of its own, so a follower has a cursor for each. Entries of different partitions come in the
order they are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.errors import EngineReplyError, EngineUnavailable
from turnmill.protocol.keys import Keys

_BLOCK_MS = 1000
_COUNT = 200
_AGAIN_SECONDS = 0.1


class FeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One lifecycle event. `id` is its place in its partition's feed; its first number is the time in ms."""

    id: str
    partition: int
    type: str
    turn_id: str
    session_id: str
    agent_id: str
    detail: str | None = None


Cursors = dict[int, bytes]
"""The last entry seen, by partition."""


async def feed_ends(engine: Engine, keys: Keys) -> Cursors:
    """Where the feeds end now: to follow what comes after a look at the records."""
    replies = await asyncio.gather(*[engine.call("XREVRANGE", k.feed, "+", "-", "COUNT", 1) for k in keys.partitions])
    return {number: reply[0][0] if reply else b"0-0" for number, reply in enumerate(replies)}


async def follow_feed(engine: Engine, keys: Keys, cursors: Cursors) -> AsyncIterator[FeedEntry]:
    """Every entry behind the cursors, then every new one, without an end. Outlasts losses of the connection."""
    if not engine.is_cluster:
        async for entry in _follow(engine, keys, cursors):
            yield entry
        return
    # On a cluster a read is about one partition: a connection for each, and their entries in one queue.
    found: asyncio.Queue[FeedEntry | Exception] = asyncio.Queue(_COUNT)

    async def collect(number: int) -> None:
        try:
            async for entry in _follow(engine, keys, {number: cursors[number]}):
                await found.put(entry)
        except Exception as error:
            await found.put(error)

    collecting = [asyncio.create_task(collect(number)) for number in cursors]
    try:
        while True:
            next_entry = await found.get()
            if isinstance(next_entry, Exception):
                raise next_entry
            yield next_entry
    finally:
        for task in collecting:
            task.cancel()
        await asyncio.gather(*collecting, return_exceptions=True)


async def _follow(engine: Engine, keys: Keys, cursors: Cursors) -> AsyncIterator[FeedEntry]:
    """The feeds of partitions of one node."""
    seen = dict(cursors)
    numbers = {keys.partitions[number].feed.encode(): number for number in seen}
    streams = list(numbers)
    while True:
        try:
            link = await engine.node_of(streams[0]).open_link()
        except EngineUnavailable:
            await engine.ready()
            await asyncio.sleep(_AGAIN_SECONDS)
            continue
        try:
            while link.is_open:
                reply = await link.call(
                    "XREAD", "COUNT", _COUNT, "BLOCK", _BLOCK_MS,
                    "STREAMS", *streams, *[seen[numbers[name]] for name in streams],
                )  # fmt: skip
                for name, entries in reply or []:
                    for entry_id, fields in entries:
                        seen[numbers[name]] = entry_id
                        yield _entry(numbers[name], entry_id, pairs(fields))
        except EngineUnavailable:
            await engine.ready()
        except EngineReplyError as error:
            if not engine.doubt(error):
                raise
            await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            link.close()


def _entry(partition: int, entry_id: bytes, fields: dict[bytes, bytes]) -> FeedEntry:
    body: dict[str, Any] = msgspec.json.decode(fields[b"d"])
    return FeedEntry(
        id=entry_id.decode(),
        partition=partition,
        type=fields[b"t"].decode(),
        turn_id=body["turn_id"],
        session_id=body["session_id"],
        agent_id=body["agent_id"],
        detail=body.get("detail"),
    )
