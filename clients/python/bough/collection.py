"""Collect a run from its events: answer, steps, state and texts."""

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass

from bough.errors import RunCancelledError, RunFailedError, RunInterruptedError, RunNotAnswered
from bough.messages import text_of
from bough.outcome import Outcome
from bough.transcript import StepText, Transcript
from bough.v1 import error_pb2, event_pb2, execution_pb2, input_pb2, message_pb2, step_pb2, usage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedRun:
    """A run as far as its events show it; `events` are those that were streamed.

    `state` is that after the last event of a kind that this version knows: a run whose stream ended at another one,
    such as a pause of a later version, has not ended. `message` is the final answer and `answer` its text; both are
    empty unless the run has succeeded. `steps` are those of all agents in the view, in the order in which they ended,
    `root_steps` those of the root. `texts` are in the order of their first deltas. `open_requests` are the input
    requests without an answer; an ended run has none. `cancel_reason` is unspecified unless the run was cancelled.
    """

    run_id: str
    session_id: str
    events: tuple[event_pb2.AgentEvent, ...]
    state: execution_pb2.ExecutionState.ValueType
    message: message_pb2.Message | None
    error: error_pb2.AgentError | None
    cancel_reason: execution_pb2.CancelReason.ValueType = execution_pb2.CANCEL_REASON_UNSPECIFIED
    open_requests: tuple[input_pb2.InputRequest, ...] = ()
    steps: tuple[step_pb2.AgentStep, ...]
    texts: tuple[StepText, ...]
    usage: usage_pb2.Usage | None
    last_sequence: int

    @property
    def answer(self) -> str:
        """Text of the final answer, empty if there is none."""
        return text_of(self.message) if self.message is not None else ""

    @property
    def finish_reason(self) -> step_pb2.FinishReason.ValueType:
        """Why the model stopped in the step that ended last, whose text the answer usually is.

        LENGTH or CONTENT_FILTER if its answer was cut off; UNSPECIFIED if the view shows no step.
        """
        return self.steps[-1].llm_response.finish_reason if self.steps else step_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def is_cut(self) -> bool:
        """Whether that answer was cut off, at a limit of tokens or by the provider's filter."""
        return self.finish_reason in (step_pb2.FINISH_REASON_LENGTH, step_pb2.FINISH_REASON_CONTENT_FILTER)

    @property
    def root_steps(self) -> tuple[step_pb2.AgentStep, ...]:
        """Steps of the root agent."""
        roots = {event.invocation_id for event in self.events if event.depth == 0}
        return tuple(step for step in self.steps if step.invocation_id in roots)


def collect_sync(events: Iterable[event_pb2.AgentEvent]) -> CollectedRun:
    """Return the run that these events describe, in any view and any state.

    They may come from several streams, one after the other, such as those of a Run and of the ResumeRuns after it:
    an event that was streamed again counts once.
    """
    kept = tuple(_rising(events))
    transcript, outcome = Transcript(), Outcome()
    steps: list[step_pb2.AgentStep] = []
    for event in kept:
        transcript.add(event)
        outcome.add(event)
        kind = event.WhichOneof("payload")
        if kind == "step_completed":
            steps.append(event.step_completed.step)
        elif kind == "step_failed":
            steps.append(event.step_failed.step)
    return CollectedRun(
        run_id=next((event.run_id for event in kept if event.run_id), ""),
        session_id=next((event.session_id for event in kept if event.session_id), ""),
        events=kept,
        state=outcome.state,
        message=outcome.message,
        error=outcome.error,
        cancel_reason=outcome.cancel_reason,
        open_requests=outcome.open_requests,
        steps=tuple(steps),
        texts=transcript.texts(),
        usage=outcome.usage,
        last_sequence=kept[-1].sequence if kept else 0,
    )


async def collect(
    stream: AsyncIterable[event_pb2.AgentEvent], *, earlier: Iterable[event_pb2.AgentEvent] = ()
) -> CollectedRun:
    """Follow a stream to its end and return its run; `earlier` are events of the run from streams before it."""
    return collect_sync([*earlier, *[event async for event in stream]])


def answer_of(run: CollectedRun) -> str:
    """Return a run's final answer as text.

    Raises RunFailedError, RunCancelledError or RunInterruptedError if there is none, or RunNotAnswered if the run has
    not ended.
    """
    match run.state:
        case execution_pb2.EXECUTION_STATE_SUCCEEDED:
            return run.answer
        case execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            raise RunInterruptedError(run.run_id, run.open_requests)
        case execution_pb2.EXECUTION_STATE_CANCELLED:
            raise RunCancelledError(run.run_id, run.error or error_pb2.AgentError())
        case execution_pb2.EXECUTION_STATE_FAILED:
            raise RunFailedError(run.run_id, run.error or error_pb2.AgentError())
    raise RunNotAnswered(run.run_id, error_pb2.AgentError(message="The run has not ended yet."))


def _rising(events: Iterable[event_pb2.AgentEvent]) -> Iterable[event_pb2.AgentEvent]:
    last = 0
    for event in events:
        if event.sequence > last:
            last = event.sequence
            yield event
