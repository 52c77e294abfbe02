"""Which providers a process has: from variables of the environment, and from turnmill.toml."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.replay_server import Answer, ReplayServer
from turnmill.protocol.content import Message
from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.settings import ProviderEndpoint, Settings
from turnmill.workers.providers import registry
from turnmill.workers.providers.base import Completed, ProviderRequest, ProviderSet
from turnmill.workers.providers.catalog import build_providers
from turnmill.workers.providers.format import Endpoint

NO_SETTINGS = Settings()


def endpoint(**fields: Any) -> Settings:
    return Settings(providers={"mine": ProviderEndpoint(**fields)})


@pytest.fixture
async def opened() -> AsyncIterator[list[ProviderSet]]:
    sets: list[ProviderSet] = []
    yield sets
    for providers in sets:
        await providers.close()


@pytest.mark.parametrize("api", sorted(registry.APIS))
def test_every_api_can_be_opened_and_has_a_usual_place(api: str) -> None:
    wire_format = registry.open_format(api, Endpoint(name="x", base_url="http://localhost"))
    assert wire_format.endpoint.name == "x"
    assert registry.default_base_url(api, {"AWS_REGION": "eu-west-1"}) is not None
    assert registry.find_api(api) == api == registry.find_api(registry.APIS[api].short or api)


def test_a_name_that_is_none_finds_nothing() -> None:
    assert registry.find_api("") is None and registry.find_api("openai-chats") is None


@pytest.mark.parametrize("name", sorted(registry.PROVIDERS))
def test_a_known_provider_is_there_once_one_of_its_variables_is_set(name: str) -> None:
    known = registry.PROVIDERS[name]
    places = {"AWS_REGION": "eu-west-1", "AZURE_OPENAI_ENDPOINT": "https://mine.openai.azure.com/"}
    region = {variable: value for variable, value in places.items() if "{" + variable + "}" in known.base_url}
    assert registry.known_endpoint(name, {}) is None
    for variable in known.key_variables:
        found = registry.known_endpoint(name, {**region, variable: "secret"})
        assert found is not None and found.api_key == "secret" and found.base_url.startswith("http")
        assert "//" not in found.base_url.partition("://")[2]
        if region:
            assert registry.known_endpoint(name, {variable: "secret"}) is None
    if known.base_url_variable:
        found = registry.known_endpoint(name, {**region, known.base_url_variable: "10.0.0.1:1"})
        assert found is not None and found.base_url == "http://10.0.0.1:1" and found.api_key is None


async def test_a_call_goes_to_the_endpoint_of_the_environment(opened: list[ProviderSet]) -> None:
    async with ReplayServer() as server:
        server.reply(Answer(chunks=[b'{"type":"message","content":[],"stop_reason":"end_turn"}']))
        variables = {"ANTHROPIC_API_KEY": "secret", "ANTHROPIC_BASE_URL": server.url}
        opened.append(build_providers(NO_SETTINGS, environment=variables))
        assert set(opened[0].names) >= {"anthropic", "scripted"} and "openai" not in opened[0].names
        assert opened[0].is_remote("anthropic") and not opened[0].is_remote("scripted")
        provider = opened[0].get("anthropic")
        assert provider is not None
        request = ProviderRequest(model="m", messages=[Message(role="user", content="Hi")])
        told = [item async for item in provider.stream(request)]
        assert isinstance(told[-1], Completed) and server.requests[0].headers["x-api-key"] == "secret"


@pytest.mark.parametrize("api", ["anthropic", "anthropic-messages"])
async def test_an_endpoint_of_turnmill_toml_may_name_its_api_in_short(api: str, opened: list[ProviderSet]) -> None:
    settings = endpoint(api=api, base_url="http://127.0.0.1:1", api_key_env="MY_KEY")
    opened.append(build_providers(settings, environment={"MY_KEY": "k"}))
    assert "mine" in opened[0].names


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"api": "telepathy"}, r"\[providers.mine\] api = 'telepathy': known are anthropic-messages"),
        ({"api": "openai", "api_key_env": "MY_KEY"}, "MY_KEY, which is not set"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused_at_the_start(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        build_providers(endpoint(**fields), environment={})


def test_prices_know_where_every_prefix_lives() -> None:
    settings = Settings(
        providers={
            "mine": ProviderEndpoint(api="anthropic"),
            "local": ProviderEndpoint(api="openai", base_url="http://l/v1"),
        }
    )
    urls = registry.base_urls(settings, {"OPENAI_BASE_URL": "http://proxy"})
    assert (urls["openai"], urls["anthropic"]) == ("http://proxy", "https://api.anthropic.com")
    assert (urls["mine"], urls["local"]) == ("https://api.anthropic.com", "http://l/v1")
    assert "bedrock" not in urls
