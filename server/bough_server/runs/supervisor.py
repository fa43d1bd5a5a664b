"""Keep runs going: revive, close and park them, and start the next run of a session."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, cast

import structlog

from bough.v1 import error_pb2, event_pb2, execution_pb2
from bough_server.agents.pinned import MissingVersion
from bough_server.engine.input_requests import expired, received
from bough_server.engine.journal import Journal
from bough_server.errors import Fenced, NonDeterministic, NotFound, RunError, RunParked, ServerStopping, StorageFailed
from bough_server.runs.close import CloseReason, close_run, failed, read_log
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import Pages
from bough_server.runs.live import LiveRun
from bough_server.runs.recovery import INITIAL_BACKOFF, Recovery, retry_until_stored
from bough_server.runs.registry import RunRegistry
from bough_server.runs.takeover import Launcher, Takeover
from bough_server.store.ports import Principal, RunMoved, RunRecord

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_TRIES = 5


class RunSupervisor:
    """Every run of this worker between its acceptance and its end."""

    def __init__(self, equipment: RunDependencies) -> None:
        self._equipment = equipment
        self.roster = RunRegistry()
        self.launcher = Launcher(equipment, self.roster, on_end=self._ended)
        self.takeover = Takeover(equipment, self.launcher)
        self.recovery = Recovery(equipment.index, equipment.clock, revive=self._revive, expire=self._expire)
        self._holders = SessionWatcher(equipment, spawn=self.recovery.spawn, on_end=self.call_next)
        self.parked: dict[str, str] = {}
        """Runs that cannot be executed here, and what is missing."""
        self.is_draining = False

    async def settled(self, run_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Does something that makes a run live or ends it, to its end even where the caller leaves."""
        task = asyncio.get_running_loop().create_task(work)
        self.roster.arriving(run_id, task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def go_on(
        self,
        record: RunRecord,
        cause: event_pb2.ResumeCause.ValueType,
        *,
        answers: Sequence[event_pb2.AgentEvent] = (),
        deadline_time_ns: int | None = None,
    ) -> LiveRun | None:
        """Continues a run; None where it had to be ended. Raises MissingVersion, RunMoved, Fenced, StorageFailed."""
        is_queued = record.run.state == execution_pb2.EXECUTION_STATE_PENDING
        going_on = self.takeover.go_on(
            record, cause, answers=answers, deadline_time_ns=deadline_time_ns, is_queued=is_queued
        )
        live = await self.settled(record.run.run_id, going_on)
        self.parked.pop(record.run.run_id, None)
        if live is None or is_queued:
            await self.call_next(record.principal, record.run.session_id)
        return live

    async def close(self, principal: Principal, run_id: str, why: CloseReason) -> bool:
        """Ends a run that nobody executes; gives whether it is ended: it is not where somebody goes on with it."""
        for _ in range(_TRIES):
            record = await self._equipment.index.get(principal, run_id)
            if record.run.HasField("end_time"):
                return True
            try:
                await self.settled(run_id, close_run(self._equipment, record, why))
            except RunMoved:
                if await self.roster.find(run_id) is not None:
                    return False
            except Fenced:
                return True
            else:
                self.parked.pop(run_id, None)
                await self.call_next(record.principal, record.run.session_id)
                return True
        return False

    async def call_next(self, principal: Principal, session_id: str) -> None:
        """Lets the run begin that holds a session by now, if it has waited for it; later where storage fails now."""
        try:
            await self._call_next(principal, session_id)
        except ServerStopping:
            return  # it waits on where it is taken up
        except StorageFailed:
            self.recovery.spawn(
                retry_until_stored(self._equipment.clock, partial(self._call_next, principal, session_id))
            )

    async def _call_next(self, principal: Principal, session_id: str) -> None:
        holder = await self._equipment.index.holder(principal, session_id)
        if holder is None or self.is_draining:
            return
        live = self.roster.at_hand(holder.run.run_id)
        if live is None and holder.owner != self._equipment.worker and self.roster.has_waiting(principal, session_id):
            self._holders.watch(holder)
        if live is None or not live.is_waiting:
            return
        stored = self._equipment.sessions
        cut = await stored.cut(principal, session_id)
        session = await stored.messages(principal, session_id, through=cut.position) if cut.position else ()
        live.begin(cut, session)

    async def is_elsewhere(self, record: RunRecord) -> bool:
        """Whether another worker, one that is alive, executes a run."""
        if record.owner in ("", self._equipment.worker):
            return False
        return record.owner in await self._equipment.leases.counters()

    async def _revive(self, found: RunRecord) -> None:
        """Continues a run that nobody executes, and waits until it is live."""
        run_id = found.run.run_id
        try:
            record = await self._equipment.index.get(found.principal, run_id)
        except NotFound:
            return
        is_over = record.run.HasField("end_time") or record.run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        if is_over or self.is_draining or self.roster.at_hand(run_id) or await self.is_elsewhere(record):
            return
        try:
            live = await self.go_on(record, event_pb2.RESUME_CAUSE_RECOVERY)
        except MissingVersion as missing:
            await self.park(record, str(missing))
        except StorageFailed:
            self.recovery.try_later(record)
        except (RunMoved, Fenced, ServerStopping):
            return  # somebody else acted
        else:
            if live is not None and not live.is_waiting:
                await live.lived()

    async def park(self, record: RunRecord, missing: str) -> None:
        """Leaves a run that cannot be executed here and tells its followers, unless somebody took it over meanwhile."""
        run_id = record.run.run_id
        now = await self._equipment.index.find(run_id)
        if now is None or now.epoch != record.epoch or now.run.HasField("end_time"):
            return
        self.parked[run_id] = missing
        self._equipment.log.hold_up(run_id, RunParked(f"The run is parked, and goes on where this is there: {missing}"))
        _log.warning("run parked", run_id=run_id, reason=missing)

    async def _expire(self, run_id: str) -> None:
        """Answers what is overdue of a run that waits for input, and continues it."""
        record = await self._equipment.index.find(run_id)
        if record is None or record.run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            return
        log = await read_log(self._equipment.log, run_id)
        now = self._equipment.clock.now_ns()
        asked = {event.effect_key: event for event in log if event.HasField("input_requested")}
        due = [
            received(asked[key], expired(request))
            for key, request in Journal(log).open_requests()
            if request.HasField("expire_time") and request.expire_time.ToNanoseconds() <= now
        ]
        try:
            await self.go_on(record, event_pb2.RESUME_CAUSE_ANSWER, answers=due)
        except (RunMoved, Fenced):
            return  # somebody answered

    def _ended(self, live: LiveRun, stopped: BaseException | None) -> None:
        """Lets a run go that has ended, waits, or stopped unrecorded."""
        self.roster.remove(live)
        if live.execution.is_interrupted:
            self.recovery.interrupted()
        if self.is_draining:
            return
        if isinstance(stopped, StorageFailed):
            self.recovery.try_later(live.record)
            return
        self.recovery.is_well(live.run_id)
        if isinstance(stopped, NonDeterministic):
            self._close_soon(live, stopped)
        elif stopped is not None and not isinstance(stopped, Fenced | ServerStopping):
            error = RunError(
                "The server failed at this run; its own log says how.", reason=error_pb2.ERROR_REASON_INTERNAL
            )
            self._close_soon(live, error)
        principal, session_id = live.record.principal, live.record.run.session_id
        if self.roster.has_waiting(principal, session_id):
            self.recovery.spawn(self.call_next(principal, session_id))

    def _close_soon(self, live: LiveRun, error: RunError) -> None:
        closing = partial(self.close, live.record.principal, live.run_id, failed(error))
        self.recovery.spawn(retry_until_stored(self._equipment.clock, closing))


class SessionWatcher:
    """The sessions that runs of this worker wait for and others hold: `on_end` is told of each that is given up."""

    def __init__(
        self,
        equipment: RunDependencies,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_end: Callable[[Principal, str], Awaitable[None]],
    ) -> None:
        self._equipment = equipment
        self._spawn = spawn
        self._on_end = on_end
        self._watched: set[tuple[str, str]] = set()

    def watch(self, holder: RunRecord) -> None:
        """Waits for the end of a run in a task of its own, one for each session."""
        watched = holder.principal.tenant_id, holder.run.session_id
        if watched not in self._watched:
            self._watched.add(watched)
            self._spawn(self._watch(holder))

    async def _watch(self, holder: RunRecord) -> None:
        try:
            while not await self._is_over(holder):
                await self._equipment.clock.sleep(INITIAL_BACKOFF)
        except (NotFound, ServerStopping):
            return  # its session was deleted, or who waits for it waits on where it is taken up
        finally:
            self._watched.discard((holder.principal.tenant_id, holder.run.session_id))
        await self._on_end(holder.principal, holder.run.session_id)

    async def _is_over(self, holder: RunRecord) -> bool:
        """Waits for the end of a log; gives whether it came: it does not while nobody can write it."""
        tail = cast(Pages, self._equipment.log.tail(holder.run.run_id, after=holder.run.last_sequence))
        try:
            async with aclosing(tail):
                async for _ in tail:
                    pass
        except (StorageFailed, Fenced, RunParked):
            return False
        return True
