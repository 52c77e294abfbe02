"""What all LLM workers share about their providers, read from the engine: limits, calls, who waits, what is held back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from turnmill.protocol.connection import Engine, pairs
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.keys import Keys
from turnmill.protocol.provider_leave import ProviderLimit


class ProviderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One provider in a namespace. Times are Unix seconds; `last_error` is that of the last failures in a row."""

    limit: ProviderLimit
    calls: int = 0
    waiting: int = 0
    held_back_until: float | None = None
    last_error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: limits that are not set are null."""
        limits = {name: getattr(self.limit, name) for name in self.limit.__struct_fields__}
        error = self.last_error
        return {
            "limits": limits,
            "calls": self.calls,
            "waiting": self.waiting,
            "held_back_until": self.held_back_until,
            "last_error": {"kind": error.kind, "message": error.message} if error is not None else None,
        }


async def read_provider_status(engine: Engine, keys: Keys) -> dict[str, ProviderStatus]:
    """By provider: all that a living or former LLM worker of the namespace has published."""
    published = pairs(await engine.call("HGETALL", keys.limits))
    seconds, microseconds = await engine.call("TIME")
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    names = sorted(name.decode() for name in published)
    found = await asyncio.gather(*[_read(engine, keys, name, published[name.encode()], now_ms) for name in names])
    return dict(zip(names, found, strict=True))


async def _read(engine: Engine, keys: Keys, name: str, published: bytes, now_ms: int) -> ProviderStatus:
    own = keys.provider(name)
    state, calls, waiting = await asyncio.gather(
        engine.call("HGETALL", own.state),
        engine.call("ZCOUNT", own.calls, now_ms, "+inf"),  # a killed worker's leave has ended, and still stands there
        engine.call("ZCARD", own.waiting),
    )
    fields = pairs(state)
    held_until_ms = int(fields.get(b"held_until", 0))
    return ProviderStatus(
        limit=_decoded(published, ProviderLimit) or ProviderLimit(),
        calls=calls,
        waiting=waiting,
        held_back_until=held_until_ms / 1000 if held_until_ms > now_ms else None,
        last_error=_decoded(fields.get(b"error", b""), ErrorInfo),
    )


def _decoded(body: bytes, kind: type[Any]) -> Any:
    """None for what is not there, or of a newer version."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
