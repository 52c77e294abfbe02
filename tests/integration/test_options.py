"""Every option of a turn goes before its agent's value, and does what it says, in the processes of a deployment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from apps.offices import APP, MODEL, TOOLS, enough, shouted, told
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.abort_signal import AbortSignal
from turnmill.protocol.errors import DefinitionError, TurnAbortedError, TurnError, TurnFailedError
from turnmill.runtime import (
    Agent,
    Compaction,
    OutputSpec,
    Reasoning,
    RetryPolicy,
    Turn,
    TurnOptions,
    has_tool_call,
    step_count_is,
)


class City(BaseModel):
    name: str
    people: int


COUNTRY = {"type": "object", "title": "Country", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BROKEN = [("broken", {})]
FETCH = [("fetch", {"value": "x"})]
ANOTHER = [("fetch", {"value": "y"})]

SHOWN_TO_THE_MODEL: dict[str, tuple[Any, Any, Any]] = {
    "system": ("You are an agent's.", "You are a turn's.", "You are a turn's."),
    "tools": (["fetch"], ["about_me", "sleepy"], ["about_me", "sleepy"]),
    "tool_choice": ("auto", "none", "none"),
    "provider_options": ({"host": {"seed": 1, "top_p": 1}}, {"host": {"seed": 2}}, {"seed": 2}),
    "reasoning": ("low", Reasoning(budget_tokens=5), {"budget_tokens": 5}),
    "output": (City, COUNTRY, COUNTRY),
}
"""By option: the agent's value, the turn's, and what the model is given."""
COLUMNS = {"provider_options": "options", "output": "output_schema"}

ENDS: dict[str, tuple[dict[str, Any], Any, str, tuple[str, str]]] = {
    "model": ({"model": "host:nobody"}, MODEL, told(), ("completed", "")),
    "fallbacks": ({"model": "nowhere:x"}, [MODEL], told(), ("completed", "")),
    "max_steps": ({"max_steps": 5}, 1, told(FETCH), ("failed", "max_steps_reached")),
    "on_limit": ({"max_steps": 1, "on_limit": "error"}, "final_answer", told(FETCH), ("completed", "")),
    "stop_when": ({"stop_when": [step_count_is(5)]}, has_tool_call("fetch"), told(FETCH), ("stop_condition", "")),
    "model_timeout": ({"model_timeout": 60, "retry": RetryPolicy(max_attempts=1)}, 0.2, told(gate="never"), ("failed", "timeout")),
    "turn_timeout": ({"turn_timeout": 60}, 0.3, told([("sleepy", {"seconds": 30})]), ("failed", "deadline_exceeded")),
    "repeated_errors_max": ({"repeated_errors_max": 5}, 2, told(BROKEN, BROKEN), ("repeated_tool_error", "repeated_tool_error")),
}  # fmt: skip
"""By option: the agent's values, the turn's, what the model does, and how the turn ends."""

IN_OTHER_TESTS = {
    "approvals": "test_approvals.py",
    "hooks": "test_hooks.py",
    "max_depth": "test_sub_turns.py",
    "max_sub_turns": "test_sub_turns.py",
    "mode": "test_host_tools.py",
}
BELOW = {
    "compaction", "extract_signals", "late_steering", "metadata", "priority", "retry", "signal", "tenant",
    "tool_execution", "tool_timeout", "warn_repeated_calls",
}  # fmt: skip


def test_no_option_is_forgotten() -> None:
    """TH-10: a new option needs a test that it does something."""
    assert set(SHOWN_TO_THE_MODEL) | set(ENDS) | set(IN_OTHER_TESTS) | BELOW == set(TurnOptions.model_fields)


def agent(name: str, **values: Any) -> Agent:
    return Agent(name, **{"model": MODEL, "tools": TOOLS, **values})


async def end(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def ask(stage: Stage, session: str, asked: Agent, message: str, **options: Any) -> Turn:
    return await stage.client.turn(asked, message, session=session, options=TurnOptions(**options))


async def test_what_the_model_is_given(office: Stage, session: str) -> None:
    """TH-10: one turn with the agent's values, one with its own, and one with the agent's again."""
    own = agent("shown", **{name: value for name, (value, _, _) in SHOWN_TO_THE_MODEL.items()})
    replaced = {name: value for name, (_, value, _) in SHOWN_TO_THE_MODEL.items()}
    city = told(answer='{"name": "Oslo", "people": 1}')
    for options in ({}, replaced, {}):
        assert (await end(await ask(office, session, own, city, **options))).status == "finished"
    first, second, third = await office.asked(session)
    for name, (_, _, expected) in SHOWN_TO_THE_MODEL.items():
        column = COLUMNS.get(name, name)
        assert second[column] == expected, name
        assert first[column] == third[column] != expected, name


@pytest.mark.parametrize("option", ENDS)
async def test_how_the_turn_ends(office: Stage, session: str, option: str) -> None:
    """TH-10, TH-11."""
    values, value, message, (kind, error_type) = ENDS[option]
    turn = await ask(office, session, agent(f"ends.{option}", **values), message, **{option: value})
    try:
        result = await end(turn)
    except TurnError as error:
        result = error.result
        assert error.error_type == error_type
    else:
        assert error_type == ""
    assert result.termination.kind == kind
    await office.assert_sound(turn.id)
    await office.assert_history(session)


async def test_metadata_reaches_tools_and_never_the_model(office: Stage, session: str) -> None:
    """TH-10."""
    metadata = {"user": {"id": 2**53 + 1}, "secret": "never-to-be-sent", "raw": b"\x00", "shape": {"$bytes": "AA=="}}
    turn = await ask(office, session, agent("meta"), told([("about_me", {})], [("fetch", {})]), metadata=metadata)
    result = await end(turn)
    assert result.function_calls[0].result["metadata"] == metadata
    first, second = (await office.asked(session))[:2]
    assert "never-to-be-sent" not in str(first)
    assert "never-to-be-sent" not in str({**second, "results": []})
    for unsendable in (float("nan"), object(), [{"deep": float("inf")}]):
        with pytest.raises(DefinitionError, match="metadata: it cannot be sent"):
            TurnOptions(metadata={"value": unsendable})


async def test_tools_run_one_after_the_other(office: Stage, session: str) -> None:
    """TH-10."""
    turn = await ask(office, session, agent("parallel"), told([*FETCH, *ANOTHER]), tool_execution="sequential")
    await end(turn)
    kinds = [(event.type, event.index) for event in await office.assert_sound(turn.id) if "execution" in event.type]
    assert kinds == [(f"tool_execution.{what}", index) for index in (0, 1) for what in ("started", "finished")]


async def test_a_turns_tool_timeout(office: Stage, session: str) -> None:
    """TH-10: it is the tool's own deadline too."""
    asked = agent("slow", tool_timeout=60)
    message = told([("sleepy", {"seconds": 20}), ("about_me", {})])
    slow, about = (await end(await ask(office, session, asked, message, tool_timeout=0.5))).function_calls
    assert slow.result == "Error: execution failed (timeout after 0.5 s)"
    assert about.result["timeout"] == 0.5


