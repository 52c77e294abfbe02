"""Loads an application and finds what workers need of it: tools, hooks, model functions, scripts and agents.

APP is `module`, `module:attribute`, `path.py` or `path.py:attribute`. What the module names at its top level counts,
directly or in a list, tuple or dict; with an attribute only what that one holds. An agent brings along its tools, its
code (`hook_functions()`) and the agents below it (`agents()`), and a tool the policy of its approvals. Agents are told by
what they can do (`agent_spec()` and `tool_specs()`), because workers do without the runtime.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast

import msgspec

from turnmill.protocol.errors import ConfigurationError, DefinitionError
from turnmill.protocol.specs import AgentSpec, ToolSpec

from .hooks import Hook, hook_for
from .models import HostModel
from .providers.scripted import Script
from .tools import Tool

T = TypeVar("T")


class AgentDefinition(Protocol):
    """What makes an object an agent."""

    def agent_spec(self) -> AgentSpec: ...

    def tool_specs(self) -> list[ToolSpec]: ...


class App(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, by name. `tool_specs` are those of the tools and those that only agents declare."""

    target: str
    tools: dict[str, Tool[..., Any]]
    hooks: dict[str, Hook[..., Any]]
    models: dict[str, HostModel]
    scripts: dict[str, Script]
    agents: dict[str, AgentDefinition]
    agent_specs: dict[str, AgentSpec]
    tool_specs: dict[str, ToolSpec]


def load_app(target: str) -> App:
    """Import APP and look through it. Raises `ConfigurationError` that says what is missing or clashes."""
    source, attribute = _split_target(target)
    module = _import_file(target, Path(source)) if source.endswith(".py") else _import_module(target, source)
    if attribute:
        return collect(target, [_attribute(target, module, attribute)], wanted=attribute)
    return collect(target, [value for name, value in vars(module).items() if not name.startswith("__")])


def collect(target: str, values: Iterable[Any], *, wanted: str | None = None) -> App:
    """The definitions among `values`. `wanted` names the one value that must be one."""
    found = list(_definitions(values))
    if wanted and not found:
        raise ConfigurationError(f"{target}: {wanted} is no tool, hook, model function, script or agent, nor holds any")
    agents = _with_those_below(target, [value for value in found if _is_agent(value)])
    tools = [*_of_kind(found, Tool), *(tool for agent in agents for tool in _tools_of(agent))]
    agent_specs, declared = _describe_agents(target, agents)
    tools_by_name = _by_name(
        target, "tool", tools, lambda one, two: one.spec == two.spec and one.function is two.function
    )
    hooks = [*_of_kind(found, Hook), *_hooks_of(target, agents, tools)]
    return App(
        target=target,
        tools=tools_by_name,
        hooks=_by_name(target, "hook", hooks, _is_same_hook),
        models=_by_name(
            target, "model function", _of_kind(found, HostModel), lambda one, two: one.function is two.function
        ),
        scripts=_by_name(target, "script", _of_kind(found, Script), _equal),
        agents={spec.name: agent for spec, agent in zip(agent_specs, agents, strict=True)},
        agent_specs=_by_name(target, "agent", agent_specs, _equal),
        tool_specs=_by_name(target, "tool", [*(tool.spec for tool in tools_by_name.values()), *declared], _equal),
    )


# --- importing


def _split_target(target: str) -> tuple[str, str]:
    """The module or path, and the attribute behind the last colon, if there is one."""
    source, colon, attribute = target.rpartition(":")
    if not colon or target.endswith(".py"):
        source, attribute = target, ""
    elif not attribute or not source:
        raise ConfigurationError(f"{target!r} is no application: write module, module:attribute or path.py")
    if not source.endswith(".py") and not all(part.isidentifier() for part in source.split(".")):
        raise ConfigurationError(f"{target!r} is no application: write module, module:attribute or path.py")
    return source, attribute


