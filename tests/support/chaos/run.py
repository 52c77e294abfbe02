"""One run: turns are kept in flight and watched while a scenario strikes, then everything is counted.

Every turn has an answer of its own, so that a mix-up shows. A turn that was not accepted is submitted again under the
same idempotency key. Some turns have a second reader, in a client of its own, that leaves and resumes.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis

from support.processes import Process
from support.proxy import Proxy
from support.stage import call, told
from turnmill.protocol.errors import EngineError, TurnError, TurnLostError
from turnmill.runtime.client import Client, open_client
from turnmill.runtime.turn import Turn

from . import app
from .counting import count
from .deployment import Deployment, deployment
from .report import Plan, Report
from .scenarios import SCENARIOS, Scenario
from .server import Server, in_thread

READ_EVERY = 5
"""Every so many turns have a reader besides their waiter."""
PROBES_MAX = 20
PROGRESS_SECONDS = 30.0
NOT_PUBLISHED = ("unknown_agent", "unknown_tool")
LAST_EVENT = 2**53 - 1
"""The number of the event that stands for a channel that is gone."""


class Run:
    """One run in one namespace. Blows use `server`, `proxy`, `replica`, `fleet`, `random` and `report`."""

    def __init__(self, plan: Plan, scenario: Scenario, deployed: Deployment, readers: Client) -> None:
        self.plan = plan
        self.scenario = scenario
        self.stage = deployed.stage
        self.directory = deployed.engine.directory
        self.server = deployed.server
        self.proxy = deployed.proxy
        self.start = deployed.start
        self.agent = app.make_agent(scenario.deadline_seconds, app.make_tools(scenario.deadline_seconds))
        self.random = random.Random(plan.seed)
        self.report = Report(scenario=plan.scenario, turns=plan.turns)
        self.replica: Server | None = None
        self.replication: Proxy | None = None
        self.fleet: list[Process] = []
        self.frozen: set[Process] = set()
        self.turns: dict[int, Turn] = {}
        self.finished: set[int] = set()
        self.tasks: list[asyncio.Task[Any]] = []
        self._readers = readers
        self._told: set[str] = set()

    async def __call__(self) -> Report:
        self.fleet = [self.start(role) for role in self.plan.roles]
        await self._everybody_is_there()
        started_at = time.monotonic()
        striking = asyncio.create_task(self._strike_on())
        try:
            waiting = await self._drive(started_at + self.plan.seconds)
        finally:
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
            await self.scenario.finish(self)
        await self._settle(waiting)
        self.report.seconds = time.monotonic() - started_at
        await self._probe()
        await count(self)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.report

    async def close(self) -> None:
        """The engines that came to be since; the first one has its own owner."""
        if self.replication is not None:
            await self.replication.close()
        for server in (self.server, self.replica):
            if server is not None:
                await in_thread(server.kill)

    async def _everybody_is_there(self) -> None:
        """One turn has passed through every role before anything is hit."""
        turn = await self.stage.client.turn(self.agent, told([call("again")], answer="ready"), session="first")
        assert (await asyncio.wait_for(turn.result(), self.plan.settle_seconds)).answer == "ready"

    # ---- turns

    async def _drive(self, until: float) -> dict[asyncio.Task[None], str]:
        """Keep so many turns in flight, until all have ended or the time is over. Returns those that have not ended."""
        waiting: dict[asyncio.Task[None], str] = {}
        number = 0
        while time.monotonic() < until and (waiting or number < self.plan.turns):
            while number < self.plan.turns and len(waiting) < self.plan.in_flight:
                waiting[asyncio.create_task(self._one_turn(number))] = f"turn {number}"
                number += 1
            done, _ = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del waiting[task]
                task.result()
            self._collect_readers(waiting)
        self.report.turns = number
        return waiting

    def _collect_readers(self, waiting: dict[asyncio.Task[None], str]) -> None:
        for task in self.tasks:
            waiting[task] = task.get_name()
        self.tasks = []

    async def _one_turn(self, number: int) -> None:
        expected, message = self._task(number)
        turn = self.turns[number] = await self._submit(number, message)
        if number % READ_EVERY == 0:
            self.tasks.append(asyncio.create_task(self._read(turn), name=f"the reader of {turn.id}"))
        try:
            result = await turn.result()
        except TurnError as error:
            self._note_loss(turn, f"{type(error).__name__} {error.error_type}", str(error))
            if error.error_type in NOT_PUBLISHED:
                await asyncio.sleep(1.0)  # as a host would: it is published again soon
            return
        if re.fullmatch(expected, result.answer, re.DOTALL):
            self.finished.add(number)
            self.report.finished += 1
        elif re.fullmatch(expected.replace("ANY", "(?:Error: .*|"), result.answer, re.DOTALL):
            self._note_loss(turn, "a call's error as its result", result.answer)
        else:
            self.report.wrong.append(f"{turn.id}: answered {result.answer!r}, not {expected!r}")

    async def _submit(self, number: int, message: str) -> Turn:
        while True:
            try:
                return await self.stage.client.turn(
                    self.agent, message, session=self.session(number), idempotency_key=f"turn {number}"
                )
            except EngineError:
                self.report.submitted_again += 1
                await asyncio.sleep(self.random.uniform(0.1, 0.3))

    def session(self, number: int) -> str:
        return f"s{number % self.plan.sessions}"

    def _task(self, number: int) -> tuple[str, str]:
        """One or two steps of one to three calls, and an answer that repeats the last step's results. The first value is
        a pattern of the answer."""
        chance = random.Random(f"{self.plan.seed}/{number}")
        steps = []
        for step in range(chance.randint(1, 2)):
            seconds = chance.choice([0.0, 0.02, 0.2, 0.6])
            names = [chance.choice(["again", "again", "again", "once"]) for _ in range(chance.randint(1, 3))]
            steps.append([call(name, value=f"{number}/{step}/{at}", seconds=seconds) for at, name in enumerate(names)])
        results = " ".join(f"${{results[{index}]}}" for index in range(len(steps[-1])))
        patterns = [self._pattern(item["name"], item["arguments"]["value"]) for item in steps[-1]]
        delay = chance.choice([0.0, 0.01, 0.1])
        return f"{number}: {' '.join(patterns)}", told(*steps, answer=f"{number}: {results}", delay=delay)

    def _pattern(self, tool: str, value: str) -> str:
        """A call that may not be repeated gives an error where its worker was lost."""
        done = re.escape(f"{value} done")
        return f"(?:{done}|Error: .*)" if tool == "once" or self.scenario.may_lose else done

    def _note_loss(self, turn: Turn, kind: str, text: str) -> None:
        if self.scenario.may_lose:
            self.report.told[kind] += 1
            self._told.add(turn.id)
        else:
            self.report.lost += 1
            self.report.wrong.append(f"{turn.id}: {kind}: {text}"[:400])

    async def _read(self, turn: Turn) -> None:
        """A reader of another client that leaves now and then and goes on from its cursor."""
        chance, cursor = random.Random(turn.id), 0
        handle = self._readers.attach(turn.id)
        self.report.readers += 1
        try:
            while True:
                async for number, event in handle.numbered_events(cursor):
                    self.report.events_read += 1
                    if number not in (cursor + 1, LAST_EVENT):
                        self.report.wrong.append(f"a reader of {turn.id} saw event {number} behind {cursor}")
                    cursor = number
                    if event.type in ("turn.finished", "turn.failed"):
                        return
                    if chance.random() < 0.1:
                        break
                else:
                    self.report.wrong.append(f"a reader of {turn.id} saw no end behind event {cursor}")
                    return
        except TurnLostError as error:
            if not self.scenario.may_lose:
                self.report.wrong.append(f"a reader of {turn.id} behind event {cursor}: {error}")

    # ---- blows

    async def _strike_on(self) -> None:
        every = self.plan.every or self.scenario.every
        while True:
            ended = self._ended
            await asyncio.sleep(self.random.uniform(0.5, 1.5) * every)
            await self._progress(ended)
            self.replace_ended()
            try:
                name = await self.scenario.strike(self)
            except (redis.RedisError, OSError) as error:
                self.report.crashed.append(f"a blow failed: {error!r}")
                continue
            self.report.blows[name] += 1

    async def _progress(self, ended: int) -> None:
        """On a loaded machine processes may not start as fast as they are killed: something must have ended in between."""
        deadline = time.monotonic() + PROGRESS_SECONDS
        while self._ended == ended and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    @property
    def _ended(self) -> int:
        return self.report.finished + self.report.told.total()

    def replace_ended(self) -> None:
        for place, process in enumerate(self.fleet):
            if not process.is_alive:
                self.report.crashed.append(f"{process.name} ended by itself: {process.log()[-3000:]}")
                self.fleet[place] = self.start(process.role)

    # ---- behind the last blow

    async def _settle(self, waiting: dict[asyncio.Task[None], str]) -> None:
        """Nothing is hit any more: what has not ended soon is stuck."""
        deadline = time.monotonic() + self.plan.settle_seconds
        while waiting or self.tasks:
            self._collect_readers(waiting)
            left = deadline - time.monotonic()
            done, stuck = await asyncio.wait(waiting, timeout=max(0.0, min(left, 1.0)))
            for task in done:
                del waiting[task]
                task.result()
            if left <= 0:
                for task in stuck:
                    task.cancel()
                    self.report.stuck += 1
                    self.report.wrong.append(f"{waiting[task]}: not ended {self.plan.settle_seconds:g} s after the end")
                await asyncio.gather(*stuck, return_exceptions=True)
                return

    async def _probe(self) -> None:
        """No session is left unusable."""
        used = sorted({self.session(number) for number in self.turns})
        turns = []
        for session in self.random.sample(used, min(PROBES_MAX, len(used))):
            turns.append((session, await self._probe_session(session)))
        for session, turn in turns:
            try:
                await self._assert_works(session, turn)
            except (TurnError, TimeoutError, AssertionError) as error:
                self.report.wrong.append(f"session {session} is unusable behind the run: {error!r}")

    def _probe_session(self, session: str) -> Awaitable[Turn]:
        return self.stage.client.turn(self.agent, told([call("again")], answer="works"), session=session)

    async def _assert_works(self, session: str, turn: Turn) -> None:
        """What a host would do: wait for its agent to be published again, delete what is left of a lost conversation."""
        deadline = time.monotonic() + self.plan.settle_seconds
        while True:
            try:
                result = await asyncio.wait_for(turn.result(), self.plan.settle_seconds)
                assert result.answer == "works", result.answer
                return
            except TurnError as error:
                if not self.scenario.may_lose or time.monotonic() > deadline:
                    raise
                if error.error_type == "state_lost":
                    self.report.told["session to be deleted"] += 1
                    await self.stage.client.session(session).delete()
                elif error.error_type in NOT_PUBLISHED:
                    await asyncio.sleep(0.5)
                else:
                    raise
            turn = await self._probe_session(session)


async def run_chaos(directory: Path, plan: Plan) -> Report:
    """A run on an engine of its own, in this directory."""
    scenario = SCENARIOS[plan.scenario]
    async with AsyncExitStack() as stack:
        deployed = await stack.enter_async_context(
            deployment(
                directory,
                fsync=scenario.fsync,
                through_proxy=scenario.through_proxy,
                deadline_seconds=scenario.deadline_seconds,
                options=dict(scenario.options),
                **scenario.settings,
            )
        )
        readers = await stack.enter_async_context(open_client(deployed.url, deployed.stage.client.settings))
        run = Run(plan, scenario, deployed, readers)
        stack.push_async_callback(run.close)
        await scenario.prepare(run)
        return await run()
