"""`turnmill provider decode`: what it prints of recorded bodies, and how it refuses what it cannot do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from support.recordings import DATA
from turnmill.runtime.cli.application import run_command_line
from turnmill.workers.providers.decoding import split_body

QUIRKS, RECORDINGS = DATA / "quirks", DATA / "recordings"
TOOL_CALL = RECORDINGS / "deepseek-chat-deepseek-tool-call/response.sse"


@pytest.fixture
def decode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command; returns its lines. A code other than 0 comes with the line of the error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Any:
        code = run_command_line(["provider", "decode", *map(str, arguments)])
        printed = capsys.readouterr()
        return (code, printed.err) if code else [json.loads(line) for line in printed.out.splitlines()]

    return run


def test_one_object_a_line_in_the_order_of_the_files(decode: Any) -> None:
    broken = QUIRKS / "43-eof-before-finish/response.txt"
    first, second = decode("--api", "openai-chat", TOOL_CALL, broken)
    assert set(first) == {"file", "text", "reasoning", "tool_calls", "finish", "usage"}
    assert first["file"] == str(TOOL_CALL) and first["finish"] == "tool_calls"
    (call,) = first["tool_calls"]
    assert (call["name"], call["arguments"], call["valid"]) == ("weather", {"location": "San Francisco"}, True)
    assert first["usage"] == {"input_total": 339, "output_total": 83, "cached": 320, "reasoning": 39}
    assert second == {
        "file": str(broken),
        "text": "Let me ",
        "tool_calls": [{"id": "call_a", "name": "get_weather", "arguments": '{"city":', "valid": False}],
        "finish": "error",
        "error": {
            "kind": "stream_broken",
            "retryable": True,
            "midstream": True,
            "message": "the stream ended in the middle of the answer, without a finish reason",
        },
    }


@pytest.mark.parametrize("split", ["whole", "1", "random:7"])
def test_the_way_the_bytes_arrive_changes_nothing(decode: Any, split: str) -> None:
    assert decode("--api", "openai", "--split", split, TOOL_CALL) == decode("--api", "openai", TOOL_CALL)


def test_a_status_and_a_body_that_was_not_streamed(decode: Any) -> None:
    refused = QUIRKS / "80-http-429-rate-limit/response.txt"
    (told,) = decode("--api", "openai-chat", "--status", "429", "--content-type", "application/json", refused)
    assert set(told) == {"file", "tool_calls", "finish", "error"}
    assert (told["error"]["kind"], told["error"]["retryable"], told["error"]["midstream"]) == (
        "rate_limited",
        True,
        False,
    )
    (told,) = decode(
        "--api",
        "anthropic-messages",
        "--no-stream",
        RECORDINGS / "llamacpp-messages-self-messages-tool-json/response.json",
    )
    assert told["finish"] == "tool_calls"


def test_standard_input_is_a_file(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TOOL_CALL.read_bytes())))
    (told,) = decode("--api", "openai-chat", "-")
    assert (told["file"], told["finish"]) == ("-", "tool_calls")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--api", "nothing", TOOL_CALL], "known are anthropic-messages, "),
        (["--api", "openai-chat", "missing.txt"], "cannot read missing.txt: No such file"),
        (["--api", "openai-chat", "--split", "2", TOOL_CALL], "whole, 1 or random:SEED"),
        (["--api", "openai-chat", "--split", "random:", TOOL_CALL], "whole, 1 or random:SEED"),
        (["--api", "openai-chat"], "FILE"),
        ([TOOL_CALL], "--api"),
    ],
)
def test_what_cannot_be_done_is_refused(decode: Any, arguments: list[Any], reason: str) -> None:
    code, line = decode(*arguments)
    assert code == 2 and reason in line


def test_a_split_keeps_every_byte_and_its_seed() -> None:
    body = bytes(range(256)) * 9
    pieces = split_body(body, "random:3")
    assert b"".join(pieces) == body and len(pieces) > 20
    assert pieces == split_body(body, "random:3") != split_body(body, "random:4")
    assert split_body(b"", "1") == [] and split_body(b"ab", "1") == [b"a", b"b"]
