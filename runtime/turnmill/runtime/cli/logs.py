"""Logging, set up once per process: to stderr, for people or for machines."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog

from turnmill.protocol.logs import FIELDS
from turnmill.protocol.settings import Settings


def configure_logging(settings: Settings, *, quiet: bool = False) -> None:
    """`quiet` is for commands that people watch: warnings only, unless a level was asked for."""
    level = "warning" if quiet and "log_level" not in settings.model_fields_set else settings.log_level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(is_json=settings.log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("turnmill").setLevel(level.upper())


class _Formatter(logging.Formatter):
    """Renders our records with their fields, and other libraries' records as their text."""

    def __init__(self, *, is_json: bool) -> None:
        super().__init__()
        self._stamp = structlog.processors.TimeStamper(fmt="iso" if is_json else "%Y-%m-%d %H:%M:%S", utc=is_json)
        self._before: list[Any] = [structlog.processors.dict_tracebacks] if is_json else []
        self._render: Any = (
            structlog.processors.JSONRenderer(default=str)
            if is_json
            else structlog.dev.ConsoleRenderer(
                colors=wants_colour(), pad_event_to=24, exception_formatter=structlog.dev.plain_traceback
            )
        )

    def format(self, record: logging.LogRecord) -> str:
        fields: Any = dict(getattr(record, FIELDS, None) or {"event": record.getMessage(), "logger": record.name})
        fields["level"] = record.levelname.lower()
        fields = self._stamp(None, "", fields)
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        for processor in self._before:
            fields = processor(None, "", fields)
        return str(self._render(None, "", fields))


def wants_colour() -> bool:
    """A supervisor that shows our lines on a terminal says so with FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()
