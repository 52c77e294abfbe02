"""The workers' front door: define tools, hooks and models."""

from .child_process import ProcessResult
from .hooks import (
    AfterToolCallEvent,
    AfterToolCallResult,
    ApprovalEvent,
    BeforeToolCallEvent,
    BeforeToolCallResult,
    Hook,
    ReasoningHookEvent,
    StepControl,
    StepFinishEvent,
    StepResult,
    StepStartEvent,
    StopDecision,
    hook,
)
from .models import ModelRequest, model
from .tools import Tool, ToolContext, ToolExecutionContext, ToolOutput, ToolRetry, tool

__all__ = [
    "AfterToolCallEvent",
    "AfterToolCallResult",
    "ApprovalEvent",
    "BeforeToolCallEvent",
    "BeforeToolCallResult",
    "Hook",
    "ModelRequest",
    "ProcessResult",
    "ReasoningHookEvent",
    "StepControl",
    "StepFinishEvent",
    "StepResult",
    "StepStartEvent",
    "StopDecision",
    "Tool",
    "ToolContext",
    "ToolExecutionContext",
    "ToolOutput",
    "ToolRetry",
    "hook",
    "model",
    "tool",
]
