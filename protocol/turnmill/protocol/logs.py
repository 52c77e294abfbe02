"""Loggers: structlog's way of writing, standard logging's way out.

A host that uses Turnmill as a library configures `logging` as it always does, and sees warnings only unless it asks for
more. The command line shows the same records with their fields, for people or as JSON.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

FIELDS = "turnmill"
"""The attribute of a log record that holds its fields as a dict."""


def get_logger(name: str) -> Any:
    """A logger with `info(event, **fields)` and the like."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _as_record],
        cache_logger_on_first_use=True,
    )


def _as_record(_logger: Any, _method: str, fields: Any) -> tuple[tuple[str], dict[str, Any]]:
    event = fields.pop("event")
    options = {name: fields.pop(name) for name in ("exc_info", "stack_info") if name in fields}
    text = " ".join([str(event), *(f"{name}={value!r}" for name, value in fields.items())])
    return (text.replace("%", "%%"),), {**options, "extra": {FIELDS: {"event": event, **fields}}}
