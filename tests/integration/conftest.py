"""A deployment of the application `apps.offices` that many tests share: they kill none of its processes."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from support.fleet import Fleet
from support.stage import Stage

LOG_LINES = 60


@pytest.fixture(scope="session")
def office_fleet(valkey_url: str) -> Iterator[Fleet]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    with Fleet(valkey_url, f"test-{uuid.uuid4().hex[:12]}", directory, "apps.offices") as fleet:
        fleet.start()
        yield fleet
    shutil.rmtree(directory)


@pytest.fixture
async def office(
    office_fleet: Fleet, redis_client: redis.asyncio.Redis, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    """The shared deployment, with a client of this test's own."""
    office_fleet.new_log_lines()
    failed = request.session.testsfailed
    async with office_fleet.client() as client:
        yield Stage(client, redis_client, office_fleet.processes)
    if request.session.testsfailed > failed:
        for name, lines in office_fleet.new_log_lines().items():
            print(f"--- {name}", *lines[-LOG_LINES:], sep="\n")


@pytest.fixture
def session() -> str:
    """A session of this test's own."""
    return uuid.uuid4().hex[:8]
