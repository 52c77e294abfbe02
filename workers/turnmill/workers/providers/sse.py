"""Server-sent events from bytes.

Lines end at CR, LF or CRLF and nowhere else. That is why bytes are split and not text: the line rules of `str` (and of
httpx's `aiter_lines`) also split at U+2028, U+0085 and the like, which stand unescaped inside valid JSON. A chunk of the
network may end anywhere, in the middle of a character or between CR and LF.

One rule of the standard is broken on purpose: an event that the end of the stream cuts off from its blank line is
delivered, because providers put the finish reason and the usage there.
"""

from __future__ import annotations

import msgspec

from turnmill.protocol.errors import MessageTooLarge

EVENT_BYTES_MAX = 8 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One event: the lines of its `data`, joined by line feeds, and its type (empty where the stream names none)."""

    data: bytes
    name: bytes = b""


class SseParser:
    """An incremental parser: `feed` it what the network gives, `close` it at the end."""

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._line_pieces: list[bytes] = []
        self._data_lines: list[bytes] = []
        self._name = b""
        self._held_bytes = 0
        self._is_first_line = True
        self._ended_with_carriage_return = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that `chunk` completes. Raises `MessageTooLarge` for an event above the limit."""
        first, *rest = self._unify_line_ends(chunk).split(b"\n")
        self._hold(first)
        if not rest:
            return []
        line = b"".join(self._line_pieces)
        events: list[SseEvent] = []
        self._take_line(line, events)
        for line in rest[:-1]:
            self._held_bytes += len(line)
            self._take_line(line, events)
        self._line_pieces.clear()
        self._hold(rest[-1])
        return events

    def close(self) -> list[SseEvent]:
        """The event that the end of the stream cut off from its blank line, if there is one."""
        return self.feed(b"\n\n")

    def _unify_line_ends(self, chunk: bytes) -> bytes:
        """`chunk` with LF line ends only. A CR ends its line at once; the LF that may follow it belongs to it."""
        if self._ended_with_carriage_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._ended_with_carriage_return = False
        if b"\r" not in chunk:
            return chunk
        self._ended_with_carriage_return = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _hold(self, piece: bytes) -> None:
        self._line_pieces.append(piece)
        self._held_bytes += len(piece)
        self._check_size()

    def _check_size(self) -> None:
        if self._held_bytes > self._event_bytes_max:
            raise MessageTooLarge(f"a server-sent event is above the limit of {self._event_bytes_max} bytes")

    def _take_line(self, line: bytes, events: list[SseEvent]) -> None:
        if self._is_first_line:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._is_first_line = False
        if not line:
            self._end_event(events)
        elif line.startswith(b"data:"):
            self._data_lines.append(line[6:] if line[5:6] == b" " else line[5:])
            self._check_size()
        elif line == b"data":
            self._data_lines.append(b"")
        else:
            self._held_bytes -= len(line)
            self._take_other_field(line)

    def _take_other_field(self, line: bytes) -> None:
        """Comments, ids and retry times are left out: nothing resumes a model's answer."""
        field, _, value = line.partition(b":")
        if field == b"event":
            self._name = value.removeprefix(b" ")

    def _end_event(self, events: list[SseEvent]) -> None:
        if self._data_lines:
            events.append(SseEvent(b"\n".join(self._data_lines), self._name))
            self._data_lines.clear()
        self._name = b""
        self._held_bytes = 0
