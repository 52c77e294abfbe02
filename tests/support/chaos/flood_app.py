"""The application of the runs with slow readers: a model that says as many kilobytes as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from turnmill.runtime import Agent
from turnmill.workers import ModelRequest, model

PIECE_BYTES = 16 * 1024


@model("flood")
async def flood(request: ModelRequest) -> AsyncIterator[str]:
    """The message is the number of kilobytes."""
    for _ in range(int(request.messages[-1].text) * 1024 // PIECE_BYTES):
        yield "x" * PIECE_BYTES
        await asyncio.sleep(0)


speaker = Agent("speaker", "host:flood")
