"""Telemetry as OpenTelemetry sees it: the tree of spans, across processes, and the metrics; with its exporters in memory."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from support.machine import SESSION, Session, call
from turnmill.protocol.content import Cost, ErrorInfo, ToolResult
from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.messages import AbortTurn, ModelReply, ResumeTurn, ToolReply
from turnmill.protocol.specs import AgentSpec, RetryPolicy, ToolSpec
from turnmill.protocol.trace_context import call_span_id, caller_of, child_trace, trace_id_of
from turnmill.runtime.otel_bridge import SpanBridge
from turnmill.runtime.otel_export import _exporters, start_otel
from turnmill.runtime.store import SessionCommit
from turnmill.runtime.telemetry import RuntimeTelemetry, current_trace
from turnmill.workers.telemetry import observed

TRACE = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": "vendor=1"}
TOOLS = [ToolSpec(name="plain"), ToolSpec(name="host", kind="host")]


class Collected(NamedTuple):
    """What two processes, with providers of their own, have exported to one place."""

    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    def spans(self) -> dict[str, ReadableSpan]:
        found = {span.name: span for span in self.exporter.get_finished_spans()}
        assert len(found) == len(self.exporter.get_finished_spans()), "two spans of one name"
        return found

    def metric(self, name: str) -> list[Any]:
        data: Any = self.reader.get_metrics_data()
        metrics = [metric for metric in data.resource_metrics[0].scope_metrics[0].metrics if metric.name == name]
        return list(metrics[0].data.data_points) if metrics else []


def collect(sampler: Sampler | None = None) -> tuple[Collected, Any]:
    collected = Collected(InMemorySpanExporter(), InMemoryMetricReader())
    provider = TracerProvider(sampler=sampler) if sampler else TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(collected.exporter))
    return collected, start_otel(provider, MeterProvider(metric_readers=[collected.reader]))


@pytest.fixture
def collected() -> Iterator[Collected]:
    found, stop = collect()
    yield found
    stop()


class Traced(Session):
    """A session whose commits and whose workers are told; each commit by another coordinator, with `takes_over`."""

    takes_over = False

    def send(self, message: Any) -> Any:
        before = self.state
        decision = super().send(message)
        if not hasattr(self, "coordinator") or self.takes_over:
            self.coordinator = RuntimeTelemetry()
        commit = SessionCommit(SESSION, 1, decision.state, [], decision.effects, None, None, before=before)
        self.coordinator.committed([commit], self.now_ms)
        return decision

    def speak(self, text: str = "", calls: Any = (), **fields: Any) -> None:
        """The model answers, in a worker."""
        with observed("model", self.model_task) as span:
            span.subject = "openai:gpt"
            reply: ModelReply = self.model_reply(text, calls, **fields)
            span.reply(reply)
        self.send(reply)

    def run(self, index: int, **fields: Any) -> None:
        """The tool runs, in a worker."""
        with observed("tool", self.tool_task(index)) as span:
            reply: ToolReply = self.tool_reply(index, **fields)
            span.reply(reply)
        self.send(reply)


@pytest.mark.parametrize("takes_over", [False, True])
@pytest.mark.parametrize("caller", [{}, TRACE], ids=["without a caller", "with a caller"])
def test_the_tree_of_spans(collected: Collected, caller: dict[str, str], takes_over: bool) -> None:
    session = Traced(tools=TOOLS)
    session.takes_over = takes_over
    session.start(trace=caller)
    session.pass_time(1)
    session.speak(calls=[call("plain", "id-1")])
    session.pass_time(2)
    session.run(0)
    session.answer("done")
    spans = collected.spans()
    assert set(spans) == {"invoke_agent agent", "step 1", "step 2", "chat gpt", "execute_tool plain", "run plain"}
    turn, step, tool = spans["invoke_agent agent"], spans["step 1"], spans["execute_tool plain"]
    assert {span.context.trace_id for span in spans.values()} == {trace_id_of(caller, "turn-1")}
    known = caller_of(caller)
    assert (turn.parent.span_id if turn.parent else None) == (known.span_id if known else None)
    assert _parent(step) == _parent(spans["step 2"]) == turn.context.span_id
    assert _parent(tool) == _parent(spans["chat gpt"]) == step.context.span_id
    assert _parent(spans["run plain"]) == tool.context.span_id
    assert turn.start_time == 1_000_000 * 10**6 and turn.end_time == 1_003_000 * 10**6
    assert spans["chat gpt"].kind is SpanKind.CLIENT
    if caller:
        assert turn.context.trace_state.get("vendor") == "1"


def test_attributes_follow_the_conventions(collected: Collected) -> None:
    session = Traced(tools=TOOLS)
    session.start(metadata={"secret": "s3cret"})
    session.speak("thinking", [call("plain", "id-1", secret="s3cret")], cost=Cost(total=Decimal("0.5")), model="gpt-1")
    session.run(0, value="s3cret")
    session.speak("s3cret")
    spans = {span.name: dict(span.attributes or {}) for span in collected.exporter.get_finished_spans()}
    turn, model, tool = spans["invoke_agent agent"], spans["chat gpt"], spans["execute_tool plain"]
    assert turn["gen_ai.operation.name"] == "invoke_agent" and turn["gen_ai.agent.name"] == "agent"
    assert turn["gen_ai.conversation.id"] == turn["session.id"] == SESSION
    assert (turn["turnmill.turn.id"], turn["turnmill.status"], turn["turnmill.outcome"]) == ("turn-1", "ok", "finished")
    assert (turn["gen_ai.usage.input_tokens"], turn["turnmill.cost"]) == (20, 0.5)
    assert (model["gen_ai.provider.name"], model["gen_ai.request.model"]) == ("openai", "gpt")
    assert model["gen_ai.usage.output_tokens"] == 5
    assert (tool["gen_ai.tool.name"], tool["gen_ai.tool.call.id"]) == ("plain", "id-1")
    assert "s3cret" not in str(spans), "content stays out of spans"


def test_content_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    collected, stop = collect()
    session = Traced(tools=TOOLS)
    session.start()
    session.answer(calls=[call("plain", city="Oslo")])
    session.finish_call(0, "rain")
    stop()
    attributes = collected.spans()["execute_tool plain"].attributes or {}
    assert attributes["gen_ai.tool.call.arguments"] == '{"city":"Oslo"}'
    assert attributes["gen_ai.tool.call.result"] == '"rain"'


def test_a_turn_that_was_suspended_is_one_span(collected: Collected) -> None:
    session = Traced(tools=TOOLS)
    session.start()
    session.answer(calls=[call("host", "b")])
    assert not collected.spans(), "its span is written at its end"
    session.pass_time(100)
    results = [ToolResult(tool_call_id="b", tool_name="host", result=1)]
    session.send(ResumeTurn(session_id=SESSION, turn_id="turn-1", request_id="r", tool_results=results))
    session.answer("done")
    spans = collected.spans()
    assert set(spans) == {"invoke_agent agent", "step 1", "step 2", "execute_tool host"}
    assert spans["step 1"].start_time == spans["invoke_agent agent"].start_time == 1_000_000 * 10**6
    counted = {point.attributes["turnmill.outcome"]: point.value for point in collected.metric("turnmill.turns")}
    assert counted == {"suspended": 1, "finished": 1}


def test_errors_and_stops(collected: Collected) -> None:
    session = Traced(AgentSpec(name="agent", model="scripted:x", retry=RetryPolicy(max_attempts=1)), TOOLS)
    session.start()
    with observed("model", session.model_task) as span:
        error = ErrorInfo(kind="overloaded", message="too many requests")
        reply = session.model_task.answer(ModelReply, error=error)
        span.reply(reply)
    session.send(reply)
    spans = collected.spans()
    for name in ("chat", "step 1", "invoke_agent agent"):
        assert spans[name].status.status_code is StatusCode.ERROR
        assert (spans[name].attributes or {})["error.type"] == "overloaded"
        assert spans[name].status.description == "too many requests"
    collected.exporter.clear()
    session.start()
    session.send(AbortTurn(session_id=SESSION, turn_id="turn-2", reason="enough"))
    session.fire_timer()
    turn = collected.spans()["invoke_agent agent"]
    assert turn.status.status_code is StatusCode.UNSET and (turn.attributes or {})["turnmill.status"] == "halted"


def test_metrics(collected: Collected) -> None:
    session = Traced(tools=TOOLS)
    session.start()
    session.pass_time(3)
    session.speak(calls=[call("plain")], cost=Cost(total=Decimal("0.5")))
    session.pass_time(2)
    session.run(0)
    session.speak("done", cost=Cost(total=Decimal("0.25")))
    (turns,) = collected.metric("turnmill.turns")
    assert turns.value == 1 and turns.attributes["turnmill.outcome"] == "finished"
    (cost,) = collected.metric("turnmill.model.cost")
    assert cost.value == 0.75 and cost.attributes["turnmill.currency"] == "USD"
    tokens = {
        point.attributes["gen_ai.token.type"]: point.sum for point in collected.metric("gen_ai.client.token.usage")
    }
    assert tokens == {"input": 20, "output": 10}
    assert collected.metric("gen_ai.invoke_agent.duration")[0].sum == 5.0
    assert collected.metric("gen_ai.execute_tool.duration")[0].sum == 2.0
    (steps,) = collected.metric("turnmill.step.duration")
    assert (steps.count, steps.sum) == (2, 5.0)
    assert not any("turn-1" in str(point.attributes) for point in [turns, cost, steps])


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_all_processes_sample_a_turn_alike(ratio: float) -> None:
    collected, stop = collect(ParentBased(TraceIdRatioBased(ratio)))
    session = Traced(tools=TOOLS)
    session.start()
    session.speak(calls=[call("plain")])
    session.run(0)
    session.answer("done")
    stop()
    assert len(collected.spans()) == (6 if ratio else 0)


def test_what_a_tool_does_is_below_its_run() -> None:
    collected, stop = collect()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(collected.exporter))
    session = Traced(tools=TOOLS)
    session.start()
    session.answer(calls=[call("plain")])
    task = session.tool_task(0)
    with observed("tool", task), provider.get_tracer("users").start_as_current_span("inside"):
        pass
    stop()
    assert trace.get_current_span().get_span_context().is_valid is False
    spans = collected.spans()
    assert _parent(spans["inside"]) == spans["run plain"].context.span_id


def test_the_caller_s_span_travels_with_the_turn() -> None:
    tracer = TracerProvider().get_tracer("callers")
    assert current_trace() == {}
    with tracer.start_as_current_span("request") as span:
        carried = caller_of(current_trace())
    context = span.get_span_context()
    assert carried == (context.trace_id, context.span_id, True)


def test_sub_turns_are_in_the_trace_of_their_turn() -> None:
    for caller in ({}, TRACE):
        below = caller_of(child_trace(caller, "turn-1", "2.0", 1))
        assert below == (trace_id_of(caller, "turn-1"), call_span_id("turn-1", "2.0", 1), True)
    assert child_trace(TRACE, "turn-1", "2.0", 1)["tracestate"] == "vendor=1"


@pytest.mark.parametrize("given", ["", "00-00-00-00", "00-" + "0" * 32 + "-" + "cd" * 8 + "-01", "ff" + "x" * 60])
def test_a_trace_that_cannot_be_read_is_none(given: str) -> None:
    assert caller_of({"traceparent": given}) is None
    assert trace_id_of({"traceparent": given}, "turn-1") == trace_id_of({}, "turn-1")


def test_ids_of_the_users_own_spans_stay_theirs() -> None:
    provider = TracerProvider()
    SpanBridge(provider.get_tracer("turnmill"))
    SpanBridge(provider.get_tracer("turnmill"))
    spans = [provider.get_tracer("turnmill").start_span("x").get_span_context() for _ in range(2)]
    assert spans[0].span_id != spans[1].span_id and spans[0].trace_id != spans[1].trace_id


def test_exporters_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert _exporters("OTEL_TRACES_EXPORTER", "opentelemetry_traces_exporter") == []
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert len(_exporters("OTEL_TRACES_EXPORTER", "opentelemetry_traces_exporter")) == 1
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(ConfigurationError, match="pigeon"):
        _exporters("OTEL_TRACES_EXPORTER", "opentelemetry_traces_exporter")


def _parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None
