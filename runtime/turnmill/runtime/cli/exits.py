"""Exit codes, and the one line that says why."""

from __future__ import annotations

import os
import sys
import traceback
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnmill.protocol.errors import CommandRefusedError

PREFIX = "turnmill: "


class Exit(IntEnum):
    """What a caller can rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    TIMEOUT = 3
    UNREACHABLE = 4
    SUSPENDED = 5


class CommandError(Exception):
    """Ends a command with a line and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


def say(line: str) -> None:
    """One line to whoever watches, beside the command's output."""
    sys.stderr.write(f"{PREFIX}{line}\n")
    sys.stderr.flush()


def explain(error: BaseException) -> int:
    """Print what went wrong and return the exit code. A traceback is only for `TURNMILL_LOG_LEVEL=debug`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else Exit.USAGE
    if isinstance(error, KeyboardInterrupt):
        return Exit.USAGE
    code = _click_code(error)
    if code is not None:
        return code
    code, line = _meaning(error)
    say(" ".join(line.split()))
    if os.environ.get("TURNMILL_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exception(error)
    return code


def _click_code(error: BaseException) -> int | None:
    """What the option parser raises knows how to show itself; None for anything else."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if isinstance(code, int):
        if show is not None:
            show()
        return code
    return Exit.USAGE if type(error).__name__ == "Abort" else None


def _refusal_text(error: CommandRefusedError) -> str:
    from .next_commands import after_refusal

    text, command = str(error), after_refusal(error)
    return f"refused ({error.kind}): {text}" + (f"; `{command}`" if command else "")


def _meaning(error: BaseException) -> tuple[Exit, str]:
    from turnmill.protocol.errors import (
        CodecError,
        CommandRefusedError,
        ConfigurationError,
        DefinitionError,
        EngineError,
        NotInConversationError,
        TurnAbortedError,
        TurnFailedError,
        TurnLostError,
    )

    match error:
        case CommandError():
            return error.code, str(error)
        case CommandRefusedError():
            return Exit.USAGE, _refusal_text(error)
        case ConfigurationError() | DefinitionError() | CodecError() | TurnLostError() | NotInConversationError():
            return Exit.USAGE, str(error)
        case EngineError():
            return Exit.UNREACHABLE, str(error)
        case TurnAbortedError():
            return Exit.USAGE, str(error)
        case TurnFailedError():
            return Exit.FAILED, str(error)
        case TimeoutError():
            return Exit.TIMEOUT, str(error) or "no answer in time"
        case _:
            hint = "set TURNMILL_LOG_LEVEL=debug to see where"
            return Exit.FAILED, f"unexpected {type(error).__name__}: {error} ({hint})"
