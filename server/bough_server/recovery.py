"""What happens to runs that a dead server left open: each is ended, whole; continuing them is not here."""

from bough.v1 import error_pb2, event_pb2
from bough_server import events
from bough_server.clock import Clock
from bough_server.runtime.closing import closing
from bough_server.runtime.invocations import Invocations
from bough_server.runtime.recorder import Recorder
from bough_server.store.ports import EventLog, RunRecord


async def close_open_run(
    log: EventLog, record: RunRecord, clock: Clock, error: error_pb2.AgentError, below: error_pb2.AgentError
) -> None:
    """Ends every open invocation of a run once, leaf first, under a new epoch, and then the run."""
    run_id = record.run.run_id
    epoch, last = await log.take_over(run_id)
    invocations = await _read(log, run_id)
    recorder = Recorder(log, run_id, epoch=epoch, last_sequence=last, clock=clock)
    root = invocations.root()
    wish = root.event("")
    wish.cancel_requested.reason = event_pb2.CANCEL_REASON_SERVER
    recorder.record([wish, *closing(invocations, "", error, below, clock.now_ns())])
    await recorder.committed()


async def _read(log: EventLog, run_id: str) -> Invocations:
    invocations, after = Invocations(), 0
    while page := await log.read(run_id, after=after, deltas=False):
        for stored in page:
            invocations.observe(events.parse(stored.data))
        after = page[-1].sequence
    return invocations
