"""`TURNMILL_TELEMETRY=module:function` finds what is beside the process, as an APP is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turnmill.protocol.errors import ConfigurationError
from turnmill.runtime.telemetry import start_telemetry


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory whose modules Python does not find by itself, as with the installed command."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and Path(entry) != Path.cwd()])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_of_the_working_directory_is_found(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "my_own_telemetry.py").write_text("def heard(event):\n    pass\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_own_telemetry", raising=False)
    start_telemetry("my_own_telemetry:heard")()
    start_telemetry("my_own_telemetry:heard")()
    assert sys.path.count(str(elsewhere)) == 1
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        start_telemetry("my_own_telemetry:spoken")
