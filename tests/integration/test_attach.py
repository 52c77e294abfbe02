"""Attaching to a turn that no coordinator has read yet: a door that answers at once must be able to serve its events."""

from __future__ import annotations

import asyncio

import pytest

from turnmill.protocol.errors import TurnLostError
from turnmill.protocol.keys import new_turn_id
from turnmill.protocol.settings import load_settings
from turnmill.runtime import Agent, connect
from turnmill.runtime.local import local_runtime
from turnmill.workers.providers.scripted import Reply, Script


async def test_attach_before_a_coordinator_has_read_the_command(valkey_url: str, namespace: str) -> None:
    agent = Agent("late", model="scripted:late")
    async with connect(valkey_url, namespace=namespace) as client:
        turn = await client.turn(agent, "hello")
        attached = client.attach(turn.id)
        assert await attached.status() == "submitted"
        waiting = asyncio.create_task(attached.result())
        settings = load_settings(redis_url=valkey_url, namespace=namespace)
        async with local_runtime(settings, app=[Script("late", [Reply(text="here")])]):
            assert (await asyncio.wait_for(waiting, 30)).answer == "here"
            assert await attached.status() == "finished"


async def test_a_turn_that_nobody_submitted_is_said_to_be_unknown(valkey_url: str, namespace: str) -> None:
    async with connect(valkey_url, namespace=namespace) as client:
        stranger = client.attach(new_turn_id(0))
        with pytest.raises(TurnLostError, match="nothing is known"):
            await stranger.result()
        with pytest.raises(TurnLostError, match="nothing is known"):
            async for _ in stranger.events():
                pass
