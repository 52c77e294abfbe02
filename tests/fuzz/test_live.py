"""Entries that nobody should write, thrown on every queue of a runtime that works, and ids that are none."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from apps.guarded import APP, guarded
from support.fuzz_targets import SEEDS
from support.mutation import mutated
from support.stage import PATIENCE_SECONDS, Stage, open_stage, told
from support.waiting import wait_until_async
from turnmill.protocol.codec import encode_body
from turnmill.protocol.content import Message
from turnmill.protocol.keys import PartitionKeys, new_turn_id
from turnmill.protocol.messages import COMMANDS, StartTurn
from turnmill.runtime.cli.application import run_command_line

SEED = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(10**6)))
ENTRIES = int(os.environ.get("FUZZ_ENTRIES", "1500"))
TYPES = ["tool_task", "model_task", "tool_reply", "model_reply", "tool_progress", "unreadable_task", "delivery_lost",
         "call_waiting", "sub_turn_ended", "timer_fired", "answer", "turn.finished", "", "\xff", *[k.type for k in COMMANDS]]  # fmt: skip


class Thrower:
    """Makes entries: noise, seeds with changes, and messages of the traffic that goes on meanwhile, with changes."""

    def __init__(self, chance: random.Random, keys: PartitionKeys) -> None:
        self._chance = chance
        start = StartTurn(
            turn_id=new_turn_id(keys.partition),
            session_id="s",
            agent="guarded",
            messages=[Message(role="user", content="x")],
        )
        self.seen = [seed.partition(b"\n")[2] for seed in SEEDS["envelope"]]
        self.seen += [encode_body(start, "json"), encode_body(start, "msgpack")]

    def fields(self) -> dict[bytes, bytes]:
        chance = self._chance
        body = chance.choice(self.seen) if chance.random() < 0.8 else chance.randbytes(chance.randint(0, 300))
        if chance.random() < 0.8:
            body = mutated(body, chance)
        fields = {b"t": chance.choice(TYPES).encode("latin-1"), b"d": body}
        if chance.random() < 0.2:
            del fields[chance.choice([b"t", b"d"])]
        if chance.random() < 0.2:
            fields[chance.choice([b"v", b"attempts", b"", b"\xff\xfe", chance.randbytes(4)])] = mutated(b"12", chance)
        return fields or {b"x": b""}


async def watch(stage: Stage, thrower: Thrower, streams: list[str], throwing: asyncio.Task[None]) -> None:
    """Real messages on their way become seeds: with their tokens they get further than any other."""
    seen = dict.fromkeys(streams, "$")
    while not throwing.done():
        for name, entries in await stage.redis.xread(seen, block=200) or []:
            seen[name.decode()] = entries[-1][0]
            thrower.seen += [fields[b"d"] for _, fields in entries if b"d" in fields]
            del thrower.seen[8:-200]


async def throw(stage: Stage, thrower: Thrower, streams: list[str], chance: random.Random) -> None:
    for number in range(ENTRIES):
        await stage.redis.xadd(chance.choice(streams), thrower.fields())  # type: ignore[arg-type]
        if number % 50 == 0:
            await asyncio.sleep(0.02)


async def test_junk_on_every_queue_stops_nothing(valkey_url: str, namespace: str, short_directory: Path) -> None:
    """Turns go on while it falls and after it, no process ends, every queue is empty in the end."""
    print(f"FUZZ_SEED={SEED}")
    chance = random.Random(SEED)
    async with open_stage(valkey_url, namespace, short_directory, partitions=1) as stage:
        stage.processes.coordinator()
        stage.processes.llm(APP)
        stage.processes.tools(APP)
        keys = stage.keys.partitions[0]
        streams = [
            keys.inbox,
            keys.results,
            keys.model("default"),
            keys.tool("mail"),
            keys.tool("honest"),
            keys.tool("looks"),
        ]
        thrower = Thrower(chance, keys)
        await asyncio.wait_for((await start(stage, "before")).result(), PATIENCE_SECONDS)
        throwing = asyncio.create_task(throw(stage, thrower, streams, chance))
        watching = asyncio.create_task(watch(stage, thrower, streams, throwing))
        beside = [await start(stage, f"beside-{number}") for number in range(10)]
        await asyncio.gather(throwing, watching)
        # Copies of real messages may stop, steer or answer these: each has one end, whatever it is.
        ends = await asyncio.gather(*[asyncio.wait_for(turn.result(), 90) for turn in beside], return_exceptions=True)
        assert not [one for one in ends if isinstance(one, TimeoutError)]
        after = await start(stage, "after")
        assert (await asyncio.wait_for(after.result(), 90)).answer == "all done"
        for process in stage.processes.all:
            assert process.is_alive, process.log()
            assert "loop has failed" not in process.log()
        for number, turn in enumerate(beside):
            await stage.assert_sound(turn.id)
            await stage.assert_history(f"beside-{number}")
        await wait_until_async(lambda: idle(stage, streams), 90)


async def start(stage: Stage, session: str) -> Any:
    step = [{"name": name, "arguments": {"value": name}} for name in ("send", "tally", "keep")]
    more = [{"name": "send", "arguments": {"value": "again"}}]
    return await stage.client.turn(guarded, told(step, more), session=session)


async def idle(stage: Stage, streams: list[str]) -> bool:
    return sum([int(await stage.redis.xlen(stream)) for stream in streams]) == 0


IDS = ["", " ", "-", "--", "t0", "t0-", "t9999-01arz3ndektsv4rrffq69g5fav", "t0-01arz3ndektsv4rrffq69g5fav", "T0-01ARZ3NDEKTSV4RRFFQ69G5FAV",
       "t-1-01arz3ndektsv4rrffq69g5fav", "t0-01arz3ndektsv4rrffq69g5fav\n", "s{1}", "a b", "\u202e", "é" * 300, "\x00", "*", "../x", "0-0", "1-x-y",
       "t0-zzzzzzzzzzzzzzzzzzzzzzzzzz", "a" * 5000, "{0}", "'; FLUSHALL", "\ud800"]  # fmt: skip
COMMAND_LINES = [["show"], ["tail"], ["steer"], ["abort"], ["resume"], ["approve"], ["deny"], ["session", "show"],
                 ["dead", "show"], ["dead", "drop"], ["dead", "replay"], ["queue", "pause"], ["queue", "resume"], ["worker", "drain"],
                 ["acl"]]  # fmt: skip


@pytest.mark.parametrize("command", COMMAND_LINES, ids="-".join)
def test_ids_that_are_none_are_explained(
    command: list[str],
    valkey_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line that says what is wrong, and an exit code; never a traceback or "unexpected"."""
    monkeypatch.setenv("TURNMILL_REDIS_URL", valkey_url)
    monkeypatch.setenv("TURNMILL_NAMESPACE", namespace)
    more = {"steer": ["a message"], "resume": ["--result", "c=1"]}.get(command[0], [])
    for text in IDS:
        code = run_command_line(
            [*command, *more[:2] * (command[0] == "resume"), "--", text, *more * (command[0] == "steer")]
        )
        shown = capsys.readouterr()
        if command[:1] == ["queue"] and code == 0:
            continue  # any name may be a queue's
        assert code in (1, 2, 3), (text, code, shown)
        assert "turnmill: unexpected" not in shown.err and "Traceback" not in shown.err, (text, shown.err)
        assert shown.err.strip(), text


async def test_nothing_of_it_reached_other_keys(redis_client: redis.asyncio.Redis) -> None:
    """Ids are names and no commands: the tests above left the server as it was."""
    assert await redis_client.ping()
