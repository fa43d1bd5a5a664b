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
"""The bytes of the results of one case's runs beyond which further runs are without trees."""

MAX_PAGE_BYTES: Final = 3_500 * 1024
"""The most bytes of a page with one case. The rest of 4 MiB, which clients receive, is for all but the cases."""

_FRAME_BYTES: Final = 8
"""What a message takes in another besides its bytes, at most."""


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
        """Return a case with the trees of its runs, which are read from the log, as far as they fit."""
        planned = state.cases[case_id]
        # Judged by all scores, whatever is left out below.
        found = case_result(planned, state.results_of(case_id))
        del found.runs[:]
        most = MAX_PAGE_BYTES - found.ByteSize()
        held = 0
        for index in range(planned.runs):
            sequence = state.scored_at.get((case_id, index))
            if sequence is None:
                continue
            stored = await self._dependencies.store.log.read(evaluation_id, after=sequence - 1, through=sequence)
            result = evaluation_events.parse(stored[0].data).case_run_scored.result
            _fit(result, held, most)
            held += result.ByteSize() + _FRAME_BYTES
            found.runs.append(result)
        return found


def _totals(state: EvaluationState) -> eval_result_pb2.EvalTotals:
    """Return the totals that the log holds, or of the cases so far while it has none."""
    if state.totaled is not None:
        return state.totaled.totals
    if state.end is not None and state.end.HasField("evaluation_cancelled"):
        return state.end.evaluation_cancelled.totals
    return state.totals_of(state.case_results())


def _fit(result: eval_result_pb2.CaseRunResult, held: int, most: int) -> None:
    """Leave out of a run what does not fit after the `held` bytes of the runs before it.

    These are first its trees. Beyond half of `most` bytes it is all but its verdict, so that a thousand verdicts fit.
    """
    if held + result.ByteSize() <= (MAX_CASE_BYTES if held else most // 2):
        return
    for turn in result.turns:
        del turn.agents[:]
        turn.answer, turn.truncated = "", True
    for score in result.scores:
        del score.agents[:]
        del score.judgements[:]
    if held + result.ByteSize() > most // 2:
        for name in ("turns", "scores", "reason", "unanswered"):
            result.ClearField(name)
