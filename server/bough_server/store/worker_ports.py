"""Ports for workers: leases, the mailbox of commands, stored agents.

For the revisions of definitions that runs name, see ports.Catalog.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bough.v1 import agent_pb2, agent_service_pb2, event_pb2
from bough_server.store.evaluation_ports import EvaluationIndex
from bough_server.store.ports import Blobs, Catalog, EventLog, RunIndex, Sessions


class Lease(Protocol):
    """Leases of workers. A worker owns runs by name; another worker takes them over once its lease has ended.

    No clocks are compared: a lease is a counter that its worker increments, so another worker can see that it has
    stopped.
    """

    async def renew(self, worker: str) -> None:
        """Increment a worker's counter; create its lease if it has none. Raises StorageFailed."""
        ...

    async def counters(self) -> Mapping[str, int]:
        """Return the counter of every worker with a lease. A worker without one is dead."""
        ...

    async def release(self, worker: str) -> None:
        """End a lease: the worker executes no runs any more."""
        ...

    def crashed(self, worker: str) -> bool:
        """True if a worker died without releasing its lease."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A command to the owner of a run or an evaluation: exactly one of `cancel` and `answers` is set."""

    command_id: int
    run_id: str
    """The run, or the evaluation, to which only `cancel` can be sent."""
    cancel: event_pb2.CancelRequested | None = None
    answers: agent_service_pb2.ResumeRunRequest | None = None
    user_id: str = ""
    """For answers: the user who sent them."""
    deadline_time_ns: int | None = None
    """For answers: their caller's deadline for the run, in nanoseconds since the Unix epoch."""


class Mailbox(Protocol):
    """Commands to runs and evaluations, durable until the owner has acted on them.

    Only the owner may append to a log, so other workers send it commands here. Readers of `arrivals` skip the ids that
    they do not find: a run's in Evaluations, an evaluation's in RunIndex.
    """

    async def post(self, command: RunCommand) -> int:
        """Store a command durably and return its id; its own id field is ignored.

        Raises NotFound, Fenced if the run has ended, and StorageFailed.
        """
        ...

    async def take(self, run_id: str) -> Sequence[RunCommand]:
        """Return a run's pending commands in the order they were posted; they stay pending until `done`."""
        ...

    async def done(self, command_id: int) -> None:
        """Delete a command whose events are committed."""
        ...

    def arrivals(self) -> AsyncIterator[str]:
        """Yield the ids of runs and evaluations with pending commands, then of those that commands are posted to.

        An id may repeat.

        Raises ServerStopping when the store is closed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAgents:
    """A tenant's agents in one consistent read, ordered by name."""

    version: int
    """How often they have been changed."""
    agents: Sequence[agent_pb2.Agent] = ()


class CatalogMoved(Exception):
    """The tenant's agents have changed since the caller read them: read them again and retry."""


class AgentStore(Protocol):
    """Agents by tenant and name. A change names the version it was checked against, and fails if that is outdated."""

    async def version(self, tenant_id: str) -> int:
        """Return how often a tenant's agents have been changed; cheap, because every start of a run calls it."""
        ...

    async def read(self, tenant_id: str) -> StoredAgents:
        """Return all agents of a tenant."""
        ...

    async def put(self, tenant_id: str, agent: agent_pb2.Agent, *, version: int) -> None:
        """Create or replace the agent of this name; `version` is the one that the change was checked against.

        Raises CatalogMoved and StorageFailed.
        """
        ...

    async def remove(self, tenant_id: str, name: str, *, version: int) -> None:
        """Remove an agent; `version` is the one that the removal was checked against.

        Raises CatalogMoved and StorageFailed.
        """
        ...


class RunStore(Protocol):
    """The ports of one store that runs are executed with."""

    @property
    def log(self) -> EventLog:
        """The logs of runs."""
        ...

    @property
    def runs(self) -> RunIndex:
        """The rows of runs."""
        ...

    @property
    def evaluations(self) -> EvaluationIndex:
        """The rows of evaluations."""
        ...

    @property
    def sessions(self) -> Sessions:
        """Sessions and their messages."""
        ...

    @property
    def blobs(self) -> Blobs:
        """The files of sessions."""
        ...

    @property
    def catalog(self) -> Catalog:
        """Definitions by revision."""
        ...

    @property
    def leases(self) -> Lease:
        """The leases of workers."""
        ...

    @property
    def mailbox(self) -> Mailbox:
        """Commands to runs of other workers."""
        ...
