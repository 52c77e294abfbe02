"""Providers over HTTP for tests: any registered format, pointed at a server of the test."""

from __future__ import annotations

from collections.abc import Mapping

from turnmill.workers.providers.format import Endpoint
from turnmill.workers.providers.http_client import HttpClient, StreamTimeouts
from turnmill.workers.providers.http_provider import HttpProvider
from turnmill.workers.providers.registry import open_format


def http_provider(
    api: str,
    base_url: str,
    api_key: str | None,
    client: HttpClient,
    name: str = "tested",
    *,
    headers: Mapping[str, str] | None = None,
    timeouts: StreamTimeouts | None = None,
) -> HttpProvider:
    endpoint = Endpoint(name=name, base_url=base_url, api_key=api_key, headers=dict(headers or {}))
    return HttpProvider(open_format(api, endpoint), client, timeouts=timeouts)


def openai_chat(
    base_url: str,
    api_key: str | None,
    client: HttpClient,
    *,
    headers: Mapping[str, str] | None = None,
    timeouts: StreamTimeouts | None = None,
) -> HttpProvider:
    return http_provider("openai-chat", base_url, api_key, client, "openai", headers=headers, timeouts=timeouts)
