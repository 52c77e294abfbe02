"""`turnmill provider check MODEL`: what a live endpoint can do, tried as an LLM worker would use it. No engine is needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .exits import CommandError, Exit
from .run import ProviderOptions, parse_options

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings
    from turnmill.workers.provider_check import Tried
    from turnmill.workers.providers.base import ProviderSet

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="provider:model", show_default=False)]
Seconds = Annotated[
    float,
    typer.Option("--timeout", envvar="TURNMILL_TIMEOUT", min=0.1, metavar="SECONDS", help="For each feature."),
]
_WIDTHS = (17, 11, 7)
_SEEN_LENGTH_MAX = 300


def check(
    model: ModelArgument,
    app: options.AppOption = None,
    option: ProviderOptions = None,
    timeout: Seconds = 60.0,
    as_json: options.Json = False,
) -> int:
    """Exit code 0 when the model answers with text, 1 when it does not, 2 when no such provider is configured."""
    from .attachment import command_settings, run_command

    given = parse_options(option or [])
    return run_command(_check(command_settings(None, None), model, app, given, timeout, as_json))


async def _check(
    settings: Settings, model: str, app: str | None, given: dict[str, Any], timeout: float, as_json: bool
) -> int:
    from turnmill.workers.app import load_app

    from ..roles import open_providers

    providers = open_providers(settings, load_app(app) if app else None)
    try:
        return await _try_all(settings, providers, model, given, timeout, as_json)
    finally:
        await providers.close()


async def _try_all(
    settings: Settings, providers: ProviderSet, model: str, given: dict[str, Any], timeout: float, as_json: bool
) -> int:
    """A line for each feature as soon as it was tried: a slow model takes its time."""
    import msgspec

    from turnmill.workers.provider_check import TEXT, check_provider
    from turnmill.workers.providers.capabilities import KnownModels

    from .provider_listing import capabilities_text

    prefix, _, name = model.partition(":")
    provider = providers.get(prefix)
    if provider is None or not name:
        raise CommandError(
            f"no provider for the model {model!r}: write provider:model; this environment has "
            f"{', '.join(providers.names)} (others need their key, or a table [providers.<name>] in turnmill.toml)"
        )
    known = KnownModels.from_settings(settings).of(model)
    if not as_json:
        _write(f"{model}  {capabilities_text(known)}".rstrip(), *_row("FEATURE", "RESULT", "SECONDS", "SEEN"))
    code = Exit.FAILED
    async for tried in check_provider(provider, name, given, timeout):
        if tried.feature == TEXT and tried.status == "ok":
            code = Exit.OK
        if as_json:
            fields = {"model": model, **msgspec.to_builtins(tried), "capabilities": msgspec.to_builtins(known)}
            _write(msgspec.json.encode(fields).decode())
        else:
            _write(*_row_of(tried))
    return code


def _row_of(tried: Tried) -> list[str]:
    from .wording import clean, shortened

    seen = shortened(clean(tried.seen), _SEEN_LENGTH_MAX)
    return _row(tried.feature, tried.status, f"{tried.seconds:.2f}", seen)


def _row(*cells: str) -> list[str]:
    *first, last = cells
    columns = [f"{cell:{width}}" for cell, width in zip(first, _WIDTHS, strict=True)]
    return ["  ".join([*columns, last]).rstrip()]


def _write(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
