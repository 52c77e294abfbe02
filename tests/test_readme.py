"""The README's code runs, and prints what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_snippet_prints_what_the_readme_shows(short_directory: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code is not None and shown is not None
    (short_directory / "readme.py").write_text(code[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TURNMILL_", "REDIS_URL"))}
    outcome = subprocess.run(
        [sys.executable, "readme.py"], cwd=short_directory, env=environment, capture_output=True, text=True, timeout=60
    )
    assert outcome.stdout == shown[1], outcome.stderr


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), f"{document.name} links to {target}"
