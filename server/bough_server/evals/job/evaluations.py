"""Facade of this package: start, follow, read, list, cancel and recover evaluations."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, cast

import structlog

from bough.v1 import eval_result_pb2, eval_service_pb2, evaluation_pb2, event_pb2
from bough_server import ids
from bough_server.errors import (
    EvaluationNotEnded,
    Fenced,
    FieldViolation,
    InvalidRequest,
    RequestIdReused,
    SequenceOutOfRange,
    ServerStopping,
)
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.evaluation_log import EvaluationState, as_fact, read_state
from bough_server.evals.job.evaluator import LiveEvaluation
from bough_server.evals.job.planning import EvaluationPlan, plan, request_digest
from bough_server.evals.results.compare import find_baseline_problem
from bough_server.identity import Principal, Scope
from bough_server.log import evaluation_events
from bough_server.observability.tracing import Parent
from bough_server.ownership.arrivals import Arrivals
from bough_server.ownership.background import Background, poll, retry_until_stored
from bough_server.ownership.mailbox import CommandReader, CommandSender
from bough_server.store.ports.evaluations import EvaluationFilter, EvaluationRow
from bough_server.store.ports.log import NewEvaluation, RequestIdTaken, RunMoved, StoredEvent
from bough_server.store.ports.runs import Page
from bough_server.store.ports.workers import RunCommand, Topic
from bough_server.threads import run_in_thread

MOST_ADOPTED: Final = 16
"""How many evaluations a server executes before it takes over no more of those that others left."""

Pages = AsyncGenerator[Sequence[StoredEvent], None]

_log = structlog.get_logger(__name__)


class Evaluations:
    """Evaluations of this process, and access to those of other workers."""

    def __init__(self, dependencies: EvaluationDependencies) -> None:
        self.dependencies = dependencies
        """What evaluations, and the scoring of stored runs, are executed with."""
        store, self._worker = dependencies.store, dependencies.worker
        self._sender = CommandSender(store.mailbox, store.log)
        self._background = Background()
        self._live = Arrivals[LiveEvaluation](self._worker, self._background, dependencies.clock)
        self._is_stopping = False
        self._offered = asyncio.Event()
        self._broken: set[str] = set()
        """Evaluations that could not be continued: claimed again, they would keep the room that others need."""
        self._worker.on_lost(self._stop_all)

    # Starting

    async def start(
        self,
        principal: Principal,
        request: eval_service_pb2.EvaluateRequest,
        *,
        trace: Parent,
        scope: Scope | None = None,
    ) -> EvaluationRow:
        """Create an evaluation and start it, or return the one that the same request started before.

        `trace` is the caller's; the runs are part of it. `scope`: where the baseline, and the runs that
        cases name, are looked up; default: among the principal's own.
        Raises InvalidRequest, NotFound (agent, baseline), AgentUnusable, RequestIdReused, InsufficientBalance,
        ServerStopping and StorageFailed.
        """
        self._refuse_while_stopping()
        request.DiscardUnknownFields()
        digest = request_digest(request)
        if request.request_id:
            earlier = await self.dependencies.store.evaluations.find_request(principal, request.request_id)
            if earlier is not None:
                return _same_request(earlier, digest, request.request_id)
        await self.dependencies.runs.check_spending(principal)
        baseline = None
        if request.HasField("baseline"):
            baseline = await self.baseline(
                scope or principal, request.baseline, allow_incomplete=request.allow_incomplete_baseline
            )
        planned = await plan(self.dependencies, principal, request, baseline=baseline, digest=digest)
        planned.started.trace_id, planned.started.span_id = trace.ids()
        planned.started.reads_all_users = scope is not None and scope.user_id is None
        self._refuse_while_stopping()
        try:
            return await self._create(principal, request, planned)
        except RequestIdTaken as taken:
            found = await self.dependencies.store.evaluations.get(principal, taken.run_id)
            return _same_request(found, digest, request.request_id)

    async def _create(
        self, principal: Principal, request: eval_service_pb2.EvaluateRequest, planned: EvaluationPlan
    ) -> EvaluationRow:
        now = self.dependencies.clock.now_ns()
        evaluation_id = ids.new_uuid7(now)
        work = self._write(principal, request, planned, evaluation_id=evaluation_id, now_ns=now)
        # A task: a caller that disconnects meanwhile must not leave an evaluation that no worker executes.
        return await self._live.arrive(evaluation_id, work)

    async def _write(
        self,
        principal: Principal,
        request: eval_service_pb2.EvaluateRequest,
        planned: EvaluationPlan,
        *,
        evaluation_id: str,
        now_ns: int,
    ) -> EvaluationRow:
        events = planned.events()
        records = [as_fact(event, sequence=sequence, now_ns=now_ns) for sequence, event in enumerate(events, start=1)]
        new = NewEvaluation(
            evaluation_id=evaluation_id,
            principal=principal,
            request_id=request.request_id,
            request_digest=planned.started.request_digest,
            create_time_ns=now_ns,
            log_events=records,
            owner=self._worker.name,
            eval_set_name=planned.started.eval_set.name,
            agent=planned.started.agent,
            labels=dict(request.labels),
        )
        await self.dependencies.store.log.create_evaluation(new)
        record = await self.dependencies.store.evaluations.get(principal, evaluation_id)
        fold = EvaluationState()
        for event in events:
            fold.apply(event)
        self._launch(record, fold)
        _log.info(
            "evaluation started", evaluation_id=evaluation_id, set=fold.planned.eval_set.name, cases=len(fold.cases)
        )
        return record

    def _launch(self, row: EvaluationRow, fold: EvaluationState) -> None:
        if self._is_stopping:
            return  # the next server continues it
        live = LiveEvaluation(self.dependencies, row, fold, on_end=self._on_end)
        self._live.put(live.evaluation_id, live)
        live.launch()

    def _on_end(self, live: LiveEvaluation, stopped: BaseException | None) -> None:
        """Handle the end of an evaluation's task: it has ended, or stopped with an error that no event records."""
        self._release(live)
        if stopped is not None and not self._is_stopping and not isinstance(stopped, Fenced):
            self._live.offer_later(live.evaluation_id)

    def _release(self, live: LiveEvaluation) -> None:
        self._live.discard(live.evaluation_id, live)
        self.dependencies.store.log.release(live.evaluation_id)
        self._offered.set()  # there is room for another one

    # Reading

    async def follow(self, scope: Scope, evaluation_id: str, *, after: int = 0, only_current: bool = False) -> Pages:
        """Yield pages of an evaluation's committed events after a sequence, up to its last event.

        With `only_current` only those that the log has now. Raises NotFound and SequenceOutOfRange before the first
        page.
        """
        record = await self.get(scope, evaluation_id)
        if after > record.evaluation.last_sequence:
            raise SequenceOutOfRange(
                f"The log of this evaluation ends at sequence {record.evaluation.last_sequence}; there is nothing "
                f"after {after}.",
                details={"last_sequence": str(record.evaluation.last_sequence)},
            )
        if only_current:
            log, last = self.dependencies.store.log, record.evaluation.last_sequence
            while after < last and (page := await log.read(evaluation_id, after=after, through=last)):
                yield page
                after = page[-1].sequence
            return
        tail = cast(Pages, self.dependencies.store.log.tail(evaluation_id, after=after))
        try:
            async for page in tail:
                yield page
        finally:
            await tail.aclose()

    async def get(self, scope: Scope, evaluation_id: str) -> EvaluationRow:
        """Return an evaluation in a scope. Raises NotFound."""
        return await self.dependencies.store.evaluations.get(scope, evaluation_id)

    async def list(
        self, scope: Scope, evaluation_filter: EvaluationFilter, page: Page
    ) -> tuple[Sequence[evaluation_pb2.Evaluation], str]:
        """Return a page of evaluations, newest first, and the next page's token."""
        return await self.dependencies.store.evaluations.list(scope, evaluation_filter, page)

    async def source(
        self, scope: Scope, source: eval_result_pb2.EvalSource, *, field: str
    ) -> eval_result_pb2.EvalResult:
        """Return a result, without its turns if it is stored, that a request names or brings in a field.

        Raises NotFound, EvaluationNotEnded, and InvalidRequest for a given result that lacks cases.
        """
        if source.WhichOneof("source") != "evaluation_id":
            if len(source.result.cases) < source.result.totals.cases:
                description = (
                    f"has {len(source.result.cases):,} of the result's {source.result.totals.cases:,} cases:"
                    " ListCaseResults returns all of them"
                )
                raise InvalidRequest([FieldViolation(field=f"{field}.result.cases", description=description)])
            return source.result
        evaluation_id = source.evaluation_id
        await self.get(scope, evaluation_id)
        fold = await read_state(self.dependencies.store.log, evaluation_id, keeps_differences=True)
        if fold.end is None:
            raise EvaluationNotEnded(evaluation_id, field=f"{field}.evaluation_id", advice="wait for its end")
        return await run_in_thread(_whole, fold, evaluation_id)

    async def baseline(
        self, scope: Scope, source: eval_result_pb2.EvalSource, *, allow_incomplete: bool
    ) -> eval_result_pb2.EvalResult:
        """Return the result that a request names or brings as its baseline.

        Raises NotFound, EvaluationNotEnded, and InvalidRequest for a result of an evaluation that did not succeed,
        unless the request allows it.
        """
        result = await self.source(scope, source, field="baseline")
        if (why := find_baseline_problem(result)) and not allow_incomplete:
            field = "evaluation_id" if source.HasField("evaluation_id") else "result.state"
            description = f"{why}: set allow_incomplete_baseline to compare with it."
            raise InvalidRequest([FieldViolation(field=f"baseline.{field}", description=description)])
        return result

    # Ending

    async def cancel(
        self, principal: Principal, evaluation_id: str, *, note: str = "", scope: Scope | None = None
    ) -> EvaluationRow:
        """Cancel an evaluation; the request is durable when this returns. No effect on one that has ended.

        `scope`: whose evaluations the principal may cancel; default: its own. Raises NotFound, ServerStopping and
        StorageFailed.
        """
        request = event_pb2.CancelRequested(requested_by=principal.user_id, note=note)
        await self._cancel(await self.get(scope or principal, evaluation_id), request)
        return await self.get(scope or principal, evaluation_id)

    async def delete(self, scope: Scope, evaluation_id: str) -> None:
        """Delete an evaluation that has ended; its runs are kept.

        Raises NotFound, EvaluationNotEnded and StorageFailed.
        """
        if not await self.dependencies.store.evaluations.delete(scope, evaluation_id):
            raise EvaluationNotEnded(evaluation_id, field="evaluation_id", advice="cancel it first")

    async def _cancel(self, row: EvaluationRow, request: event_pb2.CancelRequested) -> None:
        while not await self._request_cancel(row, request):
            row = await self.get(row.principal, row.evaluation.evaluation_id)

    async def _request_cancel(self, row: EvaluationRow, request: event_pb2.CancelRequested) -> bool:
        """Request the end of an evaluation; return False if it changed hands meanwhile and the caller must try again.

        An evaluation that has already ended counts as True.
        """
        evaluation_id = row.evaluation.evaluation_id
        if row.evaluation.HasField("end_time"):
            return True
        if await self._worker.is_elsewhere(row):
            with suppress(Fenced):  # it has ended meanwhile
                command = RunCommand(command_id=0, run_id=evaluation_id, cancel=request)
                return await self._sender.send(command, after=row.evaluation.last_sequence, is_done=_stops)
            return True
        if await self._live.find(evaluation_id) is None:
            self._refuse_while_stopping()
            await self._continue(evaluation_id)
        live = self._live.get_live(evaluation_id)
        if live is None:
            return False
        try:
            await live.cancel(requested_by=request.requested_by, note=request.note)
        except Fenced:  # it has ended, or another worker has taken it over
            await self._leave(live)
            return False
        return True

    async def _act(self, record: EvaluationRow, command: RunCommand) -> None:
        if command.cancel is not None:  # an evaluation asks nothing: answers have no meaning
            await self._cancel(record, command.cancel)

    # The worker

    async def recover(self) -> int:
        """Continue every evaluation that no worker executes, in the background; return how many there are.

        Commands that other workers send to evaluations of this one are carried out from now on.
        """
        store, clock = self.dependencies.store, self.dependencies.clock
        is_elsewhere = self._worker.is_elsewhere
        reader = CommandReader(
            "evaluation",
            store.mailbox,
            clock,
            find=store.evaluations.find,
            is_elsewhere=is_elsewhere,
            act=self._act,
        )
        self._background.spawn(reader.read())
        store.notifier.subscribe(Topic.UNOWNED, lambda _: self._offered.set())
        found = await self._list_orphans()
        self._background.spawn(poll(clock, self._claim, self._offered, is_shared=store.leases.is_shared))
        return len(found)

    async def _list_orphans(self) -> Sequence[EvaluationRow]:
        """Return the evaluations that no live worker owns, oldest first; none if this worker has no lease."""
        found = await self.dependencies.store.evaluations.open_evaluations()
        alive = await self.dependencies.store.leases.counters() if found else {}
        return [record for record in found if record.owner not in alive] if self._worker.name in alive else ()

    async def _claim(self) -> None:
        """Continue evaluations that no live worker owns, as many as there is room for."""
        if self._is_stopping:
            return
        found = [record.evaluation.evaluation_id for record in await self._list_orphans()]
        executed = self._live.list_executing()  # after the await, during which others may have arrived
        free = [evaluation_id for evaluation_id in found if evaluation_id not in self._broken.union(executed)]
        for evaluation_id in free[: max(0, MOST_ADOPTED - len(executed))]:
            self._live.claim([evaluation_id])
            self._background.spawn(self._try_now(evaluation_id))

    async def _try_now(self, evaluation_id: str) -> None:
        """Continue an evaluation as soon as its log can be read and written; log an error that keeps it from that."""
        try:
            work = partial(self._continue, evaluation_id, is_retried=True)
            await retry_until_stored(self.dependencies.clock, work)
        except Exception as error:
            _log.error("evaluation not continued", evaluation_id=evaluation_id, exc_info=error)
            self._broken.add(evaluation_id)
        finally:
            self._live.unclaim(evaluation_id)
            self._offered.set()  # if it is not live now, it leaves the room that it was claimed for

    async def _continue(self, evaluation_id: str, *, is_retried: bool = False) -> None:
        """Take an evaluation over and launch it, unless it has ended or another live worker has it.

        Calls for the same evaluation wait for the attempt that is under way: two would fence each other.
        """
        # Before the search: `arrive` would wait for a lease after it, and two calls could pass the search together.
        await self._worker.wait_for_lease()
        if await self._live.find(evaluation_id) is None:
            await self._live.arrive(evaluation_id, self._take_over(evaluation_id), is_retried=is_retried)

    async def _take_over(self, evaluation_id: str) -> None:
        record = await self.dependencies.store.evaluations.find(evaluation_id)
        if record is None or record.evaluation.HasField("end_time") or self._is_stopping:
            return
        if self._live.get_live(evaluation_id) is not None:
            return  # an attempt before this one has launched it, and two live objects would fence each other
        if await self._worker.is_elsewhere(record):
            return
        epoch, owner = record.epoch + 1, self._worker.name
        try:
            await self.dependencies.store.log.take_over(evaluation_id, epoch=epoch, owner=owner, log_events=())
        except (RunMoved, Fenced):
            return  # another worker was faster
        taken = replace(record, epoch=epoch, owner=owner)
        self._launch(taken, await read_state(self.dependencies.store.log, evaluation_id))

    async def _stop_all(self) -> None:
        """Stop all evaluations where they are; others continue them."""
        await self._live.wait_for_current_arrivals()
        await asyncio.gather(*(self._leave(live) for live in self._live))

    async def _leave(self, live: LiveEvaluation) -> None:
        """Stop an evaluation where it is, unrecorded."""
        await live.stop()
        self._release(live)

    async def close(self) -> None:
        """Stop everything where it is; the next server continues it."""
        self._is_stopping = True
        await self._live.wait_for_all_arrivals()  # what is being created is live only after this
        stopped = list(self._live)
        await self._stop_all()
        for live in stopped:
            self._worker.give_up_soon(live.evaluation_id)
        await self._background.close()
        await self._worker.settle()

    def _refuse_while_stopping(self) -> None:
        if self._is_stopping:
            raise ServerStopping("The server is stopping and accepts no new evaluations. Try again at another server.")


def _stops(stored: StoredEvent) -> bool:
    """Return whether an event cancels its evaluation, or ends it."""
    return stored.kind == evaluation_events.EVALUATION_CANCEL_REQUESTED or (
        stored.kind in evaluation_events.TERMINAL_KINDS
    )


def _same_request(earlier: EvaluationRow, digest: str, request_id: str) -> EvaluationRow:
    if earlier.request_digest != digest:
        raise RequestIdReused(
            f"The request id {request_id!r} was used for another evaluation with other content. Use a new one.",
            details={"evaluation_id": earlier.evaluation.evaluation_id},
        )
    return earlier


def _whole(fold: EvaluationState, evaluation_id: str) -> eval_result_pb2.EvalResult:
    cases = fold.case_results()
    return fold.result(evaluation_id, cases, fold.totals_of(cases))
