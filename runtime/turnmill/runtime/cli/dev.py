"""`turnmill dev APP`: coordinator, LLM worker and tool worker as processes, on the embedded server, with reload."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options

if TYPE_CHECKING:
    from turnmill.protocol.settings import Settings
    from turnmill.workers.app import App

    from ..supervisor import RoleCommand, Supervisor

Reload = Annotated[
    bool, typer.Option("--reload/--no-reload", envvar="TURNMILL_RELOAD", help="Start workers again on changes.")
]
_COLOURS = {"coordinator": "34", "llm": "35", "tools": "32", "dev": "36"}
_NAME_WIDTH = 11


def dev(
    app: options.AppArgument,
    reload: Reload = True,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from turnmill.workers.app import load_app

    from .attachment import command_settings, run_command

    settings = command_settings(redis_url, namespace)
    loaded = load_app(app)
    return run_command(_dev(settings, app, loaded, reload))


def roles_for(app: str) -> list[RoleCommand]:
    """The processes of a small deployment."""
    from ..supervisor import RoleCommand

    return [
        RoleCommand("coordinator", ["coordinator"]),
        RoleCommand("llm", ["worker", "llm", app], has_app=True),
        RoleCommand("tools", ["worker", "tools", app], has_app=True),
    ]


def role_environment(settings: Settings, url: str) -> dict[str, str]:
    """What the processes inherit, and where their engine is."""
    environment = {**os.environ, "TURNMILL_REDIS_URL": url, "TURNMILL_NAMESPACE": settings.namespace}
    for name in ("TURNMILL_APP", "TURNMILL_CONCURRENCY", "TURNMILL_QUEUE", "TURNMILL_POOL"):
        environment.pop(name, None)
    return environment


async def _dev(settings: Settings, target: str, app: App, reload: bool) -> int:
    from ..supervisor import Supervisor
    from .attachment import kept_server

    stop = asyncio.Event()
    async with kept_server(settings) as url:
        printer = _Printer(settings.log_format == "json")
        watched = _watched_directory(target) if reload and _can_watch(printer) else None
        environment = role_environment(settings, url)
        if printer.has_colour:
            environment["FORCE_COLOR"] = "1"
        supervisor = Supervisor(
            roles_for(target),
            environment,
            drain_seconds=settings.drain_timeout,
            on_line=printer.line,
            on_notice=printer.notice,
            waits_for_change=watched is not None,
        )
        _stop_on_signals(stop, supervisor)
        printer.block(settings, url, app, watched)
        watching = asyncio.create_task(_reload_on_change(supervisor, watched, stop, printer))
        try:
            await supervisor.start()
            await stop.wait()
            printer.notice("dev", "stopping; once more ends everything at once")
        finally:
            stop.set()
            await supervisor.stop()
            await asyncio.gather(watching, return_exceptions=True)
    printer.notice("dev", "stopped")
    return 0


def _stop_on_signals(stop: asyncio.Event, supervisor: Supervisor) -> None:
    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


# ---- reload


def _can_watch(printer: _Printer) -> bool:
    from importlib.util import find_spec

    if find_spec("watchfiles") is not None:
        return True
    printer.notice("dev", "no reload: it needs `pip install turnmill[embedded]`")
    return False


def _watched_directory(target: str) -> Path:
    """The folder of the application's file; for a module, the working directory."""
    source = target if target.endswith(".py") else target.rpartition(":")[0]
    return Path(source).resolve().parent if source.endswith(".py") else Path.cwd()


async def _reload_on_change(
    supervisor: Supervisor, directory: Path | None, stop: asyncio.Event, printer: _Printer
) -> None:
    if directory is None:
        return
    from watchfiles import PythonFilter, awatch

    async for changes in awatch(directory, watch_filter=PythonFilter(), stop_event=stop, debounce=200):
        names = sorted({Path(path).name for _, path in changes})
        printer.notice("dev", f"changed: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
        await supervisor.reload()


# ---- output


class _Printer:
    """Lines of the roles, each with its role's name in a colour of its own."""

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self.has_colour = not is_json and not os.environ.get("NO_COLOR") and sys.stderr.isatty()

    def line(self, name: str, text: str) -> None:
        self._write(text if self._is_json else f"{self._prefix(name)}{text}")

    def notice(self, name: str, text: str) -> None:
        """What happens to a role, or to all of it; beside lines of JSON it is one, too."""
        if self._is_json:
            import msgspec

            self._write(msgspec.json.encode({"event": text, "role": name, "level": "info"}).decode())
        else:
            self._write(f"{self._prefix(name)}{text}")

    def block(self, settings: Settings, url: str, app: App, watched: Path | None) -> None:
        """What there is and how to use it, once at the start."""
        from turnmill.protocol.settings import mask_url

        agents = sorted(app.agent_specs)
        where = "" if settings.redis_url is None else f" --redis-url {mask_url(url)}"
        space = "" if settings.namespace == "tm" else f" --namespace {settings.namespace}"
        rows = [
            ("engine", f"{mask_url(url)}" + ("" if where else f"  (embedded, data in {settings.data_dir})")),
            ("agents", ", ".join(agents) or "none: define an Agent in the app"),
            ("tools", ", ".join(sorted(app.tools)) or "none"),
            ("reload", f"on changes in {watched}" if watched else "off"),
            (
                "run",
                f'turnmill run{where}{space} {agents[0] if agents else "AGENT"} "..."   (from another terminal here)',
            ),
            ("watch", f"turnmill tail{where}{space} --all"),
            ("stop", "Ctrl-C"),
        ]
        if self._is_json:
            self.notice("dev", "; ".join(f"{name}: {text}" for name, text in rows))
            return
        self._write("")
        for name, text in rows:
            self._write(f"  {self._paint(f'{name:8}', '1')}{text}")
        self._write("")

    def _prefix(self, name: str) -> str:
        return self._paint(f"{name:{_NAME_WIDTH}} | ", _COLOURS.get(name, "0"))

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.has_colour else text

    def _write(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
