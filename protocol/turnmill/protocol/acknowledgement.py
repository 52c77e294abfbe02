"""Writes that count only once replicas have them: a failover then loses nothing that was counted.

WAIT is about the last write of the connection that it is sent on, and so it goes there. It blocks that connection and not
the server. Without a wish for replicas nothing is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from .connection import Engine
from .link import Link
from .settings import Settings


class Acknowledgement(NamedTuple):
    """How many replicas, and how long to wait for them."""

    replicas: int = 0
    timeout_ms: int = 1000

    @classmethod
    def of(cls, settings: Settings) -> Acknowledgement:
        return cls(settings.acknowledged_replicas, int(settings.acknowledge_timeout * 1000))

    async def missing(self, where: Engine | Link) -> int:
        """Wait for the replicas to have what was written on a connection so far, and not longer than the timeout; how many
        do not have it then. `where` is a link, or the engine of one server. Raises `EngineUnavailable`."""
        if not self.replicas:
            return 0
        return max(0, self.replicas - int(await where.call("WAIT", self.replicas, self.timeout_ms)))


NO_REPLICA = Acknowledgement()
