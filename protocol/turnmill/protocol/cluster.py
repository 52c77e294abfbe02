"""A cluster as one engine: each command goes to the node that holds its key, over that node's own link.

So commands of one tick leave in one write per node, as on a single engine. A command that a node refuses because the slot
is elsewhere (MOVED, ASK), on its way (TRYAGAIN) or without an owner for the moment (CLUSTERDOWN) was not executed, and is
sent again until it is, or for some seconds. A command whose connection is lost may have been executed: it fails with
`EngineUnavailable`, as on a single engine. The map of slots is read at the start, and again whenever a node says that it
is wrong or a link is lost, until every slot has a node that is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .connection import Engine
from .errors import EngineError, EngineReplyError, EngineUnavailable
from .link import Argument, Link, SubscriberLink, url_at
from .logs import get_logger
from .node import Node, Sent, ask_slots, fail
from .slots import SLOTS, Address, Refusal, key_of, parse_slots, refusal_of, slot_of

_log = get_logger(__name__)
REFUSAL_SECONDS = 3.0
"""How long a command that is refused is sent again; after that its caller is told so."""
_AGAIN_SECONDS = (0.01, 0.2)
_MAP_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_READY_SECONDS = 1.0  # a shard may be down for long: whoever waits looks again, for its own may be up
_LEAVE_SECONDS = 1.0  # what a node that holds nothing any more is given to answer what it was asked


class ClusterEngine(Engine):
    """The engine of a process on a cluster."""

    is_cluster = True

    def __init__(self, url: str, *, response_timeout_seconds: float = 10.0, client_name: str | None = None) -> None:
        super().__init__(url, response_timeout_seconds=response_timeout_seconds, client_name=client_name)
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * SLOTS
        self._whole = asyncio.Event()
        self._mending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[Address, Node] = {}
        self._doubted = False

    async def connect(self) -> Engine:
        found, last = None, None
        for dialer in self._dialers:
            try:
                found = await ask_slots(dialer, self._timeout_seconds)
                break
            except (EngineUnavailable, EngineReplyError) as error:
                last = error
        if found is None:
            raise EngineUnavailable(f"the cluster at {self.address} does not tell its slots: {last}")
        self._adopt_map(found)
        await self._await_nodes(_MAP_SECONDS)
        if self._home() is None:
            addresses = ", ".join(node.address for node in self.primaries)
            await self.close()
            raise EngineUnavailable(
                f"no node of the cluster at {self.address} is reached where it says to be: {addresses}"
            )
        return self

    # ---- commands

    def call(self, *arguments: Argument) -> asyncio.Future[Any]:
        key = key_of(arguments)
        node = self._home() if key is None else self._slots[slot_of(key)]
        if node is None or node._shared is None:
            return self._unreachable(key)
        return node._shared.call(*arguments)

    def transact(self, commands: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        key = key_of(commands[0])
        node = None if key is None else self._slots[slot_of(key)]
        if node is None:
            return self._unreachable(key)
        sent = Sent(asyncio.get_running_loop().create_future(), commands[0], commands)
        node.send(sent)
        return sent.future

    async def call_each(self, *arguments: Argument) -> list[Any]:
        return list(await asyncio.gather(*[node.call(*arguments) for node in self.primaries]))

    def node_of(self, key: Argument) -> Engine:
        node = self._slots[slot_of(key)]
        if node is None:
            raise EngineUnavailable(f"no node of the cluster at {self.address} holds the slot of {key!r}")
        return node

    @property
    def primaries(self) -> list[Node]:
        return list(self._nodes.values())

    async def open_link(self) -> Link:
        """To any node. For keys use `node_of`."""
        return await self._home_or_fail().open_link()

    async def open_subscriber(
        self, on_push: Callable[[list[Any]], None], on_error: Callable[[EngineReplyError], None] | None = None
    ) -> SubscriberLink:
        """To any node. For sharded channels use `node_of`."""
        return await self._home_or_fail().open_subscriber(on_push, on_error)

    # ---- the state of the cluster

    async def ready(self) -> None:
        """Return when every slot has a node that is connected, but not later than after a second."""
        self._check_open()
        self._on_change()  # a link that was just lost says so in the next tick
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_SECONDS):
                await self._whole.wait()
        self._check_open()

    def doubt(self, error: Exception | None = None) -> bool:
        """Something contradicts the map, such as a node's refusal: it is read again. Whether it was a refusal."""
        refusal = None if error is None else refusal_of(error)
        if error is not None and refusal is None:
            return False
        if refusal is None or refusal.kind != "ASK":
            self._mend()
        return True

    async def close(self) -> None:
        self._closing = True
        self._whole.set()
        tasks = [task for task in (self._mending, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*[node.close() for node in (*self._nodes.values(), *self._leaving.values())])

    def _check_open(self) -> None:
        if self._closing:
            raise EngineUnavailable(f"this connection to the engine at {self.address} was closed")

    def _home(self) -> Node | None:
        """Where commands without a key go: the first node that is up."""
        return next((node for node in self._nodes.values() if node.is_up), None)

    def _home_or_fail(self) -> Node:
        node = self._home()
        if node is None:
            raise EngineUnavailable(f"no node of the cluster at {self.address} is connected")
        return node

    def _unreachable(self, key: Argument | None) -> asyncio.Future[Any]:
        what = "no node is connected" if key is None else f"no node that holds {key!r} is connected"
        future = asyncio.get_running_loop().create_future()
        fail(future, EngineUnavailable(f"the cluster at {self.address}: {what}"))
        self._mend()
        return future

    # ---- refusals

    def _refused(self, sent: Sent, refusal: Refusal, error: Exception) -> None:
        if sent.future.done() or self._closing:
            fail(sent.future, error)
            return
        self._keep(self._follow(sent, refusal, error))

    async def _follow(self, sent: Sent, refusal: Refusal, error: Exception) -> None:
        """Send a refused command to where it belongs now."""
        try:
            now = asyncio.get_running_loop().time()
            sent.since = sent.since or now
            sent.refusals += 1
            sent.refusal = None
            if now - sent.since > REFUSAL_SECONDS:
                raise EngineUnavailable(f"not executed for {REFUSAL_SECONDS:g} s: {error}")
            node = self._learn(refusal)
            if node is None or sent.refusals > 2:
                shortest, longest = _AGAIN_SECONDS
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(longest, shortest * 2 ** min(sent.refusals, 10)))
                node = node or self._slots[slot_of(key_of(sent.arguments) or "")]
            if node is None:
                raise EngineUnavailable(f"not executed: {error}")
            async with asyncio.timeout(_MAP_SECONDS):
                await node.up()
            node.send(sent, asking=refusal.kind == "ASK")
        except TimeoutError:
            fail(sent.future, EngineUnavailable(f"not sent: the cluster's node at {refusal.address} does not answer"))
        except asyncio.CancelledError:
            fail(sent.future, EngineUnavailable(f"not sent: the connection to {self.address} was closed"))
            raise
        except Exception as failure:
            fail(sent.future, failure)

    def _learn(self, refusal: Refusal) -> Node | None:
        """The node that a refusal names; None where it says to try again."""
        if refusal.address is None or refusal.slot is None:
            if refusal.kind == "CLUSTERDOWN":
                self._mend()
            return None
        node = self._node(refusal.address)
        if refusal.kind == "MOVED":
            self._slots[refusal.slot] = node
            self._mend()
        return node

    # ---- the map

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address) or self._leaving.pop(address, None)
        if node is not None:
            self._nodes[address] = node
        else:
            node = self._nodes[address] = Node(
                url_at(self._dialers[0].url, address.host, address.port),
                address,
                response_timeout_seconds=self._timeout_seconds,
                client_name=self._client_name,
                on_refusal=self._refused,
                on_change=self._on_change,
            )
            node.start()
        return node

    def _on_change(self) -> None:
        if self._closing:
            return
        if all(self._slots) and all(node.is_up for node in self._nodes.values()):
            self._whole.set()
        else:
            self._whole.clear()
            self._mend()

    def _mend(self) -> None:
        self._doubted = True
        if not self._closing and (self._mending is None or self._mending.done()):
            self._mending = asyncio.get_running_loop().create_task(self._mend_map())

    async def _mend_map(self) -> None:
        """Read the map until nothing contradicts it and every slot has a node that is connected."""
        shortest, longest = _AGAIN_SECONDS
        delay = shortest
        while not self._closing:
            self._doubted = False
            found = await self._read_map()
            if found is not None:
                self._adopt_map(found)
                await self._await_nodes(_LOOK_SECONDS)
                if self._whole.is_set() and not self._doubted:
                    return
            await asyncio.sleep(random.uniform(0.5, 1.0) * delay)
            delay = min(2 * delay, longest)

    async def _read_map(self) -> list[tuple[int, int, Address]] | None:
        """The map as one of the nodes tells it, or whoever answers at the first address."""
        nodes = [node for node in self._nodes.values() if node.is_up]
        random.shuffle(nodes)
        for node in nodes:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_MAP_SECONDS):
                    return parse_slots(await node.call("CLUSTER", "SLOTS"), node.place)
        for dialer in self._dialers:
            with contextlib.suppress(EngineError):
                return await ask_slots(dialer, self._timeout_seconds)
        return None

    def _adopt_map(self, found: list[tuple[int, int, Address]]) -> None:
        holding = {address for _, _, address in found}
        if not holding:
            return  # a node that was just reset
        slots: list[Node | None] = [None] * SLOTS
        for first, last, address in found:
            slots[first : last + 1] = [self._node(address)] * (last + 1 - first)
        self._slots = slots
        for address in [address for address in self._nodes if address not in holding]:
            node = self._leaving[address] = self._nodes.pop(address)
            self._keep(self._leave(node))
        self._on_change()

    async def _leave(self, node: Node) -> None:
        """It may come back: right after a change, nodes tell different maps."""
        if node.is_up:
            await asyncio.sleep(_LEAVE_SECONDS)
        if self._leaving.get(node.place) is node:
            del self._leaving[node.place]
            _log.info("a node of the cluster holds no slot any more", address=node.address)
            await node.close()

    async def _await_nodes(self, seconds: float) -> None:
        waiting = [node.up() for node in self._nodes.values() if not node.is_up]
        if waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*waiting)

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """The loop holds its tasks weakly."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
