"""Evaluations of a server: start, follow, cancel, read, list and compare them; score and compare stored runs."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from bough import requests
from bough.arguments import build, wrong_type
from bough.calls import PAGE_SIZE, USE_CLIENT_DEFAULT, Calls, SyncCalls, Timeout
from bough.position import EvaluationStreamRequest
from bough.rejoining import Rejoining
from bough.stream import EvaluationStream
from bough.sync_stream import SyncEvaluationStream
from bough.v1 import (
    agent_pb2,
    eval_result_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    eval_set_pb2,
    evaluation_pb2,
    policy_pb2,
)

if TYPE_CHECKING:
    # Only the generated stub files have this name.
    from bough.v1.eval_service_pb2_grpc import EvalServiceAsyncStub

Source: TypeAlias = str | eval_result_pb2.EvalResult
"""A result, or the id of an evaluation that has one."""

InvocationSource: TypeAlias = eval_service_pb2.InvocationSource


class Evaluations:
    """Calls of the EvalService that judge.

    A stream that loses its connection rejoins the evaluation after its last event, as streams of runs do.
    """

    def __init__(self, stub: "EvalServiceAsyncStub", calls: Calls, rejoining: Rejoining | None) -> None:
        self._stub, self._calls, self._rejoining = stub, calls, rejoining

    def run(
        self,
        eval_set: eval_set_pb2.EvalSet,
        *,
        agent: str = "",
        definitions: Iterable[agent_pb2.AgentDefinition] = (),
        runs: int | None = None,
        jobs: int | None = None,
        gates: Iterable[str] = (),
        budget: policy_pb2.Limits | None = None,
        baseline: Source | None = None,
        allow_removed: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> EvaluationStream:
        """Start an evaluation and follow it to its end.

        Default: a new request id, so that a dropped connection never starts a second evaluation. `timeout` (seconds;
        default: none) bounds following it, not the evaluation. Raises InvalidRequest with every violation, or NotFound.
        """
        request = requests.evaluate_request(
            eval_set,
            agent=agent,
            definitions=definitions,
            runs=runs,
            jobs=jobs,
            gates=gates,
            budget=budget,
            baseline=None if baseline is None else source_of("baseline", baseline),
            allow_removed=allow_removed,
            labels=labels,
            request_id=request_id,
            heartbeat=heartbeat,
        )
        return self._stream(request, timeout)

    def watch(
        self,
        evaluation_id: str,
        *,
        after_sequence: int = 0,
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> EvaluationStream:
        """Follow an evaluation, live or ended, after a sequence. Raises NotFound or OutOfRange."""
        request = requests.watch_evaluation_request(evaluation_id, after_sequence=after_sequence, heartbeat=heartbeat)
        return self._stream(request, timeout)

    async def cancel(
        self, evaluation_id: str, *, note: str = "", timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> evaluation_pb2.Evaluation:
        """Request cancellation of an evaluation; its end follows as events. One that has ended stays as it is."""
        request = build(eval_service_pb2.CancelEvaluationRequest, evaluation_id=evaluation_id, note=note)
        return (await self._calls.call(self._stub.CancelEvaluation, request, timeout)).evaluation

    async def delete(self, evaluation_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """Delete an evaluation that has ended; its runs are kept. Raises NotFound, or InvalidRequest if it has not."""
        request = build(eval_service_pb2.DeleteEvaluationRequest, evaluation_id=evaluation_id)
        await self._calls.call(self._stub.DeleteEvaluation, request, timeout)

    async def get(self, evaluation_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> evaluation_pb2.Evaluation:
        """Return an evaluation. Raises NotFound."""
        request = build(eval_service_pb2.GetEvaluationRequest, evaluation_id=evaluation_id, page_size=1)
        return (await self._calls.call(self._stub.GetEvaluation, request, timeout)).evaluation

    async def result(
        self, evaluation_id: str, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.EvalResult:
        """Return everything that an evaluation found so far. Raises NotFound."""
        request = build(eval_service_pb2.GetEvaluationRequest, evaluation_id=evaluation_id, page_size=page_size)
        result: eval_result_pb2.EvalResult | None = None
        while True:
            response = await self._calls.call(self._stub.GetEvaluation, request, timeout)
            result = _joined(result, response.result)
            if not response.next_page_token:
                return result
            request.page_token = response.next_page_token

    def list(
        self,
        *,
        set_name: str = "",
        agent: str = "",
        states: Iterable[requests.State] = (),
        labels: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> AsyncIterator[evaluation_pb2.Evaluation]:
        """List the evaluations that match every filter that is set, newest first."""
        request = requests.list_evaluations_request(
            set_name=set_name, agent=agent, states=states, labels=labels, page_size=page_size
        )
        return self._calls.pages(
            self._stub.ListEvaluations, request, lambda response: response.evaluations, timeout=timeout
        )

    async def compare(
        self, baseline: Source, candidate: Source, *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.EvalComparison:
        """Compare two results. Raises NotFound."""
        request = build(
            eval_service_pb2.CompareEvaluationsRequest,
            baseline=source_of("baseline", baseline),
            candidate=source_of("candidate", candidate),
        )
        return (await self._calls.call(self._stub.CompareEvaluations, request, timeout)).comparison

    async def score(
        self,
        invocations: Iterable[InvocationSource],
        *,
        expect: eval_set_pb2.Expectation | None = None,
        metrics: Iterable[eval_set_pb2.Metric] = (),
        timeout: float | None = None,
    ) -> eval_result_pb2.EvalResult:
        """Judge stored runs or given records; nothing runs but judges, which may take minutes.

        `timeout` is in seconds (default: none). Raises NotFound, OutOfRange or InvalidRequest.
        """
        request = build(
            eval_service_pb2.ScoreInvocationsRequest, invocations=invocations, expect=expect, metrics=metrics
        )
        return (await self._calls.call(self._stub.ScoreInvocations, request, timeout)).result

    async def diff(
        self, left: InvocationSource, right: InvocationSource, *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.InvocationDiff:
        """Compare the trees of two runs. Raises NotFound or OutOfRange."""
        request = build(eval_service_pb2.DiffInvocationsRequest, left=left, right=right)
        return (await self._calls.call(self._stub.DiffInvocations, request, timeout)).diff

    def _stream(self, request: EvaluationStreamRequest, timeout: float | None) -> EvaluationStream:
        return EvaluationStream(
            self._stub,
            request,
            read_result=self.result,
            timeout=timeout,
            calls=self._calls,
            rejoining=self._rejoining,
        )


class SyncEvaluations:
    """Calls of the EvalService that judge, for programs without an event loop; streams rejoin as those of runs do."""

    def __init__(
        self, stub: eval_service_pb2_grpc.EvalServiceStub, calls: SyncCalls, rejoining: Rejoining | None
    ) -> None:
        self._stub, self._calls, self._rejoining = stub, calls, rejoining

    def run(
        self,
        eval_set: eval_set_pb2.EvalSet,
        *,
        agent: str = "",
        definitions: Iterable[agent_pb2.AgentDefinition] = (),
        runs: int | None = None,
        jobs: int | None = None,
        gates: Iterable[str] = (),
        budget: policy_pb2.Limits | None = None,
        baseline: Source | None = None,
        allow_removed: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> SyncEvaluationStream:
        """Start an evaluation and follow it to its end.

        Default: a new request id, so that a dropped connection never starts a second evaluation. `timeout` (seconds;
        default: none) bounds following it, not the evaluation. Raises InvalidRequest with every violation, or NotFound.
        """
        request = requests.evaluate_request(
            eval_set,
            agent=agent,
            definitions=definitions,
            runs=runs,
            jobs=jobs,
            gates=gates,
            budget=budget,
            baseline=None if baseline is None else source_of("baseline", baseline),
            allow_removed=allow_removed,
            labels=labels,
            request_id=request_id,
            heartbeat=heartbeat,
        )
        return self._stream(request, timeout)

    def watch(
        self,
        evaluation_id: str,
        *,
        after_sequence: int = 0,
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> SyncEvaluationStream:
        """Follow an evaluation, live or ended, after a sequence. Raises NotFound or OutOfRange."""
        request = requests.watch_evaluation_request(evaluation_id, after_sequence=after_sequence, heartbeat=heartbeat)
        return self._stream(request, timeout)

    def cancel(
        self, evaluation_id: str, *, note: str = "", timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> evaluation_pb2.Evaluation:
        """Request cancellation of an evaluation; its end follows as events. One that has ended stays as it is."""
        request = build(eval_service_pb2.CancelEvaluationRequest, evaluation_id=evaluation_id, note=note)
        return self._calls.call(self._stub.CancelEvaluation, request, timeout).evaluation

    def delete(self, evaluation_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """Delete an evaluation that has ended; its runs are kept. Raises NotFound, or InvalidRequest if it has not."""
        request = build(eval_service_pb2.DeleteEvaluationRequest, evaluation_id=evaluation_id)
        self._calls.call(self._stub.DeleteEvaluation, request, timeout)

    def get(self, evaluation_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> evaluation_pb2.Evaluation:
        """Return an evaluation. Raises NotFound."""
        request = build(eval_service_pb2.GetEvaluationRequest, evaluation_id=evaluation_id, page_size=1)
        return self._calls.call(self._stub.GetEvaluation, request, timeout).evaluation

    def result(
        self, evaluation_id: str, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.EvalResult:
        """Return everything that an evaluation found so far. Raises NotFound."""
        request = build(eval_service_pb2.GetEvaluationRequest, evaluation_id=evaluation_id, page_size=page_size)
        result: eval_result_pb2.EvalResult | None = None
        while True:
            response = self._calls.call(self._stub.GetEvaluation, request, timeout)
            result = _joined(result, response.result)
            if not response.next_page_token:
                return result
            request.page_token = response.next_page_token

    def list(
        self,
        *,
        set_name: str = "",
        agent: str = "",
        states: Iterable[requests.State] = (),
        labels: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[evaluation_pb2.Evaluation]:
        """List the evaluations that match every filter that is set, newest first."""
        request = requests.list_evaluations_request(
            set_name=set_name, agent=agent, states=states, labels=labels, page_size=page_size
        )
        return self._calls.pages(
            self._stub.ListEvaluations, request, lambda response: response.evaluations, timeout=timeout
        )

    def compare(
        self, baseline: Source, candidate: Source, *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.EvalComparison:
        """Compare two results. Raises NotFound."""
        request = build(
            eval_service_pb2.CompareEvaluationsRequest,
            baseline=source_of("baseline", baseline),
            candidate=source_of("candidate", candidate),
        )
        return self._calls.call(self._stub.CompareEvaluations, request, timeout).comparison

    def score(
        self,
        invocations: Iterable[InvocationSource],
        *,
        expect: eval_set_pb2.Expectation | None = None,
        metrics: Iterable[eval_set_pb2.Metric] = (),
        timeout: float | None = None,
    ) -> eval_result_pb2.EvalResult:
        """Judge stored runs or given records; nothing runs but judges, which may take minutes.

        `timeout` is in seconds (default: none). Raises NotFound, OutOfRange or InvalidRequest.
        """
        request = build(
            eval_service_pb2.ScoreInvocationsRequest, invocations=invocations, expect=expect, metrics=metrics
        )
        return self._calls.call(self._stub.ScoreInvocations, request, timeout).result

    def diff(
        self, left: InvocationSource, right: InvocationSource, *, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> eval_result_pb2.InvocationDiff:
        """Compare the trees of two runs. Raises NotFound or OutOfRange."""
        request = build(eval_service_pb2.DiffInvocationsRequest, left=left, right=right)
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


def run_source(run_id: str, *, as_of_sequence: int = 0) -> InvocationSource:
    """Return a stored run as something to score or to compare, up to a sequence if one is given."""
    return InvocationSource(run=build(eval_service_pb2.RunRef, run_id=run_id, as_of_sequence=as_of_sequence))


def source_of(name: str, source: Source) -> eval_service_pb2.EvalSource:
    """Return a result, or the id of an evaluation, as requests name it; `name` is that of the argument."""
    if isinstance(source, str):
        return eval_service_pb2.EvalSource(evaluation_id=source)
    if not isinstance(source, eval_result_pb2.EvalResult):
        raise wrong_type(name, "an EvalResult or the id of an evaluation", source)
    return eval_service_pb2.EvalSource(result=source)


def _joined(so_far: eval_result_pb2.EvalResult | None, page: eval_result_pb2.EvalResult) -> eval_result_pb2.EvalResult:
    """Return the last page's result with the cases of all pages so far."""
    if so_far is None:
        return page
    cases = [*so_far.cases, *page.cases]
    del page.cases[:]
    page.cases.extend(cases)
    return page
