"""How an agent's definition and a turn's options become a plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from turnmill.protocol.connection import Engine
from turnmill.protocol.content import Message
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.keys import Keys, new_turn_id
from turnmill.protocol.messages import StartTurn
from turnmill.protocol.specs import Approval, HookSpec, Plan, ToolSpec
from turnmill.runtime import Agent, AgentHooks, HostTool, TurnOptions, handoff_to
from turnmill.runtime.registry import Registry, Resolved, publish

MODEL = "scripted:demo"


def one(event: Any) -> None:
    return None


def two(event: Any) -> None:
    return None


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


class Namespace:
    """A registry, and what is published for it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.keys = Keys(name, 1)
        self.registry = Registry(engine, self.keys, 60)

    async def publish(self, agent: Agent, *tools: ToolSpec) -> None:
        await publish(self.engine, self.keys, [each.agent_spec() for each in agent.agents()], tools)

    async def resolve(self, reference: str, options: TurnOptions | None = None) -> Resolved:
        overrides = options.overrides() if options else None
        return await self.registry.resolve_agent(self.keys.partitions[0], reference, overrides)

    async def plan(self, reference: str, options: TurnOptions | None = None) -> Plan:
        resolved = await self.resolve(reference, options)
        assert resolved.problem is None
        assert resolved.plan is not None
        assert await self.registry.load_plan(self.keys.partitions[0], resolved.plan_id) == resolved.plan
        return resolved.plan


@pytest.fixture
def space(engine: Engine, namespace: str) -> Namespace:
    return Namespace(engine, namespace)


async def test_an_agents_own_tool_comes_before_a_workers(space: Namespace) -> None:
    registered = ToolSpec(name="ask_user", description="a worker's")
    mine, yours = HostTool("ask_user", "mine"), HostTool("ask_user", "yours")
    await space.publish(Agent("mine", MODEL, tools=["search", mine]), registered, ToolSpec(name="search"))
    await space.publish(Agent("yours", MODEL, tools=[yours]))
    await space.publish(Agent("theirs", MODEL, tools=["ask_user"]))
    plan = await space.plan("mine")
    assert plan.agent.tools == list(plan.tools) == ["search", "ask_user"]
    assert plan.tools["ask_user"] == mine.spec
    assert plan.agent.own_tools == []
    assert (await space.plan("yours")).tools == {"ask_user": yours.spec}
    assert (await space.plan("theirs")).tools == {"ask_user": registered}


async def test_a_turn_brings_tools_of_its_own_and_names_the_agents(space: Namespace) -> None:
    ask, confirm = HostTool("ask_user"), HostTool("confirm")
    await space.publish(Agent("a", MODEL, tools=[ask]))
    assert (await space.plan("a", TurnOptions(tools=[confirm]))).tools == {"confirm": confirm.spec}
    assert (await space.plan("a", TurnOptions(tools=["ask_user"]))).tools == {"ask_user": ask.spec}
    other = HostTool("ask_user", "otherwise")
    assert (await space.plan("a", TurnOptions(tools=[other, confirm]))).tools["ask_user"] == other.spec
    assert (await space.plan("a", TurnOptions(tools=[]))).tools == {}


async def test_hooks_and_approvals_are_merged_by_key(space: Namespace) -> None:  # TH-10
    hooks = AgentHooks(before_step=one, after_step=one)
    tools = [HostTool("b"), HostTool("c")]
    await space.publish(Agent("a", MODEL, tools=tools, hooks=hooks, approvals={"b": "always"}, stop_when=one))
    options = TurnOptions(hooks=AgentHooks(after_step=two), approvals={"c": "always"}, stop_when=[])
    agent = (await space.plan("a", options)).agent
    assert agent.hooks == {"before_step": HookSpec(name="a.before_step"), "after_step": HookSpec(name="two")}
    assert agent.approvals == {"b": Approval(mode="always"), "c": Approval(mode="always")}
    assert agent.stop_when == []


async def test_a_handoff_is_resolved_as_a_start_is(space: Namespace) -> None:
    billing = Agent("billing", MODEL, tools=[handoff_to("support")])
    support = Agent("support", MODEL, tools=[handoff_to(billing)], user_prompt_prefix="Q: ")
    await space.publish(support)
    plan = await space.plan("support")
    target = plan.tools["transfer_to_billing"].agent
    assert target is not None
    handed = await space.plan(target)
    assert handed.agent.name == "billing"
    assert handed.tools["transfer_to_support"].agent == "support"
    command = StartTurn(
        turn_id=new_turn_id(0), session_id="s", agent="support", messages=[Message(role="user", content="x")]
    )
    assert (await space.registry.resolve(space.keys.partitions[0], command)).plan == plan
    assert plan.agent.user_prompt_prefix == "Q: "


async def test_tools_that_lead_to_unknown_agents_are_refused(space: Namespace) -> None:
    agent = Agent("a", MODEL, tools=[Agent("leaf", MODEL), handoff_to("nobody")])
    await publish(space.engine, space.keys, [agent.agent_spec()], [])
    problem = (await space.resolve("a")).problem
    assert problem is not None
    assert problem.kind == ErrorKind.UNKNOWN_AGENT
    assert "'nobody' (tool 'transfer_to_nobody')" in problem.message
    assert "(tool 'leaf')" in problem.message
    # What the turn leaves out is not looked for.
    assert (await space.plan("a", TurnOptions(tools=[]))).tools == {}


async def test_approvals_of_tools_that_are_not_there_are_refused(space: Namespace) -> None:
    await space.publish(Agent("a", MODEL, tools=[HostTool("b"), HostTool("c")], approvals={"b": "always"}))
    problem = (await space.resolve("a", TurnOptions(approvals={"d": "always"}))).problem
    assert problem is not None
    assert problem.kind == ErrorKind.BAD_REQUEST
    assert "approvals name d" in problem.message
    assert (await space.plan("a", TurnOptions(tools=["c"]))).agent.approvals == {"b": Approval(mode="always")}


@pytest.mark.parametrize(
    "overrides",
    [
        {"hooks": [1]},
        {"approvals": [1]},
        {"approvals": {"b": 1}},
        {"own_tools": [1]},
        {"own_tools": {}},
        {"max_steps": "x"},
    ],
    ids=str,
)
async def test_options_that_do_not_fit_are_refused(space: Namespace, overrides: dict[str, Any]) -> None:
    await space.publish(Agent("a", MODEL, tools=[HostTool("b")], approvals={"b": "always"}))
    resolved = await space.registry.resolve_agent(space.keys.partitions[0], "a", overrides)
    assert resolved.problem is not None
    assert resolved.problem.kind == ErrorKind.BAD_REQUEST
