"""The recover case's processes: one goes on with every open run of a database, its floor only reads and parses them.

python -m bench.recoverer leaves|goes-on|reads

A line `FOLDER RUNS` gives, of the first, which fills the database, how many events there are and how many of them are
deltas; of the others the seconds and the CPU from opening the database until the work is done (every run's next model
call is asked; everything is parsed), and the most memory that was resident by then.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from bench.lines import answer_lines
from bench.open_runs import Silence, leave_open, open_run_ids, team_harness
from bench.programs import memory_megabytes
from bough_server.log import events
from bough_server.observability.logs import configure_logging
from bough_server.runs.close import read_log
from tests.support.run_harness import RunHarness

PATIENCE: Final = 240.0
"""Seconds that the work may take: less than those that are waited for an answer."""


async def leaves(folder: Path, runs: int) -> Mapping[str, float]:
    """Records the runs."""
    kinds = await leave_open(folder, runs)
    return {"events": kinds.total(), "deltas": sum(kinds[kind] for kind in events.DELTA_KINDS)}


async def goes_on(harness: RunHarness, silence: Silence) -> None:
    """Recovers as a server does that starts, until every run waits for its model."""
    await harness.runs.recover()
    async with asyncio.timeout(PATIENCE):
        await silence.reached.wait()


async def reads(harness: RunHarness, silence: Silence) -> None:
    """Reads and parses what a recovery reads, and keeps nothing."""
    for run_id in await open_run_ids(harness):
        await read_log(harness.store.log, run_id)


async def measured(
    work: Callable[[RunHarness, Silence], Awaitable[None]], folder: Path, runs: int
) -> Mapping[str, float]:
    """Does the work on a database once."""
    silence = Silence(runs)
    start, cpu = time.perf_counter(), time.process_time()
    async with team_harness(folder, silence) as harness:
        await work(harness, silence)
        told = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        return {**told, "megabytes": memory_megabytes("self", "VmHWM")}


async def _main(kind: str) -> None:
    async def answer(words: list[str]) -> Mapping[str, float]:
        folder, runs = Path(words[0]), int(words[1])
        if kind == "leaves":
            return await leaves(folder, runs)
        return await measured({"goes-on": goes_on, "reads": reads}[kind], folder, runs)

    configure_logging("error")  # to standard error: the answers go to standard output
    await answer_lines(answer)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
