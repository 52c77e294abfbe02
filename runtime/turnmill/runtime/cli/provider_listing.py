"""`turnmill provider ls`: who this environment can speak to, and, where an engine is reachable, what all workers share."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .exits import Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings
    from turnmill.workers.providers.capabilities import Capabilities
    from turnmill.workers.providers.listing import ListedProvider

    from ..provider_status import ProviderStatus

All = Annotated[bool, typer.Option("--all", envvar="TURNMILL_ALL", help="Also those that are not configured here.")]
_ERROR_LENGTH_MAX = 80


def list_providers(
    everything: All = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_list(command_settings(redis_url, namespace), as_json, everything=everything))


async def _list(settings: Settings, as_json: bool, *, everything: bool) -> int:
    import msgspec

    from turnmill.protocol.errors import ConfigurationError

    from .wording import table_lines

    try:
        from turnmill.workers.providers import listing
        from turnmill.workers.providers.capabilities import KnownModels
    except ImportError as error:
        raise ConfigurationError(f"providers need `pip install turnmill[llm]`: {error}") from error
    shared = await _shared(settings)
    known = KnownModels.from_settings(settings)
    here = {
        each.provider: each
        for each in listing.list_providers(settings)
        if everything or each.missing is None or each.provider in settings.providers
    }
    names = sorted({*here, *(shared or {})})
    if as_json:
        entries = [_fields(name, here.get(name), (shared or {}).get(name), known.of_provider(name)) for name in names]
        lines = [msgspec.json.encode(entry).decode() for entry in entries]
    else:
        head = _HERE if shared is None else [*_HERE, *_SHARED]
        rows = [[*_here(name, here.get(name)), *([] if shared is None else _row(shared.get(name)))] for name in names]
        lines = [*table_lines([head, *rows]), *_models(names, known)]
    for line in lines:
        sys.stdout.write(line + "\n")
    return Exit.OK


async def _shared(settings: Settings) -> dict[str, ProviderStatus] | None:
    """None where there is no engine: what this environment has is worth a look without one."""
    from turnmill.protocol.errors import EngineError

    from ..provider_status import read_provider_status
    from .attachment import attached_client

    try:
        async with attached_client(settings) as client:
            return await read_provider_status(client.engine, client.keys)
    except EngineError as error:
        say(f"limits and calls are not shown: {error}")
        return None


# ---- lines

_HERE = ["PROVIDER", "API", "BASE URL", "KEY", "STATE"]
_SHARED = ["LIMITS", "CALLS", "WAITING", "HELD BACK", "LAST ERROR"]


def _here(name: str, listed: ListedProvider | None) -> list[str]:
    if listed is None:
        return [name, "", "", "", "only of workers elsewhere"]
    key = listed.key_variable or ""
    if key and not listed.key_is_set:
        key += " (not set)"
    return [name, listed.api, listed.base_url or "", key, "ready" if listed.missing is None else listed.missing]


def _row(status: ProviderStatus | None) -> list[str]:
    from .wording import clean, seconds_text, shortened

    if status is None:
        return ["", "", "", "", ""]
    held, error = status.held_back_until, status.last_error
    return [
        _limits_text(status),
        str(status.calls),
        str(status.waiting),
        "" if held is None else f"for {seconds_text(held - time.time())}",
        "" if error is None else shortened(clean(f"{error.kind}: {error.message}"), _ERROR_LENGTH_MAX),
    ]


def _limits_text(status: ProviderStatus) -> str:
    limit = status.limit
    texts = [
        (limit.concurrency, "at once"),
        (limit.requests_per_minute, "requests/min"),
        (limit.tokens_per_minute, "tokens/min"),
    ]
    return ", ".join(f"{number:,} {unit}" for number, unit in texts if number is not None)


def _models(names: list[str], known: Any) -> list[str]:
    """What turnmill.toml says about models."""
    told = [(model, each) for name in names for model, each in known.of_provider(name).items()]
    return ["", *(f"{model}: {capabilities_text(each)}" for model, each in told)] if told else []


def capabilities_text(known: Capabilities) -> str:
    """`context window 8,192 tokens, no images`; empty where nothing is known."""
    words = [f"context window {known.context_window:,} tokens"] if known.context_window is not None else []
    for name in ("images", "files", "tools", "reasoning"):
        value = getattr(known, name)
        if value is not None:
            words.append(name if value else f"no {name}")
    return ", ".join(words)


def _fields(
    name: str, listed: ListedProvider | None, status: ProviderStatus | None, models: dict[str, Capabilities]
) -> dict[str, Any]:
    """The same names in every line. `shared` is null without an engine, or where no worker has told of the provider."""
    import msgspec

    here = {"api": None, "base_url": None, "key_variable": None, "key_is_set": False, "missing": None}
    if listed is not None:
        here = msgspec.to_builtins(listed)
    return {
        "provider": name,
        "here": listed is not None and listed.missing is None,
        **here,
        "models": msgspec.to_builtins(models),
        "shared": status.to_dict() if status is not None else None,
    }
