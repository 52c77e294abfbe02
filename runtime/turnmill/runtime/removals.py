"""What deleted sessions have left: removed part by part, by whoever looks.

The commit that deletes a session puts the names of what it owns aside, as a *removal*: records and channels of its ended
turns, idempotency keys, answers, large values, sessions of sub-turns. A script removes a bounded number of things, and
then their names. So a session of any size holds up nobody, a process that dies half-way leaves only what
the next look finds, and a session that has begun anew under the same name is no part of it.
"""

from __future__ import annotations

import asyncio

from turnmill.protocol.connection import Argument, Engine
from turnmill.protocol.errors import EngineReplyError, EngineUnavailable
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.streams import REMOVE_SESSION

NAMES_MAX = 200
"""Names that one call of the script looks at: about a millisecond of the engine's time."""

_LOOK_SECONDS = 0.2


async def remove_some(engine: Engine, keys: PartitionKeys, calls_max: int) -> int:
    """Go on with every removal of a partition, for so many calls of the script at most; the number made."""
    made = 0
    for name in await engine.call("SMEMBERS", keys.removals):
        is_left = True
        while is_left and made < calls_max:
            is_left = await _remove(engine, keys, name.decode())
            made += 1
    return made


async def finish_removals(engine: Engine, keys: PartitionKeys, session_id: str) -> None:
    """Remove all that deletions of a session have left. Outlasts losses of the connection."""
    end = f":{session_id}"
    while True:
        try:
            names = [name.decode() for name in await engine.call("SMEMBERS", keys.removals)]
            mine = [name for name in names if name.endswith(end)]
            if not mine:
                return
            for name in mine:
                while await _remove(engine, keys, name):
                    pass
        except EngineUnavailable:
            await engine.ready()
        except EngineReplyError as error:
            if not str(error).startswith("NOPERM"):
                raise
            await asyncio.sleep(_LOOK_SECONDS)  # an access list leaves this to the coordinator


async def _remove(engine: Engine, keys: PartitionKeys, name: str) -> bool:
    """Remove a part; whether something is left."""
    behind = len(keys.base)
    further = [keys.transcript, keys.replacements, keys.values]
    arguments: list[Argument] = [
        keys.base,
        NAMES_MAX,
        keys.events("").removeprefix(keys.turn("")),
        keys.cancel("")[behind:],
        *[key("")[behind:] for key in further],
    ]
    names = [keys.removals, keys.base + name, keys.inbox, keys.turns, keys.timers]
    return bool(await REMOVE_SESSION.run(engine, names, arguments))
