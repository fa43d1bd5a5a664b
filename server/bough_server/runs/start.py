"""Start runs: hold the session or join its queue, create the run with its first events, and launch it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server import events, ids
from bough_server.blobs import StoredBlob
from bough_server.errors import Fenced, NotFound, SessionBusy
from bough_server.history.session import SessionHistory
from bough_server.runs.admission import Admission, record_of, run_queued, run_started, stored_definitions
from bough_server.runs.close import close_reason, close_run
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.last_speaker import first_member
from bough_server.runs.takeover import Launcher
from bough_server.store.ports.log import NewRun, Principal, Record, RunMoved, SessionMoved
from bough_server.store.ports.runs import Page, RunFilter, RunRecord
from bough_server.store.ports.sessions import SessionCut
from bough_server.store.ports.workers import Topic
from bough_server.telemetry import Parent, Traced

_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accepted:
    started: event_pb2.AgentEvent
    queued: event_pb2.AgentEvent | None
    session: SessionHistory


class RunStarter:
    """Creates runs of admitted requests, and launches them."""

    def __init__(
        self,
        dependencies: RunDependencies,
        launcher: Launcher,
        call_next: Callable[[Principal, str], Awaitable[None]],
        *,
        has_room: Callable[[], bool],
    ) -> None:
        self._dependencies = dependencies
        self._launcher = launcher
        self._call_next = call_next
        self._has_room = has_room

    async def start(self, principal: Principal, admission: Admission, trace: Parent) -> RunRecord:
        """Create a run and launch it, or leave it to any server if this one has no room for it.

        Raises SessionBusy, RequestIdTaken, NotFound and StorageFailed.
        """
        session_id = admission.request.session_id or ids.new_uuid7(admission.now_ns)
        owner = self._dependencies.worker if self._has_room() else ""
        # Only for the span: whether the run is queued is not known before it is created.
        record = record_of(admission, principal, session_id, owner=owner, is_queued=False)
        traced = self._launcher.span(record, admission.agent.definition, admission.run_id, trace)
        try:
            accepted = await self._accept(principal, admission, session_id, owner=owner, traced=traced)
        except BaseException:
            traced.end()
            raise
        is_queued = accepted.queued is not None
        record = record_of(admission, principal, session_id, owner=owner, is_queued=is_queued)
        if not owner:
            traced.end()  # the spans of those who execute it are its children
            self._dependencies.store.notifier.publish(Topic.UNOWNED)
            return record
        self._launcher.launch(
            record,
            [accepted.started],
            resolver=admission.resolver,
            session=accepted.session,
            traced=traced,
            is_queued=is_queued,
        )
        return record

    async def _accept(
        self, principal: Principal, admission: Admission, session_id: str, *, owner: str, traced: Traced
    ) -> _Accepted:
        policy = admission.policy.on_busy_session
        details = {"session_id": session_id}
        busy = SessionBusy("The session keeps changing while the run is being started. Try again.", details=details)
        for _ in range(_TRIES):
            try:
                return await self._hold(principal, admission, session_id, owner=owner, traced=traced)
            except SessionMoved:
                continue
            except SessionBusy as error:
                busy = error
            holder = await self._dependencies.store.runs.holder(principal, session_id)
            if holder is None:  # the holder has ended since
                continue
            if policy == policy_pb2.BUSY_SESSION_POLICY_QUEUE:
                try:
                    return await self._queue(
                        principal, admission, session_id=session_id, owner=owner, traced=traced, holder=holder
                    )
                except SessionBusy as error:
                    busy = error
            elif policy == policy_pb2.BUSY_SESSION_POLICY_CANCEL_INTERRUPTED and await self._gives_way(holder):
                await self._cancel(holder, principal, admission.run_id)
            else:
                raise busy
        raise busy

    async def _gives_way(self, holder: RunRecord) -> bool:
        """True if a run waits for input and no other run is queued behind it, so that a new run may replace it."""
        if holder.run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            return False
        waiting = RunFilter(session_id=holder.run.session_id, states=[execution_pb2.EXECUTION_STATE_PENDING])
        runs, _ = await self._dependencies.store.runs.list(holder.principal, waiting, Page(size=1))
        return not runs

    async def _hold(
        self, principal: Principal, admission: Admission, session_id: str, *, owner: str, traced: Traced
    ) -> _Accepted:
        if not admission.request.session_id:
            return await self._hold_at(SessionCut(0, ""), principal, admission, session_id, owner=owner, traced=traced)
        async with self._dependencies.session_locks.hold(principal, session_id):
            cut = await self._cut(principal, admission)
            return await self._hold_at(cut, principal, admission, session_id, owner=owner, traced=traced)

    async def _cut(self, principal: Principal, admission: Admission) -> SessionCut:
        """Return the cut of the session that a request names, or an empty cut if the run is to create it.

        Raises NotFound.
        """
        try:
            return await self._dependencies.store.sessions.cut(principal, admission.request.session_id)
        except NotFound:
            if not _creates_session(admission):
                raise
            return SessionCut(0, "")

    async def _hold_at(
        self,
        cut: SessionCut,
        principal: Principal,
        admission: Admission,
        session_id: str,
        *,
        owner: str,
        traced: Traced,
    ) -> _Accepted:
        # Read the messages before the run is created: once it exists, no failure may keep it from being launched.
        session = await self._dependencies.session_history(principal, session_id, through=cut.position)
        started = self._started(admission, cut, traced)
        definition, log = admission.agent.definition, self._dependencies.store.log
        started.run_started.starts_with = await first_member(log, definition, session.stored)
        await self._create(principal, admission, session_id, started, cut=cut, owner=owner)
        return _Accepted(started=started, queued=None, session=session)

    async def _queue(
        self,
        principal: Principal,
        admission: Admission,
        *,
        session_id: str,
        owner: str,
        traced: Traced,
        holder: RunRecord,
    ) -> _Accepted:
        cut = SessionCut(0, "")
        started = self._started(admission, cut, traced)
        queued = run_queued(started, holder.run.run_id)
        await self._create(principal, admission, session_id, started, cut=cut, owner=owner, queued=queued)
        return _Accepted(started=started, queued=queued, session=SessionHistory())

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
        owner: str,
        queued: event_pb2.AgentEvent | None = None,
    ) -> None:
        await self._dependencies.store.log.create(
            NewRun(
                run_id=admission.run_id,
                principal=principal,
                session_id=session_id,
                new_session=not admission.request.session_id,
                create_session=_creates_session(admission) and queued is None,
                session_cut=cut.position,
                state_json=cut.state_json,
                request_id=admission.request.request_id,
                request_digest=started.run_started.request_digest,
                create_time_ns=admission.now_ns,
                first=_record(started, admission.files),
                definitions=stored_definitions(admission.resolver, admission.agent.definition.name),
                owner=owner,
                queued=_record(queued) if queued is not None else None,
            )
        )

    async def _cancel(self, holder: RunRecord, principal: Principal, by_run_id: str) -> None:
        request = event_pb2.CancelRequested(
            reason=execution_pb2.CANCEL_REASON_SUPERSEDED, requested_by=principal.user_id, by_run_id=by_run_id
        )
        try:
            await close_run(self._dependencies, holder, close_reason(request))
        except (RunMoved, Fenced):
            return  # it has been continued or has ended meanwhile: look again
        await self._call_next(principal, holder.run.session_id)  # a run that was queued meanwhile goes first


def _creates_session(admission: Admission) -> bool:
    """True if the run is to create the session that its request names if it does not exist."""
    request = admission.request
    is_asked = request.on_missing_session == agent_service_pb2.MISSING_SESSION_POLICY_CREATE
    return is_asked and bool(request.session_id)


def _record(event: event_pb2.AgentEvent, files: Sequence[StoredBlob] = ()) -> Record:
    kind, data = events.kind_of(event), event.SerializeToString()
    return Record(sequence=event.sequence, kind=kind, data=data, event=event, blobs=files)
