"""Port of the store for logs of events, and the values that create a run, a fork or an evaluation."""

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bough.v1 import agent_pb2, evaluation_pb2, event_pb2, tool_pb2
from bough_server.identity import Principal
from bough_server.log.blobs import StoredBlob
from bough_server.quotas import Quota


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
    definitions: Mapping[str, agent_pb2.AgentDefinition | tool_pb2.ToolInfo] = field(default_factory=dict)
    """The definitions, and the tools of tool servers, that run_started names, by revision; each is stored once."""
    owner: str = ""
    """The worker that starts it."""
    queued: LogEvent | None = None
    """The second event, run_queued, if the run waits for its session. Then `session_position` is 0, the state is empty,
    and neither is checked."""
    quotas: Sequence[Quota] = ()
    """The quotas on runs that have to allow it."""


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
    quotas: Sequence[Quota] = ()
    """The quotas on runs that have to allow it."""


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
    """The user has used this request id before, with content of this digest. `run_id` is the id of the run that it
    created, or of the evaluation if the request was to create one.
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
        that another one has taken it over since `epoch`; default: it does not check that.
        """
        ...

    def release(self, run_id: str) -> None:
        """Stop to write a log: tails follow what other processes append to it."""
        ...

    def close_readers(self) -> None:
        """End every tail with ServerStopping once it has read all committed events; for a server that stops."""
        ...
