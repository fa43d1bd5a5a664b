"""Accept runs: check them, make them durable with their first event, then begin or queue them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, policy_pb2
from bough_server import events, ids
from bough_server.errors import Fenced, SessionBusy
from bough_server.runs.admission import Admission, record_of, run_queued, run_started, stored_definitions
from bough_server.runs.close import because, close_run
from bough_server.runs.dependencies import Equipment
from bough_server.runs.live import LiveRun
from bough_server.runs.takeover import Launcher
from bough_server.store.ports import (
    NewRun,
    Page,
    Principal,
    Record,
    RunFilter,
    RunMoved,
    RunRecord,
    SessionCut,
    SessionMoved,
    StoredMessage,
)
from bough_server.telemetry import Parent, Traced

_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accepted:
    started: event_pb2.AgentEvent
    queued: event_pb2.AgentEvent | None
    session: Sequence[StoredMessage]


class Starter:
    """Makes admitted requests runs."""

    def __init__(self, equipment: Equipment, launcher: Launcher, call_next: Callable[[str], Awaitable[None]]) -> None:
        self._equipment = equipment
        self._launcher = launcher
        self._call_next = call_next

    async def start(self, principal: Principal, admission: Admission, trace: Parent) -> LiveRun:
        """Accepts a run and launches it. Raises SessionBusy, RequestIdTaken, NotFound and StorageFailed."""
        session_id = admission.request.session_id or ids.new_uuid7(admission.now_ns)
        record = record_of(admission, principal, session_id, owner=self._equipment.worker, is_queued=False)
        traced = self._launcher.span(record, admission.agent.definition, admission.run_id, trace)
        try:
            accepted = await self._accept(principal, admission, session_id, traced)
        except BaseException:
            traced.end()
            raise
        is_queued = accepted.queued is not None
        record = record_of(admission, principal, session_id, owner=self._equipment.worker, is_queued=is_queued)
        return self._launcher.launch(
            record,
            [accepted.started],
            resolver=admission.resolver,
            session=accepted.session,
            traced=traced,
            is_queued=is_queued,
        )

    async def _accept(self, principal: Principal, admission: Admission, session_id: str, traced: Traced) -> _Accepted:
        policy = admission.policy.on_busy_session
        busy = SessionBusy("Others change this session at this moment. Try again.")
        for _ in range(_TRIES):
            try:
                return await self._hold(principal, admission, session_id, traced)
            except SessionMoved:
                continue
            except SessionBusy as error:
                busy = error
            holder = await self._equipment.index.holder(session_id)
            if holder is None:
                continue
            if policy == policy_pb2.ON_BUSY_SESSION_QUEUE:
                try:
                    return await self._queue(principal, admission, session_id, traced, holder)
                except SessionBusy as error:
                    busy = error
            elif policy == policy_pb2.ON_BUSY_SESSION_CANCEL_INTERRUPTED and await self._gives_way(holder):
                await self._cancel(holder)
            else:
                raise busy
        raise busy

    async def _gives_way(self, holder: RunRecord) -> bool:
        """Whether a run may be cancelled for one that is to begin at once: it is not where others come before that."""
        if holder.run.state != event_pb2.STATE_INPUT_REQUIRED:
            return False
        waiting = RunFilter(session_id=holder.run.session_id, states=[event_pb2.STATE_PENDING])
        runs, _ = await self._equipment.index.list(holder.principal, waiting, Page(size=1))
        return not runs

    async def _hold(self, principal: Principal, admission: Admission, session_id: str, traced: Traced) -> _Accepted:
        if not admission.request.session_id:
            return await self._hold_at(SessionCut(0, ""), principal, admission, session_id, traced=traced)
        async with self._equipment.changing.alone(principal, session_id):
            cut = await self._equipment.sessions.cut(principal, session_id)
            return await self._hold_at(cut, principal, admission, session_id, traced=traced)

    async def _hold_at(
        self, cut: SessionCut, principal: Principal, admission: Admission, session_id: str, *, traced: Traced
    ) -> _Accepted:
        # Before the run is accepted: from then on nothing may come between it and its execution.
        session = await self._equipment.sessions.messages(session_id, through=cut.position) if cut.position else ()
        started = self._started(admission, cut, traced)
        await self._create(principal, admission, session_id, started, cut=cut)
        return _Accepted(started=started, queued=None, session=session)

    async def _queue(
        self, principal: Principal, admission: Admission, session_id: str, traced: Traced, holder: RunRecord
    ) -> _Accepted:
        cut = SessionCut(0, "")
        started = self._started(admission, cut, traced)
        queued = run_queued(started, holder.run.run_id)
        await self._create(principal, admission, session_id, started, cut=cut, queued=queued)
        return _Accepted(started=started, queued=queued, session=())

    def _started(self, admission: Admission, cut: SessionCut, traced: Traced) -> event_pb2.AgentEvent:
        event = run_started(admission, session_cut=cut.position, trace_id=traced.trace_id, span_id=traced.span_id)
        event.run_started.state_json = cut.state_json
        return event

    async def _create(
        self,
        principal: Principal,
        admission: Admission,
        session_id: str,
        started: event_pb2.AgentEvent,
        *,
        cut: SessionCut,
        queued: event_pb2.AgentEvent | None = None,
    ) -> None:
        await self._equipment.log.create(
            NewRun(
                run_id=admission.run_id,
                principal=principal,
                session_id=session_id,
                new_session=not admission.request.session_id,
                session_cut=cut.position,
                state_json=cut.state_json,
                request_id=admission.request.request_id,
                request_digest=started.run_started.request_digest,
                create_time_ns=admission.now_ns,
                first=_record(started),
                definitions=stored_definitions(admission.resolver, admission.agent.definition.name),
                owner=self._equipment.worker,
                queued=_record(queued) if queued is not None else None,
            )
        )

    async def _cancel(self, holder: RunRecord) -> None:
        try:
            await close_run(self._equipment, holder, because(event_pb2.CANCEL_REASON_CALLER))
        except (RunMoved, Fenced):
            return  # it has gone on, or ended, meanwhile: look again
        await self._call_next(holder.run.session_id)  # who came to wait behind it meanwhile comes first


def _record(event: event_pb2.AgentEvent) -> Record:
    return Record(sequence=event.sequence, kind=events.kind_of(event), data=event.SerializeToString(), event=event)
