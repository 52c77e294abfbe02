"""Turns that wait for their host: answered in parts, by several clients, after failures, and after a restart of everything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from apps.offices import APP, clerk, told
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from turnmill.protocol.errors import CommandRefusedError, TurnAbortedError, TurnFailedError
from turnmill.protocol.keys import Keys
from turnmill.runtime import Turn, TurnOptions
from turnmill.runtime.client import open_client
from turnmill.runtime.embedded import ensure_server

HOST = TurnOptions(mode="single_exchange")


def ask(question: str) -> tuple[str, dict[str, Any]]:
    return "ask_user", {"question": question}


def fetch(value: str, gate: str = "") -> tuple[str, dict[str, Any]]:
    return "fetch", {"value": value, "gate": gate}


def start_all(stage: Stage) -> None:
    stage.processes.coordinator()
    stage.processes.llm(APP)
    stage.processes.tools(APP)


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def rest(turn: Turn) -> Any:
    result = await end(turn)
    assert result.status == "suspended"
    assert result.content is None and result.signals == []
    return result


async def refusal(command: Any) -> CommandRefusedError:
    with pytest.raises(CommandRefusedError) as caught:
        await command
    return caught.value


async def kinds(stage: Stage, turn: Turn) -> list[str]:
    return [event.type for _, event in await stage.told_events(turn.id)]


async def test_everything_is_restarted_the_server_too(namespace: str, short_directory: Path) -> None:
    """AE-06, AE-12, AC-05: kill -9 of all processes and of the engine, which has its append-only file; then other clients go
    on with turns that wait for results, for the rest of the results, and for an approval."""
    data = short_directory / "data"
    logs = [short_directory / "before", short_directory / "after"]
    for directory in logs:
        directory.mkdir()
    server = ensure_server(data)
    async with open_stage(server.url, namespace, logs[0]) as stage:
        start_all(stage)
        half = await stage.client.turn(clerk, told([ask("one?"), fetch("x"), ask("two?")]), session="half")
        host = await stage.client.turn(clerk, told([ask("name?")]), session="host", options=HOST)
        paying = await stage.client.turn(clerk, told([("pay", {"amount": 5}), fetch("y")]), session="paying")
        one, two = (await rest(half)).exchange.pending
        assert await half.resume(tool_results={one: "1"}) == (two,)
        assert [call.id for call in (await rest(half)).pending] == [two]
        pending = (await rest(host)).exchange.pending
        approvals = [call.id for call in (await rest(paying)).approvals]
        stage.processes.end_all()
        assert server.process is not None
        server.process.kill()
        server.process.wait()
    server = ensure_server(data)
    try:
        async with open_stage(server.url, namespace, logs[1]) as stage:
            start_all(stage)
            half, host, paying = (stage.client.attach(turn.id) for turn in (half, host, paying))
            assert [call.id for call in (await rest(half)).pending] == [two]
            assert (await rest(host)).exchange.pending == pending
            await half.resume(tool_results={two: "2"})
            await host.resume(tool_results={pending[0]: "Ada"})
            await paying.approve(*approvals)
            results = [await end(turn) for turn in (half, host, paying)]
            told_results = [[call.result for call in result.function_calls] for result in results]
            assert told_results == [["1", "x fetched", "2"], ["Ada"], ["paid 5", "y fetched"]]
            assert all((result.answer, result.pending) == ("done", []) for result in results)
            for turn, effects in ((half, {"1.1|1": 1}), (host, {}), (paying, {"1.0|1": 1, "1.1|1": 1})):
                assert await stage.effects(turn) == effects
                await stage.assert_sound(turn.id)
                assert len(await stage.asked(turn.session_id or "")) == 2, "no model call was repeated"
                await stage.assert_history(turn.session_id or "")
            await stage.assert_idle()
    finally:
        server.stop()


async def test_an_exchange_that_fails_behind_its_results_is_repeated(office: Stage, session: str) -> None:
    """AE-03, AE-09, AE-14: the host's function is called once for each command, told all, and its error is returned."""
    turn = await office.client.turn(clerk, told([ask("name?")], fails_at=[2, 3]), session=session, options=HOST)
    pending = (await rest(turn)).exchange.pending
    for number, resume in enumerate((turn.resume(tool_results={pending[0]: "Ada"}), turn.resume()), 2):
        assert await resume == ()
        with pytest.raises(TurnFailedError, match=rf"out of order \({number}\)") as failed:
            await end(turn)
        assert (failed.value.error_type, failed.value.result.status) == ("provider_error", "suspended")
        assert len(await office.asked(session)) == number
        assert await turn.status() == "suspended"
    with pytest.raises(TurnFailedError) as busy:
        await end(await office.client.turn(clerk, told(), session=session))
    assert busy.value.error_type == "tool_results_required"
    async with open_client(office.client.engine.url, office.client.settings) as other:
        same = other.attach(turn.id)
        assert await same.resume(message=told(answer="at last")) == ()
        result = await end(same)
    assert (result.status, result.content) == ("finished", "at last")
    asked = await office.asked(session)
    assert len(asked) == 4
    assert [request["results"] for request in asked] == [[], ["Ada"], ["Ada"], ["Ada"]]
    assert [len(request["messages"]) for request in asked] == [1, 3, 3, 4]
    assert all("ask_user" in request["tools"] for request in asked)
    await office.assert_sound(turn.id)
    await office.assert_history(session)


