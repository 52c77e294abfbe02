"""The tour: what Turnmill does, one feature at a time, on the embedded runtime. Reads from top to bottom.

`connect(app=...)` without a URL starts a private Valkey, a coordinator and workers in this process. The model is
`scripted`: it plays what is written down, so that nothing here needs a key or a network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnmill.protocol.errors import DefinitionError
from turnmill.runtime import Agent, TurnFailedError, TurnOptions, connect, connect_sync
from turnmill.workers import ModelRequest, ToolContext, model, tool
from turnmill.workers.providers.scripted import Call, Reply, Script

# --- an application: tools, a model, an agent


@tool
async def weather(city: str, ctx: ToolContext) -> str:
    """Current weather in a city."""
    await ctx.progress(f"asking the station in {city}")
    return f"4 degrees, rain in {city}"


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


look_it_up = Script(
    "look-it-up",
    [
        Reply(
            text="Let me look. ",
            tool_calls=[Call("weather", {"city": "Oslo"}), Call("add", {"a": 1, "b": 2})],
        ),
        Reply(text="It is ${results[0]}, and 1 + 2 is ${results[1]}.", chunks=4),
    ],
    strict=True,
)
parrot = Script("parrot", [Reply(text="You said: ${input}")])

assistant = Agent("assistant", model="scripted:look-it-up", system="Be brief.", tools=[weather, add])


@pytest.fixture
def data_dir(short_directory: Path) -> Path:
    """Where the embedded server keeps its data: sessions outlive the process."""
    return short_directory


# --- the tour


async def test_run_an_agent(data_dir: Path) -> None:
    """A turn is one run of an agent on a session: the model speaks, tools run, the model answers."""
    async with connect(app=[look_it_up], data_dir=data_dir) as client:
        turn = await client.turn(assistant, "What is the weather in Oslo?")
        result = await turn.result()
    assert result.status == "finished"
    assert result.answer == "It is 4 degrees, rain in Oslo, and 1 + 2 is 3."
    assert [(call.name, call.result) for call in result.function_calls] == [
        ("weather", "4 degrees, rain in Oslo"),
        ("add", 3),
    ]
    assert [message.role for message in result.messages] == ["user", "assistant", "tool", "tool", "assistant"]


async def test_stream_its_text(data_dir: Path) -> None:
    """Text arrives as the model says it; joined together it is the turn's text."""
    async with connect(app=[look_it_up], data_dir=data_dir) as client:
        turn = await client.turn(assistant, "What is the weather in Oslo?")
        pieces = [piece async for piece in turn.text_stream()]
        assert len(pieces) > 1
        assert "".join(pieces) == (await turn.result()).text


async def test_watch_its_events(data_dir: Path) -> None:
    """Everything a turn does is an event with a number. Tools run side by side and tell their progress."""
    async with connect(app=[look_it_up], data_dir=data_dir) as client:
        turn = await client.turn(assistant, "What is the weather in Oslo?")
        numbered = [item async for item in turn.numbered_events()]
    assert [number for number, _ in numbered] == list(range(1, len(numbered) + 1))
    events = [event for _, event in numbered]
    types = [event.type for event in events]
    assert (types[0], types[-1]) == ("turn.started", "turn.finished")
    handed_out = [place for place, kind in enumerate(types) if kind == "tool_execution.started"]
    assert handed_out[1] < types.index("tool_execution.finished")  # both were out before either was back
    (progress,) = [event for event in events if event.type == "tool_execution.progress"]
    assert progress.message == "asking the station in Oslo"


async def test_two_clients_watch_one_turn(data_dir: Path) -> None:
    """A turn belongs to nobody: whoever knows its id may watch it, from its beginning or from any number on."""
    async with connect(app=[look_it_up], data_dir=data_dir) as client:
        turn = await client.turn(assistant, "What is the weather in Oslo?")
        url = client.engine.url
        async with connect(url) as other:
            first = [item async for item in turn.numbered_events()]
            again = [item async for item in other.attach(turn.id).numbered_events()]
            rest = [item async for item in other.attach(turn.id).numbered_events(after=5)]
            result = await other.attach(turn.id).result()
    assert again == first
    assert rest == first[5:]
    assert result.turn_id == turn.id


