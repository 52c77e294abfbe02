"""What a model wrote, checked before anybody relies on it: the arguments of its calls, and an answer that is to be JSON.

Validators are made once for each plan. A model gets told what does not fit in a few short reasons, because it repairs
the first ones anyway and reads all of them.
"""

from __future__ import annotations

import msgspec

from turnmill.protocol.content import Message, ToolCall, ToolCallPart
from turnmill.protocol.json_answer import json_answer
from turnmill.protocol.schemas import reasons, validator_of
from turnmill.protocol.specs import Plan

from .sendable import arguments_fault


class OutputCheck:
    """The checks of one plan. Raises `ValueError` where one of its schemas is no JSON Schema."""

    def __init__(self, plan: Plan) -> None:
        self._tools = {name: validator_of(spec.schema, f"tool {name!r}") for name, spec in plan.tools.items()}
        output = plan.agent.output
        self._answer = validator_of(output.schema, "the agent's output") if output is not None else None

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
            return "; ".join(reasons(self._answer, json_answer(text))) or None
        except ValueError as error:  # no JSON, or nested deeper than it can be checked
            return str(error)

    def _checked(self, call: ToolCall) -> ToolCall:
        fault = arguments_fault(call.arguments) if call.error is None else None
        if fault is not None:
            return msgspec.structs.replace(call, arguments={}, error=fault)
        validator = self._tools.get(call.name)
        if validator is None or call.error is not None or validator.is_valid(call.arguments):
            return call
        return msgspec.structs.replace(call, error="; ".join(reasons(validator, call.arguments)))
