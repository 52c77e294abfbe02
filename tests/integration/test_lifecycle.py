"""The life of a turn, on a real server with coordinator, LLM worker and tool worker in processes of their own."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from apps import lifecycle as app
from support.fleet import Fleet
from support.waiting import wait_until_async
from turnmill.protocol import subscription
from turnmill.protocol.codec import event_to_dict
from turnmill.protocol.content import (
    ErrorInfo,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.events import Event
from turnmill.runtime import Agent, Turn, TurnFailedError, TurnLostError, TurnOptions, step_count_is
from turnmill.runtime.client import Client
from turnmill.workers.providers.scripted import Call, Reply

PATIENCE_SECONDS = 20.0


@pytest.fixture(scope="module")
def deployment(valkey_url: str) -> Iterator[Fleet]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    with Fleet(valkey_url, f"test-{uuid.uuid4().hex[:12]}", directory, "apps.lifecycle") as fleet:
        fleet.start()
        yield fleet
    shutil.rmtree(directory)


@pytest.fixture
def fleet(deployment: Fleet, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    deployment.new_log_lines()
    failed = request.session.testsfailed
    yield deployment
    if request.session.testsfailed > failed:
        for name, lines in deployment.new_log_lines().items():
            print(f"--- {name}", *lines[-60:], sep="\n")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with fleet.client() as client:
        yield client


@pytest.fixture
def gate() -> str:
    """The name of a gate of this test's own."""
    return uuid.uuid4().hex[:8]


def told(*replies: Reply) -> str:
    """A message for the model `scripted:told`."""
    return msgspec.json.encode(replies).decode()


def calling(*calls: Call, answer: str = "done") -> str:
    """One step with these calls, then the answer."""
    return told(Reply(tool_calls=list(calls)), Reply(text=answer))


async def ask(client: Client, message: Any, agent: Agent = app.worker, **options: Any) -> Turn:
    return await client.turn(agent, message, options=TurnOptions(**options) if options else None)


async def events_of(turn: Turn, *types: str, after: int = 0) -> list[Any]:
    async def collect() -> list[Any]:
        return [event async for event in turn.events(after) if not types or event.type in types]

    return await asyncio.wait_for(collect(), PATIENCE_SECONDS)


