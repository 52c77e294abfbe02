"""What the hosts of a simulated world do: start turns, watch them, speak to them, and keep on until each has ended.

A story outlasts every loss of its connection: it sends again what may not have arrived, and reads on from its cursor.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from turnmill.protocol.errors import CommandRefusedError, EngineReplyError, EngineUnavailable, TurnError, TurnLostError
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.runtime.client import Client
from turnmill.runtime.turn import Turn

from .application import Play, told

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")
_AGAIN_SECONDS = 0.2
_LOOK_SECONDS = 3.0


class Story:
    """One turn and everything that its host says to it."""

    def __init__(self, world: World, number: int, rng: random.Random, sessions: int) -> None:
        self.world = world
        self.number = number
        self.rng = rng
        self.session = f"s{rng.randrange(sessions)}"
        self.agent = rng.choice(["worker", "worker", "worker", "marked"])
        self.on_busy = rng.choice(["queue", "queue", "queue", "queue", "interrupt", "steer", "reject"])
        self.words = [(rng.uniform(0.0, 3.0), rng.choice(_WORDS)) for _ in range(rng.choice([0, 0, 1, 1, 2, 4]))]
        self.play = random_play(
            rng,
            f"{number}",
            may_delegate=self.agent == "worker",
            is_stopped="abort" in [word for _, word in self.words],
        )
        self.message = told(self.play)
        self.starts_after = rng.uniform(0.0, 2.5)
        self.turn: Turn | None = None
        self.is_own = False
        self.seen: list[tuple[int, Any]] = []
        self.steered: dict[str, str] = {}
        """Accepted steering by its id: its text."""
        self.cancelled: dict[str, bool] = {}
        """Whether steering was still there when it was taken back."""
        self.aborted = False
        self.refused = ""
        self.ended = False

    def __repr__(self) -> str:
        return f"turn {self.number} of {self.session} ({self.agent}, {self.on_busy}): {told(self.play)} {self.words}"

    async def run(self, client: Client) -> None:
        await asyncio.sleep(self.starts_after)
        key = f"story-{self.number}"
        try:
            self.turn = await self._insist(
                lambda: client.turn(
                    self.agent,
                    told(self.play),
                    session=self.session,
                    on_busy=self.on_busy,
                    idempotency_key=key,  # type: ignore[arg-type]
                )
            )
        except CommandRefusedError as error:
            self.refused = error.kind
            return
        self.world.accepted(self)
        speaking = [asyncio.create_task(self._speak(delay, word)) for delay, word in self.words]
        watching, looking = asyncio.create_task(self._watch()), asyncio.create_task(self._look_now_and_then())
        await asyncio.wait({watching, looking}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            watching.cancel()
        else:
            watching.result()
            looking.cancel()
        await asyncio.gather(*speaking)

    async def _look_now_and_then(self) -> None:
        """A turn that lost its channel before anything was seen of it cannot be watched."""
        assert self.turn is not None
        while not (self.ended and self.world.may_lose_channel(self.turn.id)):
            await asyncio.sleep(_LOOK_SECONDS)
            if self.world.may_lose_channel(self.turn.id):
                await self._look_at_record()

    async def _watch(self) -> None:
        """Every event once, whatever happens to the connection; what the turn waits for is given."""
        assert self.turn is not None
        answering: set[asyncio.Task[None]] = set()
        while not self.ended:
            after = self.seen[-1][0] if self.seen else 0
            try:
                async for number, event in self.turn.numbered_events(after):
                    self.seen.append((number, event))
                    if event.type in TERMINAL_EVENT_TYPES:
                        self.ended = True
                    elif event.type in ("turn.suspended", "approval.requested"):
                        answering.add(asyncio.create_task(self._answer(event)))
            except (EngineUnavailable, EngineReplyError):
                await asyncio.sleep(_AGAIN_SECONDS)
            except TurnLostError as error:
                if not self.world.may_lose_channel(self.turn.id):
                    raise AssertionError(f"{self.turn.id} is lost: {error}") from error
                await self._look_at_record()
                await asyncio.sleep(_AGAIN_SECONDS)
        if answering:
            await asyncio.gather(*answering)

    async def _look_at_record(self) -> None:
        """What a host can do whose turn has no channel any more."""
        turn = self.turn
        assert turn is not None
        status = await self._insist(turn.status)
        self.ended = status in ("finished", "failed", "aborted")
        if status == "suspended":
            try:
                result = await self._insist(turn.result)
            except TurnError:
                return
            for call in result.approvals:
                await self._try(lambda call=call: turn.approve(call.id))
            if result.pending:
                await self._try(
                    lambda: turn.resume(tool_results={call.id: f"{self.number} host" for call in result.pending})
                )

    async def _answer(self, event: Any) -> None:
        """The host's results and approvals, sometimes in two portions, sometimes twice."""
        turn, rng = self.turn, self.rng
        assert turn is not None
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        if event.type == "approval.requested":
            decide = turn.approve if rng.random() < 0.7 else turn.deny
            await self._try(lambda: decide(event.tool_call.id))
            return
        if event.approvals and self.world.may_lose_channel(turn.id):  # the request went with the channel
            for call_id in event.approvals:
                await self._try(lambda call_id=call_id: turn.approve(call_id))
        pending = list(event.pending)
        given = dict.fromkeys(pending, f"{self.number} host")
        if len(pending) > 1 and rng.random() < 0.5:
            await self._try(lambda: turn.resume(tool_results={pending[0]: f"{self.number} host"}))
        for _ in range(rng.choice([1, 1, 2])):
            if pending:
                await self._try(lambda: turn.resume(tool_results=given))

    async def _speak(self, delay: float, word: str) -> None:
        turn = self.turn
        assert turn is not None
        await asyncio.sleep(delay)
        if word == "abort":
            await self._try(lambda: turn.abort("enough"))
            self.aborted = True
            return
        text = f"steering {self.number}.{len(self.steered)}.{self.rng.randrange(10**6)}"
        entry = await self._try_steer(turn, text, "queue" if word == "next" else "steer")
        if word == "next":
            if entry is not None and self.rng.random() < 0.3:
                await self._insist(lambda: turn.cancel_steering(entry))
            return
        if entry is not None:
            self.steered[entry] = text
        if word == "cancel" and entry is not None:
            self.cancelled[entry] = await self._insist(lambda: turn.cancel_steering(entry))

    async def _try_steer(self, turn: Turn, text: str, mode: Any) -> str | None:
        """The id of the steering where it was accepted."""
        try:
            return (await self._insist(lambda: turn.steer(text, mode=mode))).id
        except CommandRefusedError:
            return None

    async def _try(self, command: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._insist(command)
        except CommandRefusedError:
            return

    async def _insist(self, command: Callable[[], Awaitable[T]]) -> T:
        """Again and again while the engine is out of reach or nobody answers; what is said twice has one effect."""
        while True:
            try:
                return await command()
            except (EngineUnavailable, TimeoutError):
                await asyncio.sleep(_AGAIN_SECONDS)
            except EngineReplyError:
                await asyncio.sleep(_AGAIN_SECONDS)
            except TurnLostError:
                # Between the key and the command its start may be on the way.
                await asyncio.sleep(_AGAIN_SECONDS)


_WORDS = ["steer", "steer", "cancel", "next", "abort"]


def random_play(rng: random.Random, label: str, *, may_delegate: bool, is_stopped: bool = False) -> Play:
    steps = []
    for step in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
        calls = [
            _random_call(rng, f"{label}.{step}.{index}", may_delegate, is_stopped)
            for index in range(rng.choice([1, 1, 2, 2, 3]))
        ]
        steps.append(calls)
    delay = rng.choice([0.0, 0.005, 0.02, 0.1])
    return Play(
        steps=steps, answer=f"answer {label}", chunks=rng.randint(1, 6), delay=delay, fails=rng.choice([0, 0, 0, 1, 2])
    )


def _random_call(rng: random.Random, label: str, may_delegate: bool, is_stopped: bool) -> tuple[str, dict[str, Any]]:
    names = ["again"] * 5 + ["once"] * 4 + ["flaky", "ask", "careful"] + ["helper"] * (2 * may_delegate)
    name = rng.choice(names)
    if name == "ask":
        return name, {}
    if name == "helper":
        play = Play(
            steps=[[_worker_call(rng, f"{label}.h{index}") for index in range(rng.choice([1, 2]))]]
            * rng.choice([0, 1]),
            answer=f"answer {label}",
            delay=rng.choice([0.0, 0.02]),
        )
        return name, {"message": told(play)}
    return name, {"value": label, "seconds": 3.0 if is_stopped and rng.random() < 0.6 else _random_seconds(rng)}


def _worker_call(rng: random.Random, label: str) -> tuple[str, dict[str, Any]]:
    return rng.choice(["again", "once"]), {"value": label, "seconds": _random_seconds(rng)}


def _random_seconds(rng: random.Random) -> float:
    return rng.choice([0.0, 0.0, 0.02, 0.1, 0.3, 1.0])
