"""Cases with a failed trial that run again, beside what the baseline ran with, over a real socket."""

import asyncio
import sys
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bough.v1 import agent_service_pb2, eval_result_pb2, eval_service_pb2, eval_set_pb2, execution_pb2
from tests.evals.job_server import (
    ARRIVED,
    GATES,
    begin,
    case,
    check_log,
    eval_set,
    evaluated,
    evaluating,
    evaluation,
    front,
    many,
    runs_of,
    watch,
)
from tests.evals.test_evaluation_ends import cancel
from tests.evals.test_evaluation_requests import violations_of
from tests.rpc.run_server import Served

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
OWN, BASELINE = eval_result_pb2.TRIAL_PURPOSE_RERUN, eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN


CODED = """
from bough_server import agent

@agent(description="Answers alike.")
async def coded(ctx, input):
    return "{answer}"
"""


WAITING = """
from bough_server import agent
from tests.evals.job_server import CALLED, wait_at_gate

@agent(description="Answers three times, and then waits.")
async def coded(ctx, input):
    name = input.parts[0].text

    async def count():
        CALLED[name] += 1
        return CALLED[name]

    if await ctx.step("count", count) > 3:
        await ctx.step("wait", lambda: wait_at_gate(name))
    return "done"
"""


def asking(*names: str, trials: int = 2) -> eval_set_pb2.EvalSet:
    """A set whose cases expect back what they say."""
    return eval_set(*(case(name, name, answers=[name], trials=trials) for name in names), agent="front")


async def baseline_of(server: Served, made: eval_set_pb2.EvalSet, behind: str = "echo") -> eval_result_pb2.EvalSource:
    """The result of the set with an agent that hands on to another one, by its id."""
    log = await evaluated(server, made, definitions=[front(behind)])
    return eval_result_pb2.EvalSource(evaluation_id=log.evaluation_id)


async def test_a_suspect_runs_again_beside_what_the_baseline_ran_with(server: Served) -> None:
    baseline = await baseline_of(server, asking("no", "yes"))
    log = await evaluated(
        server,
        asking("no", "yes"),
        definitions=[front("gruff")],
        baseline=baseline,
        rerun_suspects=3,
        gates=["regressions == 0"],
    )
    check_log(log.events)
    assert log.verdict == FAILED, "always no is a regression"
    (planned,) = log.having("suspects_planned")
    assert (list(planned.suspects.case_ids), planned.suspects.trials) == (["yes"], 3)
    assert [(trial, one.purpose, one.verdict) for (_, trial), one in sorted(log.results().items()) if trial > 1] == [
        *((trial, OWN, FAILED) for trial in (2, 3, 4)),
        *((trial, BASELINE, PASSED) for trial in (5, 6, 7)),
    ]
    found = (await evaluation(server, log.evaluation_id)).result
    before = (await evaluation(server, baseline.evaluation_id)).result
    assert found.suspects.baseline_pins == before.pins != found.pins
    assert (found.totals.trials, found.totals.trials_ended, found.totals.trials_passed) == (4, 4, 2)
    assert (found.totals.reruns, found.totals.reruns_ended, found.totals.pass_rate) == (6, 6, 0.5)
    suspect = found.cases[1]
    assert (len(suspect.trials), len(suspect.reruns), suspect.statistics.trials) == (2, 6, 2)
    assert suspect.reruns[5].turns[0].answer == "yes", "the trees of fresh trials are there too"
    assert log.having("evaluation_totaled")[0].gates[0].reason == (
        "regressions is 1, not == 0. 0 of 3 trials of 1 case passed, 3 of 3 in the baseline (p = 0.05). Worse: 'yes'."
    )
    compared = await server.trees.CompareEvaluations(
        eval_service_pb2.CompareEvaluationsRequest(
            baseline=baseline, candidate=eval_result_pb2.EvalSource(evaluation_id=log.evaluation_id)
        )
    )
    assert compared.comparison.regressions == 1
    assert len(await runs_of(server, log.evaluation_id)) == 10


