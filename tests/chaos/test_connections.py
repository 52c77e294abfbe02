"""Connections of one worker die, with and without a word; those of the rest of the deployment do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.chaos.deployment import Deployment, deployment
from support.proxy import Proxy
from support.stage import call, told
from support.waiting import wait_until_async
from turnmill.runtime.turn import Turn

pytestmark = pytest.mark.chaos
PATIENCE_SECONDS = 30.0


async def answer(turn: Turn) -> str:
    return (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer


async def consumes(deployed: Deployment) -> bool:
    """Whether a worker shows signs of life in the first partition."""
    return bool(await deployed.stage.redis.keys(deployed.stage.keys.partitions[0].alive("tools*")))


@pytest.mark.parametrize("fault", ["reset", "black hole"])
async def test_a_tool_worker_loses_its_connections(short_directory: Path, fault: str) -> None:
    """AC-20: busy and idle, it comes back and its result is there, once. While it cannot consume it has no sign of life,
    which is what `worker ls` and the coordinators go by."""
    async with deployment(short_directory, fsync="no") as deployed:
        proxy = await Proxy("127.0.0.1", deployed.server.port).start()
        for role in ("coordinator", "llm"):
            deployed.start(role)
        deployed.start("tools", redis_url=proxy.url)
        await deployed.everybody_is_there()
        busy = await deployed.ask(told([call("once", seconds=0.7)], answer="busy: ${results[0]}"), "busy")
        await wait_until_async(lambda: deployed.effects().total == 2, PATIENCE_SECONDS)
        if fault == "reset":
            assert proxy.reset() >= 3
        else:
            # Every connection is forgotten for ever; the worker must find out, and make new ones.
            proxy.forget()
        assert await answer(busy) == "busy: once done"
        assert deployed.effects().of_call[f"{busy.id}/1.0"] == {1: 1}
        proxy.black_hole()
        await wait_until_async(lambda: _not(consumes(deployed)), PATIENCE_SECONDS)
        proxy.pass_on()
        idle = await deployed.ask(told([call("again")], answer="idle: ${results[0]}"), "idle")
        assert await answer(idle) == "idle: again done"
        assert await consumes(deployed)
        await deployed.stage.assert_idle()
        await proxy.close()


async def _not(condition: object) -> bool:
    return not await condition  # type: ignore[misc]
