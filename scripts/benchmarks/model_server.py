"""An OpenAI-compatible server that streams at a pace, for measurements: `model_server.py [PORT]`, prints its port.

The model's name says what it does: `paced-<deltas>-<per second>`. The first delta is the time at which it was written, on
the system's monotonic clock, so that a reader in another process can tell how old it is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(content: dict, finish: str | None = None, usage: dict | None = None) -> bytes:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "paced"}
    chunk["choices"] = [{"index": 0, "delta": content, "finish_reason": finish}]
    if usage:
        chunk["usage"] = usage
    body = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            request = json.loads(await reader.readexactly(length))
            _, count, rate = request["model"].split("-")
            await stream(writer, int(count), float(rate))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client closed the connection
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter, count: int, rate: float) -> None:
    loop = asyncio.get_running_loop()
    writer.write(HEAD + event({"role": "assistant", "content": ""}))
    begun = loop.time()
    for number in range(count):
        await asyncio.sleep(max(0.0, begun + number / rate - loop.time()))
        writer.write(event({"content": f"{time.monotonic():.6f} " if number == 0 else f"word{number} "}))
        await writer.drain()
    done = b"data: [DONE]\n\n"
    usage = {"prompt_tokens": 10, "completion_tokens": count, "total_tokens": 10 + count}
    writer.write(event({}, "stop", usage) + f"{len(done):x}\r\n".encode() + done + b"\r\n0\r\n\r\n")
    await writer.drain()


async def main(port: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=2000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
