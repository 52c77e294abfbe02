"""What several commands need to find a turn, and to say when it was."""

from __future__ import annotations

import time

from turnmill.protocol.connection import Engine
from turnmill.protocol.keys import Keys, PartitionKeys, valid_session_id

from ..client import Client
from ..inspection import TurnRecord, read_record, turns_of_session
from ..turn import Turn
from .exits import CommandError


def checked_keys(keys: Keys, turn_id: str) -> PartitionKeys:
    """The keys of the turn's partition, or a clear error for what is no turn id."""
    try:
        return keys.of_turn(turn_id)
    except ValueError as error:
        raise CommandError(f"{error}; `turnmill ls` lists them") from error


def attached_turn(client: Client, turn_id: str) -> Turn:
    """The handle of a turn, or a clear error for what is no turn id."""
    checked_keys(client.keys, turn_id)
    return client.attach(turn_id)


async def live_turn_of(client: Client, session_id: str) -> str | None:
    """The turn that a session is busy with."""
    records = await turns_of_session(client.engine, client.keys, session_id)
    return next((record.turn_id for record in records if record.state in ("running", "suspended")), None)


def checked_session(session_id: str) -> None:
    if not valid_session_id(session_id):
        raise CommandError(f"{session_id!r} is no session id: up to 256 characters without white space or braces")


async def known_record(engine: Engine, keys: Keys, turn_id: str) -> TurnRecord:
    checked_keys(keys, turn_id)
    record = await read_record(engine, keys, turn_id)
    if record is None:
        raise CommandError(
            f"nothing is known of turn {turn_id}: it expired (TURNMILL_RECORD_TTL), was not accepted yet, or belongs to "
            f"another namespace than {keys.prefix!r}"
        )
    return record


def clock_text(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def date_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
