"""Live events of a running model call on their way to the turn's channel.

Coalescing adapts: an event that finds nothing on the way leaves at once, so a lone stream is as fast as its provider;
while a flush is on the way, or many streams share the process, what comes meanwhile is joined. What is still here when
the call ends travels with its result, and is published by the coordinator's commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from turnmill.protocol.codec import WireFormat, encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import EngineReplyError, EngineUnavailable, ErrorKind, Superseded
from turnmill.protocol.events import ReasoningDelta, TextDelta, ToolCallDelta
from turnmill.protocol.streams import APPEND_DELTAS, is_transient, publication_header

from .providers.base import Live, ProviderError

FLUSHES_PER_SECOND = 2000
"""What one process spends on live events at the most; above that, streams wait a little longer for more text."""


TAIL_BYTES_MAX = 64 * 1024


class DeltaPublisher:
    """Publishes the live events of one attempt, in order and once."""

    def __init__(
        self,
        engine: Engine,
        session_key: str,
        channel: str,
        live: str,
        *,
        now_ms: Callable[[], int],
        streams_open: Callable[[], int],
        bytes_max: int,
        wire: WireFormat = "json",
    ) -> None:
        self._engine = engine
        self._keys = [session_key, channel]
        self._live = live
        self._now_ms = now_ms
        self._streams_open = streams_open
        self._bytes_max = bytes_max
        self._wire: WireFormat = wire
        self._buffer: list[Live] = []
        self._offset = 0
        self._scheduled: asyncio.Handle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._flushed_at = 0.0
        self._failure: Exception | None = None

    def add(self, event: Live) -> None:
        """Raises `Superseded` once another attempt has taken over, `ProviderError` above the limit of bytes."""
        if self._failure is not None:
            raise self._failure
        buffer = self._buffer
        joined = _join(buffer[-1], event) if buffer else None
        if joined is not None:
            buffer[-1] = joined
        else:
            buffer.append(event)
        if self._flushing is None and self._scheduled is None:
            # In the next tick: what the provider gives in one piece leaves in one piece.
            self._scheduled = asyncio.get_running_loop().call_soon(self._start)

    async def finish(self) -> list[dict[str, Any]]:
        """Wait for what is on the way; the dict forms of what was not published."""
        if sum(_size(event) for event in self._buffer) > TAIL_BYTES_MAX:
            # The reply holds this text already: large text does not travel twice.
            await self._settle()
            await self._flush()
        buffer, self._buffer = self._buffer, []
        await self._settle()
        if self._failure is not None:
            raise self._failure
        return [{"type": event.type, **msgspec.to_builtins(event)} for event in buffer]

    async def discard(self) -> None:
        """The attempt failed: what was not published is void anyway."""
        self._buffer = []
        await self._settle()

    def _start(self) -> None:
        self._scheduled = None
        self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def _settle(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._flushing is not None:
            await asyncio.wait({self._flushing})

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._buffer:
                wait = self._flushed_at + self._streams_open() / FLUSHES_PER_SECOND - loop.time()
                if self._flushed_at and wait > 0:
                    await asyncio.sleep(wait)
                buffer, self._buffer = self._buffer, []
                if buffer:
                    await self._send(buffer)
                self._flushed_at = loop.time()
        except Exception as error:  # what is no ProviderError is a fault of ours, and ends the call as well
            self._failure = error
        finally:
            self._flushing = None

    async def _send(self, buffer: list[Live]) -> None:
        types = [event.type for event in buffer]
        bodies = [encode_body(event, self._wire) for event in buffer]
        header = publication_header(types, bodies)
        arguments = [self._live, self._offset, self._now_ms(), self._bytes_max, len(buffer), header, *types, *bodies]
        accepted = await self._run(arguments)
        if accepted == -3:
            text = f"the step published more than {self._bytes_max} bytes of events (TURNMILL_EVENT_BYTES_MAX)"
            raise ProviderError(ErrorInfo(kind=ErrorKind.EVENT_LIMIT, message=text))
        if accepted == -2:
            # The engine has lost what it had acknowledged: this attempt's text has a hole.
            raise ProviderError(_broken(f"the channel of {self._live} has lost events"))
        if accepted < 0:
            raise Superseded(f"attempt {self._live} may not publish any more")
        self._offset = accepted

    async def _run(self, arguments: list[Any]) -> int:
        """Sent again until it is answered: the offset tells a repetition."""
        while True:
            try:
                accepted: int = await APPEND_DELTAS.run(self._engine, self._keys, arguments)
                return accepted
            except EngineUnavailable:
                await self._engine.ready()
            except EngineReplyError as error:
                if not is_transient(error):
                    text = f"the channel of {self._live} cannot be written: {error}"
                    raise ProviderError(_broken(text)) from error
                await asyncio.sleep(0.2)


def _size(event: Live) -> int:
    text = getattr(event, "text", None) or getattr(event, "arguments_delta", None) or ""
    return len(text)


def _broken(text: str) -> ErrorInfo:
    return ErrorInfo(kind=ErrorKind.STREAM_BROKEN, message=text, retryable=True)


def _join(last: Live, event: Live) -> Live | None:
    """Two events as one, where a reader could not tell the difference."""
    if isinstance(last, TextDelta) and isinstance(event, TextDelta):
        return TextDelta(text=last.text + event.text, step_number=event.step_number)
    if isinstance(last, ToolCallDelta) and isinstance(event, ToolCallDelta) and last.index == event.index:
        return ToolCallDelta(
            step_number=event.step_number,
            index=event.index,
            tool_call_id=last.tool_call_id or event.tool_call_id,
            name_delta=_concatenated(last.name_delta, event.name_delta),
            arguments_delta=_concatenated(last.arguments_delta, event.arguments_delta),
        )
    if isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta):
        same = (last.kind, last.provider, last.data) == (event.kind, event.provider, event.data)
        if same and event.kind in ("delta", "summary") and not event.data:
            return msgspec.structs.replace(event, text=_concatenated(last.text, event.text))
    return None


def _concatenated(first: str | None, second: str | None) -> str | None:
    return second if first is None else first if second is None else first + second
