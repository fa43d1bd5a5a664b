"""Fold events into the record of a run: who called whom, what was said, what it cost.

Events may come from any source, in order of arrival. None is rejected: contradictions become anomalies of the record,
and times that JSON cannot express are left out.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import event_pb2, invocation_pb2
from bough_server.log import events
from bough_server.tree.bounds import Bounds
from bough_server.tree.facts import TreeState
from bough_server.tree.nodes import anomaly
from bough_server.tree.record import build_invocation

ANOMALY: Final = anomaly(
    invocation_pb2.ANOMALY_KIND_INVALID_TIME,
    "Some times are invalid or outside the years 1 to 9999; they are left out.",
)


class Stored(Protocol):
    """An event as a log stores it, parsed only if its kind matters to the tree."""

    @property
    def sequence(self) -> int:
        """Number of the event in its log."""
        ...

    @property
    def kind(self) -> int:
        """Field number of the payload."""
        ...

    @property
    def data(self) -> bytes:
        """The serialized event; run_id and session_id may be absent."""
        ...


def fold(
    stream: Iterable[event_pb2.AgentEvent], options: invocation_pb2.InvocationOptions | None = None
) -> invocation_pb2.Invocation:
    """Return the record of events from any source, in their order."""
    tree = Tree(options)
    for event in stream:
        tree.add(event)
    return tree.invocation()


def fold_log(
    stored: Iterable[Stored],
    *,
    run_id: str,
    session_id: str,
    options: invocation_pb2.InvocationOptions | None = None,
) -> invocation_pb2.Invocation:
    """Return the record of a log of this server, or of a prefix of it."""
    tree = Tree(options, run_id=run_id, session_id=session_id)
    for one in stored:
        tree.add_stored_event(one)
    return tree.invocation()


class Tree:
    """A fold in progress: events are added one by one, and the record so far is available at any time.

    Ids that are not passed are taken from the events. Texts beyond the bounds of `options` are cut as they arrive.
    """

    def __init__(
        self, options: invocation_pb2.InvocationOptions | None = None, *, run_id: str = "", session_id: str = ""
    ) -> None:
        self._bounds = Bounds.of(options)
        self._state = TreeState(self._bounds, run_id=run_id, session_id=session_id)
        ignored = {*events.DELTA_KINDS, events.VALUE_RECORDED, events.CANCEL_REQUESTED}
        if not self._bounds.include_steps:
            ignored.add(events.STEP_COMPLETED)
        self._ignored_kinds = frozenset(ignored)
        self._is_foreign = False

    def add(self, event: event_pb2.AgentEvent) -> None:
        """Add an event from any source. It is copied, never retained."""
        self._is_foreign = True
        self._state.apply_envelope(event)
        self._state.apply(events.kind_of(event), event, event.sequence)

    def add_stored_event(self, stored: Stored) -> None:
        """Add an event of this server's log. Kinds that do not change the tree, above all deltas, are not parsed."""
        self._state.sequence = stored.sequence
        if stored.kind not in self._ignored_kinds:
            self._state.apply(stored.kind, events.parse(stored.data), stored.sequence)

    def invocation(self) -> invocation_pb2.Invocation:
        """Return the record of the events so far."""
        invocation = build_invocation(self._state, self._bounds)
        if self._is_foreign:  # the server's own logs have valid times
            leave_out_impossible_times(invocation)
        return invocation


def leave_out_impossible_times(invocation: invocation_pb2.Invocation) -> None:
    """Clear the invalid times of a record, in place, and add an anomaly if there are any."""
    found = False
    for message in _messages(invocation):
        for field, value in message.ListFields():
            if isinstance(value, Timestamp | Duration) and not _is_possible(value):
                message.ClearField(field.name)
                found = True
    if found:
        invocation.anomalies.append(ANOMALY)


def _messages(whole: Message) -> Iterator[Message]:
    """Yield a message and all messages in it except times; lazily, as there may be hundreds of thousands."""
    ahead: list[Iterator[Message]] = [iter((whole,))]
    while ahead:
        message = next(ahead[-1], None)
        if message is None:
            ahead.pop()
            continue
        yield message
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                ahead.append(iter(value))
            elif not isinstance(value, Timestamp | Duration):
                ahead.append(iter((value,)))


def _is_possible(value: Timestamp | Duration) -> bool:
    try:
        value.ToJsonString()
    except ValueError:
        return False
    return True
