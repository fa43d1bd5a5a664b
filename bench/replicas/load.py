"""Runs a second of one, two and three servers, between which clients rotate."""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

from grpc import aio

from bench.figures import Figure
from bench.growth_project import ANSWER, write_growth_project
from bench.postgres import Postgres
from bench.programs import Program
from bench.servers import bough_server
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, message_pb2

SERVERS: Final = 3
ROUNDS: Final = 5
RUNS: Final = 384
AT_ONCE: Final = 32
_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round measured; CPU in milliseconds of a run."""

    runs_per_second: float
    servers_cpu: float
    database_cpu: float
    cores: float
    """How many cores the servers, the database and the client have kept busy."""


class Load:
    """A client of all servers, and the CPU of everything that works for it."""

    def __init__(self, servers: Sequence[Program], channels: Sequence[aio.Channel], database: Postgres) -> None:
        self._servers, self._database = servers, database
        self._agents = [agent_service_pb2_grpc.AgentServiceStub(channel) for channel in channels]
        self.failed = 0
        """Runs that did not end with their answer."""

    async def round(self, count: int) -> Round:
        """Execute runs on the first `count` servers, each on the next one."""
        start, before = time.perf_counter(), self._cpu_seconds()
        places, left = cycle(range(count)), iter(range(RUNS))
        await asyncio.gather(*(self._client(places, left) for _ in range(AT_ONCE)))
        seconds = time.perf_counter() - start
        servers, database, client = (now - then for now, then in zip(self._cpu_seconds(), before, strict=True))
        return Round(
            runs_per_second=RUNS / seconds,
            servers_cpu=servers * 1000 / RUNS,
            database_cpu=database * 1000 / RUNS,
            cores=(servers + database + client) / seconds,
        )

    def _cpu_seconds(self) -> tuple[float, float, float]:
        servers = sum(server.cpu_seconds() for server in self._servers)
        return servers, self._database.cpu_seconds(), time.process_time()

    async def _client(self, places: Iterator[int], left: Iterator[int]) -> None:
        for _ in left:
            end = event_pb2.AgentEvent()
            async for response in self._agents[next(places)].Run(_REQUEST, timeout=_SECONDS):
                end = response.batch.events[-1] if response.batch.events else end
            self.failed += [part.text for part in end.run_completed.final_answer.parts] != [ANSWER]


_REQUEST: Final = agent_service_pb2.RunRequest(
    agent="clerk", input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="What is it?")])
)


async def measured(folder: Path, database: Postgres, failures: list[str]) -> Sequence[Figure]:
    """Measure one, two and three servers in turns."""
    rounds: dict[int, list[Round]] = {count: [] for count in range(1, SERVERS + 1)}
    async with AsyncExitStack() as stack:
        config = write_growth_project(folder, storage=database.new_database())
        servers = [
            await stack.enter_async_context(bough_server(folder, config, name=f"bough-{number}"))
            for number in range(SERVERS)
        ]
        channels = [await stack.enter_async_context(aio.insecure_channel(server.address)) for server in servers]
        load = Load(servers, channels, database)
        counts = list(rounds)
        for number in range(ROUNDS + 1):
            counts.append(counts.pop(0))
            for count in counts:
                one = await load.round(count)
                if number:
                    rounds[count].append(one)
    failures += [f"{load.failed} runs did not end with their answer."] if load.failed else []
    return [figure for count in rounds for figure in _figures(count, rounds)]


def _figures(count: int, rounds: Mapping[int, Sequence[Round]]) -> Sequence[Figure]:
    servers = f"{count} server{'s' if count > 1 else ''}"
    here, one = rounds[count], rounds[1]
    beside = "1 server" if count > 1 else ""
    return [
        Figure(
            case="replicas",
            what=f"runs, {servers}, {AT_ONCE} at once",
            unit="runs/s",
            rounds=[each.runs_per_second for each in here],
            floor=beside,
            floor_rounds=[each.runs_per_second for each in one] if beside else (),
        ),
        Figure(
            case="replicas",
            what=f"CPU of a run, {servers}",
            unit="ms",
            rounds=[each.servers_cpu for each in here],
            floor="PostgreSQL's for it",
            floor_rounds=[each.database_cpu for each in here],
        ),
        Figure(
            case="replicas",
            what=f"busy cores, {servers}, PostgreSQL and the client",
            unit="cores",
            rounds=[each.cores for each in here],
            floor="cores of the machine",
            floor_rounds=[float(os.cpu_count() or 1)],
        ),
    ]
