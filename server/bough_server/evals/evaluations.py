"""Facade of this package: start, follow, read, list, cancel and recover evaluations."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, cast

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
    StorageFailed,
)
from bough_server.evals.cancel_commands import CancelCommands
from bough_server.evals.compare import incomplete
from bough_server.evals.dependencies import EvaluationDependencies
from bough_server.evals.evaluation_log import EvaluationState, as_fact, read_state
from bough_server.evals.evaluator import LiveEvaluation
from bough_server.evals.planning import EvaluationPlan, plan, request_digest
from bough_server.runs.recovery import LOOK_SECONDS, retry_until_stored, wait_at_most
from bough_server.store.evaluation_ports import EvaluationFilter, EvaluationRecord
from bough_server.store.ports import (
    NewEvaluation,
    Page,
    Principal,
    RequestIdTaken,
    RunMoved,
    StoredEvent,
)
from bough_server.store.worker_ports import Topic
from bough_server.telemetry import Parent
from bough_server.threads import run_in_thread

RETRY_SECONDS: Final = 1.0
"""How long after an evaluation stopped because of the storage the first attempt to continue it is made."""

Pages = AsyncGenerator[Sequence[StoredEvent], None]

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Evaluations:
    """Evaluations of this process, and access to those of other workers."""

    def __init__(self, dependencies: EvaluationDependencies) -> None:
        self.dependencies = dependencies
        """What evaluations, and the scoring of stored runs, are executed with."""
        self._commands = CancelCommands(dependencies, cancel=self._cancel, is_elsewhere=self._is_elsewhere)
        self._live: dict[str, LiveEvaluation] = {}
        self._launching: dict[str, asyncio.Task[Any]] = {}
        """The creations of evaluations, and the attempts to take them over, that are under way."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False
        self._offered = asyncio.Event()

    # Starting

    async def start(
        self, principal: Principal, request: eval_service_pb2.EvaluateRequest, *, trace: Parent
    ) -> EvaluationRecord:
        """Create an evaluation and start it, or return the one that the same request started before.

        `trace` is the caller's; the runs are part of it.
        Raises InvalidRequest, NotFound (agent, baseline), AgentUnusable, RequestIdReused, ServerStopping and
        StorageFailed.
        """
        self._refuse_while_stopping()
        request.DiscardUnknownFields()
        digest = request_digest(request)
        if request.request_id:
            earlier = await self.dependencies.store.evaluations.find_request(principal, request.request_id)
            if earlier is not None:
                return _same_request(earlier, digest, request.request_id)
        baseline = None
        if request.HasField("baseline"):
            baseline = await self.baseline(
                principal, request.baseline, allow_incomplete=request.allow_incomplete_baseline
            )
        planned = await plan(self.dependencies, principal, request, baseline=baseline, digest=digest)
        planned.started.trace_id, planned.started.span_id = trace.ids()
        self._refuse_while_stopping()
        try:
            return await self._create(principal, request, planned)
        except RequestIdTaken as taken:
            found = await self.dependencies.store.evaluations.get(principal, taken.run_id)
            return _same_request(found, digest, request.request_id)

    async def _create(
        self, principal: Principal, request: eval_service_pb2.EvaluateRequest, planned: EvaluationPlan
    ) -> EvaluationRecord:
        now = self.dependencies.clock.now_ns()
        evaluation_id = ids.new_uuid7(now)
        # A task: a caller that disconnects meanwhile must not leave an evaluation that no worker executes.
        work = self._write(principal, request, planned, evaluation_id=evaluation_id, now_ns=now)
        return await self._unless_stopped(self._launch_attempt(evaluation_id, work))

    async def _write(
        self,
        principal: Principal,
        request: eval_service_pb2.EvaluateRequest,
        planned: EvaluationPlan,
        *,
        evaluation_id: str,
        now_ns: int,
    ) -> EvaluationRecord:
        events = planned.events()
        records = [as_fact(event, sequence=sequence, now_ns=now_ns) for sequence, event in enumerate(events, start=1)]
        new = NewEvaluation(
            evaluation_id=evaluation_id,
            principal=principal,
            request_id=request.request_id,
            request_digest=planned.started.request_digest,
            create_time_ns=now_ns,
            records=records,
            owner=self.dependencies.worker,
            eval_set_name=planned.started.eval_set.name,
            agent=planned.started.agent,
            labels=dict(request.labels),
        )
        try:
            await self.dependencies.store.log.create_evaluation(new)
            record = await self.dependencies.store.evaluations.get(principal, evaluation_id)
        except StorageFailed:
            self._spawn(self._try_again(evaluation_id))  # it may have been created nevertheless
            raise
        fold = EvaluationState()
        for event in events:
            fold.apply(event)
        self._launch(record, fold)
        _log.info(
            "evaluation started", evaluation_id=evaluation_id, set=fold.planned.eval_set.name, cases=len(fold.cases)
        )
        return record

    def _launch(self, record: EvaluationRecord, fold: EvaluationState) -> None:
        if self._is_stopping:
            return  # the next server continues it
        live = LiveEvaluation(self.dependencies, record, fold, on_end=self._ended)
        self._live[live.evaluation_id] = live
        live.launch()

    def _ended(self, live: LiveEvaluation, stopped: BaseException | None) -> None:
        """Handle the end of an evaluation's task: it has ended, or stopped with an error that no event records."""
        self._live.pop(live.evaluation_id, None)
        self.dependencies.store.log.release(live.evaluation_id)
        if stopped is None or self._is_stopping or isinstance(stopped, Fenced):
            return
        self._spawn(self._try_again(live.evaluation_id))

    async def _try_again(self, evaluation_id: str) -> None:
        """Continue an evaluation whose log, or that of one of its runs, could not be written, after a while."""
        await self.dependencies.clock.sleep(RETRY_SECONDS)
        await self._try_now(evaluation_id)

    # Reading

    async def follow(
        self, principal: Principal, evaluation_id: str, *, after: int = 0, only_current: bool = False
    ) -> Pages:
        """Yield pages of an evaluation's committed events after a sequence, up to its last event.

        With `only_current` only those that the log has now. Raises NotFound and SequenceOutOfRange before the first
        page.
        """
        record = await self.get(principal, evaluation_id)
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

    async def get(self, principal: Principal, evaluation_id: str) -> EvaluationRecord:
        """Return an evaluation of the principal's tenant. Raises NotFound."""
        return await self.dependencies.store.evaluations.get(principal, evaluation_id)

    async def list(
        self, principal: Principal, evaluation_filter: EvaluationFilter, page: Page
    ) -> tuple[Sequence[evaluation_pb2.Evaluation], str]:
        """Return a page of evaluations, newest first, and the next page's token."""
        return await self.dependencies.store.evaluations.list(principal, evaluation_filter, page)

    async def source(
        self, principal: Principal, source: eval_result_pb2.EvalSource, *, field: str
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
        await self.get(principal, evaluation_id)
        fold = await read_state(self.dependencies.store.log, evaluation_id, keeps_differences=True)
        if fold.end is None:
            raise EvaluationNotEnded(evaluation_id, field=f"{field}.evaluation_id", advice="wait for its end")
        return await run_in_thread(_whole, fold, evaluation_id)

    async def baseline(
        self, principal: Principal, source: eval_result_pb2.EvalSource, *, allow_incomplete: bool
    ) -> eval_result_pb2.EvalResult:
        """Return the result that a request names or brings as its baseline.

        Raises NotFound, EvaluationNotEnded, and InvalidRequest for a result of an evaluation that did not succeed,
        unless the request allows it.
        """
        result = await self.source(principal, source, field="baseline")
        if (why := incomplete(result)) and not allow_incomplete:
            field = "evaluation_id" if source.HasField("evaluation_id") else "result.state"
            description = f"{why}: set allow_incomplete_baseline to compare with it."
            raise InvalidRequest([FieldViolation(field=f"baseline.{field}", description=description)])
        return result

    # Ending

    async def cancel(self, principal: Principal, evaluation_id: str, *, note: str = "") -> EvaluationRecord:
        """Cancel an evaluation; the request is durable when this returns. No effect on one that has ended.

        Raises NotFound, ServerStopping and StorageFailed.
        """
        request = event_pb2.CancelRequested(requested_by=principal.user_id, note=note)
        await self._cancel(await self.get(principal, evaluation_id), request)
        return await self.get(principal, evaluation_id)

    async def delete(self, principal: Principal, evaluation_id: str) -> None:
        """Delete an evaluation that has ended; its runs are kept.

        Raises NotFound, EvaluationNotEnded and StorageFailed.
        """
        if not await self.dependencies.store.evaluations.delete(principal, evaluation_id):
            raise EvaluationNotEnded(evaluation_id, field="evaluation_id", advice="cancel it first")

    async def _cancel(self, record: EvaluationRecord, request: event_pb2.CancelRequested) -> None:
        while not await self._request_cancel(record, request):
            record = await self.get(record.principal, record.evaluation.evaluation_id)

    async def _request_cancel(self, record: EvaluationRecord, request: event_pb2.CancelRequested) -> bool:
        """Request the end of an evaluation; return False if it changed hands meanwhile and the caller must try again.

        An evaluation that has already ended counts as True.
        """
        evaluation_id = record.evaluation.evaluation_id
        if record.evaluation.HasField("end_time"):
            return True
        if await self._is_elsewhere(record):
            with suppress(Fenced):  # it has ended meanwhile
                await self._commands.send(record, request)
            return True
        if evaluation_id not in self._live:
            self._refuse_while_stopping()
            await self._continue(evaluation_id)
        live = self._live.get(evaluation_id)
        if live is None:
            return False
        try:
            await live.cancel(requested_by=request.requested_by, note=request.note)
        except Fenced:  # it has ended, or another worker has taken it over
            await live.stop()
            return False
        return True

    # The worker

    async def recover(self) -> int:
        """Continue every evaluation that no worker executes, in the background; return how many there are.

        Commands that other workers send to evaluations of this one are carried out from now on.
        """
        self._spawn(self._commands.read())
        store = self.dependencies.store
        store.notifier.subscribe(Topic.UNOWNED, lambda _: self._offered.set())
        found = await store.evaluations.open_evaluations()
        self._continue_all(found)
        self._spawn(self._look())
        return len(found)

    def _continue_all(self, found: Sequence[EvaluationRecord]) -> None:
        for record in found:
            if record.evaluation.evaluation_id not in self._live:
                self._spawn(self._try_now(record.evaluation.evaluation_id))

    async def _look(self) -> None:
        """Continue the evaluations that other servers leave, until cancelled."""
        while True:
            most = LOOK_SECONDS if self.dependencies.store.leases.is_shared else None
            await wait_at_most(self.dependencies.clock, self._offered, most)
            self._offered.clear()
            await retry_until_stored(self.dependencies.clock, self._continue_open)

    async def _continue_open(self) -> None:
        found = await self.dependencies.store.evaluations.open_evaluations()
        alive = await self.dependencies.store.leases.counters() if found else {}
        if self._is_stopping or self.dependencies.worker not in alive:
            return
        for record in found:
            live = self._live.get(record.evaluation.evaluation_id)
            if live is not None and record.owner != live.record.owner and record.epoch >= live.record.epoch:
                await self._leave(live)  # this worker was taken for lost meanwhile
        self._continue_all([record for record in found if record.owner not in alive])

    async def _leave(self, live: LiveEvaluation) -> None:
        await live.stop()
        if self._live.get(live.evaluation_id) is live:
            del self._live[live.evaluation_id]
        self.dependencies.store.log.release(live.evaluation_id)

    async def _try_now(self, evaluation_id: str) -> None:
        """Continue an evaluation as soon as its log can be read and written; log an error that keeps it from that."""
        try:
            await retry_until_stored(self.dependencies.clock, partial(self._continue, evaluation_id))
        except Exception as error:
            _log.error("evaluation not continued", evaluation_id=evaluation_id, exc_info=error)

    async def _continue(self, evaluation_id: str) -> None:
        """Take an evaluation over and launch it, unless it has ended or another live worker has it.

        Calls for the same evaluation share one attempt: two would fence each other.
        """
        attempt = self._launching.get(evaluation_id)
        if attempt is None:
            attempt = self._launch_attempt(evaluation_id, self._take_over(evaluation_id))
        await self._unless_stopped(attempt)

    def _launch_attempt(self, evaluation_id: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run the one attempt to launch an evaluation that is under way, in a task of this object."""
        attempt = self._launching[evaluation_id] = self._spawn(work)
        attempt.add_done_callback(lambda _: self._launching.pop(evaluation_id, None))
        attempt.add_done_callback(lambda done: done.cancelled() or done.exception())
        return attempt

    async def _take_over(self, evaluation_id: str) -> None:
        record = await self.dependencies.store.evaluations.find(evaluation_id)
        if record is None or record.evaluation.HasField("end_time") or self._is_stopping:
            return
        if evaluation_id in self._live or await self._is_elsewhere(record):
            return
        try:
            await self.dependencies.store.log.take_over(
                evaluation_id, epoch=record.epoch + 1, owner=self.dependencies.worker, records=()
            )
        except (RunMoved, Fenced):
            return  # another worker was faster
        taken = replace(record, epoch=record.epoch + 1, owner=self.dependencies.worker)
        self._launch(taken, await read_state(self.dependencies.store.log, evaluation_id))

    async def _is_elsewhere(self, record: EvaluationRecord) -> bool:
        if record.owner in ("", self.dependencies.worker):
            return False
        return record.owner in await self.dependencies.store.leases.counters()

    async def close(self) -> None:
        """Stop everything where it is; the next server continues it."""
        self._is_stopping = True
        while self._tasks:  # a task may spawn another while it is being cancelled
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(live.stop() for live in self._live.values()))
        leases = self.dependencies.store.leases
        for evaluation_id in self._live if leases.is_shared else ():
            with suppress(
                StorageFailed, ServerStopping
            ):  # then it is continued when the lease of this worker has ended
                await leases.give_up(self.dependencies.worker, evaluation_id)
        self._live.clear()

    def _refuse_while_stopping(self) -> None:
        if self._is_stopping:
            raise ServerStopping("The server is stopping and accepts no new evaluations. Try again at another server.")

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _unless_stopped(self, task: "asyncio.Task[T]") -> T:
        """Wait for a task that the caller's cancellation must not end. Raises ServerStopping if `close` ended it."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_stopping:
                raise ServerStopping("The server is stopping. Try again at another server.") from None
            raise


def _same_request(earlier: EvaluationRecord, digest: str, request_id: str) -> EvaluationRecord:
    if earlier.request_digest != digest:
        raise RequestIdReused(
            f"The request id {request_id!r} was used for another evaluation with other content. Use a new one.",
            details={"evaluation_id": earlier.evaluation.evaluation_id},
        )
    return earlier


def _whole(fold: EvaluationState, evaluation_id: str) -> eval_result_pb2.EvalResult:
    cases = fold.case_results()
    return fold.result(evaluation_id, cases, fold.totals_of(cases))
