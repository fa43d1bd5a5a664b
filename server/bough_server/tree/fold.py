"""Fold events into the record of a run: who called whom, what was said, what it cost.

Events may come from any source, in order of arrival. None is refused: contradictions become anomalies of the record,
and times that JSON cannot express are left out of it.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import event_pb2, invocation_pb2
from bough_server import events
from bough_server.tree.bounds import Bounds
from bough_server.tree.facts import TreeState
from bough_server.tree.nodes import anomaly
from bough_server.tree.record import record

ANOMALY: Final = anomaly(
    invocation_pb2.ANOMALY_KIND_INVALID_TIME,
    "Some times are outside of the years 1 to 9999, or are no times; they are left out.",
)


class Stored(Protocol):
    """An event as a log keeps it: its bytes need no parsing where its kind says enough."""

    @property
    def sequence(self) -> int:
        """The place in the log."""
        ...

    @property
    def kind(self) -> int:
        """The payload's tag."""
        ...

    @property
    def data(self) -> bytes:
        """The serialized event; run_id and session_id may be left out."""
        ...


def fold(
    stream: Iterable[event_pb2.AgentEvent], options: invocation_pb2.InvocationOptions | None = None
) -> invocation_pb2.Invocation:
    """The record of anybody's events, in their order."""
    tree = Tree(options)
    for event in stream:
        tree.add(event)
    return tree.invocation()


def fold_stored(
    stored: Iterable[Stored],
    *,
    run_id: str,
    session_id: str,
    options: invocation_pb2.InvocationOptions | None = None,
) -> invocation_pb2.Invocation:
    """The record of a log of our own, or of its beginning."""
    tree = Tree(options, run_id=run_id, session_id=session_id)
    for one in stored:
        tree.add_stored(one)
    return tree.invocation()


class Tree:
    """A fold in progress: takes events one by one and gives the record so far at any time.

    The ids are those of the events where they are not given. Texts beyond the bounds of `options` are cut as they come.
    """

    def __init__(
        self, options: invocation_pb2.InvocationOptions | None = None, *, run_id: str = "", session_id: str = ""
    ) -> None:
        self._bounds = Bounds.of(options)
        self._facts = TreeState(self._bounds, run_id=run_id, session_id=session_id)
        silent = {*events.DELTA_KINDS, events.VALUE_RECORDED, events.CANCEL_REQUESTED}
        if not self._bounds.include_steps:
            silent.add(events.STEP_COMPLETED)
        self._silent = frozenset(silent)
        self._is_foreign = False

    def add(self, event: event_pb2.AgentEvent) -> None:
        """Takes in an event, whoever's it is; nothing of it is kept, only copies."""
        self._is_foreign = True
        self._facts.take_envelope(event)
        self._facts.take(events.kind_of(event), event, event.sequence)

    def add_stored(self, stored: Stored) -> None:
        """Takes in an event of a log of our own. What tells the tree nothing, deltas above all, is not parsed."""
        self._facts.sequence = stored.sequence
        if stored.kind not in self._silent:
            self._facts.take(stored.kind, events.parse(stored.data), stored.sequence)

    def invocation(self) -> invocation_pb2.Invocation:
        """The record of what it has taken in so far."""
        made = record(self._facts, self._bounds)
        if self._is_foreign:
            leave_out_impossible_times(made)
        return made


def leave_out_impossible_times(record: invocation_pb2.Invocation) -> None:
    """Clears what is no time of a record, in place, and says so in its anomalies."""
    found = False
    for message in _messages(record):
        for field, value in message.ListFields():
            if isinstance(value, Timestamp | Duration) and not _is_possible(value):
                message.ClearField(field.name)
                found = True
    if found:
        record.anomalies.append(ANOMALY)


def _messages(record: Message) -> Iterator[Message]:
    """A message and all that it holds but times; there may be hundreds of thousands, so no list is made of them."""
    ahead: list[Iterator[Message]] = [iter((record,))]
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
