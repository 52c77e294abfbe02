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
from .host import HostProvider
from .http_client import HttpClient
from .openai_chat import OpenAIChat
from .scripted import Script, ScriptedProvider, load_scripts

OPENAI_BASE_URL = "https://api.openai.com/v1"
_APIS = ("openai",)


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
    client = HttpClient()
    if environment.get("OPENAI_API_KEY") or environment.get("OPENAI_BASE_URL"):
        base_url = environment.get("OPENAI_BASE_URL") or OPENAI_BASE_URL
        providers["openai"] = OpenAIChat(base_url, environment.get("OPENAI_API_KEY"), client)
    for name, endpoint in settings.providers.items():
        providers[name] = _endpoint(name, endpoint, client, environment)
    return ProviderSet(providers, client)


def _endpoint(name: str, endpoint: ProviderEndpoint, client: HttpClient, environment: Mapping[str, str]) -> Provider:
    if endpoint.api not in _APIS:
        raise ConfigurationError(f"[providers.{name}] api = {endpoint.api!r}: known are {', '.join(_APIS)}")
    key = environment.get(endpoint.api_key_env) if endpoint.api_key_env else None
    if endpoint.api_key_env and not key:
        raise ConfigurationError(f"[providers.{name}] names the variable {endpoint.api_key_env}, which is not set")
    return OpenAIChat(endpoint.base_url or OPENAI_BASE_URL, key, client, name)
