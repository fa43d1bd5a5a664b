"""The parts of a database's driver that the writer thread needs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from sqlalchemy import Connection, Table

from bough_server.store.sql.rows import Row
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
    """It may refer to existing ones, which must not be deleted until it ends."""
    DROPS = 2
    """It deletes those that nothing refers to any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The rows that a transaction, or a group of them, changes beside the log of its run and that run's session.

    Rows that it creates under ids that this server has generated are left out: no other server creates those.
    """

    tenants: Collection[str] = ()
    """Tenants with a quota on their runs, of which it creates one."""
    sharing: Sharing = Sharing.NOTHING
    names: Collection[str] = ()
    """Names of things that several servers may create at the same time; see `build_lock_name`."""
    revisions: Collection[str] = ()
    """The definitions that it stores if they are not there."""
    sessions: Collection[Session] = ()
    runs: Collection[str] = ()
    """Runs and evaluations."""
    runs_of_sessions: Collection[Session] = ()
    runs_of_owners: Collection[str] = ()
    """Workers whose runs and evaluations it changes, those that have not ended."""
    runs_of_commands: Collection[int] = ()

    @classmethod
    def union(cls, parts: Iterable["Reach"]) -> "Reach":
        """Return the reach of several transactions together."""
        parts = list(parts)
        return cls(
            tenants={tenant for part in parts for tenant in part.tenants},
            sharing=max((part.sharing for part in parts), default=Sharing.NOTHING),
            names={name for part in parts for name in part.names},
            revisions={revision for part in parts for revision in part.revisions},
            sessions={session for part in parts for session in part.sessions},
            runs={run_id for part in parts for run_id in part.runs},
            runs_of_sessions={session for part in parts for session in part.runs_of_sessions},
            runs_of_owners={owner for part in parts for owner in part.runs_of_owners},
            runs_of_commands={command_id for part in parts for command_id in part.runs_of_commands},
        )

    @property
    def finds_runs(self) -> bool:
        """True if its runs are known only once the sessions are locked."""
        return bool(self.runs_of_sessions or self.runs_of_owners or self.runs_of_commands)

    @property
    def is_nothing(self) -> bool:
        """True if there is nothing to lock."""
        named = self.tenants or self.names or self.revisions or self.sessions or self.runs
        return not (self.sharing or named or self.finds_runs)


def build_lock_name(kind: str, *parts: object) -> str:
    """Return the name under which the creation of something is locked, of the parts of its key."""
    return " ".join([kind, *map(str, parts)])


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
    insert_at_once: Callable[[DriverCursor, Table, Sequence[Row]], None] | None
    """Insert rows of texts, numbers and bytes, none of them NULL, by one statement; None if that is no quicker."""
    lock: Callable[[DriverCursor, Reach], None] | None
    """Lock what a transaction is about to change, in the one order that all servers keep; None if there is only one.

    The order is: tenants with quotas, definitions and files, names of what it may create, sessions by tenant and id,
    runs by id. Tenants are locked so that no other server creates a run between the count of their runs and the commit.
    Names are locked because a missing row cannot be locked, and an insert waits for another server that has just
    inserted the same row. A session's row is locked before anything is read that decides about the session. Otherwise
    a run that is queued while its predecessor ends would never start: the transaction of the end would not see it.
    """
    can_lock: Callable[[Connection, Reach], bool]
    """Lock the rows that a transaction would change; return False if another transaction holds one. The caller rolls
    back.
    """
    is_locked: Callable[[Exception], bool]
    """Whether other transactions hold some of the rows; jobs that change other rows can be written."""
    is_transient: Callable[[Exception], bool]
    """Whether the database cannot be written now, and the same transaction may succeed later."""
    is_busy: Callable[[Exception], bool]
    """Whether other transactions hold locks for which smaller transactions would have to wait too."""
    is_raced: Callable[[Exception], bool]
    """Whether a concurrent transaction committed first; a retry of this one sees the rows that it wrote."""
    free_locks: Callable[[Connection, Exception], None] | None
    """Free the locks of servers that stopped within a transaction, if an error says that it had to wait for one."""
