"""Loading an application: by module, attribute or path, and what is found in it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnmill.protocol.errors import ConfigurationError
from turnmill.workers.app import load_app

APP = '''
from turnmill.protocol.specs import AgentSpec, ToolSpec
from turnmill.workers.models import model
from turnmill.workers.providers.scripted import Reply, Script
from turnmill.workers.tools import tool


class Agent:
    def __init__(self, name, tools=(), declared=()):
        self.name, self.tools, self.declared = name, list(tools), list(declared)

    def agent_spec(self):
        return AgentSpec(name=self.name, model="host:echo", tools=[each.name for each in (*self.tools, *self.declared)])

    def tool_specs(self):
        return [*(each.spec for each in self.tools), *self.declared]


@tool
async def weather(city: str) -> str:
    """Weather."""
    return "rain"


@tool
def clock() -> str:
    return "noon"


def make_hidden():
    @tool
    def hidden() -> None: ...

    return hidden


@model("echo")
async def echo(request):
    yield "echo"


same_again = weather
scripts = [Script("one", [Reply(text="1")]), Script("two", [Reply(text="2")])]
more = {"three": Script("three", [Reply(text="3")])}
agent = Agent("assistant", [weather, make_hidden()], [ToolSpec(name="ask_user")])
number = 5
'''


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def written(folder: Path, text: str, name: str = "app.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(target: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_app(str(target))
    return str(caught.value)


def test_a_file_is_searched_for_every_kind_of_definition(tmp_path: Path) -> None:
    app = load_app(str(written(tmp_path, APP)))
    assert set(app.tools) == {"weather", "clock", "hidden"}
    assert set(app.models) == {"echo"}
    assert set(app.scripts) == {"one", "two", "three"}
    assert set(app.agents) == {"assistant"}
    assert app.agent_specs["assistant"].tools == ["weather", "hidden", "ask_user"]
    assert set(app.tool_specs) == {"weather", "clock", "hidden", "ask_user"}


def test_a_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, APP, "shop/assistant_app.py")
    monkeypatch.chdir(tmp_path)
    assert set(load_app("shop.assistant_app").models) == {"echo"}


def test_an_attribute_limits_what_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, APP)
    app = load_app(f"{path}:agent")
    assert (set(app.agents), set(app.tools), app.models) == ({"assistant"}, {"weather", "hidden"}, {})
    assert set(load_app(f"{path}:scripts").scripts) == {"one", "two"}
    assert set(load_app("app:weather").tools) == {"weather"}


def test_siblings_of_a_file_can_be_imported_and_see_the_same_module(tmp_path: Path) -> None:
    written(tmp_path, "import shared_tools_app\n", "sibling_of_app.py")
    path = written(
        tmp_path,
        "import sys\nimport sibling_of_app\nassert sibling_of_app.shared_tools_app is sys.modules[__name__]\n" + APP,
        "shared_tools_app.py",
    )
    assert load_app(str(path)).tools["weather"] is load_app(str(path)).tools["weather"]


def test_files_of_the_same_name_and_of_a_library_s_name_do_not_mix(tmp_path: Path) -> None:
    import json

    first = written(tmp_path / "one", APP)
    second = written(tmp_path / "two", APP.replace('"echo"', '"other"'))
    third = written(tmp_path / "three", APP, "json.py")
    fourth = written(tmp_path / "four", APP, "my.first-app.py")
    assert [set(load_app(str(path)).models) for path in (first, second)] == [{"echo"}, {"other"}]
    assert set(load_app(str(third)).tools) == set(load_app(str(fourth)).tools)
    assert sys.modules["json"] is json


@pytest.mark.parametrize("target", ["", ":agent", "app:", "no such", "folder/app", "app.py/agent"])
def test_a_target_of_another_form_is_refused(target: str) -> None:
    assert "write module, module:attribute or path.py" in refusal(target)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, APP)
    assert "there is no module 'nowhere'" in refusal("nowhere")
    assert "there is no module 'nowhere'" in refusal("nowhere.inner:agent")
    assert "there is no file" in refusal(tmp_path / "nowhere.py")
    assert "app has no 'nothing'" in refusal(f"{path}:nothing")
    assert "number is no tool, hook, model function, script or agent" in refusal(f"{path}:number")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\nraise ValueError('no key')\n", "ValueError: no key"),
        ("import a_library_that_is_missing\n", "ModuleNotFoundError: No module named 'a_library_that_is_missing'"),
        ("def broken(:\n", "SyntaxError"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
        ("from turnmill.workers.tools import tool\n@tool\ndef f(*a): ...\n", "DefinitionError: tool 'f'"),
    ],
)
def test_an_import_that_fails_gives_its_reason_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    path = written(tmp_path, text, "failing_app.py")
    monkeypatch.chdir(tmp_path)
    for target in (str(path), "failing_app"):
        message = refusal(target)
        assert message.startswith(f"{target} cannot be imported: {reason}")
        assert "failing_app.py" in message
        assert "line " in message
    assert "failing_app" not in sys.modules


HOOKS = """
from turnmill.protocol.specs import HookSpec
from turnmill.workers.hooks import hook


