"""Evaluations of a server: start, follow, cancel, read, list and compare them; score and compare stored runs."""

# Generated from bough/evaluations.py by `make proto`, which overwrites changes.

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from bough import requests
from bough.arguments import build
from bough.calls import PAGE_SIZE, USE_CLIENT_DEFAULT, SyncCalls, Timeout
from bough.position import EvaluationStreamRequest
from bough.rejoining import Rejoining
from bough.sources import InvocationSource, Source, source_of
from bough.sync.stream import SyncEvaluationStream
from bough.v1 import (
    agent_pb2,
    eval_result_pb2,
    eval_service_pb2,
    eval_set_pb2,
    evaluation_pb2,
    follow_pb2,
    policy_pb2,
)

if TYPE_CHECKING:
    # For types alone, as in the asynchronous client.
    from bough.v1.eval_service_pb2_grpc import EvalServiceStub


class SyncEvaluations:
    """Calls of the EvalService that evaluate, for programs without an event loop.

    A stream that loses its connection rejoins the evaluation after its last event, as streams of runs do.
    """

    def __init__(self, stub: "EvalServiceStub", calls: SyncCalls, rejoining: Rejoining | None) -> None:
        self._stub, self._calls, self._rejoining = stub, calls, rejoining

    def run(
        self,
        eval_set: eval_set_pb2.EvalSet,
        *,
        agent: str = "",
        definitions: Iterable[agent_pb2.AgentDefinition] = (),
        trials: int | None = None,
        max_concurrency: int | None = None,
        gates: Iterable[str] = (),
        budget: policy_pb2.Limits | None = None,
        baseline: Source | None = None,
        allow_removed: bool = False,
        rerun_suspects: int | None = None,
        retry_crashed: int | None = None,
        matrix: eval_set_pb2.EvalMatrix | None = None,
        allow_incomplete_baseline: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        heartbeat: float | None = None,
        event_names: Iterable[str] = (),
        without_trees: bool = False,
    ) -> SyncEvaluationStream:
        """Start an evaluation and follow it to its end.

        Default: a new request id, so that a dropped connection never starts a second evaluation. `timeout` (seconds;
        default: none) bounds following it, not the evaluation. Raises InvalidRequest with every violation, or NotFound.
        """
        request = requests.evaluate_request(
            eval_set,
            agent=agent,
            definitions=definitions,
            trials=trials,
            max_concurrency=max_concurrency,
            gates=gates,
            budget=budget,
            baseline=None if baseline is None else source_of("baseline", baseline),
            allow_removed=allow_removed,
            rerun_suspects=rerun_suspects,
            retry_crashed=retry_crashed,
            matrix=matrix,
            allow_incomplete_baseline=allow_incomplete_baseline,
            labels=labels,
            request_id=request_id,
            follow=requests.evaluation_follow_options(
                heartbeat=heartbeat, event_names=event_names, without_trees=without_trees
            ),
        )
        return self._stream(request, timeout)

    def watch(
        self,
        evaluation_id: str,
        *,
        after_sequence: int = 0,
        until: follow_pb2.WatchUntil.ValueType = follow_pb2.WATCH_UNTIL_UNSPECIFIED,
        timeout: float | None = None,
        heartbeat: float | None = None,
        event_names: Iterable[str] = (),
        without_trees: bool = False,
    ) -> SyncEvaluationStream:
        """Follow an evaluation, live or ended, after a sequence. Raises NotFound or OutOfRange.

        With `until=WATCH_UNTIL_CURRENT` the stream ends after the events that there are now.
        """
        follow = requests.evaluation_follow_options(
            heartbeat=heartbeat, event_names=event_names, without_trees=without_trees, until=until
        )
        request = requests.watch_evaluation_request(evaluation_id, after_sequence=after_sequence, follow=follow)
        return self._stream(request, timeout)

    def cancel(
        self, evaluation_id: str, *, note: str = "", timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> evaluation_pb2.Evaluation:
        """Request cancellation of an evaluation; its end follows as events. One that has ended stays as it is."""
        request = build(eval_service_pb2.CancelEvaluationRequest, evaluation_id=evaluation_id, note=note)
        return self._calls.call(self._stub.CancelEvaluation, request, timeout).evaluation

    def delete(self, evaluation_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """Delete an evaluation that has ended; its runs are kept. Raises NotFound or EvaluationNotEnded."""
        request = build(eval_service_pb2.DeleteEvaluationRequest, evaluation_id=evaluation_id)
        self._calls.call(self._stub.DeleteEvaluation, request, timeout)

    def get(self, evaluation_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> evaluation_pb2.Evaluation:
        """Return an evaluation. Raises NotFound."""
        request = build(eval_service_pb2.GetEvaluationRequest, evaluation_id=evaluation_id)
        return self._calls.call(self._stub.GetEvaluation, request, timeout).evaluation

    def result(
        self, evaluation_id: str, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.EvalResult:
        """Return everything that an evaluation found so far. Raises NotFound."""
        request = build(eval_service_pb2.GetEvaluationRequest, evaluation_id=evaluation_id)
        # First: what it says of the end has to hold for the cases.
        result = self._calls.call(self._stub.GetEvaluation, request, timeout).result
        result.cases.extend([*self.cases(evaluation_id, page_size=page_size, timeout=timeout)])
        return result

    def cases(
        self,
        evaluation_id: str,
        *,
        verdicts: Iterable[requests.Verdict] = (),
        labels: Mapping[str, str] | None = None,
        case_ids: Iterable[str] = (),
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[eval_result_pb2.CaseResult]:
        """List the cases of an evaluation that match every filter that is set, in the order of the set.

        Pages are fetched as they are needed. Raises NotFound.
        """
        request = requests.list_case_results_request(
            evaluation_id, verdicts=verdicts, labels=labels, case_ids=case_ids, page_size=page_size
        )
        return self._calls.pages(self._stub.ListCaseResults, request, lambda response: response.cases, timeout=timeout)

    def list(
        self,
        *,
        eval_set_name: str = "",
        agent: str = "",
        states: Iterable[requests.State] = (),
        labels: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[evaluation_pb2.Evaluation]:
        """List the evaluations that match every filter that is set, newest first."""
        request = requests.list_evaluations_request(
            eval_set_name=eval_set_name, agent=agent, states=states, labels=labels, page_size=page_size
        )
        return self._calls.pages(
            self._stub.ListEvaluations, request, lambda response: response.evaluations, timeout=timeout
        )

    def compare(
        self,
        baseline: Source,
        candidate: Source,
        *,
        allow_incomplete_baseline: bool = False,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> eval_result_pb2.EvalComparison:
        """Compare two results. Raises NotFound, EvaluationNotEnded, or InvalidRequest for an incomplete baseline."""
        request = build(
            eval_service_pb2.CompareEvaluationsRequest,
            baseline=source_of("baseline", baseline),
            candidate=source_of("candidate", candidate),
            allow_incomplete_baseline=allow_incomplete_baseline,
        )
        return self._calls.call(self._stub.CompareEvaluations, request, timeout).comparison

    def score(
        self,
        invocations: Iterable[InvocationSource],
        *,
        expect: eval_set_pb2.EvalExpectation | None = None,
        metrics: Iterable[eval_set_pb2.EvalMetric] = (),
        timeout: float | None = None,
    ) -> eval_result_pb2.EvalResult:
        """Score stored runs or given records; nothing runs but judges, which may take minutes.

        `timeout` is in seconds (default: none). Raises NotFound, OutOfRange or InvalidRequest.
        """
        request = build(
            eval_service_pb2.ScoreInvocationsRequest, invocations=invocations, expect=expect, metrics=metrics
        )
        return self._calls.call(self._stub.ScoreInvocations, request, timeout).result

    def diff(
        self, before: InvocationSource, after: InvocationSource, *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.InvocationDiff:
        """Compare the trees of two runs. Raises NotFound or OutOfRange."""
        request = build(eval_service_pb2.DiffInvocationsRequest, before=before, after=after)
        return self._calls.call(self._stub.DiffInvocations, request, timeout).diff

    def _stream(self, request: EvaluationStreamRequest, timeout: float | None) -> SyncEvaluationStream:
        return SyncEvaluationStream(
            self._stub,
            request,
            read_result=self.result,
            timeout=timeout,
            calls=self._calls,
            rejoining=self._rejoining,
        )
