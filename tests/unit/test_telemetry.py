"""Spans of agents, model calls and tools."""

import json

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bough.v1 import error_pb2, execution_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.observability.tracing import Parent, Traced, Tracing, make_provider
from tests.support.otlp_sink import SentSpan, serving_sink

_NOWHERE = Parent(Context())
_ANSWER = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text="42")])


def _root(
    tracing: Tracing,
    parent: Parent = _NOWHERE,
    *,
    kind: execution_pb2.AgentKind.ValueType = execution_pb2.AGENT_KIND_LLM,
) -> Traced:
    return tracing.invoke_agent(
        agent="lead",
        kind=kind,
        description="Leads.",
        invocation_id="i",
        run_id="r",
        session_id="s",
        branch="lead",
        depth=0,
        parent=parent,
    )


def _recording(*, capture_content: bool = False) -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = make_provider(export=False, processor=SimpleSpanProcessor(exporter))
    return Tracing(provider, capture_content=capture_content), exporter


def _facts(span: ReadableSpan) -> tuple[str, SpanKind, StatusCode, dict[str, object]]:
    return span.name, span.kind, span.status.status_code, dict(span.attributes or {})


def test_an_agent_a_model_call_and_a_tool_are_spans_of_one_trace_by_the_conventions() -> None:
    tracing, exporter = _recording()
    root = _root(tracing)
    chat = tracing.chat(
        model="small",
        provider="local",
        parent=root.below,
        settings=model_pb2.ModelSettings(temperature=0.5, max_output_tokens=9),
    )
    chat.end(
        response=step_pb2.LlmResponse(
            response_id="x",
            model="small-1",
            finish_reason=step_pb2.FINISH_REASON_STOP,
            provider_finish_reason="stop",
            usage=usage_pb2.Usage(
                input_tokens=3, cached_input_tokens=1, cache_write_tokens=2, output_tokens=0, reasoning_tokens=0
            ),
        ),
        output=[_ANSWER],
    )
    tool = tracing.execute_tool(
        tool="clock", agent="lead", call_id="c", parent=root.below, description="Tells the time."
    )
    tool.end(error=error_pb2.AgentError(reason=error_pb2.ERROR_REASON_TOOL_FAILED, message="It broke."))
    root.end()
    spans = exporter.get_finished_spans()
    assert [_facts(span) for span in spans] == [
        (
            "chat small",
            SpanKind.CLIENT,
            StatusCode.UNSET,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "local",
                "gen_ai.request.model": "small",
                "gen_ai.request.stream": True,
                "gen_ai.request.temperature": 0.5,
                "gen_ai.request.max_tokens": 9,
                "gen_ai.response.id": "x",
                "gen_ai.response.model": "small-1",
                "gen_ai.response.finish_reasons": ("stop",),
                "gen_ai.usage.input_tokens": 3,
                "gen_ai.usage.cache_read.input_tokens": 1,
                "gen_ai.usage.cache_write.input_tokens": 2,
                "gen_ai.usage.output_tokens": 0,
                "gen_ai.usage.reasoning.output_tokens": 0,
            },
        ),
        (
            "execute_tool clock",
            SpanKind.INTERNAL,
            StatusCode.ERROR,
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "clock",
                "gen_ai.agent.name": "lead",
                "gen_ai.tool.call.id": "c",
                "gen_ai.tool.type": "function",
                "gen_ai.tool.description": "Tells the time.",
                "error.type": "TOOL_FAILED",
            },
        ),
        (
            "invoke_agent lead",
            SpanKind.INTERNAL,
            StatusCode.UNSET,
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": "lead",
                "gen_ai.agent.description": "Leads.",
                "gen_ai.conversation.id": "s",
                "bough.run": "r",
                "bough.agent_invocation": "i",
                "bough.branch": "lead",
                "bough.depth": 0,
            },
        ),
    ]
    assert {chat.trace_id, tool.trace_id} == {root.trace_id}
    assert [f"{span.parent.span_id:016x}" for span in spans if span.parent] == [root.span_id] * 2


@pytest.mark.parametrize("kind", execution_pb2.AgentKind.values())
def test_an_agent_whose_definition_says_what_runs_next_is_a_workflow(kind: execution_pb2.AgentKind.ValueType) -> None:
    tracing, exporter = _recording()
    _root(tracing, kind=kind).end()
    (span,) = exporter.get_finished_spans()
    name = execution_pb2.AgentKind.Name(kind).removeprefix("AGENT_KIND_")
    is_workflow = name in ("SEQUENCE", "PARALLEL", "LOOP", "PLAN_EXECUTE", "GRAPH")
    operation = "invoke_workflow" if is_workflow else "invoke_agent"
    named = [(span.attributes or {})[f"gen_ai.{each}.name"] for each in ("operation", "agent")]
    assert (span.name, *named) == (f"{operation} lead", operation, "lead")


