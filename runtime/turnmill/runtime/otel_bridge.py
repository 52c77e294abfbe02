"""Telemetry as OpenTelemetry spans: a turn, its steps, below them model calls, tool calls and hooks.

A turn outlives any process, so its span is written by whoever sees its end, with its start's time; so are those of
steps, tool calls and hooks. Their ids follow from names (`trace_context`), so each process knows its spans' parents.
What a worker runs is a span while it runs: what the function or the HTTP client traces comes below it.

Content is left out, unless OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT allows it on spans.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from typing import Any

import msgspec
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, Tracer, TraceState
from opentelemetry.util.types import AttributeValue

from turnmill.protocol.content import Usage
from turnmill.protocol.telemetry import TelemetryEvent
from turnmill.protocol.trace_context import (
    Caller,
    call_span_id,
    caller_of,
    step_span_id,
    trace_id_of,
    turn_span_id,
)

from . import otel_names as names

_NANOSECONDS = 1_000_000_000
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_NOT_SAMPLED = trace.TraceFlags(trace.TraceFlags.DEFAULT)
_chosen_ids: ContextVar[tuple[int, int] | None] = ContextVar("turnmill_chosen_ids", default=None)


class SpanBridge:
    """A telemetry callback that writes spans."""

    def __init__(self, tracer: Tracer, *, with_content: bool | None = None) -> None:
        """`with_content` decides in place of the environment."""
        self._tracer = tracer
        if with_content is None:
            with_content = os.environ.get(names.CONTENT_VARIABLE, "").upper() in names.CONTENT_ON_SPANS
        self._with_content = with_content
        self._running: dict[tuple[str, str, str, int], tuple[Span, Token[Context]]] = {}
        self._sampler = tracer.sampler if isinstance(tracer, SdkTracer) else None
        if isinstance(tracer, SdkTracer) and not isinstance(tracer.id_generator, _NamedIds):
            tracer.id_generator = _NamedIds(tracer.id_generator)

    def __call__(self, event: TelemetryEvent) -> None:
        match event.kind:
            case "model" | "tool_run" | "hook_run":
                self._run(event)
            case "turn":
                if event.is_end and event.details.get("outcome") != "suspended":
                    self._write(event, turn_span_id(event.turn_id), self._above_turn(event))
            case "step":
                if event.is_end and not event.details.get("suspended"):
                    parent = self._below(event, turn_span_id(event.turn_id))
                    self._write(event, step_span_id(event.turn_id, event.step), parent)
            case "tool" | "hook":
                if event.is_end:
                    span_id = call_span_id(event.turn_id, event.call, event.attempt)
                    self._write(event, span_id, self._below_step(event))

    # ---- spans

    def _write(self, event: TelemetryEvent, span_id: int, parent: Context) -> None:
        """A whole span, at its end."""
        token = _chosen_ids.set((trace_id_of(event.trace, event.turn_id), span_id))
        try:
            span = self._tracer.start_span(
                _span_name(event), parent, SpanKind.INTERNAL, start_time=_nanoseconds(event.started_at)
            )
        finally:
            _chosen_ids.reset(token)
        self._finish(span, event)

    def _run(self, event: TelemetryEvent) -> None:
        """A span that is the current one from its start to its end, which are told in one task."""
        key = event.kind, event.turn_id, event.call, event.attempt
        if event.is_start:
            parent = (
                self._below_step(event)
                if event.kind == "model"
                else self._below(event, call_span_id(event.turn_id, event.call, event.attempt))
            )
            kind = SpanKind.CLIENT if event.kind == "model" else SpanKind.INTERNAL
            span = self._tracer.start_span(_span_name(event), parent, kind, start_time=_nanoseconds(event.started_at))
            self._running[key] = span, contexts.attach(trace.set_span_in_context(span))
            return
        span_and_token = self._running.pop(key, None)
        if span_and_token is not None:
            span, attached = span_and_token
            contexts.detach(attached)
            span.update_name(_span_name(event))
            self._finish(span, event)

    def _finish(self, span: Span, event: TelemetryEvent) -> None:
        if span.is_recording():
            span.set_attributes(_attributes(event))
            if self._with_content:
                span.set_attributes(_content(event))
            if event.status == "error":
                may_describe = self._with_content or event.kind in ("turn", "step", "model")
                text = event.error.message if event.error is not None and may_describe else None
                span.set_status(StatusCode.ERROR, text)
        span.end(_nanoseconds(event.at))

    # ---- parents

    def _above_turn(self, event: TelemetryEvent) -> Context:
        caller = caller_of(event.trace)
        return Context() if caller is None else self._remote(event, caller)

    def _below_step(self, event: TelemetryEvent) -> Context:
        step = step_span_id(event.turn_id, event.step) if event.step else turn_span_id(event.turn_id)
        return self._below(event, step)

    def _below(self, event: TelemetryEvent, span_id: int) -> Context:
        caller, trace_id = caller_of(event.trace), trace_id_of(event.trace, event.turn_id)
        is_sampled = caller.is_sampled if caller is not None else self._samples(trace_id)
        return self._remote(event, Caller(trace_id, span_id, is_sampled))

    def _remote(self, event: TelemetryEvent, parent: Caller) -> Context:
        state = event.trace.get("tracestate")
        span_context = SpanContext(
            parent.trace_id,
            parent.span_id,
            is_remote=True,
            trace_flags=_SAMPLED if parent.is_sampled else _NOT_SAMPLED,
            trace_state=TraceState.from_header([state]) if state else None,
        )
        return trace.set_span_in_context(NonRecordingSpan(span_context), Context())

    def _samples(self, trace_id: int) -> bool:
        """Whether the turn's span, which may be written elsewhere, is sampled: its parts follow it."""
        if self._sampler is None:
            return True
        decision = self._sampler.should_sample(Context(), trace_id, "invoke_agent").decision
        return decision is Decision.RECORD_AND_SAMPLE


