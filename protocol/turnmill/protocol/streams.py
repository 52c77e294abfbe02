"""The Redis I/O that workers and runtime share: scripts, groups, blocking reads, completion."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Coroutine, Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple

from .acknowledgement import NO_REPLICA, Acknowledgement
from .connection import Argument, Engine, Link, pairs
from .errors import EngineError, EngineReplyError, EngineUnavailable
from .keys import WORKER_GROUP


class Script:
    """A Lua script of this package. It is sent once per server and called by its hash from then on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = resources.files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")
        self._sha = hashlib.sha1(self.source.encode()).hexdigest()

    def run(self, engine: Engine, keys: Sequence[Argument], arguments: Sequence[Argument]) -> Coroutine[Any, Any, Any]:
        """Send the call now; awaiting gives its reply. Raises `EngineReplyError` where the script fails,
        `EngineUnavailable` where its outcome is unknown."""
        return self._reply(engine.call("EVALSHA", self._sha, len(keys), *keys, *arguments), engine, keys, arguments)

    async def _reply(
        self, sent: asyncio.Future[Any], engine: Engine, keys: Sequence[Argument], arguments: Sequence[Argument]
    ) -> Any:
        for attempt in range(_LOADED_LOOKS):
            try:
                return await sent
            except EngineReplyError as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
                missing = error
            try:
                if attempt == 0:
                    return await engine.call("EVAL", self.source, len(keys), *keys, *arguments)
            except EngineReplyError as error:
                if not (str(error).startswith("NOPERM") and "'eval'" in str(error)):
                    raise
            # This user may run scripts and not send them: a coordinator does that soon.
            await asyncio.sleep(_LOADED_LOOK_SECONDS)
            sent = engine.call("EVALSHA", self._sha, len(keys), *keys, *arguments)
        raise missing


_LOADED_LOOKS, _LOADED_LOOK_SECONDS = 20, 0.5


async def load_scripts(engine: Engine) -> None:
    """Have all scripts of this package in the engine, for users whose access list lets them run scripts that are there,
    and send none."""
    sources = [
        entry.read_text("utf-8")
        for entry in resources.files(__package__).joinpath("lua").iterdir()
        if entry.name.endswith(".lua")
    ]
    digests = [hashlib.sha1(source.encode()).hexdigest() for source in sources]
    known = await engine.call_each("SCRIPT", "EXISTS", *digests)
    if not all(all(flags) for flags in known):
        for source in sources:
            await engine.call_each("SCRIPT", "LOAD", source)


COMMIT_TURNS = Script("commit_turns")
APPEND_DELTAS = Script("append_deltas")
TAKE_LOST_DELIVERY = Script("take_lost_delivery")
FIRE_TIMERS = Script("fire_timers")
DISPATCH_BACKLOG = Script("dispatch_backlog")
RENEW_LEASE = Script("renew_lease")
SWAP_VALUE = Script("swap_value")
FORK_SESSION = Script("fork_session")
REMOVE_SESSION = Script("remove_session")
RENUMBER_STREAM = Script("renumber_stream")


class Delivery(NamedTuple):
    """One entry handed to this consumer. `fields` is None where the entry was deleted while it was pending."""

    stream: str
    entry_id: bytes
    fields: dict[bytes, bytes] | None


async def create_groups(engine: Engine, streams: Iterable[str], group: str) -> None:
    """Create missing groups, always from the beginning: a group made at `$` loses what was written before it."""
    names = list(streams)
    calls = [engine.call("XGROUP", "CREATE", stream, group, "0", "MKSTREAM") for stream in names]
    for name, reply in zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(reply, EngineReplyError) and str(reply).startswith("NOPERM"):
            text = f"{reply}: the engine's user may not read {name} (its access list: `turnmill acl ROLE --queue ...`)"
            raise EngineReplyError(text)
        if isinstance(reply, BaseException) and not str(reply).startswith("BUSYGROUP"):
            raise reply


