"""The commands that change a live turn or a session, against real processes: what they print, and what they bring about."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.commands import CommandLine, Started, json_lines
from support.waiting import wait_until

APP = '''
"""An application for tests of steering from the command line."""

import asyncio
from turnmill.protocol.content import ErrorInfo
from turnmill.runtime import Agent, HostTool, handoff_to
from turnmill.workers import tool
from turnmill.workers.providers.scripted import Call, Reply, Script


@tool(approval="always", queue="careful", timeout=30, retries=2)
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@tool
async def wait_long() -> str:
    """Wait for longer than any test does."""
    await asyncio.sleep(300)
    return "waited"


ask = HostTool("ask", "Ask the person at the desk.", {"type": "object", "properties": {"what": {"type": "string"}}})
asking = [Call("ask", {"what": "city"}, id="call_a"), Call("ask", {"what": "day"}, id="call_b")]
paying = [Call("pay", {"amount": 5}, id="call_1"), Call("pay", {"amount": 900}, id="call_2")]



def answer(request):
    """Ask, and answer; a message behind the results is answered as well."""
    last = request.messages[-1]
    if last.text == "be brief":
        return Reply(text="Briefly: Oslo, Monday.")
    return Reply(text="${results[0]} on ${result}.") if last.tool_results else Reply("Let me ask.", tool_calls=asking)


failing = Reply(error=ErrorInfo(kind="bad_request", message="no credit"))

scripts = [
    Script("asks", answer),
    Script("pays", [Reply(tool_calls=paying), Reply(text="First: ${results[0]}. Then: ${result}.")]),
    Script("slow", [Reply(text="one two", chunks=2, delay_seconds=300)]),
    Script("stuck", [Reply(text="Hold on.", tool_calls=[Call("wait_long")]), Reply(text="You said ${input}")]),
    Script("said", [Reply(text="You said ${input}")]),
    Script("leads", [Reply(tool_calls=[Call("helper", {"message": "hello"})]), Reply(text="It said: ${result}")]),
    Script("leads_askers", [Reply(tool_calls=[Call("asks", {"message": "hello"})]), Reply(text="It said: ${result}")]),
    Script("hands", [Reply(tool_calls=[Call("transfer_to_helper")])]),
    Script("exchange", [Reply(tool_calls=asking[:1]), Reply(attempts=[failing, Reply(text="At last: ${result}")])]),
]
helper = Agent("helper", model="scripted:said")
asker = Agent("asks", model="scripted:asks", tools=[ask])
agents = [
    helper,
    asker,
    Agent("exchange", model="scripted:exchange", tools=[ask], mode="single_exchange"),
    Agent("pays", model="scripted:pays", tools=[pay]),
    Agent("slow", model="scripted:slow"),
    Agent("stuck", model="scripted:stuck", tools=[wait_long]),
    Agent("said", model="scripted:said"),
    Agent("leads", model="scripted:leads", tools=[helper.as_tool()]),
    Agent("leads_askers", model="scripted:leads_askers", tools=[asker.as_tool()]),
    Agent("hands", model="scripted:hands", tools=[handoff_to(helper)]),
]
'''


@pytest.fixture(scope="module")
def turnmill(valkey_url: str) -> Iterator[CommandLine]:
    """The command line of a namespace that has a coordinator, an LLM worker and a tool worker."""
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    (directory / "app.py").write_text(APP, encoding="utf-8")
    line = CommandLine(directory, redis_url=valkey_url, namespace=f"test-{os.urandom(6).hex()}")
    with ExitStack() as stack:
        coordinator = stack.enter_context(line.started("coordinator"))
        workers = [stack.enter_context(line.started("worker", kind, "app.py")) for kind in ("llm", "tools")]
        coordinator.wait_for("partition taken over", 4)
        for worker in workers:
            worker.wait_for("worker started")
        yield line
    shutil.rmtree(directory)


def suspended(line: CommandLine, agent: str) -> str:
    """The id of a turn that has come to rest."""
    done = line("run", agent, "hello", "--json")
    assert done.returncode == 5, done.stderr
    return str(json_lines(done.stdout)[0]["turn_id"])


@contextmanager
def running(line: CommandLine, agent: str, *arguments: str, until: str) -> Iterator[tuple[str, Started]]:
    """A turn that is watched and goes on."""
    with line.started("run", agent, "hello", *arguments) as run:
        run.wait_for(until)
        found = re.search(r"● \S+  (t\d\S+)", run.output())
        assert found is not None, run.output()
        yield found[1], run


# ---- suspension


def test_a_suspended_turn_is_exit_code_5_and_says_how_to_go_on(turnmill: CommandLine) -> None:
    done = turnmill("run", "asks", "hello")
    assert done.returncode == 5
    last = done.stdout.splitlines()[-1]
    assert last == '‖ suspended: it waits for the results of ask(what="city") call_a, ask(what="day") call_b'
    found = re.fullmatch(
        r"turnmill: give the results: `turnmill resume (\S+) --result call_a=@FILE --result call_b=@FILE`\n",
        done.stderr,
    )
    assert found is not None, done.stderr
    again = turnmill("tail", found[1])
    assert (again.returncode, again.stderr) == (5, done.stderr), "whoever comes later is told the same"


def test_resume_takes_values_and_files_and_watches_on(turnmill: CommandLine) -> None:
    turn = suspended(turnmill, "asks")
    (turnmill.directory / "day.json").write_text('{"day": "Monday"}', encoding="utf-8")
    done = turnmill("resume", turn, "--result", "call_a=Oslo", "--result", "call_b=@day.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("▶ resumed with call_a, call_b")
    assert any("Oslo on" in line and "Monday" in line for line in lines)
    assert not any("Let me ask" in line for line in lines), "what was seen before is not shown again"
    whole = turnmill("tail", turn)
    assert whole.returncode == 0, "a suspension of the past does not end the watching"
    assert whole.stdout.count("suspended") == 1


def test_resume_in_parts_says_what_is_still_missing(turnmill: CommandLine) -> None:
    turn = suspended(turnmill, "asks")
    first = turnmill("resume", turn, "--result", "call_b=Monday")
    assert first.returncode == 5, first.stderr
    assert f"`turnmill resume {turn} --result call_a=@FILE`" in first.stderr
    repeated = turnmill("resume", turn, "--result", "call_b=Tuesday")
    assert (repeated.returncode, repeated.stderr) == (5, first.stderr), "the first result of a call stands"
    detached = turnmill("resume", turn, "--result", "call_a=Oslo", "--message", "be brief", "--detach", "--json")
    assert json_lines(detached.stdout) == [{"turn_id": turn, "pending": []}]
    tail = turnmill("tail", turn)
    assert tail.returncode == 0
    assert "Briefly: Oslo, Monday." in tail.stdout
    assert "» steering queued: be brief" in tail.stdout


def test_show_tells_what_a_suspended_turn_waits_for(turnmill: CommandLine) -> None:
    turn = suspended(turnmill, "asks")
    shown = turnmill("show", turn).stdout
    assert "state     suspended" in shown
    assert 'waits for the result of call_a: ask(what="city")' in shown
    assert f"turnmill resume {turn} --result call_a=@FILE --result call_b=@FILE" in shown
    (fields,) = json_lines(turnmill("show", turn, "--json").stdout)
    assert [call["id"] for call in fields["pending"]] == ["call_a", "call_b"]
    assert fields["pending"][0]["arguments"] == {"what": "city"}
    assert "suspended" in turnmill("show", turn, "--timeline").stdout
    assert turn in turnmill("ls", "--state", "suspended").stdout


def test_resume_brings_its_own_runtime_where_there_is_none(short_directory: Path) -> None:
    """Without a Redis URL: the first process is gone, and what it left goes on in another one."""  # AE-06
    (short_directory / "app.py").write_text(APP, encoding="utf-8")
    line = CommandLine(short_directory)
    done = line("run", "asks", "hello", "--app", "app.py")
    found = re.search(r"`turnmill (resume \S+ .*--app app.py)`", done.stderr)
    assert (done.returncode, found is not None) == (5, True), done.stderr
    words = str(found and found[1]).replace("call_a=@FILE", "call_a=Oslo").replace("call_b=@FILE", "call_b=Monday")
    resumed = line(*words.split())
    assert resumed.returncode == 0, resumed.stderr
    assert "Oslo on Monday." in resumed.stdout


def test_a_command_that_nobody_answers_says_who_is_missing(
    valkey_url: str, namespace: str, short_directory: Path
) -> None:
    (short_directory / "app.py").write_text(APP, encoding="utf-8")
    line = CommandLine(short_directory, redis_url=valkey_url, namespace=namespace)
    turn = line("run", "said", "hello", "--app", "app.py", "--detach").stdout.strip()
    with line.started("abort", turn) as abort:
        abort.wait_for("no coordinator is alive: start `turnmill coordinator`")
        assert abort.stop(signal.SIGINT) == 2


def test_a_provider_call_that_failed_is_repeated_by_resume(turnmill: CommandLine) -> None:
    turn = suspended(turnmill, "exchange")
    failed = turnmill("resume", turn, "--result", "call_a=Oslo")
    assert failed.returncode == 5, failed.stderr
    assert "‖ suspended: the provider call failed: no credit (bad_request)" in failed.stdout
    assert failed.stderr == f"turnmill: the provider call failed; `turnmill resume {turn}` repeats it\n"
    assert "no credit (bad_request)" in turnmill("show", turn).stdout
    repeated = turnmill("resume", turn)
    assert repeated.returncode == 0, repeated.stderr
    assert "At last: Oslo" in repeated.stdout


# ---- approvals


def test_approvals_are_decided_one_by_one_or_together(turnmill: CommandLine) -> None:  # AC-48
    done = turnmill("run", "pays", "hello")
    assert done.returncode == 5
    assert "  ? pay(amount=5) waits for approval  call_1" in done.stdout.splitlines()
    found = re.search(r"`turnmill approve (\S+) call_1 call_2`, or `turnmill deny", done.stderr)
    assert found is not None, done.stderr
    turn = found[1]
    shown = turnmill("show", turn).stdout
    assert "waits for the approval of call_2: pay(amount=900)" in shown
    one = turnmill("approve", turn, "call_1", "--json")
    assert json_lines(one.stdout) == [{"turn_id": turn, "approved": ["call_1"], "pending": ["call_2"]}]
    rest = turnmill("deny", turn, "--all", "--reason", "too much")
    assert (rest.returncode, rest.stdout) == (0, "denied: call_2\n"), rest.stderr
    tail = turnmill("tail", turn)
    assert tail.returncode == 0, tail.stderr
    assert "  ? pay(amount=5) approved" in tail.stdout.splitlines()
    assert "  ? pay(amount=900) denied: too much" in tail.stdout.splitlines()
    assert "First: paid 5." in tail.stdout
    none = turnmill("approve", turn, "--all")
    assert (none.returncode, "no call of turn" in none.stderr) == (2, True)


# ---- steering


def test_steer_prints_the_id_that_the_events_tell(turnmill: CommandLine) -> None:
    with running(turnmill, "stuck", until="Hold on.") as (turn, run):
        sent = turnmill("steer", turn, "hurry up", "--role", "system", "--json")
        assert sent.returncode == 0, sent.stderr
        (entry,) = json_lines(sent.stdout)
        run.wait_for(f"» steering queued (system): hurry up  {entry['steering_id']}")
        queued = turnmill("steer", turn, "next", "--mode", "queue")
        assert turnmill("abort", turn).returncode == 0
        run.wait_for("» steering dropped")
        following = queued.stdout.strip()
        with turnmill.started("tail", following) as tail:
            tail.wait_for("Hold on.")
            assert f"● stuck  {following}" in tail.output(), "the id of a queued message is that of its turn"
        assert turnmill("abort", following).returncode == 0


# ---- stop


def test_abort_stops_a_turn_from_another_terminal_and_may_be_repeated(turnmill: CommandLine) -> None:  # AC-42
    with running(turnmill, "slow", until="one") as (turn, run):
        done = turnmill("abort", turn, "--reason", "changed my mind")
        assert (done.returncode, "stopped" in done.stdout or "aborted" in done.stdout) == (0, True), done.stderr
        assert run.process.wait(30) == 2
        assert "✗ aborted: changed my mind (aborted)" in run.output()
        again = turnmill("abort", turn, "--json")
        assert json_lines(again.stdout) == [{"turn_id": turn, "stopped": True, "status": "aborted"}]


def test_abort_says_that_a_turn_had_ended(turnmill: CommandLine) -> None:
    turn = turnmill("run", "said", "hello", "--detach").stdout.strip()
    assert turnmill("tail", turn).returncode == 0
    done = turnmill("abort", turn)
    assert (done.returncode, done.stdout) == (0, f"turn {turn} was not live: it has finished already\n")


# ---- start


def test_the_same_idempotency_key_gives_the_same_turn(turnmill: CommandLine) -> None:  # AC-14
    key = ["--idempotency-key", "order-7", "--detach"]
    first, second = (turnmill("run", "said", "hello", *key) for _ in range(2))
    assert first.stdout == second.stdout != ""
    other = turnmill("run", "said", "goodbye", *key)
    assert other.returncode == 2
    assert "refused (idempotency_conflict)" in other.stderr
    assert f"`turnmill show {first.stdout.strip()}`" in other.stderr


def test_a_busy_session_does_what_was_asked_for(turnmill: CommandLine) -> None:
    with running(turnmill, "slow", "--session", "desk", until="one") as (turn, run):
        rejected = turnmill("run", "said", "hello", "--session", "desk", "--on-busy", "reject")
        assert rejected.returncode == 2
        assert "refused (session_busy)" in rejected.stderr
        assert f"`turnmill tail {turn}`" in rejected.stderr
        steered = turnmill("run", "said", "faster", "--session", "desk", "--on-busy", "steer", "--detach")
        assert steered.stdout.strip() == turn
        run.wait_for("» steering queued: faster")
        taken_over = turnmill("run", "said", "hello", "--session", "desk", "--on-busy", "interrupt")
        assert taken_over.returncode == 0, taken_over.stderr
        assert "You said hello" in taken_over.stdout
        assert run.process.wait(30) == 2


@pytest.mark.parametrize("policy", ["queue", "reject", "steer"])
def test_a_suspended_session_takes_no_message_and_says_what_it_waits_for(turnmill: CommandLine, policy: str) -> None:
    session = f"front-{policy}"  # AE-05
    turn = str(json_lines(turnmill("run", "asks", "hello", "--session", session, "--json").stdout)[0]["turn_id"])
    refused = turnmill("run", "said", "hello", "--session", session, "--on-busy", policy)
    assert refused.returncode == 2, refused.stderr
    assert "tool_results_required" in refused.stderr
    assert f"`turnmill resume {turn} --result call_a=@FILE --result call_b=@FILE`" in refused.stderr


# ---- sub-turns and handoffs


def test_sub_turns_are_shown_where_they_are_asked_for(turnmill: CommandLine) -> None:
    turn = turnmill("run", "leads", "hello", "--detach").stdout.strip()
    plain = turnmill("tail", turn).stdout
    assert "↳ helper" in plain
    assert "│" not in plain
    whole = turnmill("tail", turn, "--sub-turns")
    assert whole.returncode == 0, whole.stderr
    lines = whole.stdout.splitlines()
    assert any(line.startswith("│ ● helper") for line in lines)
    assert "│ You said hello" in lines
    assert "It said: You said hello" in lines
    events = json_lines(turnmill("tail", turn, "--sub-turns", "--json").stdout)
    own = [event["seq"] for event in events if "seq" in event]
    assert own == list(range(1, len(own) + 1))
    below = [event for event in events if "sub_turn" in event]
    assert [below[0]["type"], below[-1]["type"]] == ["turn.started", "turn.finished"]
    timeline = json_lines(turnmill("show", turn, "--timeline", "--json").stdout)
    child = below[0]["sub_turn"]["turn_id"]
    assert [(span["kind"], span.get("turn_id")) for span in timeline if span["depth"] == 2] == [("model", child)]


def test_a_sub_turn_that_waits_is_named_to_whoever_watches_its_parent(turnmill: CommandLine) -> None:
    with turnmill.started("run", "leads_askers", "hello") as run:
        run.wait_for("is suspended; give the results")
        found = re.search(r"`turnmill resume (\S+) --result call_a=@FILE", run.output())
        assert found is not None, run.output()
        done = turnmill("resume", found[1], "--result", "call_a=Oslo", "--result", "call_b=Monday")
        assert done.returncode == 0, done.stderr
        assert run.process.wait(30) == 0
        assert "It said: Oslo on Monday." in run.output() or "Oslo on Monday." in run.output()


def test_a_handoff_is_told(turnmill: CommandLine) -> None:
    done = turnmill("run", "hands", "hello")
    assert done.returncode == 0, done.stderr
    assert "⇒ hands hands over to helper" in done.stdout.splitlines()


# ---- tools and sessions


def test_tool_ls_tells_the_policies(turnmill: CommandLine) -> None:
    listed = {tool["name"]: tool for tool in json_lines(turnmill("tool", "ls", "--json").stdout)}
    pay = listed["pay"]
    assert (pay["queue"], pay["timeout_seconds"], pay["max_attempts"]) == ("careful", 30.0, 3)
    assert (pay["kind"], pay["approval"]["mode"], pay["owner"]) == ("worker", "always", None)
    assert (listed["ask"]["kind"], listed["ask"]["owner"]) == ("host", "exchange")
    table = turnmill("tool", "ls").stdout.splitlines()
    assert table[0].split()[:3] == ["TOOL", "KIND", "QUEUE"]
    assert any(row.split()[:3] == ["pay", "worker", "careful"] and row.endswith("always") for row in table)


def test_a_session_is_shown_forked_and_deleted(turnmill: CommandLine) -> None:
    for text in ("first", "second"):
        assert turnmill("run", "said", text, "--session", "shop").returncode == 0
    turns = json_lines(turnmill("session", "show", "shop", "--json").stdout)
    assert [turn["state"] for turn in turns] == ["finished", "finished"]
    assert "assistant: You said second" in turnmill("session", "show", "shop", "--messages").stdout
    fork = turnmill("session", "fork", "shop", "--into", "copy", "--turn", turns[-1]["turn_id"])
    assert (fork.returncode, fork.stdout) == (0, "shop/copy\n"), fork.stderr
    copied = turnmill("session", "show", "shop/copy", "--messages").stdout
    assert "You said first" in copied
    assert "second" not in copied
    again = turnmill("session", "fork", "shop", "--into", "copy")
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    deleted = turnmill("session", "delete", "shop")
    assert (deleted.returncode, deleted.stdout) == (0, "session shop is deleted\n"), deleted.stderr
    assert turnmill("session", "show", "shop", "--messages").stdout == ""
    assert "You said first" in turnmill("session", "show", "shop/copy", "--messages").stdout


def test_tail_of_a_session_outlasts_a_suspension(turnmill: CommandLine) -> None:
    with turnmill.started("tail", "--session", "counter") as tail:
        wait_until(lambda: "has no turn yet" in tail.output(), 30)
        assert turnmill("run", "asks", "hello", "--session", "counter", "--detach").returncode == 0
        tail.wait_for("give the results")
        turn = str(re.search(r"turnmill resume (\S+)", tail.output())[1])  # type: ignore[index]  # it was waited for
        assert turnmill("resume", turn, "--result", "call_a=Oslo", "--result", "call_b=Monday").returncode == 0
        tail.wait_for("Oslo on Monday.")


# ---- mistakes

NO_TURN = "t0-01m8q3aachnhp4jrxnf0s3bvhc"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["steer", "nonsense", "hello"], "not the id of a turn"),
        (["steer", NO_TURN, "hello"], "nothing is known of turn"),
        (["steer", NO_TURN, "hello", "--mode", "later"], "--mode"),
        (["abort", NO_TURN], "nothing is known of turn"),
        (["resume", NO_TURN, "--result", "call_a"], "CALL_ID=VALUE"),
        (["resume", NO_TURN, "--result", "a=1", "--result", "a=2"], "given twice"),
        (["resume", NO_TURN, "--result", "a=@nowhere.json"], "cannot read nowhere.json"),
        (["approve", NO_TURN], "say --all"),
        (["approve", NO_TURN, "call_1", "--all"], "say --all"),
        (["run", "said", "hello", "--on-busy", "wait"], "--on-busy"),
        (["session", "show", "nobody-was-here"], "there is no session"),
        (["session", "fork", "nobody-was-here"], "no messages to fork"),
        (["session", "fork", "desk", "--step", "2"], "--turn TURN"),
        (["session", "delete", "a b"], "no session id"),
    ],
)
def test_a_mistake_is_a_clear_line(turnmill: CommandLine, arguments: list[str], words: str) -> None:
    done = turnmill(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("turnmill: ")]) <= 1


def test_a_refused_command_says_what_to_type_instead(turnmill: CommandLine) -> None:
    turn = suspended(turnmill, "asks")
    unknown = turnmill("resume", turn, "--result", "call_c=1")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("turnmill: refused (unknown_tool_result): ")
    assert f"`turnmill resume {turn} --result call_a=@FILE --result call_b=@FILE`" in unknown.stderr
    assert unknown.stderr.count("\n") == 1
    nothing = turnmill("approve", turn, "call_a")
    assert (nothing.returncode, "refused (no_pending_approval)" in nothing.stderr) == (2, True)
    turnmill("abort", turn)
    wait_until(lambda: turnmill("show", turn, "--json").stdout.count('"state":"aborted"'))
    ended = turnmill("steer", turn, "hello")
    assert (ended.returncode, "refused (turn_ended)" in ended.stderr) == (2, True)
    assert f"`turnmill show {turn}`" in ended.stderr
