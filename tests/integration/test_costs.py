"""What turns cost, on a real server with every role in a process of its own. Prices stand in the LLM worker's turnmill.toml.

Whatever a call becomes (an answer, a failed attempt, a stopped one), it is paid for once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps import lifecycle as app
from support.commands import CommandLine
from support.fleet import Fleet
from turnmill.protocol.content import AttemptUsage, Cost, ErrorInfo, Usage
from turnmill.runtime import Agent, Turn, TurnAbortedError
from turnmill.runtime.client import Client
from turnmill.workers.providers.scripted import Call, Reply

PATIENCE_SECONDS = 20.0
MODEL = "scripted:told"
PRICES = f'[prices."{MODEL}"]\ninput = "0.3"\noutput = 1.1\ncached = "0.03"\n'
FIRST = Usage(input_tokens=1_000, cached_tokens=400, output_tokens=50, total_tokens=1_050)
FIRST_COST = Cost(input=Decimal("0.000192"), output=Decimal("0.000055"), total=Decimal("0.000247"), source="settings")
SECOND = Usage(input_tokens=1_001, output_tokens=7, total_tokens=1_008)
SECOND_COST = Cost(
    input=Decimal("0.0003003"), output=Decimal("0.0000077"), total=Decimal("0.000308"), source="settings"
)
OVERLOADED = ErrorInfo(kind="provider_unavailable", message="overloaded", retryable=True)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    (directory / "turnmill.toml").write_text(PRICES, encoding="utf-8")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def fleet(valkey_url: str, directory: Path) -> Iterator[Fleet]:
    with Fleet(valkey_url, f"test-{uuid.uuid4().hex[:12]}", directory, "apps.lifecycle") as fleet:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)  # where the processes look for turnmill.toml
            fleet.start()
        yield fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with fleet.client() as client:
        yield client


async def ask(client: Client, *replies: Reply, agent: Agent = app.worker) -> Turn:
    return await client.turn(agent, msgspec.json.encode(replies).decode())


async def result_of(turn: Turn) -> Any:
    return await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def events_of(turn: Turn, kind: str) -> list[Any]:
    async def collect() -> list[Any]:
        return [event async for event in turn.events() if event.type == kind]

    return await asyncio.wait_for(collect(), PATIENCE_SECONDS)


async def stopped_after(turn: Turn, text: str) -> Any:
    """Stop the turn once this was said; what it had by then."""

    async def said() -> None:
        seen = ""
        async for event in turn.events():
            if event.type == "text.delta":
                seen += event.text
                if text in seen:
                    return
        raise AssertionError(f"the turn ended after {seen!r}")

    await asyncio.wait_for(said(), PATIENCE_SECONDS)
    assert await turn.abort("enough")
    with pytest.raises(TurnAbortedError) as caught:
        await result_of(turn)
    return caught.value.result


def counting(**fields: Any) -> Reply:
    """Says numbers for as long as it may."""
    return Reply(chunks=[f"{number} " for number in range(2_000)], delay_seconds=0.005, **fields)


async def test_each_step_has_its_cost_and_the_turn_their_sum(client: Client) -> None:  # LC-01, LC-14
    call = Call("calculator", {"expression": "2 + 3"})
    turn = await ask(client, Reply(tool_calls=[call], usage=FIRST), Reply("5!", usage=SECOND))
    result = await result_of(turn)
    assert [(step.step, step.model, step.usage, step.cost) for step in result.cost] == [
        (1, MODEL, FIRST, FIRST_COST),
        (2, MODEL, SECOND, SECOND_COST),
    ]
    assert result.total_cost == FIRST_COST + SECOND_COST
    assert result.total_cost.total == Decimal("0.000555")
    assert (result.usage, result.attempts) == (FIRST + SECOND, [])
    assert [event.step.cost for event in await events_of(turn, "step.finished")] == [FIRST_COST, SECOND_COST]


async def test_every_attempt_is_paid_for_once(client: Client, fleet: Fleet, directory: Path) -> None:  # AC-53, LC-14
    attempts = [
        Reply(error=OVERLOADED, usage=FIRST),
        Reply("one two", chunks=2, usage=SECOND, usage_after_chunks=1, error=OVERLOADED, error_after_chunks=2),
        Reply("three", usage=FIRST),
    ]
    turn = await ask(client, Reply(attempts=attempts))
    result = await result_of(turn)
    assert result.text == "three"
    kind, told = "provider_unavailable", {"step": 1, "model": MODEL}
    assert result.attempts == [
        AttemptUsage(attempt=1, outcome=kind, usage=FIRST, cost=FIRST_COST, **told),
        AttemptUsage(attempt=2, outcome=kind, usage=SECOND, cost=SECOND_COST, **told),
    ]
    assert [step.cost for step in result.cost] == [FIRST_COST]
    assert result.total_cost == FIRST_COST + SECOND_COST + FIRST_COST
    assert result.usage == FIRST + SECOND + FIRST
    retrying = await events_of(turn, "step.retrying")
    assert [(event.usage, event.cost) for event in retrying] == [(FIRST, FIRST_COST), (SECOND, SECOND_COST)]
    (finished,) = await events_of(turn, "step.finished")
    assert (finished.step.usage, finished.step.cost) == (FIRST, FIRST_COST)
    await assert_shown(fleet, directory, turn, result)


async def assert_shown(fleet: Fleet, directory: Path, turn: Turn, result: Any) -> None:
    """`turnmill show` reads the turn's record."""
    turnmill = CommandLine(
        directory,
        redis_url=fleet.url,
        namespace=fleet.settings.namespace,
        partitions=str(fleet.settings.partitions),
    )
    shown = await asyncio.to_thread(turnmill, "show", turn.id)
    assert "0.000802 USD" in shown.stdout, shown.stdout + shown.stderr
    assert "step 1 attempt 2: provider_unavailable, 1008 tokens, 0.000308 USD" in shown.stdout
    told = json.loads((await asyncio.to_thread(turnmill, "show", turn.id, "--json")).stdout)
    assert Decimal(told["cost"]["total"]) == result.total_cost.total
    assert [Decimal(attempt["cost"]["total"]) for attempt in told["attempts"]] == [
        attempt.cost.total for attempt in result.attempts
    ]


