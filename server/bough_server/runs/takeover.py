"""Take over runs: take the next epoch, restore the catalog that a run started with, and launch it from its log."""

from collections.abc import Callable, Sequence

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2
from bough_server import events
from bough_server.agents.pinned import MissingVersion, pinned
from bough_server.blobs import StoredBlob
from bough_server.engine.execution import Execution
from bough_server.engine.files import SessionFiles
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunInfo
from bough_server.engine.recorder import Recorder
from bough_server.engine.run_log import log_start
from bough_server.errors import RunError
from bough_server.history.session import SessionHistory
from bough_server.messages import copy_of
from bough_server.run_state import folded
from bough_server.runs.close import (
    Bound,
    CloseReason,
    as_records,
    cancel_of,
    close_reason,
    close_run,
    deadline_bound,
    failed,
    read_records,
    wall_bounds,
)
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.live import LiveRun
from bough_server.runs.registry import RunRegistry
from bough_server.runtime.agent import Resolver
from bough_server.store.ports.runs import RunRecord
from bough_server.telemetry import Parent, Traced

OnEnd = Callable[[LiveRun, BaseException | None], None]

MOST_RESUMED = 5
"""How often a run is recovered from crashes without a new result of an effect in between, before it is failed."""

PROGRESS = frozenset(
    {
        events.LLM_COMPLETED,
        events.LLM_FAILED,
        events.TOOL_COMPLETED,
        events.TOOL_FAILED,
        events.SUB_AGENT_COMPLETED,
        events.SUB_AGENT_FAILED,
        events.VALUE_RECORDED,
        events.INPUT_RECEIVED,
        events.RUN_FORKED,
    }
)


class Launcher:
    """Builds live runs from their logs, registers and starts them."""

    def __init__(self, dependencies: RunDependencies, live_runs: RunRegistry, *, on_end: OnEnd) -> None:
        self._dependencies = dependencies
        self._live_runs = live_runs
        self._on_end = on_end

    def launch(
        self,
        record: RunRecord,
        log: Sequence[event_pb2.AgentEvent],
        *,
        resolver: Resolver,
        session: SessionHistory,
        traced: Traced,
        is_queued: bool = False,
    ) -> LiveRun:
        """Start or continue a run: `log` is its log without deltas, and `record` its row at the end of that log."""
        facts = RunInfo(
            run_id=record.run.run_id,
            session_id=record.run.session_id,
            user_id=record.principal.user_id,
            started=log[0],
            session=session,
        )
        execution = self._execution(record, facts, Journal(log))
        execution.spans[""] = traced
        live = LiveRun(
            record,
            execution,
            resolver,
            is_queued=is_queued,
            on_end=self._on_end,
            metrics=self._dependencies.metrics,
        )
        self._live_runs.add(live)
        log_start(facts.run_id, facts.session_id, execution.journal.of_the_run)
        deadline = folded(execution.journal.of_the_run).deadline_ns
        bounds = [deadline_bound(deadline, self._dependencies.clock.now_ns())] if deadline is not None else []
        live.launch(bounds, self._wall(execution, resolver, is_queued=is_queued))
        return live

    def _execution(self, record: RunRecord, facts: RunInfo, journal: Journal) -> Execution:
        dependencies = self._dependencies
        recorder = Recorder(
            dependencies.store.log,
            facts.run_id,
            epoch=record.epoch,
            last_sequence=record.run.last_sequence,
            clock=dependencies.clock,
        )
        return Execution(
            facts,
            tracing=dependencies.tracing,
            clock=dependencies.clock,
            journal=journal,
            recorder=recorder,
            default_deltas=dependencies.defaults.deltas,
            metrics=dependencies.metrics,
            abandoned=dependencies.abandoned,
            files=SessionFiles(
                dependencies.store.blobs,
                dependencies.file_cache,
                record.principal,
                record.run.session_id,
                most=dependencies.max_files_bytes,
            ),
        )

    def _wall(self, execution: Execution, resolver: Resolver, *, is_queued: bool) -> list[Bound]:
        """Return the bounds of the run's wall_duration, which counts only the time in which it is executed."""
        journal, started = execution.journal, execution.facts.started
        began, now = journal.dequeued or started, self._dependencies.clock.now_ns()
        spent = 0 if is_queued else journal.running_ns(began.record_time.ToNanoseconds(), now)
        definition = resolver.agents[started.run_started.agent].definition
        return wall_bounds([execution.policy.limits, definition.limits], spent)

    def span(self, record: RunRecord, definition: agent_pb2.AgentDefinition, root_id: str, parent: Parent) -> Traced:
        """Start a span for a run's root agent, or for the part of it that this worker executes."""
        run = record.run
        return self._dependencies.tracing.invoke_agent(
            agent=definition.name,
            description=definition.description,
            invocation_id=root_id,
            run_id=run.run_id,
            session_id=run.session_id,
            branch=definition.name,
            depth=0,
            parent=parent.for_run(run_id=run.run_id, session_id=run.session_id, user_id=record.principal.user_id),
        )


