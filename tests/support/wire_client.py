"""A server as the wire has it: bare stubs and turns, without the client that comes back by itself."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import eval_service_pb2, event_pb2, execution_pb2, invocation_pb2, run_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub
from bough.v1.catalog_service_pb2_grpc import CatalogServiceStub
from bough.v1.eval_service_pb2_grpc import EvalServiceStub
from bough.v1.session_service_pb2_grpc import SessionServiceStub
from tests.rpc.run_server import Turn, said

Option = tuple[str, int]

NARROW: Sequence[Option] = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
"""A channel that takes little more than is read: a reader that pauses is felt by its server."""

NO_RETRIES: Sequence[Option] = (("grpc.enable_retries", 0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A channel to a server and its services."""

    channel: aio.Channel
    agents: Any
    trees: Any
    catalog: Any
    sessions: Any

    def begin(self, agent: str, text: str = "hi", *, metadata: Sequence[tuple[str, str]] = (), **fields: Any) -> Turn:
        """Starts a turn."""
        return Turn(call=self.agents.Run(pb.RunRequest(agent=agent, input=said(text), **fields), metadata=metadata))

    def watch(self, run_id: str, **fields: Any) -> Turn:
        """Follows a run."""
        return Turn(call=self.agents.WatchRun(pb.WatchRunRequest(run_id=run_id, **fields)))

    async def log(self, run_id: str) -> list[event_pb2.AgentEvent]:
        """A run's events to its end."""
        return (await self.watch(run_id).to_the_end()).events

    async def run(self, run_id: str) -> run_pb2.Run:
        """One run."""
        response: pb.GetRunResponse = await self.agents.GetRun(pb.GetRunRequest(run_id=run_id))
        return response.run

    async def running(self) -> list[str]:
        """The ids of the runs that go on."""
        states = [execution_pb2.EXECUTION_STATE_PENDING, execution_pb2.EXECUTION_STATE_RUNNING]
        request = pb.ListRunsRequest(filter=run_pb2.RunFilter(states=states))
        return [run.run_id for run in (await self.agents.ListRuns(request)).runs]

    async def tree(self, run_id: str) -> invocation_pb2.Invocation:
        """The record of a run."""
        request = eval_service_pb2.GetInvocationRequest(run_id=run_id)
        response: eval_service_pb2.GetInvocationResponse = await self.trees.GetInvocation(request)
        return response.invocation


@asynccontextmanager
async def connected(address: str, *, options: Sequence[Option] = NO_RETRIES) -> AsyncIterator[Remote]:
    """A server by its address, on a separate connection."""
    # Channels with equal options share a connection, and one that pauses would hold up the other.
    async with aio.insecure_channel(address, options=(*options, ("grpc.use_local_subchannel_pool", 1))) as channel:
        yield Remote(
            channel=channel,
            agents=AgentServiceStub(channel),
            trees=EvalServiceStub(channel),
            catalog=CatalogServiceStub(channel),
            sessions=SessionServiceStub(channel),
        )