class _NamedIds(IdGenerator):
    """Ids that were chosen for the span that is being started, else those of the generator in its place before."""

    def __init__(self, otherwise: IdGenerator) -> None:
        self._otherwise = otherwise

    def generate_trace_id(self) -> int:
        chosen = _chosen_ids.get()
        return chosen[0] if chosen is not None else self._otherwise.generate_trace_id()

    def generate_span_id(self) -> int:
        chosen = _chosen_ids.get()
        return chosen[1] if chosen is not None else self._otherwise.generate_span_id()


# ---- what stands on a span


def split_model(subject: str) -> tuple[str, str]:
    """Provider and name of a model as its agent names it."""
    provider, colon, name = subject.partition(":")
    return (provider, name) if colon else ("", subject)


def _span_name(event: TelemetryEvent) -> str:
    match event.kind:
        case "turn":
            return f"invoke_agent {event.agent_id}".rstrip()
        case "step":
            return f"step {event.step}"
        case "model":
            return f"chat {split_model(event.subject)[1]}".rstrip()
        case "tool":
            return f"execute_tool {event.subject}"
        case "hook":
            return f"hook {event.details.get('point')} {event.subject}"
        case _:
            return f"run {event.subject}"


def _attributes(event: TelemetryEvent) -> dict[str, AttributeValue]:
    found: dict[str, Any] = {
        names.TURN: event.turn_id,
        names.CONVERSATION: event.session_id,
        names.SESSION: event.session_id,
        names.AGENT: event.agent_id or None,
        names.STEP: event.step or None,
        names.STATUS: event.status,
        names.ERROR_TYPE: event.error.kind if event.error is not None else None,
        **_own(event),
    }
    if event.usage is not None:
        found |= _usage(event.usage)
    if event.cost is not None and event.cost.total is not None:
        found |= {names.COST: float(event.cost.total), names.CURRENCY: event.cost.currency}
    return {name: value for name, value in found.items() if value is not None}


def _own(event: TelemetryEvent) -> dict[str, Any]:
    details = event.details
    match event.kind:
        case "turn":
            return {
                names.OPERATION: "invoke_agent",
                names.OUTCOME: details.get("outcome"),
                names.TERMINATION: details.get("termination"),
                names.STEPS: details.get("steps"),
                names.PARENT_TURN: details.get("parent_turn_id"),
            }
        case "model":
            provider, model = split_model(event.subject)
            reason = details.get("finish_reason")
            return {
                names.OPERATION: "chat",
                names.PROVIDER: provider or None,
                names.REQUEST_MODEL: model or None,
                names.RESPONSE_MODEL: details.get("response_model"),
                names.FINISH_REASONS: [reason] if reason else None,
                names.TIME_TO_FIRST_CHUNK: details.get("time_to_first_chunk_seconds"),
                names.ATTEMPT: event.attempt,
            }
        case "tool":
            return {
                names.OPERATION: "execute_tool",
                names.TOOL: event.subject,
                names.TOOL_TYPE: "function",
                names.TOOL_CALL: event.tool_call_id or None,
                names.ATTEMPT: event.attempt,
            }
        case "tool_run":
            return {names.TOOL: event.subject, names.TOOL_CALL: event.tool_call_id, names.ATTEMPT: event.attempt}
        case "hook" | "hook_run":
            return {names.HOOK: event.subject, names.HOOK_POINT: details.get("point"), names.ATTEMPT: event.attempt}
        case _:
            return {names.FINISH_REASONS: [details["finish_reason"]] if details.get("finish_reason") else None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        names.INPUT_TOKENS: usage.input_tokens,
        names.OUTPUT_TOKENS: usage.output_tokens,
        names.CACHE_READ_TOKENS: usage.cached_tokens or None,
        names.CACHE_WRITE_TOKENS: usage.cache_write_tokens or None,
        names.REASONING_TOKENS: usage.reasoning_tokens or None,
    }


def _content(event: TelemetryEvent) -> dict[str, AttributeValue]:
    found = {names.METADATA: event.metadata or None}
    if event.kind == "tool":
        found[names.TOOL_ARGUMENTS] = event.details.get("arguments")
        found[names.TOOL_RESULT] = event.details.get("result")
    return {
        name: msgspec.json.encode(value, enc_hook=str).decode() for name, value in found.items() if value is not None
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
