"""A session's handle: what was said on it and kept with it; forks of it, another try at one of its turns, its end.

The transcript is read as it stands, with entries that a retried turn has replaced; a fork takes only those that count.
A fork is a session of its own in the same partition: its entries, values and record are written by one script, and the
blobs that its entries refer to are copied, so that either session may be deleted without the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from ulid import ULID

from turnmill.protocol.blob_refs import refs_of, with_keys
from turnmill.protocol.blobs import resolve_messages
from turnmill.protocol.codec import decode_message, encode_body
from turnmill.protocol.connection import Argument
from turnmill.protocol.content import Message, OutputPart
from turnmill.protocol.errors import (
    CommandRefusedError,
    DefinitionError,
    ErrorKind,
    NotInConversationError,
    SessionBusyError,
)
from turnmill.protocol.keys import valid_session_id
from turnmill.protocol.messages import DeleteSession
from turnmill.protocol.session_values import SessionValues
from turnmill.protocol.streams import FORK_SESSION

from .definitions import Agent, TurnOptions
from .inspection import TurnRecord, read_record, turns_of_session
from .removals import finish_removals
from .state import SessionState, encode_state
from .transcripts import REWIND, current_entries, cut_length, ranges_of, without_rewind

if TYPE_CHECKING:
    from .client import Client
    from .turn import Turn

FORK_WRITER = "fork"
"""Who wrote the first version of a fork's record."""
_EXISTS, _SOURCE_GONE = -1, -2
_PAGE = 1000


