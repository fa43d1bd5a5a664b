"""Evaluations of a server: start, follow, cancel, read, list and compare them; score and compare stored runs."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import grpc
from grpc import aio

from bough import requests
from bough.calls import PAGE_SIZE, Calls, SyncCalls
from bough.errors import CallFailed, ended_early, from_rpc_error
from bough.rejoining import RejoinBackoff, Rejoining
from bough.v1 import (
    agent_pb2,
    eval_result_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    eval_set_pb2,
    evaluation_pb2,
    execution_pb2,
    invocation_pb2,
    policy_pb2,
)

if TYPE_CHECKING:
    # Only the generated stub files have this name.
    from bough.v1.eval_service_pb2_grpc import EvalServiceAsyncStub

Source: TypeAlias = str | eval_result_pb2.EvalResult
"""A result, or the id of an evaluation that has one."""

InvocationSource: TypeAlias = invocation_pb2.InvocationSource

_Response: TypeAlias = eval_service_pb2.EvaluateResponse | eval_service_pb2.WatchEvaluationResponse
_Request: TypeAlias = eval_service_pb2.EvaluateRequest | eval_service_pb2.WatchEvaluationRequest
_Call: TypeAlias = (
    aio.UnaryStreamCall[eval_service_pb2.EvaluateRequest, eval_service_pb2.EvaluateResponse]
    | aio.UnaryStreamCall[eval_service_pb2.WatchEvaluationRequest, eval_service_pb2.WatchEvaluationResponse]
)

EVALUATION_ID_KEY: Final = "bough-evaluation-id"
"""Initial metadata of every stream of an evaluation: its id, sent before the first event."""

_TERMINAL: Final = frozenset({"evaluation_completed", "evaluation_failed", "evaluation_cancelled"})
_ENDED: Final = frozenset(
    {
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
        execution_pb2.EXECUTION_STATE_FAILED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
    }
)


class _SyncCall(Protocol):
    def __iter__(self) -> Iterator[_Response]: ...
    def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...
    def cancel(self) -> object: ...


class _Place:
    """Position of one stream in the log of an evaluation, over as many calls as it takes.

    The first call is repeated under its request id until the server has accepted it. From then on the evaluation is
    watched from the last event.
    """

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._evaluation_id, self._received, self.is_over = "", 0, False
        if isinstance(request, eval_service_pb2.WatchEvaluationRequest):
            self._evaluation_id, self._received = request.evaluation_id, request.after_sequence

    def accept(self, evaluation_id: str | bytes | None) -> bool:
        """Read the id in a stream's initial metadata. Return whether there is one: then a server accepted the call."""
        if isinstance(evaluation_id, str):
            self._evaluation_id = evaluation_id
        return isinstance(evaluation_id, str)

    def next_request(self) -> _Request:
        """Return the request that continues from here."""
        if not self._evaluation_id:
            return self._request
        return eval_service_pb2.WatchEvaluationRequest(
            evaluation_id=self._evaluation_id, after_sequence=self._received, follow=self._request.follow
        )

    def request_of_end(self) -> eval_service_pb2.GetEvaluationRequest | None:
        """Return the request whose answer says whether the log ends here; None before the evaluation is known."""
        if not self._evaluation_id:
            return None
        return eval_service_pb2.GetEvaluationRequest(evaluation_id=self._evaluation_id)

    def is_at_end_of(self, evaluation: evaluation_pb2.Evaluation) -> bool:
        """Return whether an evaluation has ended at or before this position."""
        return evaluation.state in _ENDED and evaluation.last_sequence <= self._received

    def new_events(self, response: _Response) -> list[evaluation_pb2.EvaluationEvent]:
        """Return the events of a response that are new, in order."""
        new = [event for event in response.batch.events if event.sequence > self._received]
        for event in new:
            self._received = event.sequence
            self.is_over = event.WhichOneof("payload") in _TERMINAL
        return new


