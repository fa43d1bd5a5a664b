"""Supervise runs: continue, end and park them, and start the next run of a session."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

import structlog

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.agents.pinned import MissingVersion
from bough_server.blobs import StoredBlob
from bough_server.engine.input_requests import expired, received
from bough_server.engine.journal import Journal
from bough_server.errors import Fenced, NonDeterministic, NotFound, RunError, RunParked, ServerStopping, StorageFailed
from bough_server.runs.close import CloseReason, close_run, failed, read_log
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import Pages
from bough_server.runs.last_speaker import first_member
from bough_server.runs.live import LiveRun
from bough_server.runs.recovery import INITIAL_BACKOFF, Recovery, retry_until_stored
from bough_server.runs.registry import RunRegistry
from bough_server.runs.takeover import PROGRESS, Launcher, Takeover, losses_of
from bough_server.store.ports.log import Principal, RunMoved
from bough_server.store.ports.runs import RunRecord

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_TRIES = 5

SUSPECT_SECONDS: Final = 60.0
"""Seconds that a run which has lost several servers may take for progress before the next of them is continued."""

MANY: Final = 1_000_000
"""More runs than are ever continued at once."""

OFFER_SECONDS: Final = 10.0
"""How long other servers have to continue a run that is parked here, before its readers are told."""

FIRST_EPOCH: Final = 1
"""The epoch of a run under its first owner."""


class RunSupervisor:
    """Supervises the runs of this worker from their creation to their end."""

    def __init__(self, dependencies: RunDependencies) -> None:
        self._dependencies = dependencies
        self.live_runs = RunRegistry()
        self.launcher = Launcher(dependencies, self.live_runs, on_end=self._ended)
        self.takeover = Takeover(dependencies, self.launcher)
        self.recovery = Recovery(
            dependencies.store.runs,
            dependencies.clock,
            is_shared=dependencies.store.leases.is_shared,
            room=self._room,
            claim=self._claim,
            revive=self._revive,
            expire=self._expire,
            losses=self._losses,
            settled=self._settled,
        )
        self._holders = SessionWatcher(dependencies, spawn=self.recovery.spawn, on_end=self.call_next)
        self.parked: dict[str, str] = {}
        """Runs that cannot be executed here, with a message on what is missing."""
        self.is_draining = False
        self._given_up: set[asyncio.Task[None]] = set()
        """Runs that are being given up to other servers."""
        self._leased = asyncio.Event()
        self._leased.set()
        self._claimed: set[str] = set()
        """Runs that this worker has claimed and does not execute yet."""

    async def shielded(self, run_id: str, work: Coroutine[Any, Any, T], *, is_retried: bool = False) -> T:
        """Run work that makes a run live, or ends it; it is completed even if the caller is cancelled.

        `is_retried` if the caller tries again later when the storage fails; else the run is offered to any server then.
        """
        await self._until_leased(work)
        task = asyncio.get_running_loop().create_task(work)
        self.live_runs.arriving(run_id, task)
        task.add_done_callback(partial(self._arrived, run_id, is_retried=is_retried))
        return await asyncio.shield(task)

    async def _until_leased(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait while this worker, which was taken for lost, has no lease: what it would own others would take."""
        try:
            await self._leased.wait()
        except BaseException:
            work.close()
            raise

    def _arrived(self, run_id: str, work: "asyncio.Task[Any]", *, is_retried: bool) -> None:
        # If the caller is gone, this marks an exception as retrieved, so that asyncio does not log it.
        if not work.cancelled() and isinstance(work.exception(), StorageFailed) and not is_retried:
            # It may have been written all the same: then this worker owns the run, and no worker would execute it.
            self.recovery.spawn(self._offer_later(run_id))

    async def _offer_later(self, run_id: str) -> None:
        await self._dependencies.clock.sleep(INITIAL_BACKOFF)
        await retry_until_stored(self._dependencies.clock, partial(self._offer_unless_live, run_id))

    async def _offer_unless_live(self, run_id: str) -> None:
        """Let any server continue a run if this one owns it, but does not execute it."""
        if await self.live_runs.find(run_id) is None:
            await self._dependencies.store.leases.give_up(self._dependencies.worker, run_id)

    async def continue_run(
        self,
        record: RunRecord,
        cause: event_pb2.ResumeCause.ValueType,
        *,
        answers: Sequence[event_pb2.AgentEvent] = (),
        files: Sequence[StoredBlob] = (),
        deadline_time_ns: int | None = None,
        lost_by: str = "",
        is_retried: bool = False,
    ) -> LiveRun | None:
        """Continue a run; return None if it was ended instead. Raises as Takeover.continue_run does.

        `is_retried` as in `shielded`.
        """
        is_queued = record.run.state == execution_pb2.EXECUTION_STATE_PENDING
        work = self.takeover.continue_run(
            record,
            cause,
            answers=answers,
            files=files,
            deadline_time_ns=deadline_time_ns,
            is_queued=is_queued,
            lost_by=lost_by,
        )
        live = await self.shielded(record.run.run_id, work, is_retried=is_retried)
        self.parked.pop(record.run.run_id, None)
        # A run that was ended has released its session, and a queued one may have been given it while it was not live.
        if live is None or is_queued:
            await self.call_next(record.principal, record.run.session_id)
        return live

    async def close(self, principal: Principal, run_id: str, reason: CloseReason) -> bool:
        """End a run that no worker executes. Return False if another worker resumed it first."""
        for _ in range(_TRIES):
            record = await self._dependencies.store.runs.get(principal, run_id)
            if record.run.HasField("end_time"):
                return True
            try:
                await self.shielded(run_id, close_run(self._dependencies, record, reason), is_retried=True)
            except RunMoved:
                if await self.live_runs.find(run_id) is not None:
                    return False
            except Fenced:
                return True
            else:
                self.parked.pop(run_id, None)
                await self.call_next(record.principal, record.run.session_id)
                return True
        return False

    async def call_next(self, principal: Principal, session_id: str) -> None:
        """Start the queued run that now holds a session, if it is live here; retry later if storage fails."""
        try:
            await self._call_next(principal, session_id)
        except ServerStopping:
            return  # it stays queued until another server continues it
        except StorageFailed:
            self.recovery.spawn(
                retry_until_stored(self._dependencies.clock, partial(self._call_next, principal, session_id))
            )

    async def _call_next(self, principal: Principal, session_id: str) -> None:
        holder = await self._dependencies.store.runs.holder(principal, session_id)
        if holder is None or self.is_draining:
            return
        live = self.live_runs.at_hand(holder.run.run_id)
        if live is None and self._may_end_elsewhere(holder) and self.live_runs.has_waiting(principal, session_id):
            self._holders.watch(holder)
        if live is None or not live.is_waiting:
            return
        cut = await self._dependencies.store.sessions.cut(principal, session_id)
        session = await self._dependencies.session_history(principal, session_id, through=cut.position)
        starts_with = await first_member(self._dependencies.store.log, live.definition, session.stored)
        live.begin(cut, session, starts_with=starts_with)

    def _may_end_elsewhere(self, holder: RunRecord) -> bool:
        """Return True if the end of a run that is not live here may go unnoticed here.

        Another server may also end one that waits for input in this worker's name: when its request has expired.
        """
        return self._dependencies.store.leases.is_shared or holder.owner != self._dependencies.worker

    async def is_elsewhere(self, record: RunRecord) -> bool:
        """Return True if another live worker owns a run."""
        if record.owner in ("", self._dependencies.worker):
            return False
        return record.owner in await self._dependencies.store.leases.counters()

    def has_room(self) -> bool:
        """True unless this worker executes more runs than it may; a run that is being created counts."""
        most = self._dependencies.max_live_runs
        return most is None or len(self._executed()) <= most

    def _room(self) -> int:
        """Return how many runs this worker may continue that no worker owns."""
        if self.is_draining:
            return 0
        most = self._dependencies.max_live_runs
        return MANY if most is None else most - len(self._executed())

    def _executed(self) -> Collection[str]:
        """Return the runs that take up room: not those that wait for their session, perhaps for one without room."""
        return self.live_runs.executed() | self._claimed

    async def _claim(self, most: int) -> Sequence[RunRecord]:
        found = await self._dependencies.store.leases.claim(self._dependencies.worker, most=most, but=self.parked)
        self._claimed.update(record.run.run_id for record in found)
        if self.is_draining:
            self._give_up_claimed()
        return found

    async def _revive(self, found: RunRecord) -> None:
        """Continue a run that this worker has claimed or owned before, and wait until its replay is over.

        Raises StorageFailed.
        """
        try:
            await self._continue_found(found)
        finally:
            self._claimed.discard(found.run.run_id)
            if self._dependencies.max_live_runs is not None and found.run.run_id not in self._executed():
                self.recovery.offered()  # it leaves the room that it was claimed for

    async def _continue_found(self, found: RunRecord) -> None:
        run_id = found.run.run_id
        for _ in range(_TRIES):
            try:
                record = await self._dependencies.store.runs.get(found.principal, run_id)
            except NotFound:
                return
            state = record.run.state
            is_over = record.run.HasField("end_time") or state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
            if is_over or await self.is_elsewhere(record) or self.live_runs.at_hand(run_id) or self.is_draining:
                return
            try:
                live = await self.continue_run(
                    record, event_pb2.RESUME_CAUSE_RECOVERY, lost_by=found.owner, is_retried=True
                )
            except MissingVersion as missing:
                await self.park(record, str(missing))
            except RunMoved:
                continue  # its former owner has written on until now, or another call was faster
            except (Fenced, ServerStopping):
                return  # it has ended, or the server stops
            else:
                if live is not None and not live.is_waiting:
                    await live.lived()  # keeps the slot of Recovery until then, which bounds concurrent replays
            return
        self.recovery.try_later(found)

    async def _losses(self, record: RunRecord) -> int:
        """Return how many servers were lost with a run since its last progress, without the last one."""
        if record.epoch <= FIRST_EPOCH:
            return 0  # it has had one server: its log need not be read
        try:
            return losses_of(await read_log(self._dependencies.store.log, record.run.run_id))
        except Exception:  # one bad log must not keep the others from being continued
            return 0  # continuing it finds that out as well, and handles or logs it

    async def _settled(self, record: RunRecord) -> None:
        """Wait until a run that was continued has made progress, is no longer live, or SUSPECT_SECONDS are over."""
        live = self.live_runs.at_hand(record.run.run_id)
        if live is None or live.is_waiting:
            return
        progress = asyncio.ensure_future(self._progress(record))
        over = asyncio.ensure_future(live.over())
        try:
            await asyncio.wait({progress, over}, timeout=SUSPECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            progress.cancel()
            over.cancel()
            await asyncio.wait({progress, over})

    async def _progress(self, record: RunRecord) -> None:
        """Wait until a run has recorded the result of an effect, or its log has ended."""
        tail = cast(Pages, self._dependencies.store.log.tail(record.run.run_id, after=record.run.last_sequence))
        with suppress(StorageFailed, Fenced, RunParked, ServerStopping):
            async with aclosing(tail):
                async for page in tail:
                    if any(stored.kind in PROGRESS for stored in page):
                        return

    async def park(self, record: RunRecord, missing: str) -> None:
        """Park a run that cannot be executed here, and end its readers, unless it was taken over meanwhile."""
        run_id = record.run.run_id
        now = await self._dependencies.store.runs.find(run_id)
        if now is None or now.epoch != record.epoch or now.run.HasField("end_time"):
            return
        self.parked[run_id] = missing
        _log.warning("run parked", run_id=run_id, reason=missing)
        if self._dependencies.store.leases.is_shared:  # another server may have what is missing here
            await retry_until_stored(
                self._dependencies.clock,
                partial(self._dependencies.store.leases.give_up, self._dependencies.worker, run_id),
            )
            self.recovery.spawn(self._fail_readers_later(run_id, missing))
        else:
            self._fail_readers(now, missing)

    async def _fail_readers_later(self, run_id: str, missing: str) -> None:
        """End the readers of a parked run, unless another server continues it soon."""
        await self._dependencies.clock.sleep(OFFER_SECONDS)
        record = await self._dependencies.store.runs.find(run_id)
        if record is not None and not record.owner and not record.run.HasField("end_time"):
            self._fail_readers(record, missing)
        else:
            self.parked.pop(run_id, None)

    def _fail_readers(self, record: RunRecord, missing: str) -> None:
        error = RunParked(f"The run is parked until a server has everything it started with: {missing}")
        self._dependencies.store.log.fail_readers(record.run.run_id, error, epoch=record.epoch)

    async def _give_up(self, run_id: str) -> None:
        """Let other servers continue a run that this one owns."""
        with suppress(StorageFailed, ServerStopping):  # then it is continued when the lease of this worker has ended
            await self._dependencies.store.leases.give_up(self._dependencies.worker, run_id)

    def drain(self) -> None:
        """Execute no more runs: others continue those that are claimed, too."""
        self.is_draining = True
        self._give_up_claimed()

    def _give_up_claimed(self) -> None:
        claimed, self._claimed = self._claimed, set()
        for run_id in claimed - self.live_runs.executed():
            self._give_up_soon(run_id)

    def _give_up_soon(self, run_id: str) -> None:
        if not self._dependencies.store.leases.is_shared:
            return  # there is no other server to continue it
        giving_up = asyncio.get_running_loop().create_task(self._give_up(run_id))
        self._given_up.add(giving_up)
        giving_up.add_done_callback(self._given_up.discard)

    async def stop_all(self, error: BaseException) -> None:
        """Stop all runs where they are, unrecorded, and wait for that."""
        for live in self.live_runs:
            live.stop(error)
        if tasks := self.live_runs.tasks():
            await asyncio.wait(tasks)
        if self._given_up:
            await asyncio.wait(self._given_up)

    async def lose_all(self) -> None:
        """Stop all runs, which others continue, and begin a new lease. Raises StorageFailed."""
        if self._dependencies.metrics is not None:
            self._dependencies.metrics.lease_lost()
        self._leased.clear()  # none arrives between the stop and the lease, which has no runs
        try:
            await self.live_runs.arrived()
            await self.stop_all(Fenced("This server was taken for lost, and another one continues the run."))
            await self._dependencies.store.leases.begin(self._dependencies.worker)
        finally:
            self._leased.set()

    async def _expire(self, run_id: str) -> None:
        """Answer the overdue requests of a run that waits for input as expired, and continue the run."""
        record = await self._dependencies.store.runs.find(run_id)
        if record is None or record.run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            return
        log = await read_log(self._dependencies.store.log, run_id)
        now = self._dependencies.clock.now_ns()
        asked = {event.effect_key: event for event in log if event.HasField("input_requested")}
        due = [
            received(asked[key], expired(request))
            for key, request in Journal(log).open_requests()
            if request.HasField("expire_time") and request.expire_time.ToNanoseconds() <= now
        ]
        try:
            await self.continue_run(record, event_pb2.RESUME_CAUSE_ANSWER, answers=due)
        except (RunMoved, Fenced):
            return  # another call answered first

    def _ended(self, live: LiveRun, stopped: BaseException | None) -> None:
        """Handle the end of a run's task: the run has ended, waits for input, or stopped with an unrecorded error."""
        self.live_runs.remove(live)
        self._dependencies.store.log.release(live.run_id)
        if live.execution.is_interrupted:
            self.recovery.interrupted()
        if self.is_draining:
            if isinstance(stopped, ServerStopping):
                self._give_up_soon(live.run_id)
            return
        if self._dependencies.max_live_runs is not None:
            self.recovery.offered()
        if isinstance(stopped, StorageFailed):
            self.recovery.try_later(live.record)
            return
        self.recovery.is_well(live.run_id)
        if isinstance(stopped, NonDeterministic):
            self._close_soon(live, stopped)
        elif stopped is not None and not isinstance(stopped, Fenced | ServerStopping):
            error = RunError(
                "The server failed while executing this run; the server's log says why.",
                reason=error_pb2.ERROR_REASON_INTERNAL,
            )
            self._close_soon(live, error)
        principal, session_id = live.record.principal, live.record.run.session_id
        if self.live_runs.has_waiting(principal, session_id):
            self.recovery.spawn(self.call_next(principal, session_id))

    def _close_soon(self, live: LiveRun, error: RunError) -> None:
        closing = partial(self.close, live.record.principal, live.run_id, failed(error))
        self.recovery.spawn(retry_until_stored(self._dependencies.clock, closing))


class SessionWatcher:
    """Watches sessions that runs of this worker wait for while runs of other workers hold them.

    `on_end` is called with each such session once its holder has ended.
    """

    def __init__(
        self,
        dependencies: RunDependencies,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_end: Callable[[Principal, str], Awaitable[None]],
    ) -> None:
        self._dependencies = dependencies
        self._spawn = spawn
        self._on_end = on_end
        self._watched: set[tuple[str, str]] = set()

    def watch(self, holder: RunRecord) -> None:
        """Wait for the end of a run in a background task, one per session."""
        watched = holder.principal.tenant_id, holder.run.session_id
        if watched not in self._watched:
            self._watched.add(watched)
            self._spawn(self._watch(holder))

    async def _watch(self, holder: RunRecord) -> None:
        try:
            while not await self._is_over(holder):
                await self._dependencies.clock.sleep(INITIAL_BACKOFF)
        except (NotFound, ServerStopping):
            return  # the session was deleted, or the server stops and the next one continues the queued runs
        finally:
            self._watched.discard((holder.principal.tenant_id, holder.run.session_id))
        await self._on_end(holder.principal, holder.run.session_id)

    async def _is_over(self, holder: RunRecord) -> bool:
        """Wait for the end of a run; return False if its log failed, was fenced or parked before that."""
        tail = cast(Pages, self._dependencies.store.log.tail(holder.run.run_id, after=holder.run.last_sequence))
        try:
            async with aclosing(tail):
                async for _ in tail:
                    pass
        except (StorageFailed, Fenced, RunParked):
            return False
        return True
