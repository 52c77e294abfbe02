"""What a model wrote, checked before anybody relies on it: the arguments of its calls, and an answer that is to be JSON.

Validators are made once for each plan. A model gets told what does not fit in a few short reasons, because it repairs
the first ones anyway and reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import jsonschema_rs
import msgspec

from turnmill.protocol.content import Message, ToolCall, ToolCallPart
from turnmill.protocol.json_answer import json_answer
from turnmill.protocol.specs import Plan

REASONS_MAX = 5
_REASON_LENGTH_MAX = 300


class OutputCheck:
    """The checks of one plan. Raises `ValueError` where one of its schemas is no JSON Schema."""

    def __init__(self, plan: Plan) -> None:
        self._tools = {name: _validator(spec.schema, f"tool {name!r}") for name, spec in plan.tools.items()}
        output = plan.agent.output
        self._answer = _validator(output.schema, "the agent's output") if output is not None else None

    def with_checked_calls(self, message: Message) -> Message:
        """The message with every call's arguments checked; what is wrong stands in the call's `error`."""
        if isinstance(message.content, str):
            return message
        parts = [
            ToolCallPart(self._checked(part.tool_call)) if isinstance(part, ToolCallPart) else part
            for part in message.content
        ]
        return msgspec.structs.replace(message, content=parts)

    def answer_error(self, message: Message) -> str | None:
        """Why a final answer is not the JSON that its agent is to give; None where it is, or may be anything."""
        if self._answer is None or message.tool_calls:
            return None
        text = message.text
        if not text.strip():
            return "the answer is empty"
        try:
            value = json_answer(text)
        except ValueError as error:
            return str(error)
        return "; ".join(_reasons(self._answer, value)) or None

    def _checked(self, call: ToolCall) -> ToolCall:
        if call.error is None and not _is_portable(call.arguments):
            return msgspec.structs.replace(call, arguments={}, error="an integer of more than 64 bits")
        validator = self._tools.get(call.name)
        if validator is None or call.error is not None or validator.is_valid(call.arguments):
            return call
        return msgspec.structs.replace(call, error="; ".join(_reasons(validator, call.arguments)))


def _validator(schema: dict[str, Any], of: str) -> jsonschema_rs.Validator:
    try:
        return jsonschema_rs.validator_for(schema)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise ValueError(f"the schema of {of} is no JSON Schema: {reason}") from error


def _reasons(validator: jsonschema_rs.Validator, value: Any) -> Iterator[str]:
    """What does not fit, with the place where; at most `REASONS_MAX`."""
    for error in islice(validator.iter_errors(value), REASONS_MAX):
        path = ".".join(str(part) for part in error.instance_path)
        # The message quotes the value, which may be all of the answer.
        reason = error.message
        if len(reason) > _REASON_LENGTH_MAX:
            reason = f"{reason[: _REASON_LENGTH_MAX // 2]} ... {reason[-_REASON_LENGTH_MAX // 2 :]}"
        yield f"{path}: {reason}" if path else reason


def _is_portable(value: Any) -> bool:
    """Whether every integer fits 64 bits: no other language, and no state record, could carry it."""
    if isinstance(value, dict):
        return all(_is_portable(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_portable(item) for item in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63
