"""Read, score and compare invocations that are stored or given; nothing runs."""

import asyncio
from typing import Final

from bough.v1 import eval_result_pb2, eval_service_pb2, eval_set_pb2, evaluation_pb2, invocation_pb2
from bough_server.errors import FieldViolation, InvalidRequest, SequenceOutOfRange
from bough_server.evals.dependencies import EvaluationDependencies
from bough_server.evals.diff import diff
from bough_server.evals.eval_set import planned_cases
from bough_server.evals.folding import UNLIMITED, read_tree
from bough_server.evals.judges import Judges
from bough_server.evals.judging import judge_run
from bough_server.evals.planning import require_extra
from bough_server.evals.validation import request_problems
from bough_server.evals.verdicts import case_result, totals, verdict
from bough_server.store.ports import Principal
from bough_server.tree.fold import Tree

MAX_RESULT_BYTES: Final = 3 * 1024 * 1024
"""The most bytes of a result before the trees of further cases are left out: clients accept messages of 4 MiB."""


async def invocation_of(
    dependencies: EvaluationDependencies, principal: Principal, source: eval_service_pb2.InvocationSource
) -> invocation_pb2.Invocation:
    """Return the record that a request names or brings. Raises NotFound and SequenceOutOfRange."""
    if source.WhichOneof("source") == "invocation":
        return source.invocation
    run = (await dependencies.runs.get(principal, source.run.run_id)).run
    if source.run.as_of_sequence > run.last_sequence:
        raise SequenceOutOfRange(
            f"The log of run {run.run_id!r} ends at {run.last_sequence} so far.",
            details={"last_sequence": str(run.last_sequence)},
        )
    through = source.run.as_of_sequence or run.last_sequence
    tree = Tree(UNLIMITED, run_id=run.run_id, session_id=run.session_id)
    builder = await read_tree(dependencies.store.log, tree, run.run_id, through=through)
    await dependencies.runs.get(principal, run.run_id)  # raises NotFound if the log was deleted meanwhile
    invocation = await builder.invocation()
    invocation.as_of_sequence = through
    return invocation


async def score_invocations(
    dependencies: EvaluationDependencies, principal: Principal, request: eval_service_pb2.ScoreInvocationsRequest
) -> eval_result_pb2.EvalResult:
    """Judge stored runs or given records, one after the other, each as a case of one turn.

    Raises NotInstalled, InvalidRequest, NotFound and SequenceOutOfRange.
    """
    require_extra()
    await _check(dependencies, request)
    cases: list[eval_result_pb2.CaseResult] = []
    size = 0
    taken: dict[str, int] = {}
    judges = Judges(dependencies, principal)
    for number, source in enumerate(request.invocations):
        invocation = await invocation_of(dependencies, principal, source)
        case = _case(request, _case_id(invocation, number, taken))
        result = await judge_run(dependencies, case, [invocation], index=0, judges=judges)
        judged = case_result(evaluation_pb2.CasePlanned(case=case, runs=1), [result])
        size += judged.ByteSize()
        if size > MAX_RESULT_BYTES:
            for turn in (turn for run in judged.runs for turn in run.turns):
                del turn.agents[:]
                turn.truncated = True
        cases.append(judged)
    summary = await asyncio.to_thread(totals, cases, planned_runs=len(cases), digest="")
    return eval_result_pb2.EvalResult(cases=cases, totals=summary, status=verdict(cases, (), removed=()))


async def diff_invocations(
    dependencies: EvaluationDependencies, principal: Principal, request: eval_service_pb2.DiffInvocationsRequest
) -> eval_result_pb2.InvocationDiff:
    """Compare two records. Raises NotFound and SequenceOutOfRange."""
    left = await invocation_of(dependencies, principal, request.left)
    right = await invocation_of(dependencies, principal, request.right)
    return await asyncio.to_thread(diff, left, right)


async def _check(dependencies: EvaluationDependencies, request: eval_service_pb2.ScoreInvocationsRequest) -> None:
    one = eval_set_pb2.EvalSet(name="given", cases=[_case(request, "0")])
    # Marks the case as one that is not run, as those of the request are.
    one.cases[0].turns[0].recorded.SetInParent()
    wrong = await asyncio.to_thread(request_problems, one, known=dependencies.known_names())
    if wrong:
        raise InvalidRequest([FieldViolation(field=_in_request(path), description=text) for path, text in wrong])


def _in_request(path: str) -> str:
    return path.removeprefix("cases[0].turns[0].").removeprefix("cases[0].")


def _case(request: eval_service_pb2.ScoreInvocationsRequest, case_id: str) -> eval_set_pb2.EvalCase:
    turn = eval_set_pb2.EvalTurn()
    if request.HasField("expect"):
        turn.expect.CopyFrom(request.expect)
    case = eval_set_pb2.EvalCase(id=case_id, turns=[turn], metrics=request.metrics)
    return planned_cases(eval_set_pb2.EvalSet(cases=[case]), runs=1)[0].case


def _case_id(invocation: invocation_pb2.Invocation, number: int, taken: dict[str, int]) -> str:
    """Return the run's id, else the invocation's number; a run that is judged twice gets its number as well."""
    name = invocation.run_id or str(number)
    if name in taken:
        return f"{name} ({number})"
    taken[name] = number
    return name
