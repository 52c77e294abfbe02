"""House rules that no other tool checks; each failure lists every offender at once."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("protocol", "runtime", "workers")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
KEYS_FILE = REPOSITORY / "protocol/turnmill/protocol/keys.py"
# The end of a key, or the piece in front of an id: `...:events`, `...:alive:`.
KEY_PIECE = re.compile(
    r":(?:inbox|results|events|transcript|timers|lease|dead|feed|turns|stats|clock)\Z"
    r"|(?:\A|[:}])(?:alive|backlog|backlog-clock|blob|cancel|model|plan|session|tool|transcript|turn):\Z"
)
LUA_TEXT = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"")
LUA_HEADER_WORDS = ("KEYS", "ARGV", "Returns")
# A path on the machine of whoever wrote the file; written so that this line is none.
PRIVATE_PATH = re.compile(r"(?<![\w.~}/-])/(?:" + "|".join(("work", "root", "Users", "tmp/lab")) + r")/\w")


@cache
def tracked_files() -> list[Path]:
    """All files of the repository, committed or about to be; what git ignores is nobody's business."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    paths = (REPOSITORY / name for name in names.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def package_files(suffix: str) -> list[Path]:
    return [path for path in tracked_files() if path.suffix == suffix and relative(path).startswith(ROOTS)]


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_the_import_root_is_a_namespace() -> None:
    """A `turnmill/__init__.py` in one root would hide the packages of the other two."""
    assert [root for root in ROOTS if (REPOSITORY / root / "turnmill/__init__.py").exists()] == []


def test_every_module_says_what_it_is_for() -> None:
    assert [relative(path) for path in package_files(".py") if not ast.get_docstring(tree_of(path))] == []


def test_files_are_small() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in package_files(".py")}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_functions_are_small() -> None:
    long = {
        f"{relative(path)}:{function.lineno} {function.name}": lines
        for path in package_files(".py")
        for function, lines in functions_of(path)
        if lines > FUNCTION_LINES_MAX
    }
    assert long == {}


def functions_of(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1


def test_names_of_keys_are_made_in_one_file() -> None:
    """A key that is put together elsewhere is missed when names change, and may land in another hash slot."""
    pieces = [
        f"{relative(path)}:{line} {text!r}"
        for path in package_files(".py")
        if path != KEYS_FILE
        for line, text in texts_of(path)
        if KEY_PIECE.search(text)
    ]
    assert pieces + list(lua_key_pieces()) == []


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """All string literals, also the literal parts of f-strings."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def lua_key_pieces() -> Iterator[str]:
    for path in package_files(".lua"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            code = line.partition("--")[0]
            for match in LUA_TEXT.finditer(code):
                text = match[1] or match[2] or ""
                if KEY_PIECE.search(text):
                    yield f"{relative(path)}:{number} {text!r}"


def test_every_script_has_a_header() -> None:
    """Purpose first, then KEYS, ARGV and what it returns: other languages call these scripts too."""
    missing = {
        relative(path): lacking
        for path in package_files(".lua")
        if (lacking := lacking_in_header(path.read_text(encoding="utf-8")))
    }
    assert missing == {}


def lacking_in_header(script: str) -> list[str]:
    header: list[str] = []
    for line in script.splitlines():
        if not line.startswith("--"):
            break
        header.append(line.lstrip("- "))
    purpose_missing = not header or not header[0] or header[0].startswith(LUA_HEADER_WORDS)
    absent = [word for word in LUA_HEADER_WORDS if not any(line.startswith(word) for line in header)]
    return (["purpose"] if purpose_missing else []) + absent


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    offenders = [
        f"{relative(path)}: {match[0]}"
        for path in tracked_files()
        if (match := PRIVATE_PATH.search(path.read_bytes().decode(errors="ignore")))
    ]
    assert offenders == []