class Session:
    """The handle of a session, which need not exist yet. Made by `Client.session`."""

    def __init__(self, client: Client, session_id: str) -> None:
        self.id = _checked_id(session_id)
        self._client = client
        self._keys = client.keys.of_session(session_id)

    def __repr__(self) -> str:
        return f"<Session {self.id}>"

    @property
    def values(self) -> SessionValues:
        """The session's state, as its tools read and change it."""
        return SessionValues(self._client.engine, self._keys, self.id)

    async def messages(self, first: int = 0, end: int | None = None) -> list[Message]:
        """The entries `[first, end)` of the transcript, all of them without `end`; large values in their places."""
        if first < 0 or (end is not None and end < first):
            raise ValueError(f"[{first}, {end}) is no part of a transcript")
        return await resolve_messages(self._client.engine, self._keys, await self._entries(first, end))

    async def turns(self, limit: int = 20) -> list[TurnRecord]:
        """The newest turns of the session, newest first, as far as their records are kept."""
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise DefinitionError(f"turns(limit={limit!r}): at least 1")
        return await turns_of_session(self._client.engine, self._client.keys, self.id, limit)

    async def fork(self, *, new_id: str | None = None, turn: str | None = None, step: int | None = None) -> Session:
        """A new session with the conversation up to the end of `turn`, or of that step of it, and all values of this one.

        Without `turn` it is the whole conversation. Calls without results, those of a step that is under way, are left
        out with the message that made them. The new id is `<root>/<new_id>`, or `<root>/fork-...` without one. Raises
        `CommandRefusedError` where that session exists, and `NotInConversationError` for a turn or step that is not
        there.
        """
        target = Session(self._client, self._fork_id(new_id))
        messages = await self._entries()
        kept = current_entries(messages)
        kept = kept[: cut_length([messages[index] for index in kept], turn, step)]
        if not kept:
            raise NotInConversationError(f"session {self.id} has no messages to fork")
        chosen = [messages[index] for index in kept]
        copied = await self._copy_blobs(chosen)
        changed = {
            position: without_rewind(with_keys(message, copied))
            for position, message in enumerate(chosen)
            if REWIND in message.metadata or refs_of(message)
        }
        await self._write_fork(target, ranges_of(kept), changed, list(copied.values()))
        return target

    async def retry(
        self,
        turn_id: str | None = None,
        message: str | Message | Sequence[Message] | Sequence[OutputPart] | None = None,
        *,
        agent: Agent | str | None = None,
        options: TurnOptions | None = None,
    ) -> Turn:
        """Another try at a turn of this session, the last one without `turn_id`: a new turn from where that one began.

        `message` takes the place of what the turn was started with, `agent` of who answered. The model no longer sees
        the old turn and what came after it; the transcript keeps both. Raises `SessionBusyError` while a turn is live on
        the session, and `NotInConversationError` where the turn is not in the conversation.
        """
        messages = await self._entries()
        kept = current_entries(messages)
        if turn_id is None:
            turn_id = next((messages[index].turn_id for index in reversed(kept) if messages[index].turn_id), None)
        mine = [index for index in kept if turn_id is not None and messages[index].turn_id == turn_id]
        if turn_id is None or not mine:
            replaced = any(entry.turn_id == turn_id for entry in messages) and turn_id is not None
            raise NotInConversationError(
                f"turn {turn_id} of session {self.id} was replaced by another one: retry that, or fork the session"
                if replaced
                else f"session {self.id} has no messages of {f'turn {turn_id}' if turn_id else 'any turn'}"
            )
        record = await read_record(self._client.engine, self._client.keys, turn_id)
        if record is not None and record.state in ("queued", "running", "suspended"):
            text = f"turn {turn_id} is {record.state}: wait for its end, or abort it, and retry it then"
            raise SessionBusyError(text, kind=ErrorKind.SESSION_BUSY, turn_id=turn_id)
        if agent is None and record is None:
            raise NotInConversationError(
                f"the record of turn {turn_id} has expired: say which agent is to answer (agent=)"
            )
        return await self._client.turn(
            agent if agent is not None else record.agent_id if record is not None else "",
            message if message is not None else _given([messages[index] for index in mine]),
            session=self.id,
            options=options,
            on_busy="reject",
            rewind_to=mine[0],
        )

    async def delete(self) -> None:
        """Remove the session with everything that belongs to it; a live turn is stopped first, and can be asked about
        for a minute more. Returns when all is gone, but for sub-turns that have not stopped yet: they follow. Where the
        caller goes away before, the coordinator goes on."""
        request_id = str(ULID()).lower()
        await self._client.request(DeleteSession(session_id=self.id, request_id=request_id), request_id)
        await finish_removals(self._client.engine, self._keys, self.id)

    async def _entries(self, first: int = 0, end: int | None = None) -> list[Message]:
        """Entries of the transcript as they are stored, a page at a time: a reply holds up all others behind it."""
        key, messages = self._keys.transcript(self.id), list[Message]()
        while end is None or first < end:
            last = first + _PAGE if end is None else min(first + _PAGE, end)
            page = await self._client.engine.call("LRANGE", key, first, last - 1)
            messages += [decode_message(entry) for entry in page]
            if len(page) < last - first:
                break
            first = last
        return messages

    def _fork_id(self, new_id: str | None) -> str:
        root = self.id.split("/", 1)[0]
        if new_id is None:
            return f"{root}/fork-{str(ULID()).lower()}"
        return new_id if new_id.startswith(root + "/") else f"{root}/{new_id}"

    async def _copy_blobs(self, messages: list[Message]) -> dict[str, str]:
        """Copies of the blobs that the messages refer to, by the old keys; they expire unless the fork comes to be."""
        engine, base = self._client.engine, self._keys.base
        names = list(dict.fromkeys(key for message in messages for key in refs_of(message)))
        copies = {name: self._keys.blob(str(ULID()).lower()).removeprefix(base) for name in names}
        made = []
        for name, copy in copies.items():
            made.append(engine.call("COPY", base + name, base + copy))
            engine.call("PEXPIRE", base + copy, self._client.settings.blob_ttl * 1000)
        done = await asyncio.gather(*made)
        return {name: copy for (name, copy), ok in zip(copies.items(), done, strict=True) if ok}

    async def _write_fork(
        self, target: Session, ranges: list[tuple[int, int]], changed: dict[int, Message], blobs: list[str]
    ) -> None:
        here, there = self._keys, target._keys
        keys = [
            here.transcript(self.id), here.values(self.id), there.session(target.id), there.transcript(target.id),
            there.values(target.id), there.blobs(target.id), there.timers, *[there.base + name for name in blobs],
        ]  # fmt: skip
        length = sum(end - first for first, end in ranges)
        arguments: list[Argument] = [target.id, encode_state(SessionState(length=length)), FORK_WRITER, len(ranges)]
        for first, end in ranges:
            arguments += (first, end)
        arguments.append(len(changed))
        for index, message in changed.items():
            arguments += (index, encode_body(message, self._client.settings.wire))
        answer = await FORK_SESSION.run(self._client.engine, keys, [*arguments, *blobs])
        if answer == _EXISTS:
            text = f"session {target.id} exists already: choose another id for the fork"
            raise CommandRefusedError(text, kind=ErrorKind.SESSION_EXISTS)
        if answer == _SOURCE_GONE:
            raise CommandRefusedError(f"session {self.id} was deleted meanwhile", kind=ErrorKind.STATE_LOST)


def _checked_id(session_id: str) -> str:
    if not isinstance(session_id, str) or not valid_session_id(session_id):
        raise DefinitionError(f"{session_id!r} is no session id: up to 256 characters without white space or braces")
    return session_id


def _given(messages: list[Message]) -> list[Message]:
    """What a turn was started with: its entries before the first one that a step wrote."""
    first_of_step = next((index for index, message in enumerate(messages) if message.step is not None), len(messages))
    return [
        msgspec.structs.replace(without_rewind(message), turn_id=None)
        for message in messages[:first_of_step]
        if "turnmill" not in message.metadata
    ]
