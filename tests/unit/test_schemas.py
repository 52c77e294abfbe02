"""Schemas that strangers wrote: nothing is fetched for them, wherever they come from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from turnmill.protocol.content import Message
from turnmill.protocol.errors import DefinitionError
from turnmill.protocol.schemas import arguments_error, foreign_reference, validator_of
from turnmill.protocol.specs import AgentSpec, OutputSpec, Plan, ToolSpec
from turnmill.runtime import Agent, HostTool, TurnOptions
from turnmill.workers import tool
from turnmill.workers.output_check import OutputCheck

REMOTE = "http://127.0.0.1:1/schema.json"
FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"$ref": REMOTE}, REMOTE),
    ({"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}, "file:///etc/passwd"),
    ({"$defs": {"a": {"items": [{"$dynamicRef": REMOTE}]}}}, REMOTE),
    ({"$id": "http://127.0.0.1:1/", "$ref": "other.json"}, "other.json"),
    ({"$schema": REMOTE, "type": "object"}, REMOTE),
    ({"properties": {"default": {"$ref": REMOTE}}}, REMOTE),
]
LOCAL: list[dict[str, Any]] = [
    {"$defs": {"a": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"},
    {"properties": {"$ref": {"type": "string"}}},
    {"default": {"$ref": REMOTE}},
]


@pytest.fixture
def fetched() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the paths that it was asked for."""
    paths: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("schema", "reference"), FOREIGN)
def test_a_reference_to_something_else_is_refused_where_it_is_written(schema: dict[str, Any], reference: str) -> None:
    assert foreign_reference(schema) == reference
    for define in (
        lambda: HostTool("ask", "Ask.", schema),
        lambda: Agent("a", model="scripted:x", output=schema),
        lambda: Agent("a", model="scripted:x", output=OutputSpec(schema=schema)),
        lambda: TurnOptions(output=schema),
    ):
        with pytest.raises(DefinitionError) as refused:
            define()
        assert reference in str(refused.value)


@pytest.mark.parametrize("schema", LOCAL)
def test_references_inside_a_schema_are_fine(schema: dict[str, Any]) -> None:
    assert foreign_reference(schema) is None
    HostTool("ask", "Ask.", schema)
    validator_of(schema, "it")


def test_a_type_may_not_bring_such_a_reference_either() -> None:
    class Odd(BaseModel):
        x: Annotated[str, Field(json_schema_extra={"$ref": REMOTE})]

    def take(x: Annotated[str, Field(json_schema_extra={"$ref": REMOTE})]) -> str:
        """Take."""
        return x

    for define in (lambda: Agent("a", model="scripted:x", output=Odd), lambda: tool(take)):
        with pytest.raises(DefinitionError, match="not inside of it"):
            define()


@pytest.mark.parametrize("form", ["$ref", "$schema", "$id"])
def test_nothing_is_fetched_for_a_schema_that_somebody_registered(form: str, fetched: tuple[str, list[str]]) -> None:
    url, paths = fetched
    schema = {"$id": f"{url}/a", "$ref": "other"} if form == "$id" else {form: f"{url}/x"}
    agent = AgentSpec(name="a", model="scripted:x")
    with pytest.raises(ValueError, match=r"schema of tool 'foreign' is no JSON Schema.*"):
        OutputCheck(Plan(agent=agent, tools={"foreign": ToolSpec(name="foreign", schema=schema)}))
    answering = AgentSpec(name="a", model="scripted:x", output=OutputSpec(schema=schema))
    with pytest.raises(ValueError, match="schema of the agent's output"):
        OutputCheck(Plan(agent=answering, tools={}))
    with pytest.raises(ValueError, match="no JSON Schema"):
        arguments_error(schema, {}, "it")
    assert paths == []


def test_an_answer_that_is_nested_too_deep_is_told_so() -> None:
    agent = AgentSpec(name="a", model="scripted:x", output=OutputSpec(schema={"type": "array", "items": {"$ref": "#"}}))
    check = OutputCheck(Plan(agent=agent, tools={}))
    assert "not JSON" in (check.answer_error(Message(role="assistant", content="[" * 100_000 + "]" * 100_000)) or "")
    assert check.answer_error(Message(role="assistant", content="[" * 400 + "1" + "]" * 400))
