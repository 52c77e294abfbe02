"""Leave to call a provider of models, shared by all LLM workers: its limits, and how long it is held back.

What a provider may be asked is published to the registry of limits (`Keys.limits`: JSON by the prefix of its models); what
is left of it, who calls it and who waits stands behind the provider's own keys, changed by two scripts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from .connection import Engine
from .keys import ProviderKeys
from .streams import Script

ENTER_PROVIDER = Script("enter_provider")
LEAVE_PROVIDER = Script("leave_provider")
LEAVE_SECONDS = 15.0
"""How long a leave holds unless it is renewed: so long the place of a killed worker's call is not free."""
_WINDOW_SECONDS = 10.0
_TOKENS_ONLY_CALLS = 16


class ProviderLimit(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What all workers together may ask of a provider; None: no such limit."""

    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    breaker_failures: int = 5

    @property
    def is_limited(self) -> bool:
        limits = (self.concurrency, self.requests_per_minute, self.tokens_per_minute)
        return any(limit is not None for limit in limits)

    def share(self, partitions: int) -> int:
        """How many of its tasks may stand in the streams of one partition: twice what is its part, so that uneven
        partitions do not leave the provider idle."""
        calls = self.concurrency
        if calls is None and self.requests_per_minute is not None:
            calls = math.ceil(self.requests_per_minute * _WINDOW_SECONDS / 60)
        return max(1, math.ceil(2 * (calls or _TOKENS_ONLY_CALLS) / partitions))


class Leave(NamedTuple):
    """The answer to who asks: may it go, else in how many ms it may ask again, and whether all are held back until then
    (with the provider's last error, as JSON)."""

    granted: bool
    wait_ms: int = 0
    held_back: bool = False
    error: bytes = b""


async def enter_provider(
    engine: Engine, keys: ProviderKeys, limit: ProviderLimit, call: str, tenant: str, tokens: int
) -> Leave:
    """Ask for leave to make one call of about so many tokens. A leave that was given is to be renewed and given back."""
    reply = await ENTER_PROVIDER.run(
        engine,
        [keys.state, keys.calls, keys.waiting, keys.seen],
        [
            call,
            tenant,
            int(LEAVE_SECONDS * 1000),
            limit.concurrency or 0,
            limit.requests_per_minute or 0,
            limit.tokens_per_minute or 0,
            tokens,
        ],
    )
    if reply[0] == 0:
        return Leave(granted=True)
    return Leave(granted=False, wait_ms=reply[1], held_back=reply[0] == 2, error=reply[2] if len(reply) > 2 else b"")


async def leave_provider(
    engine: Engine,
    keys: ProviderKeys,
    call: str,
    tenant: str,
    *,
    unused_tokens: int = 0,
    outcome: str = "unknown",
    wait_seconds: float = 0.0,
    error: bytes = b"",
    breaker_failures: int = 5,
) -> int:
    """Give a leave back, and tell what came of the call; until when the provider is held back now (ms, 0: it is not)."""
    held_until: int = await LEAVE_PROVIDER.run(
        engine,
        [keys.state, keys.calls, keys.waiting, keys.seen],
        [call, tenant, unused_tokens, outcome, int(wait_seconds * 1000), error, breaker_failures],
    )
    return held_until


async def renew_leave(engine: Engine, keys: ProviderKeys, calls: dict[str, str], until_ms: int) -> None:
    """Keep the places of calls that are under way: their names, with their tenants."""
    fields = [item for call, tenant in calls.items() for item in (until_ms, f"{call}|{tenant}")]
    await engine.call("ZADD", keys.calls, "XX", *fields)
