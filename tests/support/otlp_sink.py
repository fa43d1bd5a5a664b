"""An OTLP/gRPC endpoint that keeps what it is sent of spans, metrics and events; a program, or a context of a test.

python -m tests.support.otlp_sink --port 0 --out SPANS.jsonl --ready-file F
"""

import argparse
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | int | float | bool | list["Value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSpan:
    """A span as it arrived; ids in hex, `parent_span_id` empty on a root, `status` 2 for an error."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_span_id: str
    status: int
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEvent:
    """A log record with the name of an event, as it arrived; ids in hex."""

    name: str
    trace_id: str
    span_id: str
    attributes: dict[str, Value]


class TraceSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Hands every span on, in the order of arrival."""

    def __init__(self, keep: Callable[[SentSpan], None]) -> None:
        self._keep = keep

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes a batch of spans."""
        for resource in request.resource_spans:
            service = str(_attributes(resource.resource.attributes).get("service.name", ""))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._keep(_sent(service, span))
        return trace_service_pb2.ExportTraceServiceResponse()


class LogsSink(logs_service_pb2_grpc.LogsServiceServicer):
    """Hands every event on, in the order of arrival."""

    def __init__(self, keep: Callable[[SentEvent], None]) -> None:
        self._keep = keep

    def Export(
        self, request: logs_service_pb2.ExportLogsServiceRequest, context: grpc.ServicerContext
    ) -> logs_service_pb2.ExportLogsServiceResponse:
        """Takes a batch of log records."""
        for resource in request.resource_logs:
            for scope in resource.scope_logs:
                for record in scope.log_records:
                    self._keep(
                        SentEvent(
                            name=record.event_name,
                            trace_id=record.trace_id.hex(),
                            span_id=record.span_id.hex(),
                            attributes=_attributes(record.attributes),
                        )
                    )
        return logs_service_pb2.ExportLogsServiceResponse()


class MetricsSink(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Hands the name of every metric on, and those of its attributes, each time it comes."""

    def __init__(self, count: Callable[[str, set[str]], None]) -> None:
        self._count = count

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Takes a batch of metrics."""
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = getattr(metric, metric.WhichOneof("data") or "sum").data_points
                    self._count(metric.name, {pair.key for point in points for pair in point.attributes})
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def serving_sink(
    keep: Callable[[SentSpan], None],
    *,
    count: Callable[[str, set[str]], None] = lambda name, attributes: None,
    keep_event: Callable[[SentEvent], None] = lambda _: None,
    port: int = 0,
) -> Iterator[str]:
    """Serve a sink on loopback in a separate thread; return its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=1), options=(("grpc.so_reuseport", 0),))
    sink = TraceSink(keep)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)  # type: ignore[no-untyped-call] # untyped
    counter = MetricsSink(count)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(counter, server)  # type: ignore[no-untyped-call]
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(LogsSink(keep_event), server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(grace=None).wait()


def _sent(service: str, span: Span) -> SentSpan:
    return SentSpan(
        service=service,
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        status=span.status.code,
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bool_value":
            return value.bool_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case _:
            return value.string_value


def main() -> None:
    """Writes one JSON object a span, as it arrives, until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path)
    arguments = parser.parse_args()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with arguments.out.open("a", encoding="utf-8") as out:

        def keep(span: SentSpan) -> None:
            out.write(json.dumps(asdict(span), ensure_ascii=False) + "\n")
            out.flush()

        with serving_sink(keep, port=arguments.port) as address:
            if arguments.ready_file is not None:
                unfinished = arguments.ready_file.with_suffix(".part")
                unfinished.write_text(f"{address}\n", encoding="utf-8")
                unfinished.rename(arguments.ready_file)
            stopped.wait()


if __name__ == "__main__":
    main()
