"""Jobs of the writer thread: appends, which share statements, and transactions, which bring their own."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from sqlalchemy import Connection

from bough_server.log import events
from bough_server.store.ports.log import AnyLogEvent
from bough_server.store.projected import Projected
from bough_server.store.sql.driver import Reach, Sharing, build_lock_name

T = TypeVar("T")

ALONE: Final = Reach()
"""The reach of a transaction that changes nothing beside the log of its run."""


def reach_of_files(records: Sequence[AnyLogEvent]) -> Reach:
    """Return the reach of some records beside their log and its session: the files that they bring and refer to."""
    files = [blob for record in records for blob in record.blobs]
    names = {build_lock_name("file", blob.sha256) for blob in files if blob.data is not None}
    return Reach(sharing=Sharing.ADDS if files else Sharing.NOTHING, names=names)


class Append:
    """Records for one log, written all or none. They are projected once, so that every attempt writes the same."""

    __slots__ = (
        "epoch",
        "future",
        "has_blobs",
        "is_uncertain",
        "log_events",
        "projected",
        "run_id",
        "session_id",
        "size",
        "tenant_id",
    )

    def __init__(
        self, run_id: str, epoch: int, log_events: Sequence[AnyLogEvent], future: asyncio.Future[None]
    ) -> None:
        self.run_id, self.epoch, self.log_events, self.future = run_id, epoch, log_events, future
        self.size = sum(len(record.data) for record in log_events)
        self.has_blobs = any(record.blobs for record in log_events)
        if self.has_blobs:
            self.size += sum(len(blob.data or b"") for record in log_events for blob in record.blobs)
        self.projected: Projected | None = None
        self.tenant_id = self.session_id = ""
        self.is_uncertain = False
        """True if a commit of it reported an error but may have happened."""

    @property
    def changes_session(self) -> bool:
        """True if the row of the run's session changes, which is known once the records are projected."""
        return bool(self.session_id) and self.projected is not None and self.projected.changes_session

    @property
    def reach(self) -> Reach:
        """What it changes beside the log of its run and the session of that."""
        return reach_of_files(self.log_events) if self.has_blobs else ALONE

    @property
    def has_only_deltas(self) -> bool:
        """True if no row of the run's session follows from the records."""
        return all(record.kind in events.DELTA_KINDS for record in self.log_events)


class Transaction(Generic[T]):
    """A function to run in a transaction, isolated from all other jobs.

    It must check before it writes, and must be safe to run again. `run_id` is the run whose log it writes to, if any;
    `then` is called on the event loop once it is committed.
    """

    __slots__ = ("future", "reach", "run", "run_id", "then")

    def __init__(
        self,
        run: Callable[[Connection], T],
        future: asyncio.Future[T],
        *,
        run_id: str = "",
        reach: Reach = ALONE,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.run, self.future, self.run_id, self.reach, self.then = run, future, run_id, reach, then


class JobOutcome:
    """The outcome of a job, to be reported on the event loop."""

    __slots__ = ("error", "job", "result")

    def __init__(
        self, job: "Append | Transaction[object]", result: object = None, error: Exception | None = None
    ) -> None:
        self.job, self.result, self.error = job, result, error

    def resolve(self) -> None:
        """Resolve the job's future; call it on the event loop."""
        future: asyncio.Future[object] = self.job.future  # type: ignore[assignment]  # None is an object
        if future.done():  # cancelled by its caller; the job has been carried out all the same
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result)
