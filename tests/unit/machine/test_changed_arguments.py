"""Arguments that a hook changed are checked as the model's own are, before anybody is asked about the call."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from support.machine import Session, call
from turnmill.protocol import schemas
from turnmill.protocol.specs import AgentSpec, Approval, HookSpec, ToolSpec

HOOK = HookSpec(name="look", timeout_seconds=30, start_timeout_seconds=10)
SCHEMA = {
    "type": "object",
    "properties": {"amount": {"type": "integer"}},
    "required": ["amount"],
    "additionalProperties": False,
}


def asked(kind: Any = "worker", **fields: Any) -> Session:
    pay = ToolSpec(name="pay", schema=SCHEMA, approval=Approval(mode="custom", policy=HOOK), kind=kind)
    agent = AgentSpec(name="agent", model="scripted:x", hooks={"before_tool_call": HOOK}, **fields)
    session = Session(agent, [pay])
    session.start()
    session.answer("", [call("pay", amount=1)])
    return session


@pytest.mark.parametrize("kind", ["worker", "host", "agent", "handoff"])
def test_arguments_that_do_not_fit_are_a_result_that_says_so(kind: str) -> None:
    session = asked(kind)
    session.answer_hook({"arguments": {"amount": "much"}})
    assert len(session.tool_tasks) == 1  # the hook; neither the policy nor the tool
    (result,) = session.transcript[-1].tool_results
    assert result.is_error
    assert result.result == 'Error: invalid arguments for \'pay\': amount: "much" is not of type "integer"'


def test_arguments_that_fit_go_to_the_policy() -> None:
    session = asked()
    session.answer_hook({"arguments": {"amount": 2}})
    assert (session.hook_task.hook, session.hook_task.arguments["tool_call"]["arguments"]) == (
        "approval",
        {"amount": 2},
    )


@pytest.mark.parametrize("decision", [{"block": True}, {"has_result": True, "result": 1}])
def test_arguments_of_a_call_that_does_not_run_are_not_checked(decision: dict[str, Any]) -> None:
    session = asked()
    session.answer_hook({"arguments": {"amount": "much"}, **decision})
    (result,) = session.transcript[-1].tool_results
    assert "invalid arguments" not in str(result.result)


def test_a_host_that_runs_the_loop_checks_for_itself() -> None:
    session = asked("host", mode="single_exchange")
    session.answer_hook({"arguments": {"amount": "much"}})
    assert session.events(None, "turn.suspended")


def test_without_the_library_a_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas._cached_validator.cache_clear()
    original = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "jsonschema_rs":
            raise ImportError(name)
        return original(name, *arguments, **options)

    session = asked()
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", missing)
        session.answer_hook({"arguments": {"amount": 2}})
    (failed,) = session.events(None, "turn.failed")
    assert (failed.error_type, "turnmill[llm]" in failed.error) == ("hook_failed", True)
