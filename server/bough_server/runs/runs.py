"""Facade of this package: start, follow, resume, fork, find, cancel, recover and drain runs."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress

import structlog

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, follow_pb2, input_pb2, message_pb2, run_pb2
from bough_server import ids
from bough_server.errors import Fenced, ServerStopping
from bough_server.identity import Caller, Principal, Scope
from bough_server.log import events
from bough_server.log.blobs import StoredBlob, extract_files_within
from bough_server.observability.tracing import Parent
from bough_server.ownership.background import Background
from bough_server.ownership.worker import Worker
from bough_server.quotas import QuotaExceeded
from bough_server.runs.admission import (
    Admission,
    EvaluationRun,
    admit_evaluation,
    check_input,
    check_same_request,
    digest_request,
    effective_policy,
)
from bough_server.runs.approvals import Approvals, check_of
from bough_server.runs.close import close_reason
from bough_server.runs.commands import RemoteCommands
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import LogFollower, Pages, RemoteFollowers, Until
from bough_server.runs.fork import ForkAddress, RunForker
from bough_server.runs.resume import ResumeOutcome, RunResumer
from bough_server.runs.start import RunStarter
from bough_server.runs.supervisor import RunSupervisor
from bough_server.store.ports.log import RequestIdTaken
from bough_server.store.ports.runs import Page, RunFilter, RunRow
from bough_server.store.ports.workers import RunCommand, Topic

_log = structlog.get_logger(__name__)


class Runs:
    """Runs of this process, and access to those of other workers."""

    def __init__(self, dependencies: RunDependencies) -> None:
        self._dependencies = dependencies
        store = dependencies.store
        self.worker = Worker(dependencies.worker, store.leases, dependencies.clock, metrics=dependencies.metrics)
        """This process as one of the servers of its store; evaluations share it."""
        self._background = Background()
        self._supervisor = RunSupervisor(dependencies, self.worker, self._background)
        self._remote_commands = RemoteCommands(dependencies)
        self._starter = RunStarter(
            dependencies,
            self._supervisor.launcher,
            self._supervisor.queue.call_next,
            has_room=self._supervisor.has_room,
        )
        self._forker = RunForker(dependencies, self._supervisor.takeover)
        self._resumer = RunResumer(dependencies, self._supervisor, self._remote_commands)
        self._approvals = Approvals(dependencies, self._resumer)
        self._follower = LogFollower(dependencies, self._supervisor.live_runs)
        self._followers = RemoteFollowers(dependencies, self._supervisor.live_runs)

    @property
    def supervisor(self) -> RunSupervisor:
        """The supervisor of this process's runs: it knows those that are live here and those that are parked."""
        return self._supervisor

    # Starting

    async def start(
        self,
        principal: Principal,
        request: agent_service_pb2.RunRequest,
        *,
        deadline_time_ns: int | None,
        trace: Parent,
        evaluation: EvaluationRun | None = None,
    ) -> RunRow:
        """Create a run and start it, or return the one that the same request started before.

        `evaluation` is set by evaluations only. The request's digest does not cover it.
        Raises InvalidRequest, NotFound (agent, session), AgentUnusable, RequestIdReused, SessionBusy,
        InsufficientBalance, QuotaExceeded, ServerStopping, StorageFailed.
        """
        self._refuse_while_draining()
        self._dependencies.store.check_writes()  # before reads, which may wait for the same database
        request.DiscardUnknownFields()  # nothing has checked them, and they would be written to the log
        request, files = await extract_files_within(
            request, most=self._dependencies.max_files_bytes, field="input.parts"
        )
        check_input(request.input)
        digest = digest_request(request)
        if (earlier := await self._find_earlier(principal, request.request_id, digest)) is not None:
            return earlier
        await self._dependencies.check_spending(principal)
        evaluation, mocked = await admit_evaluation(evaluation, most=self._dependencies.max_files_bytes)
        admission = await self._admit(
            principal,
            request,
            digest,
            files=[*files, *mocked],
            deadline_time_ns=deadline_time_ns,
            evaluation=evaluation,
        )
        self._refuse_while_draining()  # again, because draining may have begun during the awaits
        # Shielded: a caller that disconnects meanwhile must not leave a run on disk that no worker executes.
        starting = self._supervisor.live_runs.arrive(admission.run_id, self._starter.start(principal, admission, trace))
        try:
            record = await starting
        except QuotaExceeded as error:
            self._dependencies.quotas.count_refusal(error.name)
            raise
        except RequestIdTaken as taken:
            return check_same_request(
                await self._dependencies.store.runs.get(principal, taken.run_id), digest, request.request_id
            )
        live = self._supervisor.live_runs.get_live(record.run.run_id)
        if live is not None and live.is_waiting:
            # The holder may have ended before this run was registered; then its end found no live run to start.
            await self._supervisor.queue.call_next(principal, record.run.session_id)
        return record

    async def _admit(
        self,
        principal: Principal,
        request: agent_service_pb2.RunRequest,
        digest: str,
        *,
        files: Sequence[StoredBlob],
        deadline_time_ns: int | None,
        evaluation: EvaluationRun | None,
    ) -> Admission:
        dependencies = self._dependencies
        resolver, versions = await dependencies.agents.for_run(principal.tenant_id, request.agent, request.definitions)
        now, policy = dependencies.clock.now_ns(), effective_policy(request.policy, dependencies.defaults)
        return Admission(
            request=request,
            digest=digest,
            run_id=ids.new_uuid7(now),
            principal=principal,
            agent=resolver.agents[request.agent],
            resolver=resolver,
            versions=versions,
            policy=policy,
            deadline_time_ns=None if policy.background else deadline_time_ns,
            now_ns=now,
            files=files,
            evaluation=evaluation,
        )

    async def fork(
        self,
        principal: Principal,
        request: agent_service_pb2.ForkRunRequest,
        *,
        deadline_time_ns: int | None,
        evaluation: EvaluationRun | None = None,
        scope: Scope | None = None,
    ) -> tuple[RunRow, int]:
        """Fork a run, or return the fork that the same request created before, with the sequence of the fork point.

        `scope`: whose runs the principal may fork; default: its own. The fork is the principal's.
        `evaluation` is set by evaluations only. The request's digest does not cover it.
        Raises NotFound, SequenceOutOfRange, ForkRefused, InvalidRequest, RequestIdReused, InsufficientBalance,
        ServerStopping and StorageFailed.
        """
        self._refuse_while_draining()
        self._dependencies.store.check_writes()  # before reads, which may wait for the same database
        request.DiscardUnknownFields()
        request, files = await extract_files_within(request, most=self._dependencies.max_files_bytes, field="changes")
        digest = digest_request(request)
        record = await self._find_earlier(principal, request.request_id, digest)
        if record is None:
            await self._dependencies.check_spending(principal)
            evaluation, mocked = await admit_evaluation(evaluation, most=self._dependencies.max_files_bytes)
            address = ForkAddress(
                run_id=ids.new_uuid7(self._dependencies.clock.now_ns()),
                principal=principal,
                origins=scope or principal,
                digest=digest,
                evaluation=evaluation,
            )
            forking = self._forker.fork(request, address, files=[*files, *mocked], deadline_time_ns=deadline_time_ns)
            try:
                record = (await self._supervisor.live_runs.arrive(address.run_id, forking)).run_row
            except QuotaExceeded as error:
                self._dependencies.quotas.count_refusal(error.name)
                raise
            except RequestIdTaken as taken:
                record = await self._dependencies.store.runs.get(principal, taken.run_id)
                check_same_request(record, digest, request.request_id)
        return record, record.run.forked_from.sequence

    async def resume(
        self,
        principal: Principal,
        request: agent_service_pb2.ResumeRunRequest,
        *,
        deadline_time_ns: int | None,
        caller: Caller | None = None,
    ) -> ResumeOutcome:
        """Answer a run's open requests for a principal and continue it; see RunResumer.

        `caller` is the one of the principal's call, who answers what it sees and may; default: the principal answers
        any of its runs.
        """
        self._refuse_while_draining()
        self._dependencies.store.check_writes()  # before reads, which may wait for the same database
        request.DiscardUnknownFields()
        return await self._resumer.resume(
            principal if caller is None else caller.visible,
            request,
            user_id=principal.user_id,
            deadline_time_ns=deadline_time_ns,
            check=None if caller is None else check_of(caller),
        )

    async def answer_input(
        self, caller: Caller, request: agent_service_pb2.AnswerInputRequest
    ) -> execution_pb2.ExecutionState.ValueType:
        """Answer a run's open requests without following it, and return its state. See Approvals."""
        self._refuse_while_draining()
        self._dependencies.store.check_writes()
        request.DiscardUnknownFields()
        return await self._approvals.answer(caller, request)

    async def list_open_inputs(self, caller: Caller, page: Page) -> tuple[Sequence[input_pb2.OpenInput], str]:
        """Return a page of the open requests that a caller may answer, and the token of the next page."""
        return await self._approvals.list(caller, page)

    async def _find_earlier(self, principal: Principal, request_id: str, digest: str) -> RunRow | None:
        if not request_id:
            return None
        earlier = await self._dependencies.store.runs.find_request(principal, request_id)
        if earlier is not None:
            return check_same_request(earlier, digest, request_id)
        self._refuse_while_draining()
        return None

    def _refuse_while_draining(self) -> None:
        if self._supervisor.is_draining:
            raise ServerStopping("The server is stopping and accepts no new runs. Try again at another server.")

    async def check_spending(self, principal: Principal) -> None:
        """Raise InsufficientBalance or QuotaExceeded if nothing is left for what a principal's runs use."""
        await self._dependencies.check_spending(principal)

    # Reading

    def follow(
        self,
        scope: Scope,
        run_id: str,
        *,
        after: int = 0,
        until: Until = follow_pb2.WATCH_UNTIL_TERMINAL,
        past: int = 0,
    ) -> Pages:
        """Yield pages of a run's committed events after a sequence. See LogFollower."""
        return self._follower.follow(scope, run_id, after=after, until=until, past=past)

    def list_followed_runs(self) -> "set[asyncio.Task[None]]":
        """Return the tasks of the runs that are executed here and that clients of this server follow."""
        return self._supervisor.live_runs.list_followed_runs()

    async def get(self, scope: Scope, run_id: str) -> RunRow:
        """Return a run in a scope. Raises NotFound."""
        record = await self._dependencies.store.runs.get(scope, run_id)
        await self._fill_parked_reason(record.run)
        return record

    async def final_answer(self, run: run_pb2.Run) -> message_pb2.Message | None:
        """Return the answer of a run that has succeeded, else None. Raises NotFound if the run has been deleted."""
        if run.state != execution_pb2.EXECUTION_STATE_SUCCEEDED:
            return None
        end = await self._dependencies.store.log.read(
            run.run_id, after=run.last_sequence - 1, through=run.last_sequence
        )
        return events.parse(end[0].data).run_completed.final_answer

    async def list(self, scope: Scope, run_filter: RunFilter, page: Page) -> tuple[Sequence[run_pb2.Run], str]:
        """Return a page of runs, newest first, and the next page's token."""
        runs, token = await self._dependencies.store.runs.list(scope, run_filter, page)
        for run in runs:
            await self._fill_parked_reason(run)
        return runs, token

    async def _fill_parked_reason(self, run: run_pb2.Run) -> None:
        """Add the reason why the run cannot continue here, which no row holds."""
        parked = self._supervisor.parked
        if run.run_id not in parked:
            return
        if run.HasField("end_time"):
            del parked[run.run_id]  # another worker has continued and ended it
            return
        record = await self._dependencies.store.runs.find(run.run_id)
        is_executed = record is not None and await self.worker.is_elsewhere(record)
        run.parked_reason = "" if is_executed else parked.get(run.run_id, "")

    # Ending

    async def cancel(self, principal: Principal, run_id: str, *, note: str = "", scope: Scope | None = None) -> RunRow:
        """Cancel a run; the request is durable when this returns. No effect on a run that has ended.

        `scope`: whose runs the principal may cancel; default: its own. A run that no worker executes has ended when
        this returns. Raises NotFound, ServerStopping, StorageFailed.
        """
        record = await self._dependencies.store.runs.get(scope or principal, run_id)
        request = event_pb2.CancelRequested(
            reason=execution_pb2.CANCEL_REASON_CALLER, requested_by=principal.user_id, note=note
        )
        await self._cancel(record, request)
        return await self.get(scope or principal, run_id)

    async def _cancel(self, run_row: RunRow, request: event_pb2.CancelRequested) -> None:
        while not await self._request_cancel(run_row, request):
            run_row = await self._dependencies.store.runs.get(run_row.principal, run_row.run.run_id)

    async def _request_cancel(self, run_row: RunRow, request: event_pb2.CancelRequested) -> bool:
        """Request the end of a run; return False if it was taken over meanwhile and the caller must try again.

        A run that has already ended counts as True.
        """
        run_id = run_row.run.run_id
        live = await self._supervisor.live_runs.find(run_id)
        if live is not None:
            with suppress(Fenced):  # another worker has taken it over
                if await live.end(request):
                    return True
            await live.wait_for_end()
            run_row = await self._dependencies.store.runs.get(run_row.principal, run_id)
        if await self.worker.is_elsewhere(run_row):
            with suppress(Fenced):  # it has ended meanwhile
                return await self._remote_commands.cancel(run_row, request)
            return True
        return await self._supervisor.close(run_row.principal, run_id, close_reason(request))

    async def _carry_out(self, run_row: RunRow, command: RunCommand) -> None:
        if command.answers is not None:
            # The server that sent them has judged whether their user may answer.
            await self._resumer.resume(
                run_row.principal,
                command.answers,
                user_id=command.user_id,
                deadline_time_ns=command.deadline_time_ns,
            )
        elif command.cancel is not None:
            await self._cancel(run_row, command.cancel)

    # The worker

    async def recover(self) -> int:
        """Register this worker, and continue every run that no worker executes, in the background.

        Return the number of runs to continue.
        """
        dependencies, recovery = self._dependencies, self._supervisor.recovery
        await self.worker.begin()
        dependencies.store.notifier.subscribe(Topic.UNOWNED, lambda _: recovery.on_offer())
        if dependencies.store.leases.is_shared:
            for work in (self.worker.keep_lease(), self.worker.watch_others(), self._followers.report()):
                self._background.spawn(work)
        self._background.spawn(self._remote_commands.serve(self._carry_out, self.worker.is_elsewhere))
        return await recovery.start()

    async def drain(self, grace: float) -> None:
        """Accept no more runs, wait up to `grace` seconds for effects in flight, then stop all runs where they are.

        Stopped runs remain RUNNING; the next server on this store continues them.
        """
        self._supervisor.drain()
        await self._supervisor.live_runs.wait_for_all_arrivals()  # runs that are being created are live only after this
        for live in self._supervisor.live_runs:
            live.drain()
        await self._wait_for_ends(grace)
        await self._supervisor.stop_all(ServerStopping("The server is stopping; another one will continue the run."))
        self._dependencies.store.log.close_readers()

    async def _wait_for_ends(self, seconds: float | None) -> None:
        tasks = self._supervisor.live_runs.tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def watch_limits(self) -> Sequence[Coroutine[None, None, None]]:
        """Return what keeps what is left of accounts and quotas up to date, until it is cancelled."""
        accounts, quotas = self._dependencies.accounts, self._dependencies.quotas
        return [quotas.amounts.watch(), *([] if accounts is None else [accounts.watch()])]

    async def close(self) -> None:
        """Stop everything at once."""
        await self.drain(0)
        await self._background.close()
        await self._dependencies.close_limits()
        await self.worker.release()
