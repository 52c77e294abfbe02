"""The commands of a simulated run as the in-memory engine executed them, for a replay on a real one."""

from __future__ import annotations

import itertools
from typing import Any

import hiredis

from turnmill.protocol.errors import EngineReplyError
from turnmill.protocol.streams import FIRE_TIMERS

from . import streams
from .faults import Profile
from .replies import NULL_ARRAY, encode
from .server import Server, Session
from .world import World

_OF_THE_CONNECTION = frozenset((b"INFO", b"CONFIG", b"CLIENT", b"PING", b"SSUBSCRIBE", b"SUNSUBSCRIBE", b"TIME"))
_OF_THE_CLOCK = frozenset((FIRE_TIMERS._sha.encode(), FIRE_TIMERS.source.encode()))
Recorded = tuple[int, list[bytes], Any]


def recorded(seed: int, profile: Profile) -> list[Recorded]:
    """Each command with its connection and the reply that a client reads; a read that was blocked stands where it
    began and where it was served, without its blocking. What speaks of the connection or asks for the clock is left out."""
    world = World(seed, profile=profile)
    found: list[Recorded] = []
    reply, finish, run = Server._reply, Server._finish_blocked, Server.run_in_script

    def note(session: Session, arguments: list[bytes], answer: Any) -> None:
        name = arguments[0].upper()
        if name in _OF_THE_CONNECTION or (name in (b"EVALSHA", b"EVAL") and arguments[1] in _OF_THE_CLOCK):
            return
        found.append((session.number, _unblocked(arguments), _read(answer)))

    def noted_reply(server: Server, session: Session, arguments: list[bytes]) -> Any:
        answer = reply(server, session, list(arguments))
        note(session, arguments, answer if session.blocked is None else NULL_ARRAY)
        return answer

    def noted_finish(server: Server, session: Session, answer: Any) -> None:
        assert session.blocked is not None
        note(session, [session.blocked.command, *session.blocked.arguments], answer)
        finish(server, session, answer)

    def noted_run(server: Server, name: bytes, arguments: list[bytes]) -> Any:
        """A script that asks for the clock is replayed by what it wrote."""
        answer = run(server, name, arguments)
        if world.invariants.running_script in _OF_THE_CLOCK and name in (b"ZREM", b"XADD"):
            found.append((0, [name, *arguments], _read(answer)))
        return answer

    new_id, numbers = streams._new_id, itertools.count()

    def unequal_id(server: Server, last: streams.Id, wanted: bytes) -> streams.Id:
        """No two streams have an id in common, so that one of the real engine's can stand for each."""
        return (server.now_ms(), next(numbers)) if wanted == b"*" else new_id(server, last, wanted)

    Server._reply, Server._finish_blocked, Server.run_in_script = noted_reply, noted_finish, noted_run  # type: ignore[method-assign]
    streams._new_id = unequal_id
    try:
        world.run()
    finally:
        streams._new_id = new_id
        Server._reply, Server._finish_blocked, Server.run_in_script = reply, finish, run  # type: ignore[method-assign]
    return found


def _unblocked(arguments: list[bytes]) -> list[bytes]:
    if b"BLOCK" not in arguments:
        return arguments
    place = arguments.index(b"BLOCK")
    return [*arguments[:place], *arguments[place + 2 :]]


def _read(answer: Any) -> Any:
    reader = hiredis.Reader(replyError=EngineReplyError)
    reader.feed(encode(answer))
    return reader.gets()
