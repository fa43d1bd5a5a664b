"""What agents said, step by step, from streamed pieces; whether a run has ended is not its own."""

from dataclasses import dataclass

from bough.v1 import event_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """What an agent said in one step, as streamed: the deltas of its last attempt.

    A SUMMARY shows no retries of sub-agents: there the last attempt is the last one that said something.
    """

    invocation_id: str
    agent: str
    step_index: int
    attempt: int
    text: str


class Transcript:
    """Streamed text by step. A higher attempt voids what a lower one said; a late piece of a lower one is dropped.

    Attempts of a model call that is no step void nothing of a step's.
    """

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, str, int], tuple[str, int, list[str]]] = {}

    def add(self, event: event_pb2.AgentEvent) -> None:
        """Takes any event; one without text may still begin an attempt."""
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
        """What was said, by step, in order of first appearance."""
        return tuple(
            StepText(invocation_id=invocation, agent=agent, step_index=index, attempt=attempt, text="".join(pieces))
            for (invocation, _, index), (agent, attempt, pieces) in self._attempts.items()
            if pieces
        )
