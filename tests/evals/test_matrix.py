"""Matrices of models, instructions and temperatures, and trials that run again after a crash, over a real socket."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.v1 import agent_pb2, eval_result_pb2, eval_set_pb2, evaluation_pb2
from bough_server.cli.eval.request import matrix_of
from bough_server.cli.render.evaluations import result_lines
from bough_server.evals.reports.html import html_page
from bough_server.evals.reports.junit import junit_text
from bough_server.evals.reports.markdown import markdown_text
from bough_server.evals.results.cells import mark_best, summarize_cells
from bough_server.evals.sets.matrix import list_cells
from tests.evals.job_server import (
    ARRIVED,
    CALLED,
    GATES,
    begin,
    case,
    case_results,
    check_log,
    eval_set,
    evaluated,
    evaluating,
    evaluation,
    runs_of,
    settings,
    watch,
)
from tests.evals.test_evaluation_requests import nothing_written, violations_of
from tests.rpc.run_server import Served, served

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
MODELS = {"model": ["small", "large"]}


def speaker(name: str = "speaker") -> agent_pb2.AgentDefinition:
    """An agent of which the small model says no, and the large one yes."""
    return agent_pb2.AgentDefinition(
        name=name, description="Speaks.", llm=agent_pb2.LlmAgent(model="small", instruction="Speak.")
    )


def team() -> list[agent_pb2.AgentDefinition]:
    """A sequence that waits for its gate, and then speaks."""
    links = [agent_pb2.AgentLink(agent=name) for name in ("gated", "speaker")]
    root = agent_pb2.AgentDefinition(name="team", description="Waits.", sequence={}, sub_agents=links)
    return [root, speaker()]


def matrix(**axes: Any) -> eval_set_pb2.EvalMatrix:
    """A matrix of these axes."""
    return eval_set_pb2.EvalMatrix(**axes)


def asking(count: int, *, agent: str = "speaker", said: str = "Well?", trials: int = 1) -> eval_set_pb2.EvalSet:
    """A set whose cases expect yes."""
    return eval_set(*(case(f"c{n}", said, answers=["yes"], trials=trials) for n in range(count)), agent=agent)


def models(folder: Path) -> dict[str, Any]:
    """The models of these tests, which are scripted."""
    for name, answer in {"small": "no", "large": "yes"}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"agents": {"speaker": [answer]}}))
    return {name: {"provider": "scripted", "script": str(folder / f"{name}.yaml")} for name in ("small", "large")}


@pytest.fixture
async def modelled(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with two scripted models."""
    async with served(settings(tmp_path, models=models(tmp_path))) as opened:
        yield opened


async def test_every_case_runs_in_every_cell_and_the_best_is_marked_where_a_test_says_so(modelled: Served) -> None:
    gates = ["pass_rate >= 0.9", "pass_rate >= 0.9 in model=large", "case.pass_rate.lower >= 0 in model=small"]
    log = await evaluated(modelled, asking(6), definitions=[speaker()], matrix=matrix(**MODELS), gates=gates)
    check_log(log.events)
    planned = log.events[0].evaluation_planned
    assert [cell.definition.llm.model for cell in planned.cells] == ["small", "large"]
    assert [one.eval_case.id for one in log.having("case_planned")[:3]] == [
        "c0 [model=small]",
        "c0 [model=large]",
        "c1 [model=small]",
    ]
    assert sorted(planned.pins.models) == ["large", "small"]
    result = (await evaluation(modelled, log.evaluation_id)).result
    small, large = result.cells
    assert [(cell.cell, dict(cell.values), cell.best) for cell in result.cells] == [
        ("model=small", {"model": "small"}, False),
        ("model=large", {"model": "large"}, True),
    ]
    assert (small.totals.pass_rate, large.totals.pass_rate) == (0, 1)
    assert (small.totals.cases, small.totals.trials, small.totals.trials_ended) == (6, 6, 6)
    assert large.p_value == pytest.approx(2 * 0.5**6)  # one trial of a case on both sides passes: either, by chance
    assert not small.HasField("p_value")
    assert [(gate.verdict, gate.cell, gate.value) for gate in result.gates] == [
        (FAILED, "model=small", 0),
        (PASSED, "model=large", 1),
        (PASSED, "model=small", 0),
    ]
    page = await case_results(modelled, log.evaluation_id, labels={"bough/cell": "model=large"})
    assert [(found.case_id, found.cell, found.verdict) for found in page.cases] == [
        (f"c{n} [model=large]", "model=large", PASSED) for n in range(6)
    ]
    runs = await runs_of(modelled, log.evaluation_id)
    assert Counter(run.evaluation.case_id for run in runs) == Counter(
        f"c{n} [{c.cell}]" for n in range(6) for c in result.cells
    )
    best = "model=large passes more often than every other cell (p = 0.031, corrected for 2 cells)."
    lines = [line.plain for line in result_lines(result, width=200)]
    assert any(line.startswith("cell        model=small  0/6 cases, 0.00 (") for line in lines)
    assert any(line.startswith("best        model=large  6/6 cases, 1.00 (") for line in lines)
    assert best in lines
    assert any(
        line.startswith("failed      gate pass_rate >= 0.9  is 0 in model=small  pass_rate is 0") for line in lines
    )
    markdown = markdown_text(result)
    assert "| **model=large**, the best | 6/6 | 1.00 (" in markdown
    assert best in markdown
    assert 'name="cell.model=large" value="6/6 cases passed, pass rate 1.00' in junit_text(result)
    assert '<div class="text">model=small</div></th><td class="number">0/6</td>' in html_page(result)