class Evaluations:
    """Calls of the EvalService that judge.

    A stream that loses its connection rejoins the evaluation after its last event, as streams of runs do.
    """

    def __init__(self, stub: "EvalServiceAsyncStub", calls: Calls, rejoining: Rejoining | None) -> None:
        self._stub, self._calls, self._rejoining = stub, calls, rejoining or Rejoining()

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
        allow_incomplete_baseline: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        heartbeat: float | None = None,
        event_names: Iterable[str] = (),
        without_trees: bool = False,
    ) -> AsyncIterator[evaluation_pb2.EvaluationEvent]:
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
            baseline=None if baseline is None else source_of(baseline),
            allow_removed=allow_removed,
            allow_incomplete_baseline=allow_incomplete_baseline,
            labels=labels,
            request_id=request_id,
            follow=requests.evaluation_follow_options(
                heartbeat=heartbeat, event_names=event_names, without_trees=without_trees
            ),
        )
        return self._follow(request, timeout)

    def watch(
        self,
        evaluation_id: str,
        *,
        after_sequence: int = 0,
        timeout: float | None = None,
        heartbeat: float | None = None,
        event_names: Iterable[str] = (),
        without_trees: bool = False,
    ) -> AsyncIterator[evaluation_pb2.EvaluationEvent]:
        """Follow an evaluation, live or ended, after a sequence. Raises NotFound or OutOfRange."""
        follow = requests.evaluation_follow_options(
            heartbeat=heartbeat, event_names=event_names, without_trees=without_trees
        )
        request = requests.watch_evaluation_request(evaluation_id, after_sequence=after_sequence, follow=follow)
        return self._follow(request, timeout)

    async def cancel(self, evaluation_id: str, *, note: str = "") -> evaluation_pb2.Evaluation:
        """Request cancellation of an evaluation; its end follows as events. One that has ended stays as it is."""
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=evaluation_id, note=note)
        return (await self._calls.call(self._stub.CancelEvaluation, request)).evaluation

    async def delete(self, evaluation_id: str) -> None:
        """Delete an evaluation that has ended; its runs are kept. Raises NotFound or FailedPrecondition."""
        request = eval_service_pb2.DeleteEvaluationRequest(evaluation_id=evaluation_id)
        await self._calls.call(self._stub.DeleteEvaluation, request)

    async def get(self, evaluation_id: str) -> evaluation_pb2.Evaluation:
        """Return an evaluation. Raises NotFound."""
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=evaluation_id)
        return (await self._calls.call(self._stub.GetEvaluation, request)).evaluation

    async def result(self, evaluation_id: str, *, page_size: int = PAGE_SIZE) -> eval_result_pb2.EvalResult:
        """Return everything that an evaluation found so far. Raises NotFound."""
        cases = [case async for case in self.cases(evaluation_id, page_size=page_size)]
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=evaluation_id)
        result = (await self._calls.call(self._stub.GetEvaluation, request)).result
        result.cases.extend(cases)
        return result

    def cases(
        self,
        evaluation_id: str,
        *,
        verdicts: Iterable[requests.Verdict] = (),
        labels: Mapping[str, str] | None = None,
        case_ids: Iterable[str] = (),
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[eval_result_pb2.CaseResult]:
        """List the cases of an evaluation that match every filter that is set, in the order of the set.

        Pages are fetched as they are needed. Raises NotFound.
        """
        request = requests.list_case_results_request(
            evaluation_id, verdicts=verdicts, labels=labels, case_ids=case_ids, page_size=page_size
        )
        return self._calls.pages(self._stub.ListCaseResults, request, lambda response: response.cases)

    def list(
        self,
        *,
        eval_set_name: str = "",
        agent: str = "",
        states: Iterable[requests.State] = (),
        labels: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[evaluation_pb2.Evaluation]:
        """List the evaluations that match every filter that is set, newest first."""
        request = requests.list_evaluations_request(
            eval_set_name=eval_set_name, agent=agent, states=states, labels=labels, page_size=page_size
        )
        return self._calls.pages(self._stub.ListEvaluations, request, lambda response: response.evaluations)

    async def compare(self, baseline: Source, candidate: Source) -> eval_result_pb2.EvalComparison:
        """Compare two results. Raises NotFound."""
        request = eval_service_pb2.CompareEvaluationsRequest(
            baseline=source_of(baseline), candidate=source_of(candidate)
        )
        return (await self._calls.call(self._stub.CompareEvaluations, request)).comparison

    async def score(
        self,
        invocations: Iterable[InvocationSource],
        *,
        expect: eval_set_pb2.EvalExpectation | None = None,
        metrics: Iterable[eval_set_pb2.EvalMetric] = (),
        timeout: float | None = None,
    ) -> eval_result_pb2.EvalResult:
        """Judge stored runs or given records; nothing runs but judges, which may take minutes.

        `timeout` is in seconds (default: none). Raises NotFound, OutOfRange or InvalidRequest.
        """
        request = eval_service_pb2.ScoreInvocationsRequest(invocations=invocations, expect=expect, metrics=metrics)
        return (await replace(self._calls, timeout=timeout).call(self._stub.ScoreInvocations, request)).result

    async def diff(self, left: InvocationSource, right: InvocationSource) -> eval_result_pb2.InvocationDiff:
        """Compare the trees of two runs. Raises NotFound or OutOfRange."""
        request = eval_service_pb2.DiffInvocationsRequest(before=left, after=right)
        return (await self._calls.call(self._stub.DiffInvocations, request)).diff

    async def _follow(self, request: _Request, timeout: float | None) -> AsyncIterator[evaluation_pb2.EvaluationEvent]:
        place = _Place(request)
        backoff = RejoinBackoff(self._rejoining, timeout=timeout, contact=self._calls.contact, subject="evaluation")
        while not place.is_over:
            call = self._begin(place.next_request(), backoff.remaining())
            try:
                if place.accept((await call.initial_metadata()).get(EVALUATION_ID_KEY)):
                    backoff.answered()
                async for response in call:
                    backoff.progressed()
                    for event in place.new_events(response):
                        yield event
                failed, is_early = None, not place.is_over
            except aio.AioRpcError as error:
                failed, is_early = from_rpc_error(error), False
            finally:
                call.cancel()
            if is_early and (failed := await self._failure(place)) is None:
                return
            if failed is not None and not place.is_over:
                await asyncio.sleep(backoff.delay_after(failed, is_stuck=is_early))

    async def _failure(self, place: _Place) -> CallFailed | None:
        """Return why a stream that ended without an error, and without an end, has to rejoin; None if it need not."""
        if (request := place.request_of_end()) is not None:
            try:
                evaluation = (await self._calls.call(self._stub.GetEvaluation, request)).evaluation
            except CallFailed as failed:
                return failed
            if place.is_at_end_of(evaluation):
                return None
        return ended_early("evaluation")

    def _begin(self, request: _Request, timeout: float | None) -> _Call:
        options = self._calls.options(timeout)
        if isinstance(request, eval_service_pb2.EvaluateRequest):
            return self._stub.Evaluate(request, **options)
        return self._stub.WatchEvaluation(request, **options)


class SyncEvaluations:
    """Calls of the EvalService that judge, for programs without an event loop; streams rejoin as those of runs do."""

    def __init__(
        self, stub: eval_service_pb2_grpc.EvalServiceStub, calls: SyncCalls, rejoining: Rejoining | None
    ) -> None:
        self._stub, self._calls, self._rejoining = stub, calls, rejoining or Rejoining()

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
        allow_incomplete_baseline: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        heartbeat: float | None = None,
        event_names: Iterable[str] = (),
        without_trees: bool = False,
    ) -> Iterator[evaluation_pb2.EvaluationEvent]:
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
            baseline=None if baseline is None else source_of(baseline),
            allow_removed=allow_removed,
            allow_incomplete_baseline=allow_incomplete_baseline,
            labels=labels,
            request_id=request_id,
            follow=requests.evaluation_follow_options(
                heartbeat=heartbeat, event_names=event_names, without_trees=without_trees
            ),
        )
        return self._follow(request, timeout)

    def watch(
        self,
        evaluation_id: str,
        *,
        after_sequence: int = 0,
        timeout: float | None = None,
        heartbeat: float | None = None,
        event_names: Iterable[str] = (),
        without_trees: bool = False,
    ) -> Iterator[evaluation_pb2.EvaluationEvent]:
        """Follow an evaluation, live or ended, after a sequence. Raises NotFound or OutOfRange."""
        follow = requests.evaluation_follow_options(
            heartbeat=heartbeat, event_names=event_names, without_trees=without_trees
        )
        request = requests.watch_evaluation_request(evaluation_id, after_sequence=after_sequence, follow=follow)
        return self._follow(request, timeout)

    def cancel(self, evaluation_id: str, *, note: str = "") -> evaluation_pb2.Evaluation:
        """Request cancellation of an evaluation; its end follows as events. One that has ended stays as it is."""
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=evaluation_id, note=note)
        return self._calls.call(self._stub.CancelEvaluation, request).evaluation

    def delete(self, evaluation_id: str) -> None:
        """Delete an evaluation that has ended; its runs are kept. Raises NotFound or FailedPrecondition."""
        request = eval_service_pb2.DeleteEvaluationRequest(evaluation_id=evaluation_id)
        self._calls.call(self._stub.DeleteEvaluation, request)

    def get(self, evaluation_id: str) -> evaluation_pb2.Evaluation:
        """Return an evaluation. Raises NotFound."""
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=evaluation_id)
        return self._calls.call(self._stub.GetEvaluation, request).evaluation

    def result(self, evaluation_id: str, *, page_size: int = PAGE_SIZE) -> eval_result_pb2.EvalResult:
        """Return everything that an evaluation found so far. Raises NotFound."""
        cases = [*self.cases(evaluation_id, page_size=page_size)]
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=evaluation_id)
        result = self._calls.call(self._stub.GetEvaluation, request).result
        result.cases.extend(cases)
        return result

    def cases(
        self,
        evaluation_id: str,
        *,
        verdicts: Iterable[requests.Verdict] = (),
        labels: Mapping[str, str] | None = None,
        case_ids: Iterable[str] = (),
        page_size: int = PAGE_SIZE,
    ) -> Iterator[eval_result_pb2.CaseResult]:
        """List the cases of an evaluation that match every filter that is set, in the order of the set.

        Pages are fetched as they are needed. Raises NotFound.
        """
        request = requests.list_case_results_request(
            evaluation_id, verdicts=verdicts, labels=labels, case_ids=case_ids, page_size=page_size
        )
        return self._calls.pages(self._stub.ListCaseResults, request, lambda response: response.cases)

    def list(
        self,
        *,
        eval_set_name: str = "",
        agent: str = "",
        states: Iterable[requests.State] = (),
        labels: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[evaluation_pb2.Evaluation]:
        """List the evaluations that match every filter that is set, newest first."""
        request = requests.list_evaluations_request(
            eval_set_name=eval_set_name, agent=agent, states=states, labels=labels, page_size=page_size
        )
        return self._calls.pages(self._stub.ListEvaluations, request, lambda response: response.evaluations)

    def compare(self, baseline: Source, candidate: Source) -> eval_result_pb2.EvalComparison:
        """Compare two results. Raises NotFound."""
        request = eval_service_pb2.CompareEvaluationsRequest(
            baseline=source_of(baseline), candidate=source_of(candidate)
        )
        return self._calls.call(self._stub.CompareEvaluations, request).comparison

    def score(
        self,
        invocations: Iterable[InvocationSource],
        *,
        expect: eval_set_pb2.EvalExpectation | None = None,
        metrics: Iterable[eval_set_pb2.EvalMetric] = (),
        timeout: float | None = None,
    ) -> eval_result_pb2.EvalResult:
        """Judge stored runs or given records; nothing runs but judges, which may take minutes.

        `timeout` is in seconds (default: none). Raises NotFound, OutOfRange or InvalidRequest.
        """
        request = eval_service_pb2.ScoreInvocationsRequest(invocations=invocations, expect=expect, metrics=metrics)
        return replace(self._calls, timeout=timeout).call(self._stub.ScoreInvocations, request).result

    def diff(self, left: InvocationSource, right: InvocationSource) -> eval_result_pb2.InvocationDiff:
        """Compare the trees of two runs. Raises NotFound or OutOfRange."""
        request = eval_service_pb2.DiffInvocationsRequest(before=left, after=right)
        return self._calls.call(self._stub.DiffInvocations, request).diff

    def _follow(self, request: _Request, timeout: float | None) -> Iterator[evaluation_pb2.EvaluationEvent]:
        place = _Place(request)
        backoff = RejoinBackoff(self._rejoining, timeout=timeout, contact=self._calls.contact, subject="evaluation")
        while not place.is_over:
            failed: CallFailed | None
            call = self._begin(place.next_request(), backoff.remaining())
            try:
                if place.accept(dict(call.initial_metadata()).get(EVALUATION_ID_KEY)):
                    backoff.answered()
                for response in call:
                    backoff.progressed()
                    yield from place.new_events(response)
                failed, is_early = None, not place.is_over
            except grpc.RpcError as error:
                failed, is_early = from_rpc_error(error), False
            finally:
                call.cancel()
            if is_early and (failed := self._failure(place)) is None:
                return
            if failed is not None and not place.is_over:
                time.sleep(backoff.delay_after(failed, is_stuck=is_early))

    def _failure(self, place: _Place) -> CallFailed | None:
        """Return why a stream that ended without an error, and without an end, has to rejoin; None if it need not."""
        if (request := place.request_of_end()) is not None:
            try:
                evaluation = self._calls.call(self._stub.GetEvaluation, request).evaluation
            except CallFailed as failed:
                return failed
            if place.is_at_end_of(evaluation):
                return None
        return ended_early("evaluation")

    def _begin(self, request: _Request, timeout: float | None) -> _SyncCall:
        options = self._calls.options(timeout)
        if isinstance(request, eval_service_pb2.EvaluateRequest):
            return self._stub.Evaluate(request, **options)
        return self._stub.WatchEvaluation(request, **options)


def run_source(run_id: str, *, as_of_sequence: int = 0) -> InvocationSource:
    """Return a stored run as something to score or to compare, up to a sequence if one is given."""
    return InvocationSource(run=invocation_pb2.RunRef(run_id=run_id, as_of_sequence=as_of_sequence))


def source_of(source: Source) -> eval_result_pb2.EvalSource:
    """Return a result, or the id of an evaluation, as requests name it."""
    if isinstance(source, str):
        return eval_result_pb2.EvalSource(evaluation_id=source)
    return eval_result_pb2.EvalSource(result=source)
