"""The embedded runtime: Valkey on demand, coordinator and workers in this process, for scripts, tests and first steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from turnmill.protocol.errors import ConfigurationError, DefinitionError, TurnmillError
from turnmill.protocol.settings import Settings
from turnmill.workers.app import App, collect, load_app
from turnmill.workers.cancellation import Cancellations
from turnmill.workers.hooks import Hook, hook_for
from turnmill.workers.tool_worker import ToolWorker
from turnmill.workers.tools import Tool

from .client import Client, open_client
from .coordinator import Coordinator
from .definitions import Agent, TurnOptions
from .roles import Role, build_llm_worker, embedded_url, publish_app
from .turn import Turn


class LocalClient(Client):
    """A client that brings its own runtime: tools of the agents it is given are served here."""

    async def start(self, app: App | None) -> None:
        self._running: list[tuple[Role, asyncio.Task[None]]] = []
        self._models = set(app.models) if app else set()
        self._tool_workers: dict[str, ToolWorker] = {}
        self._cancellations = Cancellations(self.engine, self.keys)
        self._llm = build_llm_worker(self.engine, self.keys, self.settings, app, [], None)
        self._run(self._llm)
        if app is not None:
            await self._serve([*app.tools.values(), *app.hooks.values()])

    async def start_coordinator(self) -> None:
        self._run(await Coordinator.create(self.engine, self.keys, self.settings))

    async def turn(self, agent: Agent | str, message: Any, **keywords: Any) -> Turn:
        options = keywords.get("options")
        await self._serve_given(agent, options if isinstance(options, TurnOptions) else None)
        self._raise_failures()
        return await super().turn(agent, message, **keywords)

    async def _serve_given(self, agent: Agent | str, options: TurnOptions | None) -> None:
        """What the agents and the options of a turn carry is served here."""
        agents = [*(agent.agents() if isinstance(agent, Agent) else []), *(options.agents() if options else [])]
        tools = [item for one in agents for item in one.tools] + list(options.tools or [] if options else [])
        functions = [one.hook_functions() for one in agents] + ([options.hook_functions()] if options else [])
        hooks = [hook_for(each.function, each.spec) for named in functions for each in named.values()]
        mine = [item for item in tools if isinstance(item, Tool)]
        await self._serve([*mine, *hooks, *(item.approval_policy for item in mine if item.approval_policy is not None)])
        self._check_model(options.model if options and options.model else "")
        for one in agents:
            self._check_model(one.model if options is None or options.model is None or one is not agent else "")

    async def stop(self) -> None:
        for role, _ in reversed(self._running):
            role.stop()
        await asyncio.gather(*[task for _, task in self._running], return_exceptions=True)

    async def _serve(self, carried: Iterable[Tool[..., Any] | Hook[..., Any]]) -> None:
        """One tool worker per queue, made when its first tool or hook comes; more join it."""
        for each in carried:
            serving = self._tool_workers.get(each.spec.queue)
            if serving is None:
                hooks = {each.name: each} if isinstance(each, Hook) else {}
                tools = {each.name: each} if isinstance(each, Tool) else {}
                worker = ToolWorker(self.engine, self.keys, self.settings, tools, hooks=hooks, queues=[each.spec.queue])
                self._tool_workers[each.spec.queue] = worker
                await worker.register()
                self._run(worker)
            elif _is_new(serving, each):
                serving.add(each)
                await serving.register()

    def _check_model(self, model: str) -> None:
        """Nobody else could serve a model function here: better said than waited for."""
        prefix, _, name = model.partition(":")
        if prefix == "host" and name not in self._models:
            known = ", ".join(sorted(self._models)) or "none"
            raise DefinitionError(
                f"no model function {name!r} is served here; there are: {known}. Pass it with connect(app=...), or --app"
            )

    def _run(self, role: Role) -> None:
        self._running.append((role, asyncio.create_task(role.run())))

    def _raise_failures(self) -> None:
        for role, task in self._running:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise TurnmillError(f"the embedded {type(role).__name__} has failed") from task.exception()


def _is_new(worker: ToolWorker, each: Tool[..., Any] | Hook[..., Any]) -> bool:
    """A hook made of the same function again is the one that is there."""
    if isinstance(each, Hook):
        known = worker.hooks.get(each.name)
        return known is None or known.function is not each.function
    return worker.tools.get(each.name) is not each


@asynccontextmanager
async def local_runtime(settings: Settings, app: Any = None) -> AsyncIterator[LocalClient]:
    """The embedded server (or the one of `settings`), a coordinator, an LLM worker and tool workers, for as long as the
    context lasts."""
    loaded = None if app is None else _collected(app)
    url = settings.redis_url
    if url is None:
        url = await asyncio.to_thread(embedded_url, settings)
    async with open_client(url, settings) as opened:
        client = LocalClient(opened.engine, opened.keys, settings)
        try:
            await client.start(loaded)
            await client.start_coordinator()
            if loaded is not None:
                await publish_app(client.engine, client.keys, loaded)
            yield client
        finally:
            await client.stop()
            await client.channels.close()


def _collected(app: Any) -> App:
    """An APP target, a module, or objects."""
    if isinstance(app, str):
        return load_app(app)
    if isinstance(app, ModuleType):
        return collect(app.__name__, [value for name, value in vars(app).items() if not name.startswith("__")])
    given = list(app) if isinstance(app, list | tuple | set) else [app]
    found = collect("app", given)
    if given and not (found.tools or found.hooks or found.models or found.scripts or found.agents):
        raise ConfigurationError(f"app={app!r} brings no tool, model function, script or agent")
    return found
