"""Ports of the store: event log, run index, sessions, catalog; and the values that create a run or a fork."""

from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bough.v1 import agent_pb2, evaluation_pb2, event_pb2, execution_pb2, message_pb2, run_pb2, session_pb2, usage_pb2
from bough_server.log.blobs import StoredBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller: a user and the tenant that owns everything the call creates.

    Both come from the token, never from a request.
    """

    tenant_id: str
    user_id: str


class LogEvent(NamedTuple):
    """An event to append to a log, or read from one. `data` is its serialized form without run_id and session_id."""

    # A tuple rather than a dataclass: one is built for every event that is written, and for all of a run's at takeover.

    sequence: int
    kind: int
    data: bytes
    event: event_pb2.AgentEvent
    blobs: Sequence[StoredBlob] = ()
    """The files that this event, or one after it in the same append, is the first of its run to refer to."""


class EvaluationLogEvent(NamedTuple):
    """An event of an evaluation, as Record is one of a run. `data` is its serialized form without evaluation_id."""

    # A class besides Record, so that the fold of a run need not ask of each record which of both it is.

    sequence: int
    kind: int
    data: bytes
    event: evaluation_pb2.EvaluationEvent
    blobs: Sequence[StoredBlob] = ()
    """Always empty: evaluations have no files."""


AnyLogEvent = LogEvent | EvaluationLogEvent
"""An event to append; all of one log are of one class."""


class StoredEvent(NamedTuple):
    """A committed event. `data` is its serialized form without the ids of its log.

    These are stamped when it is read: see events.stamp and evaluation_events.stamp.
    """

    # A tuple rather than a dataclass: readers of a long log build a hundred thousand of them at a time.

    sequence: int
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run's row: its principal, its owner, and the resource that clients see."""

    run: run_pb2.Run
    principal: Principal
    epoch: int
    request_digest: str
    owner: str = ""
    """The worker that executed it last; see Lease for whether that worker is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to create, with everything that is written in the transaction of its run_started."""

    run_id: str
    principal: Principal
    session_id: str
    new_session: bool
    session_position: int
    """The session's last position, as run_started names it; SessionMoved is raised if it has changed since."""
    state_json: str = ""
    """The session state, as run_started names it; SessionMoved is raised if it has changed since."""
    create_session: bool = False
    """True to create the session if the tenant has none with this id: at `session_position` 0, with an empty state."""
    request_id: str
    request_digest: str
    create_time_ns: int
    first: LogEvent
    definitions: Mapping[str, agent_pb2.AgentDefinition] = field(default_factory=dict)
    """The definitions that run_started names, by revision; each revision is stored once."""
    owner: str = ""
    """The worker that starts it."""
    queued: LogEvent | None = None
    """The second event, run_queued, if the run waits for its session. Then `session_position` is 0, the state is empty,
    and neither is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFork:
    """A fork to create, with everything that is written in its transaction.

    Its log begins with a byte-for-byte copy of the origin's events up to `origin_sequence`; `log_events` follow them,
    run_forked first. It gets a new session, with the messages that the origin's run could see or had added by then.
    """

    run_id: str
    principal: Principal
    session_id: str
    origin_run_id: str
    origin_sequence: int
    request_id: str
    request_digest: str
    create_time_ns: int
    log_events: Sequence[LogEvent]
    definitions: Mapping[str, agent_pb2.AgentDefinition] = field(default_factory=dict)
    """The definitions that run_forked names, by revision; the fork also keeps those of the origin."""
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvaluation:
    """An evaluation to create, with everything that is written in the transaction of its first events.

    `eval_set_name`, `agent` and `labels` are those of evaluation_planned; a rebuild restores them from it.
    """

    evaluation_id: str
    principal: Principal
    eval_set_name: str
    agent: str
    labels: Mapping[str, str] = field(default_factory=dict)
    request_id: str
    request_digest: str
    create_time_ns: int
    log_events: Sequence[EvaluationLogEvent]
    """evaluation_planned and one case_planned for each case, up to 8 MiB in all."""
    owner: str = ""


class SessionMoved(Exception):
    """The session's messages or state differ from those in the NewRun: read the session again and retry."""