async def test_a_turns_retries(office: Stage, session: str) -> None:
    """TH-10."""
    quickly = RetryPolicy(max_attempts=3, initial_delay_seconds=0.01)
    asked = agent("once", model_timeout=0.2, retry=RetryPolicy(max_attempts=1))
    turn = await ask(office, session, asked, told(gate="never"), retry=quickly)
    with pytest.raises(TurnFailedError) as failed:
        await end(turn)
    assert failed.value.error_type == "timeout"
    assert "(model_timeout)" in str(failed.value)
    retries = [event.attempt for event in await office.assert_sound(turn.id) if event.type == "step.retrying"]
    assert retries == [2, 3]
    assert len(await office.asked(session)) == 3


@pytest.mark.parametrize("policy", ["step", "drop"])
async def test_what_becomes_of_late_steering(office: Stage, session: str, policy: str) -> None:
    """TH-10: it comes while the final answer is under way."""
    other = {"step": "drop", "drop": "step"}[policy]
    turn = await ask(
        office, session, agent(f"late.{policy}", late_steering=other), told(gate=session), late_steering=policy
    )
    await office.reached(session)
    entry = await turn.steer("one more thing")
    await office.open(session)
    result = await end(turn)
    assert len(result.steps) == {"step": 2, "drop": 1}[policy]
    [fate] = [
        event.type for event in await office.assert_sound(turn.id) if getattr(event, "steering_id", "") == entry.id
    ][1:]
    assert fate == {"step": "steering.applied", "drop": "steering.dropped"}[policy]


@pytest.mark.parametrize("warns", [True, False])
async def test_whether_the_model_is_warned_of_its_repetitions(office: Stage, session: str, warns: bool) -> None:
    """TH-10, AC-06: it reads so in the next step; the third call of the same kind is warned of as well."""
    asked = agent(f"warns.{warns}", warn_repeated_calls=not warns)
    result = await end(await ask(office, session, asked, told(FETCH, FETCH, FETCH), warn_repeated_calls=warns))
    notes = [message for message in result.messages if message.metadata.get("turnmill") == "loop_guard"]
    assert len(notes) == (2 if warns else 0)
    warned = ["same call" in str(request["messages"]) for request in await office.asked(session)]
    assert warned == [False, False, warns, warns]
    await office.assert_history(session)


async def test_the_same_error_again_and_again(office: Stage, session: str) -> None:
    """A guard's end says the tool and its error, and leaves a usable session; other arguments make no
    other error."""
    steps = [[("broken", {"number": number})] for number in range(5)]
    turn = await ask(office, session, agent("guarded"), told(*steps))
    with pytest.raises(TurnFailedError, match=r"broken failed 3 times in a row: .*it is broken") as failed:
        await end(turn)
    assert (failed.value.termination.kind, failed.value.termination.tool_name) == ("repeated_tool_error", "broken")
    assert len(failed.value.result.steps) == 3
    assert (await end(await ask(office, session, agent("guarded"), told()))).status == "finished"
    await office.assert_history(session)


