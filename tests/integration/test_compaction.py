"""Conversations that outgrow the model's window, on a real server with every role in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apps import compaction as app
from support.fleet import Fleet
from turnmill.protocol.content import Message
from turnmill.runtime import Agent, Turn, TurnFailedError
from turnmill.runtime.client import Client
from turnmill.workers.providers.scripted import Call, Reply, history_fault

PATIENCE_SECONDS = 20.0
READ_THREE = [Call("read", {"name": name, "size": 200_000}) for name in ("one", "two", "three")]


class Deployment:
    """The processes, and what the models in them were asked."""

    def __init__(self, fleet: Fleet, log_path: Path) -> None:
        self.fleet = fleet
        self._log_path = log_path

    def asked(self, session_id: str, model: str | None = None) -> list[dict[str, Any]]:
        """The requests of a session, in their order, with how they ended."""
        requests = [json.loads(line) for line in self._log_path.read_text().splitlines()]
        return [
            request
            for request in requests
            if request["session_id"] == session_id and (model is None or request["model"] == model)
        ]

    def outcomes(self, session_id: str) -> list[tuple[str, str]]:
        return [(request["model"], request["outcome"]) for request in self.asked(session_id)]


@pytest.fixture(scope="module")
def deployment(valkey_url: str) -> Iterator[Deployment]:
    directory = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    log_path = directory / "asked.jsonl"
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    with Fleet(valkey_url, namespace, directory, "apps.compaction", script_log=log_path) as fleet:
        fleet.start()
        yield Deployment(fleet, log_path)
    shutil.rmtree(directory)


@pytest.fixture
def session() -> str:
    return uuid.uuid4().hex[:8]


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with deployment.fleet.client() as client:
        yield client


def told(*replies: Reply) -> str:
    return msgspec.json.encode(replies).decode()


async def ask(client: Client, agent: Agent, session: str, message: Any) -> tuple[Turn, Any]:
    turn = await client.turn(agent, message, session=session)
    return turn, await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)


async def failure(client: Client, agent: Agent, session: str, message: Any) -> TurnFailedError:
    with pytest.raises(TurnFailedError) as caught:
        await ask(client, agent, session, message)
    return caught.value


async def compactions(turn: Turn) -> list[tuple[int, str]]:
    """The step and the reason of each time that the conversation was shortened."""
    return [(event.step_number, event.reason) async for event in turn.events() if event.type == "context.compacted"]


def results_of(request: dict[str, Any]) -> list[str]:
    messages = msgspec.convert(request["messages"], list[Message])
    return [result.result for message in messages for result in message.tool_results]


async def test_three_large_results_are_trimmed_within_the_turn(
    client: Client, deployment: Deployment, session: str
) -> None:  # AC-08
    message = told(Reply(tool_calls=READ_THREE), Reply(text="read"))
    turn, result = await ask(client, app.trimming, session, message)
    assert (result.status, result.answer) == ("finished", "read")
    assert await compactions(turn) == [(2, "overflow")]
    assert deployment.outcomes(session) == [("small", "finished"), ("small", "error"), ("small", "finished")]
    shown = results_of(deployment.asked(session)[-1])
    assert [text[:5] for text in shown] == ["<one>", "<two>", "<thre"]
    for text, call in zip(shown, READ_THREE, strict=True):
        assert len(text) <= 2_000
        assert "bytes left out" in text
        assert text.endswith(f"</{call.arguments['name']}>")  # type: ignore[index]

    whole = await client.transcript(session)
    assert [len(each.result) for entry in whole for each in entry.tool_results] == [200_000] * 3
    assert [call.result for call in result.function_calls] == [
        app.read.function(**call.arguments) for call in READ_THREE
    ]


async def test_the_turn_after_it_is_not_refused_again(
    client: Client, deployment: Deployment, session: str
) -> None:  # AC-08
    await ask(client, app.trimming, session, told(Reply(tool_calls=READ_THREE), Reply(text="read")))
    before = len(deployment.asked(session))
    for count in (7, 9):  # the question, the calls, three results, the answer; then a turn more
        turn, result = await ask(client, app.trimming, session, "and now?")
        assert result.answer == f"{count} messages"
        assert await compactions(turn) == []
    assert {outcome for _, outcome in deployment.outcomes(session)[before:]} == {"finished"}


async def test_what_stands_for_the_conversation_survives_a_restart_of_everything(
    client: Client, deployment: Deployment, session: str
) -> None:  # AC-08, AC-09
    await ask(client, app.trimming, session, told(Reply(tool_calls=READ_THREE), Reply(text="read")))
    for role in ("coordinator", "llm"):
        deployment.fleet.kill(role)
        deployment.fleet.start_role(role)
    _, result = await ask(client, app.trimming, session, "and now?")
    assert result.answer == "7 messages"
    before, after = deployment.asked(session)[-2:]
    assert after["messages"][:5] == before["messages"]


async def test_where_nothing_can_be_shortened_the_turn_fails_once_and_another_agent_goes_on(
    client: Client, deployment: Deployment, session: str
) -> None:  # AC-08
    error = await failure(client, app.keeping, session, told(Reply(tool_calls=READ_THREE), Reply(text="read")))
    assert error.error_type == "context_overflow"
    assert "maximum context length" in str(error)
    assert deployment.outcomes(session) == [("small", "finished"), ("small", "error")]
    assert history_fault(await client.transcript(session)) is None
    turn, result = await ask(client, app.trimming, session, "and now?")
    assert result.answer == "6 messages"
    assert await compactions(turn) == [(1, "overflow")]


async def test_older_turns_are_summed_up(client: Client, deployment: Deployment, session: str) -> None:  # AC-08
    for word in ("alpha", "beta"):
        await ask(client, app.summing, session, word.ljust(11_000, "."))
    turn, result = await ask(client, app.summing, session, "gamma".ljust(11_000, "."))
    assert await compactions(turn) == [(1, "overflow")]
    assert deployment.outcomes(session)[2:] == [("small", "error"), ("editor", "finished"), ("small", "finished")]
    (summary, *rest) = deployment.asked(session)[-1]["messages"]
    assert summary["metadata"] == {"turnmill": "summary"}
    assert "They talked" in summary["content"]
    assert [message["content"][:5] for message in rest][-1] == "gamma"
    (attempt,) = [each for each in result.attempts if each.outcome == "compaction"]
    assert (attempt.usage, attempt.model) == (app.EDITOR_USAGE, "scripted:editor")
    assert result.usage.input_tokens > app.EDITOR_USAGE.input_tokens
    whole = await client.transcript(session)
    assert [len(message.text) for message in whole if message.role == "user"] == [11_000] * 3

    turn, _ = await ask(client, app.summing, session, "short")
    assert await compactions(turn) == []


async def test_a_summary_that_is_too_long_for_its_model_is_made_in_pieces(
    client: Client, deployment: Deployment, session: str
) -> None:  # AC-08
    for word in ("alpha", "beta", "gamma"):
        turn, result = await ask(client, app.summing, session, word.ljust(15_000, "."))
    assert await compactions(turn) == [(1, "overflow")]
    assert result.answer == "2 messages"
    calls = [outcome for model, outcome in deployment.outcomes(session) if model == "editor"]
    assert calls == ["error", "finished", "finished"]
    last = deployment.asked(session, "editor")[-1]["messages"][0]["content"]
    assert last.startswith("[summary of what came before]\nThey talked")
    (attempt,) = [each for each in result.attempts if each.outcome == "compaction"]
    assert attempt.usage == app.EDITOR_USAGE + app.EDITOR_USAGE


async def test_a_question_that_was_too_long_does_not_stand_in_the_way_of_the_next(
    client: Client, session: str
) -> None:  # AC-08
    """No answer came to it, so nothing but the boundary of its turn may be cut at."""
    error = await failure(client, app.summing, session, "x" * (app.WINDOW + 1))
    assert error.error_type == "context_overflow"
    turn, result = await ask(client, app.summing, session, "short")
    assert result.answer == "2 messages"
    assert await compactions(turn) == [(1, "overflow")]


async def test_a_summarizer_that_fails_leaves_the_overflow_and_the_session_usable(client: Client, session: str) -> None:
    text = "no summary, please".ljust(14_000, ".")
    await ask(client, app.summing, session, text)
    await ask(client, app.summing, session, text)
    error = await failure(client, app.summing, session, text)
    assert error.error_type == "context_overflow"
    assert history_fault(await client.transcript(session)) is None


async def test_a_turn_may_begin_with_a_shorter_conversation(
    client: Client, deployment: Deployment, session: str
) -> None:
    """In good time: no provider has refused anything, and the newest step stays as it is."""
    reads = [Call("read", {"name": name, "size": 9_000}) for name in ("old", "new")]
    message = told(Reply(tool_calls=reads[:1]), Reply(tool_calls=reads[1:]), Reply(text="read"))
    first, _ = await ask(client, app.early, session, message)
    assert await compactions(first) == []
    second, result = await ask(client, app.early, session, "and now?")
    assert result.answer == "7 messages"
    assert await compactions(second) == [(1, "trigger")]
    assert {outcome for _, outcome in deployment.outcomes(session)} == {"finished"}
    shown = results_of(deployment.asked(session)[-1])
    assert all(len(text) <= 500 for text in shown)
    third, _ = await ask(client, app.early, session, "and then?")
    assert await compactions(third) == []


async def test_an_answer_is_asked_for_again_where_it_is_not_the_json_it_should_be(
    client: Client, deployment: Deployment, session: str
) -> None:  # LC-16
    # The question for a repair is the last message of a user, so the second answer is given as a function of it.
    _, result = await ask(client, app.formal, session, "Where?")
    assert (result.status, result.output) == ("finished", {"city": "Oslo"})
    first, second = deployment.asked(session)
    assert first["output_schema"] == app.WEATHER
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert "not valid: not JSON" in second["messages"][-1]["content"]


async def test_an_answer_that_stays_wrong_is_a_typed_error(client: Client, session: str) -> None:  # LC-16
    error = await failure(client, app.formal, session, "Where? Do not say it.")
    assert error.error_type == "output_invalid"
    assert '"city" is a required property' in str(error)
