"""`turnmill resume`: the results that a suspended turn waits for, from files or from the command line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings

    from ..client import Client
    from ..turn import Turn

Results = Annotated[
    list[str] | None,
    typer.Option(
        "--result",
        envvar="TURNMILL_RESULT",
        metavar="CALL_ID=VALUE",
        help="A call's result: JSON or text, or @FILE with it (@- is stdin); may be repeated.",
    ),
]
MessageText = Annotated[
    str | None,
    typer.Option("--message", envvar="TURNMILL_MESSAGE", metavar="TEXT", help="A message behind the results."),
]
WatchIt = Annotated[
    bool, typer.Option("--watch/--detach", envvar="TURNMILL_WATCH", help="Watch the turn to its end or next rest.")
]


class Request(NamedTuple):
    """What was asked for on the command line."""

    turn_id: str
    results: dict[str, Any]
    message: str | None
    watch: bool
    as_json: bool
    timeout: float | None
    app: str | None


def resume(
    turn: options.TurnArgument,
    result: Results = None,
    message: MessageText = None,
    watch: WatchIt = True,
    app: options.AppOption = None,
    as_json: options.Json = False,
    timeout: options.Timeout = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    request = Request(turn, parse_results(result or []), message, watch, as_json, timeout, app)
    return run_command(_resume(request, command_settings(redis_url, namespace)))


def parse_results(given: Sequence[str]) -> dict[str, Any]:
    """`CALL_ID=VALUE` by call id. A value is JSON if it can be read as such, else text; with `@` it stands in a file."""
    results: dict[str, Any] = {}
    for item in given:
        call_id, equals, value = item.partition("=")
        if not equals or not call_id:
            raise CommandError(f"--result {item!r}: write CALL_ID=VALUE or CALL_ID=@FILE")
        if call_id in results:
            raise CommandError(f"--result {call_id} is given twice: a call has one result")
        results[call_id] = _value(_file_text(value[1:]) if value.startswith("@") else value)
    return results


def _value(text: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return text


def _file_text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--result: cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--result: {name} is no text in UTF-8") from error


async def _resume(request: Request, settings: Settings) -> int:
    from .attachment import attached_client, serving_client
    from .hints import Hints
    from .lookup import attached_turn

    async with AsyncExitStack() as stack:
        # With an app it is as with `run`: this process runs what nothing else would.
        if request.app is not None:
            client, _ = await stack.enter_async_context(serving_client(settings, request.app, serve=request.watch))
        else:
            client = await stack.enter_async_context(attached_client(settings))
        turn = attached_turn(client, request.turn_id)
        before = await _last_number(client, turn)
        async with Hints(client):
            pending = await turn.resume(tool_results=request.results, message=request.message)
        if not request.watch:
            _write_pending(turn.id, pending, request.as_json)
            return Exit.OK
        app = None if settings.redis_url else request.app
        return await _watch(client, turn, before, request, app)


async def _last_number(client: Client, turn: Turn) -> int:
    """The newest event so far: what comes behind it is what the results bring about."""
    channel = client.keys.of_turn(turn.id).events(turn.id)
    last = await client.engine.call("XREVRANGE", channel, "+", "-", "COUNT", 1)
    return int(last[0][0].partition(b"-")[2]) if last else 0


def _write_pending(turn_id: str, pending: Sequence[str], as_json: bool) -> None:
    import msgspec

    from .next_commands import resume_command

    if as_json:
        sys.stdout.write(msgspec.json.encode({"turn_id": turn_id, "pending": list(pending)}).decode() + "\n")
    elif pending:
        sys.stdout.write(f"still pending: {', '.join(pending)}\n")
        say(f"go on: `{resume_command(turn_id, pending)}`")
    else:
        sys.stdout.write(f"turn {turn_id} goes on\n")


async def _watch(client: Client, turn: Turn, before: int, request: Request, app: str | None) -> int:
    from .watching import Watch, view_for

    # Results that were there already change nothing: what the turn waits for was said before.
    says_again = await _last_number(client, turn) == before and await turn.status() == "suspended"
    after = max(0, before - 1) if says_again else before
    watch = Watch(client, turn, view_for(request.as_json), after, app=app)
    try:
        async with asyncio.timeout(request.timeout):
            return await watch.follow()
    except TimeoutError:
        say(f"no end after {request.timeout:g} s; the turn goes on: {watch.how_to_go_on()}")
        return Exit.TIMEOUT
    except asyncio.CancelledError:
        say(f"detached; watch it again: {watch.how_to_go_on()}")
        raise
