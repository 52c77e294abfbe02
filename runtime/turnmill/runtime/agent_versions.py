"""Old versions of agents: each stays for a time after its last use, the newest of a name for ever.

Who publishes a version, or starts a turn with it, notes the time. Turns do not need the registry once they have begun:
their plan holds all of the agent.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnmill.protocol.connection import Argument, Engine, pairs
from turnmill.protocol.keys import Keys


async def note_uses(engine: Engine, keys: Keys, versions: Iterable[str], now_ms: int) -> None:
    """These versions (`name@version`) are used now."""
    scored: list[Argument] = []
    for version in versions:
        scored += (now_ms, version)
    if scored:
        await engine.call("ZADD", keys.agent_uses, "GT", *scored)


async def forget_versions(engine: Engine, keys: Keys, older_than_ms: int, now_ms: int) -> int:
    """Remove versions that were last used before a time, unless they are the newest of their name; the number removed."""
    names = [name.decode() for name in await engine.call("HKEYS", keys.agents)]
    versions = {name for name in names if "@" in name}
    uses = pairs(await engine.call("ZRANGE", keys.agent_uses, 0, -1, "WITHSCORES"))
    used = {name.decode(): float(score) for name, score in uses.items()}
    unnoted = versions - used.keys()  # published by a process that notes no uses
    await note_uses(engine, keys, unnoted, now_ms)
    old = {version for version in versions - unnoted if used[version] < older_than_ms}
    old -= await _newest(engine, keys, {version.partition("@")[0] for version in old})
    if old:
        await _forget(engine, keys, sorted(old), older_than_ms)
    stale = used.keys() - versions
    if stale:
        await engine.call("ZREM", keys.agent_uses, *stale)
    return len(old)


async def _newest(engine: Engine, keys: Keys, names: set[str]) -> set[str]:
    ordered = sorted(names)
    if not ordered:
        return set()
    newest = await engine.call("HMGET", keys.agents, *ordered)
    return {f"{name}@{version.decode()}" for name, version in zip(ordered, newest, strict=True) if version}


async def _forget(engine: Engine, keys: Keys, versions: list[str], older_than_ms: int) -> None:
    """Registry and uses may lie on two nodes, so no script holds both. A version that is used while it is removed is put
    back: whoever uses it notes that first."""
    bodies = await engine.call("HMGET", keys.agents, *versions)
    await engine.call("HDEL", keys.agents, *versions)
    for version, body in zip(versions, bodies, strict=True):
        score = await engine.call("ZSCORE", keys.agent_uses, version)
        if body is not None and score is not None and float(score) >= older_than_ms:
            await engine.call("HSETNX", keys.agents, version, body)
        else:
            await engine.call("ZREM", keys.agent_uses, version)
