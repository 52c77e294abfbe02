"""The command `turnmill`: all commands by name, and one place where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer

from .exits import explain

_COMMANDS = {
    "run": ("run", "run", "Start a turn and watch it."),
    "tail": ("tail", "tail", "Watch a turn, a session, or all turns of the namespace."),
    "show": ("show", "show", "Show one turn: summary, events, messages or timeline."),
    "steer": ("steering", "steer", "Give a live turn another message."),
    "abort": ("steering", "abort", "Stop a turn, wherever it stands."),
    "resume": ("resuming", "resume", "Give a suspended turn the results it waits for, and watch it."),
    "approve": ("approving", "approve", "Let calls run that wait for a person."),
    "deny": ("approving", "deny", "Do not let calls run that wait for a person."),
    "ls": ("listing", "list_command", "List turns, newest first."),
    "dev": ("dev", "dev", "Run everything for an application, and start it again when its code changes."),
    "coordinator": ("roles", "coordinator", "Run a coordinator."),
    "doctor": ("doctor", "doctor", "Check the engine, the namespace, and who is alive."),
    "config": ("config", "config", "Print the effective settings, and where each comes from; secrets are masked."),
    "acl": ("acl", "acl", "Print the access list of a role, as a command for Redis or Valkey."),
    "top": ("top", "top", "Watch the whole namespace: turns, queues, workers, dead letters, the engine."),
}
_GROUPS = {
    "worker": (
        "Run a worker, look at those that run, ask one to leave.",
        {
            "llm": ("roles", "llm", "Run an LLM worker; APP adds its models and scripts."),
            "tools": ("roles", "tools", "Run a worker for the tools of APP, and publish its agents."),
            "ls": (
                "worker",
                "list_workers",
                "List workers and coordinators: what they serve, hold, and when last seen.",
            ),
            "drain": ("worker", "drain", "Ask workers or coordinators to finish what they hold, and leave."),
        },
    ),
    "queue": (
        "Look at task queues, pause and resume them.",
        {
            "ls": ("queue", "list_queues", "List task queues: what waits, what is in work, who serves them."),
            "pause": ("queue", "pause", "Let workers read a queue no more; what runs goes on."),
            "resume": ("queue", "resume", "Let workers read a paused queue again."),
        },
    ),
    "dead": (
        "Look at dead letters, send them again, drop them.",
        {
            "ls": ("dead", "list_letters", "List dead letters, newest first."),
            "show": ("dead", "show", "Show one dead letter: reason, origin, and its bytes."),
            "replay": ("dead", "replay", "Put dead letters back into the streams they came from."),
            "drop": ("dead", "drop", "Delete dead letters."),
        },
    ),
    "session": (
        "Look at sessions, fork and delete them.",
        {
            "show": ("session", "show", "Show a session's turns, or its messages."),
            "fork": ("session", "fork", "Make a new session of a conversation, or of its beginning."),
            "delete": ("session", "delete", "Remove a session with everything that belongs to it."),
        },
    ),
    "tool": ("Look at tools.", {"ls": ("tool_listing", "list_tools", "List registered tools with their policies.")}),
    "provider": (
        "Look at providers of models, try one, see what becomes of its answers.",
        {
            "ls": ("provider_listing", "list_providers", "List providers: keys, limits, calls, what is held back."),
            "check": ("provider_check", "check", "Try what a model can do: text, stream, tools, JSON, abort."),
            "decode": ("provider", "decode", "Print what a worker makes of recorded response bodies."),
        },
    ),
    "schema": (
        "The wire's JSON Schemas.",
        {"export": ("schema", "export", "Write the JSON Schemas of messages, events and specs into DIR.")},
    ),
}
_NAME = "turnmill"


def run_command_line(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a narrow terminal shows a question mark instead of failing
    try:
        code = build_application(arguments)(arguments, prog_name=_NAME, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): nothing is left to say, also not at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        return explain(error)
    return code if isinstance(code, int) else 0


def build_application(arguments: list[str]) -> Any:
    """The click command of all that is needed for these arguments: other commands are there by name alone."""
    application = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="An actor-style agent runtime over Redis or Valkey streams.",
    )
    wanted = [word for word in arguments if not word.startswith("-")][:2]
    for name, entry in _COMMANDS.items():
        _add(application, name, entry, load=wanted[:1] == [name])
    for name, (text, commands) in _GROUPS.items():
        group = typer.Typer(no_args_is_help=True, help=text)
        for inner, entry in commands.items():
            _add(group, inner, entry, load=wanted == [name, inner])
        application.add_typer(group, name=name)
    return typer.main.get_command(application)


def all_commands() -> Any:
    """The click command with everything loaded, for whoever wants to look at it."""
    application = typer.Typer(add_completion=False)
    for name, entry in _COMMANDS.items():
        _add(application, name, entry, load=True)
    for name, (text, commands) in _GROUPS.items():
        group = typer.Typer(help=text)
        for inner, entry in commands.items():
            _add(group, inner, entry, load=True)
        application.add_typer(group, name=name)
    return typer.main.get_command(application)


def _add(application: typer.Typer, name: str, entry: tuple[str, str, str], *, load: bool) -> None:
    module, function, text = entry
    command = getattr(import_module(f".{module}", __package__), function) if load else _unloaded
    application.command(name, help=text)(command)


def _unloaded() -> None:
    """Stands for a command in the list of commands."""
    raise AssertionError("a command that was not loaded was called")
