"""What the benchmarks run: every turn adds two numbers of its own, so every answer can be checked."""

import os

from turnmill.runtime import Agent
from turnmill.workers import tool
from turnmill.workers.providers.scripted import Call, Reply, Script

DELTAS = int(os.environ.get("BENCH_DELTAS", "0"))


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def ask(request):
    a, b = request.messages[-1].text.split()
    return Reply(tool_calls=[Call("add", {"a": int(a), "b": int(b)})], fragments=1 if DELTAS else 0)


def answer(request):
    text = str(request.messages[-1].tool_results[0].result)
    if not DELTAS:
        return Reply(text=text)
    words = [f"word{number} " for number in range(DELTAS - 1)]
    return Reply(chunks=[*words, text])


bench_script = Script("bench", [ask, answer])
agent = Agent("bench", model="scripted:bench", tools=[add])
