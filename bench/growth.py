"""The growth case: CPU of a turn late in a session beside a first one, and of a late step of a run beside its first."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

from grpc import aio

from bench.figures import Aim, CaseResult, Figure
from bench.growth_project import ANSWER, STEPS, write_growth_project
from bench.programs import Program
from bench.servers import bough_server
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, message_pb2

TURNS: Final = (100, 1_000)
LATE_STEPS: Final = (50, 200)
ROUNDS: Final = 5
MEASURED: Final = 10
"""How many turns or steps a round measures together."""

_SECONDS: Final = 300.0
_AIMS: Final[Mapping[int, Aim]] = {1_000: Aim("under", 8, "median"), 200: Aim("under", 4, "median")}


class GrowthRuns:
    """A client that runs turns in sessions, and reads the server's CPU between them."""

    def __init__(self, channel: aio.Channel, server: Program) -> None:
        self._agents = agent_service_pb2_grpc.AgentServiceStub(channel)
        self._server = server
        self.failed = 0
        """Runs that did not end with their answer."""

    async def turns(self, session_id: str, count: int) -> float:
        """The CPU, in milliseconds, of each of so many turns: of one session, or each in a new one if that is empty."""
        start = self._server.cpu_seconds()
        for _ in range(count):
            end = event_pb2.AgentEvent()
            async for event in self._events("clerk", session_id):
                end = event
            self.failed += [part.text for part in end.run_completed.final_answer.parts] != [ANSWER]
        return (self._server.cpu_seconds() - start) * 1000 / count

    async def steps(self) -> Sequence[float]:
        """The CPU seconds of the server at the start of each step of a run, read as soon as its event is here."""
        began: list[float] = []
        end = event_pb2.AgentEvent()
        async for event in self._events("stepper", ""):
            if event.HasField("llm_started"):
                began.append(self._server.cpu_seconds())
            end = event
        self.failed += not end.HasField("run_completed") or len(began) != STEPS
        return began

    async def _events(self, agent: str, session_id: str) -> AsyncIterator[event_pb2.AgentEvent]:
        said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="What is a bough?")])
        create = agent_service_pb2.MISSING_SESSION_POLICY_CREATE if session_id else None
        request = agent_service_pb2.RunRequest(
            agent=agent, input=said, session_id=session_id, on_missing_session=create
        )
        async for response in self._agents.Run(request, timeout=_SECONDS):
            for event in response.batch.events:
                yield event


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    config = write_growth_project(folder)
    async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
        runs = GrowthRuns(channel, server)
        figures = [*await _turns(runs), *await _steps(runs)]
    failures = [f"{runs.failed} runs did not end with their answer."] if runs.failed else []
    return CaseResult(figures=figures, failures=failures)


async def _turns(runs: GrowthRuns) -> Sequence[Figure]:
    """A session's turns 100 and 1,000, each round beside as many first turns of new sessions."""
    session_id, made = f"bench-{uuid4()}", 0
    await runs.turns("", MEASURED)
    figures: list[Figure] = []
    for number in TURNS:
        await runs.turns(session_id, number - made)
        late, first = list[float](), list[float]()
        for _ in range(ROUNDS):
            first.append(await runs.turns("", MEASURED))
            late.append(await runs.turns(session_id, MEASURED))
        made = number + ROUNDS * MEASURED
        figures.append(_figure(f"CPU of turn {number:,} of a session", late, "turn 1", first, _AIMS.get(number)))
    return figures


async def _steps(runs: GrowthRuns) -> Sequence[Figure]:
    """A run's steps 50 and 200, each beside its first steps."""
    began = [await runs.steps() for _ in range(ROUNDS)]
    if any(len(one) != STEPS for one in began):
        return []
    first = [_each(one, 1) for one in began]
    return [
        _figure(
            f"CPU of step {number} of an agent",
            [_each(one, number - MEASURED // 2) for one in began],
            "step 1",
            first,
            _AIMS.get(number),
        )
        for number in LATE_STEPS
    ]


def _each(began: Sequence[float], number: int) -> float:
    """The milliseconds of each of a few steps, the first of which has this number, from 1."""
    return (began[number - 1 + MEASURED] - began[number - 1]) * 1000 / MEASURED


def _figure(what: str, rounds: Sequence[float], floor: str, floor_rounds: Sequence[float], aim: Aim | None) -> Figure:
    return Figure(case="growth", what=what, unit="ms", rounds=rounds, floor=floor, floor_rounds=floor_rounds, aim=aim)
