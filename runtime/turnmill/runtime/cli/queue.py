"""`turnmill queue ls | pause | resume`: the task queues of a namespace, and who may read them now."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..queues import QueueReport

QueueArgument = Annotated[
    str, typer.Argument(metavar="QUEUE", help="As `queue ls` prints it: tool:NAME or model:POOL.", show_default=False)
]


def list_queues(
    as_json: options.Json = False, redis_url: options.RedisUrl = None, namespace: options.Namespace = None
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_list(command_settings(redis_url, namespace), as_json))


async def _list(settings: Settings, as_json: bool) -> int:
    import msgspec

    from ..queues import read_queues
    from .attachment import attached_client
    from .wording import table_lines

    async with attached_client(settings) as client:
        queues = await read_queues(client.engine, client.keys, settings)
    if as_json:
        lines = [msgspec.json.encode(queue.to_dict()).decode() for queue in queues]
    else:
        lines = list(table_lines([HEAD, *map(row, queues)]))
    for line in lines:
        sys.stdout.write(line + "\n")
    for queue in queues:
        for fault in queue.faults:
            say(f"{queue.queue}: {fault}")
    return Exit.OK


HEAD = ["QUEUE", "WAITING", "IN WORK", "BACKLOG", "OLDEST", "WORKERS", "SLOTS", "STATE"]


def row(queue: QueueReport) -> list[str]:
    """`OLDEST` is how long the first of the waiting has waited."""
    from turnmill.protocol.keys import pool_of_queue

    from .wording import seconds_text

    return [
        queue.queue,
        str(queue.waiting),
        str(queue.in_work),
        "" if pool_of_queue(queue.queue) is None else str(queue.backlog),
        "" if queue.oldest_waiting_seconds is None else seconds_text(queue.oldest_waiting_seconds),
        str(queue.workers),
        str(queue.slots),
        _state(queue),
    ]


def _state(queue: QueueReport) -> str:
    from .listing import age_text
    from .wording import clean, shortened

    if queue.faults:
        return "broken"
    if queue.paused is not None:
        reason = f": {shortened(clean(queue.paused.reason), 60)}" if queue.paused.reason else ""
        return f"paused {age_text(time.time() - queue.paused.at)} ago{reason}"
    if not queue.workers:
        return "no worker"
    return "open"


def pause(
    queue: QueueArgument,
    reason: options.Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(
        _direct(command_settings(redis_url, namespace), queue, as_json, pauses=True, reason=reason or "")
    )


def resume(
    queue: QueueArgument,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_direct(command_settings(redis_url, namespace), queue, as_json, pauses=False))


async def _direct(settings: Settings, queue: str, as_json: bool, *, pauses: bool, reason: str = "") -> int:
    import msgspec

    from turnmill.protocol.keys import is_task_queue, valid_name

    from ..directives import pause_queue, resume_queue
    from ..fleet import read_fleet
    from ..queues import known_queues
    from .attachment import attached_client

    if not is_task_queue(queue) or not valid_name(queue.partition(":")[2]):
        raise CommandError(f"{queue!r} is no task queue: write tool:NAME or model:POOL; `turnmill queue ls` lists them")
    async with attached_client(settings) as client:
        fleet = await read_fleet(client.engine, client.keys, settings)
        is_known = queue in await known_queues(client.engine, client.keys, fleet)
        if pauses:
            changed = await pause_queue(client.engine, client.keys, queue, reason)
        else:
            changed = await resume_queue(client.engine, client.keys, queue)
    if pauses and not is_known:
        say(f"{queue} is known to nobody yet: no tool names it, no worker serves it, and no task was ever in it")
    if as_json:
        line = msgspec.json.encode({"queue": queue, "paused": pauses, "changed": changed}).decode()
    elif pauses:
        again = "" if changed else " (it was already; the reason is the new one)"
        line = f"{queue} is paused{again}; go on with `turnmill queue resume {queue}`"
    else:
        line = f"{queue} is open again" if changed else f"{queue} was not paused"
    sys.stdout.write(line + "\n")
    return Exit.OK