class RunMoved(Exception):
    """A run's log or owner has changed since the caller read it: read the run again and retry."""


class RequestIdTaken(Exception):
    """The user has used this request id before, with content of this digest.

    `run_id` is what it was used for: a run, or an evaluation if one was to be created.
    """

    def __init__(self, run_id: str, request_digest: str) -> None:
        super().__init__(run_id)
        self.run_id, self.request_digest = run_id, request_digest


class EventLog(Protocol):
    """The logs of runs and evaluations: append-only, numbered from 1 without gaps, with any number of readers.

    A `run_id` is the id of the log: a run's, or an evaluation's. The two have disjoint ids and kinds of events.
    """

    async def create(self, new_run: NewRun) -> None:
        """Create a run at epoch 1 in one transaction: its row, request id and first events, and hold its session.

        Raises SessionBusy if the session is held by a run that has not ended or, for a queued run, if no run holds it
        or its queue is full; NotFound if the tenant has no such session; InvalidRequest if its events name a file that
        the session does not have; SessionMoved, RequestIdTaken and StorageFailed.
        """
        ...

    async def fork(self, new_fork: NewFork) -> None:
        """Create a fork at epoch 1 in one transaction: its row, session, messages, and log up to its first own events.

        Usage in the shared beginning is not charged again. Raises NotFound if the tenant has no such origin or the
        origin's log is shorter, InvalidRequest if its own events name a file that the origin's session does not have,
        RequestIdTaken and StorageFailed.
        """
        ...

    async def create_evaluation(self, new_evaluation: NewEvaluation) -> None:
        """Create an evaluation at epoch 1 in one transaction: its row, request id and first events.

        It has no session. Request ids of evaluations and of runs are apart. Raises RequestIdTaken and StorageFailed.
        """
        ...

    def append(self, run_id: str, *, epoch: int, log_events: Sequence[AnyLogEvent]) -> Awaitable[None]:
        """Append to a run's log if the records continue it without a gap and `epoch` is the run's.

        Returns at once; the awaitable is done when the records and everything derived from them are on disk. Appends
        of a run are committed in the order of the calls, each atomically; many runs share a transaction. After a failed
        append every later one of that run under that epoch fails too. Raises Fenced, or StorageFailed after bounded
        retries.
        """
        ...

    def pending_bytes(self) -> int:
        """Return the bytes of all runs' uncommitted events; producers of deltas pause while there are many."""
        ...

    async def take_over(
        self, run_id: str, *, epoch: int, owner: str, log_events: Sequence[AnyLogEvent], log: Sequence[LogEvent] = ()
    ) -> None:
        """Make `owner` the run's owner under `epoch` and append its first records, in one compare-and-set.

        The log must end right before the first record, and the run's epoch must be `epoch` - 1. From then on appends of
        another owner are refused. Without records only owner and epoch change. A caller that has read the whole log
        before the first record, without deltas, passes it as `log`, so that it is not read again; an evaluation's never
        is. Raises RunMoved, Fenced if the run has ended, and StorageFailed.
        """
        ...

    async def read(
        self, run_id: str, *, after: int = 0, through: int | None = None, deltas: bool = True
    ) -> Sequence[StoredEvent]:
        """Return a page of committed events after a sequence: up to 256 events or 1 MiB, at least one if there is one.

        Without deltas, events of events.DELTA_KINDS are left out. A page is a consistent read, without gaps; it is
        empty only if the log has no such event. Raises NotFound if the run has been deleted.
        """
        ...

    def tail(self, run_id: str, *, after: int = 0) -> AsyncIterator[Sequence[StoredEvent]]:
        """Yield pages of committed events after a sequence as they are committed, up to the run's terminal event.

        Works on live and on ended runs, for any number of readers. A slow reader holds up nothing: once it falls behind
        the events in memory it reads from disk. A page is yielded as soon as it has one event.
        """
        ...

    async def last_sequence(self, run_id: str) -> int:
        """Return the last committed sequence. Raises NotFound."""
        ...

    def fail_readers(self, run_id: str, error: Exception, *, epoch: int | None = None) -> None:
        """End every tail of a run with an error once it has read all committed events.

        Tails that start later end the same way, until this process takes the run over or appends to its log, or finds
        that another one has taken it over since `epoch`; default: it does not look for that.
        """
        ...

    def release(self, run_id: str) -> None:
        """Stop to write a log: tails follow what other processes append to it."""
        ...

    def close_readers(self) -> None:
        """End every tail with ServerStopping once it has read all committed events; for a server that stops."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Conditions on the runs to list; an empty field is no condition.

    Times are nanoseconds since the Unix epoch; `create_time_before_ns` is exclusive.
    """

    session_id: str = ""
    agent: str = ""
    states: Sequence[execution_pb2.ExecutionState.ValueType] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    create_time_from_ns: int | None = None
    create_time_before_ns: int | None = None
    evaluation_id: str = ""
    case_id: str = ""
    evaluation_role: int = 0  # an EvaluationRole
    include_evaluation_runs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a list: its size (already bounded) and the opaque token from the page before; default: the first."""

    size: int
    token: str = ""


class RunIndex(Protocol):
    """Rows of runs; EventLog writes them, in the transactions of the events that change them.

    Ids and request ids of evaluations are unknown here.
    """

    async def get(self, principal: Principal, run_id: str) -> RunRow:
        """Return a run of the principal's tenant. Raises NotFound."""
        ...

    async def find(self, run_id: str) -> RunRow | None:
        """Return a run of any tenant, for workers, or None."""
        ...

    async def find_request(self, principal: Principal, request_id: str) -> RunRow | None:
        """Return the run that the principal's user started with a request id, or None."""
        ...

    async def list(self, principal: Principal, run_filter: RunFilter, page: Page) -> tuple[Sequence[run_pb2.Run], str]:
        """Return a page of runs, newest first, and the token of the next page, empty after the last.

        Raises InvalidRequest for a token that is not from this list with these filters.
        """
        ...

    async def holder(self, principal: Principal, session_id: str) -> RunRow | None:
        """Return the run that holds a session of the principal's tenant, or None.

        When a holder ends, the oldest queued run becomes the holder in the same transaction.
        """
        ...

    async def next_expiry(self, *, but: Collection[str] = ()) -> tuple[int, str] | None:
        """Return the earliest expiry of an open request of a run that waits for input, and that run, or None.

        The time is in nanoseconds since the Unix epoch. The runs in `but` are left out.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message of a session, with the run and the agent invocation that it belongs to."""

    message: message_pb2.Message
    run_id: str
    agent: str
    """The agent whose invocation it belongs to; of a SUB_AGENT_USER message, the sub-agent that received it."""
    chain: str
    """Hash of the agents' names from the root to that agent; see projection.agent_chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall(StoredMessage):
    """Calls of linked agents that a model made, or the result of one, which are not in the list of messages.

    The list has the messages that the agents exchanged instead. `message` has the position of the one before it.
    """

    sequence: int
    """Sequence of the event of its run that recorded it."""
    inside: tuple[str, ...] = ()
    """Of a result: ids of the called invocation and of all that were below it."""


class SessionPosition(NamedTuple):
    """The point in a session at which a run starts."""

    position: int
    """Position of the last message; 0 if there is none."""
    state_json: str
    """The session state as a JSON object; empty if it has no values."""


class Sessions(Protocol):
    """Sessions, with their messages and their session state."""

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
        """Create an empty session, or return the one that the same request created before.

        Raises SessionExists if the tenant has a session of this id, RequestIdReused if the user has used the request id
        with another digest, and StorageFailed.
        """
        ...

    async def get(self, principal: Principal, session_id: str) -> session_pb2.Session:
        """Return a session of the principal's tenant. Raises NotFound."""
        ...

    async def list(
        self, principal: Principal, *, labels: Mapping[str, str], page: Page, include_evaluations: bool = False
    ) -> tuple[Sequence[session_pb2.Session], str]:
        """Return a page of the tenant's sessions with these labels, newest first, and the next page's token."""
        ...

    async def set_labels(self, principal: Principal, session_id: str, labels: Mapping[str, str]) -> session_pb2.Session:
        """Replace the labels of a session of the principal's tenant. Raises NotFound."""
        ...

    async def delete(self, principal: Principal, session_id: str) -> None:
        """Delete a session with its runs, logs, messages, and the files that no other session of the tenant refers to.

        Usage entries are kept.

        Raises NotFound, and SessionBusy while a run holds the session.
        """
        ...

    async def read_position(self, principal: Principal, session_id: str) -> SessionPosition:
        """Return the session's last position and its state, in one consistent read. Raises NotFound."""
        ...

    async def update_state(
        self, principal: Principal, session_id: str, changes: Sequence[session_pb2.SessionStateChange]
    ) -> str:
        """Apply all changes to the session state, or none, and return the new state in the form of SessionCut.

        Names and values must have been checked. Raises NotFound, SessionBusy while a run holds the session, and
        InvalidRequest if the state would be too large.
        """
        ...

    async def history(
        self, principal: Principal, session_id: str, *, through: int, since: int = 0
    ) -> Sequence[StoredMessage]:
        """Return the messages from one position to another, both included, and the calls among them as StoredCall.

        They are in order. The messages are one consistent read.
        """
        ...

    async def messages(self, principal: Principal, session_id: str, *, through: int) -> Sequence[StoredMessage]:
        """Return the messages of a session of the principal's tenant up to a position, in order."""
        ...

    async def list_messages(
        self, principal: Principal, session_id: str, page: Page
    ) -> tuple[Sequence[message_pb2.Message], str]:
        """Return a page of messages, newest first, each with the id of the run that recorded it, and the next token.

        Raises NotFound.
        """
        ...


