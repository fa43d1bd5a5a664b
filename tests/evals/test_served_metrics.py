"""Custom metrics through a whole server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2
from bough_server.evals.job.dependencies import METRIC_THREADS
from tests.evals import served_metrics
from tests.evals.test_judges import case, evaluated, set_of
from tests.rpc.run_server import Served, served, settings
from tests.rpc.test_metrics import scraped

PASSED = eval_result_pb2.VERDICT_PASSED
FAILED = eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED


def custom(name: str, config_json: str = "") -> eval_set_pb2.EvalMetric:
    return eval_set_pb2.EvalMetric(name=name, custom=eval_set_pb2.CustomMetric(name=name, config_json=config_json))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    made = settings(tmp_path, python=["tests.rpc.agents", "tests.evals.served_metrics"])
    async with served(made) as serving:
        yield serving


async def test_a_metric_of_the_operator_has_its_configuration(server: Served) -> None:
    metrics = [custom("starts_with", '{"text": "Hel"}')]
    found = await evaluated(server, eval_set=set_of(case("Hello"), case("Bye"), metrics=metrics))
    assert [one.verdict for one in found.cases] == [PASSED, FAILED]
    assert found.cases[1].trials[0].scores[0].reason == "of Bye."


async def test_a_metric_that_raises_leaves_its_case_not_scored(server: Served) -> None:
    raising = case("Hello", metrics=[custom("raising")])
    found = await evaluated(server, eval_set=set_of(raising, metrics=[custom("starts_with", '{"text": ""}')]))
    assert found.cases[0].verdict == NOT_EVALUATED
    assert "RuntimeError: no score for Hello" in found.cases[0].reason


async def test_a_metric_that_hangs_does_not_hold_the_evaluation(server: Served) -> None:
    served_metrics.RELEASE.clear()
    try:
        slow = case("Hello", metrics=[custom("hanging")], timeout=Duration(seconds=1))
        quick = case("Bye", metrics=[custom("starts_with", '{"text": "B"}')])
        found = await evaluated(
            server, eval_set=eval_set_pb2.EvalSet(name="s", agent="echo", cases=[slow, quick]), max_concurrency=1
        )
    finally:
        served_metrics.RELEASE.set()
    assert [one.verdict for one in found.cases] == [NOT_EVALUATED, PASSED]
    assert "The metric 'hanging' has not returned within 1 s." in found.cases[0].reason
    assert found.cases[0].trials[0].scores[0].error_reason == error_pb2.ERROR_REASON_METRIC_TIMED_OUT


async def test_metrics_that_hang_in_more_threads_than_there_are_leave_others_to_run(tmp_path: Path) -> None:
    made = settings(
        tmp_path, python=["tests.rpc.agents", "tests.evals.served_metrics"], telemetry={"prometheus_port": 0}
    )
    served_metrics.RELEASE.clear()
    try:
        async with served(made) as server:
            timeout = Duration(seconds=2)  # of the run too
            slow = [case(f"{n}", metrics=[custom("hanging")], timeout=timeout) for n in range(METRIC_THREADS)]
            quick = case("Bye", metrics=[custom("starts_with", '{"text": "B"}')])
            cases = eval_set_pb2.EvalSet(name="s", agent="echo", cases=[*slow, quick])
            found = await evaluated(server, eval_set=cases, max_concurrency=METRIC_THREADS)
            exported = await asyncio.to_thread(scraped, server.app.metrics_address)
    finally:
        served_metrics.RELEASE.set()
    reasons = [one.trials[0].scores[0].error_reason for one in found.cases]
    assert reasons == [error_pb2.ERROR_REASON_METRIC_TIMED_OUT] * METRIC_THREADS + [error_pb2.ERROR_REASON_UNSPECIFIED]
    assert found.cases[-1].verdict == PASSED
    assert exported["bough_evaluation_metrics_hung_total"] == METRIC_THREADS


async def test_a_metric_of_another_project_is_named_and_not_scored(server: Served) -> None:
    other = eval_set_pb2.EvalSet(name="s", agent="echo", cases=[case("Hello", metrics=[custom("trpc.x")])])
    found = await evaluated(server, eval_set=other)
    assert found.verdict == NOT_EVALUATED
    assert "There is no metric 'trpc.x' here." in found.cases[0].reason