def is_group_missing(error: EngineReplyError) -> bool:
    """A flushed or deleted stream; servers say it in four ways."""
    text = str(error)
    return (
        text.startswith(("NOGROUP", "UNBLOCKED"))
        or "requires the key to exist" in text
        or "no such key" in text.lower()
    )


def is_transient(error: EngineReplyError) -> bool:
    """A state of the engine that passes: out of memory, loading, a replica, a script that was stopped."""
    text = str(error)
    return text.startswith(_TRANSIENT) or "script was killed" in text or "OOM" in text


_TRANSIENT = (
    "OOM", "READONLY", "MISCONF", "LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "UNKILLABLE",
    "NOSCRIPT",
)  # fmt: skip


_MOVED_SECONDS = (0.02, 0.1)


class GroupReader:
    """Blocking reads of one consumer over several streams, on a link of its own.

    A read is never cancelled: its reply may be on the way, and what it holds would be pending and forgotten. It blocks
    for a short time instead, and the caller looks at its stop flag between reads.
    """

    def __init__(
        self,
        engine: Engine,
        group: str,
        consumer: str,
        key: str | None = None,
        acknowledgement: Acknowledgement = NO_REPLICA,
    ) -> None:
        """On a cluster, `key` is one of the streams: those of one reader are in one partition."""
        self._acknowledgement = acknowledgement
        self._engine = engine
        self._group = group
        self._consumer = consumer
        self._key = key
        self._node = engine
        self._link: Link | None = None
        self._client_id: int | None = None

    async def read(self, streams: Sequence[str], count: int, block_ms: int) -> list[Delivery]:
        """Up to `count` new entries of each stream; an empty list after `block_ms`, or when the engine came back."""
        link = await self._connected()
        if link is None:
            return []
        try:
            reply = await link.call(
                "XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", count, "BLOCK", block_ms,
                "STREAMS", *streams, *[">"] * len(streams),
            )  # fmt: skip
            if reply and self._acknowledgement.replicas:
                await self._acknowledged(link, reply)
        except EngineReplyError as error:
            await self._repair(error, streams)
            return []
        except EngineUnavailable:
            self._lost()
            return []
        return _deliveries(reply)

    async def _acknowledged(self, link: Link, reply: Any) -> None:
        """No effect of what a replica does not know: it would be handed out again behind a failover.

        A read that was blocked does not count as a write of its connection: so an entry is claimed once more, which changes
        nothing.
        """
        stream, entries = reply[0]
        link.call("XCLAIM", stream, self._group, self._consumer, 0, entries[0][0], "JUSTID")
        await self._acknowledgement.missing(link)

    async def interrupt(self) -> None:
        """End a read that is blocked, without losing what its reply may hold: it returns what it has."""
        if self._client_id is not None:
            try:
                await self._node.call("CLIENT", "UNBLOCK", self._client_id)
            except EngineError:
                return  # not allowed, or not connected: the read ends by itself

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _connected(self) -> Link | None:
        if self._link is None or not self._link.is_open:
            try:
                if self._key is not None:
                    self._node = self._engine.node_of(self._key)
                self._link = await self._node.open_link()
                self._client_id = await self._link.call("CLIENT", "ID")
            except EngineReplyError:
                self._client_id = None  # not allowed: reads cannot be interrupted then
            except EngineUnavailable:
                await asyncio.sleep(random.uniform(0.05, 0.3))
                return None
        return self._link

    def _lost(self) -> None:
        self._link = None

    async def _repair(self, error: EngineReplyError, streams: Sequence[str]) -> None:
        if self._engine.doubt(error):
            # The slot has moved, or is moving: the next read goes to whoever holds it then.
            self.close()
            await asyncio.sleep(random.uniform(*_MOVED_SECONDS))
            return
        if not is_group_missing(error):
            # LOADING, READONLY, NOPERM, ...: the engine may recover; reading on at full speed would not help it.
            await asyncio.sleep(random.uniform(0.2, 0.5))
        try:
            await create_groups(self._engine, streams, self._group)
        except (EngineUnavailable, EngineReplyError):
            await asyncio.sleep(random.uniform(0.2, 0.5))


