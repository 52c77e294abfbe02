"""`turnmill session show|fork|delete`: a conversation over all its turns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import CommandError, Exit

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="A session's id.", show_default=False)]
Messages = Annotated[bool, typer.Option("--messages", envvar="TURNMILL_MESSAGES", help="Its transcript.")]
Limit = Annotated[int, typer.Option("--limit", envvar="TURNMILL_LIMIT", min=1, max=10_000, metavar="N")]
Into = Annotated[
    str | None,
    typer.Option("--into", envvar="TURNMILL_INTO", metavar="S", help="The new session's id, below the root's."),
]
UpToTurn = Annotated[
    str | None, typer.Option("--turn", envvar="TURNMILL_TURN", metavar="TURN", help="The last turn to take along.")
]
UpToStep = Annotated[
    int | None, typer.Option("--step", envvar="TURNMILL_STEP", min=1, metavar="N", help="The last step of that turn.")
]


def show(
    session: SessionId,
    messages: Messages = False,
    limit: Limit = 20,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_show(command_settings(redis_url, namespace), session, messages, limit, as_json))


async def _show(settings: Settings, session_id: str, messages: bool, limit: int, as_json: bool) -> int:
    from .attachment import attached_client
    from .listing import write_turns
    from .lookup import checked_session
    from .show import message_lines

    checked_session(session_id)
    async with attached_client(settings) as client:
        session = client.session(session_id)
        if messages:
            for line in message_lines(await session.messages(), as_json):
                sys.stdout.write(line + "\n")
            return Exit.OK
        turns = await session.turns(limit)
        if not turns and not await client.engine.call("EXISTS", client.keys.of_session(session_id).session(session_id)):
            raise CommandError(f"there is no session {session_id!r} in the namespace {client.keys.prefix!r}")
        write_turns(turns, as_json)
    return Exit.OK


def fork(
    session: SessionId,
    into: Into = None,
    turn: UpToTurn = None,
    step: UpToStep = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    if step is not None and turn is None:
        raise CommandError("--step N is a step of a turn: say which with --turn TURN")
    return run_command(_fork(command_settings(redis_url, namespace), session, into, turn, step, as_json))


async def _fork(
    settings: Settings, session_id: str, into: str | None, turn_id: str | None, step: int | None, as_json: bool
) -> int:
    import msgspec

    from .attachment import attached_client
    from .lookup import checked_session

    checked_session(session_id)
    async with attached_client(settings) as client:
        try:
            made = await client.session(session_id).fork(new_id=into, turn=turn_id, step=step)
        except ValueError as error:
            raise CommandError(f"{error}; `turnmill session show {session_id}`") from error
    line = {"session_id": made.id, "forked_from": session_id}
    sys.stdout.write((msgspec.json.encode(line).decode() if as_json else made.id) + "\n")
    return Exit.OK


def delete(
    session: SessionId,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_delete(command_settings(redis_url, namespace), session, as_json))


async def _delete(settings: Settings, session_id: str, as_json: bool) -> int:
    import msgspec

    from .attachment import commanding_client
    from .hints import Hints
    from .lookup import checked_session

    checked_session(session_id)
    async with commanding_client(settings) as client, Hints(client):
        await client.session(session_id).delete()
    done = f"session {session_id} is deleted"
    text = msgspec.json.encode({"session_id": session_id, "deleted": True}).decode() if as_json else done
    sys.stdout.write(text + "\n")
    return Exit.OK
