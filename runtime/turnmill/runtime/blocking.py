"""The synchronous twin of the client, for Django, Flask and scripts: the same calls, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from turnmill.protocol.content import Message, OutputPart, ToolResult
from turnmill.protocol.events import Event
from turnmill.protocol.messages import OnBusy

from .client import Client, connect
from .dead_letters import DeadLetter
from .definitions import Agent, TurnOptions
from .results import TurnResult
from .sessions import Session
from .turn import SteeringEntry, Turn

T = TypeVar("T")


class _Loop:
    """An event loop in a daemon thread. Safe to use from many threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turnmill-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def iterate(self, iterator: AsyncIterator[T]) -> Iterator[T]:
        """An async iterator as a plain one; leaving the loop early closes it."""
        try:
            while True:
                try:
                    yield self.run(_next(iterator))
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                self.run(close())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(iterator: AsyncIterator[T]) -> T:
    return await anext(iterator)


class SyncTurn:
    """The handle of a turn, blocking. See `Turn`."""

    def __init__(self, turn: Turn, loop: _Loop) -> None:
        self._turn = turn
        self._loop = loop

    @property
    def id(self) -> str:
        return self._turn.id

    @property
    def session_id(self) -> str | None:
        return self._turn.session_id

    @property
    def done(self) -> bool:
        return self._turn.done

    def status(self) -> str:
        return self._loop.run(self._turn.status())

    def events(self, after: int = 0, types: Collection[str] | None = None) -> Iterator[Event]:
        return self._loop.iterate(self._turn.events(after, types))

    def text_stream(self) -> Iterator[str]:
        return self._loop.iterate(self._turn.text_stream())

    def steer(
        self,
        message: str | Message | Sequence[OutputPart],
        *,
        role: Literal["user", "system"] = "user",
        mode: Literal["steer", "queue"] = "steer",
    ) -> SteeringEntry:
        return self._loop.run(self._turn.steer(message, role=role, mode=mode))

    send = steer

    @property
    def pending_steering(self) -> tuple[SteeringEntry, ...]:
        return self._turn.pending_steering

    def cancel_steering(self, steering_id: str) -> bool:
        return self._loop.run(self._turn.cancel_steering(steering_id))

    def abort(self, reason: str | None = None) -> bool:
        return self._loop.run(self._turn.abort(reason))

    def resume(
        self,
        *,
        tool_results: Mapping[str, Any] | Sequence[ToolResult | Mapping[str, Any]] = (),
        message: str | Message | Sequence[OutputPart] | None = None,
    ) -> tuple[str, ...]:
        return self._loop.run(self._turn.resume(tool_results=tool_results, message=message))

    def approve(self, *tool_call_ids: str, reason: str | None = None) -> tuple[str, ...]:
        return self._loop.run(self._turn.approve(*tool_call_ids, reason=reason))

    def deny(self, *tool_call_ids: str, reason: str | None = None) -> tuple[str, ...]:
        return self._loop.run(self._turn.deny(*tool_call_ids, reason=reason))

    def result(self) -> TurnResult:
        return self._loop.run(self._turn.result())

    def wait(self) -> TurnResult:
        return self.result()


class SyncSession:
    """The handle of a session, blocking. See `Session`."""

    def __init__(self, session: Session, loop: _Loop) -> None:
        self._session = session
        self._loop = loop

    @property
    def id(self) -> str:
        return self._session.id

    def messages(self, first: int = 0, end: int | None = None) -> list[Message]:
        return self._loop.run(self._session.messages(first, end))

    def fork(self, **where: Any) -> SyncSession:
        return SyncSession(self._loop.run(self._session.fork(**where)), self._loop)

    def retry(self, *arguments: Any, **keywords: Any) -> SyncTurn:
        return SyncTurn(self._loop.run(self._session.retry(*arguments, **keywords)), self._loop)

    def delete(self) -> None:
        self._loop.run(self._session.delete())


class SyncClient:
    """A client, blocking. See `Client`."""

    def __init__(self, client: Client, loop: _Loop) -> None:
        self._client = client
        self._loop = loop

    def turn(
        self,
        agent: Agent | str,
        message: str | Message | Sequence[Message] | Sequence[OutputPart],
        *,
        session: str | None = None,
        options: TurnOptions | None = None,
        on_busy: OnBusy = "queue",
        idempotency_key: str | None = None,
    ) -> SyncTurn:
        started = self._client.turn(
            agent, message, session=session, options=options, on_busy=on_busy, idempotency_key=idempotency_key
        )
        turn = self._loop.run(started)
        return SyncTurn(turn, self._loop)

    def attach(self, turn_id: str) -> SyncTurn:
        return SyncTurn(self._client.attach(turn_id), self._loop)

    def transcript(self, session_id: str, first: int = 0, end: int | None = None) -> list[Message]:
        return self._loop.run(self._client.transcript(session_id, first, end))

    def session(self, session_id: str) -> SyncSession:
        return SyncSession(self._client.session(session_id), self._loop)

    def dead_letters(self, *letter_ids: str, limit: int | None = 100, reason: str | None = None) -> list[DeadLetter]:
        return self._loop.run(self._client.dead_letters(*letter_ids, limit=limit, reason=reason))

    def replay_dead_letters(self, *letter_ids: str, every: bool = False, reason: str | None = None) -> dict[str, str]:
        return self._loop.run(self._client.replay_dead_letters(*letter_ids, every=every, reason=reason))

    def drop_dead_letters(self, *letter_ids: str, every: bool = False, reason: str | None = None) -> dict[str, str]:
        return self._loop.run(self._client.drop_dead_letters(*letter_ids, every=every, reason=reason))

    def publish(self, *agents: Agent) -> None:
        self._loop.run(self._client.publish(*agents))


@contextmanager
def connect_sync(url: str | None = None, *, app: Any = None, **settings: Any) -> Iterator[SyncClient]:
    """`connect`, blocking: `with connect_sync() as client: ...`."""
    loop = _Loop()
    context = connect(url, app=app, **settings)
    try:
        client = loop.run(context.__aenter__())
        try:
            yield SyncClient(client, loop)
        finally:
            loop.run(context.__aexit__(None, None, None))
    finally:
        loop.close()
