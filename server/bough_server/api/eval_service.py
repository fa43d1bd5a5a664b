"""EvalService: agent trees of runs and of events from any source, and evaluations that score them."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

from grpc import aio

from bough.v1 import eval_service_pb2 as pb
from bough.v1 import eval_service_pb2_grpc, follow_pb2
from bough_server.api.access import find_changeable
from bough_server.api.pagination import PAGE_BYTES, page_of, position_of, read_within, token_of
from bough_server.api.streaming import StreamPosition, stream_responses
from bough_server.clock import Clock
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.evals.job.evaluations import Evaluations
from bough_server.evals.job.given import diff_invocations, score_invocations
from bough_server.evals.job.result_pages import CaseFilter, ResultPages
from bough_server.evals.results.compare import compare, shrink_comparison
from bough_server.evals.trees.folding import TreeBuilder, read_invocation
from bough_server.identity import Caller, Scope
from bough_server.log import evaluation_events
from bough_server.log.views import EvaluationSelection
from bough_server.messages import copy_of
from bough_server.observability.tracing import Parent
from bough_server.runs.runs import Runs
from bough_server.store.ports.evaluations import EvaluationFilter
from bough_server.store.ports.log import EventLog
from bough_server.threads import run_in_thread
from bough_server.tree.fold import Tree

EVALUATION_ID_KEY: Final = "bough-evaluation-id"
"""Initial metadata of the streams of evaluations: the evaluation, before its first event."""

_CASES: Final = "cases"

MAX_EVENTS: Final = 1_000_000
MAX_BYTES: Final = 256 * 1024 * 1024
"""The most events and bytes that one call aggregates: everything that the record may need stays in memory meanwhile."""


class EvalService(eval_service_pb2_grpc.EvalServiceServicer):
    """Returns the aggregated agent trees of runs, and scores them."""

    def __init__(
        self, *, runs: Runs, log: EventLog, evaluations: Evaluations, caller: Callable[[], Caller], clock: Clock
    ) -> None:
        self._runs, self._log, self._evaluations = runs, log, evaluations
        self._caller, self._clock = caller, clock
        self._pages = ResultPages(evaluations.dependencies)

    async def GetInvocation(
        self,
        request: pb.GetInvocationRequest,
        context: aio.ServicerContext[pb.GetInvocationRequest, pb.GetInvocationResponse],
    ) -> pb.GetInvocationResponse:
        """Return the record of a run, up to the end of its log or the requested sequence."""
        invocation = await read_invocation(
            self._runs,
            self._log,
            self._caller().visible,
            request.run_id,
            as_of_sequence=request.as_of_sequence,
            options=request.options,
        )
        return pb.GetInvocationResponse(invocation=invocation)

    async def AggregateEvents(
        self,
        request_iterator: AsyncIterator[pb.AggregateEventsRequest],
        context: aio.ServicerContext[pb.AggregateEventsRequest, pb.AggregateEventsResponse],
    ) -> pb.AggregateEventsResponse:
        """Return the record of the events in the request, in the order of arrival."""
        return pb.AggregateEventsResponse(invocation=await (await _fold_events(request_iterator)).invocation())

    async def Evaluate(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.EvaluateRequest, context: aio.ServicerContext[pb.EvaluateRequest, pb.EvaluateResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Start an evaluation and follow it to its end."""
        caller, trace = self._caller(), Parent.of_call(context.invocation_metadata() or ())
        record = await self._evaluations.start(caller.principal, request, trace=trace, scope=caller.visible)
        follow = copy_of(request.follow)
        del request  # and with it the memory of its set, which a part of it would keep as well
        async with aclosing(self._follow(record.evaluation.evaluation_id, follow, context)) as messages:
            async for message in messages:
                yield message

    async def WatchEvaluation(  # type: ignore[override]  # the responses are serialized already
        self,
        request: pb.WatchEvaluationRequest,
        context: aio.ServicerContext[pb.WatchEvaluationRequest, pb.WatchEvaluationResponse],
    ) -> AsyncGenerator[bytes, None]:
        """Follow an evaluation from any sequence."""
        await self._evaluations.get(self._caller().visible, request.evaluation_id)
        stream = self._follow(request.evaluation_id, request.follow, context, after=request.after_sequence)
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def CancelEvaluation(
        self,
        request: pb.CancelEvaluationRequest,
        context: aio.ServicerContext[pb.CancelEvaluationRequest, pb.CancelEvaluationResponse],
    ) -> pb.CancelEvaluationResponse:
        """Request that an evaluation stops."""
        caller = self._caller()
        scope = await self._find_changeable(caller, request.evaluation_id)
        record = await self._evaluations.cancel(caller.principal, request.evaluation_id, note=request.note, scope=scope)
        return pb.CancelEvaluationResponse(evaluation=record.evaluation)

    async def DeleteEvaluation(
        self,
        request: pb.DeleteEvaluationRequest,
        context: aio.ServicerContext[pb.DeleteEvaluationRequest, pb.DeleteEvaluationResponse],
    ) -> pb.DeleteEvaluationResponse:
        """Delete an evaluation that has ended."""
        scope = await self._find_changeable(self._caller(), request.evaluation_id)
        await self._evaluations.delete(scope, request.evaluation_id)
        return pb.DeleteEvaluationResponse()

    async def GetEvaluation(
        self,
        request: pb.GetEvaluationRequest,
        context: aio.ServicerContext[pb.GetEvaluationRequest, pb.GetEvaluationResponse],
    ) -> pb.GetEvaluationResponse:
        """Return an evaluation and what it found so far, without its cases."""
        record = await self._evaluations.get(self._caller().visible, request.evaluation_id)
        result = await self._pages.result(request.evaluation_id)
        return pb.GetEvaluationResponse(evaluation=record.evaluation, result=result)

    async def ListCaseResults(
        self,
        request: pb.ListCaseResultsRequest,
        context: aio.ServicerContext[pb.ListCaseResultsRequest, pb.ListCaseResultsResponse],
    ) -> pb.ListCaseResultsResponse:
        """List the cases of an evaluation, in the order of the set."""
        page, asked = page_of(request.page_size, request.page_token), request.filter
        await self._evaluations.get(self._caller().visible, request.evaluation_id)
        listing = f"{_CASES}-{_digest(request)}"
        found = await self._pages.page(
            request.evaluation_id,
            CaseFilter(
                verdicts=frozenset(asked.verdicts), labels=dict(asked.labels), case_ids=frozenset(asked.case_ids)
            ),
            since=position_of(page, listing=listing),
            most=page.size,
            most_bytes=PAGE_BYTES,
        )
        token = token_of(found.next_since, listing=listing) if found.next_since else ""
        return pb.ListCaseResultsResponse(cases=found.cases, next_page_token=token)

    async def ListEvaluations(
        self,
        request: pb.ListEvaluationsRequest,
        context: aio.ServicerContext[pb.ListEvaluationsRequest, pb.ListEvaluationsResponse],
    ) -> pb.ListEvaluationsResponse:
        """List evaluations, newest first."""
        scope, asked = self._caller().visible, request.filter
        chosen = EvaluationFilter(
            eval_set_name=asked.eval_set_name, agent=asked.agent, states=tuple(asked.states), labels=dict(asked.labels)
        )
        evaluations, token = await read_within(
            lambda page: self._evaluations.list(scope, chosen, page), page_of(request.page_size, request.page_token)
        )
        return pb.ListEvaluationsResponse(evaluations=evaluations, next_page_token=token)

    async def CompareEvaluations(
        self,
        request: pb.CompareEvaluationsRequest,
        context: aio.ServicerContext[pb.CompareEvaluationsRequest, pb.CompareEvaluationsResponse],
    ) -> pb.CompareEvaluationsResponse:
        """Compare two results."""
        before = await self._evaluations.baseline(
            self._caller().visible, request.baseline, allow_incomplete=request.allow_incomplete_baseline
        )
        after = await self._evaluations.source(self._caller().visible, request.candidate, field="candidate")
        comparison = await run_in_thread(lambda: shrink_comparison(compare(before, after)))
        return pb.CompareEvaluationsResponse(comparison=comparison)

    async def ScoreInvocations(
        self,
        request: pb.ScoreInvocationsRequest,
        context: aio.ServicerContext[pb.ScoreInvocationsRequest, pb.ScoreInvocationsResponse],
    ) -> pb.ScoreInvocationsResponse:
        """Score stored runs or given records."""
        caller = self._caller()
        result = await score_invocations(
            self._evaluations.dependencies, caller.principal, request, scope=caller.visible
        )
        return pb.ScoreInvocationsResponse(result=result)

    async def DiffInvocations(
        self,
        request: pb.DiffInvocationsRequest,
        context: aio.ServicerContext[pb.DiffInvocationsRequest, pb.DiffInvocationsResponse],
    ) -> pb.DiffInvocationsResponse:
        """Compare the trees of two runs."""
        found = await diff_invocations(self._evaluations.dependencies, self._caller().visible, request)
        return pb.DiffInvocationsResponse(diff=found)

    async def _find_changeable(self, caller: Caller, evaluation_id: str) -> Scope:
        async def find_user(scope: Scope) -> str:
            return (await self._evaluations.get(scope, evaluation_id)).principal.user_id

        return await find_changeable(caller, find_user)

    async def _follow(
        self,
        evaluation_id: str,
        options: follow_pb2.EvaluationFollowOptions,
        context: aio.ServicerContext[Any, Any],
        *,
        after: int = 0,
    ) -> AsyncGenerator[bytes, None]:
        # Sent before the first event, so that a client that loses the stream can find its evaluation again.
        await context.send_initial_metadata(((EVALUATION_ID_KEY, evaluation_id),))
        position = StreamPosition(
            stamp=evaluation_events.stamp(evaluation_id),
            selection=EvaluationSelection(tuple(options.event_names), options.without_trees),
            after=after,
        )
        heartbeat = options.heartbeat_interval if options.HasField("heartbeat_interval") else None
        only_current = options.until == follow_pb2.WATCH_UNTIL_CURRENT
        pages = self._evaluations.follow(self._caller().visible, evaluation_id, after=after, only_current=only_current)
        stream = stream_responses(pages, position, context, clock=self._clock, heartbeat=heartbeat)
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message


def _digest(request: pb.ListCaseResultsRequest) -> str:
    """Return a short digest of what a list is of, so that a token of another list is refused."""
    content = request.evaluation_id.encode() + b"\0" + request.filter.SerializeToString(deterministic=True)
    return hashlib.sha256(content).hexdigest()[:16]


async def _fold_events(requests: AsyncIterator[pb.AggregateEventsRequest]) -> TreeBuilder:
    """Fold a stream of events, one request at a time. Raises InvalidRequest if there are too many."""
    builder: TreeBuilder | None = None
    async for request in requests:
        builder = builder or TreeBuilder(Tree(request.options))
        size = request.ByteSize()
        if builder.count + len(request.events) > MAX_EVENTS or builder.size + size > MAX_BYTES:
            description = f"are more than {MAX_EVENTS:,} or {MAX_BYTES >> 20} MiB. Aggregate each run separately."
            raise InvalidRequest([FieldViolation(field="events", description=description)])
        await builder.add(request.events, size=size)
    return builder or TreeBuilder(Tree())
