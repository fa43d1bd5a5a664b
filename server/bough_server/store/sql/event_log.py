"""SqlEventLog: appends go through the writer thread; reads come from memory, or from disk if they lag behind."""

from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from bough_server.errors import ServerStopping
from bough_server.store.ports.log import AnyLogEvent, LogEvent, NewEvaluation, NewFork, NewRun, StoredEvent
from bough_server.store.sql.create_fork import accept_fork, check_fork, fold_fork
from bough_server.store.sql.create_run import accept, accept_evaluation, check_evaluation, check_run, first_events
from bough_server.store.sql.driver import Reach, Sharing, build_lock_name
from bough_server.store.sql.jobs import reach_of_files
from bough_server.store.sql.ownership import TakeOver
from bough_server.store.sql.readers import NO_END, Readers, read_end, read_range_and_end, read_range_of_run
from bough_server.store.sql.write_queue import WriteQueue
from bough_server.store.window import END_KINDS, PAGE_EVENTS, RecentEvents, RecentEventsOfRuns, page_of, pages_of


class SqlEventLog:
    """EventLog on SQL."""

    def __init__(self, queue: WriteQueue, readers: Readers, windows: RecentEventsOfRuns) -> None:
        self._queue, self._readers, self._windows = queue, readers, windows

    async def create(self, new_run: NewRun) -> None:
        """See EventLog. A caller that is cancelled here does not know whether the run was created."""
        check_run(new_run)
        run_id = new_run.run_id
        show = partial(self._windows.add, run_id, first_events(new_run))
        accepting = partial(accept, heads=self._queue.heads, new_run=new_run)
        names = _request_names(new_run)
        if new_run.create_session:
            names.append(build_lock_name("session", new_run.principal.tenant_id, new_run.session_id))
        reach = _reach(new_run, names=names, records=[new_run.first])
        await self._queue.execute(accepting, run_id=run_id, reach=reach, then=show)

    async def fork(self, new_fork: NewFork) -> None:
        """See EventLog. Raises ForkRefused if the shared events contain the origin's end."""
        _check_sequences(new_fork.log_events)
        check_fork(new_fork)
        folded = await self._readers.run(partial(fold_fork, new_fork=new_fork))
        run_id = new_fork.run_id
        show = partial(self._windows.add, run_id, new_fork.log_events)
        accepting = partial(accept_fork, heads=self._queue.heads, folded=folded)
        reach = _reach(new_fork, names=_request_names(new_fork), records=new_fork.log_events)
        await self._queue.execute(accepting, run_id=run_id, reach=reach, then=show)

    async def create_evaluation(self, new_evaluation: NewEvaluation) -> None:
        """See EventLog. A caller that is cancelled here does not know whether the evaluation was created."""
        _check_sequences(new_evaluation.log_events)
        check_evaluation(new_evaluation)
        evaluation_id = new_evaluation.evaluation_id
        show = partial(self._windows.add, evaluation_id, new_evaluation.log_events)
        accepting = partial(accept_evaluation, heads=self._queue.heads, new_evaluation=new_evaluation)
        reach = Reach(names=_request_names(new_evaluation))
        await self._queue.execute(accepting, run_id=evaluation_id, reach=reach, then=show)

    def append(self, run_id: str, *, epoch: int, log_events: Sequence[AnyLogEvent]) -> Awaitable[None]:
        """See EventLog."""
        _check_sequences(log_events)
        return self._queue.append(run_id, epoch, log_events)

    def pending_bytes(self) -> int:
        """See EventLog."""
        return self._queue.pending_bytes

    async def take_over(
        self, run_id: str, *, epoch: int, owner: str, log_events: Sequence[AnyLogEvent], log: Sequence[LogEvent] = ()
    ) -> None:
        """See EventLog. A caller that is cancelled here does not know whether it owns the run."""
        if log_events:
            _check_sequences(log_events)
        taking = TakeOver(self._queue.heads, run_id=run_id, epoch=epoch, owner=owner, log_events=log_events, log=log)
        show = partial(self._windows.add, run_id, log_events) if log_events else partial(self._windows.resume, run_id)
        reach = replace(reach_of_files(log_events), runs=[run_id])
        await self._queue.execute(taking, run_id=run_id, reach=reach, then=show)

    async def read(
        self, run_id: str, *, after: int = 0, through: int | None = None, deltas: bool = True
    ) -> Sequence[StoredEvent]:
        """See EventLog."""
        last = NO_END if through is None else through
        read = partial(read_range_of_run, run_id=run_id, after=after, through=last, count=PAGE_EVENTS, deltas=deltas)
        return page_of(await self._readers.run(read))

    async def tail(self, run_id: str, *, after: int = 0) -> AsyncIterator[Sequence[StoredEvent]]:
        """See EventLog. Raises NotFound, and the error that stopped the log once all committed events are read."""
        window = self._windows.get_window(run_id)
        is_following = False
        has_looked = False  # before it ends with a failure that another owner of the run may have overcome
        try:
            while True:
                changed = window.changed  # before looking: a change between the look and the wait must wake this reader
                if page := window.page(after):
                    yield page
                    after = page[-1].sequence
                elif not window.is_known_through(after) or (window.failure and not has_looked):
                    if is_following:
                        self._windows.leave(run_id, window)
                        is_following = False
                    has_looked = True
                    for page in await self._read_from_disk(run_id, window, after):
                        yield page
                        after = page[-1].sequence
                elif window.is_ended:
                    return
                elif (error := window.failure or self._windows.closing_error) is not None:
                    raise error
                else:
                    if not is_following:
                        self._windows.join(run_id, window)
                        is_following = has_looked = True
                    await changed.wait()
        finally:
            if is_following:
                self._windows.leave(run_id, window)

    async def _read_from_disk(self, run_id: str, window: RecentEvents, after: int) -> Iterator[Sequence[StoredEvent]]:
        """Read pages of a log after a sequence from disk, and its end for the window. Raises NotFound."""
        surprises = window.surprises
        found, end = await self._readers.run(partial(read_range_and_end, run_id=run_id, after=after))
        window.update_head(end.last_sequence, is_ended=end.is_ended, surprises=surprises)
        self._windows.clear_stale_failure(run_id, epoch=end.epoch)
        return pages_of(found)

    def fail_readers(self, run_id: str, error: Exception, *, epoch: int | None = None) -> None:
        """See EventLog."""
        self._windows.fail(run_id, error, epoch=epoch)

    def release(self, run_id: str) -> None:
        """See EventLog."""
        self._windows.release(run_id)

    def close_readers(self) -> None:
        """See EventLog."""
        self._windows.close_readers(ServerStopping("The server is stopping: follow the run again when it is back."))

    async def last_sequence(self, run_id: str) -> int:
        """See EventLog."""
        return (await self._readers.run(partial(read_end, run_id=run_id))).last_sequence


