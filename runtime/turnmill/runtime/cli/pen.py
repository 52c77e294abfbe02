"""Where the lines of a transcript go. Several turns may write to one screen; only one of them has a line open."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .wording import clean


class Pen:
    """Writes lines, and text as it comes. Failures go to `errors`, so that they are seen where the output is not."""

    def __init__(self, console: Console | None = None, errors: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._errors = errors or Console(stderr=True, soft_wrap=True, highlight=False)
        self._open_for: str | None = None

    def text(self, margin: str, text: str, style: str = "") -> None:
        """Go on with the open line; one that stands at another margin is ended first."""
        text = clean(text)
        if not text:
            return
        if self._open_for != margin:
            self.end_line()
            text = margin + text
        ends_line = text.endswith("\n")
        body = text.removesuffix("\n").replace("\n", "\n" + margin) + ("\n" if ends_line else "")
        self._console.print(Text(body, style=style), end="")
        self._console.file.flush()
        self._open_for = None if ends_line else margin

    def line(self, margin: str, text: str, style: str, *, is_failure: bool = False) -> None:
        self.end_line()
        console = self._errors if is_failure else self._console
        console.print(Text(margin + " ".join(clean(text).split("\n")), style=style))
        console.file.flush()

    def end_line(self) -> None:
        if self._open_for is not None:
            self._console.print()
            self._open_for = None
