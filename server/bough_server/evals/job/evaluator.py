"""Execute one evaluation: run its cases, score them, and record what happens."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import structlog

from bough.v1 import (
    agent_pb2,
    error_pb2,
    eval_result_pb2,
    evaluation_pb2,
    invocation_pb2,
    usage_pb2,
)
from bough_server.errors import Fenced, InsufficientBalance, RunError, ServerStopping, StorageFailed
from bough_server.evals.job.baseline_agents import explain_missing_pins, read_pinned_definitions
from bough_server.evals.job.case_trials import TrialRunner
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.evaluation_log import EvaluationState, as_fact
from bough_server.evals.job.judges import Judges
from bough_server.evals.job.judging import add_used_mocks, score_all_metrics
from bough_server.evals.job.planning import definitions_of_cell
from bough_server.evals.job.trial_runs import NotScorable, TrialRuns
from bough_server.evals.metrics.scoring import build_not_evaluated_result, has_crashed
from bough_server.evals.results.evaluation_verdict import compute_verdict
from bough_server.evals.sets.eval_set import is_recorded
from bough_server.identity import WholeTenant
from bough_server.log.usage import Sums
from bough_server.observability.tracing import Parent
from bough_server.quotas import QuotaExceeded
from bough_server.store.ports.evaluations import EvaluationRow
from bough_server.store.ports.log import EvaluationLogEvent
from bough_server.threads import run_in_thread

_log = structlog.get_logger(__name__)


class EvaluationRecorder:
    """Appends to the log of an evaluation, and folds what it appends."""

    def __init__(self, dependencies: EvaluationDependencies, row: EvaluationRow, fold: EvaluationState) -> None:
        self._dependencies, self._record, self.fold = dependencies, row, fold
        self._last = fold.last_sequence

    async def record(self, *events: evaluation_pb2.EvaluationEvent) -> None:
        """Append events in one transaction, and wait until they are on disk.

        Raises Fenced and StorageFailed, after which this recorder cannot be used: its sequences would leave a gap.
        """
        now = self._dependencies.clock.now_ns()
        records: list[EvaluationLogEvent] = []
        for event in events:
            self._last += 1
            records.append(as_fact(event, sequence=self._last, now_ns=now))
        # No await between the sequence and the append: appends are committed in the order of the calls.
        await self._dependencies.store.log.append(
            self._record.evaluation.evaluation_id, epoch=self._record.epoch, log_events=records
        )
        for event in events:
            self.fold.apply(event)


class LiveEvaluation:
    """An evaluation that this worker executes."""

    def __init__(
        self,
        dependencies: EvaluationDependencies,
        row: EvaluationRow,
        fold: EvaluationState,
        *,
        on_end: Callable[["LiveEvaluation", BaseException | None], None],
    ) -> None:
        self._dependencies, self.record, self._fold = dependencies, row, fold
        self.evaluation_id = row.evaluation.evaluation_id
        self._recorder = EvaluationRecorder(dependencies, row, fold)
        trace = Parent.from_ids(fold.planned.trace_id, fold.planned.span_id)
        self._judges = Judges(
            dependencies,
            row.principal,
            evaluation_id=self.evaluation_id,
            counted=fold.judge_runs,
            is_cancelled=lambda: fold.cancel is not None,
            trace=trace,
        )
        self._trace = trace
        self._runner = self._build_runner(fold.planned.agent, fold.planned.definitions)
        self._cell_runners = {
            cell.name: self._build_runner(fold.planned.agent, definitions_of_cell(fold.planned.definitions, cell))
            for cell in fold.planned.cells
        }
        self._baseline_runner: TrialRunner | None = None
        """Runs with what the baseline ran with; None until a suspect runs again with it."""
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._stopped: BaseException | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._cancel_asked = asyncio.Event()

    def _build_runner(self, agent: str, definitions: Sequence[agent_pb2.AgentDefinition]) -> TrialRunner:
        principal = self.record.principal
        return TrialRunner(
            self._dependencies,
            principal,
            evaluation_id=self.evaluation_id,
            agent=agent,
            definitions=definitions,
            is_cancelled=lambda: self._fold.cancel is not None,
            trace=self._trace,
            scope=WholeTenant(tenant_id=principal.tenant_id) if self._fold.planned.reads_all_users else principal,
        )

    def launch(self) -> None:
        """Start to execute it, in a task of this object."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop where it is; the next server continues it."""
        tasks = {task for task in (self._cancelling, self._task) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def cancel(self, *, requested_by: str, note: str) -> None:
        """Record that the evaluation is to stop, once, and cancel its runs. Raises Fenced and StorageFailed."""
        if self._fold.cancel is not None or self._fold.end is not None:
            return
        if self._cancelling is None:  # calls that come meanwhile wait for the event of the first
            self._cancelling = asyncio.create_task(self._request_cancel(requested_by, note))
        cancelling = self._cancelling
        try:
            # Shielded, as other calls may wait for the same event.
            await asyncio.shield(cancelling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not cancelling.cancelled() or (task is not None and task.cancelling()):
                raise  # the caller itself was cancelled
            raise Fenced("This server stopped the evaluation; another one continues it.") from None

    async def _request_cancel(self, requested_by: str, note: str) -> None:
        event = evaluation_pb2.EvaluationEvent()
        event.evaluation_cancel_requested.requested_by, event.evaluation_cancel_requested.note = requested_by, note
        try:
            await self._recorder.record(event)
        except (Fenced, StorageFailed) as error:
            self._stopped = error
            if self._task is not None:
                self._task.cancel()
            raise
        self._cancel_asked.set()

    async def _run(self) -> None:
        stopped: BaseException | None = None
        try:
            await self._execute()
        except asyncio.CancelledError:
            # Cancelled by `stop`, whose caller releases the evaluation.
            if self._stopped is None:
                raise
            stopped = self._stopped
        except BaseExceptionGroup as group:
            # What fails after the first error in the group does so because that ended its task.
            stopped = _first(group)
        except Exception as error:
            stopped = error
        if stopped is not None and not isinstance(stopped, Fenced | ServerStopping | StorageFailed):
            stopped = await self._fail(stopped)
        self._on_end(self, stopped)

    async def _fail(self, error: BaseException) -> BaseException | None:
        """End the evaluation with an error of the server's code; return what keeps that from being recorded."""
        _log.error("evaluation failed", evaluation_id=self.evaluation_id, exc_info=error)
        failure = RunError(
            "The server failed while executing this evaluation; the server's log says why.",
            reason=error_pb2.ERROR_REASON_INTERNAL,
        )
        event = evaluation_pb2.EvaluationEvent()
        event.evaluation_failed.error.CopyFrom(failure.to_agent_error())
        try:
            await self._recorder.record(event)
        except Exception as unrecorded:
            return unrecorded
        return None

    async def _execute(self) -> None:
        if self._fold.cancel is not None:  # recovered between the request and the end
            self._cancel_asked.set()
        async with asyncio.TaskGroup() as group:
            canceller = group.create_task(self._cancel_runs())
            await self._execute_remaining(group)
            if self._must_rerun_suspects():
                event = evaluation_pb2.EvaluationEvent()
                event.suspects_planned.suspects.CopyFrom(self._fold.plan_suspects())
                await self._recorder.record(event)
                await self._execute_remaining(group)
            if self._cancelling is not None:  # what ended the workers may not be in the log yet
                await asyncio.wait((self._cancelling,))
            if self._fold.cancel is None:
                canceller.cancel()
        await self._end()

    def _must_rerun_suspects(self) -> bool:
        fold, is_stopping = self._fold, self._cancelling is not None or self._fold.cancel is not None
        return bool(fold.planned.rerun_suspects) and fold.suspects is None and not is_stopping

    async def _execute_remaining(self, group: asyncio.TaskGroup) -> None:
        """Execute the trials that are not scored, some at the same time. An error of one ends the group."""
        remaining = self._fold.remaining()
        workers = [group.create_task(self._work(remaining)) for _ in range(self._fold.planned.max_concurrency)]
        await asyncio.wait(workers)

    async def _find_runner(self, planned: evaluation_pb2.CasePlanned, trial: int) -> TrialRunner:
        """Return what runs a trial. Raises NotScorable if it needs what the baseline ran with, and that is gone."""
        if self._fold.find_purpose(planned, trial) != eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN:
            return self._cell_runners.get(planned.cell, self._runner)
        if self._baseline_runner is None:
            principal, pins = self.record.principal, self._fold.planned.baseline.pins
            if why := await explain_missing_pins(self._dependencies, principal, pins):
                # An earlier server may have begun it, with what the baseline ran with.
                await self._runner.cancel_all(note=why, case_id=planned.eval_case.id, trial=trial)
                raise NotScorable(why)
            definitions = await read_pinned_definitions(self._dependencies, principal, pins)
            self._baseline_runner = self._build_runner(pins.agent, definitions)
        return self._baseline_runner

    async def _work(self, remaining: "Iterator[tuple[evaluation_pb2.CasePlanned, int]]") -> None:
        """Take trials from the iterator that all workers share, until it is empty or the evaluation stops."""
        for planned, trial in remaining:
            if self._cancelling is not None or self._fold.cancel is not None:
                return
            await self._execute_trial(planned, trial)

    async def _execute_trial(self, planned: evaluation_pb2.CasePlanned, trial: int) -> None:
        case, named = planned.eval_case, self._runner.build_trial(planned, trial)
        # A trial that has begun is finished: its runs are paid for, and a restart must not change its result.
        if (case.id, trial) not in self._fold.started and (used_up := await self._explain_end()):
            await self._record_score(planned, build_not_evaluated_result(case, trial, used_up), ())
            return
        if (case.id, trial) not in self._fold.started:
            event = evaluation_pb2.EvaluationEvent()
            event.case_trial_started.case_id, event.case_trial_started.trial = case.id, trial
            # Recorded turns have no session here, and that of a fork is known only once it is created.
            has_session = not (is_recorded(case) or case.HasField("origin"))
            event.case_trial_started.session_id = named.session_id if has_session else ""
            await self._recorder.record(event)
        result, invocations = await self._score_trial(planned, trial)
        if result is not None and self._fold.cancel is None:
            await self._record_score(planned, result, invocations)

    async def _score_trial(
        self, planned: evaluation_pb2.CasePlanned, trial: int
    ) -> tuple[eval_result_pb2.CaseTrialResult | None, Sequence[invocation_pb2.Invocation]]:
        """Run a trial and score it; return its result, None if the evaluation was cancelled meanwhile, and its turns.

        An error of the trial is recorded as its result, and does not end the evaluation.
        """
        case = planned.eval_case
        try:
            runs = await self._run_turns(planned, trial)
            run_ids = [invocation.run_id for invocation in runs.invocations]
            if is_recorded(case):
                run_ids = [turn.recorded.run.run_id for turn in case.turns]
            judging = score_all_metrics(
                self._dependencies, runs.case, runs.invocations, trial=trial, run_ids=run_ids, judges=self._judges
            )
            result = await self._wait_for_result(judging)
        except NotScorable as error:
            runs = error.runs or TrialRuns(case=case)
            result = build_not_evaluated_result(
                case, trial, error.reason, invocations=runs.invocations, unanswered=error.unanswered
            )
            add_used_mocks(result, case, runs.invocations)
        except (ServerStopping, StorageFailed, Fenced):
            raise
        except Exception as error:
            _log.error(
                "trial not scored", evaluation_id=self.evaluation_id, case_id=case.id, trial=trial, exc_info=error
            )
            why = "The server failed while scoring it; the server's log says why."
            return build_not_evaluated_result(case, trial, why), ()
        if result is not None:
            runs.add_user_to(result)
        return result, runs.invocations

    async def _run_turns(self, planned: evaluation_pb2.CasePlanned, trial: int) -> TrialRuns:
        """Return the records of a trial's turns, which are run unless the case has recorded ones."""
        case = planned.eval_case
        if is_recorded(case):
            return TrialRuns(case=case, invocations=await self._runner.read_recorded_turns(case))
        runner = await self._find_runner(planned, trial)
        attempt = len(self._fold.crashed_attempts.get((case.id, trial), ()))
        runs = await runner.run(planned, trial, attempt=attempt)
        while self._must_retry(planned, trial, runs):
            attempt += 1
            event = evaluation_pb2.EvaluationEvent()
            event.case_trial_retried.case_id, event.case_trial_retried.trial = case.id, trial
            event.case_trial_retried.crashed_attempt.CopyFrom(runs.build_crashed_attempt())
            if not case.HasField("origin"):
                event.case_trial_retried.session_id = runner.build_trial(planned, trial, attempt=attempt).session_id
            await self._recorder.record(event)
            runs = await runner.run(planned, trial, attempt=attempt)
        if (case.id, trial) not in self._fold.ended:
            event = evaluation_pb2.EvaluationEvent()
            event.case_trial_ended.case_id, event.case_trial_ended.trial = case.id, trial
            event.case_trial_ended.run_ids.extend(invocation.run_id for invocation in runs.invocations)
            await self._recorder.record(event)
        return runs

    def _must_retry(self, planned: evaluation_pb2.CasePlanned, trial: int, runs: TrialRuns) -> bool:
        """Return whether a trial crashed and is to begin anew: not if it has ended, or the evaluation stops."""
        key = (planned.eval_case.id, trial)
        is_stopping = self._cancelling is not None or self._fold.cancel is not None
        if key in self._fold.ended or is_stopping or not has_crashed(runs.case, runs.invocations):
            return False
        attempts = len(self._fold.crashed_attempts.get(key, ()))
        return attempts < self._fold.planned.retry_crashed and not self._check_budget()

    async def _wait_for_result(
        self, scoring: Coroutine[Any, Any, eval_result_pb2.CaseTrialResult]
    ) -> eval_result_pb2.CaseTrialResult | None:
        """Return the result, or None as soon as the evaluation is cancelled: later calls of judges are not made."""
        tasks = asyncio.create_task(scoring), asyncio.create_task(self._cancel_asked.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return None if tasks[0].cancelled() else tasks[0].result()

    async def _record_score(
        self,
        planned: evaluation_pb2.CasePlanned,
        result: eval_result_pb2.CaseTrialResult,
        invocations: Sequence[invocation_pb2.Invocation],
    ) -> None:
        """Record the result of a trial, and then emit its scores as events.

        A crash between the two loses the events: the server that continues the evaluation does not score it again.
        """
        result.purpose = self._fold.find_purpose(planned, result.trial)
        if attempts := self._fold.crashed_attempts.get((result.case_id, result.trial)):
            _add_attempts(result, attempts)
        event = evaluation_pb2.EvaluationEvent()
        event.case_trial_scored.result.CopyFrom(result)
        await self._recorder.record(event)
        self._dependencies.score_events.emit(result, invocations, evaluation_id=self.evaluation_id)

    async def _cancel_runs(self) -> None:
        """Wait until the evaluation is cancelled, and cancel its runs, those of judges too."""
        await self._cancel_asked.wait()
        await self._runner.cancel_all(note=self._note())

    def _note(self) -> str:
        return "" if self._fold.cancel is None else self._fold.cancel.note

    async def _end(self) -> None:
        fold = self._fold
        # In threads: with many cases each takes tenths of a second, in which the server answers no call.
        cases = await run_in_thread(fold.case_results)
        summary = await run_in_thread(fold.totals_of, cases)
        end = evaluation_pb2.EvaluationEvent()
        if fold.cancel is not None:
            await self._runner.cancel_all(note=self._note())  # what was being created when the others were cancelled
            error = RunError("The evaluation was cancelled.", reason=error_pb2.ERROR_REASON_CANCELLED)
            end.evaluation_cancelled.error.CopyFrom(error.to_agent_error())
            end.evaluation_cancelled.totals.CopyFrom(summary)
            await self._recorder.record(end)
            return
        result = fold.result(self.evaluation_id, cases, summary)
        totaled = evaluation_pb2.EvaluationEvent()
        totaled.evaluation_totaled.CopyFrom(await run_in_thread(compute_verdict, fold.planned, result))
        end.evaluation_completed.verdict = totaled.evaluation_totaled.verdict
        # In one transaction: if a server crashed in between, the next would compute the verdict again.
        await self._recorder.record(totaled, end)

    async def _explain_end(self) -> str:
        """Return a sentence if no further trial may begin, else an empty text.

        What ends it is its budget, a quota of tokens or cost, or the balance of its user.
        """
        if used_up := self._check_budget():
            return used_up
        try:
            await self._dependencies.runs.check_spending(self.record.principal)
        except (InsufficientBalance, QuotaExceeded) as error:
            return error.message
        return ""

    def _check_budget(self) -> str:
        """Return a sentence if the budget of the evaluation is used up, else an empty text."""
        limits, spent = self._fold.planned.budget, self._fold.spent.usage()
        bounds = {field.name: value for field, value in limits.ListFields()}
        for name, used in _amounts(spent):
            if name in bounds and used >= bounds[name]:
                return f"The budget of the evaluation is used up: {used:,} of {bounds[name]:,} {name}."
        if limits.HasField("wall_duration"):
            elapsed = self._dependencies.clock.now_ns() - self._fold.create_time_ns
            if elapsed >= limits.wall_duration.ToNanoseconds():
                return "The budget of the evaluation is used up: its wall_duration has passed."
        return ""


def _add_attempts(result: eval_result_pb2.CaseTrialResult, attempts: Sequence[eval_result_pb2.CrashedAttempt]) -> None:
    """Add to the result of a trial its attempts that crashed, and what they used."""
    used, user_used = Sums.of(result.usage), Sums.of(result.user_usage)
    for attempt in attempts:
        used.add(Sums.of(attempt.usage))
        user_used.add(Sums.of(attempt.user_usage))
    result.usage.CopyFrom(used.usage())
    if any(one.HasField("user_usage") for one in (result, *attempts)):
        result.user_usage.CopyFrom(user_used.usage())
    result.crashed_attempts.extend(attempts)


def _amounts(spent: usage_pb2.Usage) -> Iterator[tuple[str, int]]:
    """Yield what was used by the names of limits; a number that is not known counts as nothing."""
    yield "model_calls", spent.model_calls
    yield "tool_calls", spent.tool_calls
    yield "tokens", spent.total_tokens or spent.input_tokens + spent.output_tokens
    yield "cost_nanos", spent.cost_nanos


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group, which may be nested."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
