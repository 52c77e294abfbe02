"""What is said to turns while they live, and what their agents' own code says: through separate processes."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apps.living import APP, SIGNATURE, assistant, hooked, outer, repeating, thinking
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.errors import TurnAbortedError, TurnEndedError, TurnFailedError
from turnmill.runtime import TurnOptions, connect
from turnmill.runtime.client import open_client
from turnmill.runtime.local import local_runtime
from turnmill.runtime.telemetry import subscribe


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        opened.processes.coordinator()
        opened.processes.llm(APP)
        opened.processes.tools(APP)
        yield opened


async def end(turn: Any) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def stopped(turn: Any) -> TurnAbortedError:
    with pytest.raises(TurnAbortedError) as caught:
        await end(turn)
    return caught.value


async def noted_hooks(stage: Stage) -> list[Any]:
    return [json.loads(entry) for entry in await stage.redis.lrange(f"{stage.keys.prefix}-seen:hooks", 0, -1)]


# ---- steering


async def test_a_message_joins_the_running_turn_before_its_next_step(stage: Stage) -> None:
    """TH-07, TH-08: sent and taken back by another process than the one that started the turn."""
    turn = await stage.client.turn(assistant, "fetch gate", session="s")
    await stage.reached("gate")
    async with open_client(stage.client.engine.url, stage.client.settings) as other:
        same = other.attach(turn.id)
        first, second = await same.steer("say this"), await same.steer("and not this")
        assert [entry.id for entry in same.pending_steering] == [first.id, second.id]
        assert await same.cancel_steering(second.id) is True
        assert await same.cancel_steering(second.id) is False
        later = await same.steer("next turn", mode="queue")
        await stage.open("gate")
        result = await end(same)
        assert result.answer == "echo say this"
        assert [message.text for message in result.messages if message.role == "user"] == ["fetch gate", "say this"]
        assert (await end(other.attach(later.id))).answer == "echo next turn"
        with pytest.raises(TurnEndedError):
            await same.steer("too late")
        assert await same.cancel_steering(first.id) is False
    events = await stage.assert_sound(turn.id)
    fates = [(event.steering_id, event.type) for event in events if event.type.startswith("steering.")]
    assert fates == [
        (first.id, "steering.queued"),
        (second.id, "steering.queued"),
        (second.id, "steering.dropped"),
        (first.id, "steering.applied"),
    ]
    await stage.assert_history("s")


# ---- stopping


async def test_stopping_while_three_tools_run_leaves_a_usable_session(stage: Stage) -> None:
    """AC-02, AC-03, TH-09: every call has one result, and it says that it was stopped."""
    turn = await stage.client.turn(assistant, "fetches 3 held", session="s")
    await stage.reached("held", 3)
    assert await turn.abort("stop them")
    error = await stopped(turn)
    calls = error.result.function_calls
    assert len(calls) == 3
    assert all(call.is_error and "stopped (stop them)" in call.result for call in calls)
    assert (await end(await stage.client.turn(assistant, "hello", session="s"))).answer == "echo hello"
    await stage.assert_sound(turn.id)
    await stage.assert_history("s")
    await stage.assert_idle()


async def test_a_stop_comes_before_the_end_or_behind_it(stage: Stage) -> None:
    """AC-43, AC-45: 60 turns in CI, at the case's five moments; stopped or finished, never both."""

    async def one(number: int) -> str:
        turn = await stage.client.turn(assistant, "hello", session=f"s{number % 12}")
        await asyncio.sleep((0, 0.001, 0.005, 0.02, 0.1)[number % 5])
        first, again = await turn.abort("now"), await turn.abort("again")
        try:
            await end(turn)
        except TurnAbortedError:
            assert first and again
            return "stopped"
        assert not first and not again
        return "finished"

    outcomes = Counter(await asyncio.gather(*[one(number) for number in range(60)]))
    assert outcomes.total() == 60 and outcomes["stopped"], outcomes
    for number in range(12):
        await stage.assert_history(f"s{number}")
    await stage.assert_idle()


async def test_stopping_reaches_nested_agents_and_a_tools_child_process(stage: Stage, short_directory: Path) -> None:
    """AC-44."""
    path = short_directory / "pid"
    turn = await stage.client.turn(outer, f"nest {path}", session="s")

    async def started() -> bool:
        return path.exists() and bool(path.read_text().strip())

    await wait_until_async(started, PATIENCE_SECONDS)
    pid = int(path.read_text())
    await turn.abort("all of you")
    await stopped(turn)

    async def gone() -> bool:
        return not _is_running(pid)

    await wait_until_async(gone, PATIENCE_SECONDS)
    children = [
        record for record in await stage.redis.keys(f"{stage.keys.prefix}:*:turn:*") if not record.endswith(b"events")
    ]
    states = [await stage.redis.hget(record, "status") for record in children]
    assert states == [b"aborted"] * 3
    await stage.assert_idle()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- approvals and the host


async def test_a_resumed_turn_rests_again_and_takes_a_message_along(stage: Stage) -> None:
    """AE-07, AE-11."""
    turn = await stage.client.turn(assistant, "ask one?", session="s")
    first = (await end(turn)).pending[0].id
    await turn.resume(tool_results={first: "1"}, message="ask two?")
    second = await end(turn)
    assert second.status == "suspended" and second.pending[0].arguments == {"question": "two?"}
    assert second.pending[0].id != first
    await turn.resume(tool_results=[{"tool_call_id": second.pending[0].id, "result": "2"}])
    assert (await end(turn)).answer == "told: 2"
    await stage.assert_history("s")


# ---- an agent's own code


