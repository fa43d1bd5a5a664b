"""Export of a run by OTLP: one trace with the right parents and the ids of the events; content only if enabled."""

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from bough_server.log import events
from bough_server.settings import Settings
from tests.rpc.run_server import begin, served
from tests.support.otlp_sink import SentSpan, serving_sink
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import connected

CALLERS_TRACE, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
QUESTION, ORDER, ARGUMENT, ANSWER = "whispered-question", "whispered-order", "whispered-topic", "whispered-answer"
SCRIPT: Mapping[str, Sequence[object]] = {
    "lead": [{"calls": [{"name": "call_researcher", "arguments": {"message": ORDER}}]}, {"text": ANSWER}],
    "researcher": [{"calls": [{"name": "call_clerk", "arguments": {"message": ORDER}}]}, {"text": ANSWER}],
    "clerk": [{"calls": [{"name": "look_up", "arguments": {"topic": ARGUMENT}}]}, {"text": ANSWER}],
}
TEAM = (llm("lead", calls=["researcher"]), llm("researcher", calls=["clerk"]), llm("clerk", tools=["look_up"]))

TREE = {
    "/bough.v1.AgentService/Run": "",
    "invoke_agent lead": "/bough.v1.AgentService/Run",
    "invoke_agent researcher": "invoke_agent lead",
    "invoke_agent clerk": "invoke_agent researcher",
    "execute_tool look_up": "invoke_agent clerk",
}


def _parents(spans: Iterable[SentSpan]) -> list[tuple[str, str]]:
    by_id = {span.span_id: span for span in spans}
    return sorted((span.name, getattr(by_id.get(span.parent_span_id), "name", "")) for span in by_id.values())


def _text(spans: Iterable[SentSpan]) -> str:
    return json.dumps([span.attributes for span in spans])


async def test_a_turn_three_agents_deep_is_one_trace_with_the_callers(tmp_path: Path) -> None:
    config = write_project(tmp_path, *TEAM, script=SCRIPT)
    spans: list[SentSpan] = []
    with serving_sink(spans.append) as endpoint:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{endpoint}", "OTEL_SERVICE_NAME": "desk"}
        async with serving(config, environment=environment) as server, connected(server.address) as remote:
            metadata = (("traceparent", f"00-{CALLERS_TRACE}-{CALLERS_SPAN}-01"),)
            turn = await remote.begin("lead", QUESTION, metadata=metadata).to_the_end()
            server.send(signal.SIGTERM)
            assert await server.end() == 0
    chats = [("chat script", f"invoke_agent {agent}") for agent in ("lead", "researcher", "clerk") for _ in range(2)]
    assert _parents(spans) == sorted([*TREE.items(), *chats])
    assert {span.trace_id for span in spans} == {CALLERS_TRACE}
    assert {span.service for span in spans} == {"desk"}
    (call,) = [span for span in spans if span.kind == "SERVER"]
    assert call.parent_span_id == CALLERS_SPAN
    told = [event for event in turn.events if events.kind_of(event) not in events.DELTA_KINDS]
    assert {event.trace_id for event in told} == {CALLERS_TRACE}
    assert {event.span_id for event in told} == {span.span_id for span in spans} - {call.span_id}
    assert not any(word in _text(spans) for word in (QUESTION, ORDER, ARGUMENT, ANSWER))


async def test_content_is_in_the_spans_where_the_operator_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_project(tmp_path, *TEAM, script=SCRIPT, telemetry={"capture_content": True})
    spans: list[SentSpan] = []
    with serving_sink(spans.append) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{endpoint}")
        async with served(Settings.load(config, port=0)) as server:
            await begin(server, "lead", QUESTION).to_the_end()
    for name, inside in {
        "invoke_agent lead": (QUESTION, ANSWER),
        "invoke_agent clerk": (ORDER, ANSWER),
        "chat script": (ANSWER,),
        "execute_tool look_up": (ARGUMENT,),
    }.items():
        text = _text(span for span in spans if span.name == name)
        assert [word in text for word in inside] == [True] * len(inside), name