def _import_module(target: str, name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = f"; for a file write {name}.py with its folder" if "." not in name else ""
            raise ConfigurationError(f"{target}: there is no module {error.name!r} on the path{hint}") from error
        raise _import_failed(target, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(target, error) from error


def _import_file(target: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigurationError(f"{target}: there is no file {path}")
    _add_to_path(path.parent)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{target}: {path} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(target, error) from error
    return module


def _module_name(path: Path) -> str:
    """The file's own name, so that its siblings' `import` finds the same module, unless another module has it."""
    if path.stem.isidentifier() and not _is_taken(path):
        return path.stem
    return f"{path.stem.replace('.', '_')}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def _is_taken(path: Path) -> bool:
    try:
        spec = importlib.util.find_spec(path.stem)
    except ValueError:  # a module without a spec, such as __main__
        return True
    return spec is not None and not _same_file(spec.origin, path)


def _same_file(origin: str | None, path: Path) -> bool:
    return origin is not None and Path(origin).resolve() == path


def _add_to_path(folder: Path) -> None:
    if not any(Path(entry or os.curdir).resolve() == folder for entry in sys.path):
        sys.path.insert(0, str(folder))


def _import_failed(target: str, error: BaseException) -> ConfigurationError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return ConfigurationError(f"{target} cannot be imported: {reason}{place}")


def _is_ours(filename: str) -> bool:
    """Whether a line says nothing to the application's author: the import machinery's, or Turnmill's own."""
    return "importlib" in filename or any(filename.startswith(root) for root in sys.modules["turnmill"].__path__)


def _attribute(target: str, module: ModuleType, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            raise ConfigurationError(f"{target}: {module.__name__} has no {path!r}") from error
    return value


# --- finding


def _definitions(values: Iterable[Any]) -> Iterator[Any]:
    """Definitions in the order they stand, each object once; containers are looked into one level deep."""
    seen: set[int] = set()
    for value in values:
        inner: Iterable[Any] = [value]
        if isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        for item in inner:
            if id(item) not in seen and (isinstance(item, (Tool, Hook, HostModel, Script)) or _is_agent(item)):
                seen.add(id(item))
                yield item


def _is_agent(value: Any) -> bool:
    """Looked up statically: asking any object of a module for an attribute could run its code."""
    if isinstance(value, (type, ModuleType)):
        return False
    return all(inspect.getattr_static(value, name, None) is not None for name in ("agent_spec", "tool_specs"))


def _of_kind(found: Iterable[Any], kind: type[Any]) -> list[Any]:
    return [value for value in found if isinstance(value, kind)]


def _tools_of(agent: Any) -> list[Tool[..., Any]]:
    """The tools that an agent carries, whether or not the module names them as well."""
    carried = getattr(agent, "tools", None)
    if isinstance(carried, dict):
        carried = list(carried.values())
    return _of_kind(carried, Tool) if isinstance(carried, (list, tuple)) else []


def _with_those_below(target: str, agents: list[Any]) -> list[Any]:
    """The agents, and those that their tools lead to, each once."""
    found = {id(agent): agent for agent in agents}
    for agent in agents:
        below = getattr(agent, "agents", None)
        if callable(below):
            try:
                found |= {id(each): each for each in below()}
            except DefinitionError as error:
                raise ConfigurationError(f"{target}: {error}") from error
    return list(found.values())


def _hooks_of(target: str, agents: list[Any], tools: list[Tool[..., Any]]) -> list[Hook[..., Any]]:
    """The code that agents and tools carry."""
    hooks = [tool.approval_policy for tool in tools if tool.approval_policy is not None]
    for agent in agents:
        functions = getattr(agent, "hook_functions", None)
        if not callable(functions):
            continue
        try:
            hooks += [hook_for(function, spec) for function, spec, _ in functions().values()]
        except DefinitionError as error:
            raise ConfigurationError(f"{target}: the agent {agent!r}: {error}") from error
    return hooks


def _is_same_hook(one: Hook[..., Any], two: Hook[..., Any]) -> bool:
    return one.spec == two.spec and one.function == two.function


def _describe_agents(target: str, agents: list[AgentDefinition]) -> tuple[list[AgentSpec], list[ToolSpec]]:
    specs: list[AgentSpec] = []
    declared: list[ToolSpec] = []
    for agent in agents:
        try:
            spec, tool_specs = agent.agent_spec(), agent.tool_specs()
        except Exception as error:
            raise ConfigurationError(f"{target}: the agent {agent!r} cannot be described: {error}") from error
        if not isinstance(spec, AgentSpec) or not all(isinstance(item, ToolSpec) for item in tool_specs):
            raise ConfigurationError(f"{target}: the agent {agent!r} gives no AgentSpec and ToolSpecs")
        specs.append(spec)
        declared.extend(tool_specs)
    return specs, declared


def _by_name(target: str, kind: str, values: Iterable[T], same: Callable[[T, T], bool]) -> dict[str, T]:
    named: dict[str, T] = {}
    for value in values:
        name = cast("Any", value).name
        if not same(named.setdefault(name, value), value):
            raise ConfigurationError(f"{target}: two different definitions of the {kind} {name!r}; rename one")
    return named


def _equal(one: Any, two: Any) -> bool:
    return bool(one == two)
