"""Names of tools in an agent's choices and conditions are names of its tools."""

from __future__ import annotations

from typing import Any

import pytest

from turnmill.protocol.errors import DefinitionError
from turnmill.runtime import Agent, HostTool, TurnOptions, handoff_to, has_tool_call, step_count_is
from turnmill.workers import tool


@tool
def add(a: int) -> int:
    """Add."""
    return a


TOOLS: list[Any] = [add, "registered", HostTool("ask"), handoff_to("billing")]


@pytest.mark.parametrize("name", ["add", "registered", "ask", "transfer_to_billing"])
def test_any_of_its_tools_may_be_named(name: str) -> None:
    Agent("a", model="scripted:x", tools=TOOLS, tool_choice=name, stop_when=[step_count_is(3), has_tool_call(name)])
    TurnOptions(tools=TOOLS, tool_choice=name, stop_when=has_tool_call(name))


@pytest.mark.parametrize("word", ["auto", "none", "required", None])
def test_words_are_no_names(word: str | None) -> None:
    Agent("a", model="scripted:x", tool_choice=word)
    TurnOptions(tools=[], tool_choice=word)


@pytest.mark.parametrize("field", ["tool_choice", "has_tool_call"])
def test_another_name_is_refused(field: str) -> None:
    given: dict[str, Any] = (
        {"tool_choice": "adds"} if field == "tool_choice" else {"stop_when": [has_tool_call("adds")]}
    )
    for define in (
        lambda: Agent("a", model="scripted:x", tools=TOOLS, **given),
        lambda: Agent("a", model="scripted:x", **given),
        lambda: TurnOptions(tools=TOOLS, **given),
    ):
        with pytest.raises(DefinitionError, match=rf"{field} names 'adds', which is not among its tools"):
            define()
    TurnOptions(**given)  # of the agent's tools, which are not known here