async def test_talk_in_a_session(data_dir: Path) -> None:
    """A session keeps the conversation, also when everything is stopped in between."""
    agent = Agent("parrot", model="scripted:parrot")
    async with connect(app=[parrot], data_dir=data_dir) as client:
        await (await client.turn(agent, "one", session="user-42")).result()
    async with connect(app=[parrot], data_dir=data_dir) as client:
        # Two at once: the second waits for the first.
        turns = [await client.turn(agent, text, session="user-42") for text in ("two", "three")]
        answers = [(await turn.result()).answer for turn in turns]
        transcript = [(message.role, message.text) for message in await client.transcript("user-42")]
    assert answers == ["You said: two", "You said: three"]
    assert transcript == [
        ("user", "one"),
        ("assistant", "You said: one"),
        ("user", "two"),
        ("assistant", "You said: two"),
        ("user", "three"),
        ("assistant", "You said: three"),
    ]


def test_do_it_without_async(data_dir: Path) -> None:
    """The same calls, blocking: for Django, Flask and scripts."""
    with connect_sync(app=[look_it_up], data_dir=data_dir) as client:
        turn = client.turn(assistant, "What is the weather in Oslo?")
        assert "".join(turn.text_stream()) == turn.result().text
        assert next(client.attach(turn.id).events()).type == "turn.started"


async def test_change_a_turn_by_its_options(data_dir: Path) -> None:
    """Options hold for one turn. They change what the agent says of itself, never the agent."""
    async with connect(app=[look_it_up, parrot], data_dir=data_dir) as client:
        turn = await client.turn(assistant, "Hello", options=TurnOptions(model="scripted:parrot", tools=[]))
        assert (await turn.result()).answer == "You said: Hello"
        turn = await client.turn(assistant, "Weather?", options=TurnOptions(max_steps=1, on_limit="final_answer"))
        assert len((await turn.result()).steps) == 2
    assert assistant.model == "scripted:look-it-up"


async def test_bring_your_own_model(data_dir: Path) -> None:
    """A model may be a function of yours: it is given the conversation, and says what it says."""

    @model("shouter")
    async def shouter(request: ModelRequest) -> AsyncIterator[str]:
        for word in request.messages[-1].text.split():
            yield word.upper() + "! "

    async with connect(app=[shouter], data_dir=data_dir) as client:
        turn = await client.turn(Agent("loud", model="host:shouter"), "hear me out")
        assert (await turn.result()).text == "HEAR! ME! OUT! "


async def test_what_goes_wrong(data_dir: Path) -> None:
    """A tool's error is told to the model. A turn that cannot go on raises, with what it had. A mistake is said at once."""

    @tool
    def divide(a: int, b: int) -> float:
        """Divides."""
        return a / b

    tries = Script("tries", [Reply(tool_calls=[Call("divide", {"a": 1, "b": 0})]), Reply(text="It failed: ${result}")])
    endless = Script("endless", [Reply(tool_calls=[Call("divide", {"a": 1, "b": 2})])])
    async with connect(app=[tries, endless], data_dir=data_dir) as client:
        turn = await client.turn(Agent("one", model="scripted:tries", tools=[divide]), "Go")
        assert (await turn.result()).answer == "It failed: Error: execution failed (division by zero)"

        turn = await client.turn(Agent("two", model="scripted:endless", tools=[divide], max_steps=3), "Go")
        with pytest.raises(TurnFailedError) as caught:
            await turn.result()
        assert caught.value.error_type == "max_steps_reached"
        assert [call.result for call in caught.value.result.function_calls] == [0.5, 0.5, 0.5]

        turn = await client.turn("nobody", "Go")
        with pytest.raises(TurnFailedError, match="no agent 'nobody' is published"):
            await asyncio.wait_for(turn.result(), 10)
    with pytest.raises(DefinitionError, match="write provider:model"):
        Agent("three", model="gpt")
