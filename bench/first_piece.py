"""The first-piece case: from the model server's socket to a client, for the first piece of a text, beside a bare call.

The text begins with the time at which the model server writes it: both processes read the same monotonic clock.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import quantiles
from typing import Final

import openai
from grpc import aio

from bench.desk import MANY, Shape
from bench.desk_team import INSTRUCTIONS, LOOKUP, QUESTION, write_project
from bench.figures import Aim, CaseResult, Figure
from bench.servers import bough_server, model_server
from bench.waiting_calls import AGENT
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, message_pb2

PACE_MS: Final = 10
FLOOR: Final = "bare openai, raw stream"
ONE: Final = Shape(name="1 at a time", turns=20, at_once=1, rounds=5)
ALL: Final = Shape(name=f"{MANY} at once", turns=MANY, at_once=MANY, rounds=5)
AIM: Final = Aim("under", 6, "median")

_SECONDS: Final = 120.0
_BODY: Final = {
    "model": "m",
    "messages": [{"role": "system", "content": INSTRUCTIONS[AGENT]}, {"role": "user", "content": QUESTION}],
    "tools": [LOOKUP],
    "stream": True,
    "stream_options": {"include_usage": True},
}

Entrant = Callable[[], Awaitable[float]]
"""Runs one turn; returns the milliseconds that its first piece took."""


async def measure(folder: Path, *, shapes: Sequence[Shape] = (ONE, ALL)) -> CaseResult:
    """Runs the case in an empty folder."""
    async with model_server(folder, scenario="stamped", delta_interval_ms=PACE_MS) as base_url:
        config = write_project(folder, base_url=base_url)
        async with (
            bough_server(folder, config) as server,
            aio.insecure_channel(server.address) as channel,
            _bare(base_url) as bare,
        ):
            figures = [figure for shape in shapes for figure in await _raced(shape, _ours(channel), bare)]
    return CaseResult(figures=figures)


async def _raced(shape: Shape, ours: Entrant, floor: Entrant) -> list[Figure]:
    """The median and the tenth that took longest, round by round; the first round is a warm-up."""
    rounds: dict[Entrant, list[list[float]]] = {ours: [], floor: []}
    for number in range(shape.warm_up + shape.rounds):
        for entrant in (ours, floor) if number % 2 else (floor, ours):
            tenths = quantiles(await _times(shape, entrant), n=10, method="inclusive")
            if number >= shape.warm_up:
                rounds[entrant].append(tenths)
    return [
        Figure(
            case="first-piece",
            what=f"model to client, {shape.name}: {name}",
            unit="ms",
            rounds=[tenths[index] for tenths in rounds[ours]],
            floor=FLOOR,
            floor_rounds=[tenths[index] for tenths in rounds[floor]],
            aim=AIM if shape.at_once == 1 and name == "p50" else None,
        )
        for name, index in (("p50", 4), ("p90", 8))
    ]


async def _times(shape: Shape, entrant: Entrant) -> list[float]:
    times: list[float] = []
    for _ in range(shape.turns // shape.at_once):
        times += await asyncio.gather(*(entrant() for _ in range(shape.at_once)))
    return times


def _since(text: str) -> float:
    """The milliseconds since the time that a text begins with."""
    return (time.monotonic_ns() - int(text.split()[0])) / 1e6


def _ours(channel: aio.Channel) -> Entrant:
    agents = agent_service_pb2_grpc.AgentServiceStub(channel)
    said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=QUESTION)])
    request = agent_service_pb2.RunRequest(agent=AGENT, input=said)

    async def turn() -> float:
        took: float | None = None
        async for response in agents.Run(request, timeout=_SECONDS):
            for event in response.batch.events:
                if took is None and event.HasField("llm_output_text_delta"):
                    took = _since(event.llm_output_text_delta.text)
        if took is None:
            raise ValueError("A run ended without a text.")
        return took

    return turn


@asynccontextmanager
async def _bare(base_url: str) -> AsyncIterator[Entrant]:
    transport = openai.DefaultAioHttpClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=transport) as client:

        async def turn() -> float:
            took: float | None = None
            async with client.chat.completions.with_streaming_response.create(**_BODY) as response:
                async for line in response.iter_lines():
                    if took is None and line.startswith("data: {"):
                        choices = json.loads(line[6:])["choices"]
                        text = choices[0]["delta"].get("content") if choices else None
                        took = _since(text) if text else None
            if took is None:
                raise ValueError("An answer ended without a text.")
            return took

        yield turn
