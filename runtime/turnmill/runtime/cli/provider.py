"""`turnmill provider decode`: what a worker makes of the bytes that a provider sent, without a connection or an engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from turnmill.protocol.errors import ConfigurationError

from .exits import CommandError, Exit

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Response bodies as they came; - is standard input.")
]
ApiName = Annotated[
    str,
    typer.Option("--api", envvar="TURNMILL_API", metavar="API", help="The wire format, such as openai-chat."),
]
NoStream = Annotated[
    bool, typer.Option("--no-stream", envvar="TURNMILL_NO_STREAM", help="The request did not ask for a stream.")
]
Status = Annotated[
    int,
    typer.Option("--status", envvar="TURNMILL_STATUS", min=100, max=599, metavar="N", help="The response's status."),
]
ContentType = Annotated[
    str | None,
    typer.Option("--content-type", envvar="TURNMILL_CONTENT_TYPE", metavar="T", help="The response's content type."),
]
Split = Annotated[
    str,
    typer.Option(
        "--split",
        envvar="TURNMILL_SPLIT",
        metavar="HOW",
        help="How the bytes arrive: whole, 1 (one at a time) or random:SEED.",
    ),
]


def decode(
    files: Files,
    api: ApiName,
    no_stream: NoStream = False,
    status: Status = 200,
    content_type: ContentType = None,
    split: Split = "whole",
) -> int:
    """Prints one JSON object a line, in the order of the files. An answer that is an error is a result, too."""
    import msgspec

    decoder = _Decoder(api, not no_stream, status, content_type, split)
    for file in files:
        told = decoder.decode(_read(file))
        sys.stdout.write(msgspec.json.encode({"file": str(file), **told}).decode() + "\n")
    return Exit.OK


class _Decoder:
    """The workers' decoding, with the options of the command."""

    def __init__(self, api: str, streaming: bool, status: int, content_type: str | None, split: str) -> None:
        try:
            from turnmill.workers.providers import decoding, registry
        except ImportError as error:
            raise ConfigurationError(f"providers need `pip install turnmill[llm]`: {error}") from error
        self._decoding = decoding
        full = registry.find_api(api)
        if full is None:
            raise CommandError(f"--api {api!r}: known are {', '.join(registry.api_names())}")
        try:
            decoding.split_body(b"", split)
        except ValueError as error:
            raise CommandError(f"--split {error}") from error
        self._api, self._streaming, self._status, self._split = full, streaming, status, split
        self._headers = {"content-type": content_type} if content_type else {}

    def decode(self, body: bytes) -> dict[str, Any]:
        return self._decoding.decode_body(
            self._api,
            self._decoding.split_body(body, self._split),
            status=self._status,
            headers=self._headers,
            streaming=self._streaming,
            now=time.time(),
        )


def _read(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from error
