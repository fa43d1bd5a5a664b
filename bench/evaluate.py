"""The evaluate case: an evaluation of scripted cases, beside the bare runs of the same work."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from grpc import aio

from bench.eval_project import expected, metrics, write_eval_project
from bench.figures import Aim, CaseResult, Figure
from bench.programs import Program
from bench.servers import bough_server
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    eval_result_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    eval_set_pb2,
    message_pb2,
)

CASES: Final = 1_000
JOBS: Final = 4
ROUNDS: Final = 3
LARGE: Final = 5_000
"""The cases of the set whose evaluation's memory is measured."""
_SECONDS: Final = 600.0
_TEXT: Final = "What is a bough?"


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    config = write_eval_project(folder)
    failures: list[str] = []
    evaluations, runs = list[float](), list[float]()
    async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
        await _run(channel, server, 50)
        for _ in range(ROUNDS):
            runs.append(await _run(channel, server, CASES))
            evaluations.append(await _evaluate(channel, server, failures))
    figure = Figure(
        case="evaluate",
        what=f"CPU of a case of an evaluation of {CASES:,}, by trajectory, tree and budget",
        unit="ms",
        rounds=evaluations,
        floor=f"a bare run, {JOBS} at once",
        floor_rounds=runs,
    )
    (folder / "large").mkdir()
    return CaseResult(figures=[figure, await _measure_memory(folder / "large", failures)], failures=failures)


async def _measure_memory(folder: Path, failures: list[str]) -> Figure:
    """The memory of a new server that evaluates a large set."""
    config = write_eval_project(folder)
    async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
        await _evaluate(channel, server, failures, count=LARGE)
        peak = server.peak_megabytes()
    return Figure(
        case="evaluate",
        what=f"peak memory of the server, of an evaluation of {LARGE:,} cases",
        unit="MB",
        rounds=[peak],
        aim=Aim("under", 300, of="median"),
    )


async def _evaluate(channel: aio.Channel, server: Program, failures: list[str], *, count: int = CASES) -> float:
    """The CPU, in milliseconds, of each case of an evaluation."""
    turn = eval_set_pb2.EvalTurn(user=_TEXT, expect=expected("clerk", calls=0))
    cases = [eval_set_pb2.EvalCase(id=f"case-{number}", turns=[turn]) for number in range(count)]
    request = eval_service_pb2.EvaluateRequest(
        eval_set=eval_set_pb2.EvalSet(name="bench", agent="clerk", cases=cases), max_concurrency=JOBS
    )
    request.eval_set.defaults.metrics.extend(metrics())
    start, status = server.cpu_seconds(), eval_result_pb2.VERDICT_UNSPECIFIED
    async for response in eval_service_pb2_grpc.EvalServiceStub(channel).Evaluate(request, timeout=_SECONDS):
        for event in response.batch.events:
            if event.HasField("evaluation_completed"):
                status = event.evaluation_completed.verdict
    if status != eval_result_pb2.VERDICT_PASSED:
        failures.append("The evaluation did not pass.")
    return (server.cpu_seconds() - start) * 1000 / count


async def _run(channel: aio.Channel, server: Program, count: int) -> float:
    """The CPU, in milliseconds, of each of so many runs."""
    agents = agent_service_pb2_grpc.AgentServiceStub(channel)
    said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=_TEXT)])
    waiting = iter(range(count))

    async def work(numbers: Iterator[int]) -> None:
        for _ in numbers:
            async for _ in agents.Run(agent_service_pb2.RunRequest(agent="clerk", input=said), timeout=_SECONDS):
                pass

    start = server.cpu_seconds()
    await asyncio.gather(*(work(waiting) for _ in range(JOBS)))
    return (server.cpu_seconds() - start) * 1000 / count
