"""ListCaseResults: the cases of an evaluation page by page, with their trees, by verdict, label and id."""

import itertools
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio

from bough.v1 import eval_result_pb2, eval_service_pb2
from tests.evals.job_server import case, case_results, eval_set, evaluated, evaluating, evaluation, many
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED

CASES = eval_set(
    case("good", "hello", answers=["hello"], labels={"area": "sums", "team": "x"}),
    case("bad", "hello", answers=["good bye"], labels={"area": "sums"}),
    case("crashed", "fail", labels={"area": "trees"}),
    case("unmocked", "x", mocks={"run_id": "nowhere"}),
    agent="touchy",
)


async def pages(server: Served, evaluation_id: str, *, page_size: int, **conditions: Any) -> list[list[str]]:
    """The ids of the cases of each page."""
    found: list[list[str]] = []
    token = ""
    while True:
        page = await case_results(server, evaluation_id, page_size=page_size, page_token=token, **conditions)
        found.append([one.case_id for one in page.cases])
        if not (token := page.next_page_token):
            return found


async def refusal(server: Served, evaluation_id: str, **request: Any) -> tuple[grpc.StatusCode, str]:
    """The code and the reason of a refused request."""
    with pytest.raises(aio.AioRpcError) as refused:
        await case_results(server, evaluation_id, **request)
    (info,) = (one for one in status_details(refused.value) if isinstance(one, ErrorInfo))
    return refused.value.code(), info.reason


async def test_cases_are_listed_by_verdict_label_and_id_in_the_order_of_the_set(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        evaluation_id = (await evaluated(server, CASES)).evaluation_id

        async def listed(**conditions: Any) -> list[str]:
            return (await pages(server, evaluation_id, page_size=10, **conditions))[0]

        assert await listed() == ["good", "bad", "crashed", "unmocked"]
        assert await listed(verdicts=[FAILED]) == ["bad", "crashed"]
        assert await listed(verdicts=[NOT_EVALUATED, PASSED]) == ["good", "unmocked"]
        assert await listed(labels={"area": "sums"}) == ["good", "bad"]
        assert await listed(labels={"area": "sums", "team": "x"}) == ["good"]
        assert await listed(case_ids=["unmocked", "no-such-case", "good"]) == ["good", "unmocked"]
        assert await listed(verdicts=[FAILED], labels={"area": "sums"}, case_ids=["bad", "crashed"]) == ["bad"]
        assert await listed(case_ids=["no-such-case"]) == []


async def test_pages_end_where_no_further_case_meets_the_filter(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        evaluation_id = (await evaluated(server, CASES)).evaluation_id
        assert await pages(server, evaluation_id, page_size=1, verdicts=[FAILED]) == [["bad"], ["crashed"]]
        assert await pages(server, evaluation_id, page_size=2) == [["good", "bad"], ["crashed", "unmocked"]]
        assert await pages(server, evaluation_id, page_size=3) == [["good", "bad", "crashed"], ["unmocked"]]


async def test_a_page_has_fifty_cases_if_the_request_does_not_say_and_a_thousand_at_most(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        evaluation_id = (await evaluated(server, eval_set(*many(60)))).evaluation_id
        names = [f"c{number}" for number in range(60)]
        assert await pages(server, evaluation_id, page_size=0) == [names[:50], names[50:]]
        assert await pages(server, evaluation_id, page_size=2**31 - 1) == [names]


async def test_a_page_of_cases_has_their_trees_and_the_pages_are_the_result(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        log = await evaluated(server, eval_set(*many(7)))
        whole = await evaluation(server, log.evaluation_id)
        first = await case_results(server, log.evaluation_id, page_size=3)
        rest = await case_results(server, log.evaluation_id, page_size=9, page_token=first.next_page_token)
    seen = [*first.cases, *rest.cases]
    assert seen == list(whole.result.cases)
    assert [one.trials[0] for one in seen] == [log.result(f"c{number}") for number in range(7)]
    assert all(one.trials[0].turns[0].agents for one in seen)


async def test_a_token_is_of_one_evaluation_and_one_filter(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        one, other = [(await evaluated(server, CASES)).evaluation_id for _ in range(2)]
        whole: dict[str, Any] = {}
        failed: dict[str, Any] = {"verdicts": [FAILED]}
        tokens = {
            (evaluation_id, number): (
                await case_results(server, evaluation_id, page_size=1, **conditions)
            ).next_page_token
            for evaluation_id, (number, conditions) in itertools.product([one, other], enumerate((whole, failed)))
        }
        evaluations = await server.trees.ListEvaluations(eval_service_pb2.ListEvaluationsRequest(page_size=1))
        wrong = [tokens[one, 1], tokens[other, 0], evaluations.next_page_token, "nonsense", tokens[one, 0][:-4]]
        assert all(wrong)
        for token in wrong:
            found = await refusal(server, one, page_token=token, **whole)
            assert found == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PAGE_TOKEN"), token
        for token, conditions in ((tokens[one, 0], whole), (tokens[one, 1], failed)):
            assert (await case_results(server, one, page_token=token, **conditions)).cases


async def test_what_is_no_evaluation_and_no_filter_is_refused(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        evaluation_id = (await evaluated(server, eval_set(*many(1)))).evaluation_id
        assert await refusal(server, "no-such-evaluation") == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
        for wrong in ({"page_size": -1}, {"verdicts": [99]}, {"labels": {"a b": "c"}}, {"case_ids": ["x" * 257]}):
            code, _ = await refusal(server, evaluation_id, **wrong)
            assert code == grpc.StatusCode.INVALID_ARGUMENT, wrong
