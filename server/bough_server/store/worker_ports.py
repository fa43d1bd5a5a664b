"""Ports for workers: leases, the mailbox of commands, stored agents.

The revisions of agents, as runs name them, are in ports.Catalog.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bough.v1 import agent_pb2, agent_service_pb2, execution_pb2


class Lease(Protocol):
    """Which workers are alive. A worker owns runs by name; whoever finds its lease dead takes them over.

    No clock is compared: a lease is a counter that its worker raises, and a taker watches it stand still.
    """

    async def renew(self, worker: str) -> None:
        """Raises a worker's counter; makes its lease where there is none. Raises StorageFailed."""
        ...

    async def counters(self) -> Mapping[str, int]:
        """Every worker with a lease, and its counter. A worker without one is dead."""
        ...

    async def release(self, worker: str) -> None:
        """Ends a lease: the worker executes nothing any more."""
        ...

    def crashed(self, worker: str) -> bool:
        """Whether a worker was found dead with its lease: it did not come to its end by itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A command on its way to the owner of a run: exactly one of the two is set."""

    letter_id: int
    run_id: str
    cancel: execution_pb2.CancelReason.ValueType = execution_pb2.CANCEL_REASON_UNSPECIFIED
    answers: agent_service_pb2.ResumeRunRequest | None = None
    user_id: str = ""
    """Who sent it."""
    note: str = ""
    """Of a cancellation: what its caller says of it; empty for nothing."""
    deadline_time_ns: int | None = None
    """Of answers: until when their caller wants the run to have ended; nanoseconds since the epoch."""


class Mailbox(Protocol):
    """Commands to runs, durable until their owner has acted on them. Only an owner appends; everybody else writes."""

    async def post(self, letter: RunCommand) -> int:
        """Stores a command (its letter_id is not read) and gives its id: from now on it survives. Raises Fenced where
        the run has ended, StorageFailed."""
        ...

    async def take(self, run_id: str) -> Sequence[RunCommand]:
        """The commands to a run that wait, in the order they were posted; they stay until they are done."""
        ...

    async def done(self, letter_id: int) -> None:
        """Forgets a command: its events are committed."""
        ...

    def arrivals(self) -> AsyncIterator[str]:
        """The runs that commands are posted to, as they come; a run may be named again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAgents:
    """A tenant's agents at one moment, by name."""

    version: int
    """How often they have been changed; 0 where that was never."""
    agents: Sequence[agent_pb2.Agent] = ()


class CatalogMoved(Exception):
    """The tenant's agents are others by now than the caller judged: read them again and try again."""


class AgentStore(Protocol):
    """Agents by tenant and name. Every change is judged against one version, and refused where that is over."""

    async def version(self, tenant_id: str) -> int:
        """How often a tenant's agents have been changed; asked at every start of a run, so it costs next to nothing."""
        ...

    async def read(self, tenant_id: str) -> StoredAgents:
        """All agents of a tenant."""
        ...

    async def put(self, tenant_id: str, agent: agent_pb2.Agent, *, version: int) -> None:
        """Stores an agent in place of the one of its name; `version` is the one that it was judged against.

        Raises CatalogMoved and StorageFailed.
        """
        ...

    async def remove(self, tenant_id: str, name: str, *, version: int) -> None:
        """Removes an agent; `version` is the one that this was judged against. Raises CatalogMoved, StorageFailed."""
        ...
