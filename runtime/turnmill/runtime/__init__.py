"""The runtime's front door: define agents, connect, start and watch turns.

Names are loaded when they are first used, so that the command line, which lives in this package, answers `--help` at
once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnmill.protocol.content import FilePart, ImagePart, Message, TextPart
    from turnmill.protocol.errors import TurnAbortedError, TurnError, TurnFailedError, TurnLostError, TurnmillError
    from turnmill.protocol.specs import RetryPolicy

    from .blocking import connect_sync
    from .client import Client, connect
    from .definitions import Agent, TurnOptions, has_tool_call, step_count_is
    from .results import TurnResult
    from .turn import Turn

__all__ = [
    "Agent",
    "Client",
    "FilePart",
    "ImagePart",
    "Message",
    "RetryPolicy",
    "TextPart",
    "Turn",
    "TurnAbortedError",
    "TurnError",
    "TurnFailedError",
    "TurnLostError",
    "TurnOptions",
    "TurnResult",
    "TurnmillError",
    "connect",
    "connect_sync",
    "has_tool_call",
    "step_count_is",
]

_PROTOCOL = "turnmill.protocol."
_HOMES = {
    "Agent": ".definitions",
    "Client": ".client",
    "FilePart": _PROTOCOL + "content",
    "ImagePart": _PROTOCOL + "content",
    "Message": _PROTOCOL + "content",
    "RetryPolicy": _PROTOCOL + "specs",
    "TextPart": _PROTOCOL + "content",
    "Turn": ".turn",
    "TurnAbortedError": _PROTOCOL + "errors",
    "TurnError": _PROTOCOL + "errors",
    "TurnFailedError": _PROTOCOL + "errors",
    "TurnLostError": _PROTOCOL + "errors",
    "TurnOptions": ".definitions",
    "TurnResult": ".results",
    "TurnmillError": _PROTOCOL + "errors",
    "connect": ".client",
    "connect_sync": ".blocking",
    "has_tool_call": ".definitions",
    "step_count_is": ".definitions",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home, __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