class Below(Agent):
    def __init__(self, name, functions=(), agents=()):
        super().__init__(name)
        self.functions, self.below = dict(functions), agents

    def hook_functions(self):
        return {name: (function, HookSpec(name=name), "before_step") for name, function in self.functions.items()}

    def agents(self):
        return [self, *self.below]


@hook(queue="guards")
def guard(event): ...


def plain(event): ...


@tool(approval=plain)
def pay() -> None: ...


def make_agents():
    return Below("outer", {"outer.plain": plain}, [Below("inner", {"inner.plain": plain}, ())])


outer = make_agents()
"""


def test_hooks_come_from_the_module_and_from_what_agents_and_tools_carry(tmp_path: Path) -> None:  # TH-12
    app = load_app(str(written(tmp_path, APP + HOOKS)))
    assert set(app.hooks) == {"guard", "pay.approval", "outer.plain", "inner.plain"}
    assert app.hooks["guard"].spec.queue == "guards"
    assert app.hooks["inner.plain"].function is app.hooks["pay.approval"].function
    assert set(app.agents) == {"assistant", "outer", "inner"}


@pytest.mark.parametrize(
    "clash",
    [
        "other = hook(name='outer.plain')(lambda event: None)",
        "other = hook(name='guard')(guard.function)",  # another queue
    ],
)
def test_two_hooks_of_one_name_are_refused(tmp_path: Path, clash: str) -> None:
    assert "two different definitions of the hook " in refusal(written(tmp_path, f"{APP}{HOOKS}\n{clash}\n"))


def test_a_hook_that_takes_no_event_is_refused_with_its_agent(tmp_path: Path) -> None:
    clash = "other = Below('third', {'third.plain': lambda: None})"
    assert "must take one argument" in refusal(written(tmp_path, f"{APP}{HOOKS}\n{clash}\n"))


CLASHES = {
    "tool": "@tool(name='weather')\ndef other() -> None: ...",
    "model function": "@model('echo')\nasync def second(request):\n    yield 'second'",
    "script": "again = Script('one', [Reply(text='other')])",
    "agent": "agent_again = Agent('assistant')",
}


@pytest.mark.parametrize("kind", CLASHES)
def test_two_different_definitions_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    message = refusal(written(tmp_path, f"{APP}\n\n{CLASHES[kind]}\n"))
    assert f"two different definitions of the {kind} " in message


def test_a_tool_declared_in_another_way_by_an_agent_is_refused(tmp_path: Path) -> None:
    clash = "clash = Agent('second', [], [ToolSpec(name='weather', description='Other.')])"
    assert "two different definitions of the tool 'weather'" in refusal(written(tmp_path, f"{APP}\n{clash}\n"))


def test_equal_definitions_of_one_name_are_one(tmp_path: Path) -> None:
    again = "again = Script('one', [Reply(text='1')])\nagent_again = Agent('assistant', agent.tools, agent.declared)"
    app = load_app(str(written(tmp_path, f"{APP}\n{again}\n")))
    assert len(app.scripts) == 3
    assert len(app.agents) == 1


@pytest.mark.parametrize(
    ("method", "reason"),
    [("raise ValueError('no model')", "cannot be described: no model"), ("return {}", "gives no AgentSpec")],
)
def test_an_agent_that_cannot_be_described_is_refused(tmp_path: Path, method: str, reason: str) -> None:
    broken = f"class Broken(Agent):\n    def agent_spec(self):\n        {method}\n\nbroken = Broken('broken')"
    assert reason in refusal(written(tmp_path, f"{APP}\n{broken}\n"))


def test_objects_that_only_pretend_are_not_asked(tmp_path: Path) -> None:
    pretender = """
class Pretender:
    def __getattr__(self, name):
        raise RuntimeError(name)

pretender = Pretender()
nested = [[pretender], {"a": Agent}]
"""
    assert set(load_app(str(written(tmp_path, APP + pretender))).agents) == {"assistant"}