class BlobPiece(NamedTuple):
    """Bytes of a file from some offset on, the size of the whole file, and its media type."""

    data: bytes
    size: int
    media_type: str


class Blobs(Protocol):
    """The files of sessions. EventLog writes them, in the transactions of the events that refer to them."""

    async def read(
        self, principal: Principal, session_id: str, sha256: str, *, offset: int = 0, count: int | None = None
    ) -> BlobPiece:
        """Return up to `count` bytes of a file of a session of the principal's tenant; default: all from `offset` on.

        Raises NotFound, also for a file that only other sessions refer to.
        """
        ...

    async def find_missing(self, principal: Principal, session_id: str, sha256s: Collection[str]) -> Collection[str]:
        """Return those of some hashes under which a session has no file."""
        ...


class Catalog(Protocol):
    """Agent definitions by revision; a revision is kept as long as a run names it."""

    async def get(self, revision: str) -> agent_pb2.AgentDefinition | None:
        """Return the definition with a revision, or None."""
        ...

    async def get_for_tenant(self, tenant_id: str, revision: str) -> agent_pb2.AgentDefinition | None:
        """Return the definition with a revision if a run of the tenant names it, or None; for callers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry:
    """A line of the ledger: the usage of one attempt of a model call."""

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
    """Usage entries: one for each attempt of a model call that reported usage, keyed by the event that holds it."""

    async def list_for_run(self, run_id: str) -> Sequence[UsageEntry]:
        """Return a run's entries, ordered by sequence."""
        ...
