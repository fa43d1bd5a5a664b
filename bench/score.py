"""The score case: stored runs scored by trajectory, tree and budget, beside reading their trees; and its memory."""

from pathlib import Path
from typing import Final

from grpc import aio

from bench.eval_project import STEPS, expected, metrics, write_eval_project
from bench.figures import Aim, CaseResult, Figure
from bench.programs import Program
from bench.servers import bough_server
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    eval_result_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    invocation_pb2,
    message_pb2,
)

RUNS: Final = 10
"""How many different runs are stored; every one is judged again and again, and read anew each time."""

IN_A_CALL: Final = 250
COUNT: Final = 1_000
ROUNDS: Final = 3
_SECONDS: Final = 600.0


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    config = write_eval_project(folder)
    async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
        scorer = _Scorer(channel, server)
        await scorer.store()
        await scorer.score(IN_A_CALL)
        scores = [await scorer.score(COUNT) for _ in range(ROUNDS)]
        reads = [await scorer.read(COUNT) for _ in range(ROUNDS)]
        before = server.resident_megabytes()
        await scorer.score(2 * COUNT)
        grown = server.resident_megabytes() - before
    what = f"stored runs of {scorer.events} events scored by trajectory, tree and budget"
    figures = [
        Figure(
            case="score",
            what=f"{what}, {IN_A_CALL} in a call",
            unit="runs/s",
            rounds=scores,
            floor="reading their trees, one call each",
            floor_rounds=reads,
        ),
        Figure(
            case="score",
            what=f"memory that {2 * COUNT:,} of them add",
            unit="MB",
            rounds=[grown],
            aim=Aim("under", 32, "median"),
        ),
    ]
    return CaseResult(figures=figures, failures=scorer.failures)


class _Scorer:
    """A client that stores runs and has them scored; speeds are by the CPU of the server."""

    def __init__(self, channel: aio.Channel, server: Program) -> None:
        self._agents = agent_service_pb2_grpc.AgentServiceStub(channel)
        self._evals = eval_service_pb2_grpc.EvalServiceStub(channel)
        self._server = server
        self._runs: list[str] = []
        self.events = 0
        self.failures: list[str] = []

    async def store(self) -> None:
        """Runs what is scored."""
        said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="What is a bough?")])
        for _ in range(RUNS):
            call = self._agents.Run(agent_service_pb2.RunRequest(agent="searcher", input=said), timeout=_SECONDS)
            async for response in call:
                self.events = response.batch.through_sequence
            self._runs.append(str(dict(await call.initial_metadata())["bough-run-id"]))

    async def score(self, count: int) -> float:
        """How many runs a second of CPU scores."""
        sources = [
            invocation_pb2.InvocationSource(run=invocation_pb2.RunRef(run_id=self._runs[number % RUNS]))
            for number in range(IN_A_CALL)
        ]
        request = eval_service_pb2.ScoreInvocationsRequest(
            invocations=sources, expect=expected("searcher", calls=STEPS - 1), metrics=metrics()
        )
        start = self._server.cpu_seconds()
        for _ in range(count // IN_A_CALL):
            found = (await self._evals.ScoreInvocations(request, timeout=_SECONDS)).result
            if found.verdict != eval_result_pb2.VERDICT_PASSED:
                self.failures.append(f"Of {IN_A_CALL} runs {found.totals.cases_passed} passed.")
        return count / (self._server.cpu_seconds() - start)

    async def read(self, count: int) -> float:
        """How many trees a second of CPU reads."""
        start = self._server.cpu_seconds()
        for number in range(count):
            request = eval_service_pb2.GetInvocationRequest(run_id=self._runs[number % RUNS])
            await self._evals.GetInvocation(request, timeout=_SECONDS)
        return count / (self._server.cpu_seconds() - start)
