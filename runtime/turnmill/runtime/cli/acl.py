"""`turnmill acl ROLE`: an `ACL SETUSER` line with what a role needs in the engine, and nothing else."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from . import options
from .exits import CommandError, Exit

RoleArgument = Annotated[
    str,
    typer.Argument(
        metavar="ROLE",
        help="client, coordinator, llm, tools, foreign-tools (a worker in another language), monitor, operator or gateway.",
        show_default=False,
    ),
]
User = Annotated[
    str | None,
    typer.Option("--user", envvar="TURNMILL_USER", metavar="NAME", help="The user's name; by default the role's."),
]
Queue = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        envvar="TURNMILL_QUEUE",
        metavar="Q",
        help="A tool queue, or a pool of an LLM worker; may be repeated.",
    ),
]
Hooks = Annotated[
    bool,
    typer.Option(
        "--hooks", envvar="TURNMILL_HOOKS", help="For tools: the worker carries hooks, which see conversations."
    ),
]
Publish = Annotated[
    bool,
    typer.Option(
        "--publish",
        envvar="TURNMILL_PUBLISH",
        help="For tool workers: may define agents and tools, of any name and queue.",
    ),
]
State = Annotated[
    bool,
    typer.Option(
        "--state/--no-state", envvar="TURNMILL_STATE", help="For tool workers: session values (ToolContext.state)."
    ),
]
PasswordEnv = Annotated[
    str | None,
    typer.Option(
        "--password-env",
        envvar="TURNMILL_PASSWORD_ENV",
        metavar="VARIABLE",
        help="Take the password from there; without it, >PASSWORD stands.",
    ),
]


def acl(
    role: RoleArgument,
    user: User = None,
    queue: Queue = None,
    hooks: Hooks = False,
    publish: Publish = False,
    state: State = True,
    password_env: PasswordEnv = None,
    namespace: options.Namespace = None,
    as_json: options.Json = False,
) -> int:
    import msgspec

    from ..acl import ROLES, SERVING_ROLES, AccessLists
    from .attachment import command_settings

    if role not in ROLES:
        raise CommandError(f"no role {role!r}: {', '.join(ROLES)}", Exit.USAGE)
    if queue and role not in SERVING_ROLES:
        raise CommandError(f"--queue is for {', '.join(SERVING_ROLES)}: a {role} serves none", Exit.USAGE)
    if publish and role not in ("tools", "foreign-tools"):
        raise CommandError(f"--publish is for tool workers: whether a {role} publishes does not change", Exit.USAGE)
    if hooks and role != "tools":
        raise CommandError("--hooks is for tools", Exit.USAGE)
    settings = command_settings(None, namespace)
    name = user or role
    lists = AccessLists(settings.namespace, settings.partitions, name, queue or [])
    rules = lists.of_role(role, hooks=hooks, publish=publish, state=state).words()
    words = [name, "reset", "on", f">{_password(password_env)}", *rules]
    if as_json:
        sys.stdout.write(msgspec.json.encode({"user": name, "role": role, "rules": rules}).decode() + "\n")
    else:
        sys.stdout.write("ACL SETUSER " + " ".join(words) + "\n")
    return Exit.OK


def _password(variable: str | None) -> str:
    if variable is None:
        return "PASSWORD"
    password = os.environ.get(variable, "")
    if not password or any(character.isspace() for character in password):
        raise CommandError(f"{variable} (--password-env) has no password: it is empty, or has white space", Exit.USAGE)
    return password
