"""Every wire format by the name of its API, and the providers that need nothing but their key in the environment.

A further format is one entry in `APIS`, a further provider one in `PROVIDERS`; nothing else lists them. Formats are
imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import cast

import msgspec

from turnmill.protocol.settings import Settings

from .format import Endpoint, WireFormat
from .http_provider import Signer


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """An API. `format` is the class of its `WireFormat`, `signer` a function `(Endpoint, environment) -> Signer | None`;
    both as `module:name` of this package. `short` is another name for it in turnmill.toml."""

    format: str
    short: str = ""
    signer: str = ""


class KnownProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that is there once one of its variables is set: its key, its base URL, or one of `other_variables`.

    `base_url` may hold variables, as in `https://{AWS_REGION}.example`. The first of `key_variables` that is set counts.
    """

    api: str
    base_url: str
    key_variables: tuple[str, ...] = ()
    base_url_variable: str = ""
    other_variables: tuple[str, ...] = ()
    headers: dict[str, str] = {}


APIS: dict[str, Api] = {
    "openai-chat": Api(format="openai_chat:OpenAIChat", short="openai"),
    "openai-responses": Api(format="openai_responses:OpenAIResponses", short="responses"),
    "anthropic-messages": Api(format="anthropic:AnthropicMessages", short="anthropic"),
    "gemini": Api(format="gemini:Gemini"),
    "bedrock-converse": Api(
        format="bedrock_converse:BedrockConverse", short="bedrock", signer="bedrock_signer:open_signer"
    ),
    "ollama-chat": Api(format="ollama_chat:OllamaChat", short="ollama"),
}


def _compatible(base_url: str, key_variable: str) -> KnownProvider:
    return KnownProvider(api="openai-chat", base_url=base_url, key_variables=(key_variable,))


PROVIDERS: dict[str, KnownProvider] = {
    "openai": KnownProvider(
        api="openai-chat",
        base_url="https://api.openai.com/v1",
        key_variables=("OPENAI_API_KEY",),
        base_url_variable="OPENAI_BASE_URL",
    ),
    "azure": _compatible("{AZURE_OPENAI_ENDPOINT}/openai/v1", "AZURE_OPENAI_API_KEY"),
    "cerebras": _compatible("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "deepseek": _compatible("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "fireworks": _compatible("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "groq": _compatible("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": _compatible("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "openrouter": _compatible("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "perplexity": _compatible("https://api.perplexity.ai", "PERPLEXITY_API_KEY"),
    "together": _compatible("https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "xai": _compatible("https://api.x.ai/v1", "XAI_API_KEY"),
    "openai-responses": KnownProvider(
        api="openai-responses",
        base_url="https://api.openai.com/v1",
        key_variables=("OPENAI_API_KEY",),
        base_url_variable="OPENAI_BASE_URL",
    ),
    "anthropic": KnownProvider(
        api="anthropic-messages",
        base_url="https://api.anthropic.com",
        key_variables=("ANTHROPIC_API_KEY",),
        base_url_variable="ANTHROPIC_BASE_URL",
    ),
    "google": KnownProvider(
        api="gemini",
        base_url="https://generativelanguage.googleapis.com/v1beta",
        key_variables=("GOOGLE_API_KEY", "GEMINI_API_KEY"),
    ),
    "bedrock": KnownProvider(
        api="bedrock-converse",
        base_url="https://bedrock-runtime.{AWS_REGION}.amazonaws.com",
        key_variables=("AWS_BEARER_TOKEN_BEDROCK",),
        base_url_variable="AWS_ENDPOINT_URL_BEDROCK_RUNTIME",
        other_variables=("AWS_REGION",),
    ),
    "ollama": KnownProvider(api="ollama-chat", base_url="http://127.0.0.1:11434", base_url_variable="OLLAMA_HOST"),
}


def api_names() -> list[str]:
    return sorted(APIS)


def find_api(name: str) -> str | None:
    """The full name of an API that is named in full or in short; None where there is no such API."""
    return next((full for full, api in APIS.items() if name == full or (name and name == api.short)), None)


def default_base_url(api: str, environment: Mapping[str, str]) -> str | None:
    """Where an API lives: at the first provider that speaks it. None where the environment does not say which region."""
    known = next((provider for provider in PROVIDERS.values() if provider.api == api), None)
    return _base_url_of(known, environment) if known is not None else None


def base_urls(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Where the models of each prefix live, known providers and those of the settings, configured or not."""
    found = {name: _base_url_of(known, environment) for name, known in PROVIDERS.items()}
    for name, endpoint in settings.providers.items():
        found[name] = endpoint.base_url or default_base_url(find_api(endpoint.api) or "", environment)
    return {name: url for name, url in found.items() if url is not None}


def known_endpoint(name: str, environment: Mapping[str, str]) -> Endpoint | None:
    """The endpoint of a known provider, where the environment has what it needs."""
    known = PROVIDERS[name]
    told = (*known.key_variables, known.base_url_variable, *known.other_variables)
    base_url = _base_url_of(known, environment)
    if base_url is None or not any(environment.get(variable) for variable in told if variable):
        return None
    key = next((value for variable in known.key_variables if (value := environment.get(variable))), None)
    return Endpoint(name=name, base_url=base_url, api_key=key, headers=known.headers)


def _base_url_of(known: KnownProvider, environment: Mapping[str, str]) -> str | None:
    """None where a variable that is part of it is not set."""
    told = environment.get(known.base_url_variable) if known.base_url_variable else None
    if told:
        return told if "://" in told else f"http://{told}"  # OLLAMA_HOST may be a host alone
    try:
        return known.base_url.format_map(_Stripped(environment))
    except KeyError:
        return None


def open_format(api: str, endpoint: Endpoint) -> WireFormat:
    return cast("WireFormat", _load(APIS[api].format)(endpoint))


def open_signer(api: str, endpoint: Endpoint, environment: Mapping[str, str]) -> Signer | None:
    path = APIS[api].signer
    return cast("Signer | None", _load(path)(endpoint, environment)) if path else None


class _Stripped(dict[str, str]):
    """The variables that are set, without a slash at their end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__({name: value.rstrip("/") for name, value in environment.items() if value})


def _load(path: str) -> type:
    module, _, name = path.partition(":")
    return cast("type", getattr(import_module(f".{module}", __package__), name))
