"""Lua scripts with a fence taken out, to show what the fence is good for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnmill.protocol.connection import Argument, Engine
from turnmill.protocol.streams import Script


class Altered:
    """A script in which some text is replaced; it runs as the script does."""

    def __init__(self, script: Script, *changes: tuple[str, str]) -> None:
        self.source = script.source
        for before, after in changes:
            assert self.source.count(before) == 1, f"{script.name} has {before!r} {self.source.count(before)} times"
            self.source = self.source.replace(before, after)

    async def run(self, engine: Engine, keys: Sequence[Argument], arguments: Sequence[Argument]) -> Any:
        return await engine.call("EVAL", self.source, len(keys), *keys, *arguments)
