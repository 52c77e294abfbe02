"""What users define: what is published of it, and what is refused where it is typed."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, RootModel

import turnmill.runtime
from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.content import Message, ToolCall, ToolCallPart, ToolResult, ToolResultPart
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.specs import (
    AgentSpec,
    Approval,
    Compaction,
    HookSpec,
    OutputSpec,
    Reasoning,
    RetryPolicy,
    StopCondition,
    ToolSpec,
    content_hash,
)
from turnmill.protocol.step_results import step_results, unpack_message
from turnmill.runtime import Agent, AgentHooks, HostTool, TurnOptions, handoff_to, has_tool_call, step_count_is
from turnmill.workers import tool
from turnmill.workers.hooks import hook

MODEL = "scripted:demo"


class Question(BaseModel):
    question: str
    choices: list[str] = []


class City(BaseModel):
    name: str
    people: int


@tool
def weather(city: str) -> str:
    """Current weather."""
    return city


def is_costly(event: Any) -> bool:
    return True


def is_enough(steps: Any) -> bool:
    return True


async def look(event: Any) -> None:
    return None


@hook(queue="slow-hooks", timeout=5)
def audit(event: Any) -> None:
    return None


def agent(name: str = "a", **options: Any) -> Agent:
    return Agent(name, MODEL, **options)


def refused(match: str) -> Any:
    return pytest.raises(DefinitionError, match=re.escape(match))


# --- an agent without anything


def test_defaults_are_the_specs_defaults() -> None:
    assert agent().agent_spec() == AgentSpec(name="a", model=MODEL)
    assert msgspec.json.encode(agent().agent_spec()) == b'{"name":"a","model":"scripted:demo"}'
    said = {name: field.get_default(call_default_factory=True) for name, field in Agent.model_fields.items()}
    assert Agent(**{**said, "name": "a", "model": MODEL}).agent_spec() == AgentSpec(name="a", model=MODEL)


def test_options_without_anything_override_nothing() -> None:
    assert TurnOptions().overrides() == {}
    assert TurnOptions(metadata={"a": 1}, tenant="t", priority=3, signal=AbortSignal()).overrides() == {}
    assert TurnOptions().hook_functions() == {}
    assert TurnOptions().agents() == []


def test_overrides_are_the_same_bytes_in_every_order() -> None:
    one = TurnOptions(system="s", max_steps=2, mode="single_exchange")
    other = TurnOptions(mode="single_exchange", max_steps=2, system="s")
    assert msgspec.json.encode(one.overrides()) == msgspec.json.encode(other.overrides())


# --- host tools


def test_a_host_tool_is_the_agents_own() -> None:  # AE-04
    schema = {"type": "object", "properties": {"question": {"type": "string"}}}
    definition = agent(tools=[weather, HostTool("ask_user", "Ask the user.", schema), "search"])
    spec = definition.agent_spec()
    assert spec.tools == ["weather", "ask_user", "search"]
    assert spec.own_tools == [ToolSpec(name="ask_user", description="Ask the user.", schema=schema, kind="host")]
    assert [tool.name for tool in definition.tool_specs()] == ["weather"]


def test_a_host_tools_schema_may_be_a_pydantic_model() -> None:
    schema = HostTool("ask_user", schema=Question).spec.schema
    assert schema["type"] == "object"
    assert schema["required"] == ["question"]


def test_a_host_tool_without_a_schema_takes_no_arguments() -> None:
    assert HostTool("stop").spec.schema == {"type": "object", "properties": {}}
    assert HostTool("stop", schema={"properties": {}}).spec.schema["type"] == "object"


def test_a_schema_is_copied() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    made = HostTool("ask", schema=schema)
    schema["properties"]["late"] = {}
    assert made.spec.schema["properties"] == {}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("ask user",), "'ask user' is no name for a tool"),
        (("ask", 3), "the description is a text for the model"),
        (("ask", "", "object"), "give a JSON Schema as a dict, or a pydantic model class"),
        (("ask", "", {"type": "array"}), "arguments are an object, and the schema describes a 'array'"),
        (("ask", "", {"type": "objekt"}), "the schema is no JSON Schema: type"),
        (("ask", "", {"type": "object", "default": {1, 2}}), "the schema is no JSON: a set"),
        (("ask", "", RootModel[list[int]]), "arguments are an object"),
    ],
)
def test_a_host_tool_that_cannot_work_is_refused(arguments: tuple[Any, ...], match: str) -> None:
    with refused(match):
        HostTool(*arguments)


# --- agents as tools, and handoffs


def test_an_agent_is_a_tool_of_another() -> None:
    writer = agent("writer", system="Write.")
    spec = agent("boss", tools=[writer, weather]).agent_spec()
    assert spec.tools == ["writer", "weather"]
    (own,) = spec.own_tools
    assert (own.kind, own.agent) == ("agent", f"writer@{content_hash(writer.agent_spec())}")
    assert own.schema["required"] == ["message"]
    assert own.schema["properties"]["message"]["type"] == "string"
    assert own.timeout_seconds == 3600.0


def test_an_agents_tool_may_be_described() -> None:
    made = agent("writer").as_tool(name="write", description="Writes well.", timeout=60)
    assert (made.spec.name, made.spec.description, made.spec.timeout_seconds) == ("write", "Writes well.", 60.0)
    assert agent("writer", turn_timeout=5).as_tool().spec.timeout_seconds == 5.0


def test_a_handoff_names_its_agent() -> None:
    billing = agent("billing")
    made = handoff_to(billing)
    assert (made.spec.name, made.spec.kind) == ("transfer_to_billing", "handoff")
    assert made.spec.agent == f"billing@{content_hash(billing.agent_spec())}"
    assert made.spec.schema == {"type": "object", "properties": {}}
    assert handoff_to(billing, name="bill", description="To billing.").spec.description == "To billing."


def test_agents_may_hand_over_to_each_other() -> None:
    billing = agent("billing", tools=[handoff_to("support")])
    support = agent("support", tools=[handoff_to(billing)])
    assert billing.agent_spec().own_tools[0].agent == "support"
    assert [each.name for each in support.agents()] == ["support", "billing"]
    assert handoff_to("support@0123456789abcdef").spec.name == "transfer_to_support"


def test_agents_come_with_all_below_them_once() -> None:
    leaf = agent("leaf", tools=[weather])
    left, right = agent("left", tools=[leaf]), agent("right", tools=[handoff_to(leaf)])
    root = agent("root", tools=[left, right])
    assert [each.name for each in root.agents()] == ["root", "left", "right", "leaf"]
    assert [spec.name for each in root.agents() for spec in each.tool_specs()] == ["weather"]
    assert agent("alone").agents() == [agent("alone")]


def test_another_child_is_another_version_of_its_parent() -> None:
    one, other = (agent("root", tools=[agent("leaf", system=text)]).agent_spec() for text in ("a", "b"))
    assert content_hash(one) != content_hash(other)


def test_a_turns_tools_may_lead_to_agents() -> None:
    options = TurnOptions(tools=[agent("leaf"), HostTool("ask_user"), weather])
    overrides = options.overrides()
    assert overrides["tools"] == ["leaf", "ask_user", "weather"]
    assert [own["name"] for own in overrides["own_tools"]] == ["leaf", "ask_user"]
    assert [each.name for each in options.agents()] == ["leaf"]
    assert [spec.name for spec in options.tool_specs()] == ["weather"]
    assert "own_tools" not in TurnOptions(tools=["weather"]).overrides()
    assert TurnOptions(tools=[]).overrides() == {"tools": []}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: agent(tools=[agent("a", system="other")]), "two different agents are called 'a'"),
        (lambda: agent(tools=[agent("b"), HostTool("b")]), "two tools are called 'b'"),
        (lambda: agent(tools=["b", "b"]), "two tools are called 'b'"),
        (lambda: agent(tools=[agent]), "is no tool: give a function decorated with @tool"),
        (lambda: agent(tools=["not a name"]), "'not a name' is no tool"),
        (lambda: agent(tools=[audit]), "is a hook, not a tool"),
        (lambda: agent().as_tool(timeout=0), "timeout is a number of seconds above 0, not 0"),
        (lambda: agent().as_tool(name="not a name"), "'not a name' is no name for a tool"),
        (lambda: handoff_to(weather), "give an Agent, or the name of one"),
        (lambda: handoff_to("a@"), "write the name of an agent, or name@version"),
        (lambda: handoff_to("x" * 120), "is no name for a tool"),
    ],
)
def test_tools_that_cannot_work_are_refused(make: Any, match: str) -> None:
    with refused(match):
        make()


# --- hooks and other code


def test_functions_of_an_agent_are_named_after_it() -> None:  # TH-12
    definition = agent(
        tools=["delete", "send"],
        hooks=AgentHooks(before_step=look, after_tool_call=lambda event: None),
        stop_when=[step_count_is(3), has_tool_call("send"), is_enough],
        extract_signals=lambda text: [],
        approvals={"delete": "always", "send": is_costly},
    )
    spec = definition.agent_spec()
    assert spec.hooks == {
        "before_step": HookSpec(name="a.before_step"),
        "after_tool_call": HookSpec(name="a.after_tool_call"),
    }
    enough = StopCondition(hook=HookSpec(name="a.is_enough"))
    assert spec.stop_when == [StopCondition(steps=3), StopCondition(tool="send"), enough]
    assert spec.signals == HookSpec(name="a.signals")
    assert spec.approvals == {
        "delete": Approval(mode="always"),
        "send": Approval(mode="policy", policy=HookSpec(name="a.is_costly")),
    }
    carried = definition.hook_functions()
    assert {name: item.point for name, item in carried.items()} == {
        "a.before_step": "before_step",
        "a.after_tool_call": "after_tool_call",
        "a.is_enough": "stop_when",
        "a.signals": "signals",
        "a.is_costly": "approval",
    }
    function, hook_spec, point = carried["a.before_step"]
    assert (function, hook_spec, point) == (look, HookSpec(name="a.before_step"), "before_step")


def test_a_hook_keeps_its_own_name_and_policy() -> None:
    definition = agent(hooks=AgentHooks(after_step=audit))
    assert definition.agent_spec().hooks["after_step"] == audit.spec
    assert audit.spec == HookSpec(name="audit", queue="slow-hooks", timeout_seconds=5.0)
    assert definition.hook_functions()["audit"].function is audit.function


def test_a_hook_spec_names_code_elsewhere() -> None:
    elsewhere = HookSpec(name="go.audit", queue="go")
    definition = agent(hooks=AgentHooks(after_step=elsewhere), stop_when=HookSpec(name="go.enough"))
    assert definition.agent_spec().hooks == {"after_step": elsewhere}
    assert definition.agent_spec().stop_when == [StopCondition(hook=HookSpec(name="go.enough"))]
    assert definition.hook_functions() == {}


def test_one_function_may_stand_twice_at_one_point() -> None:
    definition = agent(tools=["b", "c"], approvals={"b": is_costly, "c": is_costly})
    assert list(definition.hook_functions()) == ["a.is_costly"]


def test_functions_of_a_turn_have_their_qualified_names() -> None:  # TH-10
    def inner(event: Any) -> None:
        return None

    options = TurnOptions(hooks=AgentHooks(before_step=inner), stop_when=is_enough, approvals={"b": is_costly})
    qualified = "test_functions_of_a_turn_have_their_qualified_names.inner"
    assert options.overrides() == {
        "hooks": {"before_step": {"name": qualified}},
        "stop_when": [{"hook": {"name": "is_enough"}}],
        "approvals": {"b": {"mode": "policy", "policy": {"name": "is_costly"}}},
    }
    assert set(options.hook_functions()) == {qualified, "is_enough", "is_costly"}


def test_an_approval_may_say_how_long_it_waits() -> None:  # AC-48
    patient = Approval(mode="policy", policy=HookSpec(name="p"), timeout_seconds=60)
    spec = agent(tools=["b", "c", "d"], approvals={"b": patient, "c": True, "d": False}).agent_spec()
    assert spec.approvals == {"b": patient, "c": Approval(mode="always"), "d": Approval()}


def other(name: str) -> Any:
    def function(event: Any) -> None:
        return None

    function.__name__ = function.__qualname__ = name
    return function


def no_argument() -> None:
    return None


def two_arguments(event: Any, context: Any) -> None:
    return None


def yields(event: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: AgentHooks(before_step=3), "before_step: 3 is no hook: give a function, or a Hook"),
        (lambda: AgentHooks(before_steps=look), "before_steps: Extra inputs are not permitted"),
        (lambda: AgentHooks(before_step=weather), "Tool('weather') is a tool"),
        (lambda: AgentHooks(before_step=no_argument), "no_argument must take one argument, its event"),
        (lambda: AgentHooks(before_step=two_arguments), "two_arguments must take one argument, its event"),
        (lambda: AgentHooks(before_step=yields), "yields yields: a hook returns what it decides"),
        (lambda: agent(hooks={"before_step": 3}), "AgentHooks: before_step: 3 is no hook"),
        (lambda: agent(stop_when=[3]), "stop_when: 3 is no hook"),
        (lambda: agent(stop_when=StopCondition()), "has one of steps, tool and hook"),
        (lambda: agent(stop_when=[lambda steps: True]), "which has no name that a worker could find it by"),
        (
            lambda: agent(stop_when=[is_enough, other("is_enough")]),
            "two different functions are called 'a.is_enough': rename one",
        ),
        (
            lambda: agent(tools=["b"], stop_when=is_enough, approvals={"b": is_enough}),
            "'a.is_enough' is both its stop_when and its approval",
        ),
        (lambda: agent("x" * 120, hooks=AgentHooks(before_tool_call=look)), "is no name for a hook"),
        (lambda: agent(approvals={"b": "always"}), "approvals names b, which is not among its tools: none"),
        (lambda: agent(tools=["b"], approvals={"b": "sometimes"}), "'sometimes' is not 'always' or 'never'"),
        (lambda: agent(tools=["b"], approvals={"b": Approval(mode="policy")}), "policy with `policy`"),
        (lambda: agent(tools=["b"], approvals={"b": Approval(mode="always", timeout_seconds=0)}), "above 0"),
        (lambda: agent(tools=["b"], approvals=["b"]), "give a dict by tool names"),
        (lambda: agent(extract_signals="x"), "extract_signals: 'x' is no hook"),
        (lambda: TurnOptions(hooks=AgentHooks(before_step=lambda event: None)), "which has no name"),
        (lambda: TurnOptions(tools=["b"], approvals={"c": "always"}), "approvals names c"),
        (
            lambda: TurnOptions(hooks=AgentHooks(before_step=look, after_step=other("look"))),
            "'look' is both its before_step and its after_step",
        ),
        (lambda: step_count_is(0), "a turn has at least one step"),
        (lambda: has_tool_call("no name"), "give the name of a tool"),
    ],
)
def test_code_that_cannot_work_is_refused(make: Any, match: str) -> None:
    with refused(match):
        make()


# --- values


def test_what_an_agent_says_is_published() -> None:
    spec = agent(
        mode="single_exchange",
        late_steering="drop",
        warn_repeated_calls=False,
        repeated_errors_max=None,
        compaction={"trigger_tokens": 1000, "summarizer": "scripted:short"},
        reasoning="high",
        turn_timeout=60,
        max_sub_turns=2,
        max_depth=1,
        user_prompt_prefix="Q: ",
    ).agent_spec()
    assert spec == AgentSpec(
        name="a",
        model=MODEL,
        mode="single_exchange",
        late_steering="drop",
        warn_repeated_calls=False,
        repeated_errors_max=None,
        compaction=Compaction(trigger_tokens=1000, summarizer="scripted:short"),
        reasoning=Reasoning(effort="high"),
        turn_timeout_seconds=60.0,
        max_sub_turns=2,
        max_depth=1,
        user_prompt_prefix="Q: ",
    )


def test_what_a_turn_says_replaces_it() -> None:  # TH-10
    overrides = TurnOptions(
        reasoning={"budget_tokens": 500},
        repeated_errors_max=0,
        warn_repeated_calls=False,
        compaction=Compaction(keep_steps=1),
        turn_timeout=2.5,
        retry=RetryPolicy(max_attempts=1),
        stop_when=[],
    ).overrides()
    assert overrides == {
        "reasoning": {"budget_tokens": 500},
        "repeated_errors_max": None,
        "warn_repeated_calls": False,
        "compaction": {"keep_steps": 1},
        "turn_timeout_seconds": 2.5,
        "retry": {"max_attempts": 1},
        "stop_when": [],
    }


def test_output_is_a_class_or_a_schema() -> None:  # LC-16
    definition = agent(output=City)
    assert definition.agent_spec().output == OutputSpec(schema=City.model_json_schema(), name="City")
    assert definition.output_type is City
    assert TurnOptions(output=City).output_type is City
    assert TurnOptions(output=City).overrides()["output"]["name"] == "City"
    schema = {"type": "object", "title": "A city!", "properties": {"name": {"type": "string"}}}
    assert agent(output=schema).agent_spec().output == OutputSpec(schema=schema, name="A_city")
    assert agent(output=schema).output_type is None
    assert agent(output={"type": "array"}).agent_spec().output == OutputSpec(schema={"type": "array"})
    strict = OutputSpec(schema=schema, name="city", repairs=0)
    assert agent(output=strict).agent_spec().output == strict


@pytest.mark.parametrize("signal", [AbortSignal(), asyncio.Event()])
def test_a_signal_is_kept_and_not_sent(signal: Any) -> None:
    options = TurnOptions(signal=signal)
    assert options.signal is signal
    assert options.overrides() == {}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "manual"}, "mode: Input should be 'auto' or 'single_exchange'"),
        ({"late_steering": "keep"}, "late_steering: Input should be 'step' or 'drop'"),
        ({"reasoning": "much"}, "reasoning: Reasoning: Invalid enum value 'much'"),
        ({"reasoning": {}}, "reasoning: Reasoning says nothing"),
        ({"reasoning": {"budget": 3}}, "Reasoning has no field budget; it has effort, budget_tokens"),
        ({"reasoning": 3}, "3 is no Reasoning"),
        ({"compaction": {"keep_steps": -1}}, "compaction: Compaction(keep_steps=-1): at least 0"),
        ({"compaction": Compaction(trigger_tokens="many")}, "Expected `int | null`, got `str`"),  # type: ignore[arg-type]
        ({"compaction": {"summarizer": "short"}}, "'short': write provider:model"),
        ({"retry": RetryPolicy(max_attempts=0)}, "RetryPolicy(max_attempts=0): at least 1"),
        ({"output": list}, "give a JSON Schema as a dict, or a pydantic model class"),
        ({"output": {"type": "objekt"}}, "output: the schema is no JSON Schema"),
        ({"turn_timeout": 0}, "turn_timeout: Input should be greater than 0"),
        ({"max_depth": -1}, "max_depth: "),
        ({"repeated_errors_max": -1}, "repeated_errors_max: "),
        ({"provider_options": {"openai": {"x": object()}}}, "provider_options: it cannot be sent"),
        ({"model": "gpt"}, "'gpt': write provider:model"),
        ({"modell": "a:b"}, "modell: Extra inputs are not permitted"),
    ],
)
@pytest.mark.parametrize("kind", ["agent", "turn"])
def test_values_that_cannot_work_are_refused(kind: str, options: dict[str, Any], match: str) -> None:
    with refused(match):
        TurnOptions(**options) if kind == "turn" else Agent(**{"name": "a", "model": MODEL, **options})


@pytest.mark.parametrize("signal", [3, threading.Event()])
def test_what_is_no_signal_is_refused(signal: Any) -> None:
    with refused("give an AbortSignal"):
        TurnOptions(signal=signal)


# --- the front door, and steps


@pytest.mark.parametrize("name", turnmill.runtime.__all__)
def test_every_name_of_the_front_door_is_there(name: str) -> None:
    assert getattr(turnmill.runtime, name) is not None


def test_steps_are_built_from_a_turns_messages() -> None:
    call = ToolCall(id="c", name="image")
    packed = ToolResult(tool_call_id="c", tool_name="image", result={"$bytes": "aGk="})
    messages = [
        Message(role="user", content="one"),
        Message(role="assistant", content=[ToolCallPart(tool_call=call)], step=1),
        Message(role="tool", content=[ToolResultPart(tool_result=packed)], step=1),
        Message(role="user", content="steering", step=2),
        Message(role="assistant", content="done", step=2),
    ]
    first, second = step_results(unpack_message(message) for message in messages)
    assert (first.tool_calls, first.tool_results[0].result) == ([call], b"hi")
    assert (second.text, second.tool_results) == ("done", [])
