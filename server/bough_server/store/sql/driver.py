"""What the writer thread has to know of a database's driver."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bough_server.store.sql.statements import DriverCursor


class LogMove(NamedTuple):
    """How far a batch moves a log: from its expected last sequence to a new one, under an epoch."""

    last_sequence: int
    run_id: str
    epoch: int
    expected: int


EventTuple = tuple[str, int, int, bytes]
"""Run, sequence, kind and data of an event."""


class Refused(Exception):
    """A log in the batch does not end where its append begins; the caller must roll back the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A database's way to append events, and the meaning of its errors."""

    append_events: Callable[[DriverCursor, Mapping[str, LogMove], Sequence[EventTuple]], Collection[str]]
    """Move the logs of a batch, each if its run has that epoch, ends at the expected sequence and has not ended, and
    insert the events of those that moved. Return the runs that did not move, or raise Refused if the database cannot
    tell which."""
    is_transient: Callable[[Exception], bool]
    """Whether the same transaction may succeed if it is tried again."""
    is_busy: Callable[[Exception], bool]
    """Whether other transactions are in the way, and smaller ones would have to wait for them too."""
