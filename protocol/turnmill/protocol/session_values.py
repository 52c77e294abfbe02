"""The state of a session that tools and hosts share: small named values, changed atomically.

The values are the fields of one hash in the session's partition, each written as JSON; bytes in them come back as bytes.
`increment` is one command. `update` reads, computes and swaps, and does it again where somebody else was faster, so no
change is lost, from however many processes they come. The values are deleted with the session.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from .connection import Engine, pairs
from .errors import EngineReplyError, MessageTooLarge
from .keys import PartitionKeys
from .streams import SWAP_VALUE
from .values import pack_value, unpack_value

VALUE_BYTES_MAX = 1024 * 1024
"""Bytes of one value as JSON. What is larger belongs somewhere else, with its address here."""
KEY_LENGTH_MAX = 256
_ROUNDS_BEFORE_WAITING = 8
_encode = msgspec.json.Encoder().encode


class SessionValues:
    """The values of one session. Keys are strings of 1 to 256 characters; values have a JSON form, or are bytes.

    Whatever writes raises `ValueError` or `TypeError` for keys and values that cannot be stored, and `MessageTooLarge`
    for values above 1 MiB; everything raises `EngineUnavailable` where the engine is out of reach.
    """

    def __init__(self, engine: Engine, partition_keys: PartitionKeys, session_id: str) -> None:
        self._engine = engine
        self._hash = partition_keys.values(session_id)

    async def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where there is none."""
        return _decoded(await self._engine.call("HGET", self._hash, _checked(key)), default)

    async def all(self) -> dict[str, Any]:
        """All values by their keys."""
        found = pairs(await self._engine.call("HGETALL", self._hash))
        return {key.decode(): _decoded(value, None) for key, value in found.items()}

    async def set(self, key: str, value: Any) -> None:
        """Set the value, whatever it was."""
        await self._engine.call("HSET", self._hash, _checked(key), _encoded(key, value))

    async def delete(self, key: str) -> bool:
        """Remove the value; whether there was one."""
        return bool(await self._engine.call("HDEL", self._hash, _checked(key)))

    async def increment(self, key: str, by: float = 1) -> int | float:
        """Add to a number and return the sum; a value that is not there counts as 0.

        Whole numbers are of 64 bits and stay whole as long as `by` is one too. Raises `TypeError` where the value is no
        number.
        """
        if isinstance(by, bool) or not isinstance(by, int | float) or not math.isfinite(by):
            raise TypeError(f"{by!r} is no number to add to {key!r}")
        try:
            if isinstance(by, int):
                try:
                    return int(await self._engine.call("HINCRBY", self._hash, _checked(key), by))
                except EngineReplyError as error:
                    if "hash value is not an integer" not in str(error):
                        raise
            return float(await self._engine.call("HINCRBYFLOAT", self._hash, _checked(key), repr(by)))
        except EngineReplyError as error:
            refusal = _refusal(key, by, str(error))
            if refusal is None:
                raise
            raise refusal from error

    async def update(self, key: str, function: Callable[[Any], Any], default: Any = None) -> Any:
        """Replace the value by what `function` makes of it, and return that.

        `function` gets `default` where there is no value. It is called again where the value was changed meanwhile, so
        it should only compute; it may change what it gets.
        """
        field = _checked(key)
        seen = await self._engine.call("HGET", self._hash, field)
        rounds = 0
        while True:
            # The default too is a fresh copy each time: a function may append to it.
            start = _encoded(key, default) if seen is None else seen
            value = function(_decoded(start, None))
            arguments = (field, 0 if seen is None else 1, seen or b"", _encoded(key, value))
            reply = await SWAP_VALUE.run(self._engine, [self._hash], arguments)
            if not isinstance(reply, list):
                return value
            seen = reply[0]
            rounds += 1
            if rounds > _ROUNDS_BEFORE_WAITING:
                await asyncio.sleep(random.uniform(0, 0.02))


def _checked(key: str) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LENGTH_MAX:
        raise ValueError(f"{key!r:.300} is no key of a session value: a string of 1 to {KEY_LENGTH_MAX} characters")
    key.encode()  # a lone surrogate has no bytes: found here, it is a ValueError
    return key


def _encoded(key: str, value: Any) -> bytes:
    try:
        encoded = _encode(pack_value(value))
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the session value {key!r} cannot be stored: {error}") from error
    if len(encoded) > VALUE_BYTES_MAX:
        raise MessageTooLarge(
            f"the session value {key!r} has {len(encoded)} bytes, above the limit of {VALUE_BYTES_MAX}: store it "
            "elsewhere, and its address here"
        )
    return encoded


def _decoded(data: bytes | None, default: Any) -> Any:
    return default if data is None else unpack_value(msgspec.json.decode(data))


def _refusal(key: str, by: float, text: str) -> Exception | None:
    """The error of a sum that the engine refused; None where it failed for another reason."""
    if "hash value is not" in text:
        return TypeError(f"the session value {key!r} is no number: {by} cannot be added to it")
    if "overflow" in text or "out of range" in text or "NaN or Infinity" in text:
        return ValueError(f"{by} cannot be added to the session value {key!r}: the sum is out of range")
    return None
