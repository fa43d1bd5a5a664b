"""Spans of agents, model calls and tools by OpenTelemetry's GenAI conventions, without content unless configured.

The conventions are in development (semantic-conventions-genai, here v0.1.0), so only this package contains their names.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from opentelemetry import baggage, context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from bough.v1 import error_pb2, execution_pb2, message_pb2, model_pb2, step_pb2

Content: TypeAlias = str | Sequence[message_pb2.Message]
"""Input or output of an operation: messages, or a tool's arguments or result as text."""

Attributes: TypeAlias = Mapping[str, str | int | float]

_CONVERSATION: Final = "gen_ai.conversation.id"
_NEW_IDS: Final = RandomIdGenerator()
# The default sampler follows the parent: without this flag, spans below a recorded one would be dropped.
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_RANDOM: Final = TraceFlags(TraceFlags.RANDOM_TRACE_ID)
_WORKFLOWS: Final = frozenset(
    {
        execution_pb2.AGENT_KIND_SEQUENCE,
        execution_pb2.AGENT_KIND_PARALLEL,
        execution_pb2.AGENT_KIND_LOOP,
        execution_pb2.AGENT_KIND_PLAN_EXECUTE,
        execution_pb2.AGENT_KIND_GRAPH,
    }
)
"""Kinds whose definition says what runs next. In a supervisor and in a swarm models say it, in a function code."""
_INPUT: Final = {"execute_tool": "gen_ai.tool.call.arguments"}
_OUTPUT: Final = {"execute_tool": "gen_ai.tool.call.result"}


def inject_context() -> Mapping[str, str]:
    """Return the headers by which a call passes on the trace that is current in this task."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


@dataclass(frozen=True, slots=True)
class Parent:
    """Parent of a span: the trace, the span above, and the baggage that its descendants inherit."""

    context: Context

    @classmethod
    def current(cls) -> "Parent":
        """Return the parent that is current in this task: in a handler the call's span, with the caller's baggage."""
        return cls(context.get_current())

    @classmethod
    def from_ids(cls, trace_id: str, span_id: str) -> "Parent":
        """Return a span that an event names, whichever process opened it; an empty parent if the ids are invalid."""
        try:
            ids = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=_SAMPLED)
        except ValueError:
            return cls(Context())
        return cls(trace.set_span_in_context(NonRecordingSpan(ids), Context()))

    @classmethod
    def of_call(cls, metadata: Iterable[tuple[str, str | bytes]]) -> "Parent":
        """Return the caller's span and baggage as a call's metadata name them; an empty parent if they name none."""
        return cls(propagate.extract(dict(metadata), Context()))

    def ids(self) -> tuple[str, str]:
        """Return the ids of the trace and of the span, in hex; two empty texts without a span."""
        ids = trace.get_current_span(self.context).get_span_context()
        return (trace.format_trace_id(ids.trace_id), trace.format_span_id(ids.span_id)) if ids.is_valid else ("", "")

    def make_current(self) -> None:
        """Make this the parent that is current, to the end of the task."""
        context.attach(self.context)

    def for_run(self, *, run_id: str, session_id: str, user_id: str) -> "Parent":
        """Return the same parent with the run's baggage."""
        below = self.context
        for name, value in (("run_id", run_id), ("session_id", session_id), ("user_id", user_id)):
            below = baggage.set_baggage(name, value, below)
        return Parent(below)

    def baggage(self, name: str) -> str | None:
        """Return the baggage value under a name, such as "run_id"; None if there is none."""
        value = baggage.get_baggage(name, self.context)
        return None if value is None else str(value)


