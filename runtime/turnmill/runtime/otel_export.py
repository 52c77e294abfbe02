"""OpenTelemetry for the processes of a deployment: metrics, and where spans and metrics go.

Providers that the process has set already are used (`opentelemetry-instrument`, or the application's own). Otherwise
they are made, and the standard `OTEL_*` variables say where to: OTLP over HTTP, unless OTEL_TRACES_EXPORTER and
OTEL_METRICS_EXPORTER name other exporters that are installed (`console`, `none`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points, version
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import Meter, MeterProvider, NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import TracerProvider

from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.telemetry import TELEMETRY, TelemetryEvent

from . import otel_names as names
from .otel_bridge import SpanBridge, split_model

_SCOPE = "turnmill"


def start_otel(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> Callable[[], None]:
    """Send this process's telemetry to OpenTelemetry. Returns what ends that, and sends what is left.

    Without providers: those of the process, which are made where there are none.
    """
    made: list[SdkTracerProvider | SdkMeterProvider] = []
    tracers = tracer_provider or _tracers(made)
    meters = meter_provider or _meters(made)
    number = version("turnmill")
    unsubscribe_spans = TELEMETRY.subscribe(SpanBridge(tracers.get_tracer(_SCOPE, number)))
    unsubscribe_metrics = TELEMETRY.subscribe(MetricBridge(meters.get_meter(_SCOPE, number)))

    def stop() -> None:
        unsubscribe_spans()
        unsubscribe_metrics()
        for provider in made:
            provider.shutdown()

    return stop


class MetricBridge:
    """A telemetry callback that counts. No metric carries an id.

    Tokens and costs are told where they arise, with each model call, also one that failed.
    """

    def __init__(self, meter: Meter) -> None:
        self._turns = meter.create_counter("turnmill.turns", "{turn}", "turns that came to an end, or to rest")
        self._cost = meter.create_counter("turnmill.model.cost", "{currency}", "costs of model calls, where known")
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "tokens of one model call",
            explicit_bucket_boundaries_advisory=names.TOKENS_BUCKETS,
        )
        self._first_chunk = _seconds(meter, "gen_ai.client.operation.time_to_first_chunk", "until the first chunk")
        self._durations = {
            "turn": _seconds(meter, "gen_ai.invoke_agent.duration", "turns, without suspensions", is_long=True),
            "step": _seconds(meter, "turnmill.step.duration", "steps, without suspensions", is_long=True),
            "model": _seconds(meter, "gen_ai.client.operation.duration", "model calls"),
            "tool": _seconds(
                meter, "gen_ai.execute_tool.duration", "tool calls, from dispatch to result", is_long=True
            ),
            "tool_run": _seconds(meter, "turnmill.tool_run.duration", "runs of tools in their workers", is_long=True),
            "hook": _seconds(meter, "turnmill.hook.duration", "hooks, from dispatch to answer"),
        }

    def __call__(self, event: TelemetryEvent) -> None:
        if not event.is_end:
            return
        labels = _labels(event)
        if event.kind == "turn":
            self._turns.add(1, labels)
        durations = self._durations.get(event.kind)
        is_whole = event.kind == "turn" or not event.details.get("start_unknown")
        if durations is not None and event.duration_seconds is not None and is_whole:
            durations.record(event.duration_seconds, labels)
        if event.kind == "model":
            self._model(event, labels)

    def _model(self, event: TelemetryEvent, labels: dict[str, str]) -> None:
        if event.usage is not None:
            self._tokens.record(event.usage.input_tokens, {**labels, names.TOKEN_TYPE: "input"})
            self._tokens.record(event.usage.output_tokens, {**labels, names.TOKEN_TYPE: "output"})
        if event.cost is not None and event.cost.total is not None:
            self._cost.add(float(event.cost.total), {**labels, names.CURRENCY: event.cost.currency})
        seconds = event.details.get("time_to_first_chunk_seconds")
        if seconds is not None:
            self._first_chunk.record(seconds, labels)


def _seconds(meter: Meter, name: str, what: str, *, is_long: bool = False) -> metrics.Histogram:
    buckets = names.LONG_SECONDS_BUCKETS if is_long else names.SECONDS_BUCKETS
    return meter.create_histogram(name, "s", f"seconds: {what}", explicit_bucket_boundaries_advisory=buckets)


def _labels(event: TelemetryEvent) -> dict[str, str]:
    labels = {names.AGENT: event.agent_id, names.STATUS: event.status or ""}
    match event.kind:
        case "turn":
            labels |= {names.OPERATION: "invoke_agent", names.OUTCOME: str(event.details.get("outcome"))}
        case "model":
            provider, model = split_model(event.subject)
            labels |= {names.OPERATION: "chat", names.PROVIDER: provider, names.REQUEST_MODEL: model}
        case "tool" | "tool_run":
            labels[names.TOOL] = event.subject
        case "hook":
            labels |= {names.HOOK: event.subject, names.HOOK_POINT: str(event.details.get("point"))}
    if event.error is not None:
        labels[names.ERROR_TYPE] = event.error.kind
    return labels


# ---- where it goes


def _tracers(made: list[SdkTracerProvider | SdkMeterProvider]) -> TracerProvider:
    present = trace.get_tracer_provider()
    if not isinstance(present, trace.ProxyTracerProvider):
        return present
    provider = SdkTracerProvider(resource=_resource())
    for exporter in _exporters("OTEL_TRACES_EXPORTER", "opentelemetry_traces_exporter"):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    made.append(provider)
    return provider


def _meters(made: list[SdkTracerProvider | SdkMeterProvider]) -> MeterProvider:
    present = metrics.get_meter_provider()
    if isinstance(present, SdkMeterProvider | NoOpMeterProvider):
        return present
    readers = [
        PeriodicExportingMetricReader(exporter)
        for exporter in _exporters("OTEL_METRICS_EXPORTER", "opentelemetry_metrics_exporter")
    ]
    provider = SdkMeterProvider(metric_readers=readers, resource=_resource())
    metrics.set_meter_provider(provider)
    made.append(provider)
    return provider


def _resource() -> Resource:
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create() if named else Resource.create({"service.name": "turnmill"})


def _exporters(variable: str, group: str) -> list[Any]:
    """The exporters that a variable names; `otlp` is the one over HTTP unless its protocol variable says grpc."""
    exporters = []
    for name in os.environ.get(variable, "otlp").split(","):
        name = name.strip()
        if name in ("", "none"):
            continue
        if name == "otlp":
            is_grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
            name = "otlp_proto_grpc" if is_grpc else "otlp_proto_http"
        found = list(entry_points(group=group, name=name))
        if not found:
            raise ConfigurationError(f"{variable}: no exporter {name!r} is installed; install its package, or use none")
        exporters.append(found[0].load()())
    return exporters
