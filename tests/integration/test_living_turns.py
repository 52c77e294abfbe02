"""Turns that rest, are resumed and spoken to, through separate processes that come and go."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps.living import APP, assistant
from support.processes import ROOTS
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.errors import CommandRefusedError, DefinitionError, TurnAbortedError, TurnFailedError
from turnmill.runtime import TurnOptions
from turnmill.runtime.client import open_client
from turnmill.runtime.sub_turns import SubTurnEvent

GOLDEN = Path(__file__).parents[1] / "data" / "exchange.golden.json"
HOST = TurnOptions(mode="single_exchange")


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        start_all(opened)
        yield opened


def start_all(stage: Stage) -> None:
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)


async def seen(stage: Stage) -> list[dict[str, Any]]:
    """What the model was asked, call by call."""
    return [json.loads(entry) for entry in await stage.redis.lrange(f"{stage.keys.prefix}-seen", 0, -1)]


async def rest(turn: Any) -> Any:
    result = await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    assert result.status == "suspended"
    return result


async def test_a_host_owned_exchange_keeps_its_shape(stage: Stage) -> None:
    """AE-01, AE-02, AE-03, AE-04, AE-06, AE-13: one provider call per command; the settled forms are frozen."""
    first = await stage.client.turn(assistant, "hello", session="s", options=HOST)
    settled = [(await asyncio.wait_for(first.result(), PATIENCE_SECONDS)).exchange]
    second = await stage.client.turn(assistant, "ask name?", session="s", options=HOST)
    settled.append((await rest(second)).exchange)
    assert len(await seen(stage)) == 2
    assert await second.resume(tool_results={settled[1].pending[0]: "Ada"}) == ()
    settled.append((await asyncio.wait_for(second.result(), PATIENCE_SECONDS)).exchange)
    asked = await seen(stage)
    assert len(asked) == 3
    assert all(request["system"] == "Be kind." for request in asked)
    assert not any(role == "system" for request in asked for role, _ in request["messages"])
    assert all("ask_user" in request["tools"] for request in asked)
    shown = [msgspec.to_builtins(exchange) for exchange in settled]
    for exchange, name in zip(shown, ("T1", "T2", "T2"), strict=True):
        exchange["state"]["turn_id"] = name
    assert shown == json.loads(GOLDEN.read_text())


async def test_a_refusal_leaves_a_turn_at_rest_usable(stage: Stage) -> None:
    """AE-05, AE-10."""
    turn = await stage.client.turn(assistant, "ask name?", session="s", options=HOST)
    pending = (await rest(turn)).pending[0].id
    with pytest.raises(TurnFailedError) as refused:
        await (await stage.client.turn(assistant, "never mind", session="s")).result()
    assert (refused.value.error_type, refused.value.pending) == ("tool_results_required", (pending,))
    for results, kind in (({"nobody": 1}, "unknown_tool_result"), ({}, "tool_results_required")):
        with pytest.raises(CommandRefusedError) as wrong:
            await turn.resume(tool_results=results)
        assert (wrong.value.kind, wrong.value.pending) == (kind, (pending,))
    for unsendable in (math.nan, 2**70, "\ud800", object()):
        with pytest.raises(DefinitionError, match="cannot be sent"):
            await turn.resume(tool_results={pending: unsendable})
    assert len(await seen(stage)) == 1, "a refusal calls no provider"
    await turn.resume(tool_results={pending: "Ada"})
    assert "Ada" in (await turn.result()).answer
    with pytest.raises(CommandRefusedError) as late:
        await turn.resume(tool_results={pending: "Bob"})
    assert late.value.kind == "no_pending_tools"


async def test_a_conversation_is_not_cut_between_a_call_and_its_result(stage: Stage) -> None:
    """AC-07: `rewind_to` takes only what a provider would accept."""
    await (await stage.client.turn(assistant, "fetch", session="s")).result()
    for wrong in (-1, 2, 99):
        with pytest.raises(DefinitionError, match="no closed step that ends there"):
            await stage.client.turn(assistant, "again", session="s", rewind_to=wrong)
    again = await stage.client.turn(assistant, "again", session="s", rewind_to=3)
    assert (await asyncio.wait_for(again.result(), PATIENCE_SECONDS)).answer == "echo again"
    roles = [role for role, _ in (await seen(stage))[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]


async def test_one_of_two_calls_answered_and_everything_restarted(stage: Stage) -> None:
    """AC-05, AE-06, AE-12: the other one is still pending; nothing is run again, nothing skipped."""
    turn = await stage.client.turn(assistant, "both", session="s")
    result = await rest(turn)
    assert [call.name for call in result.pending] == ["ask_user"]
    for process in stage.processes.all:
        process.kill()
    start_all(stage)
    async with open_client(stage.client.engine.url, stage.client.settings) as other:
        same = other.attach(turn.id)
        assert (await rest(same)).pending == result.pending
        await same.resume(tool_results={result.pending[0].id: "this one"})
        final = await asyncio.wait_for(same.result(), PATIENCE_SECONDS)
    assert final.answer == "told: this one, it fetched"
    assert list((await stage.effects(turn)).values()) == [1]
    await stage.assert_sound(turn.id)
    await stage.assert_history("s")


async def test_commands_at_random_moments_have_one_effect_each(stage: Stage) -> None:
    """AC-13, AC-46, AC-48: two clients steer, approve and stop twenty turns at random; the books balance."""
    dice = random.Random(13)
    async with open_client(stage.client.engine.url, stage.client.settings) as other:

        async def one(number: int) -> tuple[str, list[str], list[str]]:
            turn = await stage.client.turn(assistant, "pay 1 2 3", session=f"s{number}")
            ids = [call.id for call in (await rest(turn)).approvals]
            handles = [turn, other.attach(turn.id)]
            entry = await dice.choice(handles).steer(f"steering {number}")
            approved = ids if number % 3 else ids[:1]
            for call_id in dice.sample(approved, len(approved)):
                await dice.choice(handles).approve(call_id)
                await dice.choice(handles).approve(call_id)  # the first decision stands
            if number % 3 == 0:
                await asyncio.gather(*[handle.abort("enough") for handle in handles])
            try:
                await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
            except TurnAbortedError:
                assert number % 3 == 0
            return turn.id, approved, [entry.id]

        outcomes = await asyncio.gather(*[one(number) for number in range(20)])
    for number, (turn_id, approved, steered) in enumerate(outcomes):
        events = await stage.assert_sound(turn_id)
        effects = await stage.effects(stage.client.attach(turn_id))
        assert all(count == 1 for count in effects.values())
        assert len(effects) <= len(approved)
        if number % 3:
            assert len(effects) == 3
        decided = [event.tool_call_id for event in events if event.type == "approval.decided"]
        assert sorted(decided) == sorted(approved)
        fates = [event for event in events if event.type in ("steering.applied", "steering.dropped")]
        assert [event.steering_id for event in fates] == steered
        await stage.assert_history(f"s{number}")
    await stage.assert_idle()


async def test_a_late_reader_sees_the_turn_and_its_sub_turn(stage: Stage) -> None:
    """AC-31: in mid-turn, after the end, and after retention, each with the sub-turn's events."""
    turn = await stage.client.turn(assistant, "delegate", session="s")
    live = [event async for event in turn.events(sub_turns=True)]
    async with open_client(stage.client.engine.url, stage.client.settings) as other:
        late = [event async for event in other.attach(turn.id).events(sub_turns=True)]
        [child] = {event.turn_id for event in late if isinstance(event, SubTurnEvent)}
        for seen_events in (live, late):
            own = [event for event in seen_events if not isinstance(event, SubTurnEvent)]
            below = [event.event for event in seen_events if isinstance(event, SubTurnEvent)]
            assert own == [event for _, event in await numbered(other, turn.id)]
            assert below == [event for _, event in await numbered(other, child)]
            assert own[-1].type == below[-1].type == "turn.finished"
        await stage.redis.delete(stage.keys.of_turn(turn.id).events(turn.id))
        gone = [event async for event in other.attach(turn.id).events(sub_turns=True)]
    assert [event.type for event in gone] == ["turn.finished"]
    await stage.assert_history(turn.session_id or "")


