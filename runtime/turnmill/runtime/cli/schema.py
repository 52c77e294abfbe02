"""`turnmill schema export DIR`: what stands on the wire, as JSON Schema, generated from the structs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from .exits import CommandError, Exit, say

Check = Annotated[
    bool, typer.Option("--check", envvar="TURNMILL_CHECK", help="Write nothing; fail where DIR is not up to date.")
]
Directory = Annotated[Path, typer.Argument(metavar="DIR", show_default=False)]
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def export(directory: Directory, check: Check = False) -> None:
    files = schema_files()
    if check:
        stale = [name for name, text in files.items() if _read(directory / name) != text]
        if stale:
            raise CommandError(
                f"{', '.join(stale)} in {directory} differ from the code: run `turnmill schema export {directory}`",
                Exit.FAILED,
            )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write into {directory}: {error.strerror}") from error
    say(f"wrote {', '.join(files)} into {directory}")


def schema_files() -> dict[str, str]:
    """The text of every schema file by its name; the same structs give the same bytes."""
    from turnmill.protocol import events, messages, specs

    return {
        "messages.schema.json": _text(
            "Turnmill messages",
            "The bodies (field `d`) of stream entries. `types` gives the body of each type (field `t`), by who sends it.",
            {
                "commands": _by_type(messages.COMMANDS),
                "tasks": _by_type(messages.TASKS),
                "results": _by_type(messages.RESULTS),
                "findings": _by_type(messages.FINDINGS),
            },
        ),
        "events.schema.json": _text(
            "Turnmill events",
            "The bodies (field `d`) of the entries of a turn's channel. `types` gives the body of each type (field `t`).",
            {"events": _by_type(events.EVENTS)},
        ),
        "specs.schema.json": _text(
            "Turnmill specs",
            "What the registries hold: agents, tools, and the plan that a turn pins.",
            {"specs": {"agent": specs.AgentSpec, "tool": specs.ToolSpec, "plan": specs.Plan}},
        ),
    }


def _by_type(kinds: tuple[Any, ...]) -> dict[str, Any]:
    return {kind.type: kind for kind in kinds}


def _text(title: str, description: str, groups: dict[str, dict[str, Any]]) -> str:
    kinds = [kind for group in groups.values() for kind in group.values()]
    references, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    reference_of = dict(zip(kinds, references, strict=True))
    schema = {
        "$schema": DIALECT,
        "title": title,
        "description": description,
        "anyOf": list(references),
        "types": {
            group: {name: reference_of[kind] for name, kind in members.items()} for group, members in groups.items()
        },
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
