"""Read the result of an evaluation by pages of cases: each page costs what it shows, however long the log is."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server import evaluation_events
from bough_server.evals.dependencies import EvaluationDependencies
from bough_server.evals.evaluation_log import EvaluationState, read_state
from bough_server.evals.verdicts import case_result

_HELD: Final = 8
"""The most ended evaluations whose state is kept: a client reads the pages of one after the other."""

MAX_CASE_BYTES: Final = 1024 * 1024
"""The most bytes of the results of one case's runs: those beyond it, but for the first, are without trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPage:
    """A result with some of its cases: those after the first `since`, as many as fit."""

    result: eval_result_pb2.EvalResult
    next_since: int
    """The number of the case that the next page begins with; 0 if this is the last."""


class ResultPages:
    """Reads pages of results."""

    def __init__(self, dependencies: EvaluationDependencies) -> None:
        self._dependencies = dependencies
        self._held: OrderedDict[str, tuple[EvaluationState, eval_result_pb2.EvalTotals]] = OrderedDict()

    async def page(self, evaluation_id: str, *, since: int, most: int, most_bytes: int) -> ResultPage:
        """Return a page of at most `most` cases and about `most_bytes`, but of one case at least if there is one."""
        state, totals = await self._state(evaluation_id)
        names = list(state.cases)[since : since + most]
        cases: list[eval_result_pb2.CaseResult] = []
        size = 0
        for name in names:
            cases.append(await self._case(evaluation_id, state, name))
            size += cases[-1].ByteSize()
            if size > most_bytes:
                break
        if size > most_bytes and len(cases) > 1:
            cases.pop()
        after = since + len(cases)
        result = state.result(evaluation_id, cases, totals)
        return ResultPage(result=result, next_since=after if after < len(state.cases) else 0)

    async def _state(self, evaluation_id: str) -> tuple[EvaluationState, eval_result_pb2.EvalTotals]:
        """Return the state without trees, and the totals so far."""
        if evaluation_id in self._held:
            self._held.move_to_end(evaluation_id)
            return self._held[evaluation_id]
        state = await read_state(self._dependencies.store.log, evaluation_id)
        totals = await asyncio.to_thread(_totals, state)
        if state.end is not None:
            self._held[evaluation_id] = state, totals
            if len(self._held) > _HELD:
                self._held.popitem(last=False)
        return state, totals

    async def _case(self, evaluation_id: str, state: EvaluationState, case_id: str) -> eval_result_pb2.CaseResult:
        """Return a case with the trees of its runs, which are read from the log."""
        planned = state.cases[case_id]
        runs: list[eval_result_pb2.CaseRunResult] = []
        held = 0
        for index in range(planned.runs):
            sequence = state.scored_at.get((case_id, index))
            if sequence is None:
                continue
            found = await self._dependencies.store.log.read(evaluation_id, after=sequence - 1, through=sequence)
            result = evaluation_events.parse(found[0].data).case_run_scored.result
            if held and held + result.ByteSize() > MAX_CASE_BYTES:
                _cut(result)
            held += result.ByteSize()
            runs.append(result)
        return case_result(planned, runs)


def _totals(state: EvaluationState) -> eval_result_pb2.EvalTotals:
    """Return the totals that the log holds, or of the cases so far while it has none."""
    if state.totaled is not None:
        return state.totaled.totals
    if state.end is not None and state.end.HasField("evaluation_cancelled"):
        return state.end.evaluation_cancelled.totals
    return state.totals_of(state.case_results())


def _cut(result: eval_result_pb2.CaseRunResult) -> None:
    """Drop the trees and the answer of each turn, and say so."""
    for turn in result.turns:
        del turn.agents[:]
        turn.answer, turn.truncated = "", True
    for score in result.scores:
        del score.agents[:]
        del score.judgements[:]
