"""Usage of a run so far, as a sum that each event updates in constant time."""

from collections.abc import Callable, Mapping
from typing import Final

from bough.v1 import event_pb2, usage_pb2
from bough_server.log import events
from bough_server.log.usage import ONE_TOOL_CALL, Sums


class UsageSoFar:
    """Fold of the usage of model calls and tools, by the same rules as the agent tree."""

    def __init__(self) -> None:
        self._sums = Sums()
        self._models: set[tuple[str, str]] = set()
        """Model calls that have started and not ended."""
        self._tools: set[tuple[str, str]] = set()
        """Tool calls that have started and not ended."""
        self._is_changed = False

    def apply(self, event: event_pb2.AgentEvent, kind: int) -> Sums | None:
        """Apply an event, and return what a model's attempt used if the event ends one; its kind must be in COUNTED."""
        return COUNTED[kind](self, event)

    def change(self) -> bytes | None:
        """Return the serialized sum if it has changed since the last call, else None."""
        if not self._is_changed:
            return None
        self._is_changed = False
        return self.serialize()

    def serialize(self) -> bytes:
        """Return the sum as a serialized Usage."""
        return self._sums.usage().SerializeToString(deterministic=True)

    def _add_attempt(self, usage: usage_pb2.Usage) -> Sums:
        used = Sums.of_attempt(usage)
        self._add(used)
        return used

    def _add(self, used: Sums) -> None:
        self._sums.add(used)
        self._is_changed = True

    def _on_llm_started(self, event: event_pb2.AgentEvent) -> None:
        self._models.add(_model_call(event))

    def _on_llm_retrying(self, event: event_pb2.AgentEvent) -> Sums | None:
        return None if event.llm_retrying.not_sent else self._add_attempt(event.llm_retrying.lost_usage)

    def _on_llm_completed(self, event: event_pb2.AgentEvent) -> Sums:
        self._models.discard(_model_call(event))
        return self._add_attempt(event.llm_completed.response.usage)

    def _on_llm_failed(self, event: event_pb2.AgentEvent) -> Sums | None:
        failed, call = event.llm_failed, _model_call(event)
        # A call that was refused before llm_started never reached a provider, so it is not counted.
        was_started = call in self._models or failed.HasField("lost_usage")
        self._models.discard(call)
        return self._add_attempt(failed.lost_usage) if was_started and not failed.not_sent else None

    def _on_tool_started(self, event: event_pb2.AgentEvent) -> None:
        call = (event.invocation_id, event.tool_started.call.call_id)
        if call not in self._tools:  # each attempt records tool_started, but all of them are one call
            self._tools.add(call)
            self._add(ONE_TOOL_CALL)

    def _on_tool_end(self, event: event_pb2.AgentEvent) -> None:
        self._tools.discard((event.invocation_id, events.tool_result_of(event).call.call_id))


def _model_call(event: event_pb2.AgentEvent) -> tuple[str, str]:
    # The same identity as in tree.facts, so that the row and the tree count alike.
    return event.invocation_id, event.effect_key or event.step_id


COUNTED: Final[Mapping[int, Callable[[UsageSoFar, event_pb2.AgentEvent], Sums | None]]] = {
    events.LLM_STARTED: UsageSoFar._on_llm_started,
    events.LLM_RETRYING: UsageSoFar._on_llm_retrying,
    events.LLM_COMPLETED: UsageSoFar._on_llm_completed,
    events.LLM_FAILED: UsageSoFar._on_llm_failed,
    events.TOOL_STARTED: UsageSoFar._on_tool_started,
    events.TOOL_COMPLETED: UsageSoFar._on_tool_end,
    events.TOOL_FAILED: UsageSoFar._on_tool_end,
}
"""Kinds of events that add usage or end a call that does."""
