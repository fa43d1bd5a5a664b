"""Evaluations under quotas: they wait for those on runs, and begin no further trial without tokens or money."""

from pathlib import Path

import grpc
import pytest
from grpc import aio

from bough import v1
from bough.v1.eval_result_pb2 import VERDICT_NOT_EVALUATED, VERDICT_PASSED
from bough_server import quotas
from tests.evals.job_server import ARRIVED, GATES, begin, case, eval_set, evaluated, evaluating, many
from tests.rpc import run_server
from tests.rpc.test_metrics import desk


@pytest.fixture
def short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluations try again at once when another run holds the place."""
    monkeypatch.setattr(quotas, "CONCURRENT_RUNS_DELAY", 0.01)


@pytest.mark.usefixtures("short_delay")
async def test_an_evaluation_waits_until_its_runs_may_start(tmp_path: Path) -> None:
    tenants = {"local": {"user_quotas": {"concurrent_runs": 1}}}
    async with evaluating(tmp_path, tenants=tenants) as server:
        done = await evaluated(server, eval_set(*many(8)), max_concurrency=4)
        assert {result.verdict for result in done.results().values()} == {VERDICT_PASSED}
        assert len(done.results()) == 8


async def test_an_evaluation_that_waits_for_a_place_can_be_cancelled(tmp_path: Path) -> None:
    tenants = {"local": {"quotas": {"concurrent_runs": 1}}}
    async with evaluating(tmp_path, tenants=tenants) as server:
        holder = run_server.begin(server, "gated", "of quotas")
        await ARRIVED["of quotas"].wait()
        waiting = await begin(server, eval_set(*many(2))).until("case_trial_started")
        await server.trees.CancelEvaluation(v1.CancelEvaluationRequest(evaluation_id=waiting.evaluation_id))
        assert (await waiting.to_the_end()).kinds[-1] == "evaluation_cancelled"
        GATES["of quotas"].set()
        assert (await holder.to_the_end()).events[-1].HasField("run_completed")


async def test_an_evaluation_whose_cost_quota_is_used_up_begins_no_further_trial(tmp_path: Path) -> None:
    # One turn of the desk costs four million billionths.
    tenants = {"local": {"quotas": {"cost_nanos_per_month": 4_000_000}}}
    async with run_server.served(desk(tmp_path, tenants=tenants)) as server:
        cases = [case(f"c{number}", "hi") for number in range(3)]
        made = eval_set(*cases, agent="desk")
        done = await evaluated(server, made, max_concurrency=1)
        assert [done.result(f"c{number}").verdict for number in range(3)] == [
            VERDICT_PASSED,
            VERDICT_NOT_EVALUATED,
            VERDICT_NOT_EVALUATED,
        ]
        assert "Nothing is left of the quota of 4,000,000 billionths of cost a month" in done.result("c1").reason
        assert len(done.having("case_trial_started")) == 1
        with pytest.raises(aio.AioRpcError) as refused:
            await evaluated(server, made)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
