"""`turnmill worker ls | drain`: the processes of a namespace, and asking one of them to leave."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..client import Client
    from ..fleet import WorkerEntry

ProcessArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="ID...", help="As `worker ls` prints them, or an unambiguous beginning.", show_default=False
    ),
]
Wait = Annotated[bool, typer.Option("--wait", envvar="TURNMILL_WAIT", help="Return when they are gone.")]
_POLL_SECONDS = 0.1


def list_workers(
    as_json: options.Json = False, redis_url: options.RedisUrl = None, namespace: options.Namespace = None
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_list(command_settings(redis_url, namespace), as_json))


async def _list(settings: Settings, as_json: bool) -> int:
    import msgspec

    from ..fleet import list_processes
    from .attachment import attached_client
    from .wording import table_lines

    async with attached_client(settings) as client:
        entries = await list_processes(client.engine, client.keys, settings)
    if as_json:
        lines = [msgspec.json.encode(_fields(entry)).decode() for entry in entries]
    else:
        lines = list(table_lines([HEAD, *map(row, entries)]))
    for line in lines:
        sys.stdout.write(line + "\n")
    return Exit.OK


HEAD = ["ID", "ROLE", "STATE", "HOST", "PID", "HELD", "SLOTS", "SEEN", "UP", "LANGUAGE", "SERVES"]


def row(entry: WorkerEntry) -> list[str]:
    """`HELD` tasks of `SLOTS` are with it; it was `SEEN` so long ago, by its own clock."""
    from .listing import age_text
    from .wording import clean

    is_worker = entry.role != "coordinator"
    serves = entry.queues if is_worker else [_ranges(entry.partitions)]
    cells = [
        entry.id,
        entry.role,
        entry.state,
        entry.host,
        str(entry.pid or "?"),
        str(entry.used) if is_worker else "",
        str(entry.slots) if is_worker else "",
        _since(entry.seen_at),
        "?" if entry.started_at is None else age_text(time.time() - entry.started_at),
        entry.language,
        ", ".join(serves),
    ]
    return [clean(cell) for cell in cells]


def _ranges(partitions: list[int]) -> str:
    """`partitions 0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(partitions):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"partitions {', '.join(texts)}" if texts else "no partition"


def _since(seen_at: float | None) -> str:
    return "?" if seen_at is None else f"{max(0.0, time.time() - seen_at):.1f} s ago"


def _fields(entry: WorkerEntry) -> dict[str, Any]:
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(entry)
    built["held"] = built.pop("used")
    built["seen_seconds_ago"] = None if entry.seen_at is None else max(0.0, time.time() - entry.seen_at)
    return built


def drain(
    ids: ProcessArguments,
    wait: Wait = False,
    timeout: options.Timeout = None,
    reason: options.Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    settings = command_settings(redis_url, namespace)
    return run_command(_drain(settings, ids, wait, timeout, reason or "", as_json))


async def _drain(
    settings: Settings, ids: list[str], wait: bool, timeout: float | None, reason: str, as_json: bool
) -> int:
    from ..directives import drain_process
    from ..fleet import list_processes
    from .attachment import attached_client

    async with attached_client(settings) as client:
        known = [entry for entry in await list_processes(client.engine, client.keys, settings) if entry.state != "lost"]
        chosen = {entry.id: entry for entry in (_find(known, wanted) for wanted in ids)}
        for process_id in chosen:
            await drain_process(client.engine, client.keys, process_id, reason)
            if not wait:
                _write(process_id, "draining", as_json)
        _warn(known, set(chosen))
        if wait:
            async with asyncio.timeout(timeout):
                await _wait(client, settings, list(chosen), as_json)
    return Exit.OK


def _find(known: list[WorkerEntry], wanted: str) -> WorkerEntry:
    found = [entry for entry in known if entry.id == wanted] or [e for e in known if e.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{wanted!r} is the beginning of {len(found)} ids: {', '.join(entry.id for entry in found)}")
    raise CommandError(f"no worker or coordinator {wanted!r} is alive: `turnmill worker ls` lists them")


def _warn(known: list[WorkerEntry], leaving: set[str]) -> None:
    """What nobody serves any more when they are gone."""
    staying = [entry for entry in known if entry.id not in leaving and entry.state == "running"]
    served = {queue for entry in staying for queue in entry.queues}
    left = sorted({queue for entry in known if entry.id in leaving for queue in entry.queues} - served)
    if left:
        say(f"nobody else serves {', '.join(left)}: tasks wait there until a worker is started")
    leaving_coordinators = any(entry.role == "coordinator" and entry.id in leaving for entry in known)
    if leaving_coordinators and not any(entry.role == "coordinator" for entry in staying):
        say("no other coordinator is alive: no turn goes on until one is started")


async def _wait(client: Client, settings: Settings, ids: list[str], as_json: bool) -> None:
    from ..directives import forget_process
    from ..fleet import list_processes

    left, lost = list(ids), set[str]()
    while left:
        states = {e.id: e.state for e in await list_processes(client.engine, client.keys, settings)}
        # Who leaves takes its sign of life along first, and then its entry: lost is who is so at two looks.
        ended = [each for each in left if each not in states or (states[each] == "lost" and each in lost)]
        lost = {each for each in left if states.get(each) == "lost"}
        for process_id in ended:
            left.remove(process_id)
            await forget_process(client.engine, client.keys, process_id)
            _write(process_id, "killed" if process_id in states else "gone", as_json)
        if left:
            await asyncio.sleep(_POLL_SECONDS)


def _write(process_id: str, state: str, as_json: bool) -> None:
    """`gone` has left in an orderly way, `killed` is one whose sign of life ran out meanwhile."""
    import msgspec

    line = msgspec.json.encode({"id": process_id, "state": state}).decode() if as_json else f"{process_id} {state}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
