"""The bytes of a body as events or lines, given to a reply that understands those.

A format's reply has `take` for one event (or line) and `take_whole` for an answer that came as one JSON body; the
readers here make a `format.Reply` of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from turnmill.protocol.content import Cost, ErrorInfo, Usage
from turnmill.protocol.errors import ErrorKind, MessageTooLarge

from .base import Completed, Live, ProviderError
from .ndjson import NdjsonParser
from .sse import SseEvent, SseParser

ANSWER_BYTES_MAX = 8 * 1024 * 1024


class _Answer(Protocol):
    """What event replies and line replies have in common."""

    @property
    def usage(self) -> Usage | None: ...

    @property
    def cost(self) -> Cost | None: ...

    @property
    def failure(self) -> ProviderError | None: ...

    @property
    def has_begun(self) -> bool: ...

    @property
    def is_finished(self) -> bool: ...

    @property
    def is_done(self) -> bool: ...

    def completed(self) -> Completed: ...


class EventReply(_Answer, Protocol):
    """A reply that is read from server-sent events, or from one JSON body."""

    def take(self, event: SseEvent) -> Iterable[Live]: ...

    def take_whole(self, body: bytes) -> Iterable[Live]: ...


class LineReply(_Answer, Protocol):
    """A reply that is read from lines of JSON; an answer that was not streamed is one line."""

    def take_line(self, line: bytes) -> Iterable[Live]: ...


class _Reader:
    """What a reader says of its reply."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    @property
    def usage(self) -> Usage | None:
        return self._answer.usage

    @property
    def cost(self) -> Cost | None:
        return self._answer.cost

    @property
    def failure(self) -> ProviderError | None:
        return self._answer.failure

    @property
    def has_begun(self) -> bool:
        return self._answer.has_begun

    @property
    def is_finished(self) -> bool:
        return self._answer.is_finished

    @property
    def is_done(self) -> bool:
        return self._answer.is_done

    def completed(self) -> Completed:
        return self._answer.completed()


class BodyReader(_Reader):
    """Server-sent events to a reply. The first byte tells a JSON body from a stream of events, as the content type is not
    to be trusted: no line of an event stream that we could use begins with `{` or `[`."""

    def __init__(self, reply: EventReply) -> None:
        super().__init__(reply)
        self._reply = reply
        self._parser = SseParser()
        self._json: bytearray | None = None
        self._began = False

    def feed(self, chunk: bytes) -> list[Live]:
        if not self._began:
            chunk = self._begin(chunk)
        if self._json is None:
            return self._take_events(chunk)
        self._json += chunk
        if len(self._json) > ANSWER_BYTES_MAX:
            raise _too_large(f"the answer is above the limit of {ANSWER_BYTES_MAX} bytes")
        return []

    def close(self) -> list[Live]:
        if self._json is not None:
            return list(self._reply.take_whole(bytes(self._json)))
        return self._take_events(None)

    def _begin(self, chunk: bytes) -> bytes:
        """White space before the first byte means nothing in either form."""
        chunk = chunk.lstrip()
        self._began = bool(chunk)
        if chunk[:1] in (b"{", b"["):
            self._json = bytearray()
        return chunk

    def _take_events(self, chunk: bytes | None) -> list[Live]:
        try:
            events = self._parser.close() if chunk is None else self._parser.feed(chunk)
        except MessageTooLarge as error:
            raise _too_large(str(error)) from error
        live: list[Live] = []
        for event in events:
            live += self._reply.take(event)
            if self._reply.is_done or self._reply.failure is not None:
                break
        return live


class LineReader(_Reader):
    """Lines of JSON to a reply."""

    def __init__(self, reply: LineReply) -> None:
        super().__init__(reply)
        self._reply = reply
        self._parser = NdjsonParser()

    def feed(self, chunk: bytes) -> list[Live]:
        return self._take_lines(chunk)

    def close(self) -> list[Live]:
        return self._take_lines(None)

    def _take_lines(self, chunk: bytes | None) -> list[Live]:
        try:
            lines = self._parser.close() if chunk is None else self._parser.feed(chunk)
        except MessageTooLarge as error:
            raise _too_large(str(error)) from error
        live: list[Live] = []
        for line in lines:
            live += self._reply.take_line(line)
            if self._reply.is_done or self._reply.failure is not None:
                break
        return live


def _too_large(message: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.MESSAGE_TOO_LARGE, message=message))