async def result_of(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def failure_of(turn: Turn) -> TurnFailedError:
    with pytest.raises(TurnFailedError) as caught:
        await result_of(turn)
    return caught.value


async def seen(turn: Turn, kind: str) -> int:
    """Wait for an event of this type; its number."""

    async def find() -> int:
        async for number, event in turn.numbered_events():
            if event.type == kind:
                return number
        raise AssertionError(f"the turn ended without {kind}")

    return await asyncio.wait_for(find(), PATIENCE_SECONDS)


def brief(messages: list[Message]) -> list[tuple[str, Any]]:
    return [(message.role, message.tool_calls or message.tool_results or message.text) for message in messages]


# --- the handle


async def test_a_turn_is_a_handle(client: Client, fleet: Fleet, gate: str) -> None:  # TH-01
    options = TurnOptions(metadata={"user": 7})
    message = calling(Call("gated", {"gate": gate}))
    turn = await client.turn(app.worker, message, session="user-42", options=options)
    assert turn.session_id == "user-42"
    assert (turn.agent, turn.message, turn.options) == (app.worker, message, options)
    assert (turn.started, turn.done, turn.aborted) == (False, False, False)
    assert turn.pending_steering == ()
    await seen(turn, "tool_execution.started")
    assert (turn.started, turn.done) == (True, False)
    assert await turn.status() == "running"
    fleet.open_gate(gate)
    result = await result_of(turn)
    assert turn.done
    assert await turn.status() == "finished"
    assert (result.turn_id, result.session_id) == (turn.id, "user-42")


# Attaches to a turn of another process and prints its events, one line of JSON each.
WATCHER = """
import asyncio, json, sys
from turnmill.protocol.codec import event_to_dict
from turnmill.runtime import connect

async def main():
    async with connect() as client:
        async for event in client.attach(sys.argv[1]).events():
            print(json.dumps(event_to_dict(event)), flush=True)

asyncio.run(main())
"""


async def watch_elsewhere(fleet: Fleet, turn_id: str) -> Any:
    environment = {
        "PYTHONPATH": ":".join(sys.path),
        "TURNMILL_REDIS_URL": fleet.url,
        "TURNMILL_NAMESPACE": fleet.keys.prefix,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", WATCHER, turn_id, stdout=asyncio.subprocess.PIPE, env=environment
    )


async def test_every_iteration_from_any_process_tells_the_same(
    client: Client, fleet: Fleet, gate: str
) -> None:  # TH-02 TH-06
    turn = await ask(
        client, calling(Call("gated", {"gate": gate, "note": "on it"}), Call("snapshot", {"caption": "é"}))
    )
    early = await watch_elsewhere(fleet, turn.id)
    await early.stdout.readline()  # it watches
    fleet.open_gate(gate)
    first = await events_of(turn)
    assert [event.type for event in first if event.type in ("turn.finished", "turn.failed")] == ["turn.finished"]
    assert first[-1].type == "turn.finished"
    assert await events_of(turn) == first
    async with fleet.client() as other:
        assert await events_of(other.attach(turn.id)) == first
    expected = [json.loads(json.dumps(event_to_dict(event))) for event in first]
    rest, _ = await early.communicate()
    assert [json.loads(line) for line in rest.splitlines()] == expected[1:]
    late = await watch_elsewhere(fleet, turn.id)
    told_late, _ = await late.communicate()
    assert [json.loads(line) for line in told_late.splitlines()] == expected


async def test_events_from_a_number_on_and_of_some_types(client: Client) -> None:  # TH-02
    turn = await ask(client, calling(Call("calculator", {"expression": "2 + 3"})))
    numbered = [item async for item in turn.numbered_events()]
    assert [number for number, _ in numbered] == list(range(1, len(numbered) + 1))
    for after in (0, 1, len(numbered) - 1):
        assert [item async for item in turn.numbered_events(after)] == numbered[after:]
    some = [event async for event in turn.events(types=["tool_result"])]
    assert [event.type for event in some] == ["tool_result", "turn.finished"]


async def test_the_text_stream_is_the_turns_text(client: Client) -> None:  # TH-03
    replies = [
        Reply(
            chunks=["Let ", "me ", "see. "], reasoning="hm", tool_calls=[Call("calculator", {"expression": "1 + 1"})]
        ),
        Reply(chunks=["It ", "is ", "${result}."]),
    ]
    turn = await ask(client, told(*replies))
    pieces = [piece async for piece in turn.text_stream()]
    result = await result_of(turn)
    assert "".join(pieces) == result.text == "Let me see. It is 2."
    assert result.answer == "It is 2."


async def test_text_of_an_attempt_that_failed_is_not_streamed_twice(client: Client) -> None:  # TH-03 LC-10
    error = ErrorInfo(kind="overloaded", message="overloaded", retryable=True)
    spoiled = Reply(chunks=["One ", "two ", "thr"], error=error, error_after_chunks=3, delay_seconds=0.01)
    turn = await ask(client, told(Reply(attempts=[spoiled, Reply(chunks=["One ", "two ", "three."])])))
    pieces = [piece async for piece in turn.text_stream()]
    assert "".join(pieces) == (await result_of(turn)).text == "One two three."
    told_events = await events_of(turn, "step.retrying", "step.reset")
    assert [(event.type, event.attempt) for event in told_events] == [("step.retrying", 2), ("step.reset", 2)]
    assert (told_events[0].step_number, told_events[0].max_attempts, told_events[0].error) == (1, 3, "overloaded")
    assert "thr" in "".join(event.text for event in await events_of(turn, "text.delta"))


async def test_a_result_tells_all(client: Client) -> None:  # TH-04 LC-01
    usages = [
        Usage(input_tokens=10, output_tokens=5, total_tokens=15),
        Usage(input_tokens=12, output_tokens=6, total_tokens=18),
    ]
    call = Call("calculator", {"expression": "2 + 3"}, id="call_1")
    message = told(
        Reply(text="Let me see. ", tool_calls=[call], usage=usages[0]), Reply(text="${result}!", usage=usages[1])
    )
    turn = await ask(client, message)
    result = await result_of(turn)
    assert (result.turn_id, result.agent_id, result.status) == (turn.id, "worker", "finished")
    assert (result.text, result.answer, result.finish_reason) == ("Let me see. 5!", "5!", "stop")
    assert result.usage == Usage(input_tokens=22, output_tokens=11, total_tokens=33)
    assert result.started_at <= result.ended_at
    assert result.output_message == result.messages[-1]
    assert (result.termination.kind, result.termination.final_step_number) == ("completed", 2)
    assert (result.pending, result.signals) == ([], [])
    assert [(step.text, len(step.tool_calls), step.usage) for step in result.steps] == [
        ("Let me see. ", 1, usages[0]),
        ("5!", 0, usages[1]),
    ]
    ((function_call),) = result.function_calls
    assert (function_call.id, function_call.name, function_call.result) == ("call_1", "calculator", "5")
    assert [(cost.step, cost.usage) for cost in result.cost] == [(1, usages[0]), (2, usages[1])]
    wanted = ToolCall(id="call_1", name="calculator", arguments={"expression": "2 + 3"})
    given = ToolResult(tool_call_id="call_1", tool_name="calculator", result="5")
    assert brief(result.messages) == [
        ("user", message),
        ("assistant", [wanted]),
        ("tool", [given]),
        ("assistant", "5!"),
    ]
    assert await turn.wait() == result
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await client.attach(turn.id).result() == result


async def test_a_failed_turns_error_carries_what_it_had(client: Client) -> None:  # TH-04
    error = ErrorInfo(kind="authentication", message="no such key")
    message = told(Reply(text="Wait. ", tool_calls=[Call("calculator", {"expression": "2 + 3"})]), Reply(error=error))
    turn = await ask(client, message)
    caught = await failure_of(turn)
    assert (str(caught), caught.error_type, caught.turn_id) == ("no such key", "authentication", turn.id)
    assert caught.result.status == "failed"
    assert (caught.result.text, len(caught.result.function_calls)) == ("Wait. ", 1)
    assert caught.termination == caught.result.termination
    (failed,) = await events_of(turn, "turn.failed", "turn.finished")
    assert (failed.error_type, failed.termination, failed.aborted) == ("authentication", caught.termination, False)
    other = await failure_of(client.attach(turn.id))
    assert (other.result, other.termination) == (caught.result, caught.termination)


# --- events


async def test_the_order_of_events(client: Client) -> None:  # TH-05
    first = Reply(
        reasoning=[ReasoningPart(text="hm", provider="p"), ReasoningPart(provider="p", data={"signature": "s=="})],
        text="Let me see. ",
        tool_calls=[Call("calculator", {"expression": "2 + 3"})],
        usage=Usage(input_tokens=1, output_tokens=1, total_tokens=2),
    )
    turn = await ask(client, told(first, Reply(text="5")))
    events = await events_of(turn)
    assert [event.type for event in events] == [
        "turn.started",
        "step.started",
        "reasoning.delta",
        "reasoning.delta",
        "text.delta",
        "tool_call.started",
        "tool_call.delta",
        "tool_call.ready",
        "tool_execution.started",
        "tool_execution.finished",
        "tool_result",
        "step.finished",
        "step.started",
        "text.delta",
        "step.finished",
        "turn.finished",
    ]
    assert [(event.kind, event.text, event.data) for event in events[2:4]] == [
        ("delta", "hm", {}),
        ("state", None, {"signature": "s=="}),
    ]
    step = events[11].step
    assert (step.text, step.reasoning, step.usage) == (
        "Let me see. ",
        "hm",
        Usage(input_tokens=1, output_tokens=1, total_tokens=2),
    )
    assert (step.tool_calls[0].name, step.tool_results[0].result) == ("calculator", "5")


async def test_tools_finish_in_any_order_and_results_stand_in_call_order(
    client: Client, fleet: Fleet, gate: str
) -> None:  # AC-41 TH-05 LC-06
    calls = [Call("gated", {"gate": f"{gate}{number}", "note": "on it" if number == 0 else ""}) for number in range(3)]
    turn = await ask(client, calling(*calls, answer="${results[0]}, ${results[1]}, ${results[2]}"))
    for number in (2, 1, 0):  # all three run at once, or the first gate would never be reached
        await wait_until_async(lambda number=number: fleet.is_reached(f"{gate}{number}"), PATIENCE_SECONDS)  # type: ignore[misc]
    for number in (2, 1, 0):
        fleet.open_gate(f"{gate}{number}")
        async for event in turn.events():
            if event.type == "tool_execution.finished" and event.index == number:
                break
    events = await events_of(turn)
    finished = [event.index for event in events if event.type == "tool_execution.finished"]
    results = [event.index for event in events if event.type == "tool_result"]
    (progress,) = [event for event in events if event.type == "tool_execution.progress"]
    assert (finished, results) == ([2, 1, 0], [0, 1, 2])
    assert (progress.index, progress.message, progress.data) == (0, "on it", {"gate": f"{gate}0"})
    types = [event.type for event in events]
    assert types.index("tool_result") > len(types) - 1 - types[::-1].index("tool_execution.finished")
    assert (await result_of(turn)).answer == f"through {gate}0, through {gate}1, through {gate}2"


async def test_progress_comes_in_order_before_the_end_of_its_call(client: Client) -> None:
    turn = await ask(client, calling(Call("chatty", {"times": 30})))
    events = await events_of(turn, "tool_execution.progress", "tool_execution.finished")
    assert [event.message for event in events[:-1]] == [str(number) for number in range(30)]
    assert events[-1].type == "tool_execution.finished"


async def test_bytes_in_results_are_bytes_for_whoever_reads_them(client: Client) -> None:  # TH-06
    turn = await ask(client, calling(Call("snapshot", {"caption": "é"}), Call("raw", {"size": 256})))
    picture, payload = [event.tool_result for event in await events_of(turn, "tool_result")]
    assert picture.content == [TextPart("é"), ImagePart(data=app.PNG, media_type="image/png")]
    assert payload.result == {"payload": bytes(range(256))}
    for after in (0, 5):  # filled in from the events, and from the transcript
        step = next(event.step for event in await events_of(turn, "step.finished", after=after))
        assert step.tool_results == [picture, payload]
    calls = (await result_of(turn)).function_calls
    assert calls[0].result == picture.content
    assert calls[1].result == payload.result


# --- the loop


async def test_the_second_request_holds_the_first_ones_call_and_result(client: Client) -> None:  # LC-01
    turn = await client.turn(app.housekeeper, "call", session="house-loop")
    result = await result_of(turn)
    assert result.answer == "house: 2"
    assert [role for role, _ in brief(result.messages)] == ["user", "assistant", "tool", "assistant"]


async def test_an_answer_at_once_and_an_empty_one(client: Client) -> None:  # LC-02
    result = await result_of(await ask(client, "Hi"))
    assert (result.answer, len(result.steps), result.function_calls) == ("You said: Hi", 1, [])
    empty = await result_of(await ask(client, told(Reply(text=""))))
    assert (empty.status, empty.text, len(empty.steps)) == ("finished", "", 1)


LOOPING = Reply(tool_calls=[Call("calculator", {"expression": "1 + 1"})])


async def test_a_model_that_always_calls_meets_the_limit(client: Client) -> None:  # LC-03
    turn = await client.turn(app.worker, told(LOOPING), session="looping", options=TurnOptions(max_steps=2))
    caught = await failure_of(turn)
    assert caught.error_type == "max_steps_reached"
    assert (len(caught.result.steps), len(caught.result.function_calls)) == (2, 2)
    stopped = await client.turn(
        app.worker, told(LOOPING), session="looping", options=TurnOptions(stop_when=[step_count_is(2)])
    )
    result = await result_of(stopped)
    assert (result.status, result.termination.kind, len(result.steps)) == ("finished", "step_limit", 2)
    last = await client.turn(
        app.worker,
        told(LOOPING, Reply(text="all I know")),
        session="looping",
        options=TurnOptions(max_steps=1, on_limit="final_answer"),
    )
    assert (await result_of(last)).answer == "all I know"
    assert (await result_of(await client.turn(app.worker, "Hi", session="looping"))).answer == "You said: Hi"


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
async def test_what_goes_wrong_with_one_call_is_told_to_the_model(
    client: Client, execution: Any
) -> None:  # LC-04 LC-05 AC-51
    calls = [
        Call("kaboom"),
        Call("missing", {"x": 1}),
        Call("calculator", '{"expression": '),
        Call("calculator", {"expression": 5}),
        Call("calculator", {"expression": "2 + 3"}),
    ]
    turn = await ask(client, calling(*calls), tool_execution=execution)
    result = await result_of(turn)
    texts = [call.result for call in result.function_calls]
    assert texts[0] == "Error: execution failed (kaboom)"
    assert texts[1].startswith("Error: unknown tool 'missing'. Available: about_me, calculator, ")
    assert texts[2].startswith("Error: invalid arguments for 'calculator': the arguments are no JSON object")
    assert texts[3].startswith("Error: invalid arguments for 'calculator': expression: 5 is not of type")
    assert texts[4] == "5"
    assert [call.is_error for call in result.function_calls] == [True, True, True, True, False]
    started = [event.index for event in await events_of(turn, "tool_execution.started")]
    assert started == [0, 4]  # the others never reached a worker
    assert result.answer == "done"


async def test_sequential_calls_run_one_after_the_other(client: Client, fleet: Fleet, gate: str) -> None:  # LC-06
    calls = [Call("gated", {"gate": f"{gate}{number}"}) for number in range(2)]
    turn = await ask(client, calling(*calls), tool_execution="sequential")
    await wait_until_async(lambda: fleet.is_reached(f"{gate}0"), PATIENCE_SECONDS)
    fleet.open_gate(f"{gate}1")
    fleet.open_gate(f"{gate}0")
    order = [
        (event.type, event.index)
        for event in await events_of(turn, "tool_execution.started", "tool_execution.finished")
    ]
    assert order == [(f"tool_execution.{kind}", index) for index in (0, 1) for kind in ("started", "finished")]
    assert [call.result for call in (await result_of(turn)).function_calls] == [f"through {gate}0", f"through {gate}1"]


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
@pytest.mark.parametrize("hanging", [Call("hangs"), Call("hangs_in_a_thread", {"seconds": 1})], ids=["async", "thread"])
async def test_a_call_that_hangs_ends_at_its_timeout(client: Client, execution: Any, hanging: Call) -> None:  # LC-07
    turn = await ask(client, calling(hanging, Call("calculator", {"expression": "1 + 1"})), tool_execution=execution)
    result = await result_of(turn)
    assert [call.result for call in result.function_calls] == ["Error: execution failed (timeout after 0.3 s)", "2"]
    assert result.answer == "done"


async def test_a_turns_own_timeout_goes_before_the_tools(client: Client) -> None:  # LC-07
    turn = await ask(client, calling(Call("hangs")), tool_timeout=0.2)
    assert (await result_of(turn)).function_calls[0].result == "Error: execution failed (timeout after 0.2 s)"


async def test_a_tool_that_asks_for_it_is_tried_again(client: Client) -> None:
    turn = await ask(client, calling(Call("flaky", {"fails": 2}), Call("flaky", {"fails": 9})))
    passed, failed = (await result_of(turn)).function_calls
    assert passed.result == f"attempt 3, {turn.id}/1.0"
    assert failed.result == "Error: execution failed (attempt 3 failed)"
    attempts = [(event.index, event.attempt) for event in await events_of(turn, "tool_execution.started")]
    assert sorted(attempts) == [(index, attempt) for index in (0, 1) for attempt in (1, 2, 3)]


async def test_interleaved_fragments_are_put_together_exactly(client: Client) -> None:  # LC-08
    arguments = [{"expression": "1 + 1"}, {"expression": "20 + 22"}, {"expression": " 3 +4"}]
    reply = Reply(tool_calls=[Call("calculator", value) for value in arguments], fragments=5)
    turn = await ask(client, told(reply, Reply(text="${results[0]} ${results[1]} ${results[2]}")))
    assert (await result_of(turn)).answer == "2 42 7"
    deltas = await events_of(turn, "tool_call.delta")
    streamed = ["".join(e.arguments_delta for e in deltas if e.index == index) for index in range(3)]
    assert [json.loads(text) for text in streamed] == arguments
    ready = [event.tool_call.arguments for event in await events_of(turn, "tool_call.ready")]
    assert ready == arguments


async def test_a_stream_that_breaks_is_no_success(client: Client) -> None:  # LC-10
    turn = await ask(client, told(Reply(chunks=["All ", "good"], cut=True)))
    caught = await failure_of(turn)
    assert caught.error_type == "stream_broken"
    assert caught.result.text == ""  # what the attempts said is void
    attempts = [event.attempt for event in await events_of(turn, "step.retrying")]
    assert attempts == [2, 3]


async def test_a_list_of_messages_is_used_as_it_is(client: Client) -> None:  # LC-12
    call = ToolCall(id="old", name="calculator", arguments={"expression": "1"})
    history = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="before"),
        Message(role="assistant", content=[ToolCallPart(call)]),
        Message(
            role="tool", content=[ToolResultPart(ToolResult(tool_call_id="old", tool_name="calculator", result="1"))]
        ),
        Message(role="assistant", content="one"),
        Message(role="user", content="and now?"),
    ]
    turn = await client.turn(app.prefixed, history, session="listed")
    result = await result_of(turn)
    assert result.answer == "You said: and now?"
    assert (len(result.steps), result.function_calls) == (1, [])  # only what this turn wrote
    stored = await client.transcript("listed")
    assert brief(stored[:-1]) == brief(history)
    goes_on = await result_of(await client.turn(app.prefixed, "more", session="listed"))
    assert goes_on.answer == "You said: Politely: more"
    assert len(await client.transcript("listed")) == len(history) + 3


