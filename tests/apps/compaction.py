"""The application of the compaction tests: models with small windows, a tool that reads a lot, and a summarizer.

The model `scripted:small` plays the replies that the user's message holds as JSON, or says how many messages it was shown.
Both models are strict and refuse what is longer than their windows, as real ones do; tokens are quarters of characters.
"""

from __future__ import annotations

import msgspec

from turnmill.protocol.content import Usage
from turnmill.runtime import Agent, Compaction, OutputSpec, RetryPolicy
from turnmill.workers import tool
from turnmill.workers.providers.base import ProviderRequest
from turnmill.workers.providers.scripted import Reply, Script, reply_number
from turnmill.workers.providers.scripted_checks import characters_of

WINDOW = 32_000
EDITOR_WINDOW = 25_000
EDITOR_USAGE = Usage(input_tokens=100, output_tokens=10, total_tokens=110)


@tool
def read(name: str, size: int) -> str:
    """Reads a file of so many characters."""
    return f"<{name}>".ljust(size - len(name) - 3, ".") + f"</{name}>"


def as_told(request: ProviderRequest) -> Reply:
    said = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
    tokens = characters_of(request) // 4
    usage = Usage(input_tokens=tokens, output_tokens=1, total_tokens=tokens + 1)
    if not said.startswith("["):
        return Reply(text=f"{len(request.messages)} messages", usage=usage)
    replies = msgspec.json.decode(said, type=list[Reply])
    reply = replies[min(reply_number(request.messages), len(replies) - 1)]
    return msgspec.structs.replace(reply, usage=usage)


def as_editor(request: ProviderRequest) -> Reply:
    if "no summary, please" in request.messages[0].text:
        return Reply(text="")
    return Reply(text=f"They talked; {len(request.messages[0].text)} characters.", usage=EDITOR_USAGE)


def as_asked(request: ProviderRequest) -> Reply:
    if "Do not say it." in request.messages[0].text:
        return Reply(text='{"country": "Norway"}')
    return Reply(text='{"city": "Oslo"}' if len(request.messages) > 1 else "It is Oslo.")


small = Script("small", as_told, strict=True, window=WINDOW)
editor = Script("editor", as_editor, strict=True, window=EDITOR_WINDOW)
clerk = Script("clerk", as_asked, strict=True)

QUICKLY = RetryPolicy(max_attempts=2, initial_delay_seconds=0.01, max_delay_seconds=0.05)
SUMMED = Compaction(summarizer="scripted:editor", keep_steps=1)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

trimming = Agent("trimming", "scripted:small", tools=[read], retry=QUICKLY)
keeping = Agent(
    "keeping", "scripted:small", tools=[read], retry=QUICKLY, compaction=Compaction(tool_output_bytes=10**6)
)
summing = Agent("summing", "scripted:small", tools=[read], retry=QUICKLY, compaction=SUMMED)
early = Agent(
    "early",
    "scripted:small",
    tools=[read],
    retry=QUICKLY,
    compaction=Compaction(trigger_tokens=4_000, tool_output_bytes=500, keep_steps=1),
)
formal = Agent("formal", "scripted:clerk", output=OutputSpec(schema=WEATHER))
