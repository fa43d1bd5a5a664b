"""Runs of every kind of agent, recorded and collected: in both views the same answer, texts and end."""

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bough import CollectedRun, collect_sync, text_of
from bough.v1 import event_pb2, execution_pb2, follow_pb2, step_pb2
from bough_server.log.views import Selection
from tests.durability.prefixes.recovery import record
from tests.durability.prefixes.scenario import Scenario
from tests.support.agent_kinds import KINDS

SUMMARY = Selection(view=follow_pb2.EVENT_VIEW_SUMMARY)
Log = list[event_pb2.AgentEvent]

every_kind = pytest.mark.parametrize("scenario", KINDS, ids=str)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Log]:
    """Returns the log of a run of a scenario, recorded once."""

    @cache
    def made(name: str) -> Log:
        scenario = next(one for one in KINDS if one.name == name)
        folder: Path = tmp_path_factory.mktemp("recorded") / "run"
        return list(asyncio.run(record(scenario, folder, is_cancelled=False)).log)

    return lambda scenario: made(scenario.name)


@every_kind
def test_every_step_has_the_text_that_its_model_said(scenario: Scenario, recorded: Callable[[Scenario], Log]) -> None:
    run = collect_sync(recorded(scenario))
    said = {(step.invocation_id, step.step_index): text_of(step.llm_response.message) for step in _answered(run)}
    streamed = {(text.invocation_id, text.step_index): text.text for text in run.texts}
    assert {key: streamed.get(key, "") for key in said} == said
    assert len(streamed) == len(run.texts)


@every_kind
def test_what_an_agent_answered_itself_is_its_last_text(
    scenario: Scenario, recorded: Callable[[Scenario], Log]
) -> None:
    run = collect_sync(recorded(scenario))
    started = {event.invocation_id: event.sub_agent_started for event in run.events if _has(event, "sub_agent_started")}
    last_step = {step.invocation_id: step for step in run.steps}
    last_text = {text.invocation_id: text.text for text in run.texts}
    for event in run.events:
        id, end = event.invocation_id, event.sub_agent_completed
        if not _has(event, "sub_agent_completed") or started[id].kind != execution_pb2.AGENT_KIND_LLM:
            continue
        said = last_step[id].llm_response.message
        if end.end_reason == execution_pb2.END_REASON_ANSWERED and not any(
            part.HasField("tool_call") for part in said.parts
        ):
            assert last_text[id] == text_of(end.output)


@every_kind
def test_a_summary_is_collected_to_the_same_run(scenario: Scenario, recorded: Callable[[Scenario], Log]) -> None:
    log = recorded(scenario)
    whole = collect_sync(log)
    summary = collect_sync(shown for event in log if (shown := SUMMARY.apply(event)) is not None)
    assert _told(summary) == _told(whole)
    assert summary.root_steps == whole.root_steps


@every_kind
def test_the_end_of_the_log_is_the_end_of_the_run(scenario: Scenario, recorded: Callable[[Scenario], Log]) -> None:
    log = recorded(scenario)
    run = collect_sync(log)
    if log[-1].HasField("run_completed"):
        end = log[-1].run_completed
        assert (run.state, run.message, run.usage) == (
            execution_pb2.EXECUTION_STATE_SUCCEEDED,
            end.final_answer,
            end.tree_usage,
        )
    else:
        end_of_failure = log[-1].run_failed
        assert (run.state, run.error, run.answer) == (execution_pb2.EXECUTION_STATE_FAILED, end_of_failure.error, "")


def _has(event: event_pb2.AgentEvent, payload: str) -> bool:
    return event.WhichOneof("payload") == payload


def _answered(run: CollectedRun) -> list[step_pb2.AgentStep]:
    """The steps whose model has answered: a step that broke off has its text, but no answer."""
    return [step for step in run.steps if step.HasField("llm_response")]


def _told(run: CollectedRun) -> object:
    texts = [(text.invocation_id, text.agent, text.step_index, text.text) for text in run.texts]
    return run.run_id, run.state, run.answer, run.error, run.usage, run.open_requests, texts, run.last_sequence
