"""Readers that never read, and few dead entries among many busy ones: the short forms of `scripts/chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chaos.deployment import deployment
from support.chaos.pending import find_dead
from support.chaos.slow_readers import flood

pytestmark = pytest.mark.chaos


async def test_readers_that_never_read(short_directory: Path) -> None:
    """AC-35: memory stays bounded, the turn goes on, and who was dropped reads on from its cursor without a gap."""
    findings = await flood(short_directory, 8.0, 4, client_output_buffer_limit="pubsub 1mb 512kb 5")
    print(findings)
    assert findings.wrong == []
    assert findings.dropped >= 1
    # The events, twice in the conversation's way to the engine, are there anyway: 4 readers of 8 MB would need 32 more.
    assert findings.process_megabytes < 60
    assert findings.engine_megabytes < 60


async def test_dead_entries_are_found_among_busy_ones(short_directory: Path) -> None:
    """AC-22/23: 50,000 in `scripts/chaos pending`; they are found within twice the liveness, and no command is slow."""
    async with deployment(short_directory, fsync="no") as deployed:
        found = await find_dead(deployed, 5_000, 3)
    print(found)
    assert found.slow == []
    assert found.seconds < 10.0
