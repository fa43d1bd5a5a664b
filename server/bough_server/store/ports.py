"""Ports of the store: event log, run index, sessions, catalog; and the values that accept a run or a fork."""

from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bough.v1 import agent_pb2, event_pb2, execution_pb2, message_pb2, run_pb2, session_pb2, usage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who calls: the tenant that owns what is made, and its user. Both come from the token, never from a request."""

    tenant_id: str
    user_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event on its way into a log. `data` is its serialized form without run_id and session_id."""

    sequence: int
    kind: int
    data: bytes
    event: event_pb2.AgentEvent


class StoredEvent(NamedTuple):
    """A committed event: what the log keeps. `data` leaves out run_id and session_id (see events.stamp).

    A tuple, because a long log is read a hundred thousand at a time.
    """

    sequence: int
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run's row: its address, its owner and the resource as a client sees it."""

    run: run_pb2.Run
    principal: Principal
    epoch: int
    request_digest: str
    owner: str = ""
    """The worker that has executed it last; whether it still does is the Lease's to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to be accepted, with everything that is written in the one transaction of its run_started."""

    run_id: str
    principal: Principal
    session_id: str
    new_session: bool
    session_cut: int
    """The session's last position that run_started names; refused with SessionMoved where it is another by now."""
    state_json: str = ""
    """The session's state that run_started names; the same holds of it."""
    create_session: bool = False
    """Whether the session is made if the tenant has none of this id; then `session_cut` is 0 and the state is empty."""
    request_id: str
    request_digest: str
    create_time_ns: int
    first: Record
    definitions: Mapping[str, agent_pb2.AgentDefinition] = field(default_factory=dict)
    """The definitions that run_started names, by revision; each revision is kept once."""
    owner: str = ""
    """The worker that executes it from the start."""
    queued: Record | None = None
    """The second event, run_queued, of a run that waits for its session: then `session_cut` is 0, the state is empty,
    and neither is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFork:
    """A fork to be accepted, with everything that is written in its one transaction.

    Its log begins with the origin's events up to `origin_sequence`, byte for byte; `records` are its own first, from
    run_forked. Its session is a new one, with the messages that the origin's run could see or had said by then.
    """

    run_id: str
    principal: Principal
    session_id: str
    origin_run_id: str
    origin_sequence: int
    request_id: str
    request_digest: str
    create_time_ns: int
    records: Sequence[Record]
    definitions: Mapping[str, agent_pb2.AgentDefinition] = field(default_factory=dict)
    """Those that run_forked names, by revision; those of the origin are kept for the fork as well."""
    owner: str = ""


class SessionMoved(Exception):
    """The session has other messages or another state than the NewRun says: read it again and try again."""


class RunMoved(Exception):
    """A run's log or owner is another by now than the caller read: read it again and try again."""


class RequestIdTaken(Exception):
    """The user used this request id before; says for which run and with which content."""

    def __init__(self, run_id: str, request_digest: str) -> None:
        super().__init__(run_id)
        self.run_id, self.request_digest = run_id, request_digest


class EventLog(Protocol):
    """The logs of runs: append-only, numbered from 1 without gaps, read by any number of readers."""

    async def create(self, new_run: NewRun) -> None:
        """Accepts a run at epoch 1: its row, its session (made or held), its request id, its first event; or nothing.

        Raises SessionBusy (the session has a run that has not ended, or, for a queued run, none or too many),
        SessionMoved, RequestIdTaken, NotFound (the session is not the tenant's) and StorageFailed.
        """
        ...

    async def fork(self, new_fork: NewFork) -> None:
        """Accepts a fork at epoch 1: its row, session, messages and log up to its own first events; or nothing.

        Nothing of the shared beginning is charged again. Raises NotFound (the origin is not the tenant's, or its log is
        shorter), RequestIdTaken and StorageFailed.
        """
        ...

    def append(self, run_id: str, *, epoch: int, records: Sequence[Record]) -> Awaitable[None]:
        """Appends to a run's log if its last sequence is the one before the first record's and the epoch is the run's.

        Returns at once; the awaitable is done when the records are on disk with all that is derived from them. Appends
        of one run are committed in the order of the calls, one atomically each; many runs share a transaction. After a
        failed append every later one of that run fails too. Raises Fenced, or StorageFailed after bounded retries.
        """
        ...

    def pending_bytes(self) -> int:
        """Bytes of events of all runs that wait for their commit; producers of deltas wait while it is high."""
        ...

    async def take_over(self, run_id: str, *, epoch: int, owner: str, records: Sequence[Record]) -> None:
        """Makes `owner` the run's owner under an epoch, and appends its first records, in one compare-and-set.

        The log must end before the first record and the run's epoch must be the one before `epoch`. From then on
        another owner's append is refused. Without records, the epoch alone is raised. Raises RunMoved, Fenced where the
        run has ended, and StorageFailed.
        """
        ...

    async def read(
        self, run_id: str, *, after: int = 0, through: int | None = None, deltas: bool = True
    ) -> Sequence[StoredEvent]:
        """A page of committed events after a sequence: up to 256 events or 1 MiB, at least one where there is one.

        Without deltas, events of events.DELTA_KINDS are left out. A page is of one moment and without gaps; it is empty
        only where the log has nothing of what is asked. Raises NotFound where the run has been deleted.
        """
        ...

    def tail(self, run_id: str, *, after: int = 0) -> AsyncIterator[Sequence[StoredEvent]]:
        """Committed events after a sequence, page by page, as they come, until the run's terminal event was given.

        Any number of readers, on live and on ended runs; a slow one costs nothing: it reads the disk behind a bounded
        window. A page never waits for more events than there are.
        """
        ...

    async def last_sequence(self, run_id: str) -> int:
        """The last committed sequence."""
        ...

    def hold_up(self, run_id: str, error: Exception) -> None:
        """Ends every tail of a run with an error, after what is committed, until its log grows or is taken over."""
        ...

    def dismiss(self) -> None:
        """Ends every tail with ServerStopping, after what is committed: the server stops."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs to list; what is empty filters nothing. Times are nanoseconds since the epoch, the end exclusive."""

    session_id: str = ""
    agent: str = ""
    states: Sequence[execution_pb2.ExecutionState.ValueType] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    create_time_from_ns: int | None = None
    create_time_before_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which page of a list: its size (already bounded) and the opaque token of the page before, empty for the first."""

    size: int
    token: str = ""


class RunIndex(Protocol):
    """Runs as rows: written in the transactions of their events, by the log."""

    async def get(self, principal: Principal, run_id: str) -> RunRecord:
        """One run of the principal's tenant. Raises NotFound."""
        ...

    async def find(self, run_id: str) -> RunRecord | None:
        """A run of any tenant, for whoever executes it; None where there is none."""
        ...

    async def find_request(self, principal: Principal, request_id: str) -> RunRecord | None:
        """The run that the principal's user started with a request id, or None."""
        ...

    async def list(self, principal: Principal, run_filter: RunFilter, page: Page) -> tuple[Sequence[run_pb2.Run], str]:
        """A page of runs, the newest first, and the next page's token. Raises InvalidRequest for a foreign token."""
        ...

    async def open_runs(self) -> Sequence[RunRecord]:
        """Every run of every tenant that has not ended, the oldest first, those that wait for input among them."""
        ...

    async def holder(self, principal: Principal, session_id: str) -> RunRecord | None:
        """The run that holds a session of the principal's tenant; None where none does.

        Of queued runs the oldest comes to hold it as soon as the holder has ended.
        """
        ...

    async def next_expiry(self, *, but: Collection[str] = ()) -> tuple[int, str] | None:
        """When the first open request of a run that waits for input expires, in nanoseconds since the epoch, and the
        run, `but` these runs; None where none ever does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A session's message, with whose invocation it is of."""

    message: message_pb2.Message
    run_id: str
    agent: str
    """The agent whose invocation the message is of: of a SUB_AGENT_USER message, the sub-agent that was told."""
    chain: str
    """Hash of the names from the root to that agent; see history."""


