"""`turnmill dead ls | show | replay | drop`: messages that nobody could decide on, and what to do with them."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..client import Client
    from ..dead_letters import Change, DeadLetter

LetterArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A letter's id, as `dead ls` prints it.", show_default=False)
]
LetterArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="As `dead ls` prints them.", show_default=False)
]
Limit = Annotated[int, typer.Option("--limit", envvar="TURNMILL_LIMIT", min=1, max=10_000, metavar="N")]
Reason = Annotated[
    str | None,
    typer.Option("--reason", envvar="TURNMILL_REASON", metavar="TEXT", help="Only those whose reason contains it."),
]
All = Annotated[bool, typer.Option("--all", envvar="TURNMILL_ALL", help="All that are there now.")]
Raw = Annotated[
    bool, typer.Option("--raw", envvar="TURNMILL_RAW", help="The original bytes of the body, nothing else.")
]
_HEX_BYTES_MAX = 512
_REASON_LENGTH = 80


def list_letters(
    limit: Limit = 20,
    reason: Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_list(command_settings(redis_url, namespace), limit, reason, as_json))


async def _list(settings: Settings, limit: int, reason: str | None, as_json: bool) -> int:
    import msgspec

    from ..dead_letters import count_letters, list_letters
    from .attachment import attached_client
    from .wording import table_lines

    async with attached_client(settings) as client:
        letters = await list_letters(client.engine, client.keys, limit=limit, reason=reason)
        total = await count_letters(client.engine, client.keys)
    if as_json:
        lines = [msgspec.json.encode(_fields(letter)).decode() for letter in letters]
    else:
        head = ["LETTER", "AGE", "FROM", "TYPE", "BYTES", "ATTEMPTS", "REASON"]
        lines = list(table_lines([head, *map(_row, letters)]))
    for line in lines:
        sys.stdout.write(line + "\n")
    if len(letters) == limit and total > limit:
        say(f"the newest {limit} of {total}; --limit shows more")
    return Exit.OK


def _row(letter: DeadLetter) -> list[str]:
    from .listing import age_text
    from .wording import clean, shortened

    cells = [
        letter.id,
        age_text(time.time() - letter.at),
        letter.queue,
        shortened(letter.type, 30) or "-",
        str(letter.body_bytes),
        str(letter.attempts),
        shortened(letter.reason, _REASON_LENGTH),
    ]
    return [clean(cell) for cell in cells]


def _fields(letter: DeadLetter) -> dict[str, Any]:
    """For `--json`: `body` is text where it is UTF-8, else `body_base64`; a listed one may be cut."""
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(letter)
    try:
        built["body"] = letter.body.decode()
    except UnicodeDecodeError:
        built["body_base64"] = built.pop("body")
    built["body_is_whole"] = letter.is_whole
    return built


def show(
    letter: LetterArgument,
    raw: Raw = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    return run_command(_show(command_settings(redis_url, namespace), letter, raw, as_json))


async def _show(settings: Settings, letter_id: str, raw: bool, as_json: bool) -> int:
    import msgspec

    from ..dead_letters import read_letters
    from .attachment import attached_client

    async with attached_client(settings) as client:
        found = await read_letters(client.engine, client.keys, _checked(client, [letter_id]))
    if not found:
        raise CommandError(f"there is no dead letter {letter_id}: it was replayed or dropped; `turnmill dead ls`")
    letter = found[0]
    if raw:
        sys.stdout.flush()
        sys.stdout.buffer.write(letter.body)
        return Exit.OK
    lines = [msgspec.json.encode(_fields(letter)).decode()] if as_json else _description(letter)
    for line in lines:
        sys.stdout.write(line + "\n")
    return Exit.OK


def _description(letter: DeadLetter) -> Iterator[str]:
    from .lookup import date_text
    from .wording import clean

    facts = {
        "letter": letter.id,
        "reason": letter.reason,
        "from": f"{letter.queue} of partition {letter.partition}, entry {letter.entry_id or 'unknown'}",
        "given up": f"{date_text(letter.at)}, after {letter.attempts} {'delivery' if letter.attempts == 1 else 'deliveries'}",
        "type": letter.type or "none",
        "body": f"{letter.body_bytes} bytes",
    }
    facts |= {f"field {name}": repr(value)[2:-1] for name, value in letter.fields.items()}
    if letter.displaced is not None:
        facts["kept as"] = letter.displaced
    width = max(map(len, facts))
    for name, value in facts.items():
        yield clean(f"{name:{width}}  {' '.join(value.split())}")
    yield ""
    yield from body_lines(letter.body)
    yield ""
    if letter.obstacle is None:
        yield f"put it back: `turnmill dead replay {letter.id}`; delete it: `turnmill dead drop {letter.id}`"
    else:
        yield f"it cannot be put back: {letter.obstacle}; delete it: `turnmill dead drop {letter.id}`"


def body_lines(body: bytes) -> Iterator[str]:
    """Decoded where it is JSON or MessagePack, as text where it is text, else as a hexdump."""
    import msgspec

    from turnmill.protocol.codec import is_msgpack

    from .wording import clean

    if not body:
        yield "(empty)"
        return
    try:
        value = msgspec.msgpack.decode(body) if is_msgpack(body) else msgspec.json.decode(body)
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=repr), indent=2).decode()
    except (ValueError, TypeError, RecursionError):
        try:
            text = body.decode()
        except UnicodeDecodeError:
            yield from _hexdump(body)
            return
    yield from clean(text).split("\n")


def _hexdump(body: bytes) -> Iterator[str]:
    for start in range(0, min(len(body), _HEX_BYTES_MAX), 16):
        row = body[start : start + 16]
        printable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{start:08x}  {row.hex(' '):47}  {printable}"
    if len(body) > _HEX_BYTES_MAX:
        yield f"... {len(body) - _HEX_BYTES_MAX} bytes more: --raw writes them all"


def replay(
    letters: LetterArguments = None,
    every: All = False,
    reason: Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from ..dead_letters import REPLAYED, replay_letters
    from .attachment import command_settings, run_command

    settings = command_settings(redis_url, namespace)
    return run_command(_change(settings, replay_letters, REPLAYED, letters or [], every, reason, as_json))


def drop(
    letters: LetterArguments = None,
    every: All = False,
    reason: Reason = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from ..dead_letters import DROPPED, drop_letters
    from .attachment import command_settings, run_command

    settings = command_settings(redis_url, namespace)
    return run_command(_change(settings, drop_letters, DROPPED, letters or [], every, reason, as_json))


async def _change(
    settings: Settings, change: Change, done: str, ids: list[str], every: bool, reason: str | None, as_json: bool
) -> int:
    """Exit code 0 where each letter that was named was changed by this command, else 2."""
    from .attachment import attached_client

    if every == bool(ids) or (reason is not None and not every):
        raise CommandError("write the ids of letters, or --all, with --reason TEXT for some of them")
    counts = {"done": 0, "not": 0}
    async with attached_client(settings) as client:
        async for page in _chosen(client, ids, reason):
            for letter_id, outcome in (await change(client.engine, client.keys, page)).items():
                counts["done" if outcome == done else "not"] += 1
                _write(letter_id, outcome, as_json)
    if every and not as_json:
        left = f", {counts['not']} left" if counts["not"] else ""
        sys.stdout.write(f"{counts['done']} {done}{left}\n")
    return Exit.USAGE if counts["not"] and not every else Exit.OK


async def _chosen(client: Client, ids: list[str], reason: str | None) -> AsyncIterator[Sequence[str]]:
    from ..dead_letters import letter_pages

    if ids:
        yield _checked(client, ids)
        return
    async for page in letter_pages(client.engine, client.keys, reason):
        yield page


def _checked(client: Client, ids: list[str]) -> list[str]:
    from ..dead_letters import check_name

    try:
        for letter_id in ids:
            check_name(client.keys, letter_id)
    except ValueError as error:
        raise CommandError(f"{error}; `turnmill dead ls` lists them") from error
    return list(dict.fromkeys(ids))


def _write(letter_id: str, outcome: str, as_json: bool) -> None:
    import msgspec

    line = msgspec.json.encode({"id": letter_id, "outcome": outcome}).decode() if as_json else f"{letter_id} {outcome}"
    sys.stdout.write(line + "\n")
