"""`turnmill run AGENT TEXT`: start a turn and watch it to its end."""

from __future__ import annotations

import asyncio
import difflib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from . import options
from .exits import CommandError, Exit, say

if TYPE_CHECKING:
    from turnmill.protocol.messages import OnBusy
    from turnmill.protocol.settings import Settings
    from turnmill.protocol.specs import AgentSpec
    from turnmill.workers.app import App

    from ..client import Client
    from ..definitions import TurnOptions
    from ..turn import Turn

AgentName = Annotated[
    str, typer.Argument(metavar="AGENT", help="A published agent, or one of APP.", show_default=False)
]
MessageText = Annotated[
    str, typer.Argument(metavar="TEXT", help="The message; - reads it from stdin.", show_default=False)
]
Session = Annotated[
    str | None, typer.Option("--session", envvar="TURNMILL_SESSION", metavar="S", help="Go on with this session.")
]
MaxSteps = Annotated[int | None, typer.Option("--max-steps", envvar="TURNMILL_MAX_STEPS", min=1, metavar="N")]
Model = Annotated[
    str | None, typer.Option("--model", envvar="TURNMILL_MODEL", metavar="M", help="provider:model, for this turn.")
]
ProviderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        envvar="TURNMILL_OPTION",
        metavar="KEY=VALUE",
        help="An option of the model's provider, such as temperature=0; may be repeated.",
    ),
]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        envvar="TURNMILL_IDEMPOTENCY_KEY",
        metavar="K",
        help="The same key gives the same turn, however often it is asked for.",
    ),
]
Busy = Annotated[
    Literal["queue", "reject", "steer", "interrupt"],
    typer.Option("--on-busy", envvar="TURNMILL_ON_BUSY", help="What to do where a turn is live on the session."),
]
Detach = Annotated[
    bool, typer.Option("--detach", envvar="TURNMILL_DETACH", help="Print the turn's id and do not wait.")
]


class Request(NamedTuple):
    """What was asked for on the command line."""

    agent: str
    text: str
    app: str | None
    session: str | None
    as_json: bool
    max_steps: int | None
    model: str | None
    provider_options: dict[str, Any]
    detach: bool
    timeout: float | None
    idempotency_key: str | None
    on_busy: OnBusy


def run(
    agent: AgentName,
    text: MessageText,
    app: options.AppOption = None,
    session: Session = None,
    as_json: options.Json = False,
    max_steps: MaxSteps = None,
    model: Model = None,
    option: ProviderOptions = None,
    detach: Detach = False,
    timeout: options.Timeout = None,
    idempotency_key: IdempotencyKey = None,
    on_busy: Busy = "queue",
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    text = sys.stdin.read() if text == "-" else text
    given = parse_options(option or [])
    request = Request(
        agent, text, app, session, as_json, max_steps, model, given, detach, timeout, idempotency_key, on_busy
    )
    return run_command(_run(request, command_settings(redis_url, namespace)))


async def _run(request: Request, settings: Settings) -> int:
    from .attachment import serving_client
    from .watching import Watch, view_for

    async with serving_client(settings, request.app, serve=not request.detach) as (client, app):
        spec = await _find_agent(client, request.agent, app)
        turn = await _start(client, request, spec)
        if request.detach:
            sys.stdout.write(f"{turn.id}\n")
            await _say_if_nobody_is_there(client)
            return Exit.OK
        app_again = None if settings.redis_url else request.app
        pool = _pool_of(spec, request.model)
        watch = Watch(client, turn, view_for(request.as_json), app=app_again, pool=pool)
        try:
            async with asyncio.timeout(request.timeout):
                return await watch.follow()
        except TimeoutError:
            say(f"no end after {request.timeout:g} s; the turn goes on: {watch.how_to_go_on()}")
            return Exit.TIMEOUT
        except asyncio.CancelledError:
            say(f"detached; watch it again: {watch.how_to_go_on()}")
            raise


def _pool_of(spec: AgentSpec, model: str | None) -> str:
    import msgspec

    from turnmill.protocol.specs import Plan

    return Plan(agent=spec if model is None else msgspec.structs.replace(spec, model=model)).pool


async def _start(client: Client, request: Request, spec: AgentSpec) -> Turn:
    """Start the turn. A refusal names the turn that the session is busy with."""
    from turnmill.protocol.errors import CommandRefusedError, IdempotencyConflictError
    from turnmill.protocol.specs import content_hash

    from .hints import Hints
    from .lookup import live_turn_of

    # By its version: a coordinator may remember for a moment what the bare name meant before.
    reference = f"{spec.name}@{content_hash(spec)}"
    try:
        async with Hints(client):
            return await client.turn(
                reference,
                request.text,
                session=request.session,
                options=_turn_options(request, spec),
                on_busy=request.on_busy,
                idempotency_key=request.idempotency_key,
            )
    except IdempotencyConflictError:
        raise
    except CommandRefusedError as error:
        if request.session is not None:
            error.turn_id = await live_turn_of(client, request.session) or error.turn_id
        raise


async def _find_agent(client: Client, name: str, app: App | None) -> AgentSpec:
    """The agent's definition, or an error that names those there are."""
    import msgspec

    from turnmill.protocol.connection import pairs
    from turnmill.protocol.specs import AgentSpec

    if app is not None and name in app.agent_specs:
        return app.agent_specs[name]
    published = pairs(await client.engine.call("HGETALL", client.keys.agents))
    version = published.get(name.encode(), b"").decode()
    body = published.get((f"{name}@{version}" if version else name).encode())
    if body is not None and (version or "@" in name):
        return msgspec.json.decode(body, type=AgentSpec)
    known = sorted(field.decode() for field in published if b"@" not in field)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"published are: {', '.join(known) or 'none'}"
    raise CommandError(
        f"no agent {name!r} in the namespace {client.keys.prefix!r}; {hint} "
        "(`--app APP` or `turnmill worker tools APP` publishes an app's agents)"
    )


def _turn_options(request: Request, spec: AgentSpec) -> TurnOptions:
    from ..definitions import TurnOptions

    provider_options = None
    if request.provider_options:
        provider = (request.model or spec.model).partition(":")[0]
        merged = {**spec.provider_options.get(provider, {}), **request.provider_options}
        provider_options = {**spec.provider_options, provider: merged}
    return TurnOptions(model=request.model, max_steps=request.max_steps, provider_options=provider_options)


def parse_options(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE, where VALUE is JSON if it can be read as such, else text."""
    import msgspec

    parsed: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise CommandError(f"--option {item!r}: write KEY=VALUE, such as temperature=0")
        try:
            parsed[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            parsed[key] = value
    return parsed


async def _say_if_nobody_is_there(client: Client) -> None:
    from ..fleet import read_fleet

    fleet = await read_fleet(client.engine, client.keys, client.settings)
    for line in fleet.missing():
        say(f"the turn waits: {line}")
