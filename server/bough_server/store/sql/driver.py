"""What the writer thread has to know of a database's driver."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from sqlalchemy import Connection, Table

from bough_server.store.sql.statements import DriverCursor


class LogMove(NamedTuple):
    """How far a batch moves a log: from its expected last sequence to a new one, under an epoch."""

    last_sequence: int
    run_id: str
    epoch: int
    expected: int


Values = tuple[object, ...]
"""A whole row, in the order of its table's columns."""

EventTuple = tuple[str, int, int, bytes]
"""Run, sequence, kind and data of an event."""


Session = tuple[str, str]
"""A tenant and a session."""


class Sharing(IntEnum):
    """What a transaction does with definitions and files, which runs and sessions share."""

    NOTHING = 0
    ADDS = 1
    """It may refer to one that is there, so that must not be deleted meanwhile."""
    DROPS = 2
    """It deletes those that nothing refers to any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a transaction changes beside the log of its run and the session of that, or all transactions of a group."""

    sessions: Collection[Session] = ()
    runs: Collection[str] = ()
    """The runs and evaluations whose rows are there already; not those that it creates."""
    sharing: Sharing = Sharing.NOTHING


class Refused(Exception):
    """A log in the batch does not end where its append begins; the caller must roll back the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A database's way to append events, and the meaning of its errors."""

    append_events: Callable[[DriverCursor, Mapping[str, LogMove], Sequence[EventTuple]], Collection[str]]
    """Move the logs of a batch, each if its run has that epoch, ends at the expected sequence and has not ended, and
    insert the events of those that moved. Return the runs that did not move, or raise Refused if the database cannot
    tell which."""
    insert_rows: Callable[[DriverCursor, Table, Sequence[Values]], None]
    """Insert many whole rows into a table, as quickly as the database can."""
    lock: Callable[[DriverCursor, Reach], None] | None
    """Lock what a transaction is about to change, in the one order that all servers keep; None if there is only one.

    The order is: definitions and files, sessions by tenant and id, runs by id. A session's row is locked before
    anything is read on which a decision about it depends. Else a run that is queued in the moment in which its
    predecessor ends would never be started: the end would not see it.
    """
    is_transient: Callable[[Exception], bool]
    """Whether the database cannot be written now, and the same transaction may succeed later."""
    is_busy: Callable[[Exception], bool]
    """Whether other transactions are in the way, and smaller ones would have to wait for them too."""
    is_raced: Callable[[Exception], bool]
    """Whether another transaction was faster, and the same one, tried again at once, finds what that has written."""
    free_locks: Callable[[Connection, Exception], None] | None
    """Free the locks of servers that stopped within a transaction, if an error says that it had to wait for one."""
