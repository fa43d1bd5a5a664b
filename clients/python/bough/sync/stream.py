"""Streams of runs and evaluations that survive dropped connections: every sequence once and in order."""

# Generated from bough/stream.py by `make proto`, which overwrites changes.

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bough.calls import SyncCalls
from bough.log_stream import SyncLogStream, SyncStreamCall
from bough.position import (
    EvaluationPosition,
    EvaluationStreamRequest,
    EvaluationStreamResponse,
    RunPosition,
    RunStreamRequest,
    RunStreamResponse,
)
from bough.rejoining import Rejoining
from bough.v1 import (
    agent_service_pb2,
    eval_result_pb2,
    eval_service_pb2,
    evaluation_pb2,
    event_pb2,
    run_pb2,
)

if TYPE_CHECKING:
    # For types alone, as in the asynchronous client.
    from bough.v1.agent_service_pb2_grpc import AgentServiceStub
    from bough.v1.eval_service_pb2_grpc import EvalServiceStub

_CLOSED_EARLY: Final = (
    "The stream was closed before the end of the evaluation: client.evaluations.result() returns what was found so far."
)


class SyncRunStream(SyncLogStream[RunStreamRequest, RunStreamResponse, event_pb2.AgentEvent]):
    """Events of a run, as they arrive, for one thread; any other thread may close the stream.

    `SyncLogStream` says when its call is sent, and how it survives dropped connections.

    A call that ends without an error after an event of a kind that this version does not know, such as a pause of a
    later one, ends the stream too: the run has not ended then, and `answer_of` raises RunNotAnswered.
    """

    def __init__(
        self,
        stub: "AgentServiceStub",
        request: RunStreamRequest,
        *,
        timeout: float | None,
        calls: SyncCalls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub, self._position = stub, RunPosition(request)
        super().__init__(self._position, timeout=timeout, calls=calls, rejoining=rejoining)

    @property
    def run_id(self) -> str:
        """Id of the run; empty until the server has accepted the run, unless the caller named it."""
        return self._position.log_id

    @property
    def session_id(self) -> str:
        """Id of the run's session; empty until the first event."""
        return self._position.session_id

    def cancel(self) -> run_pb2.Run:
        """Request cancellation of the run; its end is still streamed.

        Safe from a thread other than the reader's once the stream has its id.
        """
        request = agent_service_pb2.CancelRunRequest(run_id=self.started())
        return self._calls.call(self._stub.CancelRun, request).run

    def _begin(self, request: RunStreamRequest, timeout: float | None) -> SyncStreamCall[RunStreamResponse]:
        options = self._calls.options(timeout)
        match request:
            case agent_service_pb2.RunRequest():
                return self._stub.Run(request, **options)
            case agent_service_pb2.ForkRunRequest():
                return self._stub.ForkRun(request, **options)
            case agent_service_pb2.ResumeRunRequest():
                return self._stub.ResumeRun(request, **options)
            case _:
                return self._stub.WatchRun(request, **options)

    def _is_at_end(self) -> bool:
        request = agent_service_pb2.GetRunRequest(run_id=self.run_id)
        return self._position.is_at_end_of(self._calls.call(self._stub.GetRun, request).run)


class SyncEvaluationStream(
    SyncLogStream[EvaluationStreamRequest, EvaluationStreamResponse, evaluation_pb2.EvaluationEvent]
):
    """Events of an evaluation, as they arrive, for one thread; any other thread may close the stream.

    `SyncLogStream` says when its call is sent, and how it survives dropped connections.
    """

    def __init__(
        self,
        stub: "EvalServiceStub",
        request: EvaluationStreamRequest,
        *,
        read_result: Callable[[str], eval_result_pb2.EvalResult],
        timeout: float | None,
        calls: SyncCalls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub, self._read_result, self._position = stub, read_result, EvaluationPosition(request)
        super().__init__(self._position, timeout=timeout, calls=calls, rejoining=rejoining)

    @property
    def evaluation_id(self) -> str:
        """Id of the evaluation; empty until the server has accepted it, unless the caller named it."""
        return self._position.log_id

    def cancel(self) -> evaluation_pb2.Evaluation:
        """Request cancellation of the evaluation; its end is still streamed.

        Safe from a thread other than the reader's once the stream has its id.
        """
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=self.started())
        return self._calls.call(self._stub.CancelEvaluation, request).evaluation

    def result(self) -> eval_result_pb2.EvalResult:
        """Follow the evaluation to its end, skipping the events that are left, and return its result with all cases.

        Raises ValueError if the stream was closed before the end.
        """
        for _ in self:
            pass
        if self._closed:
            raise ValueError(_CLOSED_EARLY)
        return self._read_result(self.evaluation_id)

    def _begin(
        self, request: EvaluationStreamRequest, timeout: float | None
    ) -> SyncStreamCall[EvaluationStreamResponse]:
        options = self._calls.options(timeout)
        if isinstance(request, eval_service_pb2.EvaluateRequest):
            return self._stub.Evaluate(request, **options)
        return self._stub.WatchEvaluation(request, **options)

    def _is_at_end(self) -> bool:
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=self.evaluation_id)
        response = self._calls.call(self._stub.GetEvaluation, request)
        return self._position.is_at_end_of(response.evaluation)
