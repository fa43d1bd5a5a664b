"""The services of a server, made of what they serve."""

from collections.abc import Callable
from dataclasses import dataclass

from grpc import aio

from bough.v1 import (
    access_service_pb2_grpc,
    agent_service_pb2_grpc,
    catalog_service_pb2_grpc,
    eval_service_pb2_grpc,
    session_service_pb2_grpc,
    usage_service_pb2_grpc,
)
from bough_server.agents.editing import AgentEditor
from bough_server.api.access_service import AccessService
from bough_server.api.agent_service import AgentService
from bough_server.api.catalog_service import CatalogService
from bough_server.api.eval_service import EvalService
from bough_server.api.session_service import SessionService
from bough_server.api.usage_service import UsageService
from bough_server.evals.job.evaluations import Evaluations
from bough_server.identity import Caller
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.runs import Runs
from bough_server.store.sql.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the services of a server are made of."""

    runs: Runs
    evaluations: Evaluations
    store: Store
    dependencies: RunDependencies

    def add_to(self, server: aio.Server, *, caller: Callable[[], Caller]) -> None:
        """Add every service of the schema to a server; `caller` returns the caller of the call in progress."""
        runs, store, clock, agents = self.runs, self.store, self.dependencies.clock, self.dependencies.agents
        access = AccessService(caller=caller)
        access_service_pb2_grpc.add_AccessServiceServicer_to_server(access, server)
        agent = AgentService(runs=runs, caller=caller, clock=clock)
        agent_service_pb2_grpc.add_AgentServiceServicer_to_server(agent, server)
        evals = EvalService(runs=runs, log=store.log, evaluations=self.evaluations, caller=caller, clock=clock)
        eval_service_pb2_grpc.add_EvalServiceServicer_to_server(evals, server)
        catalog = CatalogService(
            agents=agents, editor=AgentEditor(agents, store.agents, clock), revisions=store.catalog, caller=caller
        )
        catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server(catalog, server)
        sessions = SessionService(
            sessions=store.sessions,
            blobs=store.blobs,
            changing=self.dependencies.session_locks,
            caller=caller,
            clock=clock,
        )
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
        usage = UsageService(
            ledger=store.usage,
            accounts=self.dependencies.accounts,
            store=store.accounts,
            quotas=self.dependencies.quotas,
            caller=caller,
            clock=clock,
        )
        usage_service_pb2_grpc.add_UsageServiceServicer_to_server(usage, server)
