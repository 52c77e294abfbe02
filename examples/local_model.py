"""Agents for the small model of `scripts/local_model`, which needs neither a network nor a key.

turnmill run chat "What is the capital of France?" --app examples/local_model.py
turnmill dev examples/local_model.py

`local` is a table of turnmill.toml; with OPENAI_BASE_URL in its place add `--model openai:smollm2`.
"""

from __future__ import annotations

from turnmill.runtime import Agent
from turnmill.workers import tool

MODEL = "local:smollm2"


@tool
def weather(city: str) -> str:
    """Current weather in a city."""
    return f"{city}: 4 degrees, rain"


chat = Agent("chat", model=MODEL, system="You are a helpful assistant. Be brief.")

# So small a model calls a tool when it must, and would call it for ever: the answer behind the call is asked for without tools.
caller = Agent("caller", model=MODEL, tools=[weather], tool_choice="weather", max_steps=1, on_limit="final_answer")
