"""The runtime's front door: define agents, connect, start and watch turns."""

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
