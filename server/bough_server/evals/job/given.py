"""Read, score and compare invocations that are stored or given; nothing runs."""

from typing import Final

from bough.v1 import eval_result_pb2, eval_service_pb2, eval_set_pb2, evaluation_pb2, execution_pb2, invocation_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.judges import Judges
from bough_server.evals.job.judging import score_all_metrics
from bough_server.evals.metrics.run_outcome import needs_state
from bough_server.evals.metrics.scoring import applicable_metrics
from bough_server.evals.results.verdicts import case_result, totals, verdict
from bough_server.evals.sets.eval_set import plan_cases
from bough_server.evals.sets.validation import request_problems
from bough_server.evals.trees.diff import diff
from bough_server.evals.trees.folding import read_source
from bough_server.identity import Principal, Scope
from bough_server.messages import copy_of
from bough_server.threads import run_in_thread

MAX_RESULT_BYTES: Final = 3_900_000
"""The most bytes of the cases of a result: clients accept messages of 4 MiB."""

_MAX_ID: Final = 128
"""The most characters of a record's id that become the id of its case."""

_CASE_BYTES: Final = 64
_METRIC_BYTES: Final = 40
"""What the least about a case and about one of its metrics take, names left out."""

_FRAME_BYTES: Final = 8
"""What a case takes in a message beside its content."""


async def score_invocations(
    dependencies: EvaluationDependencies,
    principal: Principal,
    request: eval_service_pb2.ScoreInvocationsRequest,
    *,
    scope: Scope,
) -> eval_result_pb2.EvalResult:
    """Score stored runs in a scope, or given records, one after the other, each as a case of one turn.

    The runs of judges are the principal's. Raises InvalidRequest, NotFound and SequenceOutOfRange.
    """
    case = _case(request)
    await _check(dependencies, principal.tenant_id, case)
    found = _Found(request, case)
    # One for all records: what a judge used for several of them is counted once.
    judges = Judges(dependencies, principal)
    for number, source in enumerate(request.invocations):
        invocation = await read_source(
            dependencies.runs, dependencies.store.log, scope, source, has_state=needs_state(case)
        )
        case.id = found.case_id(invocation, number)
        result = await score_all_metrics(
            dependencies, case, [invocation], trial=0, run_ids=[source.run.run_id], judges=judges
        )
        await run_in_thread(found.add, case, result)
    return await run_in_thread(found.result)


class _Found:
    """The cases of an answer that clients accept, which has at most MAX_RESULT_BYTES."""

    def __init__(self, request: eval_service_pb2.ScoreInvocationsRequest, case: eval_set_pb2.EvalCase) -> None:
        metrics = sum(len(metric.name) + _METRIC_BYTES for metric in applicable_metrics(case))
        self._least = _CASE_BYTES + metrics  # that of 256 cases with 64 metrics fits
        self._room = MAX_RESULT_BYTES
        self._waiting = len(request.invocations)
        self._cases: list[eval_result_pb2.CaseResult] = []
        self._numbers: list[eval_result_pb2.CaseResult] = []
        """The same cases, for the totals: without texts and trees."""
        self._taken: set[str] = set()

    def case_id(self, invocation: invocation_pb2.Invocation, number: int) -> str:
        """Return the run's id, else the invocation's number; with the number if an earlier case has that id."""
        name = given = invocation.run_id[:_MAX_ID] or str(number)
        while name in self._taken:
            name = f"{given} ({number})"
            given = name
        self._taken.add(name)
        return name

    def add(self, eval_case: eval_set_pb2.EvalCase, trial: eval_result_pb2.CaseTrialResult) -> None:
        """Add the next case, with as much about it as fits beside the least about those that follow."""
        case = case_result(evaluation_pb2.CasePlanned(eval_case=eval_case, trials=1), [trial])
        self._waiting -= 1
        numbers = copy_of(case)
        _strip(numbers, "numbers")
        self._numbers.append(numbers)
        room = self._room - self._waiting * self._least
        # From what is largest to what is missed most.
        for step in ("", "trees", "turns", "runs", "reason"):
            _strip(case, step)
            if case.ByteSize() + _FRAME_BYTES <= room:
                break
        self._room -= case.ByteSize() + _FRAME_BYTES
        self._cases.append(case)

    def result(self) -> eval_result_pb2.EvalResult:
        """Return the result."""
        summary = totals(self._numbers, planned_trials=len(self._numbers), digest="")
        return eval_result_pb2.EvalResult(
            cases=self._cases,
            totals=summary,
            state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
            verdict=verdict(self._numbers, (), removed=(), counts_crashes=True),
        )


def _strip(case: eval_result_pb2.CaseResult, step: str) -> None:
    """Leave out something of a case, in place."""
    turns = [turn for trial in case.trials for turn in trial.turns]
    if step == "trees":
        for turn in turns:
            turn.truncated = turn.truncated or bool(turn.agents)
            del turn.agents[:]
    if step in ("turns", "numbers"):
        del case.turns[:]
        for trial in case.trials:
            del trial.turns[:]
            trial.ClearField("unanswered")
            for score in trial.scores:
                for name in ("reason", "tree_comparisons", "judgments"):
                    score.ClearField(name)
    if step == "runs":
        del case.trials[:]
        case.ClearField("labels")
        case.ClearField("statistics")
    if step in ("reason", "numbers"):
        case.ClearField("reason")


async def diff_invocations(
    dependencies: EvaluationDependencies, scope: Scope, request: eval_service_pb2.DiffInvocationsRequest
) -> eval_result_pb2.InvocationDiff:
    """Compare two records. Raises NotFound and SequenceOutOfRange."""
    runs, log = dependencies.runs, dependencies.store.log
    before = await read_source(runs, log, scope, request.before)
    after = await read_source(runs, log, scope, request.after)
    return await run_in_thread(diff, before, after)


async def _check(dependencies: EvaluationDependencies, tenant_id: str, case: eval_set_pb2.EvalCase) -> None:
    one = eval_set_pb2.EvalSet(name="given", cases=[case])
    # Marks the case as one that is not run, as those of the request are.
    one.cases[0].turns[0].recorded.run.run_id = "given"
    wrong = await run_in_thread(request_problems, one, known=dependencies.collect_known_names(tenant_id))
    if wrong:
        raise InvalidRequest([FieldViolation(field=_in_request(path), description=text) for path, text in wrong])


def _in_request(path: str) -> str:
    return path.removeprefix("cases[0].turns[0].").removeprefix("cases[0].")


def _case(request: eval_service_pb2.ScoreInvocationsRequest) -> eval_set_pb2.EvalCase:
    turn = eval_set_pb2.EvalTurn()
    if request.HasField("expect"):
        turn.expect.CopyFrom(request.expect)
    case = eval_set_pb2.EvalCase(id="given", turns=[turn], metrics=request.metrics)
    return plan_cases(eval_set_pb2.EvalSet(cases=[case]), trials=1)[0].eval_case
