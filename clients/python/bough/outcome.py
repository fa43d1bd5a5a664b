"""Fold of a run's events into its state, its open input requests and its end."""

from bough.v1 import error_pb2, event_pb2, execution_pb2, input_pb2, message_pb2, usage_pb2


class Outcome:
    """State of a run, updated by each event."""

    def __init__(self) -> None:
        self.state: execution_pb2.ExecutionState.ValueType = execution_pb2.EXECUTION_STATE_UNSPECIFIED
        self.message: message_pb2.Message | None = None
        self.error: error_pb2.AgentError | None = None
        self.cancel_reason: execution_pb2.CancelReason.ValueType = execution_pb2.CANCEL_REASON_UNSPECIFIED
        self.usage: usage_pb2.Usage | None = None
        self._open: dict[str, input_pb2.InputRequest] = {}

    @property
    def open_requests(self) -> tuple[input_pb2.InputRequest, ...]:
        """Input requests without an answer, in the order in which they were made."""
        return tuple(self._open.values())

    def add(self, event: event_pb2.AgentEvent) -> None:
        """Apply the next event of the run, of any kind."""
        match event.WhichOneof("payload"):
            case "run_queued":
                self.state = execution_pb2.EXECUTION_STATE_PENDING
            case "run_dequeued" | "run_resumed" | "run_forked":
                self.state = execution_pb2.EXECUTION_STATE_RUNNING
            case "run_interrupted":
                self.state = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
                # Names every open request; a masked view may not have shown their own events.
                self._open = {request.input_id: request for request in event.run_interrupted.requests}
            case "input_requested":
                self._open[event.input_requested.request.input_id] = event.input_requested.request
            case "input_received":
                self._open.pop(event.input_received.answer.input_id, None)
            case "run_completed":
                completed = event.run_completed
                self._end(execution_pb2.EXECUTION_STATE_SUCCEEDED, completed.tree_usage, message=completed.final_answer)
            case "run_failed":
                self._end(
                    execution_pb2.EXECUTION_STATE_FAILED, event.run_failed.tree_usage, error=event.run_failed.error
                )
            case "run_cancelled":
                self.cancel_reason = event.run_cancelled.cancel_reason
                self._end(
                    execution_pb2.EXECUTION_STATE_CANCELLED,
                    event.run_cancelled.tree_usage,
                    error=event.run_cancelled.error,
                )
        if self.state == execution_pb2.EXECUTION_STATE_UNSPECIFIED:
            self.state = execution_pb2.EXECUTION_STATE_RUNNING

    def _end(
        self,
        state: execution_pb2.ExecutionState.ValueType,
        usage: usage_pb2.Usage,
        *,
        message: message_pb2.Message | None = None,
        error: error_pb2.AgentError | None = None,
    ) -> None:
        self.state, self.usage, self.message, self.error = state, usage, message, error
        self._open.clear()
