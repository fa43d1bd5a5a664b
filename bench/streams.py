"""The streams case: how many answers of 50 pieces a second a server passes on before their readers notice.

A number of streams is too many if the first pieces of one in a hundred take more than 250 ms from the model server's
socket to the client, or if a run ends that much later than its answer. The streams begin spread over one second.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Final

from grpc import aio

from bench.desk_team import QUESTION, write_project
from bench.figures import Aim, CaseResult, Figure
from bench.servers import bough_server, model_server
from bench.waiting_calls import AGENT
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, message_pb2

PACE_MS: Final = 20
LATE_MS: Final = 250.0
STEP: Final = 20
ROUNDS: Final = 3
AIM: Final = Aim("more than", 159, "median")

_SECONDS: Final = 120.0
_AT_FIRST: Final = 60


@dataclass(frozen=True, slots=True)
class Stream:
    """How late the first piece of an answer came, and the end of its run, in milliseconds."""

    first: float
    end: float


async def measure(folder: Path, *, rounds: int = ROUNDS, at_first: int = _AT_FIRST) -> CaseResult:
    """Runs the case in an empty folder."""
    async with model_server(folder, scenario="streamed", delta_interval_ms=PACE_MS) as base_url:
        config = write_project(folder, base_url=base_url)
        async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
            agents = agent_service_pb2_grpc.AgentServiceStub(channel)
            await _streams(agents, STEP)  # a warm-up
            most = [float(await _find_most(agents, at_first)) for _ in range(rounds)]
    figure = Figure(case="streams", what=f"streams of a piece each {PACE_MS} ms", unit="streams", rounds=most, aim=AIM)
    return CaseResult(figures=[figure])


async def _find_most(agents: "agent_service_pb2_grpc.AgentServiceAsyncStub", at_first: int) -> int:
    """Return the largest number of streams, in steps, before the first that is too many."""
    for number in count(at_first, STEP):
        found = await _streams(agents, number)
        late = quantiles([stream.first for stream in found], n=100, method="inclusive")[98]
        if late > LATE_MS or max(stream.end for stream in found) > LATE_MS:
            return number - STEP
    raise AssertionError("it counts without an end")


async def _streams(agents: "agent_service_pb2_grpc.AgentServiceAsyncStub", number: int) -> Sequence[Stream]:
    return await asyncio.gather(*(_stream(agents, place / number) for place in range(number)))


async def _stream(agents: "agent_service_pb2_grpc.AgentServiceAsyncStub", delay: float) -> Stream:
    """Follow a run that begins after a delay, in seconds."""
    await asyncio.sleep(delay)
    said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=QUESTION)])
    request = agent_service_pb2.RunRequest(agent=AGENT, input=said)
    first, text = 0.0, ""
    async for response in agents.Run(request, timeout=_SECONDS):
        for event in response.batch.events:
            if event.HasField("llm_output_text_delta"):
                if not text:
                    first = _since(event.llm_output_text_delta.text.split()[0])
                text += event.llm_output_text_delta.text
    return Stream(first, _since(text.split()[-1]))


def _since(stamp: str) -> float:
    """The milliseconds since a time of the monotonic clock."""
    return (time.monotonic_ns() - int(stamp)) / 1e6
