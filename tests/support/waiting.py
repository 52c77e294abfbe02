"""Waiting for a condition instead of sleeping for a guess: as fast as the machine allows, and loud when it never comes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.005


def wait_until(condition: Callable[[], T], timeout_seconds: float = 10.0) -> T:
    """Call the condition until its value is true, and return that value."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_message(condition, value, timeout_seconds))
        time.sleep(POLL_SECONDS)
    return value


async def wait_until_async(condition: Callable[[], T | Awaitable[T]], timeout_seconds: float = 10.0) -> T:
    """The same without blocking the event loop; the condition may be a plain or an async function."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := await _value_of(condition)):
        if time.monotonic() > deadline:
            raise AssertionError(_message(condition, value, timeout_seconds))
        await asyncio.sleep(POLL_SECONDS)
    return value


async def _value_of(condition: Callable[[], T | Awaitable[T]]) -> T:
    value = condition()
    if inspect.isawaitable(value):
        return await value
    return value


def _message(condition: Callable[[], object], value: object, timeout_seconds: float) -> str:
    name = getattr(condition, "__qualname__", repr(condition))
    code = getattr(condition, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{name}{place} was still {value!r} after {timeout_seconds} s"
