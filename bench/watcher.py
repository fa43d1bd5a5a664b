"""The catch-up case's client: follows a run from its beginning and parses every response; a program that answers lines.

A line `ADDRESS RUN_ID` gives how many events came, and the seconds from the call to its end.
"""

import asyncio
import time
from collections.abc import Mapping

from grpc import aio

from bench.lines import answer_lines
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc

_SECONDS = 120.0


async def watch(words: list[str]) -> Mapping[str, float]:
    """Follow one run on a separate connection."""
    address, run_id = words
    async with aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = agent_service_pb2_grpc.AgentServiceStub(channel)
        events = 0
        start = time.perf_counter()
        async for response in stub.WatchRun(agent_service_pb2.WatchRunRequest(run_id=run_id), timeout=_SECONDS):
            events += len(response.batch.events)
        return {"events": events, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    asyncio.run(answer_lines(watch))
