"""Child processes of tools: each in a process group of its own, which ends with the call that started it.

A tool that is stopped or runs out of time leaves nothing behind: its child is asked to end, and then the whole group,
grandchildren included, is killed. What a child writes is kept up to a limit, so that it cannot fill the worker's memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from turnmill.protocol.abort_signal import AbortSignal

OUTPUT_BYTES_MAX = 8 * 1024 * 1024
TERMINATION_GRACE_SECONDS = 0.5
_CHUNK_BYTES = 65_536


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a child process ended. `exit_code` is negative where a signal ended it; `truncated` says that it wrote more."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False

    @property
    def text(self) -> str:
        """What it wrote to its standard output, as text."""
        return self.stdout.decode("utf-8", "replace")


async def run_process(
    arguments: tuple[str | os.PathLike[str], ...],
    cancelled: AbortSignal,
    *,
    stdin: bytes | None = None,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    output_bytes_max: int = OUTPUT_BYTES_MAX,
) -> ProcessResult:
    """Run a program to its end. Once `cancelled` is set its group is killed, and this raises `asyncio.CancelledError`;
    after `timeout_seconds` it raises `TimeoutError`. Raises `OSError` where the program cannot be started."""
    if cancelled.is_set():
        raise asyncio.CancelledError(cancelled.reason)
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=DEVNULL if stdin is None else PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    loop = asyncio.get_running_loop()
    running = loop.create_task(_communicate(process, stdin, output_bytes_max))
    stopped, forget = cancelled.future()
    try:
        either: set[asyncio.Future[Any]] = {running, stopped}
        await asyncio.wait(either, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        if stopped.done():
            raise asyncio.CancelledError(cancelled.reason)
        raise TimeoutError(f"{arguments[0]} has not ended within {timeout_seconds:g} s")
    finally:
        forget()
        if not running.done():
            await _end(process, running)


async def _communicate(process: Process, stdin: bytes | None, output_bytes_max: int) -> ProcessResult:
    assert process.stdout is not None and process.stderr is not None
    (stdout, more), (stderr, more_errors), _ = await asyncio.gather(
        _read(process.stdout, output_bytes_max), _read(process.stderr, output_bytes_max), _write(process.stdin, stdin)
    )
    exit_code = await process.wait()
    return ProcessResult(exit_code=exit_code, stdout=stdout, stderr=stderr, truncated=more or more_errors)


async def _read(stream: asyncio.StreamReader, bytes_max: int) -> tuple[bytes, bool]:
    """The beginning of a stream, and whether there was more: the rest is read too, or its writer would hang."""
    kept, total = bytearray(), 0
    while chunk := await stream.read(_CHUNK_BYTES):
        total += len(chunk)
        kept += chunk[: bytes_max - len(kept)]
    return bytes(kept), total > len(kept)


async def _write(stream: Any, data: bytes | None) -> None:
    if data is None:
        return
    try:
        stream.write(data)
        await stream.drain()
    except (BrokenPipeError, ConnectionResetError):
        return  # the program does not read all of its input
    finally:
        stream.close()


async def _end(process: Process, running: asyncio.Task[ProcessResult]) -> None:
    """Ask the group to end, then kill whatever is left of it. The child leads its group, so its id is the group's."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        await asyncio.wait({running}, timeout=TERMINATION_GRACE_SECONDS)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        running.cancel()
        if running.done() and not running.cancelled():
            running.exception()  # seen: the call has ended otherwise


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return  # nothing of it is left