async def test_a_baseline_whose_definitions_are_not_stored_stays_as_it_is_and_the_result_says_why(
    server: Served,
) -> None:
    made = asking("no", "yes", trials=5)
    before = (await evaluation(server, (await baseline_of(server, made)).evaluation_id)).result
    before.pins.agents["front"] = "sha256:" + "0" * 64
    log = await evaluated(
        server,
        made,
        definitions=[front("gruff")],
        baseline=eval_result_pb2.EvalSource(result=before),
        rerun_suspects=2,
        gates=["regressions == 0"],
    )
    check_log(log.events)
    assert log.verdict == FAILED
    (planned,) = log.having("suspects_planned")
    assert not planned.suspects.HasField("baseline_pins")
    assert planned.suspects.baseline_not_rerun_reason == (
        "The agent 'front' of the baseline cannot run here: There is no agent 'front'. "
        "CatalogService.ListAgents lists all agents."
    )
    assert Counter(one.purpose for one in log.results().values()) == {0: 10, OWN: 2}


async def test_a_baseline_of_other_python_code_does_not_run_again_although_its_pins_are_the_same(
    tmp_path: Path,
) -> None:
    made = eval_set(case("a", "hello", answers=["right"], trials=5), agent="coded")

    def serve(answer: str) -> AbstractAsyncContextManager[Served]:
        sys.modules.pop("coded_desk", None)
        (tmp_path / "coded_desk.py").write_text(CODED.format(answer=answer))
        return evaluating(tmp_path, python=["coded_desk"], base=tmp_path)

    async with serve("right") as server:
        baseline = eval_result_pb2.EvalSource(evaluation_id=(await evaluated(server, made)).evaluation_id)
    async with serve("quite wrong") as server:
        log = await evaluated(server, made, baseline=baseline, rerun_suspects=3, gates=["regressions == 0"])
        before, after = [
            (await evaluation(server, each)).result for each in (baseline.evaluation_id, log.evaluation_id)
        ]
        compared = await server.trees.CompareEvaluations(
            eval_service_pb2.CompareEvaluationsRequest(
                baseline=baseline, candidate=eval_result_pb2.EvalSource(evaluation_id=log.evaluation_id)
            )
        )
    sys.modules.pop("coded_desk")
    assert (before.pins.agents, log.verdict) == (after.pins.agents, FAILED)
    assert not after.suspects.HasField("baseline_pins")
    assert after.suspects.baseline_not_rerun_reason == (
        "The Python code of this server is not that which the baseline ran with."
    )
    (changed,) = compared.comparison.pins_changed
    assert changed.startswith("The Python code has changed: ")


async def test_a_fresh_trial_of_a_baseline_that_cannot_run_here_any_more_leaves_no_run_open(tmp_path: Path) -> None:
    made = eval_set(case("a", "pinned", answers=["never"]), agent="coded")

    def serve(comment: str) -> AbstractAsyncContextManager[Served]:
        sys.modules.pop("coded_desk", None)
        (tmp_path / "coded_desk.py").write_text(f"# {comment}\n{WAITING}")
        return evaluating(tmp_path, python=["coded_desk"], base=tmp_path)

    async with serve("before") as server:
        baseline = eval_result_pb2.EvalSource(evaluation_id=(await evaluated(server, made)).evaluation_id)
        log = begin(server, made, baseline=baseline, rerun_suspects=1, max_concurrency=1)
        await log.until("suspects_planned")
        await asyncio.wait_for(ARRIVED["pinned"].wait(), 30)
    async with serve("after") as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
        for run in await runs_of(server, log.evaluation_id):
            async for _ in server.agents.WatchRun(agent_service_pb2.WatchRunRequest(run_id=run.run_id), timeout=30):
                pass
        runs = await runs_of(server, log.evaluation_id)
    sys.modules.pop("coded_desk")
    (left,) = [one for one in followed.results().values() if one.purpose == BASELINE]
    assert (left.verdict, left.reason) == (
        eval_result_pb2.VERDICT_NOT_EVALUATED,
        "The Python code of this server is not that which the baseline ran with.",
    )
    assert {run.evaluation.trial: run.state for run in runs} == {
        0: execution_pb2.EXECUTION_STATE_SUCCEEDED,
        1: execution_pb2.EXECUTION_STATE_SUCCEEDED,
        2: execution_pb2.EXECUTION_STATE_CANCELLED,
    }


