"""Results in the form of trpc-agent-go, so that its reader finds its fields.

Each run of a case is an `EvalCaseResult` with a `runId` from 1. Unlike there, runs that crashed stay in the result, as
failed with an `errorMessage`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bough.v1.eval_result_pb2 import (
    VERDICT_FAILED,
    VERDICT_NOT_EVALUATED,
    VERDICT_PASSED,
    CaseResult,
    CaseTrialResult,
    EvalAgent,
    EvalCall,
    EvalResult,
    EvalTurnResult,
    MetricScore,
    Verdict,
)
from bough.v1.eval_set_pb2 import EvalTurn, ExpectedTool
from bough_server.evals.importers.values import JsonValue
from bough_server.evals.metrics.statistics import reaches
from bough_server.matching.values import parse_json
from bough_server.messages import effective_arguments

_STATUSES: Final[Mapping[Verdict.ValueType, str]] = {
    VERDICT_PASSED: "passed",
    VERDICT_FAILED: "failed",
    VERDICT_NOT_EVALUATED: "not_evaluated",
}
_COUNTS: Final = {"passed": "passed", "failed": "failed", "not_evaluated": "notEvaluated"}

_Members = dict[str, JsonValue]


def trpc_result(result: EvalResult) -> _Members:
    """Return a result as the JSON object of a result file, which leaves zeros and empty values out."""
    result_id = f"{result.eval_set_name}_{result.evaluation_id}" if result.evaluation_id else result.eval_set_name
    return _without_zeros(
        {
            "evalSetResultId": result_id,
            "evalSetResultName": result_id,
            "evalSetId": result.eval_set_name,
            "evalCaseResults": [
                _case_result(result.eval_set_name, case, run) for case in result.cases for run in case.trials
            ],
            "summary": _summary(result),
            "creationTimestamp": result.create_time.ToNanoseconds() / 1e9 if result.HasField("create_time") else 0,
        }
    )


def _case_result(eval_set_name: str, case: CaseResult, run: CaseTrialResult) -> JsonValue:
    scores: list[JsonValue] = [_metric_result(score) for score in run.scores]
    turns: list[JsonValue] = []
    for index, turn in enumerate(run.turns):
        expected = case.turns[index] if index < len(case.turns) else EvalTurn()
        # The scores are those of the whole run, which of a single turn are its own.
        own = scores if len(run.turns) == 1 else []
        turns.append(
            _without_zeros(
                {
                    "actualInvocation": _build_actual_invocation(turn, expected),
                    "expectedInvocation": _build_expected_invocation(case.case_id, index, expected),
                    "evalMetricResults": own,
                }
            )
        )
    return _without_zeros(
        {
            "evalSetId": eval_set_name,
            "evalId": case.case_id,
            "runId": run.trial + 1,
            "score": 1 if run.verdict == VERDICT_PASSED else 0,
            "finalEvalStatus": _status(run.verdict),
            "errorMessage": _error_message(run),
            "overallEvalMetricResults": scores,
            "evalMetricResultPerInvocation": turns,
        }
    )


def _error_message(run: CaseTrialResult) -> str:
    """Return why a run has no verdict of its metrics; empty if it has one."""
    return run.reason if run.crashed or run.verdict == VERDICT_NOT_EVALUATED else ""


def _metric_result(score: MetricScore) -> JsonValue:
    details = _without_zeros({"reason": score.reason, "score": score.score})
    return {**_metric_summary(score), **({"details": details} if details else {})}


def _metric_summary(score: MetricScore) -> _Members:
    return _without_zeros(
        {
            "metricName": score.name,
            "score": score.score,
            "evalStatus": _status(score.verdict),
            "threshold": score.threshold,
        }
    )


def _build_actual_invocation(turn: EvalTurnResult, expected: EvalTurn) -> JsonValue:
    calls = [call for agent in turn.agents for call in agent.calls]
    return _without_zeros(
        {
            "invocationId": turn.run_id,
            "userContent": _message("user", _user_text(expected)),
            "finalResponse": _message("assistant", turn.answer),
            "tools": [_tool(number, call) for number, call in enumerate(calls, start=1)],
            "agents": _agents(turn.agents),
        }
    )


def _build_expected_invocation(case_id: str, index: int, turn: EvalTurn) -> JsonValue:
    answer = turn.expect.answer
    text = answer.exact or " ".join(answer.contains) or answer.regex or answer.json.equals_json
    return _without_zeros(
        {
            "invocationId": f"{case_id}-{index + 1}",
            "userContent": _message("user", _user_text(turn)),
            "finalResponse": _message("assistant", text),
            "tools": [_build_expected_tool(tool) for tool in turn.expect.tools],
        }
    )


def _user_text(turn: EvalTurn) -> str:
    return turn.user or "\n".join(part.text for part in turn.input.parts if part.text)


def _message(role: str, text: str) -> JsonValue:
    return {"role": role, "content": text} if text else None


def _tool(number: int, call: EvalCall) -> JsonValue:
    result = _parse_or_keep(call.result_json) if call.result_json else call.error.message or None
    tool: _Members = {"id": f"call-{number}", "name": call.name, "arguments": _parse_or_keep(effective_arguments(call))}
    return {**tool, "result": result} if result is not None else tool


def _build_expected_tool(tool: ExpectedTool) -> JsonValue:
    made: _Members = {"name": tool.name or tool.name_regex}
    for name, text in (
        ("arguments", tool.arguments_json or tool.arguments_match.equals_json or tool.arguments_match.subset_json),
        ("result", tool.result_json or tool.result_match.equals_json or tool.result_match.subset_json),
    ):
        if text:
            made[name] = _parse_or_keep(text)
    return made


def _agents(agents: Sequence[EvalAgent]) -> list[JsonValue]:
    """Return the agents, which are in preorder, each with its caller."""
    path: list[EvalAgent] = []
    made: list[JsonValue] = []
    for agent in agents:
        del path[agent.depth :]
        parent = path[-1].invocation_id if path else ""
        path.append(agent)
        made.append(
            _without_zeros(
                {
                    "invocationId": agent.invocation_id,
                    "parentInvocationId": parent,
                    "name": agent.name,
                    "branch": "/".join(one.name for one in path),
                }
            )
        )
    return made


def _parse_or_keep(text: str) -> JsonValue:
    """Return the value of a JSON text, or the text if it is none, as one that was cut."""
    try:
        return parse_json(text or "{}")
    except ValueError:
        return text


def _summary(result: EvalResult) -> JsonValue:
    indexes = sorted({run.trial for case in result.cases for run in case.trials})
    by_index = {index: [run for case in result.cases for run in case.trials if run.trial == index] for index in indexes}
    run_statuses = {index: _worst(run.verdict for run in runs) for index, runs in by_index.items()}
    return _without_zeros(
        {
            "overallStatus": _status(result.verdict),
            "numRuns": len(indexes),
            "runStatusCounts": _counts(run_statuses.values()),
            "runSummaries": [
                _without_zeros(
                    {
                        "runId": index + 1,
                        "overallStatus": _status(run_statuses[index]),
                        "caseStatusCounts": _counts(run.verdict for run in runs),
                        "metricSummaries": _metric_summaries(runs),
                    }
                )
                for index, runs in by_index.items()
            ],
            "evalCaseSummaries": [_case_summary(case) for case in result.cases],
        }
    )


def _case_summary(case: CaseResult) -> JsonValue:
    return _without_zeros(
        {
            "evalId": case.case_id,
            "overallStatus": _status(case.verdict),
            "runStatusCounts": _counts(run.verdict for run in case.trials),
            "metricSummaries": _metric_summaries(case.trials),
            "runSummaries": [
                _without_zeros(
                    {
                        "runId": run.trial + 1,
                        "finalEvalStatus": _status(run.verdict),
                        "errorMessage": _error_message(run),
                        "metricResults": [_metric_summary(score) for score in run.scores],
                    }
                )
                for run in case.trials
            ],
        }
    )


def _metric_summaries(runs: Iterable[CaseTrialResult]) -> list[JsonValue]:
    """Return each metric over runs, judged by the mean of the scores that there are."""
    by_name: dict[str, list[MetricScore]] = {}
    for run in runs:
        for score in run.scores:
            by_name.setdefault(score.name, []).append(score)
    return [_summary_of(name, scores) for name, scores in by_name.items()]


def _summary_of(name: str, scores: Sequence[MetricScore]) -> JsonValue:
    values = [score.score for score in scores if score.HasField("score")]
    mean = sum(values) / len(values) if values else 0.0
    threshold = scores[0].threshold
    status = VERDICT_NOT_EVALUATED
    if values:
        status = VERDICT_PASSED if reaches(mean, threshold) else VERDICT_FAILED
    return _without_zeros(
        {
            "metricName": name,
            "averageScore": mean,
            "evalStatus": _status(status),
            "threshold": threshold,
            "statusCounts": _counts(score.verdict for score in scores),
        }
    )


def _worst(statuses: Iterable[Verdict.ValueType]) -> Verdict.ValueType:
    found = set(statuses)
    order = (VERDICT_FAILED, VERDICT_NOT_EVALUATED)
    return next((status for status in order if status in found), VERDICT_PASSED)


def _counts(statuses: Iterable[Verdict.ValueType]) -> JsonValue:
    counts = Counter(_status(status) for status in statuses)
    return {key: counts[status] for status, key in _COUNTS.items() if counts[status]}


def _status(status: Verdict.ValueType) -> str:
    return _STATUSES.get(status, "unknown")


def _without_zeros(members: _Members) -> _Members:
    """Leave out what Go's encoder leaves out: zeros, empty texts, lists and objects, and null."""
    return {name: value for name, value in members.items() if value or value is False}