async def test_the_axes_of_a_set_are_combined_and_a_request_may_replace_them(modelled: Served) -> None:
    made = asking(1)
    made.matrix.CopyFrom(matrix(model=["small", "large"], instruction=["Be kind.", "Be curt."], temperature=[0, 0.25]))
    log = await evaluated(modelled, made, definitions=[speaker()])
    cells = log.events[0].evaluation_planned.cells
    assert [cell.name for cell in cells][:3] == [
        "model=small, instruction=1, temperature=0",
        "model=small, instruction=1, temperature=0.25",
        "model=small, instruction=2, temperature=0",
    ]
    last = cells[-1].definition.llm
    assert (len(cells), last.model, last.instruction, last.settings.temperature) == (8, "large", "Be curt.", 0.25)
    again = await evaluated(modelled, made, definitions=[speaker()], matrix=matrix(model=["large"]))
    assert [cell.name for cell in again.events[0].evaluation_planned.cells] == ["model=large"]
    assert again.verdict == PASSED


@pytest.mark.parametrize(
    ("axes", "field", "sentence"),
    [
        (
            {"model": ["small"] * 0, "instruction": [str(n) for n in range(100)], "temperature": list(range(100))},
            "matrix",
            "has 10,000 cells (100 instructions by 100 temperatures), and may have 64.",
        ),
        ({}, "matrix", "has no values: set one of model, instruction, temperature."),
        (
            {"model": ["small"], "agent": "other"},
            "matrix.agent",
            "The agent 'speaker' never runs 'other': its cells would all be the same.",
        ),
        ({"model": ["smal"]}, "matrix.model[0]", "There is no model 'smal'. Did you mean 'small'?"),
        (
            {"model": ["small"], "agent": "echo"},
            "matrix.agent",
            "The agent 'echo' calls no model itself: name one that does.",
        ),
        (
            {"model": ["small"], "agent": "speker"},
            "matrix.agent",
            "There is no agent 'speker'. Did you mean 'speaker'?",
        ),
        (
            {"instruction": ["{{x}}"]},
            "matrix.instruction[0]",
            "has unknown placeholders: {{x}}. Known are {{state.NAME}}",
        ),
        ({"model": ["small", "small"]}, "matrix.model", "repeated value must contain unique items"),
        ({"instruction": ["x" * 600_000, "y" * 600_000]}, "matrix", "is 2,400,"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_a_matrix_that_cannot_be_run_is_refused_before_anything_runs(
    modelled: Served, axes: Any, field: str, sentence: str
) -> None:
    definitions = [speaker(), speaker("other")]
    found = await violations_of(modelled, asking(1), definitions=definitions, matrix=matrix(**axes))
    path, description = found[0]
    assert path == field
    assert description.startswith(sentence)
    await nothing_written(modelled)


async def test_what_a_matrix_is_not_for_is_refused(modelled: Served) -> None:
    made = asking(400, trials=1)
    made.cases[1].id = "x" * 250
    made.cases[2].origin.run_id = "r"
    many = await violations_of(modelled, made, definitions=[speaker()], trials=200, matrix=matrix(**MODELS))
    assert many[:3] == [
        ("matrix", "80,000 trials in 2 cells are 160,000, and may be 100,000."),
        ("eval_set.cases[1].id", "is 250 characters, and 256 at most with the name of its cell."),
        ("eval_set.cases[2].origin", "must not be set with a matrix: a fork has the agents of its origin."),
    ]
    gates = ["pass_rate >= 0.5 in model=lage", "removed <= 0 in model=large"]
    baseline = await evaluated(modelled, asking(1), definitions=[speaker()], matrix=matrix(**MODELS))
    fields = {"definitions": [speaker()], "baseline": {"evaluation_id": baseline.evaluation_id}}
    assert await violations_of(modelled, asking(1), gates=gates, matrix=matrix(**MODELS), **fields) == [
        (
            "gates[0]",
            "'pass_rate >= 0.5 in model=lage' cannot be reached: there is no cell 'model=lage'."
            " Did you mean 'model=large'?",
        ),
        (
            "gates[1]",
            "'removed <= 0 in model=large' cannot be reached: removed is over all cells, and no cell can be named.",
        ),
    ]
    assert await violations_of(modelled, asking(1), gates=["pass_rate >= 0 in x"], definitions=[speaker()]) == [
        ("gates[0]", "'pass_rate >= 0 in x' cannot be reached: there is no matrix.")
    ]
    assert await violations_of(modelled, asking(1), **fields) == [
        ("baseline", "is a result of the set 'set', which has no case of this set")
    ]


async def test_a_matrix_is_compared_with_an_earlier_one_cell_by_cell(modelled: Served) -> None:
    fields: dict[str, Any] = {"definitions": [speaker()], "matrix": matrix(**MODELS)}
    first = await evaluated(modelled, asking(3), **fields)
    second = await evaluated(
        modelled,
        asking(3),
        gates=["removed <= 0"],
        baseline={"evaluation_id": first.evaluation_id},
        rerun_suspects=2,
        **fields,
    )
    result = (await evaluation(modelled, second.evaluation_id)).result
    assert list(result.suspects.case_ids) == [f"c{n} [model=small]" for n in range(3)]
    assert result.suspects.baseline_not_rerun_reason.startswith("The evaluation has a matrix")
    assert [cell.totals.reruns_ended for cell in result.cells] == [6, 0]


async def test_a_matrix_goes_on_at_the_next_server_and_runs_every_trial_of_every_cell_once(tmp_path: Path) -> None:
    made = asking(2, agent="team", said="matrix gate", trials=2)
    fields: dict[str, Any] = {"definitions": team(), "matrix": matrix(agent="speaker", **MODELS), "request_id": "m"}
    configured = settings(tmp_path, models=models(tmp_path))
    async with served(configured) as server:
        log = await begin(server, made, max_concurrency=3, **fields).until("case_trial_started")
        await asyncio.wait_for(ARRIVED["matrix gate"].wait(), 30)
    GATES["matrix gate"].set()
    async with served(configured) as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
        again = await evaluated(server, made, max_concurrency=3, **fields)
        runs = await runs_of(server, log.evaluation_id)
        result = (await evaluation(server, log.evaluation_id)).result
    check_log(followed.events)
    assert again.events == followed.events
    assert Counter((run.evaluation.case_id, run.evaluation.trial) for run in runs) == Counter(
        (f"c{n} [model={model}]", trial) for n in range(2) for model in ("small", "large") for trial in range(2)
    )
    assert [cell.totals.pass_rate for cell in result.cells] == [0, 1]


def test_options_of_the_command_line_name_the_axes(tmp_path: Path) -> None:
    (tmp_path / "curt.txt").write_text("Be curt.")
    options = ["model=small, large", "temperature=0,0.5", f"instruction=@{tmp_path}/curt.txt", "instruction=a=b, c"]
    assert matrix_of([*options, "agent=speaker"]) == matrix(
        agent="speaker", model=["small", "large"], temperature=[0, 0.5], instruction=["Be curt.", "a=b, c"]
    )
    assert matrix_of([]) is None


def counted(*cells: tuple[int, int]) -> list[eval_result_pb2.CellResult]:
    """Cells with a case for each of these numbers: the trials of each that passed, of ten."""
    planned = evaluation_pb2.EvaluationPlanned(trial_count=10 * len(cells[0]) * len(cells))
    planned.cells.extend(list_cells(matrix(model=[f"m{n}" for n in range(len(cells))])))
    cases = [
        eval_result_pb2.CaseResult(
            cell=planned.cells[number].name,
            verdict=PASSED,
            statistics=eval_result_pb2.PassStatistics(trials=10, passed=passed, pass_rate=passed / 10),
        )
        for number, cell in enumerate(cells)
        for passed in cell
    ]
    return summarize_cells(planned, cases)


def test_a_cell_is_the_best_only_if_every_other_is_proven_to_pass_less_often() -> None:
    def best(*cells: tuple[int, int]) -> list[bool]:
        return [cell.best for cell in counted(*cells)]

    assert best((10, 10), (1, 2)) == [True, False]
    assert best((1, 2), (10, 10), (0, 3)) == [False, True, False]
    assert best((10, 10), (9, 10)) == [False, False]
    assert best((10, 10), (10, 10), (0, 0)) == [False, False, False]
    # The more cells, the more one of equal ones stands out by chance.
    assert best((10, 10), (8, 7)) == [True, False]
    assert best((10, 10), (8, 7), (8, 7)) == [False, False, False]


def test_of_equal_cells_one_is_the_best_by_chance_in_at_most_five_percent() -> None:
    draw = random.Random(7)
    marked = 0
    for _ in range(400):
        found: dict[str, list[eval_result_pb2.CaseResult]] = {}
        cells = []
        for name in "abc":
            counts = [sum(draw.random() < 0.7 for _ in range(5)) for _ in range(6)]
            found[name] = [
                eval_result_pb2.CaseResult(statistics=eval_result_pb2.PassStatistics(trials=5, passed=passed))
                for passed in counts
            ]
            cells.append(eval_result_pb2.CellResult(cell=name, totals={"pass_rate": sum(counts) / 30}))
        mark_best(cells, found)
        marked += any(cell.best for cell in cells)
    assert marked <= 0.05 * 400


async def test_a_trial_that_crashed_runs_again_and_says_so(server: Served) -> None:
    names = {"once": 1, "twice": 2, "never": 0}
    cases = [case(name, f"{name} {count}", answers=["done"]) for name, count in names.items()]
    made = eval_set(*cases, case("fails", "fails 0", answers=["no"]), agent="shaky", defaults={"retry_crashed": 1})
    log = await evaluated(server, made)
    check_log(log.events)
    assert {case_id: result.verdict for (case_id, _), result in log.results().items()} == {
        "once": PASSED,
        "twice": FAILED,
        "never": PASSED,
        "fails": FAILED,
    }
    assert Counter(one.case_id for one in log.having("case_trial_retried")) == {"once": 1, "twice": 1}
    assert {name: CALLED[f"{name} {count}"] for name, count in {**names, "fails": 0}.items()} == {
        "once": 2,
        "twice": 2,
        "never": 1,
        "fails": 1,
    }
    runs = await runs_of(server, log.evaluation_id)
    once = sorted((run for run in runs if run.evaluation.case_id == "once"), key=lambda run: run.evaluation.attempt)
    assert [run.evaluation.attempt for run in once] == [0, 1]
    assert len({run.session_id for run in once}) == 2
    assert log.having("case_trial_retried")[0].session_id in {run.session_id for run in runs}
    (attempt,) = log.result("once").crashed_attempts
    assert list(attempt.run_ids) == [once[0].run_id]
    assert attempt.reason.startswith("The run failed: ")
    assert (log.result("twice").crashed, len(log.result("twice").crashed_attempts)) == (True, 1)
    result = (await evaluation(server, log.evaluation_id)).result
    assert (result.totals.retried_trials, result.totals.trials_passed) == (2, 2)
    sentence = "2 of 4 trials were retried after a crash."
    retried = f"It crashed and was retried (1 of 1): {attempt.reason}"
    assert sentence in [line.plain for line in result_lines(result, width=200)]
    assert f"            {retried}" in [line.plain for line in result_lines(result, width=200)]
    for text in (markdown_text(result), junit_text(result), html_page(result)):
        assert sentence in text
        assert "It crashed and was retried" in text
    again = await evaluated(server, made, retry_crashed=0)
    assert again.having("case_trial_retried") == []


async def test_a_retry_goes_on_at_the_next_server_and_is_no_further_one(tmp_path: Path) -> None:
    made = eval_set(case("a", "resumed 1", answers=["done"]), agent="shaky_then_waits")
    async with evaluating(tmp_path) as server:
        log = await begin(server, made, retry_crashed=1).until("case_trial_retried")
        await asyncio.wait_for(ARRIVED["resumed 1"].wait(), 30)
    GATES["resumed 1"].set()
    async with evaluating(tmp_path) as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
        runs = await runs_of(server, log.evaluation_id)
    check_log(followed.events)
    assert followed.verdict == PASSED
    assert sorted(run.evaluation.attempt for run in runs) == [0, 1]
    assert CALLED["resumed 1"] == 2
