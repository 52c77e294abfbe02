"""What a model wrote, checked: arguments of calls, and answers that are to be JSON."""

from __future__ import annotations

from typing import Any

import pytest

from turnmill.protocol.content import Message, TextPart, ToolCall, ToolCallPart
from turnmill.protocol.specs import AgentSpec, OutputSpec, Plan, ToolSpec
from turnmill.workers.output_check import OutputCheck

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def check(schema: dict[str, Any] | None = SCHEMA) -> OutputCheck:
    output = OutputSpec(schema=schema) if schema is not None else None
    agent = AgentSpec(name="agent", model="scripted:x", tools=["tool"], output=output)
    return OutputCheck(Plan(agent=agent, tools={"tool": ToolSpec(name="tool", schema=SCHEMA)}))


def error_of(text: str, schema: dict[str, Any] | None = SCHEMA) -> str | None:
    return check(schema).answer_error(Message(role="assistant", content=text))


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Oslo", "degrees": 4}',
        '```json\n{"city": "Oslo", "degrees": 4}\n```',
        '\n```\n{"city": "Oslo", "degrees": 4}```\n',
    ],
)
def test_json_that_fits_is_an_answer(text: str) -> None:  # LC-16
    assert error_of(text) is None
    assert check().answer_error(Message(role="assistant", content=[TextPart(text)])) is None


def test_what_does_not_fit_is_told_in_words() -> None:  # LC-16
    assert error_of('{"city": 4, "degrees": 4}') == 'city: 4 is not of type "string"'
    assert error_of('{"degrees": 4}') == '"city" is a required property'
    assert "not JSON" in (error_of("It is 4 degrees in Oslo.") or "")
    assert "not JSON" in (error_of('{"city": "Oslo"') or "")
    assert error_of(" \n") == "the answer is empty"


def test_at_most_five_reasons_are_given_and_none_repeats_the_answer() -> None:
    schema = {"type": "object", "properties": {str(number): {"type": "integer"} for number in range(9)}}
    answer = "{" + ", ".join(f'"{number}": "{"x" * 5000}"' for number in range(9)) + "}"
    error = error_of(answer, schema) or ""
    assert (error.count("is not of type"), len(error) < 2000) == (5, True)


def test_calls_and_free_answers_are_not_checked_as_output() -> None:
    assert error_of("anything", None) is None
    assert (
        check().answer_error(Message(role="assistant", content=[ToolCallPart(ToolCall(id="a", name="tool"))])) is None
    )


def test_arguments_of_calls_are_checked() -> None:
    calls = [
        ToolCall(id="a", name="tool", arguments={"city": "Oslo", "degrees": 4}),
        ToolCall(id="b", name="tool", arguments={"city": 1}),
        ToolCall(id="c", name="tool", arguments={"degrees": 2**64}),
        ToolCall(id="d", name="tool", error="no JSON"),
        ToolCall(id="e", name="other"),
    ]
    message = check().with_checked_calls(Message(role="assistant", content=[ToolCallPart(call) for call in calls]))
    good, wrong, large, *rest = message.tool_calls
    assert (good, rest) == (calls[0], calls[3:])
    assert "required property" in (wrong.error or "")
    assert large.error == "an integer of more than 64 bits"


def test_a_schema_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="the agent's output is no JSON Schema"):
        check({"type": "nonsense"})
