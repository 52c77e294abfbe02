"""Code that belongs to an agent or to a turn: hooks, custom stop conditions, approval policies, signal extractors.

Users give functions, or `Hook` objects that were made of them. A worker runs them, so what is published is a `HookSpec`
with a name; here each function gets its name. A bare `HookSpec` names code that is not in this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import msgspec

from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.keys import valid_name
from turnmill.protocol.specs import Approval, HookPoint, HookSpec, StopCondition, ToolSpec

HOOK_POINTS: tuple[str, ...] = get_args(HookPoint)
APPROVAL_TIMEOUT_SECONDS_MAX = 30 * 86_400.0


class HookFunction(NamedTuple):
    """A function with the spec under which it is called, and the point where: a hook's field, or `stop_when`, `approval`
    or `signals`."""

    function: Callable[..., Any]
    spec: HookSpec
    point: str


class HookCollector:
    """Names the functions of one definition and keeps them. `agent` is None for a turn's options.

    An agent's functions are `<agent>.<point>`, or `<agent>.<function>` where there may be several; a turn's are called as
    they are qualified in their module.
    """

    def __init__(self, agent: str | None) -> None:
        self._agent = agent
        self._where = "TurnOptions" if agent is None else f"agent {agent!r}"
        self._points: dict[str, str] = {}
        self.functions: dict[str, HookFunction] = {}

    def add(self, code: Any, point: str) -> HookSpec:
        """The spec of a function, a Hook or a HookSpec. Raises `DefinitionError` where another one has its name."""
        spec, function = spec_of(code), _function_of(code)
        if spec is None:
            spec = HookSpec(name=self._name(code, point))
        known = self.functions.get(spec.name)
        if self._points.setdefault(spec.name, point) != point:
            raise DefinitionError(
                f"{self._where}: {spec.name!r} is both its {self._points[spec.name]} and its {point}: write a function for each"
            )
        if known is not None and (known.spec != spec or (function is not None and known.function != function)):
            raise DefinitionError(f"{self._where}: two different functions are called {spec.name!r}: rename one")
        if function is not None:
            self.functions[spec.name] = HookFunction(function, spec, point)
        return spec

    def stop_condition(self, condition: Any) -> StopCondition:
        if isinstance(condition, StopCondition):
            return condition
        return StopCondition(hook=self.add(condition, "stop_when"))

    def approval(self, wanted: Any) -> Approval:
        if isinstance(wanted, Approval):
            return wanted
        if isinstance(wanted, bool):
            return Approval(mode="always" if wanted else "never")
        if isinstance(wanted, str):
            return msgspec.convert({"mode": wanted}, Approval)
        return Approval(mode="policy", policy=self.add(wanted, "approval"))

    def _name(self, function: Any, point: str) -> str:
        short = point in HOOK_POINTS or point == "signals"
        if self._agent is not None and short:
            name = f"{self._agent}.{point}"
        else:
            attribute = "__qualname__" if self._agent is None else "__name__"
            given = getattr(function, attribute, None)
            if not isinstance(given, str) or "<lambda>" in given:
                raise DefinitionError(
                    f"{self._where}: {point} is {function!r}, which has no name that a worker could find it by: "
                    "write it as a function with `def`"
                )
            bare = given.replace("<locals>.", "")
            name = bare if self._agent is None else f"{self._agent}.{bare}"
        if not valid_name(name):
            raise DefinitionError(
                f"{self._where}: {name!r} is no name for a hook: up to 128 letters, digits and `_ . : @ -`"
            )
        return name


def spec_of(code: Any) -> HookSpec | None:
    """The spec of a Hook, or the HookSpec itself; None for a function."""
    spec = code if isinstance(code, HookSpec) else getattr(code, "spec", None)
    return spec if isinstance(spec, HookSpec) else None


def check_hook(code: Any, point: str) -> None:
    """Raises `ValueError` for what cannot be called at that point."""
    spec = spec_of(code)
    if spec is not None:
        made_for = getattr(code, "point", None)
        if isinstance(made_for, str) and made_for and made_for != point:
            raise ValueError(f"the hook {spec.name!r} is made for {made_for}, and stands at {point}")
        return
    if isinstance(getattr(code, "spec", None), ToolSpec):
        raise ValueError(f"{code!r} is a tool: give a function, or a Hook")
    if not callable(code) or isinstance(code, type):
        raise ValueError(f"{code!r} is no hook: give a function, or a Hook")
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise ValueError(f"{_title(code)} yields: a hook returns what it decides")
    try:
        signature = inspect.signature(code)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(f"{_title(code)} must take one argument, its event: {error}") from None


def check_stop_condition(condition: Any) -> None:
    """Raises `ValueError` for what cannot stop a turn."""
    if not isinstance(condition, StopCondition):
        check_hook(condition, "stop_when")
        return
    given = [value for value in (condition.steps, condition.tool, condition.hook) if value is not None]
    if len(given) != 1:
        raise ValueError("a StopCondition has one of steps, tool and hook: use step_count_is(n) or has_tool_call(name)")


def check_approval(tool: Any, wanted: Any) -> None:
    """Raises `ValueError` for what cannot say whether calls of a tool are to be approved."""
    if not isinstance(tool, str) or not valid_name(tool):
        raise ValueError(f"{tool!r} is no tool's name")
    if isinstance(wanted, bool):
        return
    if isinstance(wanted, str):
        if wanted not in ("always", "never"):
            raise ValueError(f"{tool}: {wanted!r} is not 'always' or 'never', nor a function that decides")
        return
    if not isinstance(wanted, Approval):
        check_hook(wanted, "approval")
        return
    if wanted.mode not in ("always", "never", "policy") or (wanted.mode == "policy") != (wanted.policy is not None):
        raise ValueError(f"{tool}: an Approval's mode is always, never, or policy with `policy`")
    if not 0 < wanted.timeout_seconds <= APPROVAL_TIMEOUT_SECONDS_MAX:
        raise ValueError(f"{tool}: timeout_seconds={wanted.timeout_seconds!r}: above 0, and at most 30 days")


def _function_of(code: Any) -> Callable[..., Any] | None:
    """The code itself, None where only its name is known here."""
    if isinstance(code, HookSpec):
        return None
    function = getattr(code, "function", None) if spec_of(code) is not None else code
    if function is None:
        function = code
    return function if callable(function) else None


def _title(code: Any) -> str:
    return getattr(code, "__qualname__", None) or repr(code)
