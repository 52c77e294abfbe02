"""The roles of a deployment as they run in an actor: the project's own classes, put together as its composition roots do."""

from __future__ import annotations

from typing import Any

from turnmill.protocol.keys import Keys
from turnmill.protocol.namespace import open_namespace
from turnmill.protocol.settings import Settings
from turnmill.runtime.client import Client
from turnmill.runtime.coordinator import Coordinator
from turnmill.runtime.registry import publish
from turnmill.workers.llm_worker import LLMWorker
from turnmill.workers.providers.base import ProviderSet
from turnmill.workers.providers.scripted import ScriptedProvider
from turnmill.workers.tool_worker import ToolWorker

from .actors import Actor
from .application import APP, SCRIPT
from .network import Network, SimulatedEngine


async def open_engine(network: Network, settings: Settings) -> tuple[Any, Keys]:
    engine = await SimulatedEngine(network, settings.response_timeout).connect()
    namespace = await open_namespace(engine, settings.namespace, settings.partitions)
    return engine, namespace.keys


async def run_role(actor: Actor, settings: Settings) -> None:
    """Until it is stopped. Raises `EngineUnavailable` where the server cannot be reached at the start."""
    engine, keys = await open_engine(actor.network, settings)
    if actor.role == "coordinator":
        process: Any = await Coordinator.create(engine, keys, settings)
    elif actor.role == "llm":
        process = LLMWorker(engine, keys, settings, ProviderSet({"scripted": ScriptedProvider([SCRIPT])}))
    else:
        await publish(engine, keys, APP.agent_specs.values(), APP.tool_specs.values())
        process = ToolWorker(engine, keys, settings, APP.tools, hooks=APP.hooks)
    actor.process = process
    if actor.is_stopping:
        process.stop()
    await process.run()
    await engine.close()


async def open_client(actor: Actor, settings: Settings) -> Client:
    engine, keys = await open_engine(actor.network, settings)
    return Client(engine, keys, settings)
