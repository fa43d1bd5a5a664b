"""Fold of a run's calls of linked agents: those that no message of the session holds, and what ran inside each."""

from bough.v1 import event_pb2, execution_pb2, message_pb2
from bough_server.messages import calls_of


class LinkedCalls:
    """The calls of linked agents in one run that have not ended."""

    def __init__(self) -> None:
        self._asked: set[tuple[str, str]] = set()
        """The open calls of messages that are not stored: invocation and call id."""
        self._called_in: dict[str, str] = {}
        """By invocation, the innermost open call that it is inside of, which may be its own; only if any."""
        self._outside: dict[str, str] = {}
        """By invocation called as a tool, the next one called as a tool around it; only if any."""
        self._inside: dict[str, list[str]] = {}
        """By invocation called as a tool, itself and all below it so far."""

    def apply_start(self, event: event_pb2.AgentEvent) -> None:
        """Apply a sub_agent_started."""
        around = self._called_in.get(event.parent_invocation_id, "")
        called, invocation_id = around, event.invocation_id
        if event.sub_agent_started.trigger == execution_pb2.INVOCATION_TRIGGER_TOOL:
            called, self._inside[invocation_id] = invocation_id, []
            if around:
                self._outside[invocation_id] = around
        if called:
            self._called_in[invocation_id] = called
            self._inside[called].append(invocation_id)

    def apply_message(self, event: event_pb2.AgentEvent, message: message_pb2.Message) -> bool:
        """Apply a model's message that the session does not store; return whether it holds calls of linked agents."""
        # Only such calls keep a message of a step from being stored, and what is no step has no calls that are run.
        calls = calls_of(message) if event.step_id else []
        self._asked.update((event.invocation_id, call.call_id) for call in calls)
        return bool(calls)

    def apply_result(self, result: message_pb2.ToolResult, call: tuple[str, str]) -> tuple[str, ...] | None:
        """Apply the result of a call that no message of the session is made from.

        Return the invocations that ran inside the call; None if it is not a call of a linked agent.
        """
        if not result.child_invocation_id and call not in self._asked:
            return None
        self._asked.discard(call)
        child = result.child_invocation_id
        inside = self._inside.pop(child, [])
        around = self._outside.pop(child, "")
        if around in self._inside:
            self._inside[around].extend(inside)
            self._called_in.update(dict.fromkeys(inside, around))
        else:
            for invocation_id in inside:
                self._called_in.pop(invocation_id, None)
        return tuple(inside)