def test_model_calls_and_tools_of_a_run_name_its_session() -> None:
    tracing, exporter = _recording()
    below = _root(tracing, _NOWHERE.for_run(run_id="r", session_id="s", user_id="u")).below
    tracing.chat(model="m", provider="p", parent=below).end()
    tracing.execute_tool(tool="t", agent="lead", call_id="c", parent=below).end()
    assert [(span.attributes or {})["gen_ai.conversation.id"] for span in exporter.get_finished_spans()] == ["s", "s"]


def test_content_is_recorded_only_when_the_operator_asks() -> None:
    tracing, exporter = _recording(capture_content=True)
    tracing.chat(model="m", provider="p", parent=_NOWHERE).end(input=[], output=[_ANSWER])
    tracing.execute_tool(tool="t", agent="a", call_id="c", parent=_NOWHERE).end(input='{"a": 1}', output="done")
    chat, tool = (dict(span.attributes or {}) for span in exporter.get_finished_spans())
    assert json.loads(str(chat["gen_ai.input.messages"])) == []
    assert json.loads(str(chat["gen_ai.output.messages"])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "42"}]}
    ]
    assert (tool["gen_ai.tool.call.arguments"], tool["gen_ai.tool.call.result"]) == ('{"a": 1}', "done")


def test_a_span_ends_once() -> None:
    tracing, exporter = _recording()
    root = _root(tracing)
    root.end()
    root.end(error=error_pb2.AgentError(reason=error_pb2.ERROR_REASON_INTERNAL, message="Late."))
    assert [span.status.status_code for span in exporter.get_finished_spans()] == [StatusCode.UNSET]


@pytest.mark.parametrize("disabled", ["false", "true"])
def test_without_an_exporter_nothing_is_recorded_and_every_span_has_ids(
    disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    assert make_provider(export=False) is None
    tracing = Tracing(None)
    root = _root(tracing)
    child = _root(tracing, root.below)
    grandchild = _root(tracing, child.below)
    assert {child.trace_id, grandchild.trace_id} == {root.trace_id}
    assert len({root.span_id, child.span_id, grandchild.span_id}) == 3
    assert int(root.trace_id, 16) != 0
    assert [len(root.trace_id), len(root.span_id)] == [32, 16]
    assert not trace.get_current_span(root.below.context).is_recording()


def test_a_call_without_a_valid_trace_begins_one() -> None:
    tracing = Tracing(None)
    for metadata in ((), (("traceparent", "nonsense"),), (("traceparent", f"00-{'0' * 32}-{'0' * 16}-01"),)):
        first, second = (_root(tracing, Parent.of_call((*metadata, ("key-bin", b"\x00")))) for _ in range(2))
        assert int(first.trace_id, 16) not in (0, int(second.trace_id, 16))


def test_a_span_is_current_only_while_it_is_attached() -> None:
    tracing, _ = _recording()
    root = _root(tracing, _NOWHERE.for_run(run_id="r", session_id="s", user_id="u"))
    before = trace.get_current_span()
    with root.attach():
        inside = Parent.current()
        assert f"{trace.get_current_span().get_span_context().span_id:016x}" == root.span_id
    assert [inside.baggage(name) for name in ("run_id", "session_id", "user_id")] == ["r", "s", "u"]
    assert trace.get_current_span() is before


def test_spans_are_exported_by_otlp_when_the_environment_names_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[SentSpan] = []
    with serving_sink(received.append) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
        tracing = Tracing(make_provider(export=True))
        root = _root(tracing)
        chat = tracing.chat(model="m", provider="p", parent=root.below)
        chat.end()
        root.end()
        tracing.close()
    assert [(span.service, span.name, span.span_id, span.parent_span_id, span.trace_id) for span in received] == [
        ("bough", "chat m", chat.span_id, root.span_id, root.trace_id),
        ("bough", "invoke_agent lead", root.span_id, "", root.trace_id),
    ]


def test_what_an_error_quotes_is_content_too() -> None:
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS, message="card: '4111' is no integer")
    told: list[str | None] = []
    for capture in (False, True):
        tracing, exporter = _recording(capture_content=capture)
        tracing.execute_tool(tool="pay", agent="a", call_id="c", parent=_NOWHERE).end(error=error)
        told += [span.status.description for span in exporter.get_finished_spans()]
    assert told == [None, "card: '4111' is no integer"]
