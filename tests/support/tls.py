"""TLS in front of the engine: the embedded server has none, so a port of Python's own ssl leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

CERTIFICATES = Path(__file__).resolve().parents[1] / "data/tls"
CA, OTHER_CA = CERTIFICATES / "ca.pem", CERTIFICATES / "other-ca.pem"


class Terminator:
    """A port that speaks TLS. `connections` counts the handshakes that succeeded."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.connections = 0

    def url(self, ca: Path = CA, credentials: str = "", host: str = "localhost") -> str:
        return f"rediss://{credentials}{host}:{self.port}/0?ssl_ca_certs={ca}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        engine_reader, engine_writer = await asyncio.open_unix_connection(self._socket_path)
        ways = [asyncio.create_task(_copy(reader, engine_writer)), asyncio.create_task(_copy(engine_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, engine_writer):
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def tls_in_front(redis_url: str) -> AsyncIterator[Terminator]:
    """A TLS port in front of a server that listens on a Unix socket."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    terminator = Terminator(urlsplit(redis_url).path)
    server = await asyncio.start_server(terminator.handle, "127.0.0.1", 0, ssl=context)
    terminator.port = server.sockets[0].getsockname()[1]
    try:
        yield terminator
    finally:
        server.close()
