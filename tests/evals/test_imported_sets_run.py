"""Sets of other projects, imported and run on a whole server, and their results exported."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough.v1 import eval_result_pb2
from bough_server.evals.importers.trpc_result import trpc_result
from tests.evals.test_judges import evaluated
from tests.evals.trpc_files import import_paths
from tests.rpc.run_server import Served, served, settings

SAMPLES = Path(__file__).parents[1] / "golden" / "imports"
PASSED = eval_result_pb2.VERDICT_PASSED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(settings(tmp_path, python=["tests.evals.imported_agents"])) as serving:
        yield serving


async def test_a_set_of_trpc_agent_go_passes_where_the_calls_are_right_in_any_order(server: Served) -> None:
    imported, _ = import_paths([SAMPLES / "tooltrajectory-basic.evalset.json"])
    found = await evaluated(server, eval_set=imported, agent="travel")
    exported = trpc_result(found)
    assert (found.verdict, [case.verdict for case in found.cases]) == (PASSED, [PASSED])
    (result,) = json.loads(json.dumps(exported))["evalCaseResults"]
    assert (result["evalId"], result["finalEvalStatus"]) == ("travel_alerts", "passed")
    assert result["overallEvalMetricResults"][0]["metricName"] == "tool_trajectory_avg_score"


async def test_a_recorded_set_of_trpc_agent_go_is_scored_without_an_agent(server: Served) -> None:
    imported, _ = import_paths([SAMPLES / "trace-basic.evalset.json"])
    found = await evaluated(server, eval_set=imported)
    assert found.verdict == PASSED
    assert found.cases[0].trials[0].turns[0].run_id == ""


async def test_a_set_of_adk_is_not_scored_by_a_metric_that_has_no_counterpart(server: Served, tmp_path: Path) -> None:
    imported, said = import_paths([SAMPLES / "elicitation_flow.test.json"])
    unjudged = await evaluated(server, eval_set=imported, agent="booking")
    folder = tmp_path / "with-criteria"
    folder.mkdir()
    shutil.copy(SAMPLES / "elicitation_flow.test.json", folder)
    (folder / "test_config.json").write_text('{"criteria": {"tool_trajectory_avg_score": 1.0}}')
    chosen, _ = import_paths([folder / "elicitation_flow.test.json"])
    judged = await evaluated(server, eval_set=chosen, agent="booking")
    assert any("response_match_score" in sentence for sentence in said)
    assert unjudged.verdict == NOT_EVALUATED
    assert "adk.response_match_score" in unjudged.cases[0].reason
    assert (judged.verdict, len(judged.cases[0].trials[0].turns)) == (PASSED, 2)
