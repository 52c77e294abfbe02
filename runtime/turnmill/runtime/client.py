"""The host's door: start turns, attach to them, read transcripts. It needs no coordinator in its process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, get_args

import msgspec
from ulid import ULID

from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.acknowledgement import Acknowledgement
from turnmill.protocol.blobs import resolve_messages, with_blobs
from turnmill.protocol.codec import ANSWER_CODEC, BODY_FIELD, MESSAGE_CODEC, decode_message, encode_body
from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.content import Message, OutputPart, ToolResult
from turnmill.protocol.errors import ConfigurationError, DefinitionError, EngineUnavailable
from turnmill.protocol.keys import Keys, PartitionKeys, new_turn_id, submission_ms, valid_session_id
from turnmill.protocol.messages import Answer, Command, OnBusy, StartTurn, SteerTurn
from turnmill.protocol.namespace import open_namespace
from turnmill.protocol.settings import Settings, load_settings
from turnmill.protocol.specs import ToolSpec
from turnmill.protocol.streams import append_message, read_through

from . import dead_letters
from .channel import Channels
from .dead_letters import Change, DeadLetter
from .definitions import Agent, TurnOptions, sent_metadata
from .given import messages_of
from .idempotency import check_key, claim_turn
from .refusals import refusal, refusal_told
from .registry import publish
from .sessions import Session
from .telemetry import current_trace
from .transcripts import closed_length
from .turn import Turn

_DEFAULT_OPTIONS = TurnOptions()
_ON_BUSY: tuple[str, ...] = get_args(OnBusy)
_CLOCKS_DIFFER_MS = 3_600_000
"""The time in a turn's id is of the client that made it, the inbox's times are of the engine."""
_INBOX_PAGE = 500
_PUBLISHED_SECONDS = 2.0
"""How long an agent counts as published: an engine that lost its data is told again."""
ANSWER_TIMEOUT_SECONDS = 60.0
"""How long a command waits for a coordinator; it stays in the inbox behind that."""


class Client:
    """A connection to a namespace. Made by `connect`."""

    def __init__(self, engine: Engine, keys: Keys, settings: Settings) -> None:
        self.engine = engine
        self.keys = keys
        self.settings = settings
        self.channels = Channels(engine)
        self._watching: set[asyncio.Task[None]] = set()
        self._references: dict[int, tuple[Agent, str, float]] = {}
        self._acknowledgement = Acknowledgement.of(settings)
        self._published_tools: set[str] = set()

    async def turn(
        self,
        agent: Agent | str,
        message: str | Message | Sequence[Message] | Sequence[OutputPart],
        *,
        session: str | None = None,
        options: TurnOptions | None = None,
        on_busy: OnBusy = "queue",
        idempotency_key: str | None = None,
        rewind_to: int | None = None,
    ) -> Turn:
        """Start a turn and return its handle; the turn runs whether anyone watches or not.

        `agent` is an `Agent`, which is published, or the name of one that is. `message` is a text, a list of parts, a
        message, or a list of messages that is used as it is. Without `session` the turn has a session of its own.

        `on_busy` says what happens where another turn is live on the session: the new one waits for its end (`queue`),
        is refused with `SessionBusyError` (`reject`), becomes steering of the live one, whose handle is returned
        (`steer`), or stops it (`interrupt`). The same `idempotency_key` gives the same turn again, for
        TURNMILL_IDEMPOTENCY_TTL; with another body it raises `IdempotencyConflictError`. `rewind_to` hides from the model
        what the transcript holds from that entry on.
        """
        options = options or _DEFAULT_OPTIONS
        if not isinstance(options, TurnOptions):
            raise DefinitionError(f"options is a {type(options).__name__}, not TurnOptions")
        if on_busy not in _ON_BUSY:
            raise DefinitionError(f"on_busy={on_busy!r}: one of {', '.join(_ON_BUSY)}")
        given = messages_of(message)
        session_id = _session_id(session, idempotency_key)
        if rewind_to is not None:
            await self._check_cut(session_id, rewind_to)
        reference = await self._reference(agent, options)
        keys = self.keys.of_session(session_id)
        command = StartTurn(
            turn_id=new_turn_id(keys.partition),
            session_id=session_id,
            agent=reference,
            messages=await self._stored(keys, given),
            overrides=options.overrides(),
            metadata=sent_metadata(options.metadata),
            tenant=options.tenant,
            priority=options.priority,
            trace=current_trace(),
            on_busy=on_busy,
            answer=on_busy in ("reject", "steer"),
            rewind_to=rewind_to,
            is_text=isinstance(message, str),
        )
        turn = Turn(self, command.turn_id, session_id=session_id, agent=agent, message=message, options=options)
        if idempotency_key is None:
            turn.is_new = True
            turn = await self._start(command, turn)
        else:
            turn = await self._start_once(command, turn, keys, idempotency_key)
        if options.signal is not None:
            self._chain(options.signal, turn)
        return turn

    async def _start_once(self, command: StartTurn, turn: Turn, keys: PartitionKeys, idempotency_key: str) -> Turn:
        """The turn that the key stands for; its command is sent again unless a coordinator has read it."""
        self._encoded(command)  # what cannot be sent must not hold the key
        lifetime_seconds = self.settings.idempotency_ttl or self.settings.record_ttl
        with refusal_told(command.type):
            command = await claim_turn(self.engine, keys, command, idempotency_key, lifetime_seconds)
        if command.turn_id != turn.id:
            turn = self.attach(command.turn_id)
            if await read_through(self.engine, "EXISTS", keys.turn(turn.id)):
                return turn
        return await self._start(command, turn)

    async def _check_cut(self, session_id: str, rewind_to: int) -> None:
        """A conversation that ends between a call and its result would be refused by every provider from then on."""
        if rewind_to < 0 or closed_length(await self.transcript(session_id, 0, rewind_to)) != rewind_to:
            raise DefinitionError(
                f"rewind_to={rewind_to}: session {session_id} has no closed step that ends there; `Session.retry` knows "
                "where its turns begin"
            )

    async def _start(self, command: StartTurn, turn: Turn) -> Turn:
        """Submit, and wait for the answer where the policy asks for one."""
        if not command.answer:
            await self.submit(command)
            return turn
        answer = await self.request(command, command.turn_id)
        return turn if answer.turn_id == turn.id else self.attach(answer.turn_id)

    async def request(
        self, command: Command, request_id: str, *, timeout: float | None = ANSWER_TIMEOUT_SECONDS
    ) -> Answer:
        """Send a command and wait for its answer. Raises `CommandRefusedError` where it changed nothing, `TimeoutError`
        where no coordinator has answered in time: the command stays in the inbox, and may be sent again."""
        keys = self.keys.of_session(command.session_id)
        body = self._encoded(command)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._exchange(keys, command.type, body, request_id)
        except TimeoutError:
            text = (
                f"no coordinator has answered within {timeout:g} s; the command waits in the inbox: `turnmill doctor`"
            )
            raise TimeoutError(text) from None
        if answer.error is not None:
            raise refusal(answer)
        return answer

    async def _exchange(self, keys: PartitionKeys, kind: str, body: bytes, request_id: str) -> Answer:
        """A command that is sent twice, because nobody knows whether it arrived, is answered twice."""
        while True:
            try:
                await self._append(keys, kind, body)
                break
            except EngineUnavailable:
                await self.engine.ready()
        async for piece in self.channels.follow(keys.answer(request_id), existing=False):
            for event in piece:
                answer = ANSWER_CODEC.decode(event.kind, event.body)
                if isinstance(answer, Answer):
                    return answer
        raise AssertionError("a channel that is followed does not end")

    async def _stored(self, keys: PartitionKeys, messages: list[Message]) -> list[Message]:
        """The messages with what is large in them stored apart."""
        threshold = self.settings.blob_threshold
        if len(messages) == 1 and isinstance(messages[0].content, str) and 4 * len(messages[0].content) <= threshold:
            return messages
        lifetime_ms = self.settings.blob_ttl * 1000
        with refusal_told("message"):
            return [await with_blobs(self.engine, keys, message, threshold, lifetime_ms) for message in messages]

    async def stored_message(self, session_id: str, message: Message) -> Message:
        return (await self._stored(self.keys.of_session(session_id), [message]))[0]

    async def stored_result(self, session_id: str, result: ToolResult) -> ToolResult:
        keys, settings = self.keys.of_session(session_id), self.settings
        return await with_blobs(self.engine, keys, result, settings.blob_threshold, settings.blob_ttl * 1000)

    def session(self, session_id: str) -> Session:
        """The handle of a session: its messages, turns and values; fork, retry, delete."""
        return Session(self, session_id)

    def _chain(self, signal: AbortSignal, turn: Turn) -> None:
        """The host's signal stops the turn."""

        async def watch() -> None:
            await signal.wait()
            await turn.abort(signal.reason)

        task = asyncio.create_task(watch())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def _encoded(self, command: Command) -> bytes:
        try:
            body = encode_body(command, self.settings.wire, self.settings.payload_bytes_max)
            if not (isinstance(command, StartTurn) and command.has_plain_text):
                # What a caller put together may hold what no reader could read: a role that is none, a number too large.
                msgspec.convert(msgspec.to_builtins(command), type(command))
                msgspec.msgpack.encode(command)
        except (TypeError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
            what = "turn" if isinstance(command, StartTurn) else "command"
            raise DefinitionError(f"the {what} cannot be sent: {error}") from error
        return body

    async def submit(self, command: StartTurn) -> None:
        """Append a command to its partition's inbox. Raises `MessageTooLarge` above `payload_bytes_max`."""
        body = self._encoded(command)
        await self._append(self.keys.of_turn(command.turn_id), command.type, body)

    async def _append(self, keys: PartitionKeys, kind: str, body: bytes) -> None:
        with refusal_told(kind):
            await append_message(self.engine, keys.inbox, kind, body)
        acknowledgement = self._acknowledgement
        missing = acknowledgement.replicas and await acknowledgement.missing(self.engine.node_of(keys.inbox))
        if missing:
            raise EngineUnavailable(
                f"the {kind} is in the inbox, and {missing} of {acknowledgement.replicas} replicas did not confirm it "
                f"within {self.settings.acknowledge_timeout:g} s: a failover may lose it. Send it again with its "
                "idempotency key (TURNMILL_ACKNOWLEDGED_REPLICAS, TURNMILL_ACKNOWLEDGE_TIMEOUT)"
            )

    async def submitted_session(self, turn_id: str) -> str | None:
        """The session of a turn whose command waits in its partition's inbox, not read by a coordinator yet; else None."""
        submitted_ms = submission_ms(turn_id)
        start = "-" if submitted_ms is None else max(0, submitted_ms - _CLOCKS_DIFFER_MS)
        inbox, name = self.keys.of_turn(turn_id).inbox, turn_id.encode()
        while True:
            entries = await read_through(self.engine, "XRANGE", inbox, start, "+", "COUNT", _INBOX_PAGE)
            for _, fields in entries:
                if name in dict(zip(fields[::2], fields[1::2], strict=True)).get(BODY_FIELD, b""):
                    command = MESSAGE_CODEC.decode_fields(pairs(fields))
                    if isinstance(command, StartTurn | SteerTurn) and turn_id in (
                        command.turn_id,
                        getattr(command, "steering_id", ""),
                    ):
                        return command.session_id
            if len(entries) < _INBOX_PAGE:
                return None
            start = b"(" + entries[-1][0]

    def attach(self, turn_id: str) -> Turn:
        """The handle of a turn that was started anywhere. Raises `ValueError` for what is no turn id."""
        return Turn(self, turn_id)

    async def transcript(self, session_id: str, first: int = 0, end: int | None = None) -> list[Message]:
        """The messages `[first, end)` of a session, all of them without `end`."""
        if end is not None and end <= first:
            return []
        key = self.keys.of_session(session_id).transcript(session_id)
        entries = await read_through(self.engine, "LRANGE", key, first, -1 if end is None else end - 1)
        messages = [decode_message(entry) for entry in entries]
        return await resolve_messages(self.engine, self.keys.of_session(session_id), messages)

    async def dead_letters(
        self, *letter_ids: str, limit: int | None = 100, reason: str | None = None
    ) -> list[DeadLetter]:
        """Messages that nobody could decide on: those with these ids, whole; without ids the newest ones whose reason
        contains a text, newest first, with the beginnings of their bodies. Raises `ValueError` for what is no id."""
        if letter_ids:
            return await dead_letters.read_letters(self.engine, self.keys, letter_ids)
        return await dead_letters.list_letters(self.engine, self.keys, limit=limit, reason=reason)

    async def replay_dead_letters(
        self, *letter_ids: str, every: bool = False, reason: str | None = None
    ) -> dict[str, str]:
        """Put dead letters back into the streams they came from; with `every`, all that are there now, or those whose
        reason contains a text. Each goes once, whoever else does the same. What became of each: `replayed`, `gone`, or
        why it cannot be put back."""
        return await self._change_letters(dead_letters.replay_letters, letter_ids, every, reason)

    async def drop_dead_letters(
        self, *letter_ids: str, every: bool = False, reason: str | None = None
    ) -> dict[str, str]:
        """Delete dead letters. What became of each: `dropped` or `gone`."""
        return await self._change_letters(dead_letters.drop_letters, letter_ids, every, reason)

    async def _change_letters(
        self, change: Change, letter_ids: Sequence[str], every: bool, reason: str | None
    ) -> dict[str, str]:
        if every == bool(letter_ids) or (reason is not None and not every):
            raise ValueError("give the ids of letters, or every=True, with a reason for some of them")
        if letter_ids:
            return await change(self.engine, self.keys, letter_ids)
        outcome: dict[str, str] = {}
        async for page in dead_letters.letter_pages(self.engine, self.keys, reason):
            outcome |= await change(self.engine, self.keys, page)
        return outcome

    async def publish(self, *agents: Agent) -> None:
        """Publish agents, those they call and their tools, so that others may name them."""
        await self._publish(list(agents))

    async def _publish(self, agents: list[Agent]) -> dict[str, str]:
        nested = list({id(inner): inner for agent in agents for inner in agent.agents()}.values())
        tools = [spec for agent in nested for spec in agent.tool_specs()]
        with refusal_told("agent"):
            return await publish(self.engine, self.keys, [agent.agent_spec() for agent in nested], tools)

    async def close(self) -> None:
        for task in list(self._watching):
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.channels.close()
        await self.engine.close()

    async def _reference(self, agent: Agent | str, options: TurnOptions) -> str:
        """`name@version`, the agent published under it; a name alone means what is published by then."""
        extra = options.tool_specs()
        if options.tools:
            await self._publish(options.agents())
        if isinstance(agent, str):
            await self._publish_tools(extra)
            return agent
        if extra:
            await self._publish_tools(extra)
        known = self._references.get(id(agent))
        if known is None or known[0] is not agent or known[2] < time.monotonic():
            versions = await self._publish([agent])
            # An old version does not stay for ever, and an engine that lost its data is told again.
            again_at = time.monotonic() + min(self.settings.agent_ttl / 4, _PUBLISHED_SECONDS)
            known = self._references[id(agent)] = agent, f"{agent.name}@{versions[agent.name]}", again_at
        return known[1]

    async def _publish_tools(self, tools: list[ToolSpec]) -> None:
        new = [spec for spec in tools if spec.name not in self._published_tools]
        if new:
            await publish(self.engine, self.keys, [], new)
            self._published_tools.update(spec.name for spec in new)


def _session_id(session: str | None, idempotency_key: str | None) -> str:
    """The session that was named, one that the key stands for, or a new one."""
    if idempotency_key is not None:
        check_key(idempotency_key)
    if session is None and idempotency_key is not None:
        return f"k-{hashlib.blake2b(idempotency_key.encode(), digest_size=13).hexdigest()}"
    session_id = session if session is not None else f"s-{str(ULID()).lower()}"
    if not isinstance(session_id, str) or not valid_session_id(session_id):
        raise DefinitionError(f"{session_id!r} is no session id: up to 256 characters without white space or braces")
    return session_id


@asynccontextmanager
async def connect(url: str | None = None, *, app: Any = None, **settings: Any) -> AsyncIterator[Client]:
    """A client of the namespace at `url`, else at `TURNMILL_REDIS_URL` or `REDIS_URL`.

    Without any URL the runtime is embedded: Valkey is started in a private directory and coordinator and workers run in
    this process; `app` (an APP target, or objects) brings what they need beyond the agents' own tools. Further keyword
    arguments are settings.
    """
    loaded = load_settings(redis_url=url, **settings)
    if loaded.redis_url is None:
        from .local import local_runtime  # the one place where the client may bring the workers along

        async with local_runtime(loaded, app) as client:
            yield client
        return
    if app is not None:
        raise ConfigurationError("app= is for the embedded runtime; with a Redis URL start `turnmill worker tools APP`")
    async with open_client(loaded.redis_url, loaded) as client:
        yield client


@asynccontextmanager
async def open_client(url: str, settings: Settings) -> AsyncIterator[Client]:
    engine = await Engine(url, response_timeout_seconds=settings.response_timeout).connect()
    try:
        namespace = await open_namespace(engine, settings.namespace, settings.partitions)
        client = Client(engine, namespace.keys, settings)
    except BaseException:
        await engine.close()
        raise
    try:
        yield client
    finally:
        await client.close()
