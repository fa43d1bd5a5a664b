"""Score a trial: the metrics that compute, those of the operator, and those that ask a model."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import structlog

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, invocation_pb2
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.judges import Judges
from bough_server.evals.job.mock_uses import count_faults, count_mock_uses
from bough_server.evals.metrics import custom
from bough_server.evals.metrics.scoring import applicable_metrics, build_not_evaluated_result, is_scorable, score_trial
from bough_server.evals.metrics.turn import no_score
from bough_server.evals.results.content import build_redactor
from bough_server.log.usage import Sums
from bough_server.matching.placeholders import match_placeholders
from bough_server.matching.secrets import REDACTED, RedactionRules
from bough_server.threads import run_in_thread
from bough_server.tools.threads import NoThread

_log = structlog.get_logger(__name__)


async def score_all_metrics(
    dependencies: EvaluationDependencies,
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
    *,
    trial: int,
    run_ids: Sequence[str],
    judges: Judges,
) -> eval_result_pb2.CaseTrialResult:
    """Return the result of a trial from the records of its turns. Raises ServerStopping and StorageFailed.

    `run_ids` are the stored runs of the records, each empty for a record that a caller gave. `judges` are those of the
    evaluation, which count the usage of each of them once. What computes runs in a thread: a
    tree of a thousand agents takes a tenth of a second.
    """
    scores: dict[str, eval_result_pb2.MetricScore] = {}
    used = Sums()
    asked = [metric for metric in applicable_metrics(case) if metric.WhichOneof("kind") in ("custom", "llm_judge")]
    can_ask = bool(asked) and await run_in_thread(_is_scorable_by_code, case, invocations)
    if can_ask:
        for metric in asked:
            if metric.HasField("custom"):
                scores[metric.name] = await _score_custom(dependencies, metric, case, invocations)
            else:
                scores[metric.name] = await judges.score(
                    metric, case, invocations, trial=trial, run_ids=run_ids, used=used
                )
    rules = dependencies.redaction
    result = await run_in_thread(_score_or_reject, case, invocations, rules, trial=trial, extra_scores=scores)
    if used.numbers:
        result.judge_usage.CopyFrom(used.usage())
    return result


def _is_scorable_by_code(case: eval_set_pb2.EvalCase, invocations: Sequence[invocation_pb2.Invocation]) -> bool:
    return not find_mock_problem(invocations) and is_scorable(case, invocations)


def _score_or_reject(
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
    rules: RedactionRules,
    *,
    trial: int,
    extra_scores: Mapping[str, eval_result_pb2.MetricScore],
) -> eval_result_pb2.CaseTrialResult:
    if mistake := find_mock_problem(invocations):
        result = build_not_evaluated_result(case, trial, mistake, invocations=invocations)
    else:
        with _match_placeholders(case, invocations, rules):
            result = score_trial(case, invocations, trial=trial, extra_scores=extra_scores)
    add_used_mocks(result, case, invocations)
    result.injected_faults.extend(
        invocation_pb2.FaultCount(index=index, count=count)
        for index, count in sorted(count_faults(invocations).items())
    )
    return result


def add_used_mocks(
    result: eval_result_pb2.CaseTrialResult,
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
) -> None:
    """Set the mocks of a case that answered in a trial, whose turns these are."""
    uses = count_mock_uses(invocations)
    # Mocks of a run come after those of the case, and a fork of a case without mocks has those of its origin.
    result.used_mocks.extend(sorted(index for index in uses.tools if index < len(case.mocks.tools)))
    result.used_agent_mocks.extend(sorted(index for index in uses.agents if index < len(case.mocks.agents)))


def _match_placeholders(
    case: eval_set_pb2.EvalCase, invocations: Sequence[invocation_pb2.Invocation], rules: RedactionRules
) -> AbstractContextManager[None]:
    """Match the placeholders in a case's expectations with what the rules remove from the records."""
    if rules.is_empty or REDACTED.encode() not in case.SerializeToString():
        return nullcontext()
    return match_placeholders(build_redactor(invocations, rules))


async def _score_custom(
    dependencies: EvaluationDependencies,
    metric: eval_set_pb2.EvalMetric,
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
) -> eval_result_pb2.MetricScore:
    function = dependencies.metrics.get(metric.custom.name)
    if function is None:  # one of another project's metrics, kept by an import
        return no_score(metric, f"There is no metric {metric.custom.name!r} here.")
    seconds = case.timeout.ToTimedelta().total_seconds()
    work = partial(custom.score_custom, metric, function, case, invocations)
    try:
        return await dependencies.threads.run_within(work, seconds)
    except NoThread:
        score = no_score(
            metric,
            f"The metric {function.name!r} was not called within {seconds:g} s: other calls of metrics have all "
            "threads. If they hang, as the server's log says then, restart the server.",
        )
        score.error_reason = error_pb2.ERROR_REASON_METRIC_QUEUE_FULL
    except TimeoutError:
        dependencies.count_hung_metric()
        run_id = invocations[0].run_id
        _log.error("metric hangs", metric=function.name, case_id=case.id, run_id=run_id, seconds=seconds)
        score = no_score(metric, f"The metric {function.name!r} has not returned within {seconds:g} s.")
        score.error_reason = error_pb2.ERROR_REASON_METRIC_TIMED_OUT
    return score


def find_mock_problem(invocations: Sequence[invocation_pb2.Invocation]) -> str:
    """Return what a call that no mock answered says, if mocks are strict; else an empty text."""
    for invocation in invocations:
        for error in (*(call.error for call in invocation.tools), *(agent.error for agent in invocation.agents)):
            if error.reason == error_pb2.ERROR_REASON_TOOL_NOT_MOCKED:
                return error.message
    return ""
