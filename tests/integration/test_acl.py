"""Access lists on the real server: each role can do all that it does, and nothing else (`turnmill acl`)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from apps.guarded import APP, guarded, watched
from support.commands import CommandLine, json_lines
from support.forbidden import forbidden
from support.processes import REPOSITORY
from support.stage import PATIENCE_SECONDS, Stage, open_stage, told
from support.users import PASSWORD, Users, open_users, with_user
from support.waiting import wait_until_async
from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.settings import load_settings
from turnmill.protocol.streams import COMMIT_TURNS, SWAP_VALUE
from turnmill.runtime import Turn
from turnmill.runtime.acl import ROLES, AccessLists
from turnmill.runtime.client import Client, open_client

FOREIGN = REPOSITORY / "tests/conformance/foreign_worker.py"
TRIED = (":tools", ":agent-uses", "command hsetnx", ":removals")
"""Tool workers publish where they may, and clients help to remove a session; what they may not do is left to others."""


@pytest.fixture
async def users(valkey_url: str, namespace: str) -> AsyncIterator[Users]:
    async with open_users(valkey_url, namespace) as opened:
        yield opened


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        yield opened


async def start_fleet(stage: Stage, users: Users) -> None:
    """A process of each kind, each under a user of its own."""
    stage.processes.coordinator(redis_url=await users.add("coordinator"))
    stage.processes.llm(APP, redis_url=await users.add("llm"))
    stage.processes.tools(APP, queues=["mail"], redis_url=await users.add("tools", "mail"))
    stage.processes.tools(APP, queues=["looks"], redis_url=await users.add("tools", "looks", name="hooks", hooks=True))
    foreign = await users.add("foreign-tools", "foreign", publish=True)
    user = f"foreign-tools.{stage.keys.prefix}"
    stage.processes.start(
        "foreign", [sys.executable, str(FOREIGN)], {"TURNMILL_REDIS_URL": foreign, "WORKER_NAME": user}
    )


async def all_alive(stage: Stage, count: int) -> None:
    async def alive() -> bool:
        for process in stage.processes.all:
            assert process.is_alive, process.log()
        return int(await stage.redis.hlen(stage.keys.workers)) >= count

    await wait_until_async(alive, PATIENCE_SECONDS)


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


def calls(*names: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"name": name, "arguments": {"value": name} | arguments} for name in names]


async def test_turns_run_with_every_process_under_its_own_user(stage: Stage, users: Users) -> None:
    """Tools, session values, large results, hooks, a worker in another language, a stop: nothing was refused to anybody."""
    await start_fleet(stage, users)
    await all_alive(stage, 4)
    url = await users.add("client")
    settings = load_settings(redis_url=url, namespace=stage.keys.prefix)
    async with open_client(url, settings) as client:
        step = [
            *calls("send", "tally"),
            *calls("bulk", size=50_000),
            {"name": "count_letters", "arguments": {"text": "six letters"}},
        ]
        turn = await client.turn(watched, told(step, calls("tally", value="again")), session="s")
        result = await end(turn)
        assert result.answer == "all done"
        assert await client.session("s").values.get("count") == 2
        await _other_things(client)
    refused = [entry for entry in await users.refusals() if not entry.endswith(TRIED)]
    assert not refused, "\n".join(refused)


async def _other_things(client: Client) -> None:
    """What else a client does: stop, look, fork, retry, delete."""
    stopped = await client.turn(guarded, told(calls("send", until="/nowhere/never")), session="t")
    async for event in stopped.events():
        if event.type == "tool_execution.progress":
            break
    await stopped.abort("enough")
    again = client.attach(stopped.id)
    assert [event.type async for event in again.events()][-1] == "turn.failed"
    session = client.session("s")
    fork = await session.fork()
    assert await fork.values.get("count") == 2
    assert (await end(await fork.retry())).answer == "all done"
    once = await client.turn(guarded, told(), session="u", idempotency_key="k")
    assert (await client.turn(guarded, told(), session="u", idempotency_key="k")).id == once.id
    await end(once)
    await session.delete()


async def test_a_user_that_may_not_send_scripts_waits_for_them(stage: Stage, users: Users) -> None:
    """A server that was started again has no scripts; a coordinator sends them, and tools and models go on."""
    await start_fleet(stage, users)
    await all_alive(stage, 4)
    await stage.redis.script_flush()
    turn = await stage.client.turn(guarded, told(calls("tally"), calls("tally", value="again")), session="s")
    assert (await end(turn)).answer == "all done"
    assert await stage.client.session("s").values.get("count") == 2


async def test_a_worker_says_which_queue_it_may_not_read(stage: Stage, users: Users) -> None:
    process = stage.processes.tools(APP, queues=["honest"], redis_url=await users.add("tools", "mail"))
    await wait_until_async(lambda: not process.is_alive, PATIENCE_SECONDS)
    assert "may not read" in process.log() and "tool:honest" in process.log()


async def test_a_worker_says_so_when_the_namespace_is_not_there(users: Users, namespace: str) -> None:
    url = await users.add("tools", "mail")
    with pytest.raises(ConfigurationError, match="start a coordinator first"):
        async with open_client(url, load_settings(redis_url=url, namespace=namespace)):
            pass


# ---- what is forbidden


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_is_refused_what_it_does_not_need(
    role: str, users: Users, redis_client: redis.asyncio.Redis, namespace: str
) -> None:
    url = await users.add(role, *(["mail"] if role.endswith("tools") else []))
    allowed = []
    async with redis.asyncio.Redis.from_url(url, single_connection_client=True) as client:
        for command in forbidden(role, namespace, users.names[0]):
            try:
                allowed.append((command, await client.execute_command(*command)))
            except NoPermissionError:
                continue
            except RedisError as error:
                if "NOPERM" not in str(error) and "ACL failure" not in str(error):
                    allowed.append((command, error))
    assert not allowed, "\n".join(map(str, allowed))


async def test_a_tool_workers_scripts_reach_only_session_values(
    users: Users, redis_client: redis.asyncio.Redis, namespace: str
) -> None:
    """Scripts run with the rights of who calls them: one that is in the server for a coordinator gives no others."""
    for script in (SWAP_VALUE, COMMIT_TURNS):
        await redis_client.script_load(script.source)
    base = f"{namespace}:{{0}}:"
    async with redis.asyncio.Redis.from_url(await users.add("tools", "mail")) as client:

        async def run(script: Any, *keys: str, arguments: tuple[Any, ...] = ()) -> Any:
            digest = await redis_client.script_load(script.source)
            return await client.evalsha(digest, len(keys), *keys, *arguments)

        assert await run(SWAP_VALUE, f"{base}values:s", arguments=("a", 0, "", "1")) == b"OK"
        for key in ("session:s", "turn:t0-x", "stats"):
            with pytest.raises(NoPermissionError):
                await run(SWAP_VALUE, f"{base}{key}", arguments=("a", 0, "", "1"))
        with pytest.raises(NoPermissionError):
            await run(COMMIT_TURNS, f"{base}inbox", f"{base}results", arguments=("coordinator", 1, 0, "w"))
    assert not await redis_client.exists(f"{base}session:s", f"{base}stats")


def test_names_that_would_match_others_are_refused() -> None:
    for user, queue in (("a*", "q"), ("a", "q*"), ("a b", "q"), ("a@b", "q"), ("a", "[q]")):
        with pytest.raises(ConfigurationError):
            AccessLists("tm", 4, user, [queue])


async def test_names_of_two_digits_are_partitions_too(
    redis_client: redis.asyncio.Redis, valkey_url: str, namespace: str
) -> None:
    many = Users(redis_client, valkey_url, namespace, partitions=16)
    async with redis.asyncio.Redis.from_url(await many.add("tools", "mail")) as client:
        for number in (0, 9, 10, 15):
            await client.xgroup_create(f"{namespace}:{{{number}}}:tool:mail", "workers", "0", mkstream=True)
        for part in ("x", "100", "1}:tool:mail:{1"):
            with pytest.raises(NoPermissionError):
                await client.xgroup_create(f"{namespace}:{{{part}}}:tool:mail", "workers", "0", mkstream=True)
    await many.remove()


# ---- the command line


async def test_the_command_prints_what_the_server_takes(
    redis_client: redis.asyncio.Redis, users: Users, namespace: str, valkey_url: str, short_directory: Path
) -> None:
    command = CommandLine(short_directory, namespace=namespace)
    printed = command("acl", "tools", "--user", f"tools.{namespace}", "--queue", "mail", "--password-env", "SECRET_OF_MINE",
                      variables={"SECRET_OF_MINE": PASSWORD})  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    users.names.append(f"tools.{namespace}")
    assert await redis_client.execute_command(*printed.stdout.split()) == b"OK"
    async with redis.asyncio.Redis.from_url(with_user(valkey_url, f"tools.{namespace}", PASSWORD)) as client:
        assert await client.ping()
    assert ">PASSWORD" in command("acl", "monitor").stdout
    (told_rules,) = json_lines(command("acl", "monitor", "--json").stdout)
    assert told_rules["role"] == "monitor"
    assert told_rules["rules"][:3] == ["resetkeys", "resetchannels", "-@all"]
    for arguments, said in (
        (["nobody"], "client, coordinator"),
        (["client", "--queue", "q"], "serves none"),
        (["tools", "--password-env", "NOTHING"], "NOTHING"),
    ):
        refused = command("acl", *arguments)
        assert refused.returncode == 2 and said in refused.stderr, refused


async def test_monitors_see_numbers_and_no_content(stage: Stage, users: Users, short_directory: Path) -> None:
    """Arguments, texts and results are for those who may read them."""
    await start_fleet(stage, users)
    await all_alive(stage, 4)
    until = short_directory / "go"
    turn = await stage.client.turn(
        guarded, told(calls("send", value="a-secret-argument", until=str(until))), session="s"
    )
    await stage.event(turn, "tool_execution.progress")
    await stage.redis.xadd(stage.keys.partitions[0].inbox, {"t": "junk", "d": "a-secret-argument"})
    await stage.redis.xadd(stage.keys.partitions[0].tool("nobody"), {"t": "tool_task", "d": "a-secret-argument"})
    await stage.redis.sadd(stage.keys.partitions[0].queues, "tool:nobody")
    command = CommandLine(short_directory, namespace=stage.keys.prefix, redis_url=await users.add("monitor"))
    queues = {line["queue"]: line for line in json_lines(command("queue", "ls", "--json").stdout)}
    assert queues["tool:mail"]["in_work"] == 1
    assert queues["tool:nobody"]["waiting"] == 1
    for arguments in (["queue", "ls"], ["worker", "ls"], ["doctor"], ["tool", "ls"], ["top", "--once"]):
        for form in ([], ["--json"]):
            shown = command(*arguments, *form)
            assert shown.returncode == 0, (arguments, shown.stdout, shown.stderr)
            assert "a-secret-argument" not in shown.stdout + shown.stderr
    for arguments in (["show", turn.id], ["queue", "pause", "tool:mail"], ["dead", "ls"], ["abort", turn.id]):
        assert command(*arguments).returncode != 0, arguments
    until.touch()
    await end(turn)


async def test_operators_pause_drain_and_replay(stage: Stage, users: Users, short_directory: Path) -> None:
    await start_fleet(stage, users)
    await all_alive(stage, 4)
    await stage.redis.xadd(stage.keys.partitions[0].inbox, {"t": "junk", "d": "{}"})

    async def buried() -> bool:
        return bool(await stage.dead_letters())

    await wait_until_async(buried, PATIENCE_SECONDS)
    command = CommandLine(short_directory, namespace=stage.keys.prefix, redis_url=await users.add("operator"))
    letters = json_lines(command("dead", "ls", "--json").stdout)
    name = letters[0]["id"]
    for arguments in (["queue", "pause", "tool:mail"], ["queue", "ls"], ["queue", "resume", "tool:mail"],
                      ["dead", "show", name], ["dead", "replay", name]):  # fmt: skip
        shown = command(*arguments)
        assert shown.returncode == 0, (arguments, shown.stdout, shown.stderr)
    await wait_until_async(buried, PATIENCE_SECONDS)
    worker = next(line for line in json_lines(command("worker", "ls", "--json").stdout) if "hooks." in line["id"])
    drained = command("worker", "drain", worker["id"], "--wait")
    assert drained.returncode == 0, drained.stderr
    assert command("dead", "drop", "--all").returncode == 0
    operator = [entry for entry in await users.refusals() if entry.startswith("operator.")]
    assert [entry for entry in operator if "xrange" not in entry] == []


async def test_the_command_line_of_a_client_needs_no_more(stage: Stage, users: Users, short_directory: Path) -> None:
    await start_fleet(stage, users)
    await all_alive(stage, 4)
    command = CommandLine(short_directory, namespace=stage.keys.prefix, redis_url=await users.add("client"))
    await stage.client.publish(guarded)
    ran = command("run", "guarded", told(calls("send")), "--session", "s")
    assert ran.returncode == 0, ran.stderr
    (listed,) = json_lines(command("ls", "--json").stdout)
    for arguments in (["show", listed["turn_id"]], ["show", listed["turn_id"], "--json"], ["tail", listed["turn_id"]],
                      ["session", "show", "s"], ["session", "fork", "s"], ["session", "delete", "s"], ["tool", "ls"]):  # fmt: skip
        shown = command(*arguments)
        assert shown.returncode == 0, (arguments, shown.stdout, shown.stderr)
    refused = [entry for entry in await users.refusals() if entry.startswith("client.") and not entry.endswith(TRIED)]
    assert not refused, "\n".join(refused)
