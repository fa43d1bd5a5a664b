"""Judge a run of a case: the metrics that compute, those of the operator, and those that ask a model."""

import asyncio
from collections.abc import Sequence

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, execution_pb2, invocation_pb2
from bough_server.evals.dependencies import EvaluationDependencies
from bough_server.evals.judges import Judges
from bough_server.evals.metrics import custom
from bough_server.evals.metrics.turn import name_of, no_score
from bough_server.evals.scoring import applicable_metrics, not_evaluated, score_run
from bough_server.store.ports import Principal


async def judge_run(
    dependencies: EvaluationDependencies,
    principal: Principal,
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
    *,
    index: int,
    evaluation_id: str = "",
) -> eval_result_pb2.CaseRunResult:
    """Return the result of a run of a case from the records of its turns. Raises ServerStopping and StorageFailed.

    What computes runs in a thread: a tree of a thousand agents takes a tenth of a second.
    """
    if unmocked := _unmocked(invocations):
        return not_evaluated(case, index, unmocked, invocations=invocations)
    scores: dict[str, eval_result_pb2.MetricScore] = {}
    judges = Judges(dependencies, principal, evaluation_id=evaluation_id, case_id=case.id)
    if all(one.state == execution_pb2.EXECUTION_STATE_SUCCEEDED for one in invocations):
        for metric in applicable_metrics(case):
            if metric.HasField("custom"):
                score = await _custom(dependencies, metric, case, invocations)
            elif metric.HasField("llm_judge"):
                score = await judges.score(metric, case, invocations)
            else:
                continue
            scores[name_of(metric)] = score
    result = await asyncio.to_thread(score_run, case, invocations, index=index, extra_scores=scores)
    result.judge_usage.CopyFrom(judges.used.usage())
    return result


async def _custom(
    dependencies: EvaluationDependencies,
    metric: eval_set_pb2.Metric,
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
) -> eval_result_pb2.MetricScore:
    function = dependencies.metrics.get(metric.custom.name)
    if function is None:  # one of another project's metrics, kept by an import
        return no_score(metric, f"There is no metric {metric.custom.name!r} here.")
    return await asyncio.to_thread(custom.score_custom, metric, function, case, invocations)


def _unmocked(invocations: Sequence[invocation_pb2.Invocation]) -> str:
    """Return what a call that no mock answered says, if mocks are strict; else an empty text."""
    for invocation in invocations:
        for call in invocation.tools:
            if call.error.reason == error_pb2.ERROR_REASON_TOOL_NOT_MOCKED:
                return call.error.message
    return ""