class Traced:
    """An open span: its ids, the parent for spans below it, and its end. While nothing is exported it is ids alone."""

    __slots__ = ("_capture", "_ended", "_operation", "_span", "below", "span_id", "trace_id")

    def __init__(self, span: Span, parent: Parent, *, operation: str, capture: bool) -> None:
        ids = span.get_span_context()
        self.trace_id = trace.format_trace_id(ids.trace_id)
        self.span_id = trace.format_span_id(ids.span_id)
        self.below = Parent(trace.set_span_in_context(span, parent.context))
        self._span, self._operation, self._capture, self._ended = span, operation, capture, False

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Make the span current for user code; enter and exit in the same task."""
        token = context.attach(self.below.context)
        try:
            yield
        finally:
            context.detach(token)

    def end(
        self,
        *,
        error: error_pb2.AgentError | None = None,
        response: step_pb2.LlmResponse | None = None,
        input: Content | None = None,
        output: Content | None = None,
    ) -> None:
        """End the span with its outcome; a second call has no effect."""
        if self._ended:
            return
        self._ended = True
        span = self._span
        if span.is_recording():
            if error is not None:
                reason = error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
                span.set_attribute("error.type", reason)
                # An error message may quote content: a tool's arguments, a provider's response.
                span.set_status(Status(StatusCode.ERROR, error.message if self._capture else None))
            if response is not None:
                _describe_response(span, response)
            if self._capture and input is not None:
                span.set_attribute(_INPUT.get(self._operation, "gen_ai.input.messages"), _content_text(input))
            if self._capture and output is not None:
                span.set_attribute(_OUTPUT.get(self._operation, "gen_ai.output.messages"), _content_text(output))
        span.end()


class Tracing:
    """Opens spans, which `provider` exports; without one it draws their ids."""

    def __init__(self, provider: TracerProvider | None, *, capture_content: bool = False) -> None:
        self.provider = provider
        self._capture = capture_content
        self._tracer = provider.get_tracer("bough") if provider is not None else None

    def invoke_agent(
        self,
        *,
        agent: str,
        kind: execution_pb2.AgentKind.ValueType,
        description: str,
        invocation_id: str,
        run_id: str,
        session_id: str,
        branch: str,
        depth: int,
        parent: Parent,
        is_over: bool = False,
    ) -> Traced:
        """Start the span of an agent invocation: of `invoke_workflow` for a composite by rule, else of `invoke_agent`.

        If `is_over`, return ids without a span: the invocation has ended, and its span was exported when it did.
        """
        operation = "invoke_workflow" if kind in _WORKFLOWS else "invoke_agent"
        if is_over or self._tracer is None:
            return _without_span(operation, parent)
        attributes: dict[str, str | int | float] = {
            "gen_ai.agent.name": agent,
            "gen_ai.agent.description": description,
            _CONVERSATION: session_id,
            "bough.run": run_id,
            "bough.agent_invocation": invocation_id,
            "bough.branch": branch,
            "bough.depth": depth,
        }
        return self._start(operation, agent, attributes=attributes, parent=parent, kind=SpanKind.INTERNAL)

    def chat(
        self, *, model: str, provider: str, parent: Parent, settings: model_pb2.ModelSettings | None = None
    ) -> Traced:
        """Start the span of a model call, which covers all its attempts."""
        if self._tracer is None:
            return _without_span("chat", parent)
        attributes: dict[str, str | int | float] = {
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": True,  # every provider's answer is streamed
        }
        if settings is not None:
            if settings.HasField("temperature"):
                attributes["gen_ai.request.temperature"] = settings.temperature
            if settings.HasField("top_p"):
                attributes["gen_ai.request.top_p"] = settings.top_p
            if settings.HasField("max_output_tokens"):
                attributes["gen_ai.request.max_tokens"] = settings.max_output_tokens
        return self._start("chat", model, attributes=attributes, parent=parent, kind=SpanKind.CLIENT)

    def execute_tool(self, *, tool: str, agent: str, call_id: str, parent: Parent, description: str = "") -> Traced:
        """Start the span of a tool call that an agent makes."""
        if self._tracer is None:
            return _without_span("execute_tool", parent)
        attributes: dict[str, str | int | float] = {
            "gen_ai.tool.name": tool,
            "gen_ai.agent.name": agent,
            "gen_ai.tool.call.id": call_id,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.description": description,
        }
        return self._start("execute_tool", tool, attributes=attributes, parent=parent, kind=SpanKind.INTERNAL)

    def graph_node(
        self, *, node: str, agent: str, visit: int, superstep: int | None, parent: Parent, is_over: bool
    ) -> Traced:
        """Start the span of a visit of a graph's node; ids without a span if it `is_over`."""
        if is_over or self._tracer is None:
            return _without_span("graph_node", parent)
        attributes: dict[str, str | int | float] = {"gen_ai.agent.name": agent, "bough.visit": visit}
        if superstep is not None:
            attributes["bough.superstep"] = superstep
        return self._start("graph_node", node, attributes=attributes, parent=parent, kind=SpanKind.INTERNAL)

    def close(self) -> None:
        """Export the remaining spans for at most 5 seconds; blocks, so do not call it on the event loop."""
        if self.provider is not None:
            self.provider.force_flush(5_000)
            self.provider.shutdown()

    def _start(self, operation: str, name: str, *, attributes: Attributes, parent: Parent, kind: SpanKind) -> Traced:
        assert self._tracer is not None, "without a provider there are no spans"
        own = {_CONVERSATION: parent.baggage("session_id") or "", **attributes}
        given: Attributes = {"gen_ai.operation.name": operation, **{k: v for k, v in own.items() if v != ""}}
        span = self._tracer.start_span(f"{operation} {name}", parent.context, kind, given)
        return Traced(_with_own_id(span, parent), parent, operation=operation, capture=self._capture)


