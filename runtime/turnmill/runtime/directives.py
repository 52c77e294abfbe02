"""The operators' side of directives: pause and resume queues, ask processes to drain.

They stand in the engine and are there after any restart; `turnmill.protocol.directives` is how processes follow them.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.keys import Keys, drain_field, drained_process, pause_field, paused_queue

NO_REASON = "no reason given"


class Directive(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something was asked, and when, in seconds."""

    reason: str = ""
    at: float = 0.0

    @property
    def text(self) -> str:
        return self.reason or NO_REASON


class StandingDirectives(msgspec.Struct, frozen=True):
    """What holds in a namespace: paused queues by name (`tool:default`), and processes that are to drain by id."""

    paused: dict[str, Directive]
    draining: dict[str, Directive]


async def read_directives(engine: Engine, keys: Keys) -> StandingDirectives:
    paused, draining = {}, {}
    for field, body in pairs(await engine.call("HGETALL", keys.directives)).items():
        name = field.decode()
        queue, process_id = paused_queue(name), drained_process(name)
        if queue is not None:
            paused[queue] = _directive(body)
        elif process_id is not None:
            draining[process_id] = _directive(body)
    return StandingDirectives(paused, draining)


async def read_pause(engine: Engine, keys: Keys, queue: str) -> Directive | None:
    """Why a queue is paused; None where it is not."""
    body = await engine.call("HGET", keys.directives, pause_field(queue))
    return None if body is None else _directive(body)


async def pause_queue(engine: Engine, keys: Keys, queue: str, reason: str = "") -> bool:
    """Workers read the queue `tool:<name>` or `model:<pool>` no more; what they hold they finish. Returns whether it was
    not paused before."""
    return await _direct(engine, keys, pause_field(queue), reason)


async def resume_queue(engine: Engine, keys: Keys, queue: str) -> bool:
    """Returns whether it was paused."""
    return bool(await engine.call("HDEL", keys.directives, pause_field(queue)))


async def drain_process(engine: Engine, keys: Keys, process_id: str, reason: str = "") -> bool:
    """A worker or coordinator drains and ends, as with SIGTERM. Returns whether it was not asked before."""
    return await _direct(engine, keys, drain_field(process_id), reason)


async def forget_process(engine: Engine, keys: Keys, process_id: str) -> None:
    """It is gone; one that left in an orderly way has taken its directive along."""
    await engine.call("HDEL", keys.directives, drain_field(process_id))


async def _direct(engine: Engine, keys: Keys, field: str, reason: str) -> bool:
    directive: Any = msgspec.json.encode(Directive(reason, time.time()))
    return bool(await engine.call("HSET", keys.directives, field, directive))


def _directive(body: bytes) -> Directive:
    """What was written by hand counts too, as the reason."""
    try:
        return msgspec.json.decode(body, type=Directive)
    except msgspec.DecodeError:
        return Directive(body.decode(errors="replace"))
