"""A call that has to be made, on the wire: how both APIs are asked for it, and how the embedded model is made to."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from bough.v1 import error_pb2, model_pb2
from bough_server.models.local.engine import find_problem
from bough_server.models.local.model import LocalModel
from bough_server.models.model import ToolSpec
from bough_server.tools.builtin import PLAN_SPEC, RESPOND_SPEC
from tests.support.composite_agents import plan_execute
from tests.support.log_readings import check_replay, having
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, tool_result, user
from tests.support.run_harness import open_harness
from tests.support.teams import llm


class Only:
    """A configuration with one model, whatever it is called."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    def get(self, name: str) -> LocalModel:
        """The model."""
        return self._model

    def list(self) -> list[model_pb2.ModelInfo]:
        """The one model."""
        return [model_pb2.ModelInfo(name="default", provider="local", model=self._model.model)]


IS_HERE = pytest.mark.skipif(find_problem() is not None, reason=f"THE EMBEDDED MODEL IS NOT TESTED: {find_problem()}")
REFUSED = call("c1", "plan", '{"steps": []}')


@pytest.fixture(scope="module")
async def embedded() -> AsyncIterator[LocalModel]:
    """The embedded model, started by the first test that asks it."""
    model = LocalModel(name="local")
    yield model
    await model.close()


@IS_HERE
@pytest.mark.parametrize("tools", [[PLAN_SPEC], [PLAN_SPEC, RESPOND_SPEC], [LOOKUP, PLAN_SPEC]])
@pytest.mark.parametrize("was_refused", [False, True])
async def test_the_embedded_model_plans_where_it_has_to(
    embedded: LocalModel, tools: list[ToolSpec], was_refused: bool
) -> None:
    before = [assistant("", REFUSED), tool_result(REFUSED, "Error: too few steps")] if was_refused else []
    asked = asking(user("Paint the house red."), *before, instruction="Plan it.", tools=tools)
    _, response = await answer(embedded, replace(asked, tool_choice="required"))
    (made,) = [part.tool_call for part in response.message.parts]
    schema = {tool.name: tool.input_schema_json for tool in tools}[made.name]
    jsonschema.validate(json.loads(made.arguments_json), json.loads(schema))


@IS_HERE
async def test_a_plan_is_made_and_carried_out_by_the_embedded_model(embedded: LocalModel, tmp_path: Path) -> None:
    team = [plan_execute("lead", rounds=1), *(llm(name) for name in ("planner", "executor", "replanner"))]
    async with open_harness(tmp_path, models=Only(embedded), definitions=team) as harness:
        log = await harness.turn("lead", "Paint the house red.")
        await check_replay(harness, log)
    (made,) = having(log, "plan_made")
    assert len(made.plan_made.items) > 0
    assert len([event for event in having(log, "sub_agent_completed") if event.agent == "executor"]) > 0
    failed = log[-1].run_failed.error.reason if log[-1].HasField("run_failed") else None
    assert failed in (None, error_pb2.ERROR_REASON_LIMIT_EXCEEDED), "it answers, or plans to the end"
