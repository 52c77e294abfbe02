"""The providers that an environment can speak to, as data to be shown: no key, and no secret of a URL, is in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from string import Formatter
from urllib.parse import urlsplit, urlunsplit

import msgspec

from turnmill.protocol.settings import FILE_NAME, ProviderEndpoint, Settings

from .pydantic_ai_model import PREFIX, open_pydantic_ai
from .registry import PROVIDERS, KnownProvider, default_base_url, find_api, known_endpoint

_MASK = "***"


class ListedProvider(msgspec.Struct, frozen=True, kw_only=True):
    """One provider, by the prefix of its models' names. `missing` says what keeps it from being there; None: nothing.

    `key_variable` is the variable that holds its key, or would; None where it needs none.
    """

    provider: str
    api: str
    base_url: str | None = None
    key_variable: str | None = None
    key_is_set: bool = False
    missing: str | None = None


def list_providers(settings: Settings, environment: Mapping[str, str] = os.environ) -> list[ListedProvider]:
    """All providers by name, those that are not configured too. A table of turnmill.toml replaces a known one."""
    found = {name: _known(name, known, environment) for name, known in PROVIDERS.items()}
    found |= {name: _of_table(name, endpoint, environment) for name, endpoint in settings.providers.items()}
    found["scripted"] = ListedProvider(provider="scripted", api="scripted")
    if open_pydantic_ai() is not None:
        found[PREFIX] = ListedProvider(provider=PREFIX, api=PREFIX)
    return [found[name] for name in sorted(found)]


def _known(name: str, known: KnownProvider, environment: Mapping[str, str]) -> ListedProvider:
    endpoint = known_endpoint(name, environment)
    key = next((variable for variable in known.key_variables if environment.get(variable)), None)
    return ListedProvider(
        provider=name,
        api=known.api,
        base_url=shown_url(endpoint.base_url if endpoint is not None else known.base_url),
        key_variable=key or next(iter(known.key_variables), None),
        key_is_set=key is not None,
        missing=None if endpoint is not None else _wanted(known, environment),
    )


def _wanted(known: KnownProvider, environment: Mapping[str, str]) -> str:
    """The variables that are to be set: one of several, and those that its base URL is made of."""
    choice = [name for name in (*known.key_variables, known.base_url_variable, *known.other_variables) if name]
    parts = [name for _, name, _, _ in Formatter().parse(known.base_url) if name and not environment.get(name)]
    if any(environment.get(name) for name in choice):
        choice = []
    words = [" or ".join(name for name in choice if name not in parts), *parts]
    return f"set {' and '.join(filter(None, words))}"


def _of_table(name: str, endpoint: ProviderEndpoint, environment: Mapping[str, str]) -> ListedProvider:
    api = find_api(endpoint.api)
    key_is_set = bool(environment.get(endpoint.api_key_env or ""))
    base_url = endpoint.base_url or default_base_url(api or "", environment)
    return ListedProvider(
        provider=name,
        api=api or endpoint.api,
        base_url=shown_url(base_url),
        key_variable=endpoint.api_key_env,
        key_is_set=key_is_set,
        missing="; ".join(_faults(endpoint, api, base_url, key_is_set=key_is_set)) or None,
    )


def _faults(endpoint: ProviderEndpoint, api: str | None, base_url: str | None, *, key_is_set: bool) -> Iterator[str]:
    """What an LLM worker would refuse to start with."""
    if api is None:
        yield f"no such api: {endpoint.api} ({FILE_NAME})"
    elif base_url is None:
        yield f"its base_url ({FILE_NAME})"
    if endpoint.api_key_env and not key_is_set:
        yield f"set {endpoint.api_key_env}"


def shown_url(url: str | None) -> str | None:
    """The URL without what may be a secret: a user with a password, and what stands behind a `?`."""
    if url is None:
        return None
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, (_MASK if user else "") + at + host, parts.path, _MASK if parts.query else "", ""))