def overrun() -> RunError:
    """Return the error of a run that was recovered MOST_RESUMED times without progress."""
    return RunError(
        f"The run was recovered {MOST_RESUMED} times without progress and has been failed: its next step probably "
        "crashes the server.",
        reason=error_pb2.ERROR_REASON_RECOVERY_LIMIT,
    )


class Takeover:
    """Takes runs over for this worker, and launches them or ends those that cannot continue."""

    def __init__(self, dependencies: RunDependencies, launcher: Launcher) -> None:
        self._dependencies = dependencies
        self._launcher = launcher

    async def continue_run(
        self,
        record: RunRecord,
        cause: event_pb2.ResumeCause.ValueType,
        *,
        answers: Sequence[event_pb2.AgentEvent] = (),
        files: Sequence[StoredBlob] = (),
        deadline_time_ns: int | None = None,
        is_queued: bool = False,
        lost_by: str = "",
    ) -> LiveRun | None:
        """Continue a run under the next epoch, recording `answers` in the same append; None if it was ended instead.

        `files` are those of the answers. `lost_by` is who executed the run before, if that worker has ended.

        Raises MissingVersion before it writes anything, RunMoved, Fenced and StorageFailed.
        """
        run = record.run
        read = await read_records(self._dependencies.store.log, run.run_id, last_sequence=run.last_sequence)
        log = [one.event for one in read]
        of_the_run = [one.event for one in read if one.kind in events.RUN_KINDS]
        reason = self._close_reason(log, of_the_run)
        if reason is not None:
            await close_run(self._dependencies, record, reason)
            return None
        resolver = await self.resolver(of_the_run)
        if cause == event_pb2.RESUME_CAUSE_RECOVERY and not self._dependencies.store.leases.crashed(lost_by):
            cause = event_pb2.RESUME_CAUSE_TAKEOVER  # the former owner released its lease in order
        resumed = self._resumed(record, log[0], cause, deadline_time_ns)
        now = self._dependencies.clock.now_ns()
        records = as_records([resumed, *answers], after=record.run.last_sequence, now_ns=now, files=files)
        await self._dependencies.store.log.take_over(
            record.run.run_id, epoch=record.epoch + 1, owner=self._dependencies.worker, records=records, log=read
        )
        self._count(cause)
        taken = _taken(record, self._dependencies.worker, is_queued=is_queued)
        taken.run.last_sequence = records[-1].sequence
        return await self.launch(taken, [*log, resumed, *answers], resolver, is_queued=is_queued)

    def _count(self, cause: event_pb2.ResumeCause.ValueType) -> None:
        if self._dependencies.metrics is None:
            return
        if cause == event_pb2.RESUME_CAUSE_RECOVERY:
            self._dependencies.metrics.run_taken_over("lost")
        elif cause == event_pb2.RESUME_CAUSE_TAKEOVER:
            self._dependencies.metrics.run_taken_over("released")

    async def resolver(self, log: Sequence[event_pb2.AgentEvent]) -> Resolver:
        """Return the catalog that a run started with, with the changes of its forks. Raises MissingVersion."""
        definitions: dict[str, agent_pb2.AgentDefinition] = {}
        named = [*log[0].run_started.definition_refs]
        for event in log:
            if event.HasField("run_forked"):
                named.extend(event.run_forked.definition_refs)
        for ref in named:
            definition = await self._dependencies.store.catalog.get(ref.revision)
            if definition is None:
                raise MissingVersion(
                    f"The definition of {ref.name!r} with revision {ref.revision!r} is not stored here."
                )
            definitions[ref.name] = definition  # a later fork's definition replaces an earlier one
        return pinned(log[0].run_started, definitions, self._dependencies.resolver)

    def _close_reason(
        self, log: Sequence[event_pb2.AgentEvent], of_the_run: Sequence[event_pb2.AgentEvent]
    ) -> CloseReason | None:
        """Return why a run must be ended rather than continued, or None; `of_the_run` are its events of RUN_KINDS."""
        if (requested := cancel_of(of_the_run)) is not None:
            return close_reason(requested)
        deadline = folded(of_the_run).deadline_ns
        if deadline is not None and deadline <= self._dependencies.clock.now_ns():
            return close_reason(event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_DEADLINE))
        if losses_of(log) >= MOST_RESUMED:
            return failed(overrun())
        return None

    def _resumed(
        self,
        record: RunRecord,
        started: event_pb2.AgentEvent,
        cause: event_pb2.ResumeCause.ValueType,
        deadline_time_ns: int | None,
    ) -> event_pb2.AgentEvent:
        event = events.in_place_of(started)
        resumed = event.run_resumed
        resumed.cause, resumed.epoch, resumed.owner = cause, record.epoch + 1, self._dependencies.worker
        if deadline_time_ns is not None:
            resumed.deadline_time.FromNanoseconds(deadline_time_ns)
        return event

    async def launch(
        self,
        record: RunRecord,
        log: Sequence[event_pb2.AgentEvent],
        resolver: Resolver | None = None,
        *,
        is_queued: bool = False,
    ) -> LiveRun:
        """Launch a run that this worker already owns, from its log without deltas. Raises MissingVersion."""
        started, resolver = log[0], resolver or await self.resolver(log)
        session = SessionHistory() if is_queued else await self._session(record, log)
        definition = resolver.agents[started.run_started.agent].definition
        parent = Parent.recorded(started.trace_id, started.span_id)
        traced = self._launcher.span(record, definition, started.invocation_id, parent)
        return self._launcher.launch(
            record, log, resolver=resolver, session=session, traced=traced, is_queued=is_queued
        )

    async def _session(self, record: RunRecord, log: Sequence[event_pb2.AgentEvent]) -> SessionHistory:
        return await self._dependencies.session_history(
            record.principal, record.run.session_id, through=session_cut(log)
        )


