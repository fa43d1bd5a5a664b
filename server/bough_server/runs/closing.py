"""Ends runs that nobody executes: everything that their logs leave open, once, leaf first; it runs no agent."""

from collections.abc import Sequence
from dataclasses import dataclass

from bough.v1 import error_pb2, event_pb2
from bough_server import events
from bough_server.engine.cancellation import closing
from bough_server.engine.journal import Journal
from bough_server.engine.open_invocations import Invocations
from bough_server.engine.run_metrics import Measuring
from bough_server.errors import RunError
from bough_server.runs.endings import RUN, wall_owner, why_ended
from bough_server.runs.equipment import Equipment
from bough_server.store.ports import Catalog, EventLog, Record, RunRecord


@dataclass(frozen=True, slots=True)
class Why:
    """Why a run is ended: the wish to record, where its log has none, and the errors of its root and of all below."""

    reason: event_pb2.CancelReason.ValueType
    error: error_pb2.AgentError
    below: error_pb2.AgentError


def because(reason: event_pb2.CancelReason.ValueType, owner: str = RUN) -> Why:
    """The words for an end from outside; `owner` is whose time was up, where that is the reason."""
    return Why(reason, *why_ended(reason, owner))


def failed(error: RunError) -> Why:
    """The words for a run that cannot go on."""
    below = RunError("The run cannot go on.", reason=error_pb2.ERROR_REASON_CANCELLED)
    return Why(event_pb2.CANCEL_REASON_SERVER, error.to_agent_error(), below.to_agent_error())


async def close_run(equipment: Equipment, record: RunRecord, why: Why) -> None:
    """Ends every open invocation of a run under a new epoch, and then the run.

    A wish to end the run that its log holds already is the one that counts. Raises RunMoved where somebody else acted
    meanwhile, Fenced where it has ended, StorageFailed.
    """
    log = await read_log(equipment.log, record.run.run_id)
    invocations, wished = Invocations(), event_pb2.CANCEL_REASON_UNSPECIFIED
    for event in log:
        invocations.observe(event)
        if event.HasField("cancel_requested") and not event.cancel_requested.scope:
            wished = wished or event.cancel_requested.reason
    made: list[event_pb2.AgentEvent] = []
    if wished:
        why = because(wished, await _wall_owner(equipment.catalog, log[0].run_started))
    else:
        wish = invocations.root().event("")
        wish.cancel_requested.reason = why.reason
        made.append(wish)
    now = equipment.clock.now_ns()
    made.extend(closing(invocations, "", why.error, why.below, now))
    records = as_records(made, after=record.run.last_sequence, now_ns=now)
    await equipment.log.take_over(record.run.run_id, epoch=record.epoch + 1, owner=equipment.worker, records=records)
    if equipment.metrics is not None:
        measuring = Measuring(equipment.metrics, invocations, Journal(log))
        for event in made:
            measuring.take(event)


async def _wall_owner(catalog: Catalog, started: event_pb2.RunStarted) -> str:
    """Whose time on the wall is up first, as wall_owner has it; agents in code have no bounds of their own."""
    for ref in started.definitions:
        definition = await catalog.get(ref.revision) if ref.name == started.agent else None
        if definition is not None:
            return wall_owner(started.policy.limits, definition)
    return RUN


async def read_log(log: EventLog, run_id: str) -> list[event_pb2.AgentEvent]:
    """A run's events without its deltas, and without the stamp that only readers need."""
    found: list[event_pb2.AgentEvent] = []
    after = 0
    while page := await log.read(run_id, after=after, deltas=False):
        found.extend(events.parse(stored.data) for stored in page)
        after = page[-1].sequence
    return found


def as_records(made: Sequence[event_pb2.AgentEvent], *, after: int, now_ns: int) -> list[Record]:
    """Events as the log takes them, numbered on from a sequence."""
    records = []
    for sequence, event in enumerate(made, after + 1):
        event.sequence = sequence
        event.time.FromNanoseconds(now_ns)
        records.append(
            Record(sequence=sequence, kind=events.kind_of(event), data=event.SerializeToString(), event=event)
        )
    return records
