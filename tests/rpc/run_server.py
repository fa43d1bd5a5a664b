"""A whole server on loopback with the team in code, and calls that start and follow runs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2, message_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub
from bough.v1.catalog_service_pb2_grpc import CatalogServiceStub
from bough.v1.eval_service_pb2_grpc import EvalServiceStub
from bough.v1.session_service_pb2_grpc import SessionServiceStub
from bough_server.app import App
from bough_server.settings import Settings
from tests.support.databases import database_in

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server and its services, as a client has them."""

    app: App
    channel: aio.Channel
    agents: Any
    trees: Any
    catalog: Any
    sessions: Any


@dataclass(slots=True, kw_only=True)
class Turn:
    """The events of one stream."""

    call: Any
    events: list[event_pb2.AgentEvent] = field(default_factory=list)
    through: int = 0

    @property
    def kinds(self) -> list[str]:
        """The payloads, in order."""
        return [str(event.WhichOneof("payload")) for event in self.events]

    async def run_id(self) -> str:
        """The run, as the initial metadata names it."""
        return str(dict(await self.call.initial_metadata())["bough-run-id"])

    async def until(self, kind: str) -> "Turn":
        """Read until an event of this kind has arrived."""
        while kind not in self.kinds:
            response = await self.call.read()
            assert response is not aio.EOF, f"the stream ended before {kind}: {self.kinds}"
            self._take(response)
        return self

    async def to_the_end(self) -> "Turn":
        """Read to the end of the stream. Raises AioRpcError if it fails."""
        while (response := await self.call.read()) is not aio.EOF:
            self._take(response)
        return self

    def _take(self, response: pb.RunResponse) -> None:
        self.events.extend(response.batch.events)
        self.through = response.batch.through_sequence


def settings(
    folder: Path,
    *,
    base: Path = _ROOT,
    exports_traces: bool = False,
    exports_metrics: bool = False,
    exports_logs: bool = False,
    **changes: Any,
) -> Settings:
    """Settings of a server with the team, a database in a folder, and any port; names are relative to `base`."""
    server = {"port": 0, **changes.pop("server", {})}
    return Settings.of(
        {
            "server": server,
            "storage": {"url": database_in(folder), "durability": "process"},
            "python": ["tests.rpc.agents"],
            **changes,
        },
        folder=base,
        exports_traces=exports_traces,
        exports_metrics=exports_metrics,
        exports_logs=exports_logs,
    )


@asynccontextmanager
async def served(made: Settings) -> AsyncIterator[Served]:
    """Serve these settings and connect."""
    async with App.open(made) as app, aio.insecure_channel(app.address) as channel:
        yield Served(
            app=app,
            channel=channel,
            agents=AgentServiceStub(channel),
            trees=EvalServiceStub(channel),
            catalog=CatalogServiceStub(channel),
            sessions=SessionServiceStub(channel),
        )


def said(text: str) -> message_pb2.Message:
    """A message of one text."""
    return message_pb2.Message(parts=[message_pb2.Part(text=text)])


def begin(server: Served, agent: str, text: str, *, timeout: float | None = None, **fields: Any) -> Turn:
    """Start a run."""
    request = pb.RunRequest(agent=agent, input=said(text), **fields)
    return Turn(call=server.agents.Run(request, timeout=timeout))


def watch(server: Served, run_id: str, **fields: Any) -> Turn:
    """Follow a run."""
    return Turn(call=server.agents.WatchRun(pb.WatchRunRequest(run_id=run_id, **fields)))


def sequences(events: Sequence[event_pb2.AgentEvent]) -> list[int]:
    """Return the sequences of events."""
    return [event.sequence for event in events]