async def test_a_turns_own_code(office: Stage, session: str) -> None:
    """TH-10, TH-11, AE-08: conditions of several kinds, any of which ends the turn, and an extractor, run in a worker."""
    steps = [FETCH, [("fetch", {"value": "enough"})], ANOTHER]
    result = await end(
        await ask(
            office, session, agent("coded"), told(*steps), stop_when=[step_count_is(9), enough, has_tool_call("pay")]
        )
    )
    assert (result.termination.stop_condition, result.termination.reason) == ("enough", "2 calls")
    assert len(result.steps) == 2
    result = await end(await ask(office, session, agent("coded"), told(answer="a LOUD word"), extract_signals=shouted))
    assert result.signals == ["LOUD"]
    rest = await end(
        await ask(office, session, agent("coded"), told([("ask_user", {})]), extract_signals=shouted, stop_when=[])
    )
    assert (rest.status, rest.signals) == ("suspended", [])


async def test_a_turns_own_compaction(office: Stage, session: str) -> None:
    """TH-10: it shortens what the turn before has left."""
    asked = agent("long", compaction=Compaction(trigger_tokens=10**6))
    await end(await ask(office, session, asked, told([("fetch", {"value": "x" * 3000})])))
    early = Compaction(trigger_tokens=5, tool_output_bytes=100, keep_steps=0)
    turn = await ask(office, session, asked, told(), compaction=early)
    assert (await end(turn)).status == "finished"
    assert "context.compacted" in {event.type for event in await office.assert_sound(turn.id)}
    assert all(len(result) <= 100 for result in (await office.asked(session))[-1]["results"])


async def test_a_signal_of_this_process_stops_its_turn(office: Stage, session: str) -> None:
    """TH-10."""
    signal = AbortSignal()
    turn = await ask(
        office, session, agent("signalled"), told([("fetch", {"value": "x", "gate": session})]), signal=signal
    )
    await office.reached(session)
    signal.set("shutting down")
    with pytest.raises(TurnAbortedError, match="shutting down"):
        await end(turn)
    await office.open(session)
    await office.assert_history(session)


async def test_tenants_take_turns_and_priorities_come_first(
    valkey_url: str, namespace: str, short_directory: Path
) -> None:
    """TH-10: where model calls have to wait for each other."""
    asked = agent("waiting")
    async with open_stage(
        valkey_url, namespace, short_directory, partitions=1, dispatch_window=1, llm_concurrency=1
    ) as stage:
        for start in (
            stage.processes.coordinator,
            lambda: stage.processes.llm(APP),
            lambda: stage.processes.tools(APP),
        ):
            start()
        held = await ask(stage, "held", asked, told(gate="held"))
        await stage.reached("held")
        order = [("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("urgent", "a", 9)]
        turns = [
            await ask(stage, name, asked, told(answer=name), tenant=tenant, priority=priority)
            for name, tenant, priority in order
        ]
        for turn in turns:
            await stage.event(turn, "step.started")

        async def all_wait() -> bool:
            return int(await stage.redis.zcard(stage.keys.partitions[0].backlog("host.played"))) == len(turns)

        await wait_until_async(all_wait, PATIENCE_SECONDS)
        await stage.open("held")
        results = await asyncio.gather(*[end(turn) for turn in [held, *turns]])
        ends = {name: result.ended_at for (name, _, _), result in zip(order, results[1:], strict=True)}
        ranked = sorted(ends, key=lambda name: ends[name])
        assert ranked[0] == "urgent"
        assert ranked.index("b1") < ranked.index("a2"), ranked


# ---- structured output


async def test_an_answer_becomes_an_object_of_its_class(office: Stage, session: str) -> None:
    """LC-16: validated, repaired once, and an object where the handle knows the class; plain JSON for other handles."""
    message = told(answer='```json\n{"name": "Oslo", "people": 717710}\n```')
    for number, (asked, options) in enumerate(((agent("typed", output=City), {}), (agent("free"), {"output": City}))):
        own = f"{session}{number}"
        turn = await ask(office, own, asked, message, **options)
        result = await end(turn)
        assert result.output == City(name="Oslo", people=717710)
        assert (await end(office.client.attach(turn.id))).output == {"name": "Oslo", "people": 717710}
        assert [request["output_schema"] for request in await office.asked(own)] == [City.model_json_schema()]


async def test_an_answer_that_does_not_fit_is_repaired_once(office: Stage, session: str) -> None:
    """LC-16: the question for the repair is a message of the runtime; the second answer is checked as the first was."""
    turn = await ask(office, session, agent("wrong"), told(answer='{"name": "Oslo"}'), output=City)
    with pytest.raises(TurnFailedError) as failed:
        await end(turn)
    assert failed.value.error_type == "output_invalid"
    assert '"people" is a required property' in str(failed.value)
    assert failed.value.result.output is None
    messages = failed.value.result.messages
    assert [message.role for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[2].metadata == {"turnmill": "output_repair"}
    strict = await ask(
        office, session, agent("wrong"), told(answer="no JSON"), output=OutputSpec(schema=COUNTRY, repairs=0)
    )
    with pytest.raises(TurnFailedError, match="not JSON"):
        await end(strict)
    assert len(await office.asked(session)) == 3
    await office.assert_history(session)
