"""Supervise runs: continue, end and park them, and start the next run of a session."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import structlog

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.agents.pinned import MissingVersion
from bough_server.engine.input_requests import build_answer_event, build_expiry_answer
from bough_server.engine.journal import Journal
from bough_server.errors import Fenced, NonDeterministic, NotFound, RunError, RunParked, ServerStopping, StorageFailed
from bough_server.identity import Principal
from bough_server.log.blobs import StoredBlob
from bough_server.ownership.background import Background, retry_until_stored
from bough_server.ownership.worker import Worker
from bough_server.runs import progress
from bough_server.runs.close import CloseReason, close_run, read_log, to_close_reason
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.live import LiveRun
from bough_server.runs.recovery import Recovery
from bough_server.runs.registry import RunRegistry
from bough_server.runs.session_queue import SessionQueue
from bough_server.runs.takeover import Launcher, Takeover
from bough_server.store.ports.log import RunMoved
from bough_server.store.ports.runs import RunRow

_log = structlog.get_logger(__name__)

_TRIES = 5

MANY: Final = 1_000_000
"""More runs than are ever continued at once."""

OFFER_SECONDS: Final = 10.0
"""Seconds that other servers have to continue a run that is parked here, before its readers get an error."""


class RunSupervisor:
    """Supervises the runs of this worker from their creation to their end."""

    def __init__(self, dependencies: RunDependencies, worker: Worker, background: Background) -> None:
        self._dependencies, self.worker, self._background = dependencies, worker, background
        self.live_runs = RunRegistry(worker, background, dependencies.clock)
        self.launcher = Launcher(dependencies, self.live_runs, on_end=self._on_end)
        self.takeover = Takeover(dependencies, self.launcher)
        store = dependencies.store
        self.recovery = Recovery(self, store.runs, background, dependencies.clock, is_shared=store.leases.is_shared)
        self.queue = SessionQueue(dependencies, self.live_runs, background)
        self.parked: dict[str, str] = {}
        """Runs that cannot be executed here, with a message on what is missing."""
        self.is_draining = False
        worker.on_lost(self._replace_lease)

    async def continue_run(
        self,
        run_row: RunRow,
        cause: event_pb2.ResumeCause.ValueType,
        *,
        answers: Sequence[event_pb2.AgentEvent] = (),
        files: Sequence[StoredBlob] = (),
        deadline_time_ns: int | None = None,
        former_owner: str = "",
        is_retried: bool = False,
    ) -> LiveRun | None:
        """Continue a run; return None if it was ended instead. Raises as Takeover.continue_run does.

        `is_retried` as in Arrivals.arrive.
        """
        is_queued = run_row.run.state == execution_pb2.EXECUTION_STATE_PENDING
        work = self.takeover.continue_run(
            run_row,
            cause,
            answers=answers,
            files=files,
            deadline_time_ns=deadline_time_ns,
            is_queued=is_queued,
            former_owner=former_owner,
        )
        live = await self.live_runs.arrive(run_row.run.run_id, work, is_retried=is_retried)
        self.parked.pop(run_row.run.run_id, None)
        # A run that was ended has released its session, and a queued one may have been given it while it was not live.
        if live is None or is_queued:
            await self.queue.call_next(run_row.principal, run_row.run.session_id)
        return live

    async def close(self, principal: Principal, run_id: str, reason: CloseReason) -> bool:
        """End a run that no worker executes. Return False if another worker resumed it first."""
        for _ in range(_TRIES):
            record = await self._dependencies.store.runs.get(principal, run_id)
            if record.run.HasField("end_time"):
                return True
            try:
                work = close_run(self._dependencies, record, reason)
                await self.live_runs.arrive(run_id, work, is_retried=True)
            except RunMoved:
                if await self.live_runs.find(run_id) is not None:
                    return False
            except Fenced:
                return True
            else:
                self.parked.pop(run_id, None)
                await self.queue.call_next(record.principal, record.run.session_id)
                return True
        return False

    def has_room(self) -> bool:
        """True unless this worker executes more runs than it may; a run that is being created counts."""
        most = self._dependencies.max_live_runs
        return most is None or len(self.live_runs.list_executing()) <= most

    # What Recovery continues: see Recoverable

    def room(self) -> int:
        """See Recoverable."""
        if self.is_draining:
            return 0
        most = self._dependencies.max_live_runs
        return MANY if most is None else most - len(self.live_runs.list_executing())

    async def claim(self, most: int) -> Sequence[RunRow]:
        """See Recoverable."""
        found = await self._dependencies.store.leases.claim(self.worker.name, most=most, but=self.parked)
        self.live_runs.claim(record.run.run_id for record in found)
        if self.is_draining:  # it has begun meanwhile, and has not seen these
            self.live_runs.give_up_claims()
        return found

    async def revive(self, run_row: RunRow) -> None:
        """See Recoverable."""
        try:
            await self._continue_found(run_row)
        finally:
            self.live_runs.unclaim(run_row.run.run_id)
            if (
                self._dependencies.max_live_runs is not None
                and run_row.run.run_id not in self.live_runs.list_executing()
            ):
                self.recovery.on_offer()  # it leaves the room that it was claimed for

    async def _continue_found(self, found: RunRow) -> None:
        run_id = found.run.run_id
        for _ in range(_TRIES):
            try:
                record = await self._dependencies.store.runs.get(found.principal, run_id)
            except NotFound:
                return
            state = record.run.state
            is_over = record.run.HasField("end_time") or state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
            if is_over or await self.worker.is_elsewhere(record) or self.live_runs.get_live(run_id) or self.is_draining:
                return
            try:
                live = await self.continue_run(
                    record, event_pb2.RESUME_CAUSE_RECOVERY, former_owner=found.owner, is_retried=True
                )
            except MissingVersion as missing:
                await self.park(record, str(missing))
            except RunMoved:
                continue  # its former owner has written on until now, or another call was faster
            except (Fenced, ServerStopping):
                return  # it has ended, or the server stops
            else:
                if live is not None and not live.is_waiting:
                    await (
                        live.wait_for_replay()
                    )  # keeps the slot of Recovery until then, which bounds concurrent replays
            return
        self.recovery.try_later(found)

    async def expire(self, run_id: str) -> None:
        """See Recoverable."""
        record = await self._dependencies.store.runs.find(run_id)
        if record is None or record.run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            return
        log = await read_log(self._dependencies.store.log, run_id)
        now = self._dependencies.clock.now_ns()
        asked = {event.effect_key: event for event in log if event.HasField("input_requested")}
        due = [
            build_answer_event(asked[key], build_expiry_answer(request))
            for key, request in Journal(log).open_requests()
            if request.HasField("expire_time") and request.expire_time.ToNanoseconds() <= now
        ]
        try:
            await self.continue_run(record, event_pb2.RESUME_CAUSE_ANSWER, answers=due)
        except (RunMoved, Fenced):
            return  # another call answered first

    async def count_crashes(self, run_row: RunRow) -> int:
        """See Recoverable."""
        return await progress.count_crashes(self._dependencies.store.log, run_row)

    async def wait_for_progress(self, run_row: RunRow) -> None:
        """See Recoverable."""
        live = self.live_runs.get_live(run_row.run.run_id)
        if live is not None and not live.is_waiting:
            await progress.wait_for_progress(self._dependencies.store.log, live, after=run_row.run.last_sequence)

    async def park(self, run_row: RunRow, missing: str) -> None:
        """Park a run that cannot be executed here, and end its readers, unless it was taken over meanwhile."""
        run_id = run_row.run.run_id
        now = await self._dependencies.store.runs.find(run_id)
        if now is None or now.epoch != run_row.epoch or now.run.HasField("end_time"):
            return
        self.parked[run_id] = missing
        _log.warning("run parked", run_id=run_id, reason=missing)
        if self._dependencies.store.leases.is_shared:  # another server may have what is missing here
            await retry_until_stored(self._dependencies.clock, partial(self.worker.give_up, run_id))
            self._background.spawn(self._fail_readers_later(run_id, missing))
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

    def _fail_readers(self, run_row: RunRow, missing: str) -> None:
        error = RunParked(f"The run is parked until a server has everything it started with: {missing}")
        self._dependencies.store.log.fail_readers(run_row.run.run_id, error, epoch=run_row.epoch)

    def drain(self) -> None:
        """Execute no more runs: others continue those that are claimed, too."""
        self.is_draining = self.queue.is_draining = True
        self.live_runs.give_up_claims()

    async def stop_all(self, error: BaseException) -> None:
        """Stop all runs where they are, unrecorded, and wait for that."""
        for live in self.live_runs:
            live.stop(error)
        if tasks := self.live_runs.tasks():
            await asyncio.wait(tasks)
        await self.worker.settle()

    async def _replace_lease(self) -> None:
        """Stop all runs, which others continue."""
        await self.live_runs.wait_for_current_arrivals()
        await self.stop_all(Fenced("This server was declared dead, and another one continues the run."))

    def _on_end(self, live: LiveRun, stopped: BaseException | None) -> None:
        """Handle the end of a run's task: the run has ended, waits for input, or stopped with an unrecorded error."""
        self.live_runs.remove(live)
        self._dependencies.store.log.release(live.run_id)
        if live.execution.is_interrupted:
            self.recovery.on_interruption()
        if self.is_draining:
            if isinstance(stopped, ServerStopping):
                self.worker.give_up_soon(live.run_id)
            return
        if self._dependencies.max_live_runs is not None:
            self.recovery.on_offer()
        if isinstance(stopped, StorageFailed):
            self.recovery.try_later(live.run_row)
            return
        self.recovery.reset_backoff(live.run_id)
        if isinstance(stopped, NonDeterministic):
            self._close_soon(live, stopped)
        elif stopped is not None and not isinstance(stopped, Fenced | ServerStopping):
            error = RunError(
                "The server failed while executing this run; the server's log says why.",
                reason=error_pb2.ERROR_REASON_INTERNAL,
            )
            self._close_soon(live, error)
        self.queue.call_next_soon(live.run_row.principal, live.run_row.run.session_id)

    def _close_soon(self, live: LiveRun, error: RunError) -> None:
        closing = partial(self.close, live.run_row.principal, live.run_id, to_close_reason(error))
        self._background.spawn(retry_until_stored(self._dependencies.clock, closing))
