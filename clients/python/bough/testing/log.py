"""The log of a scripted run or evaluation: what has happened, what is to happen, and streams of both."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from threading import Condition
from typing import Final, Generic, TypeAlias, TypeVar

import grpc

from bough.v1 import evaluation_pb2, event_pb2, execution_pb2

Event = TypeVar("Event", event_pb2.AgentEvent, evaluation_pb2.EvaluationEvent)

Until: TypeAlias = Callable[[Event], bool]
"""Whether a stream ends with an event that is not the last of the log."""

_STATES: Final[Mapping[str, execution_pb2.ExecutionState.ValueType]] = {
    "run_interrupted": execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
    "run_completed": execution_pb2.EXECUTION_STATE_SUCCEEDED,
    "run_failed": execution_pb2.EXECUTION_STATE_FAILED,
    "run_cancelled": execution_pb2.EXECUTION_STATE_CANCELLED,
    "evaluation_completed": execution_pb2.EXECUTION_STATE_SUCCEEDED,
    "evaluation_failed": execution_pb2.EXECUTION_STATE_FAILED,
    "evaluation_cancelled": execution_pb2.EXECUTION_STATE_CANCELLED,
}
"""States by the last event."""


class ScriptedLog(Generic[Event]):
    """The log of a run or of an evaluation, with the script of what is to happen and where its next streams drop.

    `ids` is an event with the ids that all get. Raises ValueError for a script that does not end: on a server it would
    run for ever.
    """

    def __init__(self, ids: Event, script: Iterable[Event], drops: Iterable[int]) -> None:
        self._ids: Event = ids
        self._script: deque[Event] = deque(script)
        self._drops = deque(drops)
        self._changed = Condition()
        """Notified when there are more events, and when a stream is left."""
        self.events: list[Event] = []
        if not self._script or (self._script[-1].WhichOneof("payload") or "") not in _STATES:
            known = ", ".join(name for name in _STATES if name in ids.DESCRIPTOR.fields_by_name)
            raise ValueError(f"The last event has to be one of {known}.")

    @property
    def state(self) -> execution_pb2.ExecutionState.ValueType:
        """State that the last event shows."""
        return _STATES.get(self.events[-1].WhichOneof("payload") or "", execution_pb2.EXECUTION_STATE_RUNNING)

    def proceed(self, *first: Event) -> None:
        """Let these events happen, and then what is scripted, through the next interruption."""
        with self._changed:
            for event in first:
                self._append(event)
            while self._script:
                self._append(self._script.popleft())
                if self.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
                    break
            self._changed.notify_all()

    def end(self, last: Event) -> None:
        """End with this event if the log waits for answers; what is scripted does not happen then."""
        with self._changed:
            if self.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
                self._script.clear()
                self._append(last)
                self._changed.notify_all()

    def follow(self, after: int, context: grpc.ServicerContext, until: Until[Event] | None) -> Iterator[Event]:
        """Yield the events after a sequence up to one that `until` accepts, or up to where this stream drops.

        `until` None: those that are there now.
        """
        drop_after = self._drops.popleft() if self._drops else None
        events = iter(self.events[after:]) if until is None else self._wait(after, context, until)
        yield from islice(events, drop_after)
        if drop_after is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection dropped")

    def _append(self, event: Event) -> None:
        numbered = deepcopy(self._ids)
        numbered.MergeFrom(event)
        numbered.sequence = len(self.events) + 1
        self.events.append(numbered)

    def _wait(self, after: int, context: grpc.ServicerContext, until: Until[Event]) -> Iterator[Event]:
        while self._is_continued(after, context):
            for event in self.events[after:]:
                yield event
                after = event.sequence
                if until(event):
                    return

    def _is_continued(self, after: int, context: grpc.ServicerContext) -> bool:
        """Wait until there are events after a sequence; return False if the log ends there or the caller has left."""

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        if not context.add_callback(wake):
            return False  # the call is over already
        waiting = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        with self._changed:
            self._changed.wait_for(lambda: len(self.events) > after or self.state != waiting or not context.is_active())
            return len(self.events) > after and context.is_active()


def never(event: object) -> bool:
    """Return False: a stream ends with the log."""
    return False