async def test_a_set_in_which_no_trial_fails_has_no_suspects(server: Served) -> None:
    baseline = await baseline_of(server, asking("yes"))
    log = await evaluated(
        server,
        asking("yes"),
        definitions=[front("echo")],
        baseline=baseline,
        rerun_suspects=3,
        gates=["regressions == 0"],
    )
    check_log(log.events)
    assert (log.verdict, len(log.results())) == (PASSED, 2)
    (planned,) = log.having("suspects_planned")
    assert not planned.suspects.case_ids


async def test_cases_that_the_baseline_lacks_are_no_suspects(server: Served) -> None:
    baseline = await baseline_of(server, asking("yes"))
    log = await evaluated(
        server, asking("yes", "new"), definitions=[front("gruff")], baseline=baseline, rerun_suspects=1
    )
    (planned,) = log.having("suspects_planned")
    assert list(planned.suspects.case_ids) == ["yes"]


@pytest.mark.parametrize(
    ("reruns", "gates", "field", "description"),
    [
        (0, ["regressions == 0"], "gates[0]", "It takes rerun_suspects of 3."),
        (2, ["regressions == 0"], "gates[0]", "It takes rerun_suspects of 3."),
        (1001, [], "rerun_suspects", "must be"),
    ],
)
async def test_reruns_that_could_prove_nothing_are_refused(
    server: Served, reruns: int, gates: list[str], field: str, description: str
) -> None:
    made = asking("yes", trials=1)
    baseline = await baseline_of(server, made)
    fields = {"baseline": baseline, "gates": gates, "rerun_suspects": reruns or None}
    ((named, text),) = await violations_of(server, made, definitions=[front("gruff")], **fields)
    assert named == field
    assert description in text


async def test_reruns_need_a_baseline(server: Served) -> None:
    assert await violations_of(server, eval_set(*many(1)), rerun_suspects=3) == [
        ("rerun_suspects", "needs a baseline to compare the fresh trials with")
    ]


async def test_a_server_that_stops_while_suspects_run_again_leaves_them_to_the_next(tmp_path: Path) -> None:
    made = eval_set(case("a", "rerun-open", answers=["never"]), case("b", "rerun-open"), agent="gated")
    GATES["rerun-open"].set()
    async with evaluating(tmp_path) as server:
        baseline = eval_result_pb2.EvalSource(evaluation_id=(await evaluated(server, made)).evaluation_id)
        GATES["rerun-open"].clear()
        log = begin(server, made, baseline=baseline, rerun_suspects=4, max_concurrency=2, request_id="r")
        await log.until("case_trial_started")
        ARRIVED["rerun-open"].clear()
        GATES["rerun-open"].set()
        await log.until("suspects_planned")
        GATES["rerun-open"].clear()
        evaluation_id = log.evaluation_id
    GATES["rerun-open"].set()
    async with evaluating(tmp_path) as server:
        followed = await watch(server, evaluation_id).to_the_end()
        runs = await runs_of(server, evaluation_id)
    check_log(followed.events)
    assert followed.kinds.count("suspects_planned") == 1
    assert Counter(one.purpose for one in followed.results().values()) == {0: 2, OWN: 4, BASELINE: 4}
    assert len(runs) == 10, "no run twice"


async def test_a_cancelled_evaluation_begins_no_fresh_trials(server: Served) -> None:
    made = eval_set(case("a", "rerun-cancel", answers=["never"]), agent="gated")
    GATES["rerun-cancel"].set()
    baseline = eval_result_pb2.EvalSource(evaluation_id=(await evaluated(server, made)).evaluation_id)
    GATES["rerun-cancel"].clear()
    ARRIVED["rerun-cancel"].clear()
    log = begin(server, made, baseline=baseline, rerun_suspects=4)
    await log.until("case_trial_started")
    await asyncio.wait_for(ARRIVED["rerun-cancel"].wait(), 30)
    await cancel(server, log.evaluation_id)
    await log.to_the_end()
    assert "suspects_planned" not in log.kinds
    found = (await evaluation(server, log.evaluation_id)).result
    assert found.state == execution_pb2.EXECUTION_STATE_CANCELLED