async def test_a_tool_knows_its_call(client: Client) -> None:  # TH-13
    turn = await ask(client, calling(Call("about_me", id="call_7")), metadata={"user": 7}, tool_timeout=30)
    result = await result_of(turn)
    about = result.function_calls[0].result
    assert about["remaining_seconds"] == pytest.approx(30, abs=5)
    assert about["deadline"] == pytest.approx(result.ended_at + 30, abs=10)
    del about["remaining_seconds"], about["deadline"]
    assert about == {
        "turn_id": turn.id,
        "session_id": turn.session_id,
        "agent_id": "worker",
        "tool_call_id": "call_7",
        "tool_name": "about_me",
        "step_number": 1,
        "attempt": 1,
        "idempotency_key": f"{turn.id}/1.0",
        "timeout_seconds": 30,
        "cancelled": False,
        "metadata": {"user": 7},
    }


# --- the host's own model


async def asked_of_the_house(redis_client: redis.asyncio.Redis, fleet: Fleet, session: str) -> list[Any]:
    entries: Any = redis_client.lrange(f"{fleet.keys.prefix}-play:asked:{session}", 0, -1)
    return [json.loads(entry) for entry in await entries]


async def test_a_model_by_the_host_is_asked_once_with_all_it_needs(
    client: Client, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:  # AE-14
    turn = await client.turn(app.housekeeper, "Hello", session="house")
    result = await result_of(turn)
    assert result.answer == "house: Hello"
    assert result.usage == Usage(input_tokens=3, output_tokens=2, total_tokens=5)
    assert [event.text for event in await events_of(turn, "reasoning.delta")] == ["let me see"]
    (asked,) = await asked_of_the_house(redis_client, fleet, "house")
    assert asked == {
        "messages": [["user", "Hello"]],
        "results": [],
        "system": "Be at home.",
        "tools": [["calculator", "Adds numbers."]],
    }
    await result_of(await client.turn(app.housekeeper, "call", session="house"))
    asked = (await asked_of_the_house(redis_client, fleet, "house"))[1:]
    assert [len(request["messages"]) for request in asked] == [3, 5]
    assert asked[1]["results"] == ["2"]


async def test_the_hosts_error_is_returned_and_the_session_stays_usable(
    client: Client, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:  # AE-14
    caught = await failure_of(await client.turn(app.housekeeper, "fail", session="broken-house"))
    assert "the house is closed" in str(caught)
    assert len(await asked_of_the_house(redis_client, fleet, "broken-house")) == 1
    result = await result_of(await client.turn(app.housekeeper, "Hello", session="broken-house"))
    assert result.answer == "house: Hello"


# --- the channel


async def test_a_tail_from_now_on_misses_nothing_however_long_the_pause(
    client: Client, fleet: Fleet, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # AC-30
    monkeypatch.setattr(subscription, "SILENCE_SECONDS", 0.05)  # many looks in one pause
    turn = await ask(client, calling(*[Call("gated", {"gate": f"{gate}{number}"}) for number in range(3)]))
    last = await seen(turn, "tool_execution.started")
    tail = asyncio.create_task(_numbers(client.attach(turn.id), last))
    for number in range(3):
        await asyncio.sleep(0.5)  # longer than any read blocks: the pause is what is tested
        fleet.open_gate(f"{gate}{number}")
    numbers = await asyncio.wait_for(tail, PATIENCE_SECONDS)
    assert numbers == list(range(last + 1, last + 1 + len(numbers)))
    assert [number for number, _ in [item async for item in turn.numbered_events()]][-1] == numbers[-1]


async def _numbers(turn: Turn, after: int) -> list[int]:
    return [number async for number, _ in turn.numbered_events(after)]


async def test_a_hundred_clients_that_come_and_go_each_see_all_of_it_once(
    client: Client, fleet: Fleet
) -> None:  # AC-29
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    fragments, text = 500, "x" * 1000
    # Fragments of two calls take turns, so none of them is joined with the next one.
    reply = Reply(
        tool_calls=[Call("missing", {"text": text}), Call("missing", {"text": text})],
        fragments=fragments,
        delay_seconds=0.001,
    )
    turn = await ask(client, told(reply, Reply(text="done")))
    async with fleet.client() as one, fleet.client() as other:
        watchers = [
            asyncio.create_task(_watch_restlessly((one, other)[number % 2], turn.id, random.Random(seed + number)))
            for number in range(100)
        ]
        drops_and_numbers = await asyncio.wait_for(asyncio.gather(*watchers), 60)
    total = len([number for number, _ in [item async for item in turn.numbered_events()]])
    assert total > 2 * fragments
    assert sum(drops for drops, _ in drops_and_numbers) > 200
    assert [numbers for _, numbers in drops_and_numbers if numbers != list(range(1, total + 1))] == []


async def _watch_restlessly(client: Client, turn_id: str, chance: random.Random) -> tuple[int, list[int]]:
    """Follow a turn, leave after a random number of events, come back where it was; its drops and all numbers it saw."""
    numbers: list[int] = []
    drops = 0
    while True:
        left = chance.randrange(1, 400)
        stream = client.attach(turn_id).numbered_events(after=numbers[-1] if numbers else 0)
        async for number, event in stream:
            numbers.append(number)
            if event.type in ("turn.finished", "turn.failed"):
                return drops, numbers
            left -= 1
            if left == 0:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        drops += 1
        await asyncio.sleep(chance.random() * 0.02)  # away for a moment


# --- processes that go and come


async def test_a_coordinators_successor_goes_on_with_the_numbers(
    client: Client, fleet: Fleet, gate: str
) -> None:  # AC-32
    for number, leave in enumerate((fleet.stop, fleet.kill)):
        name = f"{gate}{number}"
        turn = await ask(client, calling(Call("gated", {"gate": name, "note": "held"}), answer="${result}"))
        await seen(turn, "tool_execution.progress")
        watching = asyncio.create_task(_collect(client.attach(turn.id)))
        leave("coordinator")
        fleet.open_gate(name)  # the result comes while nobody coordinates
        fleet.start_role("coordinator")
        assert (await result_of(turn)).answer == f"through {name}"
        numbered = await asyncio.wait_for(watching, PATIENCE_SECONDS)
        assert [position for position, _ in numbered] == list(range(1, len(numbered) + 1))
        types = [event.type for _, event in numbered]
        assert types.count("tool_execution.finished") == types.count("turn.finished") == 1


async def _collect(turn: Turn) -> list[tuple[int, Event]]:
    return [item async for item in turn.numbered_events()]


async def test_a_killed_llm_workers_text_is_void_and_the_turn_goes_on(
    client: Client, fleet: Fleet, gate: str
) -> None:  # AC-33 AC-34
    turn = await client.turn(app.storyteller, gate)
    streaming = asyncio.create_task(_pieces(turn))
    await wait_until_async(lambda: fleet.is_reached(f"{gate}:1"), PATIENCE_SECONDS)
    spoken = ""
    async for event in turn.events():
        spoken += event.text if event.type == "text.delta" else ""
        if "w19 " in spoken:
            break
    fleet.kill("llm")
    fleet.open_gate(f"{gate}:2")
    fleet.start_role("llm")
    result = await result_of(turn)
    words = "".join(f"w{number} " for number in range(20))
    assert result.text == f"{words}attempt 2"
    assert (result.turn_id, len(result.steps)) == (turn.id, 1)
    events = await events_of(turn)
    (reset,) = [place for place, event in enumerate(events) if event.type == "step.reset"]
    assert (events[reset].step_number, events[reset].attempt) == (1, 2)
    assert "".join(event.text for event in events[:reset] if event.type == "text.delta") == words
    assert "".join(event.text for event in events[reset:] if event.type == "text.delta") == result.text
    assert "".join(await asyncio.wait_for(streaming, PATIENCE_SECONDS)) == result.text  # TH-03


async def _pieces(turn: Turn) -> list[str]:
    return [piece async for piece in turn.text_stream()]


# --- one turn at a time


async def test_twenty_submits_at_once_are_served_in_the_order_of_the_inbox(
    client: Client, fleet: Fleet, redis_client: redis.asyncio.Redis
) -> None:  # AC-47
    session = f"busy-{uuid.uuid4().hex[:8]}"
    inbox = fleet.keys.of_session(session).inbox
    async with fleet.client() as other:
        fleet.freeze("coordinator")  # so that the inbox can be read
        try:
            submits = [
                (client, other)[number % 2].turn(app.worker, f"message {number}", session=session)
                for number in range(20)
            ]
            turns = await asyncio.gather(*submits)
            entries: Any = await redis_client.xrange(inbox)
        finally:
            fleet.thaw("coordinator")
        results_by_id = {turn.id: await result_of(turn) for turn in turns}
    accepted = [json.loads(fields[b"d"])["turn_id"] for _, fields in entries]
    assert sorted(accepted) == sorted(turn.id for turn in turns)
    texts = {turn.id: turn.message for turn in turns}
    results = [results_by_id[turn_id] for turn_id in accepted]
    assert [result.answer for result in results] == [f"You said: {texts[turn_id]}" for turn_id in accepted]
    stored = await client.transcript(session)
    assert [message.text for message in stored if message.role == "user"] == [texts[turn_id] for turn_id in accepted]
    assert [message.role for message in stored] == ["user", "assistant"] * 20
    for before, after in pairwise(results):
        assert before.ended_at <= after.started_at


async def test_a_queued_turn_may_be_watched_before_it_begins(client: Client, fleet: Fleet, gate: str) -> None:  # AC-47
    session = f"watched-{gate}"
    first = await client.turn(app.worker, calling(Call("gated", {"gate": gate})), session=session)
    await seen(first, "tool_execution.started")
    second = await client.turn(app.worker, "next", session=session)
    await accepted(second)
    async with fleet.client() as other:
        watching = asyncio.create_task(_collect(other.attach(second.id)))
        fleet.open_gate(gate)
        assert (await result_of(second)).answer == "You said: next"
        numbered = await asyncio.wait_for(watching, PATIENCE_SECONDS)
    assert [number for number, _ in numbered] == list(range(1, len(numbered) + 1))


async def accepted(turn: Turn) -> None:
    """Wait until the coordinator has queued the turn."""

    async def is_queued() -> bool:
        try:
            return await turn.status() == "queued"
        except TurnLostError:
            return False

    await wait_until_async(is_queued, PATIENCE_SECONDS)
