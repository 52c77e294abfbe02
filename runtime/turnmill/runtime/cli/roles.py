"""`turnmill coordinator`, `turnmill worker llm|tools`: the processes of a deployment, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options

Pools = Annotated[
    list[str] | None,
    typer.Option("--pool", envvar="TURNMILL_POOL", metavar="P", help="A pool of models to serve; may be repeated."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", envvar="TURNMILL_QUEUE", metavar="Q", help="Serve only this queue; may be repeated."),
]


def coordinator(redis_url: options.RedisUrl = None, namespace: options.Namespace = None) -> int:
    from ..roles import run_coordinator
    from .attachment import command_settings, run_command

    return run_command(run_coordinator(command_settings(redis_url, namespace, quiet=False)))


def llm(
    app: options.OptionalAppArgument = None,
    concurrency: options.Concurrency = None,
    pool: Pools = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from ..roles import run_llm_worker
    from .attachment import command_settings, run_command

    settings = command_settings(redis_url, namespace, quiet=False)
    return run_command(run_llm_worker(settings, app, _names("--pool", pool), concurrency))


def tools(
    app: options.AppArgument,
    queue: Queues = None,
    concurrency: options.Concurrency = None,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from ..roles import run_tool_worker
    from .attachment import command_settings, run_command

    settings = command_settings(redis_url, namespace, quiet=False)
    return run_command(run_tool_worker(settings, app, _names("--queue", queue), concurrency))


def _names(option: str, given: list[str] | None) -> list[str]:
    from turnmill.protocol.errors import ConfigurationError
    from turnmill.protocol.keys import valid_name

    for name in given or []:
        if not valid_name(name):
            raise ConfigurationError(f"{option} {name!r}: 1 to 128 letters, digits and _ . : @ -")
    return list(given or [])
