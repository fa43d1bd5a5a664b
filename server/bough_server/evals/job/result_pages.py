"""Read the result of an evaluation, and its cases by pages: each costs what it shows, however long the log is."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.evaluation_log import EvaluationState
from bough_server.evals.results.verdicts import case_result
from bough_server.log import evaluation_events
from bough_server.store.ports.log import StoredEvent
from bough_server.threads import run_in_thread

_HELD: Final = 8
"""The most evaluations whose state is kept: a client reads the pages of one after the other, or polls it."""

MAX_CASE_BYTES: Final = 1024 * 1024
"""The bytes of the results of one case's runs beyond which further runs are without trees."""

MAX_PAGE_BYTES: Final = 3_500 * 1024
"""The most bytes of a page with one case. The rest of 4 MiB, which clients receive, is for all but the cases."""

_FRAME_BYTES: Final = 8
"""What a message takes in another besides its bytes, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePage:
    """Some cases of a result, as many as fit."""

    cases: Sequence[eval_result_pb2.CaseResult]
    next_since: int
    """The number of the case in the set that the next page begins with; 0 if this is the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFilter:
    """Conditions on the cases to list; an empty field is no condition."""

    verdicts: Collection[eval_result_pb2.Verdict.ValueType] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    case_ids: Collection[str] = ()

    def takes(self, case: eval_result_pb2.CaseResult) -> bool:
        """Return whether a case meets every condition."""
        return (
            (not self.verdicts or case.verdict in self.verdicts)
            and (not self.case_ids or case.case_id in self.case_ids)
            and all(case.labels.get(key) == value for key, value in self.labels.items())
        )


@dataclass(slots=True, kw_only=True)
class _Held:
    """What is kept of an evaluation: its state without trees, and what was found by that."""

    state: EvaluationState = field(default_factory=EvaluationState)
    cases: dict[str, eval_result_pb2.CaseResult] = field(default_factory=dict)
    totals: eval_result_pb2.EvalTotals = field(default_factory=eval_result_pb2.EvalTotals)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the state is read on, and while a page is made from it."""

    def add(self, page: Sequence[StoredEvent]) -> None:
        """Add the next events of the log, and judge the cases anew that they are about."""
        before = self.state.last_sequence
        self.state.add(page)
        changed = {case_id for (case_id, _), at in self.state.scored_at.items() if at > before}
        changed |= self.state.cases.keys() - self.cases.keys()
        self.cases.update((case.case_id, case) for case in self.state.case_results([*changed]))

    def sum_up(self) -> None:
        """Set the totals: those that the log holds, or those of the cases so far while it has none."""
        state = self.state
        if state.totaled is not None:
            self.totals = state.totaled.totals
        elif state.end is not None and state.end.HasField("evaluation_cancelled"):
            self.totals = state.end.evaluation_cancelled.totals
        else:
            self.totals = state.totals_of([self.cases[case_id] for case_id in state.cases])


class ResultPages:
    """Reads pages of results. To poll an evaluation costs what has happened since, and not what has happened before."""

    def __init__(self, dependencies: EvaluationDependencies) -> None:
        self._dependencies = dependencies
        self._held: OrderedDict[str, _Held] = OrderedDict()

    async def result(self, evaluation_id: str) -> eval_result_pb2.EvalResult:
        """Return what an evaluation found so far, without its cases."""
        async with self._current(evaluation_id) as held:
            return held.state.result(evaluation_id, (), held.totals)

    async def page(
        self, evaluation_id: str, case_filter: CaseFilter, *, since: int, most: int, most_bytes: int
    ) -> CasePage:
        """Return a page of at most `most` cases and about `most_bytes`, but of one case at least if there is one."""
        async with self._current(evaluation_id) as held:
            names = list(held.state.cases)
            found = (at for at in range(since, len(names)) if case_filter.takes(held.cases[names[at]]))
            cases: list[eval_result_pb2.CaseResult] = []
            size = 0
            for at in found:
                if len(cases) == most:
                    return CasePage(cases=cases, next_since=at)
                case = await self._case(evaluation_id, held.state, names[at])
                size += case.ByteSize()
                # With one case at least: an empty page would name itself as the next.
                if cases and size > most_bytes:
                    return CasePage(cases=cases, next_since=at)
                cases.append(case)
            return CasePage(cases=cases, next_since=0)

    @asynccontextmanager
    async def _current(self, evaluation_id: str) -> AsyncIterator[_Held]:
        """Yield what is kept of an evaluation, with all that its log has now."""
        while True:
            held = self._hold(evaluation_id)
            async with held.reading:
                if self._held.get(evaluation_id) is held:  # else a call before was cancelled while it read on
                    await self._read_on(evaluation_id, held)
                    yield held
                    return

    def _hold(self, evaluation_id: str) -> _Held:
        held = self._held.setdefault(evaluation_id, _Held())
        self._held.move_to_end(evaluation_id)
        if len(self._held) > _HELD:
            self._held.popitem(last=False)
        return held

    async def _read_on(self, evaluation_id: str, held: _Held) -> None:
        """Add what the log has had since the last call."""
        before = held.state.last_sequence
        log = self._dependencies.store.log
        try:
            while held.state.end is None and (page := await log.read(evaluation_id, after=held.state.last_sequence)):
                await run_in_thread(held.add, page)
            if held.state.last_sequence > before:
                await run_in_thread(held.sum_up)
        except BaseException:
            # A thread may still be adding events: no other call may use this state.
            self._held.pop(evaluation_id, None)
            raise

    async def _case(self, evaluation_id: str, state: EvaluationState, case_id: str) -> eval_result_pb2.CaseResult:
        """Return a case with the trees of its runs, which are read from the log, as far as they fit."""
        planned = state.cases[case_id]
        # Judged by all scores, whatever is left out below.
        found = case_result(planned, state.results_of(case_id), state.reruns_of(case_id))
        del found.trials[:], found.reruns[:]
        most = MAX_PAGE_BYTES - found.ByteSize()
        held = 0
        for trial in (*range(planned.trials), *state.number_reruns(planned)):
            sequence = state.scored_at.get((case_id, trial))
            if sequence is None:
                continue
            stored = await self._dependencies.store.log.read(evaluation_id, after=sequence - 1, through=sequence)
            result = evaluation_events.parse(stored[0].data).case_trial_scored.result
            _fit(result, held, most)
            held += result.ByteSize() + _FRAME_BYTES
            (found.trials if trial < planned.trials else found.reruns).append(result)
        return found


def _fit(result: eval_result_pb2.CaseTrialResult, held: int, most: int) -> None:
    """Leave out of a run what does not fit after the `held` bytes of the runs before it.

    These are first its trees. Beyond half of `most` bytes it is all but its verdict, so that a thousand verdicts fit.
    """
    if held + result.ByteSize() <= (MAX_CASE_BYTES if held else most // 2):
        return
    for turn in result.turns:
        del turn.agents[:]
        turn.user, turn.answer, turn.truncated = "", "", True
    for score in result.scores:
        del score.tree_comparisons[:]
        del score.judgments[:]
    if held + result.ByteSize() > most // 2:
        for name in ("turns", "scores", "reason", "unanswered", "used_mocks", "injected_faults"):
            result.ClearField(name)
