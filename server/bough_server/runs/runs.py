"""What callers ask of runs: to start, follow, answer, fork, find, cancel and drain them; the work is done beside it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, follow_pb2, message_pb2, run_pb2
from bough_server import events, ids
from bough_server.errors import Fenced, ServerStopping, StorageFailed
from bough_server.runs.admission import (
    Admission,
    check_input,
    effective_policy,
    request_digest,
    same_request,
)
from bough_server.runs.close import close_reason
from bough_server.runs.commands import RemoteCommands
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import LogFollower, Pages, Until
from bough_server.runs.fork import RunForker
from bough_server.runs.resume import Resumed, RunResumer
from bough_server.runs.start import RunStarter
from bough_server.runs.supervisor import RunSupervisor
from bough_server.store.ports import Page, Principal, RequestIdTaken, RunFilter, RunRecord
from bough_server.store.worker_ports import RunCommand
from bough_server.telemetry import Parent

_log = structlog.get_logger(__name__)


class Runs:
    """Every run that this process executes, and the way to all others."""

    def __init__(self, equipment: RunDependencies) -> None:
        self._equipment = equipment
        self._keeper = RunSupervisor(equipment)
        self._letters = RemoteCommands(equipment)
        self._starter = RunStarter(equipment, self._keeper.launcher, self._keeper.call_next)
        self._forker = RunForker(equipment, self._keeper.takeover)
        self._answering = RunResumer(equipment, self._keeper, self._letters)
        self._follower = LogFollower(equipment, self._keeper.roster)

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

        Raises InvalidRequest, NotFound (agent, session), AgentUnusable, RequestIdReused, SessionBusy, ServerStopping,
        StorageFailed.
        """
        self._refuse_while_draining()
        request.DiscardUnknownFields()  # nobody has counted them, and they would go into the log
        check_input(request.input)
        digest = request_digest(request)
        if (earlier := await self._earlier(principal, request.request_id, digest)) is not None:
            return earlier
        resolver = await self._equipment.agents.resolver(principal.tenant_id, request.agent, request.definitions)
        self._refuse_while_draining()  # which may have begun meanwhile
        now, policy = self._equipment.clock.now_ns(), effective_policy(request.policy, self._equipment.defaults)
        admission = Admission(
            request=request,
            digest=digest,
            run_id=ids.new_uuid7(now),
            user_id=principal.user_id,
            agent=resolver.agent(request.agent),
            resolver=resolver,
            policy=policy,
            deadline_time_ns=None if policy.background else deadline_time_ns,
            now_ns=now,
        )
        # A caller that goes away meanwhile must not leave an accepted run that nobody executes.
        starting = self._keeper.settled(admission.run_id, self._starter.start(principal, admission, trace))
        try:
            live = await starting
        except RequestIdTaken as taken:
            return same_request(await self._equipment.index.get(principal, taken.run_id), digest, request.request_id)
        if live.is_waiting:
            await self._keeper.call_next(principal, live.record.run.session_id)  # it may have become free meanwhile
        return live.record

    async def fork(
        self, principal: Principal, request: agent_service_pb2.ForkRunRequest, *, deadline_time_ns: int | None
    ) -> tuple[RunRecord, int]:
        """Forks a run, or finds the fork that the same request made before; with what it shares of its origin's log.

        Raises NotFound, SequenceOutOfRange, ForkRefused, InvalidRequest, RequestIdReused, ServerStopping and
        StorageFailed.
        """
        self._refuse_while_draining()
        request.DiscardUnknownFields()
        digest = request_digest(request)
        record = await self._earlier(principal, request.request_id, digest)
        if record is None:
            run_id = ids.new_uuid7(self._equipment.clock.now_ns())
            forking = self._forker.fork(
                principal, request, run_id=run_id, digest=digest, deadline_time_ns=deadline_time_ns
            )
            try:
                record = (await self._keeper.settled(run_id, forking)).record
            except RequestIdTaken as taken:
                record = await self._equipment.index.get(principal, taken.run_id)
                same_request(record, digest, request.request_id)
        return record, record.run.forked_from.sequence

    async def resume(
        self, principal: Principal, request: agent_service_pb2.ResumeRunRequest, *, deadline_time_ns: int | None
    ) -> Resumed:
        """Answers what a run asks, and lets it go on. See Answering."""
        self._refuse_while_draining()
        request.DiscardUnknownFields()
        return await self._answering.resume(principal, request, deadline_time_ns=deadline_time_ns)

    async def _earlier(self, principal: Principal, request_id: str, digest: str) -> RunRecord | None:
        if not request_id:
            return None
        earlier = await self._equipment.index.find_request(principal, request_id)
        if earlier is not None:
            return same_request(earlier, digest, request_id)
        self._refuse_while_draining()
        return None

    def _refuse_while_draining(self) -> None:
        if self._keeper.is_draining:
            raise ServerStopping("The server is stopping and takes no new runs. Try again at another one.")

    # Reading

    def follow(
        self,
        principal: Principal,
        run_id: str,
        *,
        after: int = 0,
        until: Until = follow_pb2.WATCH_UNTIL_TERMINAL,
        past: int = 0,
    ) -> Pages:
        """The committed events of a run after a sequence. See Follower."""
        return self._follower.follow(principal, run_id, after=after, until=until, past=past)

    async def get(self, principal: Principal, run_id: str) -> RunRecord:
        """One run of the principal's tenant. Raises NotFound."""
        record = await self._equipment.index.get(principal, run_id)
        record.run.parked_reason = self._keeper.parked.get(run_id, "")
        return record

    async def final_answer(self, run: run_pb2.Run) -> message_pb2.Message | None:
        """The answer of a run that has succeeded; None of any other. Raises NotFound if the run has been deleted."""
        if run.state != execution_pb2.EXECUTION_STATE_SUCCEEDED:
            return None
        end = await self._equipment.log.read(run.run_id, after=run.last_sequence - 1, through=run.last_sequence)
        return events.parse(end[0].data).run_completed.final_answer

    async def list(self, principal: Principal, run_filter: RunFilter, page: Page) -> tuple[Sequence[run_pb2.Run], str]:
        """A page of runs, the newest first."""
        runs, token = await self._equipment.index.list(principal, run_filter, page)
        for run in runs:
            run.parked_reason = self._keeper.parked.get(run.run_id, "")
        return runs, token

    # Ending

    async def cancel(self, principal: Principal, run_id: str, *, note: str = "") -> RunRecord:
        """Asks a run to stop; the wish is durable when this returns. On a run that has ended it changes nothing.

        A run that nobody executes is ended before this returns. Raises NotFound, ServerStopping, StorageFailed.
        """
        record = await self._equipment.index.get(principal, run_id)
        request = event_pb2.CancelRequested(
            reason=execution_pb2.CANCEL_REASON_CALLER, requested_by=principal.user_id, note=note
        )
        await self._cancel(record, request)
        return await self.get(principal, run_id)

    async def _cancel(self, record: RunRecord, request: event_pb2.CancelRequested) -> None:
        while not await self._is_wished(record, request):
            record = await self._equipment.index.get(record.principal, record.run.run_id)

    async def _is_wished(self, record: RunRecord, request: event_pb2.CancelRequested) -> bool:
        """Whether a run has been asked to end, or has; it is not where somebody took it over at that moment."""
        run_id = record.run.run_id
        live = await self._keeper.roster.find(run_id)
        if live is not None:
            with suppress(Fenced):  # another worker has taken it over
                if await live.end(request):
                    return True
            await live.over()
            record = await self._equipment.index.get(record.principal, run_id)
        if await self._keeper.is_elsewhere(record):
            with suppress(Fenced):  # it has ended meanwhile
                await self._letters.cancel(record, request)
            return True
        return await self._keeper.close(record.principal, run_id, close_reason(request))

    async def _act(self, record: RunRecord, letter: RunCommand) -> None:
        if letter.answers is not None:
            principal = Principal(tenant_id=record.principal.tenant_id, user_id=letter.user_id)
            await self._answering.resume(principal, letter.answers, deadline_time_ns=letter.deadline_time_ns)
        else:
            request = event_pb2.CancelRequested(reason=letter.cancel, requested_by=letter.user_id, note=letter.note)
            await self._cancel(record, request)

    # The worker

    async def recover(self) -> int:
        """Takes part among the workers, and goes on with every run that nobody executes, while calls are served.

        Gives how many there are.
        """
        await self._equipment.leases.renew(self._equipment.worker)
        self._keeper.recovery.spawn(self._letters.read(self._act, self._keeper.is_elsewhere))
        return await self._keeper.recovery.start()

    async def drain(self, grace: float) -> None:
        """Takes no new runs, lets effects in flight end within `grace` seconds, and leaves the runs as they are then.

        They are RUNNING still, and whoever starts next goes on with them.
        """
        self._keeper.is_draining = True
        await self._keeper.roster.settle()
        for live in self._keeper.roster:
            live.drain()
        await self._wait_for_ends(grace)
        for live in self._keeper.roster:
            live.execution.stop(ServerStopping("The server stops; the run goes on where it is taken up."))
        await self._wait_for_ends(None)
        self._equipment.log.dismiss()

    async def _wait_for_ends(self, seconds: float | None) -> None:
        tasks = self._keeper.roster.tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self) -> None:
        """Stops everything at once."""
        await self.drain(0)
        await self._keeper.recovery.close()
        with suppress(StorageFailed, ServerStopping):  # what cannot be written is found dead
            await self._equipment.leases.release(self._equipment.worker)
