"""`turnmill top`: the whole namespace on one screen, again and again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import Exit

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..activity import Activity, LiveTurn

Interval = Annotated[
    float,
    typer.Option("--interval", envvar="TURNMILL_INTERVAL", min=0.2, metavar="SECONDS", help="Between two looks."),
]
Once = Annotated[bool, typer.Option("--once", envvar="TURNMILL_ONCE", help="One look, and out.")]
Limit = Annotated[
    int, typer.Option("--limit", envvar="TURNMILL_LIMIT", min=1, max=100, metavar="N", help="Turns to show.")
]
_MEBIBYTE = 1 << 20


def top(
    interval: Interval = 2.0,
    once: Once = False,
    limit: Limit = 8,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from ..roles import run_async
    from .attachment import command_settings

    settings = command_settings(redis_url, namespace)
    is_live = not once and not as_json and sys.stdout.isatty()
    watch = _on_screen if is_live else _as_lines
    # Without a terminal there is nobody who would stop it: one look, unless a program reads the lines of --json.
    is_single = once or not (is_live or as_json)
    try:
        run_async(watch(settings, interval, limit, is_single=is_single, as_json=as_json))
    except KeyboardInterrupt:
        pass  # how one leaves
    return Exit.OK


async def _as_lines(settings: Settings, interval: float, limit: int, *, is_single: bool, as_json: bool) -> None:
    import msgspec

    def write(activity: Activity) -> None:
        encoded = [msgspec.json.encode(activity.to_dict()).decode()]
        for line in encoded if as_json else screen_lines(activity):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    await _watch(settings, interval, limit, write, is_single=is_single)


async def _on_screen(settings: Settings, interval: float, limit: int, *, is_single: bool, as_json: bool) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(Text("..."), screen=True, auto_refresh=False) as live:

        def draw(activity: Activity) -> None:
            text = Text(no_wrap=True, overflow="ellipsis")
            for line in screen_lines(activity):
                is_head = line[:4].strip().isupper() or line.startswith("turnmill")
                text.append(line + "\n", style="bold" if is_head else "")
            live.update(text, refresh=True)

        await _watch(settings, interval, limit, draw, is_single=is_single)


async def _watch(
    settings: Settings, interval: float, limit: int, show: Callable[[Activity], None], *, is_single: bool
) -> None:
    from turnmill.protocol.errors import EngineUnavailable

    from ..activity import ActivityMonitor
    from .attachment import attached_client

    async with attached_client(settings) as client:
        monitor = ActivityMonitor(client.engine, client.keys, settings)
        while True:
            begun = time.monotonic()
            try:
                show(await monitor.look(limit))
            except EngineUnavailable:
                if is_single:
                    raise
                await client.engine.ready()  # the screen shows the last look until it is back
                continue
            if is_single:
                return
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - begun)))


def screen_lines(activity: Activity) -> Iterator[str]:
    """All of it as plain lines."""
    from . import queue, worker
    from .wording import table_lines

    yield _head(activity)
    yield _turns(activity)
    yield _engine(activity)
    yield ""
    yield from table_lines([queue.HEAD, *[queue.row(each) for each in activity.queues]])
    yield ""
    yield from table_lines([worker.HEAD, *[worker.row(each) for each in activity.processes]])
    yield ""
    yield from table_lines([["OLDEST TURNS", "AGE", "STATE", "STEP", "AGENT", "SESSION"], *map(_row, activity.slowest)])


def _head(activity: Activity) -> str:
    alive = [each for each in activity.processes if each.state != "lost"]
    coordinators = sum(each.role == "coordinator" for each in alive)
    workers = [each for each in alive if each.role != "coordinator"]
    slots = f"{sum(each.used for each in workers)}/{sum(each.slots for each in workers)} slots in use"
    clock = time.strftime("%H:%M:%S", time.localtime(activity.at))
    dead = f"{activity.dead_letters} dead letters" + (": `turnmill dead ls`" if activity.dead_letters else "")
    return f"turnmill top  {clock}  {_count(coordinators, 'coordinator')}, {_count(len(workers), 'worker')}, {slots}, {dead}"


def _turns(activity: Activity) -> str:
    more = "" if activity.live_turns_is_exact else "about "
    waiting = sum(each.waiting for each in activity.queues)
    in_work = sum(each.in_work for each in activity.queues)
    backlog = sum(each.backlog for each in activity.queues)
    return (
        f"turns   {activity.started_per_second:.1f}/s started, {activity.finished_per_second:.1f}/s finished, "
        f"{activity.failed_per_second:.1f}/s failed; {more}{activity.live_turns} live, "
        f"{activity.suspended_turns} of them suspended; tasks: {waiting} wait, {in_work} in work, {backlog} in the backlog"
    )


def _engine(activity: Activity) -> str:
    engine = activity.engine
    memory = "?" if engine.memory_bytes is None else f"{engine.memory_bytes / _MEBIBYTE:.1f} MiB"
    if engine.memory_bytes_max:
        memory += f" of {engine.memory_bytes_max / _MEBIBYTE:.0f}"
    operations = "?" if engine.operations_per_second is None else str(engine.operations_per_second)
    clients = "?" if engine.clients is None else str(engine.clients)
    return (
        f"engine  {engine.address}  {engine.version or '?'}, {memory}, {operations} commands/s, {clients} clients, "
        f"answers in {engine.latency_ms:.1f} ms"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _row(turn: LiveTurn) -> list[str]:
    from .wording import clean, seconds_text, shortened

    doing = f" {shortened(', '.join(turn.doing), 40)}" if turn.doing else ""
    cells = [
        turn.turn_id,
        seconds_text(turn.age_seconds),
        turn.phase + doing,
        str(turn.step),
        turn.agent_id,
        shortened(turn.session_id, 40),
    ]
    return [clean(cell) for cell in cells]