async def numbered(client: Any, turn_id: str) -> list[tuple[int, Any]]:
    return [item async for item in client.attach(turn_id).numbered_events()]


async def test_a_clock_that_jumps_by_an_hour_moves_no_deadline(
    valkey_url: str, namespace: str, short_directory: Path
) -> None:
    """AC-19: the processes' own clocks jump in mid-turn; deadlines are the engine's time."""
    jumped = short_directory / "jumped"
    (short_directory / "sitecustomize.py").write_text(
        f"import os, time\nreal = time.time\ntime.time = lambda: real() + 3600 * os.path.exists({str(jumped)!r})\n"
    )
    path = ":".join([str(short_directory), *map(str, ROOTS)])
    async with open_stage(valkey_url, namespace, short_directory) as stage:
        for role, target in (("coordinator", None), ("llm", APP), ("tools", APP)):
            what = json.dumps({"role": role, "target": target, "names": [], "concurrency": None})
            command = [sys.executable, "-m", "support.processes", what]
            stage.processes.start(role, command, {"PYTHONPATH": path})
        turn = await stage.client.turn(assistant, "fetch slow", session="s")
        await stage.reached("slow")
        jumped.touch()
        waiting = await stage.client.turn(assistant, "pay 5", session="other")
        assert len((await rest(waiting)).approvals) == 1, "a request for approval made after the jump has not expired"
        await stage.open("slow")
        assert (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer == "told: it fetched"
        await waiting.approve(*(await rest(waiting)).exchange.pending, *[c.id for c in (await rest(waiting)).approvals])
        assert (await asyncio.wait_for(waiting.result(), PATIENCE_SECONDS)).answer == "told: paid 5"
        assert list((await stage.effects(turn)).values()) == [1]

        async def quiet() -> bool:
            return await stage.counter("lost_deliveries") == 0

        await wait_until_async(quiet, PATIENCE_SECONDS)
