"""A loopback HTTP server that answers with given bytes: the provider's part in tests of adapters.

    async with ReplayServer() as server:
        server.reply(Answer(chunks=[b"data: [DONE]\\n\\n"]))
        ...                       # a request to server.url
        assert server.requests[0].json["stream"] is True

Answers are given to requests in order; the last one is given again to all that follow. Every chunk is written and
flushed by itself, so that it usually becomes a network read of its own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

Ending = Literal["complete", "cut", "stay_open", "close_after"]


@dataclass
class Answer:
    """`ending`: `complete` ends the body and keeps the connection, `close_after` ends it and closes the connection,
    `cut` closes in the middle of the body, `stay_open` sends nothing more and waits for the client to leave.

    With `is_silent` the connection is closed without an answer. `gates[n]` is waited for before chunk n is written."""

    chunks: Sequence[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    ending: Ending = "complete"
    is_silent: bool = False
    gates: Mapping[int, asyncio.Event] = field(default_factory=dict)


@dataclass
class RecordedRequest:
    """A request as it came. `connection` counts connections from 0; `closed` is set when the client left that
    connection or the server closed it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    closed: asyncio.Event

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ReplayServer:
    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self.connections = 0
        self._answers: deque[Answer] = deque()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ReplayServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def reply(self, *answers: Answer) -> None:
        """Answers for the next requests, in order, behind those that are still waiting."""
        self._answers.extend(answers)

    def reply_only(self, *answers: Answer) -> None:
        """These answers from now on; what was waiting is forgotten."""
        self._answers = deque(answers)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        closed = asyncio.Event()
        try:
            await self._serve(reader, writer, closed)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        except asyncio.CancelledError:
            pass  # the server ends; a cancelled handler would be reported by asyncio
        finally:
            closed.set()
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, closed: asyncio.Event) -> None:
        connection = self.connections
        self.connections += 1
        while True:
            request = await _read_request(reader, connection, closed)
            self.requests.append(request)
            answer = self._answers.popleft() if len(self._answers) > 1 else self._answers[0]
            if answer.is_silent:
                return
            await _write_answer(reader, writer, answer)
            if answer.ending == "stay_open":
                await reader.read()
            if answer.ending != "complete":
                return


async def _read_request(reader: asyncio.StreamReader, connection: int, closed: asyncio.Event) -> RecordedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return RecordedRequest(method, path, headers, body, connection, closed)


async def _write_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
    headers = {**answer.headers, "transfer-encoding": "chunked"}
    if answer.ending == "close_after":
        headers["connection"] = "close"
    lines = [f"HTTP/1.1 {answer.status} Replayed", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    await writer.drain()
    for position, chunk in enumerate(answer.chunks):
        if position in answer.gates:
            await _wait_while_connected(answer.gates[position], reader)
        if chunk:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
        await asyncio.sleep(0)  # lets the client read before the next chunk is there
    if answer.ending in ("complete", "close_after"):
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _wait_while_connected(gate: asyncio.Event, reader: asyncio.StreamReader) -> None:
    """Waits for the gate. Raises `ConnectionError` when the client leaves before."""
    opened, left = asyncio.ensure_future(gate.wait()), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            raise ConnectionError("the client left")
    finally:
        opened.cancel()
        left.cancel()
        await asyncio.gather(opened, left, return_exceptions=True)


@contextmanager
def replaying() -> Iterator[ReplayServer]:
    """A server with a thread and an event loop of its own, for processes that outlive a test's loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="replay-server", daemon=True)
    thread.start()
    server = ReplayServer()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