class SessionCut(NamedTuple):
    """Where a session stands: what a run that begins now finds."""

    position: int
    """Of its last message; 0 for none."""
    state_json: str
    """The values that its runs share, as one JSON object; empty for none."""


class Sessions(Protocol):
    """Conversations, their messages and the values that their runs share."""

    async def create(
        self,
        principal: Principal,
        *,
        session_id: str,
        labels: Mapping[str, str],
        now_ns: int,
        request_id: str = "",
        request_digest: str = "",
    ) -> session_pb2.Session:
        """Make an empty session, or return the one that the same request made before.

        Raises SessionExists if the tenant has a session of this id, RequestIdReused if the user has used the request id
        with another digest, and StorageFailed.
        """
        ...

    async def get(self, principal: Principal, session_id: str) -> session_pb2.Session:
        """One session of the principal's tenant. Raises NotFound."""
        ...

    async def list(
        self, principal: Principal, *, labels: Mapping[str, str], page: Page
    ) -> tuple[Sequence[session_pb2.Session], str]:
        """A page of sessions, the newest first."""
        ...

    async def set_labels(self, principal: Principal, session_id: str, labels: Mapping[str, str]) -> session_pb2.Session:
        """Replace the labels of a session of the principal's tenant. Raises NotFound."""
        ...

    async def delete(self, principal: Principal, session_id: str) -> None:
        """Deletes a session with its runs, logs and messages; usage entries stay. Raises NotFound, SessionBusy."""
        ...

    async def cut(self, principal: Principal, session_id: str) -> SessionCut:
        """Where the session stands, of one moment. Raises NotFound."""
        ...

    async def update_state(
        self, principal: Principal, session_id: str, changes: Sequence[session_pb2.SessionStateChange]
    ) -> str:
        """Changes the values that runs share, all or none of them, and gives the state as SessionCut has it.

        The names and values are checked already. Raises NotFound, SessionBusy while a run holds the session, and
        InvalidRequest where the state would be too large.
        """
        ...

    async def messages(self, principal: Principal, session_id: str, *, through: int) -> Sequence[StoredMessage]:
        """All messages of a session of the principal's tenant up to a position, in order."""
        ...

    async def list_messages(
        self, principal: Principal, session_id: str, page: Page
    ) -> tuple[Sequence[message_pb2.Message], str]:
        """A page of messages, newest first, each with the run_id of the run that recorded it."""
        ...


class Catalog(Protocol):
    """Definitions by revision, as long as a run names them."""

    async def get(self, revision: str) -> agent_pb2.AgentDefinition | None:
        """The definition of a revision, or None."""
        ...

    async def get_of(self, tenant_id: str, revision: str) -> agent_pb2.AgentDefinition | None:
        """The same for who asks as a caller: None too where no run of the tenant names it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry:
    """One line of the ledger: what one attempt of a model call used."""

    run_id: str
    sequence: int
    tenant_id: str
    user_id: str
    session_id: str
    agent: str
    invocation_id: str
    model: str
    time_ns: int
    usage: usage_pb2.Usage


class UsageLedger(Protocol):
    """Usage entries: one for each attempt of a model call that reported usage, keyed by the event that carries it."""

    async def of_run(self, run_id: str) -> Sequence[UsageEntry]:
        """A run's entries, by sequence."""
        ...
