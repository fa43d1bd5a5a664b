"""From an event's commit to a client that follows its run on another server than the one that executes it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import quantiles
from typing import Final

import psycopg
from grpc import aio

from bench.desk_team import write_project
from bench.desk_turns import fault_of
from bench.figures import Aim, Figure
from bench.replicas.runs import Follower, started
from bench.servers import bough_server, model_server

ROUNDS: Final = 5
TURNS: Final = 3
"""Turns of a round, one after the other; each has about 250 events."""

PACE_MS: Final = 10
FLOOR: Final = "on the run's own server"

_COMMITS: Final = """
SELECT sequence, (extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000000)::bigint * 1000
FROM events WHERE run_id = %s
"""
"""When each event was committed, in nanoseconds: right before the commit is flushed."""


async def measured(folder: Path, url: str, failures: list[str]) -> Sequence[Figure]:
    """Follow turns on the server that executes them, and on another one."""
    other: list[list[float]] = []
    own: list[list[float]] = []
    async with AsyncExitStack() as stack:
        base_url = await stack.enter_async_context(model_server(folder, delta_interval_ms=PACE_MS))
        config = write_project(folder, base_url=base_url, storage=url)
        servers = [await stack.enter_async_context(bough_server(folder, config, name=f"bough-{n}")) for n in range(2)]
        channels = [await stack.enter_async_context(aio.insecure_channel(server.address)) for server in servers]
        database = await stack.enter_async_context(await psycopg.AsyncConnection.connect(url, autocommit=True))
        for number in range(ROUNDS + 1):
            here, there = list[float](), list[float]()
            for _ in range(TURNS):
                run_id = await started(channels[0])
                followers = [Follower(channel, run_id) for channel in channels]
                faults = await asyncio.gather(*(follower.follow() for follower in followers))
                faults += [fault_of(follower.events) for follower in followers]
                if any(faults):
                    failures += filter(None, faults)
                    continue
                commits: dict[int, int] = dict(await (await database.execute(_COMMITS, [run_id])).fetchall())
                here += _delays(followers[0], commits)
                there += _delays(followers[1], commits)
            if number and here and there:
                own.append(here)
                other.append(there)
            channels.reverse()
    if not other:
        return []
    return [
        Figure(
            case="replicas",
            what=f"commit to a follower on another server: p{percent}",
            unit="ms",
            rounds=[_percentile(one, percent) for one in other],
            floor=FLOOR,
            floor_rounds=[_percentile(one, percent) for one in own],
            aim=Aim("under", 50, "median") if percent == 50 else None,
        )
        for percent in (50, 99)
    ]


def _delays(follower: Follower, commits: Mapping[int, int]) -> Sequence[float]:
    """Milliseconds from commits to the follower, of the events that were committed while it followed."""
    since = follower.times_ns[0]
    return [
        (came - commits[event.sequence]) / 1e6
        for event, came in zip(follower.events, follower.times_ns, strict=True)
        if commits[event.sequence] > since
    ]


def _percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]
