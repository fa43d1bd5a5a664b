"""A server on loopback that streams the log of an evaluation and breaks calls at chosen moments."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
from grpc import aio

from bough import AsyncClient, Rejoining
from bough.v1 import eval_result_pb2, eval_service_pb2_grpc, evaluation_pb2, execution_pb2
from bough.v1 import eval_service_pb2 as pb
from tests.clients.durable_server import Drop, Moment
from tests.clients.stream_server import AT_ONCE, NO_TRANSPARENT_RETRIES

EVALUATION_ID = "01970000-0000-7000-8000-00000000e0a1"

Asked: TypeAlias = pb.EvaluateRequest | pb.WatchEvaluationRequest


def log_of(cases: int) -> list[evaluation_pb2.EvaluationEvent]:
    """The log of an evaluation whose cases all pass."""
    passed = eval_result_pb2.VERDICT_PASSED
    payloads = [evaluation_pb2.EvaluationEvent(evaluation_planned=evaluation_pb2.EvaluationPlanned(case_count=cases))]
    for number in range(cases):
        result = eval_result_pb2.CaseTrialResult(case_id=f"case-{number}", verdict=passed)
        payloads.append(
            evaluation_pb2.EvaluationEvent(case_trial_scored=evaluation_pb2.CaseTrialScored(result=result)),
        )
    completed = evaluation_pb2.EvaluationCompleted(verdict=passed)
    payloads.append(evaluation_pb2.EvaluationEvent(evaluation_completed=completed))
    for sequence, event in enumerate(payloads, start=1):
        event.evaluation_id, event.sequence = EVALUATION_ID, sequence
    return payloads


class EvaluatingService(eval_service_pb2_grpc.EvalServiceServicer):
    """Streams one log; the n-th stream breaks as the n-th drop says, later ones do not."""

    def __init__(
        self,
        log: Sequence[evaluation_pb2.EvaluationEvent],
        drops: Sequence[Drop | None] = (),
        *,
        overlap: int = 0,
        holds: bool = False,
    ) -> None:
        self.log, self.drops, self.overlap = list(log), list(drops), overlap
        self.holds = holds
        """Whether streams stay open after the log's last event."""
        self.cancelled: list[str] = []
        self.asked: list[Asked] = []
        self.started: set[str] = set()
        """The request id of every evaluation that was started."""
        self.deadlines: list[float | None] = []
        """The seconds left until the deadline of every call of ScoreInvocations."""
        self.listed: list[pb.ListCaseResultsRequest] = []
        self.left = asyncio.Event()
        """Set when a call ends before all of its events were sent."""

    async def Evaluate(self, request, context):
        async for page in self._serve(request, context, 0):
            yield pb.EvaluateResponse(batch=page)

    async def WatchEvaluation(self, request, context):
        # Events before the requested position may come again.
        async for page in self._serve(request, context, max(0, request.after_sequence - self.overlap)):
            yield pb.WatchEvaluationResponse(batch=page)

    async def _serve(self, request, context, after: int) -> AsyncGenerator[evaluation_pb2.EvaluationEventBatch, None]:
        number = len(self.asked)
        drop = self.drops[number] if number < len(self.drops) else None
        self.asked.append(request)
        await self._break(context, drop, Moment.UNHEARD)
        if isinstance(request, pb.EvaluateRequest):
            self.started.add(request.request_id)
        await self._break(context, drop, Moment.UNANSWERED)
        await context.send_initial_metadata((("bough-evaluation-id", EVALUATION_ID),))
        await self._break(context, drop, Moment.ACCEPTED)
        events = self.log[after:] if drop is None else self.log[after : after + drop.events]
        try:
            for event in events:
                # As a server does with event names, of which the last event of a log is always shown.
                names = request.follow.event_names
                is_shown = not names or event.WhichOneof("payload") in names or event is self.log[-1]
                yield evaluation_pb2.EvaluationEventBatch(
                    events=[event] if is_shown else [], through_sequence=event.sequence
                )
        finally:
            self.left.set()
        if drop is not None and drop.is_silent and drop.moment is Moment.STREAMING:
            return
        await self._break(context, drop, Moment.STREAMING)
        if self.holds:
            await asyncio.Event().wait()

    async def _break(self, context, drop: Drop | None, moment: Moment) -> None:
        if drop is not None and drop.moment is moment:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")

    async def CancelEvaluation(self, request, context):
        self.cancelled.append(request.evaluation_id)
        return pb.CancelEvaluationResponse()

    async def ScoreInvocations(self, request, context):
        self.deadlines.append(context.time_remaining())
        return pb.ScoreInvocationsResponse()

    async def GetEvaluation(self, request, context):
        return pb.GetEvaluationResponse(
            evaluation=evaluation_pb2.Evaluation(
                evaluation_id=request.evaluation_id,
                state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
                last_sequence=len(self.log),
            ),
            result=eval_result_pb2.EvalResult(evaluation_id=request.evaluation_id),
        )

    async def ListCaseResults(self, request, context):
        self.listed.append(request)
        start = int(request.page_token or "0")
        end = min(start + request.page_size, len(self.log) - 2)
        cases = [eval_result_pb2.CaseResult(case_id=f"case-{number}") for number in range(start, end)]
        return pb.ListCaseResultsResponse(cases=cases, next_page_token=str(end) if end < len(self.log) - 2 else "")


@asynccontextmanager
async def evaluating(service: EvaluatingService) -> AsyncIterator[str]:
    """Run a server on loopback with that service; yield its address."""
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    eval_service_pb2_grpc.add_EvalServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(service: EvaluatingService, rejoining: Rejoining = AT_ONCE) -> AsyncIterator[AsyncClient]:
    """A client of a server on loopback with that service; it rejoins at once."""
    async with (
        evaluating(service) as address,
        AsyncClient(address, rejoining=rejoining, options=NO_TRANSPARENT_RETRIES) as client,
    ):
        yield client
