"""The runtime's front door: define agents, connect, start and watch turns.

Names are loaded when they are first used, so that the command line, which lives in this package, answers `--help` at
once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnmill.protocol.abort_signal import AbortSignal
    from turnmill.protocol.content import Cost, FilePart, ImagePart, Message, TextPart, ToolCall, ToolResult
    from turnmill.protocol.errors import (
        CommandRefusedError,
        ConfigurationError,
        DefinitionError,
        ErrorKind,
        IdempotencyConflictError,
        NotInConversationError,
        SessionBusyError,
        TurnAbortedError,
        TurnEndedError,
        TurnError,
        TurnFailedError,
        TurnLostError,
        TurnmillError,
    )
    from turnmill.protocol.specs import (
        Approval,
        Compaction,
        HookSpec,
        OutputSpec,
        Reasoning,
        RetryPolicy,
        StopCondition,
    )
    from turnmill.protocol.step_results import StepResult

    from .blocking import connect_sync
    from .client import Client, connect
    from .dead_letters import DeadLetter
    from .definitions import Agent, AgentHooks, TurnOptions, has_tool_call, step_count_is
    from .results import TurnResult
    from .sub_turns import SubTurnEvent
    from .tool_definitions import HostTool, handoff_to
    from .turn import Turn

__all__ = [
    "AbortSignal",
    "Agent",
    "AgentHooks",
    "Approval",
    "Client",
    "CommandRefusedError",
    "Compaction",
    "ConfigurationError",
    "Cost",
    "DeadLetter",
    "DefinitionError",
    "ErrorKind",
    "FilePart",
    "HookSpec",
    "HostTool",
    "IdempotencyConflictError",
    "ImagePart",
    "Message",
    "NotInConversationError",
    "OutputSpec",
    "Reasoning",
    "RetryPolicy",
    "SessionBusyError",
    "StepResult",
    "StopCondition",
    "SubTurnEvent",
    "TextPart",
    "ToolCall",
    "ToolResult",
    "Turn",
    "TurnAbortedError",
    "TurnEndedError",
    "TurnError",
    "TurnFailedError",
    "TurnLostError",
    "TurnOptions",
    "TurnResult",
    "TurnmillError",
    "connect",
    "connect_sync",
    "handoff_to",
    "has_tool_call",
    "step_count_is",
]

_PROTOCOL = "turnmill.protocol."
_HOMES = {
    "AbortSignal": _PROTOCOL + "abort_signal",
    "Agent": ".definitions",
    "AgentHooks": ".definitions",
    "Approval": _PROTOCOL + "specs",
    "Client": ".client",
    "CommandRefusedError": _PROTOCOL + "errors",
    "Compaction": _PROTOCOL + "specs",
    "ConfigurationError": _PROTOCOL + "errors",
    "Cost": _PROTOCOL + "content",
    "DeadLetter": ".dead_letters",
    "DefinitionError": _PROTOCOL + "errors",
    "ErrorKind": _PROTOCOL + "errors",
    "FilePart": _PROTOCOL + "content",
    "HookSpec": _PROTOCOL + "specs",
    "HostTool": ".tool_definitions",
    "IdempotencyConflictError": _PROTOCOL + "errors",
    "NotInConversationError": _PROTOCOL + "errors",
    "ImagePart": _PROTOCOL + "content",
    "Message": _PROTOCOL + "content",
    "OutputSpec": _PROTOCOL + "specs",
    "Reasoning": _PROTOCOL + "specs",
    "RetryPolicy": _PROTOCOL + "specs",
    "SessionBusyError": _PROTOCOL + "errors",
    "StepResult": _PROTOCOL + "step_results",
    "StopCondition": _PROTOCOL + "specs",
    "SubTurnEvent": ".sub_turns",
    "TextPart": _PROTOCOL + "content",
    "ToolCall": _PROTOCOL + "content",
    "ToolResult": _PROTOCOL + "content",
    "Turn": ".turn",
    "TurnAbortedError": _PROTOCOL + "errors",
    "TurnEndedError": _PROTOCOL + "errors",
    "TurnError": _PROTOCOL + "errors",
    "TurnFailedError": _PROTOCOL + "errors",
    "TurnLostError": _PROTOCOL + "errors",
    "TurnOptions": ".definitions",
    "TurnResult": ".results",
    "TurnmillError": _PROTOCOL + "errors",
    "connect": ".client",
    "connect_sync": ".blocking",
    "handoff_to": ".tool_definitions",
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