async def test_hooks_run_where_the_agents_code_is(stage: Stage) -> None:
    """TH-12, AE-08: each point is asked once per occasion; arguments and results are changed; signals of the end."""
    result = await end(await stage.client.turn(hooked, "fetch", session="s"))
    assert result.answer == "told: another fetched, seen by a hook"
    assert result.function_calls[0].result == "another fetched, seen by a hook"
    names = [name for name, _ in await noted_hooks(stage)]
    assert names == ["before_step", "before_tool_call", "after_tool_call", "after_step", "before_step", "after_step"]
    assert result.signals == []
    assert (await end(await stage.client.turn(hooked, "a !signal here", session="s"))).signals == ["!signal"]


async def test_a_hook_stops_its_turn_or_fails_it_by_name(stage: Stage) -> None:
    """TH-12."""
    halted = await end(await stage.client.turn(hooked, "hook stop", session="s"))
    assert (halted.termination.kind, halted.termination.reason) == ("hook_stop", "the hook says so")
    assert halted.steps == [] and halted.termination.final_step_number == 0
    with pytest.raises(TurnFailedError, match=r"hooked\.before_step.*broken hook") as failed:
        await end(await stage.client.turn(hooked, "hook break", session="s"))
    assert failed.value.error_type == "hook_failed"
    assert (await end(await stage.client.turn(hooked, "hello", session="s"))).answer == "echo hello"


async def test_a_hook_outlives_its_worker(stage: Stage) -> None:
    """TH-12: kill -9 of the worker that runs it; another one runs it again."""
    turn = await stage.client.turn(hooked, "held", session="s")
    await stage.reached("hook")
    stage.processes.all[-1].kill()
    stage.processes.tools(APP)
    await stage.reached("hook", 2)
    await stage.open("hook")
    assert (await end(turn)).answer == "echo held"
    await stage.assert_sound(turn.id)


async def test_no_hook_is_asked_where_there_is_none(stage: Stage) -> None:
    """TH-12: not one task in the hooks' queue."""
    await end(await stage.client.turn(assistant, "fetch", session="s"))
    assert await noted_hooks(stage) == []
    for keys in stage.keys.partitions:
        groups = (
            await stage.redis.xinfo_stream(keys.tool("hooks")) if await stage.redis.exists(keys.tool("hooks")) else {}
        )
        assert not groups.get("entries-added")


async def test_a_condition_of_ones_own_ends_the_turn(stage: Stage) -> None:
    """TH-11, AC-06: behind a step with calls; the next turn is accepted."""
    result = await end(await stage.client.turn(repeating, "go", session="s"))
    kind = result.termination
    assert (kind.kind, kind.stop_condition, kind.reason) == ("stop_condition", "enough", "three steps are enough")
    assert len(result.steps) == 3
    notes = [message.text for message in result.messages if message.metadata.get("turnmill") == "loop_guard"]
    assert len(notes) == 1 and "same call" in notes[0]
    await stage.assert_history("s")
    assert (await end(await stage.client.turn(assistant, "hello", session="s"))).answer == "echo hello"


async def test_thoughts_go_back_to_their_provider_as_they_came(stage: Stage) -> None:
    """LC-11, AC-09: also to a hook, and through the engine."""
    result = await end(await stage.client.turn(thinking, "think", session="s"))
    [[text, provider, data]] = json.loads(result.answer)
    assert (text, provider) == ("let me think", "host")
    assert data["signature"] == SIGNATURE
    assert [name for name, _ in await noted_hooks(stage)] == ["on_reasoning_event"]


async def test_progress_keeps_a_call_alive(stage: Stage) -> None:
    """AC-28, scaled down: 3 s of progress each 0.2 s with an idle timeout of 1 s; without it, the call ends at 1 s."""
    result = await end(await stage.client.turn(outer, "chatty 15", session="a"))
    assert result.function_calls[0].result == "all said"
    result = await end(await stage.client.turn(outer, "chatty 2", session="b"))
    assert result.function_calls[0].result == "Error: execution failed (no progress for 1 s)"


# ---- telemetry


async def test_every_start_has_one_end_in_every_outcome(
    valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LC-13: in the embedded runtime on a real server, where all roles tell one process."""
    monkeypatch.setenv("TURNMILL_REDIS_URL", valkey_url)
    told: list[Any] = []
    unsubscribe = subscribe(told.append)
    try:
        async with (
            connect(valkey_url, namespace=namespace) as client,
            local_runtime(client.settings, APP) as local,
        ):
            options = TurnOptions(metadata={"user": 7})
            await end(await local.turn(hooked, "fetch", options=options))
            rests = await local.turn(assistant, "ask me?", options=options)
            assert (await end(rests)).status == "suspended"
            slow = await local.turn(assistant, "slowly", options=options)
            async for event in slow.events(types={"text.delta"}):
                assert event.type == "text.delta"
                break
            await slow.abort("enough")
            await stopped(slow)
            with pytest.raises(TurnFailedError):
                await end(await local.turn(assistant, "fail", options=options))
    finally:
        unsubscribe()
    counts: Counter[str] = Counter()
    for event in told:
        kind, _, what = event.name.rpartition(".")
        if what in ("start", "stop", "exception"):
            counts[kind] += 1 if what == "start" else -1
    assert set(counts) >= {"turn", "step", "model", "tool", "hook"}
    assert all(count == 0 for count in counts.values()), counts
    assert all(event.metadata == {"user": 7} for event in told if event.name.startswith("turn."))
    ends = [event for event in told if event.name in ("turn.stop", "turn.exception")]
    assert {event.status for event in ends} == {"ok", "halted", "error"}
    assert all(event.duration_seconds is not None for event in ends)
