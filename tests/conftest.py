"""Fixtures for tests against a real Valkey: one server for the session, a namespace for each test."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from turnmill.runtime.embedded import ensure_server


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A private directory with a path short enough for a unix socket, which pytest's own `tmp_path` is not always."""
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The URL of a real server that lives as long as the test session."""
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    server = ensure_server(directory)
    yield server.url
    server.stop()
    shutil.rmtree(directory)


@pytest.fixture
def namespace() -> str:
    """A key prefix that no other test has."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def redis_client(valkey_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain asyncio client of redis-py, for looking at what is really there; values are bytes."""
    client = redis.asyncio.Redis.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What tests of lone surrogates have logged must get through to the process that prints reports."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
