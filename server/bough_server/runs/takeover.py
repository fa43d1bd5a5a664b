"""Take over runs: take the next epoch, restore the catalog that a run started with, and launch it from its log."""

from collections.abc import Callable, Mapping, Sequence

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, tool_pb2
from bough_server.agents.definition import kind_of
from bough_server.agents.pinned import MissingVersion, restore_catalog
from bough_server.engine.execution import Execution
from bough_server.engine.files import SessionFiles
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunInfo
from bough_server.engine.limits import SharedLimit
from bough_server.engine.recorder import Recorder
from bough_server.engine.run_log import log_start
from bough_server.errors import RunError
from bough_server.history.session import SessionHistory
from bough_server.identity import Principal
from bough_server.log import events
from bough_server.log.blobs import StoredBlob
from bough_server.log.run_state import fold_run_state
from bough_server.messages import copy_of
from bough_server.observability.tracing import Parent, Traced
from bough_server.runs.close import (
    Bound,
    CloseReason,
    close_reason,
    close_run,
    deadline_bound,
    find_cancel,
    read_log_events,
    to_close_reason,
    to_log_events,
    wall_bounds,
)
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.live import LiveRun
from bough_server.runs.progress import count_crashes_in
from bough_server.runs.registry import RunRegistry
from bough_server.runtime.agent import Resolver
from bough_server.store.ports.runs import RunRow
from bough_server.tools.tool import Tool

OnEnd = Callable[[LiveRun, BaseException | None], None]

MAX_RECOVERIES = 5
"""How often a run is recovered from crashes without a new result of an effect in between, before it is failed."""


class Launcher:
    """Builds live runs from their logs, registers and starts them."""

    def __init__(self, dependencies: RunDependencies, live_runs: RunRegistry, *, on_end: OnEnd) -> None:
        self._dependencies = dependencies
        self._live_runs = live_runs
        self._on_end = on_end

    def launch(
        self,
        run_row: RunRow,
        log: Sequence[event_pb2.AgentEvent],
        *,
        resolver: Resolver,
        session: SessionHistory,
        traced: Traced,
        is_queued: bool = False,
    ) -> LiveRun:
        """Start or continue a run: `log` is its log without deltas, and `record` its row at the end of that log."""
        facts = RunInfo(
            run_id=run_row.run.run_id,
            session_id=run_row.run.session_id,
            tenant_id=run_row.principal.tenant_id,
            user_id=run_row.principal.user_id,
            started=log[0],
            session=session,
        )
        limits = self._dependencies.open_limits(run_row.principal, log)
        execution = self._build_execution(run_row, facts, Journal(log), limits)
        execution.spans[""] = traced
        live = LiveRun(
            run_row,
            execution,
            resolver,
            is_queued=is_queued,
            on_end=self._on_end,
            metrics=self._dependencies.metrics,
        )
        self._live_runs.add(live)
        log_start(facts.run_id, facts.session_id, execution.journal.of_the_run)
        deadline = fold_run_state(execution.journal.of_the_run).deadline_ns
        bounds = [deadline_bound(deadline, self._dependencies.clock.now_ns())] if deadline is not None else []
        live.launch(bounds, self._wall_bounds(execution, resolver, is_queued=is_queued))
        if limits is not None:
            assert live.task is not None, "it has been launched"
            live.task.add_done_callback(lambda _: limits.close())
        return live

    def _build_execution(
        self, run_row: RunRow, facts: RunInfo, journal: Journal, shared_limit: SharedLimit | None
    ) -> Execution:
        dependencies = self._dependencies
        recorder = Recorder(
            dependencies.store.log,
            facts.run_id,
            epoch=run_row.epoch,
            last_sequence=run_row.run.last_sequence,
            clock=dependencies.clock,
            shared_limit=shared_limit,
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
                run_row.principal,
                run_row.run.session_id,
                most=dependencies.max_files_bytes,
            ),
            shared_limit=shared_limit,
        )

    def _wall_bounds(self, execution: Execution, resolver: Resolver, *, is_queued: bool) -> list[Bound]:
        """Return the bounds of the run's wall_duration, which counts only the time in which it is executed."""
        journal, started = execution.journal, execution.facts.started
        began, now = journal.dequeued or started, self._dependencies.clock.now_ns()
        spent = 0 if is_queued else journal.running_ns(began.record_time.ToNanoseconds(), now)
        definition = resolver.agents[started.run_started.agent].definition
        return wall_bounds([execution.policy.limits, definition.limits], spent)

    def start_span(
        self, run_row: RunRow, definition: agent_pb2.AgentDefinition, root_id: str, parent: Parent
    ) -> Traced:
        """Start a span for a run's root agent, or for the part of it that this worker executes."""
        run = run_row.run
        return self._dependencies.tracing.invoke_agent(
            agent=definition.name,
            kind=kind_of(definition),
            description=definition.description,
            invocation_id=root_id,
            run_id=run.run_id,
            session_id=run.session_id,
            branch=definition.name,
            depth=0,
            parent=parent.for_run(run_id=run.run_id, session_id=run.session_id, user_id=run_row.principal.user_id),
        )


