"""What a run has used so far: a sum that grows with its events, each of which costs the same."""

from collections.abc import Callable, Mapping
from typing import Final

from bough.v1 import event_pb2
from bough_server import events
from bough_server.usage import ONE_TOOL_CALL, Sums


class UsageSoFar:
    """The fold of what model calls and tools have used, counted as the tree of the run counts it."""

    def __init__(self) -> None:
        self._sums = Sums()
        self._models: set[tuple[str, str]] = set()
        """Model calls that have started and not ended."""
        self._tools: set[tuple[str, str]] = set()
        """Tool calls that have started and not ended."""
        self._is_changed = False

    def take(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """Takes in an event of one of the kinds in COUNTED."""
        COUNTED[kind](self, event)

    def change(self) -> bytes | None:
        """Return the sum, serialized, if it is another than when this was last called."""
        if not self._is_changed:
            return None
        self._is_changed = False
        return self.serialized()

    def serialized(self) -> bytes:
        """Return the sum as a serialized Usage."""
        return self._sums.usage().SerializeToString(deterministic=True)

    def _add(self, used: Sums) -> None:
        self._sums.add(used)
        self._is_changed = True

    def _llm_started(self, event: event_pb2.AgentEvent) -> None:
        self._models.add(_model_call(event))

    def _llm_retrying(self, event: event_pb2.AgentEvent) -> None:
        if not event.llm_retrying.not_sent:
            self._add(Sums.of_attempt(event.llm_retrying.lost_usage))

    def _llm_completed(self, event: event_pb2.AgentEvent) -> None:
        self._models.discard(_model_call(event))
        self._add(Sums.of_attempt(event.llm_completed.response.usage))

    def _llm_failed(self, event: event_pb2.AgentEvent) -> None:
        failed, call = event.llm_failed, _model_call(event)
        # A call that was refused never went to a provider, so it is not counted.
        if call in self._models or failed.HasField("lost_usage"):
            self._models.discard(call)
            if not failed.not_sent:
                self._add(Sums.of_attempt(failed.lost_usage))

    def _tool_started(self, event: event_pb2.AgentEvent) -> None:
        call = (event.invocation_id, event.tool_started.call.call_id)
        if call not in self._tools:  # another attempt is the same call
            self._tools.add(call)
            self._add(ONE_TOOL_CALL)

    def _tool_ended(self, event: event_pb2.AgentEvent) -> None:
        self._tools.discard((event.invocation_id, events.tool_result_of(event).call.call_id))


def _model_call(event: event_pb2.AgentEvent) -> tuple[str, str]:
    return event.invocation_id, event.effect_key or event.step_id


COUNTED: Final[Mapping[int, Callable[[UsageSoFar, event_pb2.AgentEvent], None]]] = {
    events.LLM_STARTED: UsageSoFar._llm_started,
    events.LLM_RETRYING: UsageSoFar._llm_retrying,
    events.LLM_COMPLETED: UsageSoFar._llm_completed,
    events.LLM_FAILED: UsageSoFar._llm_failed,
    events.TOOL_STARTED: UsageSoFar._tool_started,
    events.TOOL_COMPLETED: UsageSoFar._tool_ended,
    events.TOOL_FAILED: UsageSoFar._tool_ended,
}
"""The kinds of events that use something, or end what does."""
