"""One primary of a cluster: an engine of its own whose link hands back what the node refused to execute.

A node that does not hold a key (any more) refuses the command, so sending it elsewhere is no repetition. The same future
goes along, and a command that is not refused costs nothing more than on a single engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from .connection import Engine
from .errors import EngineReplyError, EngineUnavailable
from .link import Argument, Dialer, Link, SubscriberLink, pack
from .slots import Address, Refusal, parse_slots, refusal_of

_MULTI: tuple[Argument, ...] = ("MULTI",)
_EXEC: tuple[Argument, ...] = ("EXEC",)
_ASKING = pack(("ASKING",))


class Sent:
    """A command, or the commands of a transaction, on the way to the node that executes it."""

    __slots__ = ("arguments", "future", "refusal", "refusals", "since", "transaction")

    def __init__(
        self,
        future: asyncio.Future[Any],
        arguments: Sequence[Argument],
        transaction: Sequence[Sequence[Argument]] | None = None,
    ) -> None:
        """`arguments` are those of the command, or of the transaction's first one."""
        self.future = future
        self.arguments = arguments
        self.transaction = transaction
        self.refusal: Refusal | None = None
        self.refusals = 0
        self.since = 0.0


class NodeLink(Link):
    """The shared link to a node. What is refused goes to `on_refusal`, with its future unresolved."""

    def __init__(
        self,
        owner: Any,
        response_timeout_seconds: float,
        address: Address,
        on_refusal: Callable[[Sent, Refusal, Exception], None],
    ) -> None:
        super().__init__(owner, response_timeout_seconds)
        self._address = address
        self._on_refusal = on_refusal
        self._sent: deque[Sent | None] = deque()

    def call(self, *arguments: Argument) -> asyncio.Future[Any]:
        return self.send(Sent(self._loop.create_future(), arguments))

    def send(self, sent: Sent, *, asking: bool = False) -> asyncio.Future[Any]:
        """Send what was refused by another node, or is new. `asking`: the node has not taken the slot over yet."""
        future = sent.future
        if not self.is_open:
            fail(future, EngineUnavailable("the connection to the engine is closed"))
            return future
        if sent.transaction is None:
            packed = pack(sent.arguments)  # type: ignore[arg-type]  # what cannot be packed must not wait for a reply
        else:
            packed = b"".join([pack(tuple(each)) for each in (_MULTI, *sent.transaction, _EXEC)])
        if not self._waiting:
            self._progress_at = self._loop.time()
        if asking:
            packed = _ASKING + packed
            self._expect(self._loop.create_future(), None)
        if sent.transaction is not None:
            queued = self._loop.create_future()
            for _ in range(len(sent.transaction) + 1):
                self._expect(queued, sent)
        self._expect(future, sent)
        if not self._buffer:
            self._loop.call_soon(self._flush)
        self._buffer.append(packed)
        return future

    def _expect(self, future: asyncio.Future[Any], sent: Sent | None) -> None:
        self._waiting.append(future)
        self._sent.append(sent)

    def _deliver(self, reply: Any) -> None:
        sent = self._sent.popleft()
        if sent is None or (sent.transaction is not None and self._waiting[0] is not sent.future):
            self._waiting.popleft()
            if sent is not None and isinstance(reply, Exception):
                # One command refused: EXEC will say that nothing of the transaction was executed.
                sent.refusal = sent.refusal or refusal_of(reply, self._address)
            return
        if isinstance(reply, EngineReplyError):
            refusal = sent.refusal or refusal_of(reply, self._address)
            if refusal is not None:
                self._waiting.popleft()
                self._on_refusal(sent, refusal, reply)
                return
        super()._deliver(reply)


class Node(Engine):
    """A primary as the cluster's engine uses it."""

    def __init__(
        self,
        url: str,
        address: Address,
        *,
        response_timeout_seconds: float,
        client_name: str | None,
        on_refusal: Callable[[Sent, Refusal, Exception], None],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called whenever the shared link was lost or is up again."""
        super().__init__(url, response_timeout_seconds=response_timeout_seconds, client_name=client_name)
        self.place = address
        self._on_refusal = on_refusal
        self._on_change = on_change
        self._own: WeakSet[Link] = WeakSet()

    def start(self) -> None:
        """Connect from now on, until `close`."""
        self._lost()

    @property
    def is_up(self) -> bool:
        return self._shared is not None and self._shared.is_open

    def send(self, sent: Sent, *, asking: bool = False) -> None:
        if isinstance(self._shared, NodeLink):
            self._shared.send(sent, asking=asking)
        else:
            fail(sent.future, EngineUnavailable(f"not connected to the engine at {self.address}"))

    async def up(self) -> None:
        """Return when the shared link is up. May take for ever."""
        await self._connected.wait()

    async def open_link(self) -> Link:
        link = await super().open_link()
        self._own.add(link)
        return link

    async def open_subscriber(
        self, on_push: Callable[[list[Any]], None], on_error: Callable[[EngineReplyError], None] | None = None
    ) -> SubscriberLink:
        link = await super().open_subscriber(on_push, on_error)
        self._own.add(link)
        return link

    async def close(self) -> None:
        """Also the connections of their own that others opened here: the node holds nothing of theirs any more."""
        for link in list(self._own):
            link.close()
        await super().close()

    async def _open_shared(self) -> Link:
        owner, transport = await self._dial()
        link = NodeLink(owner, self._timeout_seconds, self.place, self._on_refusal)
        link.attach(transport)
        return link

    def _adopt(self, link: Link) -> None:
        super()._adopt(link)
        self._on_change()

    def _lost(self) -> None:
        super()._lost()
        self._on_change()


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Tell whoever awaits it, unless it was told something already."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: not every caller awaits


async def ask_slots(dialer: Dialer, timeout_seconds: float) -> list[tuple[int, int, Address]]:
    """The map of slots, over a connection for this question."""
    owner, transport = await dialer.open()
    link = Link(owner, timeout_seconds)
    link.attach(transport)
    try:
        asked = Address(getattr(owner, "host", "127.0.0.1"), int(getattr(owner, "port", 6379)))
        return parse_slots(await link.call("CLUSTER", "SLOTS"), asked)
    finally:
        link.close()
