"""An agent with two tools. With a provider's key it talks to a real model, without one it plays a script.

turnmill run assistant "What do I pack for Oslo and Lisbon?" --app examples/weather.py
turnmill dev examples/weather.py
"""

from __future__ import annotations

import asyncio
import os

from turnmill.protocol.content import Usage
from turnmill.runtime import Agent
from turnmill.workers import ToolContext, tool
from turnmill.workers.providers.scripted import Call, Reply, Script

STATIONS = {"Oslo": (4, "rain"), "Lisbon": (19, "sunshine")}


@tool(idempotent=True)
async def weather(city: str, ctx: ToolContext) -> str:
    """Current weather in a city."""
    await ctx.progress(f"asking the station in {city}")
    await asyncio.sleep(0.4)  # a slow station
    degrees, sky = STATIONS.get(city, (12, "clouds"))
    return f"{degrees} degrees, {sky}"


@tool
def packing_list(days: int) -> str:
    """What one always packs, for a number of days."""
    return f"{days} shirts, a toothbrush"


# What the `scripted` provider says in place of a model.
demo = Script(
    "demo",
    [
        Reply(
            chunks=["Let me ", "look at ", "both cities ", "and at your list."],
            tool_calls=[
                Call("weather", {"city": "Oslo"}),
                Call("weather", {"city": "Lisbon"}),
                Call("packing_list", {"days": 3}),
            ],
            first_delay_seconds=0.2,
            delay_seconds=0.05,
            usage=Usage(input_tokens=113, output_tokens=48),
        ),
        Reply(
            text="Oslo has ${results[0]}, Lisbon has ${results[1]}. Take ${results[2]}, and a coat for Oslo only.",
            chunks=16,
            first_delay_seconds=0.2,
            delay_seconds=0.05,
            usage=Usage(input_tokens=198, output_tokens=31),
        ),
    ],
)

has_provider = bool(os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL"))
model = f"openai:{os.environ.get('TURNMILL_DEMO_MODEL') or 'gpt-5-mini'}" if has_provider else "scripted:demo"

assistant = Agent(
    "assistant",
    model=model,
    system="You help people pack. Look up the weather of every city they name, in one step. Be brief.",
    tools=[weather, packing_list],
)
