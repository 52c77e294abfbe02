"""The scripted provider's window, and what it says of usage and cost before the end."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from turnmill.protocol.content import (
    Cost,
    ErrorInfo,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.events import TextDelta
from turnmill.workers.providers.base import Completed, ProviderError, ProviderRequest
from turnmill.workers.providers.scripted import Reply, Script, ScriptedProvider, load_scripts
from turnmill.workers.providers.scripted_checks import characters_of

USAGE = Usage(input_tokens=10, output_tokens=5)
COST = Cost(total=Decimal("0.1"), source="provider")
CONVERSATION = [
    Message(role="user", content="1234"),
    Message(
        role="assistant",
        content=[ReasoningPart(text="hm"), TextPart("ok"), ToolCallPart(ToolCall(id="a", name="add"))],
    ),
    Message(role="tool", content=[ToolResultPart(ToolResult(tool_call_id="a", tool_name="add", result={"n": 1}))]),
]


async def play(script: Script, **fields: Any) -> list[Any]:
    request = ProviderRequest(model="test", messages=CONVERSATION, **fields)
    return [event async for event in ScriptedProvider([script]).stream(request)]


def test_characters_are_counted_in_all_that_a_model_reads() -> None:
    request = ProviderRequest(model="test", messages=CONVERSATION, system="sys")
    assert characters_of(request) == len('sys1234hmokadd{}{"n":1}')


async def test_a_request_beyond_the_window_is_refused_as_a_real_provider_does() -> None:  # AC-08
    script = Script("test", [Reply(text="hi")], window=20)
    assert isinstance((await play(script))[-1], Completed)
    with pytest.raises(ProviderError) as caught:
        await play(script, system="x")
    info = caught.value.info
    assert (info.kind, info.status, info.retryable) == (ErrorKind.CONTEXT_OVERFLOW, 400, False)
    assert "maximum context length is 20 characters" in info.message
    assert "21 characters" in info.message


def test_a_window_can_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "scripts.json"
    path.write_text('{"test": {"window": 5, "replies": [{"text": "hi", "usage_after_chunks": 0}]}}')
    (script,) = load_scripts(path)
    assert (script.window, script.strict) == (5, False)


async def test_usage_and_cost_can_come_in_mid_stream() -> None:
    reply = Reply(chunks=["a", "b"], usage=USAGE, cost=COST, usage_after_chunks=1)
    *events, completed = await play(Script("test", [reply]))
    assert events == [TextDelta(text="a", step_number=1), USAGE, COST, TextDelta(text="b", step_number=1)]
    assert (completed.usage, completed.cost) == (USAGE, COST)
    late = Reply(chunks=["a"], usage=USAGE, usage_after_chunks=9)
    assert (await play(Script("test", [late])))[1] == USAGE


async def test_a_failing_reply_tells_its_usage() -> None:  # AC-53
    error = ErrorInfo(kind=ErrorKind.OVERLOADED, message="busy", retryable=True)
    with pytest.raises(ProviderError) as caught:
        await play(Script("test", [Reply(usage=USAGE, error=error)]))
    assert caught.value.usage == USAGE
