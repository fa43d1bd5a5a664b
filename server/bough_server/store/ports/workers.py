"""Ports for workers: leases, notifications, the mailbox of commands, stored agents; and all that runs need."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bough.v1 import agent_pb2, agent_service_pb2, event_pb2
from bough_server.store.ports.evaluations import EvaluationIndex
from bough_server.store.ports.log import EventLog
from bough_server.store.ports.runs import Catalog, RunIndex, RunRow
from bough_server.store.ports.sessions import Blobs, Sessions


class Lease(Protocol):
    """Leases of workers, and the runs that no live worker owns.

    No clocks are compared: a lease is a counter that its worker increments, so another worker can see that it has
    stopped. A run has no owner if its server accepted it without room for it, or gave it up in order.
    """

    @property
    def is_shared(self) -> bool:
        """Whether several servers may use the store at once; if not, leases need not be renewed."""
        ...

    async def begin(self, worker: str) -> None:
        """Take a lease, for a worker that executes nothing: runs that are still in its name get no owner.

        Raises StorageFailed.
        """
        ...

    async def renew(self, worker: str) -> bool:
        """Increment a worker's counter; return False if others declared it dead, so it has no lease. Raises
        StorageFailed.
        """
        ...

    async def counters(self) -> Mapping[str, int]:
        """Return the counter of every worker with a lease. Raises StorageFailed."""
        ...

    async def expire(self, worker: str, counter: int) -> None:
        """Declare a worker dead and end its lease, unless its counter has changed. Raises StorageFailed."""
        ...

    async def release(self, worker: str) -> None:
        """End a lease: the worker executes no runs any more, and those in its name get no owner."""
        ...

    def has_crashed(self, worker: str) -> bool:
        """True if a worker is known to have crashed, or to have been declared dead, without releasing its lease."""
        ...

    async def give_up(self, worker: str, run_id: str) -> None:
        """Let any server take a run, or an evaluation, that this worker owns but cannot execute. Raises StorageFailed.

        No effect if it has ended or has another owner.
        """
        ...

    async def claim(self, worker: str, *, most: int, but: Collection[str] = ()) -> Sequence[RunRow]:
        """Make a worker the owner of runs that no live worker owns, oldest first, for it to take them over.

        Return up to `most` of them, as they were before, with their former owner; none if the worker has no lease. Runs
        that wait for input need no owner. No two workers claim the same run. Raises StorageFailed.
        """
        ...


class Topic(StrEnum):
    """What a notification is about. Its id is that of a run or an evaluation, empty for UNOWNED and for any of them."""

    LOG = "log"
    """The log has grown."""
    COMMANDS = "commands"
    """A command has been posted."""
    UNOWNED = "unowned"
    """There are runs or evaluations that any server may take."""
    FOLLOWED = "followed"
    """A client follows the run at a server that does not execute it; repeated as long as it does. No id: any run."""


class Notifications(Protocol):
    """Notifications between all servers of a store. They are hints: one may be lost or come twice."""

    @property
    def is_connected(self) -> bool:
        """False while nothing is heard of other servers."""
        ...

    def subscribe(self, topic: Topic, callback: Callable[[str], None]) -> None:
        """Call `callback` on the event loop with the id of each notification of a topic."""
        ...

    def publish(self, topic: Topic, log_id: str = "") -> None:
        """Notify the subscribers of all servers, of this one at once; call it on the event loop, after the commit."""
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

    async def delete_command(self, command_id: int) -> None:
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

    def check_writes(self) -> None:
        """Raise StorageFailed if writes have been waiting too long, so that nothing new waits for reads either."""
        ...

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

    @property
    def notifier(self) -> Notifications:
        """Notifications between servers."""
        ...
