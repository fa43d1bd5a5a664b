"""Runs of the desk's paced agent, which go on without the client that started them, and clients that follow them."""

import time

from grpc import aio

from bench.desk_team import QUESTION
from bench.desk_turns import PASSTHROUGH
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, message_pb2, policy_pb2

SECONDS = 60.0
"""How long a run may take."""


async def started(channel: aio.Channel) -> str:
    """Start a run in which every delta is an event; return its id."""
    request = agent_service_pb2.RunRequest(
        agent="paced_lead",
        input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=QUESTION)]),
        policy=policy_pb2.RunPolicy(deltas=PASSTHROUGH, on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE),
    )
    stream = agent_service_pb2_grpc.AgentServiceStub(channel).Run(request, timeout=SECONDS)
    run_id = str(dict(await stream.initial_metadata())["bough-run-id"])
    stream.cancel()
    return run_id


class Follower:
    """A client that follows a run from its beginning."""

    def __init__(self, channel: aio.Channel, run_id: str) -> None:
        self._stub = agent_service_pb2_grpc.AgentServiceStub(channel)
        self._request = agent_service_pb2.WatchRunRequest(run_id=run_id)
        self.events: list[event_pb2.AgentEvent] = []
        self.times_ns: list[int] = []
        """When each event came, by the clock of the day."""

    async def follow(self) -> str:
        """Follow the run to its end; return why it could not be followed so far, or nothing."""
        try:
            async for response in self._stub.WatchRun(self._request, timeout=SECONDS):
                now = time.time_ns()
                self.events += response.batch.events
                self.times_ns += [now] * len(response.batch.events)
        except aio.AioRpcError as error:
            sequence = self.events[-1].sequence if self.events else 0
            return f"A follower got no further than event {sequence}: {error.code().name} {error.details()}"
        return ""
