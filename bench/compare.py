"""The compare case: two results of an evaluation compared case by case, with intervals and exact tests."""

import time
from pathlib import Path
from random import Random
from typing import Final

from bench.figures import Aim, CaseResult, Figure
from bough.v1 import eval_result_pb2
from bough_server.evals.metrics.statistics import pass_statistics
from bough_server.evals.results.compare import compare

ROUNDS: Final = 5
TRIALS: Final = 5
_METRICS: Final = ("tool_trajectory", "agent_trajectory", "budget")
_NUMBERS: Final = len(_METRICS) + 4
"""The numbers whose change is estimated: the metrics' means, pass rate, cost, tokens and duration."""

_RESAMPLED: Final = 500
_RESAMPLES: Final = 2_000


async def measure(folder: Path) -> CaseResult:
    """Runs the case; it needs no folder."""
    figures: list[Figure] = []
    for cases in (_RESAMPLED, 10 * _RESAMPLED):
        before, after = (build_result(cases, seed=seed).SerializeToString() for seed in ("before", "after"))
        _measure_compare(before, after)
        is_resampled = cases <= _RESAMPLED
        floor = "drawing the indices once" if is_resampled else "parsing the two results"
        rounds, floor_rounds = list[float](), list[float]()
        for _ in range(ROUNDS):
            floor_rounds.append(_measure_draws(cases) if is_resampled else _measure_parse(before, after))
            rounds.append(_measure_compare(before, after))
        resamples = f", {_RESAMPLES:,} resamples of {_NUMBERS} numbers" if is_resampled else ""
        figures.append(
            Figure(
                case="compare",
                what=f"CPU of comparing two results of {cases:,} cases of {TRIALS} trials{resamples}",
                unit="s",
                rounds=rounds,
                floor=floor,
                floor_rounds=floor_rounds,
                aim=Aim("under", 2, "median"),
            )
        )
    return CaseResult(figures=figures, failures=[])


def build_result(cases: int, *, seed: str) -> eval_result_pb2.EvalResult:
    """A result of so many cases, each of which passes with a probability between 0.7 and 1."""
    random = Random(seed)
    result = eval_result_pb2.EvalResult(eval_set_name="bench")
    result.pins.eval_set_digest = "bench"
    for number in range(cases):
        rate = 0.7 + 0.3 * (number % 31) / 30
        passed = sum(random.random() < rate for _ in range(TRIALS))
        verdict = eval_result_pb2.VERDICT_PASSED if passed == TRIALS else eval_result_pb2.VERDICT_FAILED
        result.cases.add(
            case_id=f"case-{number}",
            verdict=verdict,
            statistics=pass_statistics(passed, TRIALS),
            metrics=[
                eval_result_pb2.MetricSummary(name=name, verdict=verdict, mean=random.random(), threshold=1)
                for name in _METRICS
            ],
            trial_means=eval_result_pb2.TrialMeans(
                cost_nanos=random.uniform(1e6, 1e7),
                cost_currency_code="USD",
                tokens=random.uniform(100, 1_000),
                duration_seconds=random.uniform(1, 30),
            ),
        )
    return result


def _measure_compare(before: bytes, after: bytes) -> float:
    start = time.process_time()
    found = compare(*_parse(before, after))
    seconds = time.process_time() - start
    assert len(found.changes) == _NUMBERS, "every number has a change"
    return seconds


def _measure_parse(before: bytes, after: bytes) -> float:
    start = time.process_time()
    _parse(before, after)
    return time.process_time() - start


def _measure_draws(cases: int) -> float:
    draw, start = Random(1).random, time.process_time()
    for _ in range(_RESAMPLES):
        [int(draw() * cases) for _ in range(cases)]
    return time.process_time() - start


def _parse(before: bytes, after: bytes) -> tuple[eval_result_pb2.EvalResult, eval_result_pb2.EvalResult]:
    return eval_result_pb2.EvalResult.FromString(before), eval_result_pb2.EvalResult.FromString(after)
