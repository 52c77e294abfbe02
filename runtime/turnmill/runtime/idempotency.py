"""One turn for one key, however often and through whatever process it is asked for.

The key's record holds the turn's id and a fingerprint of the body, and is written before the command. Whoever comes
again takes the id from there, and may send the command once more: the coordinator knows the turn by its id. So a caller
that died between the two leaves nothing that its next try could not finish.
"""

from __future__ import annotations

import hashlib

import msgspec

from turnmill.protocol.connection import Engine
from turnmill.protocol.errors import DefinitionError, ErrorKind, IdempotencyConflictError
from turnmill.protocol.keys import PartitionKeys, is_blob_name
from turnmill.protocol.messages import StartTurn

KEY_CHARACTERS_MAX = 512


def check_key(idempotency_key: object) -> None:
    """Raises `DefinitionError` for what is no idempotency key."""
    if not isinstance(idempotency_key, str) or not 0 < len(idempotency_key) <= KEY_CHARACTERS_MAX:
        raise DefinitionError(f"an idempotency key is a text of 1 to {KEY_CHARACTERS_MAX} characters")
    try:
        idempotency_key.encode()
    except UnicodeEncodeError as error:
        raise DefinitionError(f"the idempotency key {idempotency_key!r} is no text: {error}") from error


async def claim_turn(
    engine: Engine, keys: PartitionKeys, command: StartTurn, idempotency_key: str, lifetime_seconds: int
) -> StartTurn:
    """The command with the id of the turn that the key stands for: its own, if nobody used the key on this session before.
    Raises `IdempotencyConflictError` where it was used with another body."""
    name = keys.idempotency(command.session_id, idempotency_key)
    command = msgspec.structs.replace(command, idempotency=name.removeprefix(keys.base))
    fingerprint = _fingerprint(command)
    record = f"{command.turn_id} {fingerprint}"
    before: bytes | None = await engine.call("SET", name, record, "NX", "GET", "PX", lifetime_seconds * 1000)
    if before is None:
        return command
    turn_id, _, known = before.decode().partition(" ")
    if known != fingerprint:
        raise IdempotencyConflictError(
            f"the idempotency key {idempotency_key!r} stands for turn {turn_id}, which was started with another body",
            kind=ErrorKind.IDEMPOTENCY_CONFLICT,
            turn_id=turn_id,
        )
    return msgspec.structs.replace(command, turn_id=turn_id)


def _fingerprint(command: StartTurn) -> str:
    """Of what the caller said. The agent counts by name: a deployment between two tries does not make another body.
    Large parts count by their size, because each try stores them under another name."""
    said = msgspec.to_builtins(
        [command.agent.partition("@")[0], command.messages, command.overrides, command.metadata, command.on_busy]
    )
    return hashlib.blake2b(msgspec.json.encode(_without_names(said), order="sorted"), digest_size=16).hexdigest()


def _without_names(value: object) -> object:
    if isinstance(value, dict):
        if value.keys() >= {"key", "bytes"} and is_blob_name(str(value["key"])):
            return {name: item for name, item in value.items() if name != "key"}
        return {name: _without_names(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_names(item) for item in value]
    return value
