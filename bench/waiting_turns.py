"""Turns of one model call against a server, all at once: checked and timed, or left to wait; it sums nothing up."""

import asyncio
import time
from typing import Final

from grpc import aio

from bench.desk_team import QUESTION
from bench.waiting_calls import AGENT, TEXT
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, message_pb2, policy_pb2

_SECONDS: Final = 120.0


class WaitingTurns:
    """A client that runs turns."""

    def __init__(self, channel: aio.Channel) -> None:
        self._agents = agent_service_pb2_grpc.AgentServiceStub(channel)
        self._held: list[asyncio.Task[float | None]] = []

    async def run(self, count: int) -> list[float | None]:
        """The seconds that each of so many turns took, until its last event was here; None for one that failed."""
        return await asyncio.gather(*(self._turn() for _ in range(count)))

    async def hold(self, count: int) -> None:
        """Begins so many more turns and leaves them to wait."""
        self._held += [asyncio.create_task(self._turn()) for _ in range(count)]

    async def let_go(self) -> None:
        """Leaves those that wait, which cancels them at once."""
        for task in self._held:
            task.cancel()
        await asyncio.wait(self._held)

    async def _turn(self) -> float | None:
        start = time.perf_counter()
        try:
            stream = self._agents.Run(_request(), timeout=_SECONDS)
            events = [event async for response in stream for event in response.batch.events]
        except aio.AioRpcError:
            return None
        return time.perf_counter() - start if events and _is_answer(events[-1]) else None


def _is_answer(end: event_pb2.AgentEvent) -> bool:
    return [part.text for part in end.run_completed.final_answer.parts if part.text] == [TEXT]


def _request() -> agent_service_pb2.RunRequest:
    policy = policy_pb2.RunPolicy()
    policy.disconnect_grace.FromNanoseconds(0)
    said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=QUESTION)])
    return agent_service_pb2.RunRequest(agent=AGENT, input=said, policy=policy)
