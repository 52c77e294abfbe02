"""What can be hit, how, and what may be lost then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from . import data_faults, engine_faults, failover, network_faults, process_faults

if TYPE_CHECKING:
    from .run import Run

Strike: TypeAlias = "Callable[[Run], Awaitable[str]]"
Step: TypeAlias = "Callable[[Run], Awaitable[None]]"


async def _nothing(_run: Run) -> None:
    return


@dataclass(frozen=True)
class Scenario:
    """A kind of fault. Without `may_lose` every turn gives its answer; with it a turn may instead say that it was lost.
    With `may_repeat` an attempt may take effect again behind the loss."""

    about: str
    strike: Strike
    """One blow; gives its name."""
    every: float = 1.0
    may_lose: bool = False
    may_repeat: bool = False
    through_proxy: bool = False
    fsync: str = "everysec"
    deadline_seconds: float = 60.0
    """The timeouts of models and tools: how long a task is waited for that was lost without a trace."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The engine's."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Step = _nothing
    finish: Step = _nothing
    """Behind the last blow: everything is whole again."""


_LOSSY: dict[str, Any] = {"may_lose": True, "may_repeat": True, "deadline_seconds": 8.0}
_ONE_REPLICA = {"acknowledged_replicas": 1, "acknowledge_timeout": 1.0}

SCENARIOS: dict[str, Scenario] = {
    "kill": Scenario("kill -9 of every role", process_faults.kill),
    "freeze": Scenario(
        "SIGSTOP and SIGCONT of every role", process_faults.freeze, every=0.7, finish=process_faults.thaw_all
    ),
    "mixed": Scenario("kills and freezes", process_faults.kill_or_freeze, finish=process_faults.thaw_all),
    "reset": Scenario("connections end with RST", network_faults.reset, every=0.7, through_proxy=True),
    "black-hole": Scenario(
        "connections that pass nothing and are not closed",
        network_faults.black_hole,
        every=3.0,
        through_proxy=True,
        finish=network_faults.pass_on,
    ),
    "delay": Scenario(
        "everything arrives late", network_faults.delay, every=1.5, through_proxy=True, finish=network_faults.pass_on
    ),
    "client-kill": Scenario("CLIENT KILL", network_faults.client_kill, every=0.5),
    "script": Scenario(
        "SCRIPT FLUSH, and a script of others that runs until SCRIPT KILL",
        engine_faults.script,
        options={"busy_reply_threshold": "50"},
    ),
    "memory": Scenario(
        "maxmemory is reached with noeviction, then raised", engine_faults.memory, every=2.0,
        finish=engine_faults.free_memory,
    ),
    "misconf": Scenario(
        "writes are refused because the engine cannot save", engine_faults.misconf, every=2.0, fsync="no",
        options={"enable_protected_configs": "yes"}, finish=engine_faults.save_again,
    ),
    "restart-always": Scenario(
        "kill -9 of the engine, appendfsync always", engine_faults.restart, every=3.0, fsync="always"
    ),
    "restart-everysec": Scenario("kill -9 of the engine, appendfsync everysec", engine_faults.restart, every=3.0),
    "flushall": Scenario(
        "FLUSHALL", data_faults.flush_all, every=6.0, may_lose=True, may_repeat=False, deadline_seconds=8.0
    ),
    "delete": Scenario("DEL of streams", data_faults.delete_streams, every=2.0, may_lose=True, deadline_seconds=6.0),
    "evict": Scenario(
        "an evicting policy and too little memory", data_faults.evict, every=4.0, finish=engine_faults.free_memory,
        **_LOSSY,
    ),
    "older-data": Scenario(
        "the engine comes back with an older append-only file", data_faults.older_data, every=4.0, **_LOSSY
    ),
    "group-position": Scenario(
        "XGROUP SETID back to the beginning", data_faults.set_back, every=0.7, may_repeat=True
    ),
    "failover": Scenario(
        "the primary dies, its replica is promoted", failover.fail_over, every=5.0, through_proxy=True,
        prepare=failover.add_replica, **_LOSSY,
    ),
    "failover-acknowledged": Scenario(
        "the same, and writes count when a replica has them", failover.fail_over, every=5.0, through_proxy=True,
        prepare=failover.add_replica, settings=_ONE_REPLICA,
    ),
}  # fmt: skip
