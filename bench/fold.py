"""The fold case: stored bytes to an Invocation, on the log of a real turn of the desk that kept every delta."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk_team import SPECIALISTS, write_project
from bench.desk_turns import PASSTHROUGH, Turns
from bench.figures import Aim, CaseResult, Figure
from bench.long_logs import PRINCIPAL
from bench.servers import bough_server, model_server
from bough.v1 import execution_pb2
from bough_server.log import events
from bough_server.store.opening import open_store
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.tree.fold import fold_log

ROUNDS: Final = 9
REPEATS: Final = 200
"""How many folds a round makes."""

Log = Sequence[StoredEvent]


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    async with model_server(folder) as base_url:
        config = write_project(folder, base_url=base_url)
        async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
            failures = await Turns(channel).run(1, 1, delta=PASSTHROUGH)
    if failures:
        return CaseResult(figures=[], failures=failures)
    log = await _read(folder / "bench.db")
    ours: list[float] = []
    floor: list[float] = []
    for _ in range(ROUNDS + 1):
        ours.append(_speed(log, _fold))
        floor.append(_speed(log, _parse))
    deltas = sum(stored.kind in events.DELTA_KINDS for stored in log)
    figure = Figure(
        case="fold",
        what=f"fold of {len(log)} events, {deltas} of them deltas",
        unit="events/s",
        rounds=ours[1:],
        floor="parsing all but deltas",
        floor_rounds=floor[1:],
        aim=Aim("more than", 300_000, "median"),
    )
    return CaseResult(figures=[figure])


async def _read(path: Path) -> Log:
    """The one run's log, as it is on disk."""
    store = open_store(str(path))
    try:
        filtered = RunFilter(states=[execution_pb2.EXECUTION_STATE_SUCCEEDED])
        (run,), _ = await store.runs.list(PRINCIPAL, filtered, Page(size=2))
        log: list[StoredEvent] = []
        while page := await store.log.read(run.run_id, after=len(log)):
            log += page
        return log
    finally:
        await store.close()


def _speed(log: Log, read: Callable[[Log], None]) -> float:
    start = time.perf_counter()
    for _ in range(REPEATS):
        read(log)
    return len(log) * REPEATS / (time.perf_counter() - start)


def _fold(log: Log) -> None:
    record = fold_log(log, run_id="run", session_id="session")
    assert record.agents_total == 1 + len(SPECIALISTS), "the fold sees every agent"


def _parse(log: Log) -> None:
    for stored in log:
        if stored.kind not in events.DELTA_KINDS:
            events.parse(stored.data)
