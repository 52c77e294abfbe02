"""The host's door: start turns, attach to them, read transcripts. It needs no coordinator in its process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from ulid import ULID

from turnmill.protocol.codec import decode_message, encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import Message
from turnmill.protocol.errors import ConfigurationError, DefinitionError
from turnmill.protocol.keys import Keys, new_turn_id, partition_of_session, submission_ms, valid_session_id
from turnmill.protocol.messages import StartTurn
from turnmill.protocol.namespace import open_namespace
from turnmill.protocol.settings import Settings, load_settings
from turnmill.protocol.specs import ToolSpec
from turnmill.protocol.streams import append_message

from .channel import Channels
from .definitions import Agent, TurnOptions
from .registry import publish
from .turn import Turn

_DEFAULT_OPTIONS = TurnOptions()
_CLOCKS_DIFFER_MS = 3_600_000
"""The time in a turn's id is of the client that made it, the inbox's times are of the engine."""
_INBOX_PAGE = 500


class Client:
    """A connection to a namespace. Made by `connect`."""

    def __init__(self, engine: Engine, keys: Keys, settings: Settings) -> None:
        self.engine = engine
        self.keys = keys
        self.settings = settings
        self.channels = Channels(engine)
        self._references: dict[int, tuple[Agent, str]] = {}
        self._published_tools: set[str] = set()

    async def turn(
        self,
        agent: Agent | str,
        message: str | Message | Sequence[Message],
        *,
        session: str | None = None,
        options: TurnOptions | None = None,
    ) -> Turn:
        """Start a turn and return its handle; the turn runs whether anyone watches or not.

        `agent` is an `Agent`, which is published, or the name of one that is. `message` is a text, a message, or a list
        of messages that is used as it is. Without `session` the turn has a session of its own.
        """
        options = options or _DEFAULT_OPTIONS
        if not isinstance(options, TurnOptions):
            raise DefinitionError(f"options is a {type(options).__name__}, not TurnOptions")
        session_id = session or f"s-{str(ULID()).lower()}"
        if not isinstance(session_id, str) or not valid_session_id(session_id):
            raise DefinitionError(
                f"{session_id!r} is no session id: up to 256 characters without white space or braces"
            )
        reference = await self._reference(agent, options)
        partition = partition_of_session(session_id, len(self.keys.partitions))
        command = StartTurn(
            turn_id=new_turn_id(partition),
            session_id=session_id,
            agent=reference,
            messages=_messages(agent, message),
            overrides=options.overrides(),
            metadata=options.metadata,
            tenant=options.tenant,
            priority=options.priority,
        )
        await self.submit(command)
        return Turn(
            self,
            command.turn_id,
            session_id=session_id,
            agent=agent,
            message=message,
            options=options,
            is_new=True,
        )

    async def submit(self, command: StartTurn) -> None:
        """Append a command to its partition's inbox. Raises `MessageTooLarge` above `payload_bytes_max`."""
        try:
            body = encode_body(command, self.settings.wire, self.settings.payload_bytes_max)
            if not command.has_plain_text:
                # What a caller put together may hold what no reader could read: a role that is none, a number too large.
                msgspec.convert(msgspec.to_builtins(command), StartTurn)
                msgspec.msgpack.encode(command)
        except (TypeError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
            raise DefinitionError(f"the turn cannot be sent: {error}") from error
        keys = self.keys.of_turn(command.turn_id)
        await append_message(self.engine, keys.inbox, command.type, body)

    async def is_submitted(self, turn_id: str) -> bool:
        """Whether the command that starts a turn waits in its partition's inbox, not read by a coordinator yet."""
        submitted_ms = submission_ms(turn_id)
        start = "-" if submitted_ms is None else max(0, submitted_ms - _CLOCKS_DIFFER_MS)
        inbox, name = self.keys.of_turn(turn_id).inbox, turn_id.encode()
        while True:
            entries = await self.engine.call("XRANGE", inbox, start, "+", "COUNT", _INBOX_PAGE)
            if any(name in fields[3] for _, fields in entries if len(fields) > 3):
                return True
            if len(entries) < _INBOX_PAGE:
                return False
            start = b"(" + entries[-1][0]

    def attach(self, turn_id: str) -> Turn:
        """The handle of a turn that was started anywhere. Raises `ValueError` for what is no turn id."""
        return Turn(self, turn_id)

    async def transcript(self, session_id: str, first: int = 0, end: int | None = None) -> list[Message]:
        """The messages `[first, end)` of a session, all of them without `end`."""
        key = self.keys.of_session(session_id).transcript(session_id)
        entries = await self.engine.call("LRANGE", key, first, -1 if end is None else end - 1)
        return [decode_message(entry) for entry in entries]

    async def publish(self, *agents: Agent) -> None:
        """Publish agents and their tools, so that others may name them."""
        specs = [agent.agent_spec() for agent in agents]
        tools = [spec for agent in agents for spec in agent.tool_specs()]
        await publish(self.engine, self.keys, specs, tools)

    async def close(self) -> None:
        await self.channels.close()
        await self.engine.close()

    async def _reference(self, agent: Agent | str, options: TurnOptions) -> str:
        """`name@version`, the agent published under it; a name alone means what is published by then."""
        extra = options.tool_specs()
        if isinstance(agent, str):
            await self._publish_tools(extra)
            return agent
        if extra:
            await self._publish_tools(extra)
        known = self._references.get(id(agent))
        if known is None or known[0] is not agent:
            spec = agent.agent_spec()
            versions = await publish(self.engine, self.keys, [spec], agent.tool_specs())
            known = self._references[id(agent)] = agent, f"{spec.name}@{versions[spec.name]}"
        return known[1]

    async def _publish_tools(self, tools: list[ToolSpec]) -> None:
        new = [spec for spec in tools if spec.name not in self._published_tools]
        if new:
            await publish(self.engine, self.keys, [], new)
            self._published_tools.update(spec.name for spec in new)


def _messages(agent: Agent | str, message: str | Message | Sequence[Message]) -> list[Message]:
    """A prefix of the agent goes before a text, not before messages, which are used as they are."""
    if isinstance(message, str):
        prefix = agent.user_prompt_prefix if isinstance(agent, Agent) else ""
        return [Message(role="user", content=prefix + message)]
    given: Any = [message] if isinstance(message, Message) else message
    messages: list[Message] = list(given) if isinstance(given, Sequence) else []
    if not messages or not all(isinstance(item, Message) for item in messages):
        raise DefinitionError("a turn starts with a text, a Message or a list of Messages")
    return messages


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
