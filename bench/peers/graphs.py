"""python -m bench.peers.graphs: the CPU and time of a visit of a graph's node, beside langgraph's; prints Markdown.

Both keep every step in SQLite, committed before the next one. CPU is that of the process that runs the graph:
`bough serve`, which also sends every event to a client, and a program that only invokes the graph.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from grpc import aio

from bench.peers import environments
from bench.peers.contestants import QUIET
from bench.peers.graph_shapes import LOOPS, VISITS, Edges, chain, fan_out
from bench.programs import Program, running
from bench.servers import bough_server
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, message_pb2

ROUNDS: Final = 3
_NAMES: Final = ("chain", "fan", "loop", "dag")

_CODE: Final = f"""
from bough_server import node, router


@node
def nothing(value):
    return value


@router
def until_done(output, snapshot):
    return "END" if snapshot.visit == {LOOPS - 1} else "again"
"""


def _straight(name: str, edges: Edges, *, mode: str = "PREGEL") -> dict[str, object]:
    nodes = dict.fromkeys(target for _, target in edges if target != "END")
    join = {"join": "ALL", "input": [{"value": 1}]}
    described = [{"name": each, "function": "nothing", **(join if each == "join" else {})} for each in nodes]
    graph = {"mode": mode, "nodes": described, "edges": [list(edge) for edge in edges], "max_concurrency": 100}
    return {"name": name, "description": "Does nothing.", "graph": graph}


def _loop() -> dict[str, object]:
    branch = {"source": "again", "function": "until_done", "targets": ["again", "END"]}
    graph = {
        "max_supersteps": LOOPS,
        "nodes": [{"name": "again", "function": "nothing"}],
        "edges": [["START", "again"]],
        "branches": [branch],
    }
    return {"name": "loop", "description": "Does nothing.", "graph": graph}


def _write_project(folder: Path) -> Path:
    (folder / "graph_code.py").write_text(_CODE, encoding="utf-8")
    agents = [_straight("chain", chain()), _straight("fan", fan_out()), _loop(), _straight("dag", chain(), mode="DAG")]
    (folder / "agents.yaml").write_text("---\n".join(json.dumps(each) + "\n" for each in agents), encoding="utf-8")
    (folder / "script.yaml").write_text("agents: {}\n", encoding="utf-8")
    settings = {
        "storage": {"url": "bench.db"},
        "agents": ["agents.yaml"],
        "python": ["graph_code"],
        "models": {"default": {"provider": "scripted", "script": "script.yaml"}},
    }
    config = folder / "bough.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config


async def _measure(program: Program, run: Callable[[int], Awaitable[None]]) -> list[tuple[float, float]]:
    """Return the median CPU and time of a visit in milliseconds, for each shape."""
    found = []
    for number, visits in enumerate(VISITS.values()):
        await run(number)
        laps = []
        for _ in range(ROUNDS):
            cpu, begun = program.cpu_seconds(), time.perf_counter()
            await run(number)
            laps.append((program.cpu_seconds() - cpu, time.perf_counter() - begun))
        found.append((median(lap[0] for lap in laps) * 1e3 / visits, median(lap[1] for lap in laps) * 1e3 / visits))
    return found


async def _measure_bough(folder: Path) -> list[tuple[float, float]]:
    async with bough_server(folder, _write_project(folder)) as server, aio.insecure_channel(server.address) as channel:
        agents = agent_service_pb2_grpc.AgentServiceStub(channel)
        said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="x")])

        async def run(number: int) -> None:
            request = agent_service_pb2.RunRequest(agent=_NAMES[number], input=said)
            is_done = False
            async for response in agents.Run(request):
                is_done = is_done or any(event.HasField("run_completed") for event in response.batch.events)
            assert is_done, "the graph answered"

        return await _measure(server, run)


async def _measure_langgraph(folder: Path) -> list[tuple[float, float]]:
    python = environments.python_of("langgraph")
    arguments = ("-m", "bench.peers.langgraph_graphs", str(folder / "checkpoints.db"))
    async with running(
        folder, "langgraph_graphs", arguments, python=python, environment=QUIET, takes_lines=True
    ) as program:

        async def run(number: int) -> None:
            await program.ask(number)

        return await _measure(program, run)


def markdown(results: Sequence[tuple[str, list[tuple[float, float]]]]) -> str:
    """Return a table of milliseconds of a visit."""
    head = "| ms of a visit | " + " | ".join(f"CPU, {name} | time, {name}" for name in VISITS) + " |"
    rule = "|---|" + "--:|--:|" * len(VISITS)
    rows = [
        f"| {name} | " + " | ".join(f"{cpu:.2f} | {wall:.2f}" for cpu, wall in found) + " |" for name, found in results
    ]
    return "\n".join([head, rule, *rows])


def main() -> int:
    """Measure both, and print the table."""
    Path("var").mkdir(exist_ok=True)
    # Beside the reports, on a disk: in memory a durable commit costs nothing.
    with tempfile.TemporaryDirectory(prefix="bench-graphs-", dir=Path("var").absolute()) as folder:
        results = []
        for name, measure in (
            ("`bough serve`", _measure_bough),
            ("langgraph, SQLite, sync", _measure_langgraph),
        ):
            place = Path(folder) / name.split()[0].strip("`,")
            place.mkdir()
            results.append((name, asyncio.run(measure(place))))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
