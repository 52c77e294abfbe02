"""An application for a real small model: it can talk, it calls a tool when it must, and it can go on for long."""

from __future__ import annotations

from turnmill.runtime import Agent
from turnmill.workers import tool

MODEL = "local:smollm2"
STEADY = {"local": {"temperature": 0, "seed": 1, "max_tokens": 60}}
ENDLESS = {"local": {"temperature": 0, "seed": 1, "min_tokens": 4000, "max_tokens": 4000}}


@tool
def weather(city: str) -> str:
    """Current weather in a city."""
    return f"{city}: 4 degrees, rain"


talker = Agent("talker", model=MODEL, system="You are a helpful assistant. Be brief.", provider_options=STEADY)
caller = Agent(
    "caller",
    model=MODEL,
    system="You are a helpful assistant.",
    tools=[weather],
    tool_choice="weather",
    max_steps=1,
    on_limit="final_answer",  # a model that must call a tool would never stop
    provider_options=STEADY,
)
rambler = Agent("rambler", model=MODEL, provider_options=ENDLESS)
