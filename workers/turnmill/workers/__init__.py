"""The workers' front door: define tools and models."""

from .models import ModelRequest, model
from .tools import Tool, ToolContext, ToolExecutionContext, ToolOutput, ToolRetry, tool

__all__ = ["ModelRequest", "Tool", "ToolContext", "ToolExecutionContext", "ToolOutput", "ToolRetry", "model", "tool"]
