"""Progress of runs: the events that count as progress, crashes of servers without it, and waiting for it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Final, cast

from bough.v1 import event_pb2
from bough_server.errors import Fenced, RunParked, ServerStopping, StorageFailed
from bough_server.log import events
from bough_server.runs.close import read_log
from bough_server.runs.follow import Pages
from bough_server.runs.live import LiveRun
from bough_server.store.ports.log import EventLog
from bough_server.store.ports.runs import RunRow

SUSPECT_SECONDS: Final = 60.0
"""Seconds that a run may take for progress after several crashes, before the next such run is continued."""

FIRST_EPOCH: Final = 1
"""The epoch of a run under its first owner."""

PROGRESS: Final = frozenset(
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


def count_crashes_in(log: Sequence[event_pb2.AgentEvent]) -> int:
    """Count the recorded crashes of a run's servers since its last progress.

    Those while it was queued do not count: it cannot make progress then.
    """
    count, is_waiting = 0, False
    for event in _skip_to_progress(log):
        if event.HasField("run_queued") or event.HasField("run_dequeued"):
            is_waiting = event.HasField("run_queued")
        elif event.HasField("run_resumed"):
            count += not is_waiting and event.run_resumed.cause == event_pb2.RESUME_CAUSE_RECOVERY
    return count


def _skip_to_progress(log: Sequence[event_pb2.AgentEvent]) -> Sequence[event_pb2.AgentEvent]:
    """Return the events after a run's last progress; before that it was not queued."""
    for index in reversed(range(len(log))):
        if events.kind_of(log[index]) in PROGRESS:
            return log[index + 1 :]
    return log


async def count_crashes(log: EventLog, run_row: RunRow) -> int:
    """Return how many servers crashed with a run since its last progress, not counting the last one."""
    if run_row.epoch <= FIRST_EPOCH:
        return 0  # it has had one server: its log need not be read
    try:
        return count_crashes_in(await read_log(log, run_row.run.run_id))
    except Exception:  # one bad log must not keep the others from being continued
        return 0  # continuing it finds that out as well, and handles or logs it


async def wait_for_progress(log: EventLog, live: LiveRun, *, after: int) -> None:
    """Wait until a run has made progress after a sequence, is no longer live, or SUSPECT_SECONDS are over."""
    progress = asyncio.ensure_future(_wait_for_progress(log, live.run_id, after))
    over = asyncio.ensure_future(live.wait_for_end())
    try:
        await asyncio.wait({progress, over}, timeout=SUSPECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        progress.cancel()
        over.cancel()
        await asyncio.wait({progress, over})


async def _wait_for_progress(log: EventLog, run_id: str, after: int) -> None:
    """Wait until a run has recorded the result of an effect, or its log has ended."""
    tail = cast(Pages, log.tail(run_id, after=after))
    with suppress(StorageFailed, Fenced, RunParked, ServerStopping):
        async with aclosing(tail):
            async for page in tail:
                if any(stored.kind in PROGRESS for stored in page):
                    return