async def test_a_stopped_turn_keeps_what_is_known(client: Client) -> None:  # AC-53
    turn = await ask(client, counting(usage=FIRST, usage_after_chunks=20))
    result = await stopped_after(turn, "49 ")
    stopped = AttemptUsage(step=1, attempt=1, outcome="aborted", usage=FIRST, cost=FIRST_COST, model=MODEL)
    assert result.attempts == [stopped]
    assert (result.usage, result.total_cost, result.cost) == (FIRST, FIRST_COST, [])


async def test_a_stopped_turn_invents_nothing(client: Client) -> None:  # AC-53
    result = await stopped_after(await ask(client, counting()), "49 ")
    assert (result.attempts, result.usage, result.total_cost) == ([], Usage(), None)


async def test_a_step_before_the_stopped_one_counts_too(client: Client) -> None:  # AC-53, LC-14
    call = Call("calculator", {"expression": "1 + 1"})
    turn = await ask(client, Reply(tool_calls=[call], usage=FIRST), counting(usage=SECOND, usage_after_chunks=1))
    result = await stopped_after(turn, "49 ")
    assert [(step.step, step.cost) for step in result.cost] == [(1, FIRST_COST)]
    assert [(attempt.step, attempt.cost) for attempt in result.attempts] == [(2, SECOND_COST)]
    assert result.total_cost == FIRST_COST + SECOND_COST


async def test_the_providers_own_word_wins(client: Client) -> None:  # LC-14
    cost = Cost(total=Decimal("0.0000001"), source="provider")
    result = await result_of(await ask(client, Reply("hi", usage=FIRST, cost=cost)))
    assert ([step.cost for step in result.cost], result.total_cost) == ([cost], cost)


async def test_without_usage_there_is_no_cost(client: Client) -> None:  # LC-14
    result = await result_of(await ask(client, Reply("hi")))
    assert [(step.usage, step.cost) for step in result.cost] == [(None, None)]
    assert result.total_cost is None


async def test_without_a_price_there_is_usage_alone(client: Client) -> None:  # AC-53, LC-14
    turn = await client.turn(app.housekeeper, "hello")
    result = await result_of(turn)
    usage = Usage(input_tokens=3, output_tokens=2, total_tokens=5)
    assert [(step.model, step.usage, step.cost) for step in result.cost] == [("host:house", usage, None)]
    assert (result.usage, result.total_cost) == (usage, None)
    (finished,) = await events_of(turn, "step.finished")
    assert finished.step.cost is None
