"""Scripted evaluations: the calls of the EvalService that the fake server answers from them."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, TypeAlias

import grpc

from bough.position import EVALUATION_ID_KEY
from bough.testing.dispatch import Behavior
from bough.testing.log import ScriptedLog, never
from bough.testing.scripts import verdict
from bough.v1 import eval_result_pb2, eval_service_pb2, evaluation_pb2

_OfEvaluation: TypeAlias = (
    eval_service_pb2.WatchEvaluationRequest
    | eval_service_pb2.CancelEvaluationRequest
    | eval_service_pb2.GetEvaluationRequest
    | eval_service_pb2.ListCaseResultsRequest
)

_PAGE_SIZE: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    result: eval_result_pb2.EvalResult
    log: ScriptedLog[evaluation_pb2.EvaluationEvent]

    def describe(self) -> evaluation_pb2.Evaluation:
        return evaluation_pb2.Evaluation(
            evaluation_id=self.result.evaluation_id,
            eval_set_name=self.result.eval_set_name,
            state=self.log.state,
            verdict=self.result.verdict,
            totals=self.result.totals,
            last_sequence=len(self.log.events),
        )

    def stream(self, after: int, context: grpc.ServicerContext) -> Iterator[evaluation_pb2.EvaluationEventBatch]:
        context.send_initial_metadata(((EVALUATION_ID_KEY, self.result.evaluation_id),))
        for event in self.log.follow(after, context, never):
            yield evaluation_pb2.EvaluationEventBatch(events=[event], through_sequence=event.sequence)


class ScriptedEvaluations:
    """Evaluations by the name of their set, in the order of their scripts; one that is started has ended."""

    def __init__(self) -> None:
        self._scripts: dict[str, deque[_Evaluation]] = {}
        self._evaluations: dict[str, _Evaluation] = {}
        self._started: dict[str, _Evaluation] = {}
        self._lock = Lock()
        self.behaviors: Mapping[str, Behavior] = {
            "Evaluate": self._evaluate,
            "WatchEvaluation": self._watch,
            "CancelEvaluation": self._cancel,
            "GetEvaluation": self._get,
            "ListCaseResults": self._list_cases,
        }
        """What answers the RPCs of these names."""

    def add(
        self,
        result: eval_result_pb2.EvalResult,
        *,
        events: Iterable[evaluation_pb2.EvaluationEvent] | None,
        drops: Sequence[int],
    ) -> str:
        """Script the next evaluation of a set; return its id. Raises ValueError for events without an end."""
        with self._lock:
            evaluation_id = f"evaluation-{len(self._evaluations) + 1}"
            ids = evaluation_pb2.EvaluationEvent(evaluation_id=evaluation_id)
            log = ScriptedLog(ids, verdict(result) if events is None else events, drops)
            kept = eval_result_pb2.EvalResult()
            kept.CopyFrom(result)
            kept.evaluation_id = evaluation_id
            evaluation = self._evaluations[evaluation_id] = _Evaluation(result=kept, log=log)
            self._scripts.setdefault(result.eval_set_name, deque()).append(evaluation)
        return evaluation_id

    def _evaluate(
        self, request: eval_service_pb2.EvaluateRequest, context: grpc.ServicerContext
    ) -> Iterator[eval_service_pb2.EvaluateResponse]:
        """Start the next scripted evaluation of the set, unless the request id has started one, and stream it."""
        for batch in self._start(request, context).stream(0, context):
            yield eval_service_pb2.EvaluateResponse(batch=batch)

    def _watch(
        self, request: eval_service_pb2.WatchEvaluationRequest, context: grpc.ServicerContext
    ) -> Iterator[eval_service_pb2.WatchEvaluationResponse]:
        for batch in self._find(request, context).stream(request.after_sequence, context):
            yield eval_service_pb2.WatchEvaluationResponse(batch=batch)

    def _cancel(
        self, request: eval_service_pb2.CancelEvaluationRequest, context: grpc.ServicerContext
    ) -> eval_service_pb2.CancelEvaluationResponse:
        return eval_service_pb2.CancelEvaluationResponse(evaluation=self._find(request, context).describe())

    def _get(
        self, request: eval_service_pb2.GetEvaluationRequest, context: grpc.ServicerContext
    ) -> eval_service_pb2.GetEvaluationResponse:
        evaluation = self._find(request, context)
        result = eval_result_pb2.EvalResult()
        result.CopyFrom(evaluation.result)
        result.ClearField("cases")
        return eval_service_pb2.GetEvaluationResponse(evaluation=evaluation.describe(), result=result)

    def _list_cases(
        self, request: eval_service_pb2.ListCaseResultsRequest, context: grpc.ServicerContext
    ) -> eval_service_pb2.ListCaseResultsResponse:
        cases = [case for case in self._find(request, context).result.cases if _is_wanted(case, request.filter)]
        begin = int(request.page_token or "0")
        end = begin + (request.page_size or _PAGE_SIZE)
        token = str(end) if end < len(cases) else ""
        return eval_service_pb2.ListCaseResultsResponse(cases=cases[begin:end], next_page_token=token)

    def _start(self, request: eval_service_pb2.EvaluateRequest, context: grpc.ServicerContext) -> _Evaluation:
        name = request.eval_set.name
        with self._lock:
            if request.request_id in self._started:
                return self._started[request.request_id]
            scripts = self._scripts.get(name)
            if not scripts:
                how = f"FakeServer.add_evaluation(EvalResult(eval_set_name={name!r}, ...)) scripts the next one"
                message = f"No evaluation of the set {name!r} is scripted: {how}."
                context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
            evaluation = self._started[request.request_id] = scripts.popleft()
            evaluation.log.proceed()
            return evaluation

    def _find(self, request: _OfEvaluation, context: grpc.ServicerContext) -> _Evaluation:
        evaluation = self._evaluations.get(request.evaluation_id)
        if evaluation is None or not evaluation.log.events:
            context.abort(grpc.StatusCode.NOT_FOUND, f"There is no evaluation {request.evaluation_id}.")
        return evaluation


def _is_wanted(case: eval_result_pb2.CaseResult, wanted: evaluation_pb2.CaseResultFilter) -> bool:
    return (
        (not wanted.verdicts or case.verdict in wanted.verdicts)
        and (not wanted.case_ids or case.case_id in wanted.case_ids)
        and all(case.labels.get(key) == value for key, value in wanted.labels.items())
    )
