"""Which command comes next: for a turn that waits, and after a command that was refused. With the real ids, to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnmill.protocol.content import ErrorInfo
    from turnmill.protocol.errors import CommandRefusedError


def after_suspension(
    turn_id: str,
    pending: Sequence[str],
    approvals: Sequence[str],
    error: ErrorInfo | None = None,
    more: str = "",
) -> Iterator[str]:
    """One line for each thing that a suspended turn waits for. `more` are further options of the command."""
    if error is not None:
        yield f"the provider call failed; `turnmill resume {turn_id}{more}` repeats it"
    elif pending:
        yield f"give the results: `{resume_command(turn_id, pending)}{more}`"
    if approvals:
        yield f"decide: `{decide_command('approve', turn_id, approvals)}{more}`, or `turnmill deny {turn_id} ...{more}`"


def resume_command(turn_id: str, pending: Sequence[str]) -> str:
    results = " ".join(f"--result {shlex.quote(call_id)}=@FILE" for call_id in pending)
    return f"turnmill resume {turn_id} {results}"


def decide_command(word: str, turn_id: str, approvals: Sequence[str]) -> str:
    return f"turnmill {word} {turn_id} {' '.join(shlex.quote(call_id) for call_id in approvals)}"


def after_refusal(error: CommandRefusedError) -> str | None:
    """The command that fits in place of a refused one; None where its message says all."""
    from turnmill.protocol.errors import ErrorKind

    turn_id = error.turn_id
    if not turn_id:
        return None
    match error.kind:
        case ErrorKind.APPROVAL_REQUIRED | ErrorKind.NO_PENDING_APPROVAL if error.pending:
            return decide_command("approve", turn_id, error.pending)
        case ErrorKind.TOOL_RESULTS_REQUIRED | ErrorKind.UNKNOWN_TOOL_RESULT if error.pending:
            return resume_command(turn_id, error.pending)
        case ErrorKind.SESSION_BUSY | ErrorKind.STEERING_FULL:
            return f"turnmill tail {turn_id}"
        case _:
            return f"turnmill show {turn_id}"
