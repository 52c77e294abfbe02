"""Turns in flight while processes of every role are killed and frozen at random; afterwards everything is counted.

`python -m support.chaos` is behind scripts/chaos; a short run is a test. Every turn has an answer of its own, so that a
mix-up shows; every attempt at every tool call leaves its mark outside the namespace. The seed decides who is hit when,
not what the machine makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnmill.protocol.errors import TurnmillError
from turnmill.runtime.embedded import ensure_server
from turnmill.runtime.turn import Turn

from . import crash_app
from .processes import Process
from .stage import APP, Stage, call, channel_problems, open_stage, told

SETTINGS = {"lease_seconds": 1.0, "liveness_seconds": 1.0, "heartbeat_seconds": 0.3, "max_attempts": 50}
ROLES = ("coordinator", "coordinator", "llm", "llm", "tools", "tools")
SESSIONS = 400
FROZEN_MAX = 2
FREEZE_SECONDS = (1.2, 2.5)
SETTLE_SECONDS = 60.0
"""A turn that has not ended in this time after the last blow is stuck."""


@dataclass
class Plan:
    """What a run does."""

    turns: int = 400
    in_flight: int = 48
    seconds: float = 600.0
    kill_every: float = 1.0
    freeze: bool = True
    seed: int = 1


@dataclass
class Report:
    """What a run found. `wrong` has one line for each thing that must not be."""

    turns: int = 0
    finished: int = 0
    seconds: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    stuck: int = 0
    duplicated: int = 0
    effects: int = 0
    second_attempts: int = 0
    resets: int = 0
    crashed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        blows = ", ".join(f"{count} {name}" for name, count in sorted(self.blows.items()))
        head = (
            f"{self.turns} turns, {self.finished} finished in {self.seconds:.1f} s; {sum(self.blows.values())} blows "
            f"({blows}); lost {self.lost}, duplicated {self.duplicated}, stuck {self.stuck}; {self.effects} effects, "
            f"{self.second_attempts} calls attempted again, {self.resets} steps reset"
        )
        return "\n".join([head, *self.crashed, *self.wrong[:50]])


class Run:
    """One run in one namespace."""

    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.stage = stage
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.report = Report(turns=plan.turns)
        self.fleet: list[Process] = []
        self.frozen: set[Process] = set()
        self.turns: dict[int, Turn] = {}
        self.expected: dict[int, str] = {}

    async def __call__(self) -> Report:
        self.fleet = [self._start(role) for role in ROLES]
        started_at = time.monotonic()
        striking = asyncio.create_task(self._strike_on())
        try:
            waiting = await self._drive(started_at + self.plan.seconds)
        finally:
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
            self._thaw_all()
        await self._settle(waiting)
        self.report.seconds = time.monotonic() - started_at
        await self._verify()
        return self.report

    def _start(self, role: str) -> Process:
        processes = self.stage.processes
        if role == "coordinator":
            return processes.coordinator()
        return processes.llm(APP) if role == "llm" else processes.tools(APP, queues=["default"])

    # ---- turns

    async def _drive(self, until: float) -> dict[asyncio.Task[None], Turn]:
        """Start turns, so many in flight, until all have ended or the time is over. Returns those that have not ended."""
        waiting: dict[asyncio.Task[None], Turn] = {}
        number = 0
        while time.monotonic() < until and (waiting or number < self.plan.turns):
            while number < self.plan.turns and len(waiting) < self.plan.in_flight:
                turn = await self._submit(number)
                waiting[asyncio.create_task(self._wait(number, turn))] = turn
                number += 1
            done, _ = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del waiting[task]
        self.report.turns = number
        return waiting

    async def _submit(self, number: int) -> Turn:
        self.expected[number], message = self._task(number)
        session = f"s{number % SESSIONS}"
        turn = self.turns[number] = await self.stage.client.turn(crash_app.worker, message, session=session)
        return turn

    async def _settle(self, waiting: dict[asyncio.Task[None], Turn]) -> None:
        """Nobody is hit any more: what has not ended soon is stuck."""
        if not waiting:
            return
        _, stuck = await asyncio.wait(waiting, timeout=SETTLE_SECONDS)
        for task in stuck:
            task.cancel()
            self.report.stuck += 1
            self.report.wrong.append(f"{waiting[task].id}: not ended {SETTLE_SECONDS:g} s after the last blow")

    def _task(self, number: int) -> tuple[str, str]:
        """One or two steps of one to three calls, and an answer that repeats the last step's results."""
        steps = []
        for step in range(self.random.randint(1, 2)):
            count = self.random.randint(1, 3)
            seconds = self.random.choice([0.0, 0.02, 0.2, 1.0])
            steps.append([call("again", value=f"{number}/{step}/{index}", seconds=seconds) for index in range(count)])
        told_results = " ".join(f"${{results[{index}]}}" for index in range(len(steps[-1])))
        results = " ".join(f"{item['arguments']['value']} done" for item in steps[-1])
        delay = self.random.choice([0.0, 0.01, 0.1])
        return f"{number}: {results}", told(*steps, answer=f"{number}: {told_results}", delay=delay)

    async def _wait(self, number: int, turn: Turn) -> None:
        try:
            result = await turn.result()
        except TurnmillError as error:
            self.report.wrong.append(f"{turn.id}: {type(error).__name__}: {error}")
            return
        self.report.finished += 1
        if result.answer != self.expected[number]:
            self.report.wrong.append(f"{turn.id}: answered {result.answer!r}, not {self.expected[number]!r}")

    # ---- blows

    async def _strike_on(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.5, 1.5) * self.plan.kill_every)
            for place, process in enumerate(self.fleet):
                if not process.is_alive:
                    self.report.crashed.append(f"{process.name} ended by itself: {process.log()[-2000:]}")
                    self.fleet[place] = self._start(process.role)
            self._strike(self.random.randrange(len(self.fleet)))

    def _strike(self, place: int) -> None:
        process = self.fleet[place]
        if self.plan.freeze and process not in self.frozen and self.random.random() < 0.5:
            if len(self.frozen) < FROZEN_MAX:
                self._freeze(process)
            return
        self.frozen.discard(process)
        process.kill()
        self.report.blows[f"kill -9 {process.role}"] += 1
        self.fleet[place] = self._start(process.role)

    def _freeze(self, process: Process) -> None:
        self.frozen.add(process)
        process.freeze()
        self.report.blows[f"freeze {process.role}"] += 1
        seconds = self.random.uniform(*FREEZE_SECONDS) * SETTINGS["liveness_seconds"]
        asyncio.get_running_loop().call_later(seconds, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        self.frozen.discard(process)
        if process.is_alive:
            process.thaw()

    def _thaw_all(self) -> None:
        for process in list(self.frozen):
            self._thaw(process)

    # ---- the count

    async def _verify(self) -> None:
        report = self.report
        try:
            await self.stage.assert_idle()
        except AssertionError as error:
            report.wrong.append(str(error))
        counts = await self.stage.redis.hgetall(f"{self.stage.keys.prefix}-play:effects")
        effects: dict[str, Counter[int]] = {}
        for name, count in counts.items():
            key, _, attempt = name.decode().partition("|")
            effects.setdefault(key, Counter())[int(attempt)] += int(count)
        for turn in self.turns.values():
            await self._verify_turn(turn, effects)
        for session in range(min(SESSIONS, len(self.turns))):
            try:
                await self.stage.assert_history(f"s{session}")
            except AssertionError as error:
                report.wrong.append(f"the history of s{session}: {str(error)[:500]}")
        for letter in await self.stage.dead_letters():
            report.wrong.append(f"a dead letter: {letter}"[:500])

    async def _verify_turn(self, turn: Turn, effects: dict[str, Counter[int]]) -> None:
        report = self.report
        numbered = await self.stage.told_events(turn.id)
        if not numbered or not numbered[-1][1].type.startswith("turn.f"):
            report.lost += 1
        report.wrong += [f"{turn.id}: {problem}" for problem in channel_problems(numbered)] if numbered else []
        events = [event for _, event in numbered]
        kinds = Counter(event.type for event in events)
        report.duplicated += max(0, kinds["turn.finished"] + kinds["turn.failed"] - 1)
        report.resets += kinds["step.reset"]
        attempts = Counter(
            f"{turn.id}/{event.step_number}.{event.index}" for event in events if event.type == "tool_execution.started"
        )
        for key, count in attempts.items():
            report.second_attempts += count > 1
            done = effects.get(key, Counter())
            report.effects += done.total()
            if any(times > 1 for times in done.values()):
                report.duplicated += 1
                report.wrong.append(f"{key}: an attempt took effect more than once: {dict(done)}")
            if done.total() > count or done.total() < 1:
                report.wrong.append(f"{key}: {done.total()} effects of {count} attempts")


async def run_chaos(redis_url: str, directory: Path, plan: Plan) -> Report:
    namespace = f"chaos-{uuid.uuid4().hex[:8]}"
    async with open_stage(redis_url, namespace, directory, **SETTINGS) as stage:
        return await Run(stage, plan)()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="Kill and freeze processes while turns run.")
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no turn after that")
    parser.add_argument("--kill-every", type=float, default=1.0, help="seconds between two blows, on average")
    parser.add_argument("--freeze", action=argparse.BooleanOptionalAction, default=True, help="SIGSTOP as well")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--redis-url", default=None, help="a server that is there; else an embedded Valkey is started")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    redis_url = options.redis_url
    values: dict[str, Any] = {name: value for name, value in vars(options).items() if name != "redis_url"}
    print(f"seed {options.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    server = None if redis_url else ensure_server(directory)
    try:
        report = asyncio.run(run_chaos(server.url if server else redis_url, directory, Plan(**values)))
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(directory)
    print(report)
    raise SystemExit(1 if report.wrong or report.crashed else 0)


if __name__ == "__main__":
    main()
