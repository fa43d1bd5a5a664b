"""Start runs: hold the session or join its queue, create the run with its first events, and launch it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server import ids
from bough_server.errors import ConcurrentChange, Fenced, NotFound, SessionBusy
from bough_server.history.session import SessionHistory
from bough_server.identity import Principal
from bough_server.log import events
from bough_server.log.blobs import StoredBlob
from bough_server.observability.tracing import Parent, Traced
from bough_server.quotas import Quota
from bough_server.runs.admission import Admission, build_queue_event, build_row, build_start_event, collect_definitions
from bough_server.runs.close import close_reason, close_run
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.last_speaker import find_first_member
from bough_server.runs.takeover import Launcher
from bough_server.store.ports.log import LogEvent, NewRun, RunMoved, SessionMoved
from bough_server.store.ports.runs import Page, RunFilter, RunRow
from bough_server.store.ports.sessions import SessionPosition
from bough_server.store.ports.workers import Topic

_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunDraft:
    """A run that is not created yet: what does not depend on whether it holds its session or waits for it."""

    principal: Principal
    admission: Admission
    session_id: str
    owner: str
    """This worker, or empty if it has no room for the run."""
    traced: Traced
    quotas: Sequence[Quota]

    @property
    def creates_session(self) -> bool:
        """True if the run is to create the session that its request names if it does not exist."""
        request = self.admission.request
        is_asked = request.on_missing_session == agent_service_pb2.MISSING_SESSION_POLICY_CREATE
        return is_asked and bool(request.session_id)

    def build_first_event(self, position: SessionPosition) -> event_pb2.AgentEvent:
        """Return run_started of a run that sees its session up to a cut."""
        traced = self.traced
        event = build_start_event(
            self.admission, session_position=position.position, trace_id=traced.trace_id, span_id=traced.span_id
        )
        event.run_started.state_json = position.state_json
        return event

    def build_run(
        self, started: event_pb2.AgentEvent, cut: SessionPosition, *, queued: event_pb2.AgentEvent | None = None
    ) -> NewRun:
        """Return what the store creates; `queued` is the second event of a run that waits for its session."""
        admission = self.admission
        return NewRun(
            run_id=admission.run_id,
            principal=self.principal,
            session_id=self.session_id,
            new_session=not admission.request.session_id,
            # A run that waits does so for another run of its session, which exists then.
            create_session=self.creates_session and queued is None,
            session_position=cut.position,
            state_json=cut.state_json,
            request_id=admission.request.request_id,
            request_digest=started.run_started.request_digest,
            create_time_ns=admission.now_ns,
            first=_to_log_event(started, admission.files),
            definitions={
                **collect_definitions(admission.resolver, admission.agent.definition.name),
                **admission.versions.server_tools,
            },
            owner=self.owner,
            queued=_to_log_event(queued) if queued is not None else None,
            quotas=self.quotas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreatedRun:
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

    async def start(self, principal: Principal, admission: Admission, trace: Parent) -> RunRow:
        """Create a run and launch it, or leave it to any server if this one has no room for it.

        Raises SessionBusy, RequestIdTaken, QuotaExceeded, NotFound and StorageFailed.
        """
        session_id = admission.request.session_id or ids.new_uuid7(admission.now_ns)
        owner = self._dependencies.worker if self._has_room() else ""
        # Only for the span: whether the run is queued is not known before it is created.
        record = build_row(admission, principal, session_id, owner=owner, is_queued=False)
        traced = self._launcher.start_span(record, admission.agent.definition, admission.run_id, trace)
        draft = NewRunDraft(
            principal=principal,
            admission=admission,
            session_id=session_id,
            owner=owner,
            traced=traced,
            quotas=self._dependencies.quotas.find_on_starts(principal),
        )
        try:
            accepted = await self._accept(draft)
        except BaseException:
            traced.end()
            raise
        is_queued = accepted.queued is not None
        record = build_row(admission, principal, session_id, owner=owner, is_queued=is_queued)
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

    async def _accept(self, draft: NewRunDraft) -> _CreatedRun:
        policy = draft.admission.policy.on_busy_session
        for _ in range(_TRIES):
            try:
                return await self._hold(draft)
            except SessionMoved:
                continue
            except SessionBusy as error:
                busy = error
            holder = await self._dependencies.store.runs.holder(draft.principal, draft.session_id)
            if holder is None:  # the holder has ended since
                continue
            if policy == policy_pb2.BUSY_SESSION_POLICY_QUEUE:
                try:
                    return await self._queue(draft, holder)
                except SessionBusy:  # the holder has ended since: try to hold the session again
                    continue
            elif policy == policy_pb2.BUSY_SESSION_POLICY_CANCEL_INTERRUPTED and await self._gives_way(holder):
                await self._cancel(holder, draft)
            else:
                raise busy
        raise ConcurrentChange(
            "The session keeps changing while the run is being started. Try again.",
            details={"session_id": draft.session_id},
        )

    async def _gives_way(self, holder: RunRow) -> bool:
        """True if a run waits for input and no other run is queued behind it, so that a new run may replace it."""
        if holder.run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            return False
        waiting = RunFilter(session_id=holder.run.session_id, states=[execution_pb2.EXECUTION_STATE_PENDING])
        runs, _ = await self._dependencies.store.runs.list(holder.principal, waiting, Page(size=1))
        return not runs

    async def _hold(self, draft: NewRunDraft) -> _CreatedRun:
        if not draft.admission.request.session_id:
            return await self._hold_at(
                SessionPosition(0, ""), draft
            )  # no other call knows the session: there is no race
        async with self._dependencies.session_locks.hold(draft.principal, draft.session_id):
            return await self._hold_at(await self._read_position(draft), draft)

    async def _read_position(self, draft: NewRunDraft) -> SessionPosition:
        """Return the cut of the session that a request names, or an empty cut if the run is to create it.

        Raises NotFound.
        """
        try:
            return await self._dependencies.store.sessions.read_position(draft.principal, draft.session_id)
        except NotFound:
            if not draft.creates_session:
                raise
            return SessionPosition(0, "")

    async def _hold_at(self, position: SessionPosition, draft: NewRunDraft) -> _CreatedRun:
        # Read the messages before the run is created: once it exists, no failure may keep it from being launched.
        session = await self._dependencies.read_session_history(
            draft.principal, draft.session_id, through=position.position
        )
        started = draft.build_first_event(position)
        definition, log = draft.admission.agent.definition, self._dependencies.store.log
        started.run_started.starts_with = await find_first_member(log, definition, session.stored)
        await log.create(draft.build_run(started, position))
        return _CreatedRun(started=started, queued=None, session=session)

    async def _queue(self, draft: NewRunDraft, holder: RunRow) -> _CreatedRun:
        cut = SessionPosition(0, "")  # run_dequeued has the cut: the runs before this one still add to the session
        started = draft.build_first_event(cut)
        queued = build_queue_event(started, holder.run.run_id)
        await self._dependencies.store.log.create(draft.build_run(started, cut, queued=queued))
        return _CreatedRun(started=started, queued=queued, session=SessionHistory())

    async def _cancel(self, holder: RunRow, draft: NewRunDraft) -> None:
        request = event_pb2.CancelRequested(
            reason=execution_pb2.CANCEL_REASON_SUPERSEDED,
            requested_by=draft.principal.user_id,
            by_run_id=draft.admission.run_id,
        )
        try:
            await close_run(self._dependencies, holder, close_reason(request))
        except (RunMoved, Fenced):
            return  # it has been continued or has ended meanwhile: look again
        # A run that was queued meanwhile goes first.
        await self._call_next(draft.principal, holder.run.session_id)


def _to_log_event(event: event_pb2.AgentEvent, files: Sequence[StoredBlob] = ()) -> LogEvent:
    kind, data = events.kind_of(event), event.SerializeToString()
    return LogEvent(sequence=event.sequence, kind=kind, data=data, event=event, blobs=files)
