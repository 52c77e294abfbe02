"""`turnmill ls`: turns, newest first."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import CommandError, Exit

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..inspection import TurnRecord

State = Annotated[
    str | None,
    typer.Option("--state", envvar="TURNMILL_STATE", metavar="STATE", help="queued, running, finished, failed, ..."),
]
AgentName = Annotated[str | None, typer.Option("--agent", envvar="TURNMILL_AGENT", metavar="AGENT")]
Session = Annotated[str | None, typer.Option("--session", envvar="TURNMILL_SESSION", metavar="S")]
Limit = Annotated[int, typer.Option("--limit", envvar="TURNMILL_LIMIT", min=1, max=10_000, metavar="N")]


def list_command(
    state: State = None,
    agent: AgentName = None,
    session: Session = None,
    limit: Limit = 20,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from ..inspection import STATES
    from .attachment import command_settings, run_command

    if state is not None and state not in STATES:
        raise CommandError(f"--state {state!r}: turns are {', '.join(STATES)}")
    settings = command_settings(redis_url, namespace)
    return run_command(_list(settings, state, agent, session, limit, as_json))


async def _list(
    settings: Settings, state: str | None, agent: str | None, session: str | None, limit: int, as_json: bool
) -> int:
    from ..inspection import list_turns
    from .attachment import attached_client

    def wanted(record: TurnRecord) -> bool:
        return (
            state in (None, record.state) and agent in (None, record.agent_id) and session in (None, record.session_id)
        )

    async with attached_client(settings) as client:
        records = await list_turns(client.engine, client.keys, wanted, limit)
    write_turns(records, as_json)
    return Exit.OK


def write_turns(records: list[TurnRecord], as_json: bool) -> None:
    """One line for each: JSON, or a table's row."""
    import msgspec

    from .wording import table_lines

    if as_json:
        lines = [msgspec.json.encode(record.to_dict()).decode() for record in records]
    else:
        head = ["TURN", "STATE", "AGENT", "SESSION", "AGE", "STEPS", "TOKENS", "TIME", "ERROR"]
        lines = list(table_lines([head, *map(_row, records)]))
    for line in lines:
        sys.stdout.write(line + "\n")


def _row(record: TurnRecord) -> list[str]:
    from .wording import clean, seconds_text

    summary = record.summary
    usage = summary.usage if summary else None
    tokens = usage.total_tokens or usage.input_tokens + usage.output_tokens if usage else 0
    return [
        record.turn_id,
        record.state,
        record.agent_id,
        clean(record.session_id),
        age_text(time.time() - record.created_at),
        str(summary.steps) if summary else "",
        str(tokens or ""),
        seconds_text(summary.ended_at - summary.started_at) if summary else "",
        record.error.kind if record.error else "",
    ]


def age_text(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"
