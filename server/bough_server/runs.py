"""Runs: starts, follows, cancels and drains them; owns one task for each live run. What a run does is the runtime's."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final, cast

from bough.v1 import agent_service_pb2, event_pb2
from bough_server import events, ids
from bough_server.admission import (
    Admission,
    RunDefaults,
    check_input,
    effective_policy,
    find_agent,
    record_of,
    request_digest,
    run_started,
    same_request,
    stored_definitions,
)
from bough_server.clock import Clock
from bough_server.endings import bounds
from bough_server.errors import Fenced, SequenceOutOfRange, ServerStopping, SessionBusy
from bough_server.live import LiveRun
from bough_server.recovery import close_open_run
from bough_server.runtime.agent import Resolver
from bough_server.runtime.execution import Execution, RunFacts
from bough_server.runtime.journal import Journal
from bough_server.runtime.recorder import Recorder
from bough_server.store.ports import (
    EventLog,
    NewRun,
    Page,
    Principal,
    Record,
    RequestIdTaken,
    RunFilter,
    RunIndex,
    RunRecord,
    SessionMoved,
    Sessions,
    StoredEvent,
    StoredMessage,
)
from bough_server.telemetry import Parent, Tracing

_START_TRIES: Final = 5


class Runs:
    """Every run that this process executes, and the way to all others."""

    def __init__(
        self,
        *,
        log: EventLog,
        index: RunIndex,
        sessions: Sessions,
        resolver: Resolver,
        tracing: Tracing,
        clock: Clock,
        defaults: RunDefaults,
    ) -> None:
        self._event_log = log
        self._index = index
        self._sessions = sessions
        self._resolver = resolver
        self._tracing = tracing
        self._clock = clock
        self._defaults = defaults
        self._live: dict[str, LiveRun] = {}
        self._admitting: dict[str, asyncio.Task[RunRecord]] = {}
        self._closing = asyncio.Lock()
        self._is_draining = False

    # Starting

    async def start(
        self,
        principal: Principal,
        request: agent_service_pb2.RunRequest,
        *,
        deadline_time_ns: int | None,
        trace: Parent,
    ) -> RunRecord:
        """Accepts a run and starts it, or finds the one that the same request started before.

        Raises InvalidRequest, NotFound (agent, session), RequestIdReused, SessionBusy, ServerStopping, StorageFailed.
        """
        self._refuse_while_draining()
        request.DiscardUnknownFields()  # nobody has counted them, and they would go into the log
        check_input(request.input)
        digest = request_digest(request)
        if request.request_id:
            earlier = await self._index.find_request(principal, request.request_id)
            if earlier is not None:
                return same_request(earlier, digest, request.request_id)
            self._refuse_while_draining()
        now = self._clock.now_ns()
        admission = Admission(
            request=request,
            digest=digest,
            run_id=ids.new_uuid7(now),
            agent=find_agent(self._resolver, request.agent),
            policy=effective_policy(request.policy, self._defaults),
            deadline_time_ns=None if request.policy.background else deadline_time_ns,
            now_ns=now,
        )
        # A caller that goes away meanwhile must not leave an accepted run that nobody executes.
        admitting = asyncio.get_running_loop().create_task(self._admit(principal, admission, trace))
        self._admitting[admission.run_id] = admitting
        admitting.add_done_callback(lambda _: self._admitting.pop(admission.run_id))
        try:
            return await asyncio.shield(admitting)
        except RequestIdTaken as taken:
            earlier = await self._index.get(principal, taken.run_id)
            return same_request(earlier, digest, request.request_id)

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise ServerStopping("The server is stopping and takes no new runs. Try again at another one.")

    async def _admit(self, principal: Principal, admission: Admission, trace: Parent) -> RunRecord:
        request = admission.request
        session_id = request.session_id or ids.new_uuid7(admission.now_ns)
        definition = admission.agent.definition
        traced = self._tracing.invoke_agent(
            agent=definition.name,
            description=definition.description,
            invocation_id=admission.run_id,
            run_id=admission.run_id,
            session_id=session_id,
            branch=definition.name,
            depth=0,
            parent=trace.for_run(run_id=admission.run_id, session_id=session_id, user_id=principal.user_id),
        )
        try:
            started, session = await self._create(principal, admission, session_id, traced.trace_id, traced.span_id)
        except BaseException:
            traced.end()
            raise
        record = record_of(admission, principal, session_id)
        facts = RunFacts(
            run_id=admission.run_id, session_id=session_id, user_id=principal.user_id, started=started, session=session
        )
        recorder = Recorder(self._event_log, admission.run_id, epoch=1, last_sequence=1, clock=self._clock)
        execution = Execution(
            facts,
            resolver=self._resolver,
            tracing=self._tracing,
            clock=self._clock,
            journal=Journal([started]),
            recorder=recorder,
            default_delta=self._defaults.delta,
        )
        execution.spans[""] = traced
        live = LiveRun(record, execution, on_end=self._live.__delitem__)
        self._live[admission.run_id] = live
        live.launch(bounds(admission, self._clock.now_ns()))
        return record

    async def _create(
        self, principal: Principal, admission: Admission, session_id: str, trace_id: str, span_id: str
    ) -> tuple[event_pb2.AgentEvent, Sequence[StoredMessage]]:
        is_new = not admission.request.session_id
        for _ in range(_START_TRIES):
            cut = 0 if is_new else await self._sessions.last_position(principal, session_id)
            # Before the run is accepted: from then on nothing may come between it and its execution.
            session = await self._sessions.messages(session_id, through=cut) if cut else ()
            event = run_started(admission, self._resolver, session_cut=cut, trace_id=trace_id, span_id=span_id)
            first = Record(sequence=1, kind=events.RUN_STARTED, data=event.SerializeToString(), event=event)
            new_run = NewRun(
                run_id=admission.run_id,
                principal=principal,
                session_id=session_id,
                new_session=is_new,
                session_cut=cut,
                request_id=admission.request.request_id,
                request_digest=event.run_started.request_digest,
                create_time_ns=admission.now_ns,
                first=first,
                definitions=stored_definitions(self._resolver, admission.agent.definition.name),
            )
            try:
                await self._event_log.create(new_run)
            except SessionMoved:
                continue
            return event, session
        raise SessionBusy("Other runs of this session begin and end at this moment. Try again.")

    # Following

    async def follow(
        self, principal: Principal, run_id: str, *, after: int, until_current: bool = False
    ) -> AsyncGenerator[Sequence[StoredEvent], None]:
        """The committed events of a run after a sequence, page by page, to its terminal event or to what there is now.

        Counts as a follower while it is open. Raises NotFound and SequenceOutOfRange at once, StorageFailed where the
        run stopped unrecorded.
        """
        live = self._live.get(run_id)
        is_known = live is not None and live.record.principal == principal and not after
        last = 0 if is_known and not until_current else await self._last_sequence(principal, run_id, after)
        if until_current:
            while after < last:
                page = await self._event_log.read(run_id, after=after, through=last)
                yield page
                after = page[-1].sequence
            return
        live = await self._find_live(run_id)
        if live is not None:
            live.joined()
        try:
            tail = cast(AsyncGenerator[Sequence[StoredEvent], None], self._event_log.tail(run_id, after=after))
            async with aclosing(tail):
                async for page in tail:
                    yield page
        finally:
            if live is not None:
                live.left()

    async def _last_sequence(self, principal: Principal, run_id: str, after: int) -> int:
        await self._index.get(principal, run_id)
        last = await self._event_log.last_sequence(run_id)
        if after > last:
            raise SequenceOutOfRange(
                f"The log of this run ends at sequence {last}; there is nothing after {after}.",
                details={"last_sequence": str(last)},
            )
        return last

    async def _find_live(self, run_id: str) -> LiveRun | None:
        """A run while it goes here; one that is on disk and not yet begun is waited for."""
        admitting = self._admitting.get(run_id)
        if admitting is not None:
            await asyncio.wait({admitting})
        return self._live.get(run_id)

    # Reading

    async def get(self, principal: Principal, run_id: str) -> RunRecord:
        """One run of the principal's tenant. Raises NotFound."""
        return await self._index.get(principal, run_id)

    async def list(
        self, principal: Principal, run_filter: RunFilter, page: Page
    ) -> tuple[Sequence[agent_service_pb2.Run], str]:
        """A page of runs, the newest first."""
        return await self._index.list(principal, run_filter, page)

    # Ending

    async def cancel(self, principal: Principal, run_id: str) -> RunRecord:
        """Asks a run to stop; the wish is durable when this returns. On a run that has ended it changes nothing.

        A run that stopped unrecorded is ended before this returns. Raises NotFound, ServerStopping, StorageFailed.
        """
        await self._index.get(principal, run_id)
        live = await self._find_live(run_id)
        if live is None or not await live.end(event_pb2.CANCEL_REASON_CALLER):
            await self._close_stopped(principal, run_id)
        return await self._index.get(principal, run_id)

    async def _close_stopped(self, principal: Principal, run_id: str) -> None:
        """Ends a run that nobody executes; one at a time, since each would take the log over from the one before."""
        async with self._closing:
            record = await self._index.get(principal, run_id)
            if not record.run.HasField("end_time"):
                with suppress(Fenced):  # it has ended meanwhile
                    await close_open_run(self._event_log, record, self._clock, event_pb2.CANCEL_REASON_CALLER)

    async def recover(self) -> int:
        """Ends the runs that a dead server left open; gives how many there were."""
        open_runs = await self._index.open_runs()
        for record in open_runs:
            await close_open_run(self._event_log, record, self._clock, event_pb2.CANCEL_REASON_SERVER)
        return len(open_runs)

    async def drain(self, grace: float) -> None:
        """Takes no new runs, lets live ones end within `grace` seconds, then ends the rest: the server stops."""
        self._is_draining = True
        if self._admitting:
            await asyncio.wait(self._admitting.values())
        for live in self._live.values():
            live.keep_going()
        await self._wait_for_ends(grace)
        for live in list(self._live.values()):
            live.end_soon(event_pb2.CANCEL_REASON_SERVER)
        await self._wait_for_ends(None)

    async def _wait_for_ends(self, seconds: float | None) -> None:
        tasks = {live.task for live in self._live.values() if live.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self) -> None:
        """Ends everything at once."""
        await self.drain(0)
