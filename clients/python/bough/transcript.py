"""Text of each step, joined from streamed deltas."""

from dataclasses import dataclass

from bough.v1 import event_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """Text of an agent in one step: the deltas of the last attempt.

    A SUMMARY view shows no retries of sub-agents: there the last attempt is the last one that streamed text.
    """

    invocation_id: str
    agent: str
    step_id: str
    """Unique in the run. Parallel branches of an agent's code may have steps with the same `step_index`."""
    step_index: int
    attempt: int
    text: str


class Transcript:
    """Streamed text by step. A higher attempt replaces the text of a lower one, whose late deltas are dropped.

    Attempts of a model call outside any step leave the texts of steps as they are.
    """

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, str, int], tuple[str, int, list[str]]] = {}

    def add(self, event: event_pb2.AgentEvent) -> None:
        """Apply an event of any kind; one without text may still begin an attempt."""
        kind = event.WhichOneof("payload")
        if kind not in ("llm_output_text_delta", "sub_agent_partial", "llm_retrying"):
            return
        key = (event.invocation_id, event.step_id, event.step_index)
        known = self._attempts.get(key)
        if known is not None and event.attempt < known[1]:
            return
        if known is None or event.attempt > known[1]:
            self._attempts[key] = known = (event.agent, event.attempt, [])
        if kind == "llm_output_text_delta":
            known[2].append(event.llm_output_text_delta.text)
        elif kind == "sub_agent_partial":
            known[2].append(event.sub_agent_partial.text)

    def texts(self) -> tuple[StepText, ...]:
        """Return the texts by step, in order of first appearance."""
        return tuple(
            StepText(
                invocation_id=invocation,
                agent=agent,
                step_id=step_id,
                step_index=index,
                attempt=attempt,
                text="".join(pieces),
            )
            for (invocation, step_id, index), (agent, attempt, pieces) in self._attempts.items()
            if pieces
        )
