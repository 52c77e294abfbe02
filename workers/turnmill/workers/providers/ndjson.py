"""Lines of JSON from bytes.

A line ends at LF and nowhere else (a CR before it is white space to JSON): the line rules of `str`, and of httpx's
`aiter_lines`, also split at U+2028, U+0085 and the like, which stand unescaped inside valid JSON. A chunk of the network
may end anywhere, in the middle of a character too. The last line needs no line end.
"""

from __future__ import annotations

from turnmill.protocol.errors import MessageTooLarge

LINE_BYTES_MAX = 8 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class NdjsonParser:
    """An incremental parser: `feed` it what the network gives, `close` it at the end."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._is_first_line = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their ends; blank ones are left out. Raises `MessageTooLarge` for a
        line above the limit."""
        first, *rest = chunk.split(b"\n")
        self._hold(first)
        if not rest:
            return []
        lines = [b"".join(self._pieces), *rest[:-1]]
        self._pieces.clear()
        self._held_bytes = 0
        self._hold(rest[-1])
        if self._is_first_line:
            self._is_first_line = False
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        return [stripped for line in lines if (stripped := line.strip(b" \t\r"))]

    def close(self) -> list[bytes]:
        """The last line, where it has no end."""
        return self.feed(b"\n")

    def _hold(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > self._line_bytes_max:
            raise MessageTooLarge(f"a line of the answer is above the limit of {self._line_bytes_max} bytes")