def session_cut(log: Sequence[event_pb2.AgentEvent]) -> int:
    """Return the position of the last session message that a run sees."""
    dequeued = [event.run_dequeued.session_cut for event in log if event.HasField("run_dequeued")]
    return dequeued[0] if dequeued else log[0].run_started.session_cut


def losses_of(log: Sequence[event_pb2.AgentEvent]) -> int:
    """Count the recorded crashes of a run's servers since its last progress.

    Those while it was queued do not count: it cannot make progress then.
    """
    count, is_waiting = 0, False
    for event in _since_progress(log):
        if event.HasField("run_queued") or event.HasField("run_dequeued"):
            is_waiting = event.HasField("run_queued")
        elif event.HasField("run_resumed"):
            count += not is_waiting and event.run_resumed.cause == event_pb2.RESUME_CAUSE_RECOVERY
    return count


def _since_progress(log: Sequence[event_pb2.AgentEvent]) -> Sequence[event_pb2.AgentEvent]:
    """Return the events after a run's last progress; before that it was not queued."""
    for index in reversed(range(len(log))):
        if events.kind_of(log[index]) in PROGRESS:
            return log[index + 1 :]
    return log


def _taken(record: RunRecord, worker: str, *, is_queued: bool) -> RunRecord:
    """Return a run's row as it is after this worker has taken it over."""
    run = copy_of(record.run)
    run.state = execution_pb2.EXECUTION_STATE_PENDING if is_queued else execution_pb2.EXECUTION_STATE_RUNNING
    run.ClearField("open_requests")
    return RunRecord(
        run=run,
        principal=record.principal,
        epoch=record.epoch + 1,
        request_digest=record.request_digest,
        owner=worker,
    )
