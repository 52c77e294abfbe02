"""Deciding from the command line where no runtime is alive: it is brought along, or nothing is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import CommandLine, json_lines

APP = '''
"""An application whose payments wait for a person."""

from turnmill.runtime import Agent, HostTool
from turnmill.workers import tool
from turnmill.workers.providers.scripted import Call, Reply, Script


@tool(approval="always")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


paying = [Call("pay", {"amount": 5}, id="call_1"), Call("pay", {"amount": 900}, id="call_2")]
scripts = [
    Script("pays", [Reply(tool_calls=paying), Reply(text="First: ${results[0]}. Then: ${result}.")]),
    Script("asks", [Reply(tool_calls=[Call("ask", id="call_1")]), Reply(text="You said ${result}.")]),
    Script("elsewhere", [Reply(text="never")]),
]
agents = [
    Agent("pays", model="scripted:pays", tools=[pay]),
    Agent("asks", model="scripted:asks", tools=[HostTool("ask")]),
    Agent("elsewhere", model="scripted:elsewhere", pool="gpu"),
]
'''


@pytest.fixture
def alone(short_directory: Path) -> Iterator[CommandLine]:
    """A command line without a Redis URL, in a directory with an app."""
    (short_directory / "app.py").write_text(APP, encoding="utf-8")
    yield CommandLine(short_directory)


def test_approve_and_deny_bring_their_own_runtime(alone: CommandLine) -> None:
    done = alone("run", "pays", "hello", "--app", "app.py")
    hint = r"decide: `turnmill (approve (\S+) call_1 call_2 --app app.py)`, or `turnmill deny \S+ ... --app app.py`"
    found = re.search(hint, done.stderr)
    assert (done.returncode, found is not None) == (5, True), done.stderr
    turn = str(found and found[2])
    assert f"`turnmill approve {turn} call_1 call_2 --app APP`" in alone("show", turn).stdout
    denied = alone("deny", turn, "call_2", "--reason", "too much", "--app", "app.py", "--json")
    assert denied.returncode == 5, denied.stderr
    decision, *events = json_lines(denied.stdout)
    assert (decision["denied"], decision["pending"]) == (["call_2"], ["call_1"])
    assert events[-1]["type"] == "turn.suspended"
    approved = alone("approve", turn, "call_1", "--app", "app.py")
    assert approved.returncode == 0, approved.stderr
    assert approved.stdout.startswith("approved: call_1\n")
    assert "First: paid 5. Then: Error: not executed (a person denied the call: too much)." in approved.stdout
    again = alone("deny", turn, "call_1", "--app", "app.py")
    assert (again.returncode, "refused (no_pending_approval)" in again.stderr) == (2, True)


def test_without_a_coordinator_nothing_is_sent(alone: CommandLine) -> None:
    turn = json_lines(alone("run", "asks", "hello", "--app", "app.py", "--session", "s", "--json").stdout)[0]["turn_id"]
    for arguments, takes_app in (
        (["approve", turn, "call_1"], True),
        (["resume", turn, "--result", "call_1=x", "--app", "app.py", "--detach"], True),
        (["abort", turn], False),
        (["session", "delete", "s"], False),
    ):
        done = alone(*arguments)
        assert done.returncode == 3, done.stderr
        assert done.stderr.startswith("turnmill: nothing was sent: no coordinator is alive in ")
        assert ("start `turnmill dev APP` here" in done.stderr, "--app APP" in done.stderr) == (True, takes_app)
    resumed = alone("resume", turn, "--result", "call_1=Oslo", "--app", "app.py")
    assert (resumed.returncode, "You said Oslo." in resumed.stdout) == (0, True), resumed.stderr


def test_a_pool_that_nobody_serves_is_named(alone: CommandLine) -> None:
    done = alone("run", "elsewhere", "hello", "--app", "app.py", "--timeout", "6")
    assert done.returncode == 3
    assert "no LLM worker serves the pool 'gpu': start `turnmill worker llm --pool gpu`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"), [(["run", "asks", ""], "empty"), (["run", "asks", "x", "--session", ""], "no session id")]
)
def test_nothing_is_no_message_and_no_session(alone: CommandLine, arguments: list[str], words: str) -> None:
    done = alone(*arguments, "--app", "app.py")
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
