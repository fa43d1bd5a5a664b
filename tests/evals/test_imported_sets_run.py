"""Sets of other projects, imported and run on a whole server, and their results exported."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough.v1 import eval_result_pb2
from bough_server.evals.importers.trpc_result import trpc_result
from bough_server.evals.importers.values import JsonValue
from tests.evals.test_judges import evaluated
from tests.evals.trpc_files import import_paths, import_values, members_of, trpc_case, trpc_set, turn
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


async def test_a_set_of_adk_is_scored_by_its_calls_and_words(server: Served) -> None:
    imported, _ = import_paths([SAMPLES / "elicitation_flow.test.json"])
    found = await evaluated(server, eval_set=imported, agent="booking")
    trial = found.cases[0].trials[0]
    assert (found.verdict, len(trial.turns)) == (PASSED, 2)
    assert [(score.name, score.score) for score in trial.scores] == [
        ("tool_trajectory_avg_score", 1.0),
        ("response_match_score", 1.0),
    ]


async def test_a_set_of_adk_is_not_scored_by_a_metric_that_has_no_counterpart(server: Served, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "elicitation_flow.test.json", tmp_path)
    (tmp_path / "test_config.json").write_text('{"criteria": {"safety_v1": 0.8}}')
    imported, said = import_paths([tmp_path / "elicitation_flow.test.json"])
    found = await evaluated(server, eval_set=imported, agent="booking")
    assert any("safety_v1" in sentence for sentence in said)
    assert found.verdict == NOT_EVALUATED
    assert "adk.safety_v1" in found.cases[0].reason


async def test_a_mock_of_trpc_agent_go_answers_the_call_of_a_tool_that_is_not_run(server: Served) -> None:
    mocks: JsonValue = {"actual": [{"name": "get_weather", "result": {"mocked": True}}]}
    case = trpc_case({**members_of(turn(user="Mind what?")), "toolMock": mocks})
    imported, _ = import_values(trpc_set(case), path=Path("a.evalset.json"))
    found = await evaluated(server, eval_set=imported, agent="travel")
    calls = [call for agent in found.cases[0].trials[0].turns[0].agents for call in agent.calls]
    assert [call.result_json for call in calls if call.name == "get_weather"] == ['{"mocked":true}']
    assert {call.name for call in calls} == {"get_weather", "get_news", "get_time", "get_ticket"}
