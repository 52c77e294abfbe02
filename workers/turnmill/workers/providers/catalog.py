"""The providers of one LLM worker, by the prefix of their models' names.

Keys come from the environment and stay there. An endpoint of one's own stands in `turnmill.toml`:

    [providers.local]
    api = "openai"
    base_url = "http://127.0.0.1:8000/v1"
    api_key_env = "LOCAL_KEY"
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.settings import ProviderEndpoint, Settings

from ..models import HostModel
from .base import Provider, ProviderSet
from .format import Endpoint
from .host import HostProvider
from .http_client import HttpClient
from .http_provider import HttpProvider
from .pydantic_ai_model import PREFIX, open_pydantic_ai
from .registry import (
    PROVIDERS,
    api_names,
    default_base_url,
    find_api,
    known_endpoint,
    open_format,
    open_signer,
)
from .scripted import Script, ScriptedProvider, load_scripts


def build_providers(
    settings: Settings,
    scripts: Iterable[Script] = (),
    models: Iterable[HostModel] = (),
    environment: Mapping[str, str] = os.environ,
) -> ProviderSet:
    """Every provider that this process can speak to: the scripted one always, others where they are configured."""
    loaded = list(scripts) + (load_scripts(settings.script) if settings.script else [])
    providers: dict[str, Provider] = {"scripted": ScriptedProvider(loaded, log_path=settings.script_log)}
    models = list(models)
    if models:
        providers["host"] = HostProvider(models)
    pydantic_ai = open_pydantic_ai()
    if pydantic_ai is not None:
        providers[PREFIX] = pydantic_ai
    client = HttpClient()
    for name, known in PROVIDERS.items():
        found = known_endpoint(name, environment)
        if found is not None:
            providers[name] = open_provider(known.api, found, client, environment)
    for name, endpoint in settings.providers.items():
        api = _api_of(name, endpoint)
        providers[name] = open_provider(api, _endpoint(name, endpoint, api, environment), client, environment)
    return ProviderSet(providers, client)


def open_provider(api: str, endpoint: Endpoint, client: HttpClient, environment: Mapping[str, str]) -> HttpProvider:
    return HttpProvider(open_format(api, endpoint), client, signer=open_signer(api, endpoint, environment))


def _api_of(name: str, endpoint: ProviderEndpoint) -> str:
    api = find_api(endpoint.api)
    if api is None:
        raise ConfigurationError(f"[providers.{name}] api = {endpoint.api!r}: known are {', '.join(api_names())}")
    return api


def _endpoint(name: str, endpoint: ProviderEndpoint, api: str, environment: Mapping[str, str]) -> Endpoint:
    key = environment.get(endpoint.api_key_env) if endpoint.api_key_env else None
    if endpoint.api_key_env and not key:
        raise ConfigurationError(f"[providers.{name}] names the variable {endpoint.api_key_env}, which is not set")
    base_url = endpoint.base_url or default_base_url(api, environment)
    if base_url is None:
        raise ConfigurationError(f"[providers.{name}] needs a base_url: the API {api} has no usual place")
    return Endpoint(name=name, base_url=base_url, api_key=key)