def make_provider(*, export: bool, processor: SpanProcessor | None = None) -> TracerProvider | None:
    """Return a provider that exports by OTLP/gRPC in batches, as OTEL_EXPORTER_OTLP_* configures; None without export.

    `processor` replaces the exporter.
    """
    if not export and processor is None:
        return None
    provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
    provider.add_span_processor(processor or _make_exporter())
    return provider


def resource() -> Resource:
    """Return the resource of all telemetry: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, default `bough`."""
    return Resource({"service.name": "bough"}).merge(OTELResourceDetector().detect())


def _make_exporter() -> SpanProcessor:
    # Imported here, so that only a server that exports pays for loading the exporter.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter())


def _with_own_id(span: Span, parent: Parent) -> Span:
    """Return the span, or ids without a span if a disabled SDK returned the parent or an invalid span."""
    ids, above = span.get_span_context(), trace.get_current_span(parent.context).get_span_context()
    if ids.is_valid and ids.span_id != above.span_id:
        return span
    return _ids_below(parent)


def _without_span(operation: str, parent: Parent) -> Traced:
    return Traced(_ids_below(parent), parent, operation=operation, capture=False)


def _ids_below(parent: Parent) -> Span:
    """Return ids that continue a trace, or begin one; what W3C's trace context passes on is passed on."""
    above, span_id = trace.get_current_span(parent.context).get_span_context(), _NEW_IDS.generate_span_id()
    if not above.is_valid:
        ids = SpanContext(_NEW_IDS.generate_trace_id(), span_id, is_remote=False, trace_flags=_RANDOM)
    else:
        flags = TraceFlags(above.trace_flags & _RANDOM)  # not recorded, and so not sampled
        ids = SpanContext(above.trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=above.trace_state)
    return NonRecordingSpan(ids)


def _describe_response(span: Span, response: step_pb2.LlmResponse) -> None:
    for name, text in (("gen_ai.response.id", response.response_id), ("gen_ai.response.model", response.model)):
        if text:
            span.set_attribute(name, text)
    if response.provider_finish_reason:
        span.set_attribute("gen_ai.response.finish_reasons", (response.provider_finish_reason,))
    usage = response.usage
    if usage.HasField("input_tokens"):
        span.set_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
    if usage.HasField("output_tokens"):
        span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
    if usage.HasField("cached_input_tokens"):
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_input_tokens)
    if usage.HasField("cache_write_tokens"):
        span.set_attribute("gen_ai.usage.cache_write.input_tokens", usage.cache_write_tokens)
    if usage.HasField("reasoning_tokens"):
        span.set_attribute("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens)


def _content_text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return json.dumps([_message_content(message) for message in content], ensure_ascii=False)


def _message_content(message: message_pb2.Message) -> dict[str, object]:
    role = message_pb2.Role.Name(message.role).removeprefix("ROLE_").lower()
    return {"role": role, "parts": [_part_content(part) for part in message.parts]}


def _part_content(part: message_pb2.Part) -> dict[str, object]:
    match part.WhichOneof("content"):
        case "text":
            return {"type": "text", "content": part.text}
        case "data_json":
            return {"type": "text", "content": part.data_json}
        case "reasoning":
            return {"type": "reasoning", "content": part.reasoning.text}
        case "tool_call":
            call = part.tool_call
            return {"type": "tool_call", "id": call.call_id, "name": call.name, "arguments": call.arguments_json}
        case "tool_result":
            result = part.tool_result
            text = "".join(inner.text or inner.data_json for inner in result.parts)
            return {"type": "tool_call_response", "id": result.call.call_id, "response": text}
        case "blob":
            return {"type": "blob", "mime_type": part.blob.media_type}
        case None:
            return {"type": "unknown"}
