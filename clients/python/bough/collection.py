"""A run collected from its events: answer, steps, state and texts; it asks no server and judges nothing."""

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass

from bough.messages import text_of
from bough.v1 import error_pb2, event_pb2, message_pb2, step_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """What an agent said in one step, as streamed: the deltas of its last attempt."""

    invocation_id: str
    agent: str
    step_index: int
    attempt: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedRun:
    """A run as its events tell it; equal to what was streamed, event for event.

    `message` is the final answer and `answer` its text; both are empty unless the run has succeeded. `steps` are those
    of all agents that the view showed, as they ended, `turns` the root's alone. `texts` are in order of first words.
    """

    run_id: str
    session_id: str
    events: tuple[event_pb2.AgentEvent, ...]
    state: event_pb2.State.ValueType
    message: message_pb2.Message | None
    error: error_pb2.AgentError | None
    steps: tuple[step_pb2.AgentStep, ...]
    texts: tuple[StepText, ...]
    usage: message_pb2.Usage | None
    last_sequence: int

    @property
    def answer(self) -> str:
        """The final answer as text."""
        return text_of(self.message) if self.message is not None else ""

    @property
    def turns(self) -> tuple[step_pb2.AgentStep, ...]:
        """The root's steps."""
        roots = {event.invocation_id for event in self.events if event.depth == 0}
        return tuple(step for step in self.steps if step.invocation_id in roots)


class Transcript:
    """Streamed text by step. A higher attempt voids what a lower one said; a late piece of a lower one is dropped."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, int], tuple[str, int, list[str]]] = {}

    def add(self, event: event_pb2.AgentEvent) -> None:
        """Takes any event; one without text may still begin an attempt."""
        kind = event.WhichOneof("payload")
        if kind not in ("llm_output_delta", "sub_agent_partial", "llm_retrying"):
            return
        key = (event.invocation_id, event.step_index)
        known = self._attempts.get(key)
        if known is not None and event.attempt < known[1]:
            return
        if known is None or event.attempt > known[1]:
            self._attempts[key] = known = (event.agent, event.attempt, [])
        if kind == "llm_output_delta":
            known[2].append(event.llm_output_delta.text)
        elif kind == "sub_agent_partial":
            known[2].append(event.sub_agent_partial.text)

    def texts(self) -> tuple[StepText, ...]:
        """What was said, by step, in order of first appearance."""
        return tuple(
            StepText(invocation_id=invocation, agent=agent, step_index=index, attempt=attempt, text="".join(pieces))
            for (invocation, index), (agent, attempt, pieces) in self._attempts.items()
            if pieces
        )


def collected(events: Iterable[event_pb2.AgentEvent]) -> CollectedRun:
    """The run that these events tell, in any view, ended or still going."""
    kept = tuple(events)
    transcript = Transcript()
    steps: list[step_pb2.AgentStep] = []
    for event in kept:
        transcript.add(event)
        kind = event.WhichOneof("payload")
        if kind == "step_completed":
            steps.append(event.step_completed.step)
        elif kind == "step_failed":
            steps.append(event.step_failed.step)
    state, message, error, usage = _end(kept)
    return CollectedRun(
        run_id=next((event.run_id for event in kept if event.run_id), ""),
        session_id=next((event.session_id for event in kept if event.session_id), ""),
        events=kept,
        state=state,
        message=message,
        error=error,
        steps=tuple(steps),
        texts=transcript.texts(),
        usage=usage,
        last_sequence=max((event.sequence for event in kept), default=0),
    )


async def collect(stream: AsyncIterable[event_pb2.AgentEvent]) -> CollectedRun:
    """Follows a stream to its end and gives the run that it told."""
    return collected([event async for event in stream])


_End = tuple[
    event_pb2.State.ValueType, message_pb2.Message | None, error_pb2.AgentError | None, message_pb2.Usage | None
]


def _end(events: tuple[event_pb2.AgentEvent, ...]) -> _End:
    for event in reversed(events):
        match event.WhichOneof("payload"):
            case "run_completed":
                completed = event.run_completed
                return event_pb2.STATE_SUCCEEDED, completed.final_answer, None, completed.tree_usage
            case "run_failed":
                return event_pb2.STATE_FAILED, None, event.run_failed.error, event.run_failed.tree_usage
            case "run_cancelled":
                cancelled = event.run_cancelled
                return event_pb2.STATE_CANCELLED, None, cancelled.error, cancelled.tree_usage
    return (event_pb2.STATE_RUNNING if events else event_pb2.STATE_UNSPECIFIED), None, None, None