def _reach(new: NewRun | NewFork, *, names: Sequence[str], records: Sequence[LogEvent]) -> Reach:
    """Return the reach of the creation of a run, which refers to definitions and perhaps to files."""
    return Reach(
        tenants={quota.tenant_id for quota in new.quotas},
        sharing=Sharing.ADDS,
        names=[*names, *reach_of_files(records).names],
        revisions=new.definitions.keys(),
        sessions=[(new.principal.tenant_id, new.session_id)],
    )


def _request_names(new: NewRun | NewFork | NewEvaluation) -> list[str]:
    """Return the name of a request id, which another server may be using for the same; none without one."""
    principal = new.principal
    return (
        [build_lock_name("request", principal.tenant_id, principal.user_id, new.request_id)] if new.request_id else []
    )


def _check_sequences(log_events: Sequence[AnyLogEvent]) -> None:
    """Raise ValueError if the records of an append are inconsistent: a defect of the caller."""
    if not log_events:
        raise ValueError("an append must have at least one event")
    for sequence, record in enumerate(log_events, log_events[0].sequence):
        if record.sequence != sequence:
            raise ValueError("the sequences of an append must have no gap")
        if record.kind in END_KINDS and record is not log_events[-1]:
            raise ValueError("the terminal event of a log must be its last")
