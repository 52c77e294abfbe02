"""Every recorded answer and every oddity through the decoding of its format: whole, byte by byte, and cut at random.

LC-08, LC-09, LC-10, LC-15, AC-40, AC-50, AC-51: text, reasoning, calls, finish and usage are what the provider's official
SDK makes of the same bytes (or, for oddities, what we decided), and errors say whether another attempt may help.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from support.recordings import Case, load_cases
from turnmill.protocol.errors import ErrorKind
from turnmill.workers.providers import registry
from turnmill.workers.providers.decoding import decode_body, split_body

ALL_APIS = ("openai-chat", "openai-responses", "anthropic-messages", "gemini", "bedrock-converse", "ollama-chat")
COUNTS = {"openai-chat": 124, "openai-responses": 37, "anthropic-messages": 31, "gemini": 23}
BYTEWISE_MAX = 4000
"""Bodies up to this length come one byte at a time, larger ones in random pieces only."""
USAGE_BEFORE_ERROR = {"openrouter-chat-openrouter-stream-error"}
"""The SDK gave up before it read the usage that stands on the same chunk as the error."""
KIND_BY_STATUS = {
    400: {ErrorKind.BAD_REQUEST, ErrorKind.CONTEXT_OVERFLOW},
    401: {ErrorKind.AUTHENTICATION},
    403: {ErrorKind.AUTHENTICATION, ErrorKind.CONTENT_FILTER},
    404: {ErrorKind.BAD_REQUEST},
    429: {ErrorKind.RATE_LIMITED},
    500: {ErrorKind.PROVIDER_ERROR},
    502: {ErrorKind.PROVIDER_ERROR},
    529: {ErrorKind.OVERLOADED},
}


def cases() -> list[Any]:
    found = []
    for api in ALL_APIS:
        marks = [] if api in registry.APIS else [pytest.mark.skip(reason=f"no format of {api} is registered yet")]
        found += [pytest.param(case, id=case.name, marks=marks) for case in load_cases(api)]
    return found


def decode(case: Case, how: str) -> dict[str, Any]:
    return decode_body(
        case.meta["api"],
        split_body(case.body, how),
        status=case.meta["http_status"],
        headers=case.headers,
        streaming=case.meta.get("request_streaming", True),
    )


def test_there_are_recordings_of_every_api() -> None:
    assert {api: len(load_cases(api)) for api in COUNTS} == COUNTS
    assert all(load_cases(api) for api in ALL_APIS)


@pytest.mark.parametrize("case", cases())
def test_an_answer_is_decoded_to_what_it_says_in_whatever_pieces_it_comes(case: Case) -> None:
    whole = decode(case, "whole")
    check(case, whole)
    seed = zlib.crc32(case.name.encode())
    ways = [f"random:{seed}", f"random:{seed + 1}"] + (["1"] if len(case.body) <= BYTEWISE_MAX else [])
    for how in ways:
        assert decode(case, how) == whole, how
    recorded = decode_body(case.meta["api"], case.chunks, status=case.meta["http_status"], headers=case.headers)
    if case.meta.get("request_streaming", True):
        assert recorded == whole


def check(case: Case, told: dict[str, Any]) -> None:
    expected = case.expected
    assert told.get("text", "") == (expected.get("text") or "") + (expected.get("refusal") or "")
    assert told.get("reasoning", "") == (expected.get("reasoning") or "")
    assert told["finish"] == expected["finish"]
    check_calls(told["tool_calls"], expected["tool_calls"])
    check_usage(case, told.get("usage"))
    assert ("error" in told) == (told["finish"] == "error")
    if "error" in told:
        check_error(case, told["error"])


def check_calls(calls: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [call["name"] for call in calls] == [call["name"] for call in expected]
    for call, wanted in zip(calls, expected, strict=True):
        assert call["id"] == wanted["id"] or (not wanted["id"] and call["id"])
        assert call["valid"] is wanted.get("valid", True)
        arguments = wanted["arguments"]
        if call["valid"]:
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        assert call["arguments"] == ({} if arguments is None else arguments)
    assert len({call["id"] for call in calls}) == len(calls)


def check_usage(case: Case, usage: dict[str, int] | None) -> None:
    expected = case.expected.get("usage")
    if expected is None:
        assert usage is None or case.name in USAGE_BEFORE_ERROR
        return
    assert usage == {
        "input_total": expected.get("input_total", expected["input"]) or 0,
        "output_total": expected.get("output_total", expected["output"]) or 0,
        "cached": expected.get("cached") or 0,
        "reasoning": expected.get("reasoning") or 0,
    }


def check_error(case: Case, error: dict[str, Any]) -> None:
    expected, status = case.expected["error"], case.meta["http_status"]
    if status != 200:
        assert error["kind"] in KIND_BY_STATUS[status]
        assert not error["midstream"]
        assert error["retryable"] is (status == 429 or status >= 500)
    if "retryable" in expected:
        assert error["retryable"] is expected["retryable"]
    if "midstream" in expected:
        assert error["midstream"] is expected["midstream"]
    if expected.get("code") == "stream_truncated":
        assert error["kind"] == ErrorKind.STREAM_BROKEN
    said = expected.get("body_message") or (expected.get("message") if status == 200 else None) or ""
    assert " ".join(said.split())[:300] in error["message"]
    assert 0 < len(error["message"]) < 600
