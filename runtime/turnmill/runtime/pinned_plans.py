"""Plans that turns go on with, however long they rest: kept, with the agents' versions that their tools lead to.

A plan expires some time after turns were last started with it. A turn that lives longer than that, because it waits for a
person or a host, is found by its place in the index, and what its session's record names is refreshed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import PartitionKeys
from turnmill.protocol.specs import Plan

from .state import decode_state

_PAGE = 500
_LIVE = (b"queued", b"running", b"suspended")
_decode_plan = msgspec.json.Decoder(Plan).decode


async def keep_pinned_plans(engine: Engine, keys: PartitionKeys, older_than_ms: int, plan_ttl_ms: int) -> set[str]:
    """Refresh the plans of live turns that were accepted before a time. Returns the versions of agents (`name@version`)
    that these plans may call."""
    plan_ids: set[str] = set()
    seen = 0
    while True:
        names = await engine.call("ZRANGEBYSCORE", keys.turns, "-inf", older_than_ms, "LIMIT", seen, _PAGE)
        if not names:
            break
        seen += len(names)
        plan_ids |= await _pinned(engine, keys, [name.decode() for name in names])
    for plan_id in plan_ids:
        await engine.call("PEXPIRE", keys.plan(plan_id), plan_ttl_ms)
    return await _agents_of(engine, keys, plan_ids)


async def _pinned(engine: Engine, keys: PartitionKeys, turn_ids: Sequence[str]) -> set[str]:
    """The plans that sessions of these turns need."""
    records = await asyncio.gather(*[engine.call("HMGET", keys.turn(name), "session", "status") for name in turn_ids])
    sessions = {session.decode() for session, status in records if session is not None and status in _LIVE}
    states = await asyncio.gather(*[engine.call("HGET", keys.session(name), "s") for name in sessions])
    plan_ids: set[str] = set()
    for state in states:
        try:
            plan_ids |= decode_state(state).plan_ids if state else set()
        except msgspec.DecodeError:
            continue  # whoever decides on it will say so
    return plan_ids


async def _agents_of(engine: Engine, keys: PartitionKeys, plan_ids: Iterable[str]) -> set[str]:
    versions: set[str] = set()
    for plan_id in plan_ids:
        body = await engine.call("GET", keys.plan(plan_id))
        if body is not None:
            tools = _decode_plan(body).tools.values()
            versions |= {tool.agent for tool in tools if tool.agent is not None and "@" in tool.agent}
    return versions
