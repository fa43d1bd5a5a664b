"""One run is one trace: the spans that a collector receives, and the ids in the run's events."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2
from bough_server.log.events import DELTA_KINDS, kind_of
from bough_server.settings import Settings
from tests.rpc.run_server import Served, said, served, settings
from tests.support.log_readings import failures
from tests.support.otlp_sink import SentSpan, serving_sink

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_CALLER = "b7ad6b7169203331"
_RUN = "/bough.v1.AgentService/Run"
_DESK = Path(__file__).resolve().parents[2] / "examples" / "desk" / "bough.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The spans and the events of one run; the spans are complete once the server has stopped."""

    spans: Sequence[SentSpan]
    events: Sequence[event_pb2.AgentEvent]

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Each span's name and its parent's, sorted; empty for the caller's."""
        names = {span.span_id: span.name for span in self.spans} | {_CALLER: "caller"}
        return sorted((span.name, names[span.parent_span_id]) for span in self.spans)


@asynccontextmanager
async def _sink(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[SentSpan]]:
    spans: list[SentSpan] = []
    with serving_sink(spans.append) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{endpoint}")
        yield spans


async def _events(server: Served, agent: str) -> list[event_pb2.AgentEvent]:
    metadata = (("traceparent", f"00-{_TRACE}-{_CALLER}-01"),)
    call = server.agents.Run(pb.RunRequest(agent=agent, input=said("hi")), metadata=metadata)
    return [event async for response in call for event in response.batch.events]


async def test_a_turn_of_agents_in_code_is_one_trace_with_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _sink(monkeypatch) as spans:
        async with served(settings(tmp_path, exports_traces=True)) as server:
            events = await _events(server, "lead")
        turn = Traced(spans=spans, events=events)
    assert turn.edges == [
        (_RUN, "caller"),
        ("invoke_agent echo", "invoke_agent lead"),
        ("invoke_agent echo", "invoke_agent lead"),
        ("invoke_agent echo", "invoke_agent nester"),
        ("invoke_agent lead", _RUN),
        ("invoke_agent nester", "invoke_agent lead"),
    ]
    assert {span.trace_id for span in spans} == {event.trace_id for event in events} == {_TRACE}


async def test_the_model_calls_and_tools_of_a_turn_are_below_their_agents_and_its_events_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _sink(monkeypatch) as spans:
        made = Settings.load(_DESK, port=0, database=str(tmp_path / "bough.db"), default_model="scripted")
        async with served(made) as server:
            events = await _events(server, "lead")
        turn = Traced(spans=spans, events=events)
    assert failures(events) == []
    agents = {"invoke_agent lead", "invoke_agent researcher", "invoke_agent writer"}
    assert {name for name, _ in turn.edges if name.startswith("invoke_agent")} == agents
    assert {parent for name, parent in turn.edges if name.split()[0] in ("chat", "execute_tool")} <= agents
    assert ("invoke_agent researcher", "invoke_agent lead") in turn.edges
    assert len([name for name, _ in turn.edges if name.startswith("chat ")]) == sum(
        event.HasField("llm_started") for event in events
    )
    whole = [event for event in events if kind_of(event) not in DELTA_KINDS]
    deltas = [event for event in events if kind_of(event) in DELTA_KINDS]
    assert {(event.trace_id, event.span_id) for event in whole} == {
        (span.trace_id, span.span_id) for span in spans if span.name != _RUN
    }
    assert {(event.trace_id, event.span_id) for event in deltas} == {("", "")}


async def test_without_a_collector_every_event_has_ids_and_the_callers_trace_goes_on(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as server:
        events = await _events(server, "lead")
    by_invocation: dict[str, set[str]] = {}
    for event in events:
        by_invocation.setdefault(event.invocation_id, set()).add(event.span_id)
    assert {event.trace_id for event in events} == {_TRACE}
    assert [len(spans) for spans in by_invocation.values()] == [1] * 5
    assert len(set.union(*by_invocation.values())) == 5


@pytest.mark.parametrize("is_exported", [False, True])
async def test_requests_of_agents_and_tools_carry_the_callers_trace_and_the_span_that_their_events_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_exported: bool
) -> None:
    async with _sink(monkeypatch):
        python = ["tests.rpc.tracing_agents"]
        async with served(settings(tmp_path, exports_traces=is_exported, python=python)) as server:
            metadata = (
                ("traceparent", f"00-{_TRACE}-{_CALLER}-01"),
                ("tracestate", "vendor=1"),
                ("baggage", "team=desk"),
            )
            request = pb.RunRequest(agent="sender", input=said("hi"))
            call = server.agents.Run(request, metadata=metadata)
            events = [event async for response in call for event in response.batch.events]
    assert failures(events) == []
    started = {str(event.WhichOneof("payload")): event for event in events}
    flags = "01" if is_exported else "00"
    begun = events[0]
    assert json.loads(events[-1].run_completed.final_answer.parts[0].text) == {
        name: {
            "traceparent": f"00-{_TRACE}-{started[kind].span_id}-{flags}",
            "tracestate": "vendor=1",
            "baggage": f"team=desk,run_id={begun.run_id},session_id={begun.session_id},user_id=local",
        }
        for name, kind in (("agent", "run_started"), ("tool", "tool_started"))
    }


async def test_a_call_continues_no_other_calls_trace(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as server:
        continued = await _events(server, "echo")
        call = server.agents.Run(pb.RunRequest(agent="echo", input=said("hi")))
        alone = [event async for response in call for event in response.batch.events]
    assert {event.trace_id for event in continued} == {_TRACE}
    (trace_id,) = {event.trace_id for event in alone}
    assert trace_id not in (_TRACE, "0" * 32)
