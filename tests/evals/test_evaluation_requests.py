"""Requests for evaluations that are refused before anything is written, and large ones, over a real socket."""

import asyncio
import json
import time
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import aio

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    eval_result_pb2,
    eval_service_pb2,
    eval_set_pb2,
    execution_pb2,
    run_pb2,
)
from tests.evals.job_server import (
    ARRIVED,
    GATES,
    begin,
    case,
    check_log,
    eval_set,
    evaluated,
    evaluation,
    many,
    watch,
)
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served

MIB = 1024 * 1024
UNHEARD = {"custom": {"name": "unheard"}}
INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


async def refusal(server: Served, made: eval_set_pb2.EvalSet, **fields: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    """The code and the reason of a refused request, and the fields that it names; nothing is written."""
    with pytest.raises(aio.AioRpcError) as refused:
        await evaluated(server, made, **fields)
    details = status_details(refused.value)
    (info,) = (one for one in details if isinstance(one, ErrorInfo))
    named = [one.field for each in details if isinstance(each, BadRequest) for one in each.field_violations]
    await nothing_written(server)
    return refused.value.code(), info.reason, named


async def violations_of(server: Served, made: eval_set_pb2.EvalSet, **fields: Any) -> list[tuple[str, str]]:
    """The fields that a refused request names, and what is wrong with each."""
    with pytest.raises(aio.AioRpcError) as refused:
        await evaluated(server, made, **fields)
    details = [one for one in status_details(refused.value) if isinstance(one, BadRequest)]
    return [(one.field, one.description) for each in details for one in each.field_violations]


async def nothing_written(server: Served) -> None:
    """Check that the store is empty."""
    assert not (await server.trees.ListEvaluations(eval_service_pb2.ListEvaluationsRequest())).evaluations
    everything = agent_service_pb2.ListRunsRequest(filter=run_pb2.RunFilter(include_evaluation_runs=True))
    assert not (await server.agents.ListRuns(everything)).runs


def nested(depth: int) -> eval_set_pb2.EvalSet:
    """A set that expects a tree so deep."""
    made = eval_set(case("deep", "hello"))
    agent = made.cases[0].turns[0].expect.agents.add(name="echo")
    for _ in range(depth - 1):
        agent = agent.children.add(name="echo")
    return made


@pytest.mark.parametrize(
    ("made", "fields", "named"),
    [
        (eval_set_pb2.EvalSet(), {}, ["eval_set.cases", "eval_set.name"]),
        (eval_set(), {}, ["eval_set.cases"]),
        (eval_set(case("a", "x"), case("a", "y")), {}, ["eval_set.cases[1].id"]),
        (eval_set(case("a", "x"), agent=""), {}, ["eval_set.agent"]),
        (eval_set(case("", "x")), {}, ["eval_set.cases[0].id"]),
        (eval_set(case("a")), {}, ["eval_set.cases[0].turns"]),
        (eval_set(case("a", "x"), name="no name"), {}, ["eval_set.name"]),
        (eval_set(case("a", "x", trials=1001)), {}, ["eval_set.cases[0].trials"]),
        (
            eval_set(case("a", "x", metrics=[{"custom": {"name": "unheard"}}])),
            {},
            ["eval_set.cases[0].metrics[0].custom.name"],
        ),
        (eval_set(case("a", "x", metrics=[{"name": "kindless"}])), {}, ["eval_set.cases[0].metrics[0].kind"]),
        (eval_set(case("a", "x" * (2 * MIB + 1))), {}, ["eval_set.cases[0]", "eval_set.cases[0].turns[0].user"]),
        (eval_set(case("a", "x", timeout="0s")), {}, ["eval_set.cases[0].timeout"]),
        (eval_set(case("a", "x", labels={"bad key": "x"})), {}, ['eval_set.cases[0].labels["bad key"]']),
        (
            eval_set(case("a", "x", metrics=[{"budget": {"agent": "nobody", "errors": 0}}])),
            {},
            ["eval_set.cases[0].metrics[0].budget.agent"],
        ),
        (
            eval_set(case("a", "x", mocks={"agents": [{"agent": "slow", "text": "never"}]}), agent="slow"),
            {},
            ["eval_set.cases[0].mocks.agents[0].agent"],
        ),
        (eval_set(case("a", "x")), {"gates": ["pass_rate >= 0.5", "nonsense"]}, ["gates[1]"]),
        (eval_set(case("a", "x")), {"gates": ["case.pass_rate.lower >= 0.8"], "trials": 5}, ["gates[0]"]),
        (eval_set(case("a", "x")), {"gates": ["regressions == 0"]}, ["gates[0]"]),
        (eval_set(case("a", "x")), {"labels": {"bough/x": "y"}}, ['labels["bough/x"]']),
        (eval_set(case("a", "x")), {"request_id": "bough/turn/x"}, ["request_id"]),
        (eval_set(case("a", "x")), {"max_concurrency": 65}, ["max_concurrency"]),
        (eval_set(case("a", "x")), {"budget": {"depth": 3, "tokens": 5}}, ["budget.depth"]),
        (eval_set(case("a", "x")), {"trials": 0}, ["trials"]),
        (eval_set(case("a", "x")), {"baseline": eval_result_pb2.EvalSource()}, ["baseline.source"]),
        (
            eval_set(case("a", "x")),
            {"baseline": {"result": {"state": "EXECUTION_STATE_SUCCEEDED"}}, "gates": ["regressions == 0"]},
            ["baseline.result.cases"],
        ),
        (
            eval_set(case("a", "x")),
            {
                "baseline": {
                    "result": {
                        "state": "EXECUTION_STATE_SUCCEEDED",
                        "totals": {"cases": 2},
                        "cases": [{"case_id": "one of two"}],
                    }
                }
            },
            ["baseline.result.cases"],
        ),
        (
            eval_set(case("a", "x")),
            {
                "baseline": {
                    "result": {"eval_set_name": "b", "state": "EXECUTION_STATE_SUCCEEDED", "cases": [{"case_id": "b"}]}
                }
            },
            ["baseline"],
        ),
        (
            eval_set({"id": "a", "turns": [{"recorded": {"run": {"run_id": "x" * 65, "as_of_sequence": -5}}}]}),
            {},
            [f"eval_set.cases[0].turns[0].recorded.run.{name}" for name in ("run_id", "as_of_sequence")],
        ),
        (eval_set(case("a", "x")), {"baseline": {"evaluation_id": "x" * 65}}, ["baseline.evaluation_id"]),
    ],
)
async def test_a_request_that_cannot_be_evaluated_is_refused_and_nothing_is_written(
    server: Served, made: eval_set_pb2.EvalSet, fields: dict[str, Any], named: list[str]
) -> None:
    code, reason, found = await refusal(server, made, **fields)
    assert (code, reason) == (INVALID, "INVALID_REQUEST")
    assert set(named) <= set(found), found
    assert len(found) == len(set(found)), found


async def test_what_every_case_would_repeat_is_bounded(server: Served) -> None:
    large = {"metrics": [{"custom": {"name": "x", "config_json": json.dumps({"a": "b" * 300_000})}}]}
    assert "eval_set.defaults" in (await refusal(server, eval_set(case("a", "x"), defaults=large)))[2]
    medium = {"metrics": [{"custom": {"name": "x", "config_json": json.dumps({"a": "b" * 200_000})}}]}
    assert "eval_set.defaults" in (await refusal(server, eval_set(*many(400), defaults=medium)))[2]
    mine = agent_pb2.AgentDefinition(name="mine", description="Echoes.", sequence=agent_pb2.SequenceAgent())
    mine.sub_agents.add(agent="echo")
    definitions = [agent_pb2.AgentDefinition(name=f"m{n}", description="x" * 60_000) for n in range(20)]
    assert (await refusal(server, eval_set(case("a", "x")), definitions=[mine, *definitions]))[2] == ["definitions"]


async def test_what_a_request_names_has_to_be_there(server: Served) -> None:
    made = eval_set(case("a", "x"))
    assert await refusal(server, made, agent="unheard") == (MISSING, "UNKNOWN_AGENT", [])
    assert await refusal(server, eval_set(case("a", "x"), agent="unheard")) == (MISSING, "UNKNOWN_AGENT", [])
    baseline = eval_result_pb2.EvalSource(evaluation_id="unheard")
    assert (await refusal(server, made, baseline=baseline))[0] == MISSING


async def test_a_request_without_a_set_is_refused(server: Served) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        async for _ in server.trees.Evaluate(eval_service_pb2.EvaluateRequest()):
            pass
    assert refused.value.code() == INVALID
    await nothing_written(server)


async def test_mistakes_in_definitions_are_named_by_their_paths(server: Served) -> None:
    wrong = agent_pb2.AgentDefinition(name="wrong", llm=agent_pb2.LlmAgent(model="unheard"))
    code, _, named = await refusal(server, eval_set(case("a", "x"), agent="wrong"), definitions=[wrong])
    assert code == INVALID
    assert named
    assert all(field.startswith("definitions[0]") for field in named), named


async def test_definitions_of_a_request_are_evaluated(server: Served) -> None:
    mine = agent_pb2.AgentDefinition(
        name="mine",
        description="Echoes.",
        sequence=agent_pb2.SequenceAgent(),
        sub_agents=[agent_pb2.AgentLink(agent="echo")],
    )
    log = await evaluated(server, eval_set(case("a", "hello", answers=["hello"]), agent="mine"), definitions=[mine])
    check_log(log.events)
    assert log.having("evaluation_completed")[0].verdict == eval_result_pb2.VERDICT_PASSED, log.results()


async def test_an_evaluation_that_has_not_ended_is_no_baseline_and_neither_compared_nor_deleted(server: Served) -> None:
    log = await begin(server, eval_set(case("a", "unended"), agent="gated")).until("case_trial_started")
    await asyncio.wait_for(ARRIVED["unended"].wait(), 30)
    running = eval_result_pb2.EvalSource(evaluation_id=log.evaluation_id)
    ended = eval_result_pb2.EvalSource(result=eval_result_pb2.EvalResult(state=execution_pb2.EXECUTION_STATE_SUCCEEDED))
    trees, pb = server.trees, eval_service_pb2
    calls = {
        "evaluation_id": trees.DeleteEvaluation(pb.DeleteEvaluationRequest(evaluation_id=log.evaluation_id)),
        "baseline.evaluation_id": evaluated(server, eval_set(case("a", "x")), baseline=running),
        "candidate.evaluation_id": trees.CompareEvaluations(
            pb.CompareEvaluationsRequest(baseline=ended, candidate=running)
        ),
    }
    for field, call in calls.items():
        with pytest.raises(aio.AioRpcError) as refused:
            await call
        info, bad = status_details(refused.value)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (info.reason, info.metadata) == ("EVALUATION_NOT_ENDED", {"evaluation_id": log.evaluation_id})
        (violation,) = bad.field_violations
        assert (violation.field, violation.reason) == (field, "EVALUATION_NOT_ENDED")
        assert violation.description == refused.value.details()
    GATES["unended"].set()
    await log.to_the_end()


@pytest.mark.parametrize("depth", [20, 64])
async def test_a_deep_expectation_is_scored(server: Served, depth: int) -> None:
    log = await evaluated(server, nested(depth))
    check_log(log.events)
    assert log.result("deep").verdict == eval_result_pb2.VERDICT_FAILED
    found = await evaluation(server, log.evaluation_id)
    assert found.result.cases[0].turns


@pytest.mark.parametrize("depth", [65, 90, 95])
async def test_an_expected_tree_with_too_many_levels_is_refused(server: Served, depth: int) -> None:
    code, _, named = await refusal(server, nested(depth))
    assert code == INVALID
    assert len(named) == 1
    assert named[0].startswith("eval_set.cases[0].turns[0].expect.agents[0].children[0].children[0]")


def field_of(number: int, data: bytes) -> bytes:
    """A field of bytes on the wire."""
    length, rest = b"", len(data)
    while rest > 0x7F:
        length, rest = length + bytes([rest & 0x7F | 0x80]), rest >> 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + data


@pytest.mark.parametrize("depth", [120, 10_000])
async def test_an_expected_tree_that_no_parser_reads_is_refused(server: Served, depth: int) -> None:
    agent = field_of(1, b"a")
    for _ in range(depth):
        agent = field_of(1, b"a") + field_of(4, agent)
    turn = field_of(1, b"hello") + field_of(3, field_of(3, agent))
    one = field_of(1, b"one") + field_of(4, turn)
    request = field_of(2, field_of(1, b"set") + field_of(3, b"echo") + field_of(5, one))
    evaluate: Any = server.channel.unary_stream("/bough.v1.EvalService/Evaluate")
    with pytest.raises(aio.AioRpcError) as refused:
        await evaluate(request).read()
    assert refused.value.code() == INVALID
    await nothing_written(server)


async def test_a_set_over_eight_mebibytes_is_refused(server: Served) -> None:
    cases = [case(f"c{number}", "x" * 500_000) for number in range(18)]
    assert (await refusal(server, eval_set(*cases)))[0] == INVALID


async def test_ten_thousand_cases_are_planned_and_more_are_refused(server: Served) -> None:
    cases = [{"id": f"c{number}", "turns": [{"user": "ten thousand"}]} for number in range(10_001)]
    made = json_format.ParseDict({"name": "large", "agent": "gated", "cases": cases}, eval_set_pb2.EvalSet())
    code, _, named = await refusal(server, made)
    assert (code, named) == (INVALID, ["eval_set.cases"])
    del made.cases[-1]
    log = await begin(server, made).until("case_trial_started")
    assert log.kinds.count("case_planned") == 10_000
    await server.trees.CancelEvaluation(eval_service_pb2.CancelEvaluationRequest(evaluation_id=log.evaluation_id))
    await log.to_the_end()
    assert log.kinds[-1] == "evaluation_cancelled"
    found = await evaluation(server, log.evaluation_id)
    assert len(found.result.cases) == 10_000
    assert found.result.totals.cases_not_evaluated == 0
    assert {case.verdict for case in found.result.cases} == {eval_result_pb2.VERDICT_UNSPECIFIED}
    assert (await watch(server, log.evaluation_id).to_the_end()).events == log.events


async def test_a_set_of_eight_mebibytes_does_not_block_the_server(server: Served) -> None:
    """Other calls are answered while a large set is checked and planned; the watchdog's bound is a second.

    What counts is the time that the event loop's thread computes in one go: other programs may slow it down.
    """
    cases = [case(f"c{number}", "x" * 400 + "y" * 400, answers=["z"]) for number in range(9_000)]
    made = eval_set(*cases, agent="gated")
    assert 7 * MIB < made.ByteSize() < 8 * MIB
    longest, is_over = 0.0, False

    async def probe() -> None:
        nonlocal longest
        while not is_over:
            began = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - began)

    probing = asyncio.create_task(probe())
    log = await begin(server, made, max_concurrency=1).until("case_trial_started")
    is_over = True
    await probing
    await server.trees.CancelEvaluation(eval_service_pb2.CancelEvaluationRequest(evaluation_id=log.evaluation_id))
    await log.to_the_end()
    assert longest < 1.0


async def test_a_case_with_thousands_of_long_reasons_is_a_page_that_clients_can_receive(server: Served) -> None:
    made = eval_set(case("a", "said " * 30))
    for number in range(64):
        metric = made.cases[0].metrics.add(name=f"m{number}")
        metric.final_response.answer.exact = "expected " * 30
    log = await evaluated(server, made, trials=150, max_concurrency=16)
    found = await evaluation(server, log.evaluation_id)
    (one,) = found.result.cases
    assert found.ByteSize() < 4 * 1024 * 1024
    assert [run.trial for run in one.trials] == list(range(150))
    assert {run.verdict for run in one.trials} == {eval_result_pb2.VERDICT_FAILED}
    assert len(one.trials[0].scores) == len(one.metrics) == 64
    assert len(one.trials[0].turns[0].agents) == 1
    assert not one.trials[-1].scores
    assert {metric.mean for metric in one.metrics} == {0}
    assert one.statistics.trials == found.result.totals.trials_ended == 150
