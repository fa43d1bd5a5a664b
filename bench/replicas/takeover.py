"""From the SIGKILL of a server to the first event that another one adds to its run."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk_team import write_project
from bench.figures import Aim, Figure
from bench.programs import Program
from bench.replicas.runs import Follower, started
from bench.servers import bough_server, model_server
from tests.support.model_scenarios import TEXT

PACE_MS: Final = 20
LATEST: Final = 2.0
"""A server is killed at most so many seconds after its run began; a lease is renewed as often, a turn takes longer."""

MOST_MS: Final = 10_000.0


class Pair:
    """Two servers; when the older one is killed, another one takes its place."""

    def __init__(self, folder: Path, config: Path, stack: AsyncExitStack) -> None:
        self._folder, self._config, self._stack = folder, config, stack
        self._started = 0
        self.servers: list[Program] = []

    async def fill(self) -> None:
        """Start servers until there are two."""
        while len(self.servers) < 2:
            self._started += 1
            server = bough_server(self._folder, self._config, name=f"bough-{self._started}")
            self.servers.append(await self._stack.enter_async_context(server))


async def measured(folder: Path, url: str, failures: list[str], *, kills: int) -> Sequence[Figure]:
    """Kill so many servers in the middle of a run that is followed on the other one."""
    times = list[float]()
    moments = random.Random(7)
    async with AsyncExitStack() as stack:
        base_url = await stack.enter_async_context(model_server(folder, delta_interval_ms=PACE_MS))
        pair = Pair(folder, write_project(folder, base_url=base_url, storage=url), stack)
        for _ in range(kills):
            await pair.fill()
            owner, other = pair.servers
            times += await _taken_over(owner, other, moments.uniform(0, LATEST), failures)
            pair.servers.remove(owner)
    if not times:
        return []
    return [
        Figure(case="replicas", what="takeover after SIGKILL: p50", unit="ms", rounds=times),
        Figure(
            case="replicas",
            what=f"takeover after SIGKILL: the longest of {kills}",
            unit="ms",
            rounds=[max(times)],
            aim=Aim("under", MOST_MS, "median"),
        ),
    ]


async def _taken_over(owner: Program, other: Program, after: float, failures: list[str]) -> Sequence[float]:
    """Kill the owner of a run some seconds after its start; return the milliseconds until the run was resumed.

    Nothing is returned if it was not resumed.
    """
    async with aio.insecure_channel(owner.address) as channel:
        run_id = await started(channel)
    async with aio.insecure_channel(other.address) as channel:
        follower = Follower(channel, run_id)
        following = asyncio.create_task(follower.follow())
        await asyncio.sleep(after)
        killed = time.time_ns()
        await owner.kill()
        failures += filter(None, [await following])
    failures += _faults(follower)
    came = zip(follower.events, follower.times_ns, strict=True)
    return [(time_ns - killed) / 1e6 for event, time_ns in came if event.HasField("run_resumed")][:1]


def _faults(follower: Follower) -> Sequence[str]:
    """What is wrong with the log of a run whose server was killed."""
    events = follower.events
    sequences = [event.sequence for event in events]
    answer = "".join(part.text for part in events[-1].run_completed.final_answer.parts) if events else ""
    faults = []
    if sequences != list(range(1, len(events) + 1)):
        faults.append(f"After a kill, the sequences are not each there once: {sequences}")
    if answer != TEXT:
        faults.append(f"After a kill, the answer is {answer[:80]!r}.")
    if sum(event.HasField("run_resumed") for event in events) != 1:
        faults.append("After a kill, the run was not resumed once.")
    return faults
