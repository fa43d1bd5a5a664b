"""What happens to runs that nobody executes any more: each is ended, whole; continuing them is not here."""

from bough.v1 import event_pb2
from bough_server import events
from bough_server.clock import Clock
from bough_server.endings import why_ended
from bough_server.runtime.closing import closing
from bough_server.runtime.invocations import Invocations
from bough_server.runtime.recorder import Recorder
from bough_server.store.ports import EventLog, RunRecord


async def close_open_run(
    log: EventLog, record: RunRecord, clock: Clock, reason: event_pb2.CancelReason.ValueType
) -> None:
    """Ends every open invocation of a run once, leaf first, under a new epoch, and then the run.

    A wish to end the run that its log holds already is the one that counts; `reason` is for a log that has none.
    Raises Fenced where the run has ended, and StorageFailed.
    """
    run_id = record.run.run_id
    epoch, last = await log.take_over(run_id)
    invocations, wished = await _read(log, run_id)
    recorder = Recorder(log, run_id, epoch=epoch, last_sequence=last, clock=clock)
    wishes = []
    if not wished:
        wish = invocations.root().event("")
        wish.cancel_requested.reason = reason
        wishes.append(wish)
    error, below = why_ended(wished or reason)
    recorder.record([*wishes, *closing(invocations, "", error, below, clock.now_ns())])
    await recorder.committed()


async def _read(log: EventLog, run_id: str) -> tuple[Invocations, event_pb2.CancelReason.ValueType]:
    """What is open in a log, and why its run was to end; CANCEL_REASON_UNSPECIFIED where nobody wished it."""
    invocations, wished, after = Invocations(), event_pb2.CANCEL_REASON_UNSPECIFIED, 0
    while page := await log.read(run_id, after=after, deltas=False):
        for stored in page:
            event = events.parse(stored.data)
            invocations.observe(event)
            if event.HasField("cancel_requested") and not event.cancel_requested.scope:
                wished = wished or event.cancel_requested.reason
        after = page[-1].sequence
    return invocations, wished