async def poll_group(engine: Engine, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
    """A read that does not block, over the shared connection; nothing where the engine is in trouble. What a lost reply
    held is pending for the consumer, who finds it there."""
    try:
        reply = await engine.call("XREADGROUP", "GROUP", group, consumer, "COUNT", count, "STREAMS", stream, ">")
    except EngineReplyError as error:
        if is_group_missing(error):
            with contextlib.suppress(EngineError):
                await create_groups(engine, [stream], group)
        return []
    except EngineUnavailable:
        await engine.ready()
        return []
    return _deliveries(reply)


def _deliveries(reply: Any) -> list[Delivery]:
    if not reply:
        return []
    return [
        Delivery(name.decode(), entry_id, pairs(fields) if fields else None)
        for name, entries in reply
        for entry_id, fields in entries
    ]


async def pending_ids(engine: Engine, stream: str, group: str, consumer: str, known: int) -> set[bytes] | None:
    """The ids that are pending for a consumer; None where their number equals `known` (the cheap look comes first, and
    is enough nearly always: a list of 1,000 takes the engine thirty times as long)."""
    try:
        summary = await engine.call("XPENDING", stream, group)
        counts = {name: int(count) for name, count in (summary[3] or [])}
        if counts.get(consumer.encode(), 0) == known and (known == 0 or random.random() > 0.1):
            return None
        entries = await engine.call("XPENDING", stream, group, "-", "+", 10_000, consumer)
    except EngineReplyError as error:
        if is_group_missing(error):
            return set()
        raise
    return {entry[0] for entry in entries}


async def read_through(engine: Engine, *arguments: Argument) -> Any:
    """The reply to a command that only reads: asked again while the engine is away, or refuses for a while. Raises
    `EngineUnavailable` only where this process has closed its connection."""
    while True:
        try:
            return await engine.call(*arguments)
        except EngineUnavailable:
            await engine.ready()
        except EngineReplyError as error:
            if not is_transient(error):
                raise
            await asyncio.sleep(_READ_AGAIN_SECONDS)


_READ_AGAIN_SECONDS = 0.2


def append_message(engine: Engine, stream: str, kind: str, body: bytes) -> asyncio.Future[Any]:
    """Add a message to a stream; the future gives its entry's id."""
    return engine.call("XADD", stream, "*", "t", kind, "d", body)


async def acknowledge(engine: Engine, delivery: Delivery, group: str) -> None:
    """Done with an entry: out of the pending list and out of its stream."""
    engine.call("XACK", delivery.stream, group, delivery.entry_id)
    await engine.call("XDEL", delivery.stream, delivery.entry_id)


async def read_entry(engine: Engine, stream: str, entry_id: bytes) -> Delivery:
    """An entry by its id, as a delivery."""
    found = await engine.call("XRANGE", stream, entry_id, entry_id)
    return Delivery(stream, entry_id, pairs(found[0][1]) if found else None)


class Completion(NamedTuple):
    """A result on its way: where it goes, the delivery it completes, and who waits for it to be stored."""

    results: str
    delivery: Delivery
    kind: str
    body: bytes
    stored: asyncio.Future[None]


class Completer:
    """Completes tasks: the result enters the results stream and the task leaves its own, in one transaction.

    Completions of one tick of the loop share a transaction, on a cluster those of one partition.
    """

    def __init__(self, engine: Engine, acknowledgement: Acknowledgement = NO_REPLICA) -> None:
        self._engine = engine
        self._acknowledgement = acknowledgement
        self._waiting: list[Completion] = []

    def complete(self, results: str, delivery: Delivery, kind: str, body: bytes) -> asyncio.Future[None]:
        """The future is done when the result is stored. It fails with `EngineUnavailable` if that is unknown: send the
        result again then, a second copy is harmless."""
        loop = asyncio.get_running_loop()
        completion = Completion(results, delivery, kind, body, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(completion)
        return completion.stored

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for completions in _by_stream(waiting) if self._engine.is_cluster else [waiting]:
            task = asyncio.get_running_loop().create_task(self._send(completions))
            _KEPT.add(task)
            task.add_done_callback(_KEPT.discard)

    async def _send(self, completions: list[Completion]) -> None:
        try:
            replies = await self._transact(completions)
            await self._add_again(completions, replies)
            await self._acknowledgement.missing(self._engine.node_of(completions[0].results))
        except (EngineUnavailable, EngineReplyError) as error:
            for completion in completions:
                if not completion.stored.done():
                    completion.stored.set_exception(EngineUnavailable(f"a result's way is unknown: {error}"))
                    completion.stored.exception()  # seen: its worker may be gone
            return
        for completion in completions:
            if not completion.stored.done():
                completion.stored.set_result(None)

    def _transact(self, completions: list[Completion]) -> asyncio.Future[list[Any]]:
        commands: list[tuple[Argument, ...]] = []
        done: dict[str, list[bytes]] = {}
        for completion in completions:
            commands.append(("XADD", completion.results, "*", "t", completion.kind, "d", completion.body))
            done.setdefault(completion.delivery.stream, []).append(completion.delivery.entry_id)
        for stream, ids in done.items():
            commands += [("XACK", stream, WORKER_GROUP, *ids), ("XDEL", stream, *ids)]
        return self._engine.transact(commands)

    async def _add_again(self, completions: list[Completion], replies: list[Any]) -> None:
        """MULTI does not roll back: an XADD that failed (memory, a wrong type) is sent alone until it is in."""
        for completion, reply in zip(completions, replies, strict=False):
            while isinstance(reply, Exception):
                await asyncio.sleep(0.2)
                try:
                    reply = await append_message(self._engine, completion.results, completion.kind, completion.body)
                except EngineReplyError as error:
                    reply = error


def _by_stream(completions: list[Completion]) -> list[list[Completion]]:
    """Those whose results go to one stream, and so are of one partition."""
    found: dict[str, list[Completion]] = {}
    for completion in completions:
        found.setdefault(completion.results, []).append(completion)
    return list(found.values())


_KEPT: set[asyncio.Task[None]] = set()
"""The loop holds its tasks weakly; those that nobody awaits are held here until they are done."""


def publication_header(types: Sequence[str], bodies: Sequence[bytes]) -> str:
    """What goes before the bodies of a published message: each event's type and length."""
    return " ".join([f"{kind} {len(body)}" for kind, body in zip(types, bodies, strict=True)])


class ChannelEvent(NamedTuple):
    """An event as it stands in a channel: its number, type, time in ms of the engine's clock, and body."""

    number: int
    kind: bytes
    at_ms: int
    body: bytes


async def read_channel(engine: Engine, channel: str, after: int, count: int) -> list[ChannelEvent]:
    """The stored events of a channel behind a number, up to `count`."""
    entries = await read_through(engine, "XRANGE", channel, f"0-{after + 1}", "+", "COUNT", count)
    events = []
    for entry_id, fields in entries:
        values = pairs(fields)
        events.append(ChannelEvent(int(entry_id[2:]), values[b"t"], int(values.get(b"at", 0)), values[b"d"]))
    return events


def parse_publication(payload: bytes) -> list[ChannelEvent]:
    """The events of a published message of a channel.

    Its form: a line of the first event's number, the time in ms, and the type and length of each event, all separated
    by spaces; then the bodies, one behind the other.
    """
    line_end = payload.index(b"\n")
    words = payload[:line_end].split(b" ")
    number, at_ms = int(words[0]), int(words[1])
    events = []
    position = line_end + 1
    for index in range(2, len(words), 2):
        body_end = position + int(words[index + 1])
        events.append(ChannelEvent(number, words[index], at_ms, payload[position:body_end]))
        number += 1
        position = body_end
    return events
