"""Pages of evaluations: newest first, by every filter, and read through the indexes that hold no runs."""

import pytest

from bough.v1 import execution_pb2
from bough_server.errors import InvalidRequest
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.evaluations import EvaluationFilter
from bough_server.store.ports.runs import Page, RunFilter
from tests.store.evaluation_logs import MadeEvaluation, passed
from tests.store.logs import ALL, ANNE, BERT, Made
from tests.store.sql import plans_of, seen_statements

RUNNING, SUCCEEDED = execution_pb2.EXECUTION_STATE_RUNNING, execution_pb2.EXECUTION_STATE_SUCCEEDED


@pytest.fixture
async def made(store: Store) -> list[str]:
    """The ids of seven evaluations, oldest first; each second one has ended. There are runs of the same agents too."""
    evaluations = [
        MadeEvaluation(
            number=number,
            eval_set_name="desk" if number < 4 else "team",
            agent="lead" if number % 3 else "writer",
            labels={"odd": "yes"} if number % 2 else {},
        )
        for number in range(1, 8)
    ]
    for one in evaluations:
        await store.log.create(Made(number=one.number, agent=one.agent, labels=one.labels).new())
        await store.log.create_evaluation(one.new())
        if one.number % 2:
            await store.log.append(one.evaluation_id, epoch=1, log_events=one.next(passed()))
    await store.log.create_evaluation(MadeEvaluation(number=8, principal=BERT).new())
    return [one.evaluation_id for one in evaluations]


async def _found(store: Store, evaluation_filter: EvaluationFilter, *, size: int = 2) -> list[str]:
    found: list[str] = []
    token, is_first = "", True
    while token or is_first:
        page = Page(size=size, token=token)
        shown, token = await store.evaluations.list(ANNE, evaluation_filter, page)
        found += [evaluation.evaluation_id for evaluation in shown]
        is_first = False
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
async def test_evaluations_come_newest_first_over_pages_of_any_size(store: Store, made: list[str], size: int) -> None:
    assert await _found(store, EvaluationFilter(), size=size) == made[::-1]


@pytest.mark.parametrize(
    ("evaluation_filter", "numbers"),
    [
        (EvaluationFilter(eval_set_name="desk"), [3, 2, 1]),
        (EvaluationFilter(eval_set_name="absent"), []),
        (EvaluationFilter(agent="writer"), [6, 3]),
        (EvaluationFilter(states=[RUNNING]), [6, 4, 2]),
        (EvaluationFilter(states=[RUNNING, SUCCEEDED], eval_set_name="team"), [7, 6, 5, 4]),
        (EvaluationFilter(labels={"odd": "yes"}), [7, 5, 3, 1]),
        (EvaluationFilter(labels={"odd": "yes"}, agent="writer", eval_set_name="desk", states=[SUCCEEDED]), [3]),
    ],
)
async def test_every_filter_that_is_set_must_match(
    store: Store, made: list[str], evaluation_filter: EvaluationFilter, numbers: list[int]
) -> None:
    assert await _found(store, evaluation_filter) == [made[number - 1] for number in numbers]


async def test_open_evaluations_are_those_of_every_tenant_oldest_first(store: Store, made: list[str]) -> None:
    found = [record.evaluation.evaluation_id for record in await store.evaluations.open_evaluations()]
    assert found == [made[1], made[3], made[5], MadeEvaluation(number=8).evaluation_id]


async def test_a_token_belongs_to_its_list(store: Store, made: list[str]) -> None:
    _, token = await store.evaluations.list(ANNE, EvaluationFilter(), Page(size=1))
    with pytest.raises(InvalidRequest):
        await store.evaluations.list(ANNE, EvaluationFilter(eval_set_name="desk"), Page(size=1, token=token))
    with pytest.raises(InvalidRequest):
        await store.runs.list(ANNE, RunFilter(), Page(size=1, token=token))


async def test_no_list_of_evaluations_reads_the_rows_of_runs(file_url: str) -> None:
    states = [RUNNING, SUCCEEDED]
    used = [
        (EvaluationFilter(), "evaluations_newest_first"),
        (EvaluationFilter(agent="lead", states=states), "evaluations_newest_first"),
        (EvaluationFilter(eval_set_name="desk", agent="lead", states=states), "evaluations_of_set"),
    ]
    async with open_store(file_url, durability="process") as store:
        with seen_statements() as seen:
            for evaluation_filter, _ in used:
                await store.evaluations.list(ALL, evaluation_filter, Page(size=10))
            for evaluation_filter, _ in used:
                await store.evaluations.list(ANNE, evaluation_filter, Page(size=10))
            of_one = RunFilter(evaluation_id="e1", session_id="s1", agent="lead", states=states)
            await store.runs.list(ANNE, of_one, Page(size=10))
            await store.evaluations.find_request(ANNE, "ask")
            await store.runs.find_request(ANNE, "ask")
    expected = [
        *(index for _, index in used),
        *["evaluations_of_user"] * len(used),
        "runs_of_evaluation",
        "runs_by_request",
        "runs_by_request",
    ]
    plans = plans_of(file_url, [each for each in seen if each[0].startswith("SELECT")])
    for index, plan in zip(expected, plans, strict=True):
        searched = {step for step in plan if step.startswith(("SEARCH runs", "SCAN runs"))}
        assert searched, plan
        assert all(f"INDEX {index} " in step or "run_id=?" in step for step in searched), plan
    assert all("kind=? AND request_id=?" in plan[0] for plan in plans[-2:]), plans[-2:]
