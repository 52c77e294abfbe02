"""The conversation that a task refers to: entries of the session's lists, in the order in which a model sees them.

A task does not carry its messages. It says how far the transcript counts, and, where the session was compacted, which
entries of the transcript and of its replacements stand for the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnmill.protocol.blobs import resolve_messages
from turnmill.protocol.codec import decode_message
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import Message
from turnmill.protocol.errors import TurnmillError
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.messages import Segment


class ConversationLost(TurnmillError):
    """The lists hold less than the task refers to: they were flushed, evicted or deleted."""


async def read_conversation(
    engine: Engine,
    keys: PartitionKeys,
    session_id: str,
    messages: int,
    view: Sequence[Segment] = (),
    view_end: int = 0,
) -> list[Message]:
    """The messages of `view`, then the entries `[view_end, messages)` of the transcript; large values in their places.

    Raises `ConversationLost` where entries are missing, `EngineUnavailable` where they cannot be read.
    """
    if not view and view_end < messages:  # a plain conversation: one list, one answer
        entries = await engine.call("LRANGE", keys.transcript(session_id), view_end, messages - 1)
        _check(entries, (0, view_end, messages), session_id)
        return await resolve_messages(engine, keys, [decode_message(entry) for entry in entries])
    wanted = [segment for segment in (*view, (0, view_end, messages)) if segment[1] < segment[2]]
    lists = (keys.transcript(session_id), keys.replacements(session_id))
    pieces = await asyncio.gather(
        *[engine.call("LRANGE", lists[number], first, end - 1) for number, first, end in wanted]
    )
    for segment, entries in zip(wanted, pieces, strict=True):
        _check(entries, segment, session_id)
    return await resolve_messages(engine, keys, [decode_message(entry) for entries in pieces for entry in entries])


def _check(entries: Sequence[bytes], segment: Segment, session_id: str) -> None:
    number, first, end = segment
    if len(entries) != end - first:
        raise ConversationLost(
            f"{'the transcript' if number == 0 else 'the list of replacements'} of session {session_id} holds "
            f"{first + len(entries)} of {end} messages"
        )
