"""Several client processes at once: one turn for one key, turns of one session in order, and clients that die."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from apps.living import APP, assistant
from support.processes import Process
from support.stage import PATIENCE_SECONDS, Stage, open_stage
from support.waiting import wait_until_async
from turnmill.protocol.errors import IdempotencyConflictError, SessionBusyError, TurnAbortedError
from turnmill.runtime import Agent

CLIENT = """
import asyncio, json, sys
from apps.living import assistant
from turnmill.runtime import connect

async def main(action, arguments):
    async with connect() as client:
        if action == "submit":
            keywords = arguments["keywords"]
            turns = [client.turn(assistant, text, **keywords) for text in arguments["texts"]]
            print(json.dumps([turn.id for turn in await asyncio.gather(*turns)]), flush=True)
        else:
            async for event in client.attach(arguments["turn_id"]).events():
                print(event.type, flush=True)

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.fixture
async def stage(valkey_url: str, namespace: str, short_directory: Path) -> AsyncIterator[Stage]:
    async with open_stage(valkey_url, namespace, short_directory) as opened:
        opened.processes.coordinator()
        opened.processes.tools(APP)
        yield opened


def client_process(stage: Stage, action: str, **arguments: object) -> Process:
    command = [sys.executable, "-c", CLIENT, action, json.dumps(arguments)]
    return stage.processes.start(action, command)


async def submitted(processes: list[Process]) -> list[str]:
    """The ids of the turns that client processes have started, process by process."""
    for process in processes:
        assert await asyncio.to_thread(process.popen.wait, PATIENCE_SECONDS) == 0, process.log()
    return [turn_id for process in processes for turn_id in json.loads(process.log())]


async def test_one_key_is_one_turn_through_any_process(stage: Stage) -> None:
    """AC-14: 50 times through two processes, later again, and with another body."""
    stage.processes.llm(APP)
    keywords = {"idempotency_key": "order-7"}
    both = [client_process(stage, "submit", texts=["hello"] * 25, keywords=keywords) for _ in range(2)]
    ids = await submitted(both)
    assert len(ids) == 50 and len(set(ids)) == 1
    turn = await stage.client.turn(assistant, "hello", idempotency_key="order-7")
    assert turn.id == ids[0]
    assert (await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)).answer == "echo hello"
    assert (await stage.client.turn(assistant, "hello", idempotency_key="order-7")).id == ids[0]
    with pytest.raises(IdempotencyConflictError) as conflict:
        await stage.client.turn(assistant, "something else", idempotency_key="order-7")
    assert conflict.value.turn_id == ids[0]
    assert await stage.redis.llen(f"{stage.keys.prefix}-seen") == 1, "the model was asked once"
    await stage.assert_idle()


async def test_turns_of_a_session_come_in_the_order_of_the_inbox(stage: Stage) -> None:
    """AC-47: 20 submits at once through two processes; no coordinator reads before all are there."""
    stage.processes.all[0].kill()
    texts = [f"number {number}" for number in range(10)]
    both = [client_process(stage, "submit", texts=texts, keywords={"session": "s"}) for _ in range(2)]
    ids = await submitted(both)
    entries = await stage.redis.xrange(stage.keys.of_session("s").inbox)
    order = [json.loads(fields[b"d"])["turn_id"] for _, fields in entries]
    assert sorted(order) == sorted(ids)
    stage.processes.coordinator()
    stage.processes.llm(APP)
    for turn_id in ids:
        assert (await asyncio.wait_for(stage.client.attach(turn_id).result(), PATIENCE_SECONDS)).status == "finished"
    messages = await stage.assert_history("s")
    assert list(dict.fromkeys(message.turn_id for message in messages)) == order


async def test_a_busy_session_does_what_the_caller_says(stage: Stage) -> None:
    """AC-47: reject, steer and interrupt."""
    stage.processes.llm(APP)
    turn = await stage.client.turn(assistant, "fetch busy", session="s")
    await stage.reached("busy")
    with pytest.raises(SessionBusyError) as busy:
        await stage.client.turn(assistant, "rejected", session="s", on_busy="reject")
    assert busy.value.turn_id == turn.id
    steered = await stage.client.turn(assistant, "steered", session="s", on_busy="steer")
    assert steered.id == turn.id
    instead = await stage.client.turn(assistant, "instead", session="s", on_busy="interrupt")
    with pytest.raises(TurnAbortedError, match=instead.id):
        await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    assert (await asyncio.wait_for(instead.result(), PATIENCE_SECONDS)).answer == "echo instead"
    dropped = [event.reason for event in await stage.assert_sound(turn.id) if event.type == "steering.dropped"]
    assert dropped == ["the turn was stopped"]
    await stage.assert_history("s")


async def test_a_client_that_dies_stops_nothing_and_a_stop_closes_the_providers_connection(stage: Stage) -> None:
    """AC-42: kill -9 of the client that watches; then a stop through another one. No text comes behind it."""
    provider = EndlessProvider()
    async with provider.serve() as port:
        variables = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1"}
        what = json.dumps({"role": "llm", "target": None, "names": [], "concurrency": None})
        stage.processes.start("llm", [sys.executable, "-m", "support.processes", what], variables)
        turn = await stage.client.turn(Agent("talker", "openai:endless"), "talk", session="s")
        watcher = client_process(stage, "watch", turn_id=turn.id)
        await wait_until_async(_seen(watcher, "text.delta", 3), PATIENCE_SECONDS)
        watcher.kill()
        sent = provider.sent
        await wait_until_async(lambda: _true(provider.sent > sent + 20), PATIENCE_SECONDS)
        stopped_at = time.monotonic()
        assert await turn.abort("enough")
        await asyncio.wait_for(provider.closed.wait(), 1.0)
        assert time.monotonic() - stopped_at < 1.0
        with pytest.raises(TurnAbortedError) as stopped:
            await asyncio.wait_for(turn.result(), PATIENCE_SECONDS)
    events = await stage.assert_sound(turn.id)
    shown = "".join(event.text for event in events if event.type == "text.delta")
    kept = stopped.value.result.messages[-1]
    assert kept.metadata["turnmill"] == "interrupted"
    assert kept.text.startswith(shown) and shown.startswith("word word")
    length = len(await stage.told_events(turn.id))
    await stage.assert_idle()
    assert len(await stage.told_events(turn.id)) == length


async def _true(value: bool) -> bool:
    return value


def _seen(process: Process, word: str, times: int) -> Callable[[], Awaitable[bool]]:
    return lambda: _true(process.log().count(word) >= times)


class EndlessProvider:
    """A server that speaks like OpenAI's and never ends; it notices when its client leaves."""

    def __init__(self) -> None:
        self.sent = 0
        self.closed = asyncio.Event()

    def serve(self) -> _Serving:
        return _Serving(self)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        chunk = {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
        try:
            while not reader.at_eof():
                writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                await writer.drain()
                self.sent += 1
                try:
                    await asyncio.wait_for(reader.read(65536), 0.01)
                except TimeoutError:
                    continue
        except ConnectionError:
            pass  # the client has left without a word
        finally:
            self.closed.set()
            writer.close()


class _Serving:
    def __init__(self, provider: EndlessProvider) -> None:
        self._provider = provider

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._provider.answer, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        await self._server.wait_closed()
