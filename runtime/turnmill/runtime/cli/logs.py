"""Logging, set up once per process: to stderr, for people or for machines."""

from __future__ import annotations

import os
import sys
from typing import Any

import structlog

from turnmill.protocol.settings import Settings


def configure_logging(settings: Settings, *, quiet: bool = False) -> None:
    """`quiet` is for commands that people watch: warnings only, unless a level was asked for."""
    level = "warning" if quiet and "log_level" not in settings.model_fields_set else settings.log_level
    is_json = settings.log_format == "json"
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if is_json else "%Y-%m-%d %H:%M:%S", utc=is_json),
    ]
    if is_json:
        processors += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(default=str)]
    else:
        processors += [structlog.dev.ConsoleRenderer(colors=wants_colour(), pad_event_to=24)]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def wants_colour() -> bool:
    """A supervisor that shows our lines on a terminal says so with FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()
