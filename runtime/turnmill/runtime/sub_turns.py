"""The events of a turn with those of the turns it starts, and of those below.

Every turn has a channel of its own. A reader that wants them all follows the parent's, and from each `sub_turn.started`
on the child's too. The order within each turn is its channel's; between two turns it is the order of arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from turnmill.protocol.errors import TurnLostError
from turnmill.protocol.events import TERMINAL_EVENT_TYPES, Event, SubTurnStarted

if TYPE_CHECKING:
    from .turn import Turn

_WAITING_MAX = 1000
Attach: TypeAlias = "Callable[[str], Turn]"


class SubTurnEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a turn that another one has started."""

    turn_id: str
    session_id: str
    agent_id: str
    event: Event

    @property
    def type(self) -> str:
        return self.event.type


async def with_sub_turns(
    attach: Attach, events: AsyncIterator[Event], types: Collection[str] | None = None
) -> AsyncIterator[Event | SubTurnEvent]:
    """Merge; ends behind the terminal event of the uppermost turn, when all below have ended too."""
    arrived: asyncio.Queue[Event | SubTurnEvent | BaseException | None] = asyncio.Queue(_WAITING_MAX)
    following: set[asyncio.Task[None]] = set()

    def follow(source: AsyncIterator[Event], child: SubTurnStarted | None) -> None:
        task = asyncio.create_task(_forward(source, child, arrived, begin))
        following.add(task)

    def begin(child: SubTurnStarted) -> None:
        follow(_of_child(attach(child.turn_id)), child)

    follow(events, None)
    ended = 0
    try:
        while ended < len(following):
            item = await arrived.get()
            if item is None:
                ended += 1
            elif isinstance(item, BaseException):
                raise item
            elif types is None or item.type in types or item.type in TERMINAL_EVENT_TYPES:
                yield item
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


async def _forward(
    source: AsyncIterator[Event],
    child: SubTurnStarted | None,
    arrived: asyncio.Queue[Event | SubTurnEvent | BaseException | None],
    begin: Callable[[SubTurnStarted], None],
) -> None:
    try:
        async for event in source:
            if isinstance(event, SubTurnStarted):
                begin(event)
            await arrived.put(event if child is None else _of(child, event))
        await arrived.put(None)
    except Exception as error:
        await arrived.put(error)


async def _of_child(turn: Turn) -> AsyncIterator[Event]:
    """The child's events; none where it is forgotten already, or was never accepted before its parent's end."""
    try:
        async for event in turn.events():
            yield event
    except TurnLostError:
        return


def _of(child: SubTurnStarted, event: Event) -> SubTurnEvent:
    return SubTurnEvent(turn_id=child.turn_id, session_id=child.session_id, agent_id=child.agent_id, event=event)
