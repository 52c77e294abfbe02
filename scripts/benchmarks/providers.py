"""What one streamed event of a provider costs, from bytes to events: each of our formats, a bare loop, the official SDKs.

A recorded stream is made longer by repeating its text deltas, and read again and again from memory, in pieces as they come
from a network, over an in-process transport of httpx. The bare loop is the least that can be done: events split from bytes, each
decoded into a struct. SDKs and pydantic-ai are measured where they are installed (`--group peers` in pyproject.toml).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.recordings import Case, load_cases  # noqa: E402  # the tests are no package
from turnmill.protocol.content import Message  # noqa: E402
from turnmill.workers.providers.base import ProviderRequest  # noqa: E402
from turnmill.workers.providers.format import Endpoint  # noqa: E402
from turnmill.workers.providers.registry import APIS, open_format  # noqa: E402
from turnmill.workers.providers.sse import SseParser  # noqa: E402

EVENTS = 1500
PIECE_BYTES = 1400
DELTAS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "openai-chat": lambda told: bool(told.get("choices")) and bool(told["choices"][0].get("delta", {}).get("content")),
    "openai-responses": lambda told: told.get("type") == "response.output_text.delta",
    "anthropic-messages": lambda told: (
        told.get("type") == "content_block_delta" and told.get("delta", {}).get("type") == "text_delta"
    ),
    "gemini": lambda told: any("text" in part for part in _gemini_parts(told)),
}


def _gemini_parts(told: dict[str, Any]) -> list[dict[str, Any]]:
    candidates = told.get("candidates") or [{}]
    parts: list[dict[str, Any]] = candidates[0].get("content", {}).get("parts") or []
    return [] if candidates[0].get("finishReason") else parts


class Choice(msgspec.Struct, gc=False):
    delta: dict[str, Any] | None = None


class Bare(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    type: str | None = None
    delta: Any = None
    candidates: Any = None


_decode_bare = msgspec.json.Decoder(Bare).decode


def enlarged(api: str) -> tuple[bytes, int, str]:
    """The body of the recording with the most text deltas, made longer; its events, and its name."""
    best: tuple[int, Case | None] = (0, None)
    for case in load_cases(api):
        if (
            case.meta["response_file"].endswith(".sse")
            and case.meta.get("http_status") == 200
            and "recordings" in str(case.directory)
        ):
            deltas = sum(1 for event in _blocks(case.body) if _is_delta(api, event))
            best = max(best, (deltas, case), key=lambda each: each[0])
    deltas, case = best
    assert case is not None, f"no recorded stream of {api}"
    times = max(1, EVENTS // deltas)
    body = b"".join(event * (times if _is_delta(api, event) else 1) for event in _blocks(case.body))
    return body, len(_blocks(body)), case.name


def _blocks(body: bytes) -> list[bytes]:
    body = body.replace(b"\r\n", b"\n")
    return [block + b"\n\n" for block in body.split(b"\n\n") if block.strip()]


def _is_delta(api: str, block: bytes) -> bool:
    data = b"".join(line[5:] for line in block.split(b"\n") if line.startswith(b"data:")).strip()
    if not data or data == b"[DONE]":
        return False
    return DELTAS[api](json.loads(data))


def pieces(body: bytes) -> list[bytes]:
    return [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]


async def run_ours(api: str, chunks: list[bytes]) -> None:
    request = ProviderRequest(model="m", messages=[Message(role="user", content="?")])
    reply = open_format(api, Endpoint(name=api, base_url="http://localhost")).begin_reply(request)
    async with _http_client(httpx, chunks).stream("POST", "http://localhost") as response:
        async for chunk in response.aiter_raw():
            for _ in reply.feed(chunk):
                pass
    for _ in reply.close():
        pass
    reply.completed()


async def run_bare(chunks: list[bytes]) -> None:
    parser = SseParser()
    async with _http_client(httpx, chunks).stream("POST", "http://localhost") as response:
        async for chunk in response.aiter_raw():
            for event in parser.feed(chunk):
                if event.data[:1] == b"{":
                    _decode_bare(event.data)


def best_of(run: Callable[[], object], repeat: int) -> float:
    """Seconds of CPU, the least of some runs."""
    least = float("inf")
    for _ in range(repeat):
        began = time.process_time()
        run()
        least = min(least, time.process_time() - began)
    return least


# ---- peers


def peers(api: str, body: bytes) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    chunks = pieces(body)
    if api in ("openai-chat", "openai-responses") and importlib.util.find_spec("openai"):
        found["openai SDK"] = lambda: asyncio.run(_openai(api, chunks))
    if api == "anthropic-messages" and importlib.util.find_spec("anthropic"):
        found["anthropic SDK"] = lambda: asyncio.run(_anthropic(chunks))
    if api == "openai-chat" and importlib.util.find_spec("pydantic_ai") and importlib.util.find_spec("openai"):
        found["pydantic-ai"] = lambda: asyncio.run(_pydantic_ai(chunks))
    return found


def _http_client(kind: Any, chunks: list[bytes]) -> Any:
    """A client of httpx or httpx2 whose transport answers with the recorded bytes."""

    class Body(kind.AsyncByteStream):  # type: ignore[misc, name-defined]
        async def __aiter__(self) -> Any:
            for chunk in chunks:
                yield chunk

    async def answer(_: Any) -> Any:
        return kind.Response(200, headers={"content-type": "text/event-stream"}, stream=Body())

    return kind.AsyncClient(transport=kind.MockTransport(answer))


def _http_of(module: Any) -> Any:
    """The HTTP library that an SDK is built on: httpx or its continuation."""
    for name in ("httpx2", "httpx"):
        if importlib.util.find_spec(name):
            library = importlib.import_module(name)
            if issubclass(module, library.AsyncClient):
                return library
    raise RuntimeError(f"{module} is built on no HTTP library that is known here")


async def _openai(api: str, chunks: list[bytes]) -> None:
    import openai

    library = _http_of(openai.DefaultAsyncHttpxClient)
    client = openai.AsyncOpenAI(api_key="x", base_url="http://localhost", http_client=_http_client(library, chunks))
    if api == "openai-chat":
        stream: Any = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}], stream=True
        )
    else:
        stream = await client.responses.create(model="m", input="?", stream=True)
    async for _ in stream:
        pass


async def _anthropic(chunks: list[bytes]) -> None:
    import anthropic

    library = _http_of(anthropic.DefaultAsyncHttpxClient)
    client = anthropic.AsyncAnthropic(
        api_key="x", base_url="http://localhost", http_client=_http_client(library, chunks)
    )
    stream = await client.messages.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "?"}], stream=True
    )
    async for _ in stream:
        pass


async def _pydantic_ai(chunks: list[bytes]) -> None:
    import openai
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.messages import ModelRequest, UserPromptPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    library = _http_of(openai.DefaultAsyncHttpxClient)
    client = openai.AsyncOpenAI(api_key="x", base_url="http://localhost", http_client=_http_client(library, chunks))
    model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))
    async with model_request_stream(model, [ModelRequest(parts=[UserPromptPart("?")])]) as stream:
        async for _ in stream:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="runs of each; the fastest counts (default 7)")
    parser.add_argument("--json", action="store_true", help="one JSON object for each line")
    options = parser.parse_args()
    if not options.json:
        print(f"{'format':20} {'reader':14} {'us/event':>9} {'x bare':>7} {'events':>7}  recording")
    for api in APIS:
        if api not in DELTAS or not load_cases(api):
            continue
        body, events, name = enlarged(api)
        chunks = pieces(body)
        runs: dict[str, Callable[[], object]] = {
            "bare loop": lambda chunks=chunks: asyncio.run(run_bare(chunks)),
            "turnmill": lambda api=api, chunks=chunks: asyncio.run(run_ours(api, chunks)),
            **peers(api, body),
        }
        bare = 0.0
        for reader, run in runs.items():
            cost = best_of(run, options.repeat) / events * 1e6
            bare = bare or cost
            if options.json:
                told = {
                    "api": api,
                    "reader": reader,
                    "us_per_event": round(cost, 2),
                    "events": events,
                    "recording": name,
                }
                print(json.dumps(told))
            else:
                print(f"{api:20} {reader:14} {cost:9.2f} {cost / bare:7.1f} {events:7}  {name}", flush=True)


if __name__ == "__main__":
    main()
