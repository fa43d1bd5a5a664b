"""The catch-up case: events a second of a long finished run, beside bare streams of the same messages, prepared."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk_team import write_project
from bench.figures import Aim, CaseResult, Figure
from bench.long_logs import NOW_NS, deltas, end, new_run
from bench.programs import Program, asked, serving
from bench.servers import bough_server
from bench.stream_floor import METHOD, SERVICE, write_messages
from bough.v1 import agent_service_pb2
from bough_server import ids
from bough_server.store.opening import open_store

EVENTS: Final = 100_000
ROUNDS: Final = 7
BYTES: Final = "bare grpc.aio, bytes"
MESSAGES: Final = "bare grpc.aio, messages"
_OURS: Final = "bough"
_NO_MODEL: Final = "http://127.0.0.1:9/v1"
_SECONDS: Final = 120.0


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    run_id = await _written(folder / "bench.db")
    async with bough_server(folder, write_project(folder, base_url=_NO_MODEL)) as ours:
        kept = folder / "messages"
        await _recorded(ours.address, run_id, kept)
        floor = ("-m", "bench.stream_floor", str(kept))
        async with (
            serving(folder, "messages-floor", (*floor, "--parsed")) as messages,
            serving(folder, "bytes-floor", floor) as data,
            asked(folder, "watcher") as watcher,
        ):
            rounds = await _raced({_OURS: ours, MESSAGES: messages, BYTES: data}, watcher, run_id)
    figures = [
        Figure(
            case="catch-up",
            what=f"WatchRun of {EVENTS:,} events",
            unit="events/s",
            rounds=rounds[_OURS],
            floor=name,
            floor_rounds=rounds[name],
            aim=Aim("more than", 0.5),
        )
        for name in (MESSAGES, BYTES)
    ]
    return CaseResult(figures=figures)


async def _raced(servers: Mapping[str, Program], watcher: Program, run_id: str) -> Mapping[str, Sequence[float]]:
    """Events a second, by server and round; each round begins with another server, and the first is a warm-up."""
    rounds: dict[str, list[float]] = {name: [] for name in servers}
    names = list(servers)
    for number in range(ROUNDS + 1):
        names.append(names.pop(0))
        for name in names:
            speed = await _speed(watcher, servers[name], run_id)
            if number:
                rounds[name].append(speed)
    return rounds


async def _written(path: Path) -> str:
    """Writes a finished run of so many events; gives its id."""
    run_id = ids.new_uuid7(NOW_NS)
    store = open_store(str(path), durability="process")
    try:
        await store.log.create(new_run(run_id))
        records = [*deltas(run_id, EVENTS - 2), end(run_id, EVENTS)]
        for start in range(0, len(records), 1000):
            await store.log.append(run_id, epoch=1, log_events=records[start : start + 1000])
    finally:
        await store.close()
    return run_id


async def _recorded(address: str, run_id: str, path: Path) -> None:
    """Keeps the messages that the server sends, so that its floor sends the same."""
    async with aio.insecure_channel(address) as channel:
        watch: aio.UnaryStreamMultiCallable[agent_service_pb2.WatchRunRequest, bytes] = channel.unary_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=agent_service_pb2.WatchRunRequest.SerializeToString
        )
        request = agent_service_pb2.WatchRunRequest(run_id=run_id)
        write_messages(path, [message async for message in watch(request, timeout=_SECONDS)])


async def _speed(watcher: Program, server: Program, run_id: str) -> float:
    told = await watcher.ask(server.address, run_id)
    if told["events"] != EVENTS:
        raise ValueError(f"{told['events']:.0f} events came instead of {EVENTS}")
    return told["events"] / told["seconds"]
