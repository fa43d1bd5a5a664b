"""Evaluations on a server that is killed, and their judge, which has to see what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.durability.eval_torture import torment
from tests.durability.torture_evaluations import Outcome, passing_trials


def _lose_an_event(outcome: Outcome) -> Outcome:
    return replace(outcome, logs=[outcome.logs[0], [*outcome.logs[1][:5], *outcome.logs[1][6:]]])


def _run_a_turn_again(outcome: Outcome) -> Outcome:
    return replace(outcome, runs=[*outcome.runs, outcome.runs[0]])


def _forget_the_end(outcome: Outcome) -> Outcome:
    return replace(outcome, logs=[log[:-1] for log in outcome.logs])


def _judge_a_case_twice(outcome: Outcome) -> Outcome:
    scored = next(event for event in outcome.logs[0] if event.HasField("case_trial_scored"))
    return replace(outcome, logs=[[*log[:-1], scored, log[-1]] for log in outcome.logs])


def _log_a_traceback(outcome: Outcome) -> Outcome:
    return replace(outcome, server_said="Traceback (most recent call last)")


TAMPERING: list[Callable[[Outcome], Outcome]] = [
    _lose_an_event,
    _run_a_turn_again,
    _forget_the_end,
    _judge_a_case_twice,
    _log_a_traceback,
]


async def test_an_evaluation_of_a_server_that_is_killed_ends_with_every_turn_run_once(tmp_path: Path) -> None:
    outcome = await torment(tmp_path, cases=30, kills=1, seed=7)
    assert outcome.faults(passing_trials(30)) == []
    for tamper in TAMPERING:
        assert tamper(outcome).faults(passing_trials(30)), f"the judge did not notice: {tamper.__name__}"


@pytest.mark.grid
async def test_two_hundred_cases_and_ten_kills(tmp_path: Path, whole_grid: bool) -> None:
    cases, kills = (200, 10) if whole_grid else (12, 2)
    outcome = await torment(tmp_path, cases=cases, kills=kills, seed=11)
    assert outcome.faults(passing_trials(cases)) == []