async def test_a_first_exchange_that_fails_leaves_the_session_usable(office: Stage, session: str) -> None:
    """AE-09, AE-14."""
    with pytest.raises(TurnFailedError, match="out of order"):
        await end(await office.client.turn(clerk, told(fails_at=[1]), session=session, options=HOST))
    result = await end(await office.client.turn(clerk, told(answer="hello"), session=session, options=HOST))
    assert (result.exchange.content, result.exchange.pending, result.exchange.signals) == ("hello", [], [])
    assert len(await office.asked(session)) == 2


async def test_an_exchange_hands_over_the_calls_of_workers_too(office: Stage, session: str) -> None:
    """AE-03, AE-04: nobody runs them, whatever the turn's limits and policies are."""
    options = TurnOptions(mode="single_exchange", max_steps=1)
    calls = [fetch("x"), ("pay", {"amount": 1}), ask("?")]
    turn = await office.client.turn(clerk, told(calls, calls), session=session, options=options)
    for expected in (2, 3):
        result = await rest(turn)
        assert [call.name for call in result.pending] == ["fetch", "pay", "ask_user"]
        assert result.approvals == []
        await turn.resume(tool_results={call.id: "by the host" for call in result.pending})
        await office.event(turn, "step.finished", step_number=expected - 1)
    assert (await end(turn)).content == "done"
    assert await office.effects(turn) == {}
    assert len(await office.asked(session)) == 3


async def test_results_in_parts_from_two_clients(office: Stage, session: str) -> None:
    """AE-10: what is missing is named, the first result counts, a repetition has the same answer, and nothing is doubled."""
    turn = await office.client.turn(clerk, told([ask("a"), ask("b"), ask("c")]), session=session)
    first, second, third = (await rest(turn)).exchange.pending
    async with open_client(office.client.engine.url, office.client.settings) as other:
        same = other.attach(turn.id)
        assert await turn.resume(tool_results={second: "b"}) == (first, third)
        assert await same.resume(tool_results={second: "another b"}) == (first, third)
        unknown = await refusal(same.resume(tool_results={first: "a", "nobody": "?"}))
        assert (unknown.kind, unknown.pending) == ("unknown_tool_result", (first, third))
        assert len(await office.asked(session)) == 1
        answers = await asyncio.gather(
            *[handle.resume(tool_results={third: f"c{number}"}) for number, handle in enumerate((turn, same) * 5)]
        )
        assert set(answers) == {(first,)}
        assert await same.resume(tool_results=[{"tool_call_id": first, "result": "no", "is_error": True}]) == ()
        result = await end(same)
    results = [(call.result, call.is_error) for call in result.function_calls]
    assert [results[0], results[1]] == [("no", True), ("b", False)]
    assert results[2][0] in {f"c{number}" for number in range(10)}
    assert (await refusal(turn.resume(tool_results={first: "late"}))).kind == "no_pending_tools"
    history = await office.assert_history(session)
    assert sum(len(message.tool_results) for message in history) == 3
    await office.assert_sound(turn.id)


async def test_the_host_is_quicker_than_the_worker(office: Stage, session: str) -> None:
    """AE-12: its result is taken while a sibling runs; the turn never rests."""
    turn = await office.client.turn(clerk, told([fetch("x", gate=session), ask("?")]), session=session)
    ready = await office.event(turn, "tool_call.ready", index=1)
    await office.reached(session)
    assert await turn.status() == "running"
    assert await turn.resume(tool_results={ready.tool_call.id: "quick"}) == ()
    await office.open(session)
    assert [call.result for call in (await end(turn)).function_calls] == ["x fetched", "quick"]
    assert "turn.suspended" not in await kinds(office, turn)


@pytest.mark.parametrize("options", [None, HOST], ids=["auto", "single_exchange"])
async def test_a_message_while_results_are_missing_is_refused(
    office: Stage, session: str, options: TurnOptions | None
) -> None:
    """AE-05: whatever the policy; nothing changes, and the model is not asked. Only an interruption ends the wait."""
    turn = await office.client.turn(clerk, told([ask("a"), ask("b")]), session=session, options=options)
    pending = tuple((await rest(turn)).exchange.pending)
    before = await office.told_events(turn.id)
    policies: tuple[Any, ...] = ("queue", "reject", "steer")
    for on_busy in policies:
        try:
            refused = await office.client.turn(clerk, told(), session=session, on_busy=on_busy)
            with pytest.raises(TurnFailedError) as failed:
                await end(refused)
            error: Any = failed.value
            assert error.error_type == "tool_results_required"
        except CommandRefusedError as caught:
            error = caught
            assert error.kind == "tool_results_required"
        assert error.pending == pending
    assert await office.told_events(turn.id) == before
    assert len(await office.asked(session)) == 1
    next_turn = await office.client.turn(clerk, told(answer="next"), session=session, on_busy="interrupt")
    assert (await end(next_turn)).answer == "next"
    with pytest.raises(TurnAbortedError):
        await end(turn)
    await office.assert_history(session)


async def test_a_turn_at_rest_leaves_nothing_in_the_queues(office: Stage, session: str) -> None:
    """AE-04: it is a record, and its session's state."""
    turn = await office.client.turn(clerk, told([ask("?")]), session=session)
    await rest(turn)
    keys: Keys = office.keys
    for names in keys.partitions:
        for stream in (names.inbox, names.results):
            assert await office.redis.xlen(stream) == 0
    assert await turn.abort("nobody answers")
    with pytest.raises(TurnAbortedError, match="nobody answers") as stopped:
        await end(turn)
    assert "not executed (stopped: nobody answers)" in stopped.value.result.function_calls[0].result
    await office.assert_history(session)
