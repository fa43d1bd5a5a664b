"""Makes live runs: from a first event, or from a log that somebody else left; it accepts none and decides nothing."""

from collections.abc import Callable, Sequence

from bough.v1 import agent_pb2, error_pb2, event_pb2
from bough_server.engine.execution import Execution
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunFacts
from bough_server.engine.recorder import Recorder
from bough_server.errors import RunError
from bough_server.runs.endings import Bound, deadline_bound, wall_bounds
from bough_server.runs.equipment import Equipment
from bough_server.runs.live import LiveRun
from bough_server.runs.roster import Roster
from bough_server.runtime.agent import Resolver
from bough_server.store.ports import RunRecord, StoredMessage
from bough_server.telemetry import Parent, Traced

OnEnd = Callable[[LiveRun, BaseException | None], None]


class Launcher:
    """Puts runs on the roster and lets them go."""

    def __init__(self, equipment: Equipment, roster: Roster, *, on_end: OnEnd) -> None:
        self._equipment = equipment
        self._roster = roster
        self._on_end = on_end

    def launch(
        self,
        record: RunRecord,
        log: Sequence[event_pb2.AgentEvent],
        *,
        resolver: Resolver,
        session: Sequence[StoredMessage],
        traced: Traced,
        is_queued: bool = False,
    ) -> LiveRun:
        """Begins a run, or goes on with it: `log` is all of it but deltas, `record` where it ends."""
        equipment, started = self._equipment, log[0]
        journal = Journal(log)
        facts = RunFacts(
            run_id=record.run.run_id,
            session_id=record.run.session_id,
            user_id=record.principal.user_id,
            started=started,
            session=session,
        )
        recorder = Recorder(
            equipment.log,
            record.run.run_id,
            epoch=record.epoch,
            last_sequence=record.run.last_sequence,
            clock=equipment.clock,
        )
        execution = Execution(
            facts,
            tracing=equipment.tracing,
            clock=equipment.clock,
            journal=journal,
            recorder=recorder,
            default_delta=equipment.defaults.delta,
            metrics=equipment.metrics,
        )
        execution.spans[""] = traced
        live = LiveRun(record, execution, resolver, is_queued=is_queued, on_end=self._on_end, metrics=equipment.metrics)
        self._roster.add(live)
        deadline = deadline_ns(log)
        bounds = [deadline_bound(deadline, equipment.clock.now_ns())] if deadline is not None else []
        live.launch(bounds, self._wall(log, journal, resolver, is_queued=is_queued))
        return live

    def _wall(
        self, log: Sequence[event_pb2.AgentEvent], journal: Journal, resolver: Resolver, *, is_queued: bool
    ) -> list[Bound]:
        """When the run's time on the wall is up: counted while somebody executes it, not while it is queued."""
        began, started = journal.dequeued or log[0], log[0].run_started
        now = self._equipment.clock.now_ns()
        spent = 0 if is_queued else journal.running_ns(began.time.ToNanoseconds(), now)
        definition = resolver.agent(started.agent).definition
        return wall_bounds([started.policy.limits, definition.limits], spent)

    def span(self, record: RunRecord, definition: agent_pb2.AgentDefinition, root_id: str, parent: Parent) -> Traced:
        """The span of a run's root, or of one stretch of it."""
        run = record.run
        return self._equipment.tracing.invoke_agent(
            agent=definition.name,
            description=definition.description,
            invocation_id=root_id,
            run_id=run.run_id,
            session_id=run.session_id,
            branch=definition.name,
            depth=0,
            parent=parent.for_run(run_id=run.run_id, session_id=run.session_id, user_id=record.principal.user_id),
        )


def deadline_ns(log: Sequence[event_pb2.AgentEvent]) -> int | None:
    """The caller's deadline in force: it lapses at an interruption, and whoever answers brings a new one."""
    deadline: int | None = None
    for event in log:
        if event.HasField("run_started") and event.run_started.HasField("deadline_time"):
            deadline = event.run_started.deadline_time.ToNanoseconds()
        elif event.HasField("run_forked"):
            forked = event.run_forked
            deadline = forked.deadline_time.ToNanoseconds() if forked.HasField("deadline_time") else None
        elif event.HasField("run_interrupted"):
            deadline = None
        elif event.HasField("run_resumed") and event.run_resumed.HasField("deadline_time"):
            deadline = event.run_resumed.deadline_time.ToNanoseconds()
    return deadline


def overrun() -> RunError:
    """The error of a run that was continued again and again."""
    return RunError(
        "Five servers were lost while they executed the run, and it got no further: what it does next may be what ends "
        "them.",
        reason=error_pb2.ERROR_REASON_RECOVERY_LIMIT,
    )
