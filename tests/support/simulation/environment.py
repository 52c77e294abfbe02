"""Time, chance and threads of a run: all of them follow from the seed, and all of them are put back behind it."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ulid

import turnmill.protocol.streams
import turnmill.workers.consumer
import turnmill.workers.execution
from turnmill.workers.liveness import Liveness

from .liveness import SimulatedLiveness
from .loop import VirtualLoop

EPOCH_SECONDS = 1_700_000_000.0


def _users_of(kind: type) -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("turnmill.workers.")]
    return [module for module in modules if getattr(module, kind.__name__, None) is kind]


@contextmanager
def virtual(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """The clocks are the loop's, every random number follows from the seed, heartbeats are tasks, and only errors are logged."""
    chance = random.Random(f"chance {seed}")
    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "perf_counter", loop.time),
        (time, "time", lambda: EPOCH_SECONDS + loop.time()),
        (time, "time_ns", lambda: int((EPOCH_SECONDS + loop.time()) * 1e9)),
        (os, "urandom", chance.randbytes),
        (os, "getpid", lambda: 1),  # it is part of names, whose hashes decide who goes first
        (random, "_urandom", chance.randbytes),
        (ulid, "default_generator", ulid.ULIDGenerator()),
        *[(module, "Liveness", SimulatedLiveness) for module in _users_of(Liveness)],
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    logger = logging.getLogger("turnmill")
    level, state, collects = logger.level, random.getstate(), gc.isenabled()
    gc.disable()  # what it frees runs code, at moments that no seed decides
    random.seed(seed)
    logger.setLevel(logging.CRITICAL)
    try:
        for place, name, value in replaced:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
        random.setstate(state)
        logger.setLevel(level)
        turnmill.protocol.streams._KEPT.clear()
        turnmill.workers.execution._LEFT_BEHIND.clear()
        if collects:
            gc.enable()
