"""A namespace: the prefix, its fixed number of partitions and its secret.

The number of partitions is decided by the first process and checked by every other one, because a session's partition
follows from it. The secret keys the tokens of tasks; workers never need it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from functools import lru_cache
from typing import NamedTuple

from .connection import Engine, pairs
from .errors import ConfigurationError, EngineReplyError, EngineUnsuitable
from .keys import Keys

_ENGINE_VERSION_MIN = (7, 0)
_LOOKS_MAX, _LOOK_SECONDS = 10, 0.5


class Namespace(NamedTuple):
    """An opened namespace."""

    keys: Keys
    partitions: int


async def open_namespace(engine: Engine, prefix: str, partitions: int) -> Namespace:
    """Create the namespace, or check that it fits.

    Raises `ConfigurationError` where it was created with another number of partitions, `EngineUnsuitable` where the
    engine is too old.
    """
    await check_engine(engine)
    keys = Keys(prefix, partitions)
    fields = pairs(await engine.call("HGETALL", keys.namespace))
    looks = 0
    while b"partitions" not in fields:
        await _create(engine, keys, partitions, is_last_try=looks == _LOOKS_MAX)
        fields = pairs(await engine.call("HGETALL", keys.namespace))
        looks += 1
    existing = int(fields[b"partitions"])
    if existing != partitions:
        raise ConfigurationError(
            f"the namespace {prefix!r} at {engine.address} was created with {existing} partitions, this process is set to "
            f"{partitions}: set TURNMILL_PARTITIONS={existing}, or use another TURNMILL_NAMESPACE"
        )
    return Namespace(keys, partitions)


async def _create(engine: Engine, keys: Keys, partitions: int, *, is_last_try: bool) -> None:
    """Or wait a moment, where an access list leaves that to a coordinator, which may be about to start."""
    try:
        await engine.call("HSETNX", keys.namespace, "partitions", partitions)
    except EngineReplyError as error:
        if not str(error).startswith("NOPERM"):
            raise
        if not is_last_try:
            await asyncio.sleep(_LOOK_SECONDS)
            return
        raise ConfigurationError(
            f"the namespace {keys.prefix!r} at {engine.address} does not exist yet, and this user may not create it: start "
            "a coordinator first (TURNMILL_REDIS_URL names the user, TURNMILL_NAMESPACE the namespace)"
        ) from error


async def read_secret(engine: Engine, keys: Keys, known: bytes | None = None) -> bytes:
    """The namespace's secret, made on first use. One that is known is put back where the engine has lost it."""
    await engine.call("HSETNX", keys.secret, "tokens", known or secrets.token_hex(32))
    secret: bytes = await engine.call("HGET", keys.secret, "tokens")
    return secret


@lru_cache(maxsize=16_384)  # a token is made when its task leaves, and again when the result comes
def make_token(secret: bytes, turn_id: str, call: str, attempt: int) -> str:
    """What a worker must echo: a keyed hash of the task's id and attempt."""
    return hashlib.blake2b(f"{turn_id}/{call}/{attempt}".encode(), key=secret[:64], digest_size=12).hexdigest()


async def check_engine(engine: Engine) -> None:
    """Raises `EngineUnsuitable` for a server below Redis 7.0."""
    information = _parse_info(await engine.call("INFO", "server"))
    version = information.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _ENGINE_VERSION_MIN:
        raise EngineUnsuitable(
            f"the server at {engine.address} is Redis {version}; Turnmill needs Redis 7.0 or later, or Valkey 8 or later"
        )


async def evicting_policy(engine: Engine) -> str | None:
    """The server's eviction policy where it may evict work; None where it is safe or not told."""
    try:
        # Not by CONFIG, which also tells passwords: access lists need not allow it.
        replies = await engine.call_each("INFO", "memory")
    except EngineReplyError:
        return None
    policies = [_parse_info(reply).get("maxmemory_policy", "noeviction") for reply in replies]
    return next((policy for policy in policies if policy != "noeviction"), None)


def _parse_info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


class ServerClock:
    """The engine's clock, read now and then and carried on by the monotonic one: deadlines are the engine's time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._offset_ms = 0.0

    async def synchronize(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        seconds, microseconds = await self._engine.call("TIME")
        middle = (before + loop.time()) / 2
        self._offset_ms = int(seconds) * 1000 + int(microseconds) / 1000 - middle * 1000

    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000 + self._offset_ms)
