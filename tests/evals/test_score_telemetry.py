"""Scores of trials as events of the evaluated runs' spans, and the names of all telemetry, at a real collector."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough_server.observability.score_events import make_logger_provider
from bough_server.settings import Settings
from tests.evals.job_server import ARRIVED, GATES, begin, case, eval_set, evaluated, evaluating, watch
from tests.rpc import run_server
from tests.rpc.run_server import Served, served
from tests.support.otlp_sink import SentEvent, SentSpan, serving_sink
from tests.support.projects import llm, write_project

_CONVENTIONS = yaml.safe_load((Path(__file__).parents[1] / "support" / "genai_conventions.yaml").read_text())


@dataclass(slots=True)
class Collected:
    """What a collector has received; complete once the server has stopped."""

    spans: list[SentSpan] = field(default_factory=list)
    events: list[SentEvent] = field(default_factory=list)
    metrics: dict[str, set[str]] = field(default_factory=dict)

    def roots_of(self, run_id: str) -> list[tuple[str, str]]:
        """The ids of the trace and of the span of a run's root agent."""
        named = [span for span in self.spans if span.attributes.get("bough.run") == run_id]
        return [(span.trace_id, span.span_id) for span in named if span.attributes["bough.depth"] == 0]


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Serve a collector that the variables of OpenTelemetry name."""
    found = Collected()

    def count(name: str, attributes: set[str]) -> None:
        found.metrics.setdefault(name, set()).update(attributes)

    with serving_sink(found.spans.append, count=count, keep_event=found.events.append) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{endpoint}")
        yield found


@asynccontextmanager
async def exporting(folder: Path, **changes: Any) -> AsyncIterator[Served]:
    """A server with the agents of job_server, which exports spans and events."""
    async with evaluating(folder, exports_traces=True, exports_logs=True, **changes) as server:
        yield server


async def test_each_score_is_an_event_of_the_span_of_the_evaluated_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = eval_set(
        case("good", "yes", answers=["yes"]),
        case("bad", "first", "then", answers=["first", "else"]),
        case("ends", "fail", answers=["fail"]),
        agent="touchy",
    )
    with collecting(monkeypatch) as collected:
        async with exporting(tmp_path) as server:
            log = await evaluated(server, made, max_concurrency=1)
    expected = [
        {
            "gen_ai.evaluation.name": name,
            "gen_ai.evaluation.score.label": label,
            **outcome,
            "bough.evaluation": log.evaluation_id,
            "bough.case": case_id,
            "bough.trial": 0,
            "bough.run": log.result(case_id).turns[-1].run_id,
        }
        for case_id, name, label, outcome in (
            ("good", "final_response", "passed", {"gen_ai.evaluation.score.value": 1.0}),
            ("bad", "final_response", "failed", {"gen_ai.evaluation.score.value": 0.5}),
            ("ends", "verdict", "failed", {"error.type": "INTERNAL"}),
        )
    ]
    assert [(event.name, event.attributes) for event in collected.events] == [
        ("gen_ai.evaluation.result", attributes) for attributes in expected
    ]
    for event in collected.events:
        assert collected.roots_of(str(event.attributes["bough.run"])) == [(event.trace_id, event.span_id)]


@pytest.mark.parametrize("capture", [False, True])
async def test_why_a_score_is_low_is_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: bool) -> None:
    with collecting(monkeypatch) as collected:
        async with exporting(tmp_path, telemetry={"capture_content": capture}) as server:
            log = await evaluated(server, eval_set(case("bad", "secret", answers=["else"])))
    (score,) = log.result("bad").scores
    told = [event.attributes.get("gen_ai.evaluation.explanation") for event in collected.events]
    assert "secret" in score.reason
    assert told == [score.reason if capture else None]


async def test_the_scores_of_an_evaluation_that_another_server_continues_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = eval_set(case("before", "told-go", answers=["x"]), case("after", "told", answers=["x"]), agent="gated")
    GATES["told-go"].set()
    with collecting(monkeypatch) as collected:
        async with exporting(tmp_path) as server:
            log = await begin(server, made, max_concurrency=1).until("case_trial_scored")
            await asyncio.wait_for(ARRIVED["told"].wait(), 30)
        GATES["told"].set()
        async with exporting(tmp_path) as server:
            await watch(server, log.evaluation_id).to_the_end()
    assert [event.attributes["bough.case"] for event in collected.events] == ["before", "after"]


async def test_fresh_trials_of_suspects_say_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = eval_set(case("one", "yes", answers=["yes"]), agent="gruff")
    with collecting(monkeypatch) as collected:
        async with exporting(tmp_path) as server:
            baseline = await evaluated(server, made)
            await evaluated(server, made, baseline={"evaluation_id": baseline.evaluation_id}, rerun_suspects=1)
    told = [
        (event.attributes["bough.trial"], event.attributes.get("bough.trial_purpose")) for event in collected.events
    ]
    assert sorted(told, key=str) == [(0, None), (0, None), (1, "rerun"), (2, "baseline_rerun")]


async def test_without_an_exporter_of_log_records_no_event_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as collected:
        async with evaluating(tmp_path, exports_traces=True) as server:
            await evaluated(server, eval_set(case("one", "yes", answers=["yes"])))
    assert collected.events == []
    assert collected.spans != []
    assert make_logger_provider(export=False) is None


async def test_all_names_of_the_conventions_that_a_server_sends_are_in_their_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {"input_tokens": 9, "cached_input_tokens": 4, "cache_write_tokens": 1, "output_tokens": 5}
    used = {"usage": {**tokens, "reasoning_tokens": 2}}
    lost = {"reason": "TRANSPORT", "after_chunks": 1, "times": 9}
    config = write_project(
        tmp_path,
        {"name": "desk", "description": "Works.", "sequence": {}, "sub_agents": [{"agent": "lead"}]},
        llm("lead", calls=["clerk"]),
        llm("clerk", tools=["look_up"]),
        script={
            "lead": [{"calls": [{"name": "call_clerk", "arguments": {"message": "go"}}], **used}, {"text": "Done."}],
            "clerk": [
                {"calls": [{"name": "look_up", "arguments": {"topic": "a"}}], **used},
                {"text": "Red.", "error": lost},
            ],
        },
        telemetry={"capture_content": True},
    )
    with collecting(monkeypatch) as collected:
        async with served(Settings.load(config, port=0)) as server:
            await run_server.begin(server, "desk", "hi").to_the_end()
            await evaluated(server, eval_set(case("one", "hi", answers=["else"]), agent="desk"))
    attributes = {name for sent in (*collected.spans, *collected.events) for name in sent.attributes}
    attributes.update(*collected.metrics.values())
    operations = {str(name) for span in collected.spans if (name := span.attributes.get("gen_ai.operation.name"))}

    sent = {
        "attributes": {name for name in attributes if name.startswith("gen_ai.")},
        "events": {event.name for event in collected.events},
        "metrics": {name for name in collected.metrics if name.startswith("gen_ai.")},
        "operations": operations,
    }
    assert {kind: names - set(_CONVENTIONS[kind]) for kind, names in sent.items()} == {kind: set() for kind in sent}
    # What is compared is there.
    assert operations == {"invoke_workflow", "invoke_agent", "chat", "execute_tool"}
    assert len(sent["metrics"]) == 6
    assert {"gen_ai.evaluation.explanation", "gen_ai.usage.cache_write.input_tokens", "error.type"} <= attributes
    assert "gen_ai.agent.id" not in attributes