def build_recovery_limit_error() -> RunError:
    """Return the error of a run that was recovered MAX_RECOVERIES times without progress."""
    return RunError(
        f"The run was recovered {MAX_RECOVERIES} times without progress and has been failed: its next step probably "
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
        run_row: RunRow,
        cause: event_pb2.ResumeCause.ValueType,
        *,
        answers: Sequence[event_pb2.AgentEvent] = (),
        files: Sequence[StoredBlob] = (),
        deadline_time_ns: int | None = None,
        is_queued: bool = False,
        former_owner: str = "",
    ) -> LiveRun | None:
        """Continue a run under the next epoch, recording `answers` in the same append; None if it was ended instead.

        `files` are those of the answers. `former_owner` is who executed the run before, if that worker has ended.

        Raises MissingVersion before it writes anything, RunMoved, Fenced and StorageFailed.
        """
        run = run_row.run
        read = await read_log_events(self._dependencies.store.log, run.run_id, last_sequence=run.last_sequence)
        log = [one.event for one in read]
        of_the_run = [one.event for one in read if one.kind in events.RUN_KINDS]
        # Before the catalog is restored: a run that is to end can do so without the versions that it started with.
        reason = self._find_close_reason(log, of_the_run)
        if reason is not None:
            await close_run(self._dependencies, run_row, reason)
            return None
        resolver = await self.restore_resolver(run_row.principal, of_the_run)
        if cause == event_pb2.RESUME_CAUSE_RECOVERY and not self._dependencies.store.leases.has_crashed(former_owner):
            cause = event_pb2.RESUME_CAUSE_TAKEOVER  # the former owner released its lease in order
        resumed = self._build_resume(run_row, log[0], cause, deadline_time_ns)
        now = self._dependencies.clock.now_ns()
        records = to_log_events([resumed, *answers], after=run_row.run.last_sequence, now_ns=now, files=files)
        await self._dependencies.store.log.take_over(
            run_row.run.run_id, epoch=run_row.epoch + 1, owner=self._dependencies.worker, log_events=records, log=read
        )
        self._count_takeover(cause)
        taken = _build_row(run_row, self._dependencies.worker, is_queued=is_queued)
        taken.run.last_sequence = records[-1].sequence
        return await self.launch(taken, [*log, resumed, *answers], resolver, is_queued=is_queued)

    def _count_takeover(self, cause: event_pb2.ResumeCause.ValueType) -> None:
        if self._dependencies.metrics is None:
            return
        if cause == event_pb2.RESUME_CAUSE_RECOVERY:
            self._dependencies.metrics.on_takeover("lost")
        elif cause == event_pb2.RESUME_CAUSE_TAKEOVER:
            self._dependencies.metrics.on_takeover("released")

    async def restore_resolver(self, principal: Principal, log: Sequence[event_pb2.AgentEvent]) -> Resolver:
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
        started = log[0].run_started
        tools = await self._restore_server_tools(started)
        below = self._dependencies.agents.for_tenant(principal.tenant_id).resolver
        return restore_catalog(started, definitions, below, tools)

    async def _restore_server_tools(self, started: event_pb2.RunStarted) -> Mapping[str, Tool]:
        """Return the tools of tool servers as they were when a run started. Raises MissingVersion."""
        registry, found = self._dependencies.agents.registry, dict[str, tool_pb2.ToolInfo]()
        for ref in started.tool_refs:
            if ref.server not in registry.tool_servers.names:
                raise MissingVersion(
                    f"The tool server {ref.server!r}, which has the tool {ref.name!r}, is not configured on this "
                    "server. Restore it and keep it until the run ends, or cancel the run."
                )
            info = await self._dependencies.store.catalog.get_tool(ref.revision)
            if info is None:
                raise MissingVersion(f"The tool {ref.name!r} with revision {ref.revision!r} is not stored here.")
            found[ref.name] = info
        return registry.build_server_tools(found)

    def _find_close_reason(
        self, log: Sequence[event_pb2.AgentEvent], of_the_run: Sequence[event_pb2.AgentEvent]
    ) -> CloseReason | None:
        """Return why a run must be ended rather than continued, or None; `of_the_run` are its events of RUN_KINDS."""
        if (requested := find_cancel(of_the_run)) is not None:
            return close_reason(requested)
        deadline = fold_run_state(of_the_run).deadline_ns
        if deadline is not None and deadline <= self._dependencies.clock.now_ns():
            return close_reason(event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_DEADLINE))
        if count_crashes_in(log) >= MAX_RECOVERIES:
            return to_close_reason(build_recovery_limit_error())
        return None

    def _build_resume(
        self,
        run_row: RunRow,
        started: event_pb2.AgentEvent,
        cause: event_pb2.ResumeCause.ValueType,
        deadline_time_ns: int | None,
    ) -> event_pb2.AgentEvent:
        event = events.in_place_of(started)
        resumed = event.run_resumed
        resumed.cause, resumed.epoch, resumed.owner = cause, run_row.epoch + 1, self._dependencies.worker
        if deadline_time_ns is not None:
            resumed.deadline_time.FromNanoseconds(deadline_time_ns)
        return event

    async def launch(
        self,
        run_row: RunRow,
        log: Sequence[event_pb2.AgentEvent],
        resolver: Resolver | None = None,
        *,
        is_queued: bool = False,
    ) -> LiveRun:
        """Launch a run that this worker already owns, from its log without deltas. Raises MissingVersion."""
        started, resolver = log[0], resolver or await self.restore_resolver(run_row.principal, log)
        # A queued run reads its session when it leaves the queue: those before it still add messages.
        session = SessionHistory() if is_queued else await self._read_session(run_row, log)
        definition = resolver.agents[started.run_started.agent].definition
        parent = Parent.from_ids(started.trace_id, started.span_id)
        traced = self._launcher.start_span(run_row, definition, started.invocation_id, parent)
        return self._launcher.launch(
            run_row, log, resolver=resolver, session=session, traced=traced, is_queued=is_queued
        )

    async def _read_session(self, run_row: RunRow, log: Sequence[event_pb2.AgentEvent]) -> SessionHistory:
        return await self._dependencies.read_session_history(
            run_row.principal, run_row.run.session_id, through=session_position(log)
        )


def session_position(log: Sequence[event_pb2.AgentEvent]) -> int:
    """Return the position of the last session message that a run sees."""
    dequeued = [event.run_dequeued.session_cut for event in log if event.HasField("run_dequeued")]
    return dequeued[0] if dequeued else log[0].run_started.session_cut


def _build_row(run_row: RunRow, worker: str, *, is_queued: bool) -> RunRow:
    """Return a run's row as it is after this worker has taken it over."""
    run = copy_of(run_row.run)
    run.state = execution_pb2.EXECUTION_STATE_PENDING if is_queued else execution_pb2.EXECUTION_STATE_RUNNING
    run.ClearField("open_requests")
    return RunRow(
        run=run,
        principal=run_row.principal,
        epoch=run_row.epoch + 1,
        request_digest=run_row.request_digest,
        owner=worker,
    )
